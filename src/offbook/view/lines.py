"""JSONL files that may still be growing, read line by line and each line once.

Of a rollout only what stands before and after its segments is parsed: of thousands of them in a second, and its
conversation is read from its place in the file when it is opened.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

T = TypeVar("T")
LARGEST = 1e300  # a JSON file can hold whole numbers that are no floats
HEAD, TAIL = b',"segments":[', b'],"stop":"'
MISSING = (0, 0, 0)
COUNTS = ("turns", "calls", "invalid_calls", "sampled_tokens", "prompt_tokens", "summaries")  # of a rollout's usage
SUMMARY = ("id", "task", "group", "stop", "reward", "solved", "flags", *COUNTS)  # what a list says of a rollout
WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # a line that is no record


@dataclass(frozen=True, slots=True)
class Place(Generic[T]):
    """A line that was read: its position, and what a list shows of it."""

    offset: int
    length: int
    said: T


@dataclass(slots=True)
class Lines(Generic[T]):
    """The readable lines of one file so far. `refresh` goes on where the last one stopped."""

    path: Path
    parse: Callable[[bytes], T | None]
    places: list[Place[T]] = field(default_factory=list)
    unreadable: int = 0
    torn: bool = False  # the last line has no end: a write is under way, or was cut off
    mark: tuple[int, int, int] = MISSING  # inode, size, time of the last change
    done: int = 0  # bytes that were read for good

    def refresh(self) -> bool:
        """Read what is new. True if anything changed."""
        if _mark(os.stat(self.path)) == self.mark:
            return False
        with open(self.path, "rb") as file:
            mark = _mark(os.fstat(file.fileno()))
            if mark[0] != self.mark[0] or mark[1] <= self.mark[1]:  # another file, or not just longer
                self.places, self.unreadable, self.done = [], 0, 0
            self.mark, self.torn = mark, False
            file.seek(self.done)
            for line in file:
                self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        said = self.parse(line) if line.strip() else None
        if said is not None:
            self.places.append(Place(self.done, len(line), said))
        elif not line.endswith(b"\n"):
            self.torn = True
            return
        elif line.strip():
            self.unreadable += 1
        self.done += len(line)

    def read(self, place: Place[T]) -> bytes:
        return read_at(self.path, place.offset, place.length)


def read_at(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_inside(path: Path, root: Path) -> bool:
    """Whether this is a plain file under `root`, after resolving links."""
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(root) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # gone meanwhile, or a circle of links
        return False


def parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parse(line: bytes, texts: Sequence[str] = (), numbers: Sequence[str] = ()) -> dict[str, Any] | None:
    """An object with these texts and numbers."""
    row = parse_object(line)
    is_whole = row is not None and all(isinstance(row.get(name), str) for name in texts)
    return row if row and is_whole and all(is_number(row.get(name)) for name in numbers) else None


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    return _parse(line, numbers=("step",))


def parse_look(line: bytes) -> dict[str, Any] | None:
    """The effect of a hint, as it was measured before a step."""
    counts = ("step", "targets", "samples", "faults", "hinted_faults")
    row = _parse(line, ("rule", "why_not", "unjudged"), counts)
    return row if row and (row.get("nats") is None or is_number(row["nats"])) else None


def parse_decision(line: bytes) -> dict[str, Any] | None:
    """Of a live cycle. The page shows all of these."""
    row = _parse(line, ("kind", "why"), ("at", "deployed"))
    if not row or not isinstance(row.get("numbers"), dict):
        return None
    return row | {name: row.get(name) if is_number(row.get(name)) else None for name in ("version", "candidate")}


def parse_task(line: bytes) -> dict[str, Any] | None:
    return _parse(line, ("id",))


def parse_rollout(line: bytes) -> dict[str, Any] | None:
    """What a list says of a rollout, without its segments."""
    head, tail = line.find(HEAD), line.rfind(TAIL)
    short = None
    if 0 < head < tail and line.count(HEAD) == 1:  # two of them: a torn line that another one was written behind
        short = parse_object(line[: head + len(HEAD)] + line[tail:])
    try:
        rollout = short or json.loads(line)
        usage, parts = rollout.get("usage", {}), rollout.get("reward", {}).get("parts", {})
        weights = rollout.get("reward", {}).get("weights", {})
        return {
            **{name: str(rollout[name]) for name in ("id", "task", "group")},
            "stop": str(rollout.get("stop", "crash")),
            "reward": sum(weights.get(name, 1.0) * value for name, value in parts.items()),
            "solved": parts.get("outcome", 0.0) >= 1.0,
            "flags": sorted({str(flag["kind"]) for flag in rollout.get("flags", [])}),
            **{name: int(usage.get(name, 0)) for name in COUNTS},
        }
    except WRONG:
        return None


def parse_feedback(line: bytes) -> dict[str, Any] | None:
    """What a list says of a target. The tokens' alternatives are most of a line, and they are left alone."""
    tops = line.find(b',"student_top":')
    if tops > 0 and line.rstrip().endswith(b"}"):
        line = line[:tops] + b"}"
    try:
        short = json.loads(line)
        target = short["target"]
        return {
            "rollout": str(target["rollout"]),
            "segment": int(target["segment"]),
            "message": int(target["message"]),
            "rule": str(target["rule"]),
            "peak": max((value for value in short.get("divergence", []) if is_number(value)), default=0.0),
            "tokens": len(short.get("student", [])),  # that the teacher scored
            "taught": not short.get("skipped"),
            "fall": fall_of_fault(short),
        }
    except WRONG:
        return None


def fall_of_fault(feedback: dict[str, Any]) -> float:
    """How much probability the hint takes from a faulty token that the model was likelier to write than not.

    The rule's evidence names faulty tokens. 0 where none of them was that likely.
    """
    evidence = str(feedback["target"].get("evidence", ""))
    scored = zip(feedback.get("pieces", []), feedback.get("student", []), feedback.get("teacher", []), strict=False)
    falls = [
        math.exp(student) - math.exp(min(0.0, teacher))
        for piece, student, teacher in scored
        if len(piece.strip()) > 2 and piece.strip() in evidence and math.log(0.5) < student <= 0.0
    ]
    return max(falls, default=0.0)
