"""The signature view: a target's tokens, coloured by how far the hint moved the model at each of them.

Under every token stand two bars: the probability that the model alone gave it (student) and the probability that the
same model gave it after reading the hint (teacher).
"""

from __future__ import annotations

import math
import re

from offbook.types import Feedback
from offbook.view.markup import Html, escape, join, number, plural, tag

MOVED = 0.1  # from this change of probability on, the figures are printed under the token
SPACES = re.compile(r"[ \t\n]+")
MARKS = str.maketrans({" ": "·", "\t": "⇥", "\n": "⏎"})


def is_scored(feedback: Feedback) -> bool:
    """Whether every token has both probabilities and a divergence."""
    count = len(feedback.pieces)
    return count > 0 and len(feedback.student) == len(feedback.teacher) == len(feedback.divergence) == count


def probability(logprob: float) -> float:
    return math.exp(min(0.0, logprob))


def heat(divergence: float, scale: float) -> float:
    """0 to 1. The square root keeps small shifts visible beside one large one."""
    return math.sqrt(min(1.0, max(0.0, divergence) / scale)) if scale > 0 else 0.0


def percent(share: float) -> str:
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{100 * share:.0f}%"


def glyphs(piece: str) -> Html:
    """The token as text, with whitespace visible but faint."""
    if not piece:
        return tag("b", "◌", class_="ws")
    parts, last = [], 0
    for match in SPACES.finditer(piece):
        parts += [escape(piece[last : match.start()]), tag("b", match.group().translate(MARKS), class_="ws")]
        last = match.end()
    return join([*parts, escape(piece[last:])])


def strip(feedback: Feedback, scale: float, max_tokens: int) -> Html:
    """The tokens in order. A message longer than `max_tokens` is shown around its greatest divergence."""
    count = len(feedback.pieces)
    first = min(max(0, peak_index(feedback) - max_tokens // 2), max(0, count - max_tokens))
    last = min(count, first + max_tokens)
    parts = [_token(feedback, index, scale) for index in range(first, last)]
    if first:
        parts.insert(0, tag("span", f"{plural(first, 'token')} before …", class_="left-out"))
    if last < count:
        parts.append(tag("span", f"… {plural(count - last, 'token')} after", class_="left-out"))
    readout = tag("p", title(feedback, peak_index(feedback)), class_="readout", aria_live="polite")
    label = "Tokens of the target message; the arrow keys move between them"
    return join([tag("div", *parts, class_="strip", tabindex=0, role="group", aria_label=label), readout])


def peak_index(feedback: Feedback) -> int:
    return max(range(len(feedback.divergence)), key=feedback.divergence.__getitem__)


def title(feedback: Feedback, index: int) -> str:
    student, teacher = probability(feedback.student[index]), probability(feedback.teacher[index])
    return (
        f"{feedback.pieces[index].translate(MARKS) or '◌'}   student {100 * student:.2f}%   "
        f"teacher {100 * teacher:.2f}%   divergence {feedback.divergence[index]:.4f}"
    )


def _token(feedback: Feedback, index: int, scale: float) -> Html:
    piece = feedback.pieces[index]
    student, teacher = probability(feedback.student[index]), probability(feedback.teacher[index])
    moved = abs(student - teacher) >= MOVED
    shades = {"d": heat(feedback.divergence[index], scale), "s": student, "t": teacher}
    token = tag(
        "span",
        tag("span", glyphs(piece), class_="glyph"),
        tag("i"),
        *([tag("small", f"{percent(student)}→{percent(teacher)}")] if moved else []),
        class_="tok moved" if moved else "tok",
        style=";".join(f"--{name}:{value:.3g}" for name, value in shades.items()),
        title=title(feedback, index),
    )
    return join([token, Html("<br>")]) if piece.endswith("\n") else token


def effect(feedback: Feedback) -> str:
    """One sentence: what the hint did to the whole message."""
    nats = sum(feedback.student) - sum(feedback.teacher)
    if abs(nats) < 0.05:
        return "With the hint in view, the same model is as likely to write this message."
    ratio = float(f"{math.exp(min(abs(nats), 14.0)):.2g}")
    times = "over a million times" if ratio > 1e6 else f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
    direction = "less" if nats > 0 else "more"
    return f"With the hint in view, the same model is {times} {direction} likely to write this message."


def headline(feedback: Feedback) -> Html:
    """The stretch of tokens that the hint moved most, and its probability without and with the hint."""
    first = last = peak_index(feedback)
    enough = feedback.divergence[first] / 2
    while first > 0 and feedback.divergence[first - 1] >= enough > 0:
        first -= 1
    while last + 1 < len(feedback.pieces) and feedback.divergence[last + 1] >= enough > 0:
        last += 1
    student, teacher = (probability(sum(side[first : last + 1])) for side in (feedback.student, feedback.teacher))
    piece = "".join(feedback.pieces[first : last + 1]).strip(" ")
    return join(
        [
            tag("code", glyphs(piece if len(piece) <= 24 else piece[:23] + "…")),
            tag("span", f"{percent(student)} → {percent(teacher)}", class_="shift"),
        ]
    )


def key(scale: float) -> Html:
    """How to read the colours and the bars."""
    values = [0.0, scale / 16, scale / 4, scale] if scale > 0 else []
    shades = [tag("span", number(value), class_="shade", style=f"--d:{heat(value, scale):.3g}") for value in values]
    return tag(
        "ul",
        tag("li", tag("i", class_="swatch student"), "student: the model alone"),
        tag("li", tag("i", class_="swatch teacher"), "teacher: the same model with the hint"),
        *([tag("li", tag("span", *shades, class_="shades"), "divergence over the whole vocabulary")] if shades else []),
        class_="legend",
    )
