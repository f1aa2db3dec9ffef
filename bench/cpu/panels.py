"""Figures of results: panels side by side, a line per arm."""

from __future__ import annotations

from collections.abc import Sequence

from offbook.evals.figure import Panel, drawn
from offbook.view.scales import Points, smooth

Lines = dict[str, Points]  # by name


def figure(panels: dict[str, Lines], percent: tuple[str, ...] = ()) -> str:
    """An SVG file. `percent` names panels of shares."""
    smoothed = {
        title: {name: smooth(points) for name, points in lines.items() if points} for title, lines in panels.items()
    }
    return drawn([Panel(title, lines, percent=title in percent) for title, lines in smoothed.items()])


def mean_curve(runs: Sequence[Points]) -> Points:
    """The mean of several runs by step."""
    values: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run:
            values.setdefault(step, []).append(value)
    return [(step, sum(at) / len(at)) for step, at in sorted(values.items())]
