"""Figures of results: panels side by side, a line per arm, each with its name at its end."""

from __future__ import annotations

from statistics import mean
from xml.etree.ElementTree import Element

from offbook.evals.figure import BOTTOM, HEIGHT, LEFT, TOP, Frame, spread, svg_file, tag
from offbook.view.scales import Points, smooth

# dark enough on white
COLOURS = (
    *("#6a6a6a", "#c2410c", "#0369a1", "#7c3aed", "#15803d", "#a37c00"),
    *("#be185d", "#111111", "#0f766e", "#1d4ed8", "#92400e"),
)
RIGHT = 110  # for the names
STYLE = (
    "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    ".name{font-weight:600}.title{font-size:13px;fill:#222}"
)
Lines = dict[str, Points]  # by name


def figure(panels: dict[str, Lines], percent: tuple[str, ...] = (), one_scale: bool = False) -> str:
    """An SVG file. `percent` names panels of shares; `one_scale` gives all panels the same axis."""
    every = [point for lines in panels.values() for points in lines.values() for point in points]
    drawn = []
    for title, lines in panels.items():
        shown = every if one_scale else [point for points in lines.values() for point in points]
        values = [value for _, value in shown]
        frame = Frame([step for step, _ in every], min(values), max(values), title in percent, RIGHT)
        drawn.append([*frame.grid(), tag("text", title, x=LEFT, y=-8, class_="title"), *_lines(frame, lines)])
    return svg_file(STYLE, drawn, TOP + 14, HEIGHT + TOP + BOTTOM)


def _lines(frame: Frame, lines: Lines) -> list[Element]:
    smoothed = {name: smooth(points) for name, points in lines.items()}
    ends = spread([frame.y(points[-1][1]) for points in smoothed.values()], 13, TOP, HEIGHT - BOTTOM)
    drawn = []
    for number, ((name, points), y) in enumerate(zip(smoothed.items(), ends, strict=True)):
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(tag("path", d=frame.path(points), class_="line", style=f"stroke:{colour}"))
        drawn.append(tag("text", name, x=frame.end + 8, y=y + 4, class_="name", style=f"fill:{colour}"))
    return drawn


def mean_curve(curves: list[Points]) -> Points:
    """The mean of the seeds that have a step."""
    steps = sorted({step for points in curves for step, _ in points})
    return [(step, mean(dict(points)[step] for points in curves if step in dict(points))) for step in steps]
