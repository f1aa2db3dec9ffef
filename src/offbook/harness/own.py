"""A user's own tools: functions of a box and annotated parameters, from the files of `tools.files`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from offbook.harness.tool import Kind, Parameter, Tool, Workbench
from offbook.harness.tools import BASH, TOOLS
from offbook.harness.wordings import WORDINGS
from offbook.plugins import functions_in, said
from offbook.types import OffbookError

KINDS: dict[type, Kind] = {str: "string", int: "integer", float: "number", bool: "boolean"}
TAKEN = {BASH.name, *TOOLS, *(name for wording in WORDINGS.values() for name in wording.names)}


def own_tools(files: Sequence[str]) -> dict[str, Tool]:
    """Every public function of the files as a tool. Whatever is wrong with one is said before the first rollout."""
    own: dict[str, Tool] = {}
    for file in files:
        for name, function in functions_in(Path(file), "tools.files").items():
            if name in own or name in TAKEN:
                raise OffbookError(f"there are two tools called {name}; give the one in {file} another name")
            own[name] = _tool(name, function, file)
    return own


def _tool(name: str, function: Callable[..., Any], file: str) -> Tool:
    where = f"the tool {name} of {file}"
    description = inspect.getdoc(function)
    if not description:
        raise OffbookError(f"{where} needs a docstring: it is what the agent is told of it")
    given = list(inspect.signature(function).parameters.values())
    if not given:
        raise OffbookError(f"{where} needs a first parameter, which is the box")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # the border to a user's code
        raise OffbookError(f"the annotations of {where} cannot be read: {said(error)}") from error

    async def run(bench: Workbench, **arguments: Any) -> str:
        if inspect.iscoroutinefunction(function):
            answer = await function(bench.box, **arguments)
        else:  # other rollouts do not wait for it
            answer = await asyncio.to_thread(function, bench.box, **arguments)
        if not isinstance(answer, str):
            raise TypeError(f"{where} gave {answer!r}, which is no text")
        return answer

    parameters = {parameter.name: _parameter(parameter, hints.get(parameter.name), where) for parameter in given[1:]}
    # It may change what other tools see, so none runs beside it.
    return Tool(name, " ".join(description.split()), parameters, run, alone=True)


def _parameter(parameter: inspect.Parameter, hint: Any, where: str) -> Parameter:
    """`Annotated[str, "words"]` describes it; one with a default may be left out."""
    words = ""
    if get_origin(hint) is Annotated:
        hint, words, *_ = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = kinds[0] if len(kinds) == 1 else None
    named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    if hint not in KINDS or not named or not isinstance(words, str):
        raise OffbookError(f"{parameter.name} of {where} must be annotated as str, int, float or bool")
    return Parameter(KINDS[hint], words, required=parameter.default is parameter.empty)
