"""One figure a comparison, as an SVG file that stands alone: lines in panels side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from offbook.evals.metrics import Row
from offbook.evals.svg import BOTTOM, HEIGHT, LEFT, TOP, Frame, figure, spread, tag
from offbook.view.scales import Points, smooth, thin

COLOURS = ("#0067a3", "#c75400", "#00805c", "#b0558a", "#3a94c9", "#8a7500")
STYLE = (
    "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    ".title{font-size:13px;fill:#222}.name{font-weight:600}.faint{fill:none;stroke-width:1;opacity:.35}"
)
RIGHT, HEAD = 110, 34
MAX_POINTS = 200


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    across: str  # what the horizontal axis counts
    lines: dict[str, Points]
    faint: dict[str, list[Points]]  # drawn thin in the colour of the line of the same name
    percent: bool = False


def effort_figure(rows_of: Mapping[str, Sequence[Row]]) -> str:
    """Solved against tokens spent: the share solved within so many sampled tokens, one panel per difficulty."""
    rows = [row for each in rows_of.values() for row in each]
    most = max((row.numbers["tokens"] for row in rows), default=1.0)
    buckets = sorted({row.difficulty for row in rows})
    panels = [_effort_panel("all tasks", rows_of, most)]
    for bucket in buckets if len(buckets) > 1 else []:
        inside = {name: [row for row in each if row.difficulty == bucket] for name, each in rows_of.items()}
        panels.append(_effort_panel(f"{bucket} tasks", inside, most))
    return drawn(panels)


def _effort_panel(title: str, rows_of: Mapping[str, Sequence[Row]], most: float) -> Panel:
    lines = {name: solved_within(rows, most) for name, rows in rows_of.items() if rows}
    return Panel(f"{title}: solved within so many tokens", "tokens", lines, {}, percent=True)


def solved_within(rows: Sequence[Row], most: float) -> Points:
    """A staircase: at each number of tokens, the share of all rollouts that were solved with no more than that."""
    spent = sorted(row.numbers["tokens"] for row in rows if row.numbers["solved"] >= 1)
    points: Points = [(0.0, 0.0)]
    for number, tokens in enumerate(spent, 1):
        points += [(tokens, points[-1][1]), (tokens, number / len(rows))]
    return [*points, (most, points[-1][1])]


def training_figure(curves: Mapping[str, Sequence[Points]], title: str, percent: bool) -> str:
    """The mean of each arm's runs by step, and the runs themselves, thin."""
    lines = {arm: smooth(thin(mean_curve(runs), MAX_POINTS)) for arm, runs in curves.items()}
    faint = {
        arm: [smooth(thin(run, MAX_POINTS)) for run in runs if run] for arm, runs in curves.items() if len(runs) > 1
    }
    return drawn([Panel(title, "step", {arm: points for arm, points in lines.items() if points}, faint, percent)])


def mean_curve(runs: Sequence[Points]) -> Points:
    values: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run:
            values.setdefault(step, []).append(value)
    return [(step, sum(at) / len(at)) for step, at in sorted(values.items())]


def drawn(panels: Sequence[Panel]) -> str:
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    return figure(STYLE, [_panel(panel, colours) for panel in panels], HEAD, HEIGHT + HEAD)


def _panel(panel: Panel, colours: Mapping[str, str]) -> list[Element]:
    title = tag("text", panel.title, x=LEFT, y=-10, class_="title")
    every = [point for points in panel.lines.values() for point in points]
    if not every:
        return [title, tag("text", "nothing to draw", x=LEFT, y=HEIGHT / 2)]
    values = [value for _, value in every]
    low, high = (0.0, max(*values, 0.01)) if panel.percent else (min(values), max(values))
    frame = Frame([step for step, _ in every], low, high, panel.percent, right=RIGHT)
    parts = [title, *frame.grid(panel.across)]
    for name, runs in panel.faint.items():
        parts += [tag("path", d=frame.path(run), class_="faint", stroke=colours[name]) for run in runs]
    ends = spread([frame.y(points[-1][1]) for points in panel.lines.values()], 13, TOP, HEIGHT - BOTTOM)
    for (name, points), y in zip(panel.lines.items(), ends, strict=True):
        parts.append(tag("path", d=frame.path(points), class_="line", stroke=colours[name]))
        shown = name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"
        parts.append(tag("text", shown, x=frame.end + 8, y=y + 4, class_="name", style=f"fill:{colours[name]}"))
    return parts
