"""Figures of results: panels side by side, a line per arm, each with its name at its end."""

from __future__ import annotations

from offbook.evals.figure import Panel, drawn, mean_curve
from offbook.view.scales import Points, smooth

__all__ = ["Lines", "figure", "mean_curve"]

# dark enough on white
COLOURS = (
    *("#6a6a6a", "#c2410c", "#0369a1", "#7c3aed", "#15803d", "#a37c00"),
    *("#be185d", "#111111", "#0f766e", "#1d4ed8", "#92400e"),
)
Lines = dict[str, Points]  # by name


def figure(panels: dict[str, Lines], percent: tuple[str, ...] = (), one_scale: bool = False) -> str:
    """An SVG file. `percent` names panels of shares; `one_scale` gives all panels the same axis."""
    smoothed = {
        title: {name: smooth(points) for name, points in lines.items() if points} for title, lines in panels.items()
    }
    made = [Panel(title, lines, percent=title in percent) for title, lines in smoothed.items()]
    return drawn(made, COLOURS, one_scale)
