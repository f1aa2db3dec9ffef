"""The call dialects by name: how a model writes a tool call into its message, and how it is read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offbook.agent.chat import bash, hermes, xml
from offbook.agent.chat.strict import CALL_END, CALL_START, Tools
from offbook.types import OffbookError, ToolCall


@dataclass(frozen=True, slots=True)
class Dialect:
    """`parse` takes a message's text, the tools with their schemas, and whether the header opened the thinking."""

    name: str
    parse: Callable[[str, Tools, bool], tuple[ToolCall, ...]]
    render: Callable[[str, dict[str, Any]], str]
    marks: tuple[str, ...] = (CALL_START, CALL_END)  # what an attempt begins with

    def write(self, call: ToolCall) -> str:
        """One that this dialect has no way to write is hermes'."""
        try:
            return self.render(call.name, call.arguments)
        except (ValueError, KeyError):
            return hermes.render(call.name, call.arguments)


def spoken(text: str, calls: Sequence[str]) -> str:
    """A message's text: its words, then its calls, each on a line of its own."""
    return "\n".join(filter(None, (text, *calls)))


HERMES = Dialect("hermes", hermes.parse, hermes.render)
XML = Dialect("xml", xml.parse, xml.render)
BASH = Dialect("bash", bash.parse, bash.render, (bash.FENCE,))


def dialect_named(name: str) -> Dialect:
    for dialect in (HERMES, XML, BASH):
        if dialect.name == name:
            return dialect
    raise OffbookError(f"there is no call dialect {name}; the dialects are hermes, xml and bash")
