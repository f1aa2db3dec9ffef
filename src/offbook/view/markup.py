"""HTML by small functions. Every plain string is escaped; only what these functions made passes through as it is.

Text from rollouts is untrusted: control characters and the marks that reorder text on screen are made visible too.
"""

from __future__ import annotations

import html

_UNSEEN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_REORDERING = {code: f"[U+{code:04X}]" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_VISIBLE = {**_UNSEEN, **_REORDERING, 0x7F: "␡"}


MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


class Html(str):
    """Markup that may stand in the page as it is."""

    __slots__ = ()


def escape(text: str) -> Html:
    seen = text.replace("\r\n", "\n").translate(_VISIBLE)
    return Html(html.escape(seen.encode("utf-8", "replace").decode("utf-8")))


def join(parts: list[Html]) -> Html:
    return Html("".join(parts))


def tag(name: str, *children: str, **attributes: str | float | bool | None) -> Html:
    """`tag("p", "5 < 6", class_="note")`. Underscores become hyphens, a trailing one goes, and so do None and False."""
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        written += f" {label}" if value is True else f' {label}="{escape(_text(value))}"'
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{name}{written}>{inner}</{name}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: float) -> str:
    """A figure with the digits that matter: 1,204 or 31.2 or 0.90 or 0.042."""
    size = abs(value)
    if size >= 1000 or value == round(value):
        return f"{value:,.0f}".replace("-", MINUS)
    digits = 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:.{digits}f}".replace("-", MINUS)


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
