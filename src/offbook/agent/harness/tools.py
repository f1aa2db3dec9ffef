"""The tools. Each is a function of the workbench and its own parameters that returns the text the agent reads.

The docstrings and the texts in the annotations are shown to the agent. What goes wrong is raised (ToolFailed,
PathRefused, OSError) and becomes an answer in the agent loop.
"""

import asyncio
import difflib
import json
import posixpath
import re
import shlex
import sys
from itertools import islice
from typing import Annotated, TypedDict

from offbook.agent.chat import SUBMIT
from offbook.agent.harness import matching
from offbook.agent.harness.matching import lines_of
from offbook.agent.harness.tool import TodoItem, ToolFailed, Workbench, tool_of
from offbook.sandbox.sandbox import HISTORY, HOST_ERRORS, ExecResult, Sandbox

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
    return await _search(bench.sandbox, pattern, path, min(SEARCH_S, bench.limits.command_s))


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
    function.__name__: tool_of(function)
    for function in (read_file, edit_file, run_command, search_codebase, list_dir, run_tests, todo, finish)
}


FILE_CHARS = 1_000_000
ALL_CHARS = 50_000_000
PATTERN_CHARS = 1000
SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__"})


async def _search(sandbox: Sandbox, pattern: str, path: str, timeout_s: float) -> str:
    if len(pattern) > PATTERN_CHARS:
        raise ToolFailed(f"what you look for is longer than {PATTERN_CHARS} characters")
    try:
        matching.compile_pattern(pattern)
    except ValueError as error:
        raise ToolFailed(f"not a regular expression: {error}") from None
    texts, num_skipped = await texts_of(sandbox, posixpath.normpath(path))
    hits, left_out = await _in_process(pattern, texts, timeout_s)
    lines = [f"{path}:{number}: {line}" for path, number, line in hits]
    if left_out:
        lines.append(f"[{left_out} more matches; say more closely what you look for]")
    if num_skipped:
        lines.append(f"[{num_skipped} files not searched: too large, binary or unreadable]")
    return "\n".join(lines if hits else ["no match", *lines])


async def texts_of(sandbox: Sandbox, path: str) -> tuple[dict[str, str], int]:
    """The texts to search, and how many files were skipped as binary, unreadable or too large."""
    texts: dict[str, str] = {}
    size = 0
    num_skipped = 0
    for name in await _names(sandbox, path):
        try:
            text = await sandbox.read(name)
        except OSError as error:
            if name == path or error.errno in HOST_ERRORS:
                raise
            text = "\0"  # found and not readable: the agent took its rights away
        if len(text) > FILE_CHARS or "\0" in text or size + len(text) > ALL_CHARS:
            num_skipped += 1
            continue
        size += len(text)
        texts[name] = text
    return texts, num_skipped


async def _names(sandbox: Sandbox, path: str) -> list[str]:
    if path == HISTORY:
        return [f"{path}/{name}" for name in await sandbox.list(path)]
    if posixpath.isabs(path):
        return [path]
    inside = [name for name in await sandbox.files() if path in (".", name) or name.startswith(f"{path}/")]
    if not inside:
        await sandbox.list(path)  # a path that does not exist or leads out is said so
    return [name for name in inside if SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1])]


async def _in_process(pattern: str, texts: dict[str, str], timeout_s: float) -> tuple[list[matching.Hit], int]:
    request = await asyncio.to_thread(json.dumps, {"pattern": pattern, "texts": texts})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        matching.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            answer, complaint = await process.communicate(request.encode())
    except TimeoutError:
        raise ToolFailed(f"the search took more than {timeout_s:g} s; look for less, or in fewer files") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = (complaint.decode(errors="replace").strip().splitlines() or [f"exit {process.returncode}"])[-1]
        raise ToolFailed(f"the search broke: {reason}")
    hits, left_out = json.loads(answer)
    return hits, left_out


MAX_PLACES = 10  # named where a text occurs several times
MAX_LINES = 4  # of the file, quoted in a mismatch
QUOTED_CHARS = 120
COMPARED_LINES = 5000
SIMILAR = 0.6


def apply_edits(path: str, text: str, edits: list[tuple[str, str]]) -> str:
    """The text after all replacements, in order. An empty text can be given a first one."""
    if "\ufffd" in text:
        raise ToolFailed(f"{path} is not UTF-8 text; an edit would damage it")
    for number, (old, new) in enumerate(edits, 1):
        try:
            text = new if number == 1 and not text and not old else replace_once(path, text, old, new)
        except ToolFailed as error:
            if len(edits) == 1:
                raise
            raise ToolFailed(f"replacement {number} of {len(edits)} fails, so none was made: {error}") from None
    return text


def replace_once(path: str, text: str, old: str, new: str) -> str:
    """`text` with the only occurrence of `old` replaced."""
    if not old:
        raise ToolFailed(f"{path} has text already; say which part of it to replace")
    if old == new:
        raise ToolFailed("the new text is the same as the old: nothing would change")
    # Overlapping occurrences count: which one is meant is just as unclear.
    found = re.finditer(f"(?={re.escape(old)})", text)
    places = [match.start() for match in islice(found, MAX_PLACES + 1)]
    if not places:
        raise ToolFailed(mismatch(path, text, old))
    if len(places) > 1:
        times = f"more than {MAX_PLACES}" if len(places) > MAX_PLACES else str(len(places))
        lines = ", ".join(str(text.count("\n", 0, place) + 1) for place in places[:MAX_PLACES])
        raise ToolFailed(
            f"the text to replace occurs {times} times in {path}, at lines {lines}; give more of what surrounds it"
        )
    return text[: places[0]] + new + text[places[0] + len(old) :]


def mismatch(path: str, text: str, old: str) -> str:
    """Explain in at most six lines why `old` is not in `text`."""
    missing = f"the text to replace is not in {path}"
    if not text:
        return f"{missing}, which is empty"
    if "\r\n" in text and old.replace("\n", "\r\n") in text:
        return f"{missing}: its lines end in \\r\\n, yours in \\n"
    if "\\n" in old and old.replace("\\n", "\n") in text:
        return f"{missing}: you wrote \\n as two characters where the file has line breaks"
    have, want = lines_of(text), lines_of(old)
    first = _same_but_for_spaces(have, want)
    if first is not None:
        return f"{missing}, but this differs from it in spaces only{_difference(have, want, first)}:" + _quote(
            have, first, len(want)
        )
    nearest = _nearest(have, want)
    if nearest is None:
        return f"{missing}, nor anything like it; the file has {len(have)} lines"
    return f"{missing}; the nearest is:" + _quote(have, nearest, len(want))


def _same_but_for_spaces(have: list[str], want: list[str]) -> int | None:
    bare = ["".join(line.split()) for line in have]
    wanted = ["".join(line.split()) for line in want]
    if not any(wanted):
        return None
    for first in range(len(bare) - len(wanted) + 1):
        if bare[first : first + len(wanted)] == wanted:
            return first
    return None


def _difference(have: list[str], want: list[str], first: int) -> str:
    """The first line whose indentation differs, in words; nothing where the difference is elsewhere."""
    for offset, line in enumerate(want):
        theirs = have[first + offset]
        indent, wanted = _indent(theirs), _indent(line)
        if theirs.strip() and indent != wanted:
            return f" (line {first + offset + 1} starts with {_spelled(indent)}, yours with {_spelled(wanted)})"
        if theirs.rstrip() == line.rstrip() and theirs != line:
            return f" (line {first + offset + 1} differs in spaces at its end)"
    return ""


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _spelled(space: str) -> str:
    counts = [(space.count(" "), "space"), (space.count("\t"), "tab")]
    parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    return " and ".join(parts) or "no space"


def _nearest(have: list[str], want: list[str]) -> int | None:
    """Where the text would begin, going by the line of the file most like its longest line."""
    offset, line = max(enumerate(want), key=lambda entry: len(entry[1].strip()))
    matcher = difflib.SequenceMatcher(b=line.strip()[:QUOTED_CHARS])
    best, place = SIMILAR, None
    for number, candidate in enumerate(have[:COMPARED_LINES]):
        matcher.set_seq1(candidate.strip()[:QUOTED_CHARS])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, place = matcher.ratio(), max(0, number - offset)
    return place


def _quote(have: list[str], first: int, count: int) -> str:
    shown = have[first : first + min(count, MAX_LINES)]
    more = f"\n[{count - MAX_LINES} more lines]" if count > MAX_LINES else ""
    return "".join(f"\n{number}: {line[:QUOTED_CHARS]}" for number, line in enumerate(shown, first + 1)) + more
