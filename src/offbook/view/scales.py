"""The arithmetic of a chart: ticks, thinning, smoothing, and labels that do not overlap."""

from __future__ import annotations

import math

Points = list[tuple[float, float]]


def max_points(num_runs: int) -> int:
    """How many points a line gets: fewer when many lines share the page."""
    return max(60, 480 // max(2, num_runs))


def nice_ticks(low: float, high: float, count: int = 4, whole: bool = False) -> list[float]:
    """Round numbers that span [low, high]: the first is not above `low`, the last not below `high`."""
    if high - low <= max(1e-12, 1e-9 * abs(low)):  # a flat line: room above and below
        room = 0.5 * abs(low) if abs(low) > 1e-9 else 0.5
        low, high = low - room, high + room
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min(factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def step_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round steps inside [low, high]."""
    return [tick for tick in nice_ticks(low, high, count, whole=True) if low <= tick <= high] or [low]


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


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart, in the same order, inside [low, high] while they fit."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = list(wanted)
    floor = low
    for index in order:
        placed[index] = floor = max(wanted[index], floor)
        floor += gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed
