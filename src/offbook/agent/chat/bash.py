"""The bash-only profile, compatible with mini-swe-agent's text mode: the one fenced command of a message is a call.

    ```bash
    the command
    ```

The fence is named bash (as in its version 1) or mswea_bash_command (2); ToolCall("bash", {"command": ..}) is also what
version 2 makes of a native call. What is read here as a call, it reads as the same command, surrounding white space
aside. It is stricter where a reader must guess: a fence in the middle of a line, after the command, or inside the
command. It differs in one thing: a message without a block is an answer here and a mistake there.

The agent submits by a command that succeeds and whose output's first line is SUBMIT; that is for a harness to see.
"""

from __future__ import annotations

import re
from typing import Any

from offbook.agent.chat.strict import Tools, malformed
from offbook.core.thoughts import answer_start
from offbook.types import ToolCall

FENCE = "```"
NAME = "bash"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
OPENING = re.compile(r"```(?:bash|mswea_bash_command)(?![\w-])([^\n]*)")


def render(name: str, arguments: dict[str, Any]) -> str:
    """A command with a line that begins with a fence cannot be written."""
    command = arguments["command"]
    if name != NAME or set(arguments) != {"command"} or not command.strip() or f"\n{FENCE}" in f"\n{command}":
        raise ValueError("this dialect writes bash commands and nothing else, and none with a fence inside")
    return f"{FENCE}{NAME}\n{command}\n{FENCE}"


def parse(text: str, tools: Tools = (), thinking: bool = False) -> tuple[ToolCall, ...]:
    """No call, one call, or one malformed call."""
    openings = list(OPENING.finditer(text, answer_start(text, thinking)))
    if not openings:
        return ()
    first = openings[0]
    problem = _opening_problem(text, openings)
    body = first.end() + 1  # behind the newline
    end = text.find(f"\n{FENCE}", body - 1)
    if problem is None and (first.end() == len(text) or end < 0):
        problem = f"the command block is not closed: end it with a line {FENCE}"
    if problem is None:
        problem = _closing_problem(text[end + 1 + len(FENCE) :])
    command = text[body : max(body, end)]
    if problem is None and not command.strip():
        problem = "the command is empty"
    return (
        malformed(NAME, problem, first.start())
        if problem
        else ToolCall(NAME, {"command": command}, start=first.start()),
    )


def _opening_problem(text: str, openings: list[re.Match[str]]) -> str | None:
    if len(openings) > 1:
        return f"{len(openings)} command blocks: write exactly one"
    (opening,) = openings
    if opening.start() and text[opening.start() - 1] != "\n":
        return f"{FENCE}{NAME} must stand at the beginning of a line"
    if opening.group(1).strip():
        return f"nothing may follow {FENCE}{NAME} on its line"
    return None


def _closing_problem(rest: str) -> str | None:
    """`rest` is what follows the fence that ends the command. Another fence means that this one may not be the end."""
    line, _, below = rest.partition("\n")
    if line.strip() or f"\n{FENCE}" in f"\n{below}":
        return f"the command must be the last block, and no line of it may begin with {FENCE}"
    return None
