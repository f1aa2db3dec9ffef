"""Line charts as standalone SVG files: panels side by side, a line per name, its name at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain

from offbook.evals.metrics import Row
from offbook.view.scales import Points, smooth, thin

WIDTH, HEIGHT = 360, 208  # of a panel
LEFT, TOP, RIGHT, BOTTOM = 38, 10, 110, 30  # margins; names stand in the right one
HEAD = 34  # above all panels
COLOURS = ("#0067a3", "#c75400", "#00805c", "#b0558a", "#3a94c9", "#8a7500")
STYLE = (
    "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    ".title{font-size:13px;fill:#222}.name{font-weight:600}.faint{fill:none;stroke-width:1;opacity:.35}"
)
MAX_POINTS = 200


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: dict[str, Points]
    across: str = "step"  # label of the horizontal axis
    percent: bool = False
    faint: dict[str, list[Points]] = field(default_factory=dict)  # thin lines in the colour of that name


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
    return Panel(f"{title}: solved within so many tokens", lines, "tokens", percent=True)


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
    return drawn([Panel(title, {arm: points for arm, points in lines.items() if points}, percent=percent, faint=faint)])


def mean_curve(runs: Sequence[Points]) -> Points:
    values: dict[float, list[float]] = {}
    for run in runs:
        for step, value in run:
            values.setdefault(step, []).append(value)
    return [(step, sum(at) / len(at)) for step, at in sorted(values.items())]


def drawn(panels: Sequence[Panel], colours: Sequence[str] = COLOURS, one_scale: bool = False) -> str:
    """`one_scale` gives all panels the same axes."""
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    colour_of = {name: colours[number % len(colours)] for number, name in enumerate(names)}
    points_of = [list(chain.from_iterable(panel.lines.values())) for panel in panels]
    if one_scale:
        points_of = [list(chain.from_iterable(points_of))] * len(panels)
    groups = "".join(
        f'<g transform="translate({place * WIDTH} {HEAD})">{_panel(panel, points, colour_of)}</g>'
        for place, (panel, points) in enumerate(zip(panels, points_of, strict=True))
    )
    width, height = len(panels) * WIDTH, HEIGHT + HEAD
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{groups}</svg>\n'


def _panel(panel: Panel, points: Points, colour_of: Mapping[str, str]) -> str:
    """`points` are those that the axes span."""
    parts = [f'<text x="{LEFT}" y="-10" class="title">{escape(panel.title)}</text>']
    if not points:
        return f'{parts[0]}<text x="{LEFT}" y="{HEIGHT / 2}">nothing to draw</text>'
    steps, values = zip(*points, strict=True)
    first, last, end = min(steps), max(steps), WIDTH - RIGHT
    ticks = nice_ticks(0.0, max(*values, 0.01)) if panel.percent else nice_ticks(min(values), max(values))

    def x_of(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (end - LEFT), 1)

    def y_of(value: float) -> float:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    def path(line: Points, look: str, name: str) -> str:
        through = "L".join(f"{x_of(step)},{y_of(value)}" for step, value in line)
        return f'<path d="M{through}" class="{look}" stroke="{colour_of[name]}"/>'

    for tick in ticks:
        y = y_of(tick)
        large = f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:g}"
        shown = f"{100 * tick:g}%" if panel.percent else large
        parts.append(f'<line x1="{LEFT}" x2="{end}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 3.5}" text-anchor="end">{shown}</text>')
    below = HEIGHT - BOTTOM + 17
    for tick in [tick for tick in nice_ticks(first, last, 5, whole=True) if first <= tick <= last] or [first]:
        parts.append(f'<text x="{x_of(tick)}" y="{below}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{end + 13}" y="{below}">{panel.across}</text>')
    parts += [path(run, "faint", name) for name, runs in panel.faint.items() for run in runs]
    ends = spread([y_of(line[-1][1]) for line in panel.lines.values()], 13, TOP, HEIGHT - BOTTOM)
    for (name, line), y in zip(panel.lines.items(), ends, strict=True):
        parts.append(path(line, "line", name))
        shown = escape(name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}")
        style = f'class="name" style="fill:{colour_of[name]}"'
        parts.append(f'<text x="{end + 8}" y="{y + 4}" {style}>{shown}</text>')
    return "".join(parts)


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
    """Positions near the wanted ones with distance `gap`, in the same order, inside [low, high] while they fit."""
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
