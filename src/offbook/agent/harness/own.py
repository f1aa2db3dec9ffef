"""Tools beyond those of a task: the user's own, from the files of `tools.files`, and `find_code`.

A tool of one's own is a function of a sandbox and annotated parameters.
"""

from __future__ import annotations

import asyncio
import inspect
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from offbook.agent.harness.index import Chunk, CodeIndex, embedder_of
from offbook.agent.harness.tool import Tool, ToolFailed, Workbench, tool_of
from offbook.agent.harness.tools import BASH, TOOLS, RepositoryPath, texts_of
from offbook.agent.harness.toolsets import WORDINGS
from offbook.core.config import ToolsConfig
from offbook.core.config.tree import cache_folder
from offbook.core.plugins import functions_in, said
from offbook.types import OffbookError

FIND_CODE = "find_code"
FOUND = 10  # passages of an answer
TITLE_CHARS = 120
TAKEN = {BASH.name, *TOOLS, *(name for wording in WORDINGS.values() for name in wording["names"])}


def more_tools(config: ToolsConfig) -> dict[str, Tool]:
    """The user's tools, and `find_code` where it is added."""
    tools = own_tools(config.files)
    if FIND_CODE in config.add and FIND_CODE not in tools:
        load = embedder_of(config.embeddings, config.embeddings_model)
        tools[FIND_CODE] = find_code_tool(CodeIndex(load, cache_folder() / "embeddings.sqlite"))
    return tools


def find_code_tool(index: CodeIndex) -> Tool:
    async def find_code(
        bench: Workbench, question: Annotated[str, "what the code does, in words"], path: RepositoryPath = "."
    ) -> str:
        """Find code by what it does: the functions and passages of the repository that fit a question best."""
        texts, _ = await texts_of(bench.sandbox, posixpath.normpath(path))
        search = asyncio.create_task(asyncio.to_thread(index.find, texts, question, FOUND))
        try:
            found = await asyncio.wait_for(asyncio.shield(search), bench.limits.command_s)
        except TimeoutError:  # the thread goes on, so a later call finds more of the index
            left = index.due - index.done
            raise ToolFailed(f"the index is still being made, {left} passages are left; search for words now") from None
        except OffbookError as error:
            raise ToolFailed(str(error)) from error
        places = [f"{chunk.path}:{chunk.first}-{chunk.last}: {_title(chunk)}" for chunk in found]
        return "\n".join(places) or "there is nothing to search"

    return tool_of(find_code)


def _title(chunk: Chunk) -> str:
    """Its first line that says something."""
    lines = [line.strip() for line in chunk.text.splitlines() if line.strip() and not line.lstrip().startswith("@")]
    line = lines[0][:TITLE_CHARS] if lines else ""
    return line if "." not in chunk.name else f"{chunk.name.rpartition('.')[0]}: {line}"


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
        tool = tool_of(function)
    except ValueError as error:
        raise OffbookError(f"{where} {error}") from None
    except Exception as error:  # the border to a user's code
        raise OffbookError(f"the annotations of {where} cannot be read: {said(error)}") from error
    return replace(tool, name=name, own_name=name, function=run)
