"""Figures of results: panels side by side, a line per arm."""

from __future__ import annotations

from offbook.evals.figure import Panel, drawn, mean_curve
from offbook.view.scales import Points, smooth

__all__ = ["Lines", "figure", "mean_curve"]

Lines = dict[str, Points]  # by name


def figure(panels: dict[str, Lines], percent: tuple[str, ...] = ()) -> str:
    """An SVG file. `percent` names panels of shares."""
    smoothed = {
        title: {name: smooth(points) for name, points in lines.items() if points} for title, lines in panels.items()
    }
    return drawn([Panel(title, lines, percent=title in percent) for title, lines in smoothed.items()])
