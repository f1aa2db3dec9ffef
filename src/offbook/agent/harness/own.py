"""A user's own tools: functions of a sandbox and annotated parameters, from the files of `tools.files`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbook.agent.harness.tool import Tool, Workbench, tool_of
from offbook.agent.harness.tools import BASH, TOOLS
from offbook.agent.harness.toolsets import WORDINGS
from offbook.core.plugins import functions_in, said
from offbook.types import OffbookError

TAKEN = {BASH.name, *TOOLS, *(name for wording in WORDINGS.values() for name in wording["names"])}


def own_tools(files: Sequence[str]) -> dict[str, Tool]:
    """Every public function of the files as a tool. A bad one raises before the first rollout."""
    own: dict[str, Tool] = {}
    for file in files:
        for name, function in functions_in(Path(file), "tools.files", "tools", {*own, *TAKEN}).items():
            own[name] = _tool(name, function, f"the tool {name} of {file}")
    return own


def _tool(name: str, function: Callable[..., Any], where: str) -> Tool:
    if not inspect.signature(function).parameters:
        raise OffbookError(f"{where} needs a first parameter, which is the sandbox")

    async def run(bench: Workbench, **arguments: Any) -> str:
        if inspect.iscoroutinefunction(function):
            answer = await function(bench.sandbox, **arguments)
        else:  # in a thread, so other rollouts do not wait
            answer = await asyncio.to_thread(function, bench.sandbox, **arguments)
        if not isinstance(answer, str):
            raise TypeError(f"{where} gave {answer!r}, which is no text")
        return answer

    try:
        tool = tool_of(function, alone=True)  # it may change what other tools see
    except ValueError as error:
        raise OffbookError(f"{where} {error}") from None
    except Exception as error:  # the border to a user's code
        raise OffbookError(f"the annotations of {where} cannot be read: {said(error)}") from error
    return replace(tool, name=name, own_name=name, function=run)
