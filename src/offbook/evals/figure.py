"""Figures as SVG files that stand alone: lines in panels side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

from offbook.evals.metrics import Row
from offbook.view.scales import Points, smooth, thin

WIDTH, HEIGHT = 360, 208
LEFT, TOP, BOTTOM = 38, 10, 30
NAMESPACE = "http://www.w3.org/2000/svg"
MINUS = "\N{MINUS SIGN}"
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
    return svg_file(STYLE, [_panel(panel, colours) for panel in panels], HEAD, HEIGHT + HEAD)


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


def tag(name: str, *children: Element | str, **attributes: str | float) -> Element:
    """`tag("text", "5 < 6", class_="name")`. Underscores become hyphens, and a trailing one goes."""
    element = Element(name)
    for key, value in attributes.items():
        written = f"{value:.4g}" if isinstance(value, float) else str(value)
        element.set(key.rstrip("_").replace("_", "-"), written)
    for child in children:
        if isinstance(child, str):
            element.text = child
        else:
            element.append(child)
    return element


def svg_file(style: str, panels: Sequence[Sequence[Element]], head: int, height: int) -> str:
    """A file that stands alone, with panels side by side; `head` is the room above them."""
    groups = [tag("g", *parts, transform=f"translate({place * WIDTH} {head})") for place, parts in enumerate(panels)]
    width = len(panels) * WIDTH
    size: dict[str, str | float] = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return tostring(tag("svg", tag("style", style), *groups, xmlns=NAMESPACE, **size), encoding="unicode") + "\n"


class Frame:
    """Axes: where a step and a value lie, and the grid behind the lines. `right` is the room for the lines' names."""

    def __init__(self, steps: list[float], low: float, high: float, percent: bool, right: int):
        self.ticks = nice_ticks(low, high)
        self.low, self.high = self.ticks[0], self.ticks[-1]
        self.first, self.last = min(steps), max(steps)
        self.percent = percent
        self.end = WIDTH - right

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(LEFT + share * (self.end - LEFT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(step)},{self.y(value)}" for step, value in points)

    def tick_text(self, tick: float) -> str:
        if self.percent:
            return f"{100 * tick:g}%"
        return f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:g}".replace("-", MINUS)

    def grid(self, across: str = "step") -> list[Element]:
        """`across` is what the horizontal axis counts, always in whole numbers."""
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(tag("line", x1=LEFT, x2=self.end, y1=y, y2=y, class_="grid"))
            parts.append(tag("text", self.tick_text(tick), x=LEFT - 7, y=y + 3.5, text_anchor="end"))
        inside = [t for t in nice_ticks(self.first, self.last, 5, whole=True) if self.first <= t <= self.last]
        for tick in inside or [self.first]:
            parts.append(tag("text", f"{tick:g}", x=self.x(tick), y=HEIGHT - BOTTOM + 17, text_anchor="middle"))
        return [*parts, tag("text", across, x=self.end + 13, y=HEIGHT - BOTTOM + 17)]


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
