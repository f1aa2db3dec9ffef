"""The tools. Each is a function of the workbench and its own parameters that returns the text the agent reads.

The docstrings and the texts in the annotations are shown to the agent. What goes wrong is raised (ToolFailed,
PathRefused, OSError) and becomes an answer in the agent loop.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import Annotated, TypedDict

from offbook.agent.chat import SUBMIT
from offbook.agent.harness.editing import apply_edits
from offbook.agent.harness.matching import lines_of
from offbook.agent.harness.search import search
from offbook.agent.harness.tool import TodoItem, ToolFailed, Workbench, tool_of
from offbook.sandbox.sandbox import ExecResult

RepositoryPath = Annotated[str, "relative to the repository"]
OUTPUT_CHARS = 8000
BASH_CHARS = 10_000
SEARCH_S = 10.0


class Edit(TypedDict):
    old: str
    new: str


async def read_file(
    bench: Workbench,
    path: RepositoryPath,
    start: Annotated[int | None, "first line of the range, from 1"] = None,
    end: Annotated[int | None, "last line of the range, inclusive"] = None,
) -> str:
    """Read a text file, all of it or a range of lines. Lines are given as they are, without numbers."""
    # Without a range, exactly the text. No numbers, because what is read is copied into edits.
    text = await bench.sandbox.read(path)
    ranged = start is not None or end is not None
    if not ranged and len(text) <= OUTPUT_CHARS:
        return text
    lines = lines_of(text)
    first, last = 1 if start is None else start, len(lines) if end is None else min(end, len(lines))
    if first < 1:
        raise ToolFailed("lines count from 1")
    if end is not None and end < first:
        raise ToolFailed(f"line {end} comes before line {first}")
    if first > len(lines):
        raise ToolFailed(f"{path} has only {len(lines)} lines")
    shown, room = first - 1, OUTPUT_CHARS
    while shown < last and len(lines[shown]) < room:
        room -= len(lines[shown]) + 1
        shown += 1
    body = "".join(line + "\n" for line in lines[first - 1 : shown])
    if shown == len(lines) and not text.endswith("\n"):
        body = body[:-1]
    header = f"[lines {first}-{max(first, shown)} of {len(lines)}]\n" if ranged else ""
    if shown == last:
        return header + body
    if shown < first:  # not even one line fits
        long, more = lines[first - 1], f", read on from line {first + 1}" if first < last else ""
        left_out = len(long) - OUTPUT_CHARS
        return f"{header}{long[:OUTPUT_CHARS]}\n[cut: line {first} goes on for {left_out} characters{more}]"
    return f"{header}{body}[cut: {last - shown} lines are left, read on from line {shown + 1}]"


async def edit_file(
    bench: Workbench,
    path: RepositoryPath,
    old: Annotated[str, "the exact text to replace; empty to create a file"],
    new: Annotated[str, "what to put there"],
    edits: Annotated[list[Edit] | None, "further replacements in the same file, made in order: all or none"] = None,
) -> str:
    """Replace text in a file. The text to replace must occur exactly once, spaces and line breaks included. A file that
    does not exist is created when the text to replace is empty."""
    further = [(edit["old"], edit["new"]) for edit in edits or ()]
    try:
        text = await bench.sandbox.read(path)
    except FileNotFoundError:
        if old:
            raise
        text = None
    # In a thread, because looking for the nearest lines of a long file takes a while.
    changed = await asyncio.to_thread(apply_edits, path, text or "", [(old, new), *further])
    await bench.sandbox.write(path, changed)
    return f"{'created' if text is None else 'edited'} {path}"


async def run_command(
    bench: Workbench,
    command: Annotated[str, "the command line"],
    timeout: Annotated[int | None, "seconds it may take"] = None,
) -> str:
    """Run a shell command in the repository and read what it prints. Every command has a shell of its own; what it
    starts in the background ends with it."""
    return _answer(*await _execute(bench, command, timeout), OUTPUT_CHARS // 2)


async def run_tests(
    bench: Workbench, path: Annotated[str, "a test file or test id; all tests when left out"] = ""
) -> str:
    """Run the repository's tests and read the end of what they print."""
    if not bench.test_command:
        raise ToolFailed("this task offers no tests to run")
    command = f"{bench.test_command} {shlex.quote(path)}" if path else bench.test_command
    return _answer(*await _execute(bench, command, None), 0)  # a failing test is an answer and no failure of the tool


async def bash(bench: Workbench, command: Annotated[str, "the command"]) -> str:
    """Run a bash command in the repository."""
    # run_command as mini-swe-agent shows it, so that what was learned there holds here.
    result, problem = await _execute(bench, f"bash -c {shlex.quote(command)}", None)
    exception = f"<exception>{problem}</exception>\n" if problem else ""
    code = f"<returncode>{-1 if problem else result.exit_code}</returncode>\n"
    if len(result.output) < BASH_CHARS:
        return f"{exception}{code}<output>\n{result.output}</output>"
    half, left_out = BASH_CHARS // 2, len(result.output) - BASH_CHARS
    return (
        f"{exception}{code}<warning>Too much output; ask for less of it, or write it to a file and search there."
        f"</warning>\n<output_head>\n{result.output[:half]}\n</output_head>\n<elided_chars>\n{left_out} characters "
        f"elided\n</elided_chars>\n<output_tail>\n{result.output[-half:]}\n</output_tail>"
    )


def submitted(answer: str) -> bool:
    """Whether this answer of `bash` ends the task: the command went well and its first line says so."""
    before, _, output = answer.partition("<output>\n")
    if not before:
        return False
    return before == "<returncode>0</returncode>\n" and output.lstrip().partition("\n")[0].strip() == SUBMIT


async def _execute(bench: Workbench, command: str, timeout: int | None) -> tuple[ExecResult, str]:
    """How it ended, and which limit ended it, if one did."""
    if "\0" in command:
        raise ToolFailed("a command cannot hold a null character")
    if timeout is not None and timeout < 1:
        raise ToolFailed("the time for a command must be at least 1 second")
    limit_s = bench.limits.command_s if timeout is None else float(min(timeout, bench.limits.command_s))
    result = await bench.sandbox.exec(command, limit_s)
    if result.opened is not None:
        bench.opened.append(result.opened)
    if result.timed_out:
        bench.timeouts += 1
        return result, f"stopped after {limit_s:g} s"
    return result, f"ended by the limit on {result.exhausted}" if result.exhausted else ""


def _answer(result: ExecResult, problem: str, head: int) -> str:
    """Of a long output the first `head` characters and the last ones."""
    output, left_out = result.output, len(result.output) - OUTPUT_CHARS
    if left_out > 0:
        gap = f"[{left_out} characters left out]\n"
        output = f"{output[:head]}\n{gap}" if head else gap
        output += result.output[head + left_out :]
    if problem:
        raise ToolFailed(f"{problem}\n{output}")
    return (output or "no output") if result.exit_code == 0 else f"exit {result.exit_code}\n{output}"


async def search_codebase(
    bench: Workbench,
    pattern: Annotated[str, "a regular expression"],
    path: Annotated[str, "folder or file, relative to the repository; all of it when left out"] = ".",
) -> str:
    """Search the text of all files, line by line, with a Python regular expression. Version control folders are
    left out."""
    return await search(bench.sandbox, pattern, path, min(SEARCH_S, bench.limits.command_s))


async def list_dir(bench: Workbench, path: RepositoryPath) -> str:
    """List a folder. Names of folders end with a slash."""
    names = await bench.sandbox.list(path)
    listing = "\n".join(names)
    if len(listing) <= OUTPUT_CHARS:
        return listing or "empty"
    shown = listing[:OUTPUT_CHARS].rpartition("\n")[0]
    return f"{shown}\n[{len(names) - shown.count(chr(10)) - 1} more names]"


async def todo(bench: Workbench, items: Annotated[list[TodoItem], "all items, with a status each"]) -> str:
    """Write down the plan as a list of items. Each call replaces the whole list."""
    for number, item in enumerate(items, 1):
        if not item["text"].strip():
            raise ToolFailed(f"item {number} says nothing")
    bench.todos[:] = [{"text": " ".join(item["text"].split()), "status": item["status"]} for item in items]
    return bench.todo_text() or "the list is empty"


async def finish(bench: Workbench, message: Annotated[str, "a closing word for the user"] = "") -> str:
    """End the task. Nothing can be done after it."""
    return "done"


BASH = tool_of(bash)
TOOLS = {
    function.__name__: tool_of(function, alone=function is edit_file)
    for function in (read_file, edit_file, run_command, search_codebase, list_dir, run_tests, todo, finish)
}
