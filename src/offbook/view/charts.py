"""Curves as inline SVG, drawn here: one panel a metric, one line a run.

Colours live in style.css as `.run-N` and `.rule-N`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from offbook.view.load import Run, is_number, series
from offbook.view.markup import MINUS, Html, join, number, tag
from offbook.view.scales import Points, max_points, nice_ticks, smooth, spread, step_ticks, thin

WIDTH, HEIGHT = 360, 208
LEFT, RIGHT, TOP, BOTTOM = 38, 70, 10, 30
NUM_COLOURS = 6  # as many as style.css has; more runs start over with another dash


@dataclass(frozen=True, slots=True)
class Panel:
    key: str
    label: str
    better: Literal["higher", "lower"] | None = None
    percent: bool = False
    from_zero: bool = False


PANELS = (
    Panel("solved", "Solved in training", "higher", percent=True, from_zero=True),
    Panel("invalid_per_100", "Invalid calls per 100", "lower", from_zero=True),
    Panel("reward", "Reward", "higher"),
    Panel("turns", "Turns per rollout"),
    Panel("hint/kl", "Divergence from teacher", "lower", from_zero=True),
    Panel("hinted_targets", "Messages hinted", from_zero=True),
)
RULE_PREFIX = "targets/"
PART_PREFIX = "reward/"


def part_names(rows: list[dict[str, Any]]) -> list[str]:
    """The parts of the reward that these numbers know beside the outcome, which is shown as `solved`."""
    names = dict.fromkeys(key.removeprefix(PART_PREFIX) for row in rows for key in row if key.startswith(PART_PREFIX))
    return [name for name in names if name != "outcome"]


def part_panels(runs: list[Run]) -> list[Panel]:
    """A panel for each part of the reward, before its weight."""
    names = part_names([row for run in runs for row in run.rows])
    return [Panel(PART_PREFIX + name, f"Reward part: {name.replace('_', ' ')}", "higher") for name in names]


class Frame:
    """Axes: where a step and a value lie, and the grid behind the lines."""

    def __init__(self, steps: list[float], low: float, high: float, percent: bool = False, right: int = RIGHT):
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

    def grid(self) -> Html:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(tag("line", x1=LEFT, x2=self.end, y1=y, y2=y, class_="grid" if tick else "grid zero"))
            parts.append(tag("text", self.tick_text(tick), x=LEFT - 7, y=y + 3.5, class_="tick", text_anchor="end"))
        for step in step_ticks(self.first, self.last):
            x = self.x(step)
            parts.append(
                tag("text", f"{step:g}", x=x, y=HEIGHT - BOTTOM + 17, class_="tick", text_anchor="middle"),
            )
        parts.append(tag("text", "step", x=self.end + 13, y=HEIGHT - BOTTOM + 17, class_="tick"))
        return join(parts)


def value_text(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}%" if percent else number(value)


def run_class(index: int) -> str:
    dash = f" dash-{index // NUM_COLOURS % 3}" if index >= NUM_COLOURS else ""
    return f"run-{index % NUM_COLOURS}{dash}"


def legend(runs: list[Run]) -> Html:
    entries = [
        tag("li", tag("span", class_=f"swatch {run_class(index)}"), tag("span", run.name))
        for index, run in enumerate(runs)
    ]
    return tag("ul", *entries, class_="legend", aria_label="Runs")


def line_panel(panel: Panel, runs: list[Run]) -> Html | None:
    """The panel, or None where no run has this metric."""
    raw = {index: thin(series(run, panel.key), max_points(len(runs))) for index, run in enumerate(runs)}
    raw = {index: points for index, points in raw.items() if points}
    if not raw:
        return None
    values = [value for points in raw.values() for _, value in points]
    low, high = min(values), max(values)
    frame = Frame([step for points in raw.values() for step, _ in points], *_span(panel, low, high), panel.percent)
    lines, ends = [], []
    for index, points in raw.items():
        smoothed = smooth(points)
        group = [tag("path", d=frame.path(smoothed), class_="line")]
        if smoothed != points:
            group.insert(0, tag("path", d=frame.path(points), class_="raw"))
        group.append(tag("circle", cx=frame.x(smoothed[-1][0]), cy=frame.y(smoothed[-1][1]), r=2.6, class_="end"))
        lines.append(tag("g", *group, class_=run_class(index)))
        ends.append(frame.y(smoothed[-1][1]))
    labels = [
        tag("text", _short(runs[index].name), x=frame.end + 8, y=y + 3.8, class_=f"name {run_class(index)}")
        for index, y in zip(raw, spread(ends, 13, TOP, HEIGHT - BOTTOM - 4), strict=True)
    ]
    skipped = sum(1 for run in runs for row in run.rows if panel.key in row and not is_number(row[panel.key]))
    return _figure(
        panel.label,
        f"{panel.better} is better" if panel.better else "",
        join([frame.grid(), *lines, *labels]),
        frame,
        [run.name for run in runs],
        [f"run-{index % NUM_COLOURS}" for index in range(len(runs))],
        {index: [(step, value_text(value, panel.percent)) for step, value in points] for index, points in raw.items()},
        f"{skipped} values that are not finite numbers are not drawn" if skipped else "",
    )


def _span(panel: Panel, low: float, high: float) -> tuple[float, float]:
    if not panel.from_zero:
        return low, high
    low = min(0.0, low)
    return low, high if high > low else low + 1.0


def _short(name: str) -> str:
    """Room for about ten characters; the end of a name tells runs apart more often than its middle."""
    return name if len(name) <= 10 else f"{name[:3]}…{name[-6:]}"


def _figure(
    label: str,
    aside: str,
    drawing: Html,
    frame: Frame,
    names: list[str],
    classes: list[str],
    texts: dict[int, list[tuple[float, str]]],
    note: str,
) -> Html:
    """`texts` holds, per line, the value to show at each step; app.js reads them from the data attributes."""
    steps: dict[float, list[tuple[int, str]]] = {}
    for index, readings in texts.items():
        for step, text in readings:
            steps.setdefault(step, []).append((index, text))
    hover = [[frame.x(step), f"step {step:g}", steps[step]] for step in sorted(steps)]
    spoken = "; ".join(f"{names[index]}: {readings[0][1]} to {readings[-1][1]}" for index, readings in texts.items())
    svg = tag(
        "svg",
        drawing,
        tag("line", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, class_="cross"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex=0,
        aria_label=f"{label} by step. {spoken}",
        data_hover=json.dumps(hover, separators=(",", ":")),
        data_names=json.dumps(names),
        data_classes=json.dumps(classes),
    )
    caption = tag("figcaption", tag("strong", label), tag("span", aside))
    notes = [tag("p", note, class_="skipped")] if note else []
    return tag("figure", caption, svg, *notes, class_="panel")


def rule_totals(run: Run) -> dict[str, float]:
    """Targets by rule over the whole run."""
    rules = {key for row in run.rows for key in row if key.startswith(RULE_PREFIX)}
    return {key.removeprefix(RULE_PREFIX): sum(value for _, value in series(run, key)) for key in rules}


def rule_panel(run: Run, rules: list[str]) -> Html:
    """Stacked bars: how many messages broke each rule and got a hint, step by step."""
    steps = sorted({row["step"] for row in run.rows})
    counts = {rule: dict(series(run, RULE_PREFIX + rule)) for rule in rules}
    stacks = {rule: thin([(step, counts[rule].get(step, 0.0)) for step in steps], 120) for rule in rules}
    columns = [step for step, _ in stacks[rules[0]]]
    highest = max(sum(stacks[rule][column][1] for rule in rules) for column in range(len(columns)))
    pitch = (columns[-1] - columns[0]) / (len(columns) - 1) if len(columns) > 1 else 1.0
    edges = [columns[0] - pitch / 2, columns[-1] + pitch / 2]
    frame = Frame(edges, 0.0, highest or 1.0, right=42)
    width = min(14.0, 0.82 * (frame.end - LEFT) / len(columns))
    tops = [0.0] * len(columns)
    bars = []
    for index, rule in enumerate(rules):
        boxes = ""
        for column, (step, value) in enumerate(stacks[rule]):
            if value > 0:
                left, top = frame.x(step) - width / 2, frame.y(tops[column] + value)
                boxes += f"M{left:.1f},{frame.y(tops[column])}V{top}h{width:.1f}V{frame.y(tops[column])}z"
                tops[column] += value
        bars.append(tag("path", d=boxes, class_=f"bar rule-{index % NUM_COLOURS}" + (" parted" if width > 6 else "")))
    return _figure(
        "Hints by rule",
        run.name,
        join([frame.grid(), *bars]),
        frame,
        rules,
        [f"rule-{index % NUM_COLOURS}" for index in range(len(rules))],
        {index: [(step, number(value)) for step, value in stacks[rule]] for index, rule in enumerate(rules)},
        "",
    )
