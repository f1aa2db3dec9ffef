"""The tools. Each is a function of the workbench and its own parameters that returns the text the agent reads.

What goes wrong is raised (ToolFailed, PathRefused, OSError) and becomes an answer in the agent loop.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import cast

from offbook.harness.editing import apply_edits
from offbook.harness.matching import lines_of
from offbook.harness.search import search
from offbook.harness.tool import Parameter, Status, Todo, Tool, ToolFailed, Workbench
from offbook.sandbox.box import ExecResult
from offbook.tokens import SUBMIT

__all__ = ["BASH", "TOOLS", "Parameter", "Todo", "Tool", "ToolFailed", "Workbench", "submitted"]

OUTPUT_CHARS = 8000
BASH_CHARS = 10_000
SEARCH_S = 10.0


async def read_file(bench: Workbench, path: str, start: int | None = None, end: int | None = None) -> str:
    """Without a range, exactly the text. Lines carry no numbers, because what is read is copied into edits."""
    text = await bench.box.read(path)
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


async def edit_file(bench: Workbench, path: str, old: str, new: str, edits: list[dict[str, str]] | None = None) -> str:
    """All of the replacements or none, in order."""
    further = [(edit["old"], edit["new"]) for edit in edits or ()]
    try:
        text = await bench.box.read(path)
    except FileNotFoundError:
        if old:
            raise
        text = None
    # In a thread, because looking for the nearest lines of a long file takes a while.
    changed = await asyncio.to_thread(apply_edits, path, text or "", [(old, new), *further])
    await bench.box.write(path, changed)
    return f"{'created' if text is None else 'edited'} {path}"


async def run_command(bench: Workbench, command: str, timeout: int | None = None) -> str:
    result, limit_s = await _execute(bench, command, timeout)
    problem = _problem(result, limit_s)
    output = cut_middle(result.output, OUTPUT_CHARS)
    if problem:
        raise ToolFailed(f"{problem}\n{output}")
    return _with_exit(result, output)


async def run_tests(bench: Workbench, path: str = "") -> str:
    """The end of the output is what matters; a failing test is an answer and no failure of the tool."""
    if not bench.test_command:
        raise ToolFailed("this task offers no tests to run")
    command = f"{bench.test_command} {shlex.quote(path)}" if path else bench.test_command
    result, limit_s = await _execute(bench, command, None)
    problem = _problem(result, limit_s)
    left_out = len(result.output) - OUTPUT_CHARS
    output = f"[{left_out} characters left out]\n{result.output[left_out:]}" if left_out > 0 else result.output
    if problem:
        raise ToolFailed(f"{problem}\n{output}")
    return _with_exit(result, output)


async def bash(bench: Workbench, command: str) -> str:
    """run_command as mini-swe-agent shows it, so that what was learned there holds here."""
    result, limit_s = await _execute(bench, f"bash -c {shlex.quote(command)}", None)
    problem = _problem(result, limit_s)
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


async def _execute(bench: Workbench, command: str, timeout: int | None) -> tuple[ExecResult, float]:
    if "\0" in command:
        raise ToolFailed("a command cannot hold a null character")
    if timeout is not None and timeout < 1:
        raise ToolFailed("the time for a command must be at least 1 second")
    limit_s = bench.limits.command_s if timeout is None else min(float(timeout), bench.limits.command_s)
    result = await bench.box.exec(command, limit_s)
    if result.opened is not None:
        bench.opened.append(result.opened)
    return result, limit_s


def _problem(result: ExecResult, limit_s: float) -> str:
    if result.timed_out:
        return f"stopped after {limit_s:g} s"
    return f"ended by the limit on {result.exhausted}" if result.exhausted else ""


def _with_exit(result: ExecResult, output: str) -> str:
    return (output or "no output") if result.exit_code == 0 else f"exit {result.exit_code}\n{output}"


def cut_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


async def search_codebase(bench: Workbench, pattern: str, path: str = ".", ranked: bool = False) -> str:
    return await search(bench.box, pattern, path, ranked, min(SEARCH_S, bench.limits.command_s))


async def list_dir(bench: Workbench, path: str) -> str:
    names = await bench.box.list(path)
    listing = "\n".join(names)
    if len(listing) <= OUTPUT_CHARS:
        return listing or "empty"
    shown = listing[:OUTPUT_CHARS].rpartition("\n")[0]
    return f"{shown}\n[{len(names) - shown.count(chr(10)) - 1} more names]"


async def todo(bench: Workbench, items: list[dict[str, str]]) -> str:
    for number, item in enumerate(items, 1):
        if not item["text"].strip():
            raise ToolFailed(f"item {number} says nothing")
    bench.todos[:] = [Todo(" ".join(item["text"].split()), cast(Status, item["status"])) for item in items]
    return bench.todo_text() or "the list is empty"


async def finish(bench: Workbench, message: str = "") -> str:
    return "done"


_PATH = Parameter("string", "relative to the repository")
_FOLDER = Parameter("string", "folder or file, relative to the repository; all of it when left out", required=False)

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "read_file",
            "Read a text file, all of it or a range of lines. Lines are given as they are, without numbers.",
            {
                "path": _PATH,
                "start": Parameter("integer", "first line of the range, from 1", required=False),
                "end": Parameter("integer", "last line of the range, inclusive", required=False),
            },
            read_file,
        ),
        Tool(
            "edit_file",
            "Replace text in a file. The text to replace must occur exactly once, spaces and line breaks included. "
            "A file that does not exist is created when the text to replace is empty.",
            {
                "path": _PATH,
                "old": Parameter("string", "the exact text to replace; empty to create a file"),
                "new": Parameter("string", "what to put there"),
                "edits": Parameter(
                    "edits", "further replacements in the same file, made in order: all or none", required=False
                ),
            },
            edit_file,
            alone=True,
        ),
        Tool(
            "run_command",
            "Run a shell command in the repository and read what it prints. Every command has a shell of its own; "
            "what it starts in the background ends with it.",
            {
                "command": Parameter("string", "the command line"),
                "timeout": Parameter("integer", "seconds it may take", required=False),
            },
            run_command,
        ),
        Tool(
            "search_codebase",
            "Search the text of all files, line by line, with a Python regular expression; or rank files by words. "
            "Version control folders are left out.",
            {
                "pattern": Parameter("string", "a regular expression, or words for a ranked search"),
                "path": _FOLDER,
                "ranked": Parameter("boolean", "take it as words and show the best files first", required=False),
            },
            search_codebase,
        ),
        Tool("list_dir", "List a folder. Names of folders end with a slash.", {"path": _PATH}, list_dir),
        Tool(
            "run_tests",
            "Run the repository's tests and read the end of what they print.",
            {"path": Parameter("string", "a test file or test id; all tests when left out", required=False)},
            run_tests,
        ),
        Tool(
            "todo",
            "Write down the plan as a list of items. Each call replaces the whole list.",
            {"items": Parameter("todos", "all items, with a status each")},
            todo,
        ),
        Tool(
            "finish",
            "End the task. Nothing can be done after it.",
            {"message": Parameter("string", "a closing word for the user", required=False)},
            finish,
        ),
    )
}
BASH = Tool("bash", "Run a bash command in the repository.", {"command": Parameter("string", "the command")}, bash)
