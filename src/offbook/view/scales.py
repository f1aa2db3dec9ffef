"""Long curves made short: thinning and smoothing."""

from __future__ import annotations

import math

Points = list[tuple[float, float]]


def thin(points: Points, limit: int) -> Points:
    """A long series as means of neighbours."""
    if len(points) <= limit:
        return points
    thinned = []
    for index in range(limit):
        share = points[len(points) * index // limit : len(points) * (index + 1) // limit]
        thinned.append((share[len(share) // 2][0], sum(value for _, value in share) / len(share)))
    return thinned


def smooth(points: Points) -> Points:
    """A centred Gaussian mean whose width grows with the length of the series: it does not lag as an EMA does."""
    if len(points) < 6:
        return points
    width = max(1.0, len(points) / 16)
    smoothed = []
    for index, (step, _) in enumerate(points):
        near = range(max(0, int(index - 3 * width)), min(len(points), int(index + 3 * width) + 1))
        weights = [math.exp(-0.5 * ((index - other) / width) ** 2) for other in near]
        mean = sum(weight * points[other][1] for weight, other in zip(weights, near, strict=True)) / sum(weights)
        smoothed.append((step, mean))
    return smoothed
