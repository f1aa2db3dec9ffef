"""What a figure file is drawn with: SVG elements by small functions, and the axes of a panel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, tostring

from offbook.view.scales import Points

WIDTH, HEIGHT = 360, 208
LEFT, TOP, BOTTOM = 38, 10, 30
NAMESPACE = "http://www.w3.org/2000/svg"
MINUS = "\N{MINUS SIGN}"


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


def figure(style: str, panels: Sequence[Sequence[Element]], head: int, height: int) -> str:
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
