"""Text search over a sandbox: which files are searched, in which process, and how hits are shown to the agent.

The regular expressions are Python's in every sandbox. Small searches run in place; a pattern that could take long, or
much text, goes to a subprocess with a timeout, so the event loop never waits for a regular expression.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import sys

from offbook.agent.harness import matching
from offbook.agent.harness.matching import Hit
from offbook.agent.harness.tool import ToolFailed
from offbook.sandbox.sandbox import HISTORY, HOST_ERRORS, Sandbox

FILE_CHARS = 1_000_000
ALL_CHARS = 50_000_000
PATTERN_CHARS = 1000
SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__"})


async def search(sandbox: Sandbox, pattern: str, path: str, timeout_s: float) -> str:
    if len(pattern) > PATTERN_CHARS:
        raise ToolFailed(f"what you look for is longer than {PATTERN_CHARS} characters")
    try:
        matching.compile_pattern(pattern)
    except ValueError as error:
        raise ToolFailed(f"not a regular expression: {error}") from None
    texts, num_skipped = await texts_of(sandbox, posixpath.normpath(path))
    if matching.is_quick(pattern, texts):
        hits, left_out = matching.match_lines(pattern, texts)
    else:
        hits, left_out = await _in_process(pattern, texts, timeout_s)
    lines = [f"{path}:{number}: {line}" for path, number, line in hits]
    if left_out:
        lines.append(f"[{left_out} more matches; say more closely what you look for]")
    if num_skipped:
        lines.append(f"[{num_skipped} files not searched: too large, binary or unreadable]")
    return "\n".join(lines if hits else ["no match", *lines])


async def texts_of(sandbox: Sandbox, path: str) -> tuple[dict[str, str], int]:
    """The texts to search, and how many files were skipped as binary, unreadable or too large."""
    texts, size, num_skipped = dict[str, str](), 0, 0
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


async def _in_process(pattern: str, texts: dict[str, str], timeout_s: float) -> tuple[list[Hit], int]:
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
    return [(path, number, line) for path, number, line in hits], left_out
