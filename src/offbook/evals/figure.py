"""Line charts as standalone SVG files: panels side by side, a line per name, with a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from offbook.evals.metrics import Row
from offbook.view.scales import Points

WIDTH = 360  # of a panel
HEIGHT = 240
LEFT = 48
TOP = 32
RIGHT = 110  # for the legend
BOTTOM = 32
COLOURS = ("#0067a3", "#c75400", "#00805c", "#b0558a", "#3a94c9", "#8a7500", "#6a6a6a", "#7c3aed", "#111111", "#be185d")
STYLE = "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}.title{font-size:13px}"
NUM_TICKS = 5


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, Points]
    across: str = "step"  # label of the horizontal axis
    percent: bool = False


def effort_figure(rows_of: Mapping[str, Sequence[Row]]) -> str:
    """Solved against tokens spent: the share of rollouts solved within so many sampled tokens."""
    most = max((row.numbers["tokens"] for rows in rows_of.values() for row in rows), default=1.0)
    lines = {name: solved_within(rows, most) for name, rows in rows_of.items() if rows}
    return drawn([Panel("solved within so many tokens", lines, "tokens", percent=True)])


def solved_within(rows: Sequence[Row], most: float) -> Points:
    """A staircase: at each number of tokens, the share of all rollouts that were solved with no more than that."""
    spent = sorted(row.numbers["tokens"] for row in rows if row.numbers["solved"] >= 1)
    points: Points = [(0.0, 0.0)]
    for number, tokens in enumerate(spent, 1):
        points += [(tokens, points[-1][1]), (tokens, number / len(rows))]
    return [*points, (most, points[-1][1])]


def drawn(panels: Sequence[Panel]) -> str:
    groups = [
        f'<g transform="translate({number * WIDTH} 0)">{_panel(panel)}</g>' for number, panel in enumerate(panels)
    ]
    size = f'width="{len(panels) * WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(groups)}</svg>\n'


def _panel(panel: Panel) -> str:
    parts = [f'<text x="{LEFT}" y="16" class="title">{escape(panel.title)}</text>']
    points = np.array([point for line in panel.lines.values() for point in line])
    if not len(points):
        return f'{parts[0]}<text x="{LEFT}" y="{TOP}">nothing to draw</text>'
    first, low = points.min(axis=0)
    last, high = points.max(axis=0)
    low = 0.0 if panel.percent else low
    right = WIDTH - RIGHT

    def x_of(step: float) -> float:
        return round(LEFT + (step - first) / ((last - first) or 1.0) * (right - LEFT), 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM), 1)

    for value in np.linspace(low, high or 1.0, NUM_TICKS):
        shown = f"{100 * value:.0f}%" if panel.percent else f"{value:.4g}"
        y = y_of(value)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{shown}</text>')
    for step in np.linspace(first, last, NUM_TICKS):
        parts.append(f'<text x="{x_of(step)}" y="{HEIGHT - 16}" text-anchor="middle">{step:.4g}</text>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 3}" text-anchor="end">{escape(panel.across)}</text>')
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{x_of(step)},{y_of(value)}" for step, value in line)
        parts.append(f'<path d="M{path}" class="line" stroke="{colour}"/>')
        place = f'x="{right + 8}" y="{TOP + 4 + 14 * number}"'
        parts.append(f'<text {place} style="fill:{colour}">{escape(name)}</text>')
    return "".join(parts)
