"""The tools. A tool gets checked arguments and a box, and returns the text that the agent reads."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from offbook.sandbox import Box
from offbook.types import Limits

OUTPUT_CHARS = 8000


class ToolFailed(Exception):
    """The call was well formed and the tool could not do it; the message is for the agent."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: dict[str, type]
    run: Callable[[Box, Limits, dict[str, Any]], Awaitable[str]]

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"

    def check(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments, strictly: every parameter, no other, each of its type."""
        for name, kind in self.parameters.items():
            if name not in arguments:
                return f"{self.name} needs {name}"
            if type(arguments[name]) is not kind:
                return f"{name} must be {kind.__name__}"
        for name in arguments:
            if name not in self.parameters:
                return f"{self.name} takes no {name}"
        return None


async def _read_file(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    return _cut(box.read(arguments["path"]))


async def _edit_file(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    path, old, new = arguments["path"], arguments["old"], arguments["new"]
    text = box.read(path)
    count = text.count(old) if old else 0
    if count != 1:
        raise ToolFailed(f"old must occur once in {path}, it occurs {count} times")
    box.write(path, text.replace(old, new))
    return f"edited {path}"


async def _run_command(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    result = await box.exec(arguments["command"], limits.command_s)
    if result.timed_out:
        raise ToolFailed(f"stopped after {limits.command_s:g} s\n{_cut(result.output)}")
    output = _cut(result.output)
    return output if result.exit_code == 0 else f"exit {result.exit_code}\n{output}"


async def _search(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    try:
        pattern = re.compile(arguments["pattern"])
    except re.error as error:
        raise ToolFailed(f"not a regular expression: {error}") from None
    found = []
    for path in box.files():
        lines = box.read(path).splitlines()
        found += [f"{path}:{number}: {line}" for number, line in enumerate(lines, 1) if pattern.search(line)]
    return _cut("\n".join(found) or "no match")


async def _list_dir(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    return _cut("\n".join(box.list(arguments["path"])) or "empty")


async def _finish(box: Box, limits: Limits, arguments: dict[str, Any]) -> str:
    return "done"


def _cut(text: str) -> str:
    return text if len(text) <= OUTPUT_CHARS else f"{text[:OUTPUT_CHARS]}\n[{len(text) - OUTPUT_CHARS} more characters]"


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("read_file", {"path": str}, _read_file),
        Tool("edit_file", {"path": str, "old": str, "new": str}, _edit_file),
        Tool("run_command", {"command": str}, _run_command),
        Tool("search", {"pattern": str}, _search),
        Tool("list_dir", {"path": str}, _list_dir),
        Tool("finish", {}, _finish),
    )
}
