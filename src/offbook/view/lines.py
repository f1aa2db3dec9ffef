"""JSONL files that may still be growing, read line by line.

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
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

Said = dict[str, Any]  # what a list shows of a line
LARGEST = 1e300  # a JSON file can hold whole numbers that are no floats
HEAD = b',"segments":['
TAIL = b'],"stop":"'
COUNTS = ("turns", "calls", "invalid_calls", "sampled_tokens", "prompt_tokens", "summaries")  # of a rollout's usage
SUMMARY = ("id", "task", "group", "stop", "reward", "solved", "flags", *COUNTS)  # what a list says of a rollout
WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)  # a line that is no record


@dataclass(frozen=True, slots=True)
class Place:
    """A line that was read: its position, and what a list shows of it."""

    offset: int
    length: int
    said: Said


@dataclass(slots=True)
class Lines:
    """The readable lines of one file, read again when it has changed."""

    path: Path
    parse: Callable[[bytes], Said | None]
    places: list[Place] = field(default_factory=list)
    unreadable: int = 0
    mark: tuple[int, int, int] = (0, 0, 0)  # inode, size, time of the last change

    def refresh(self) -> bool:
        """True if anything changed."""
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            mark = found.st_ino, found.st_size, found.st_mtime_ns
            if mark == self.mark:
                return False
            self.mark = mark
            self.places = []
            self.unreadable = 0
            offset = 0
            for line in file:
                said = self.parse(line) if line.strip() else None
                if said is not None:
                    self.places.append(Place(offset, len(line), said))
                else:
                    self.unreadable += bool(line.strip())
                offset += len(line)
        return True


def read_at(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def is_inside(path: Path, root: Path) -> bool:
    """Whether this is a plain file under `root`, after resolving links."""
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(root) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # gone meanwhile, or a circle of links
        return False


def parse_object(line: bytes) -> Said | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parse(line: bytes, texts: Sequence[str] = (), numbers: Sequence[str] = ()) -> Said | None:
    """An object with these texts and numbers."""
    row = parse_object(line)
    is_whole = row is not None and all(isinstance(row.get(name), str) for name in texts)
    return row if row and is_whole and all(is_number(row.get(name)) for name in numbers) else None


parse_metrics = partial(_parse, numbers=("step",))
parse_task = partial(_parse, texts=("id",))
# The effect of a hint, as it was measured before a step; a decision of a live cycle.
parse_look = partial(
    _parse,
    texts=("rule", "why_not", "unjudged"),
    numbers=("step", "targets", "samples", "faults", "hinted_faults"),
)
parse_decision = partial(_parse, texts=("kind", "why"), numbers=("at", "deployed"))


def parse_rollout(line: bytes) -> Said | None:
    """What a list says of a rollout, without its segments."""
    head = line.find(HEAD)
    tail = line.rfind(TAIL)
    short = None
    if 0 < head < tail and line.count(HEAD) == 1:  # two of them: a torn line that another one was written behind
        short = parse_object(line[: head + len(HEAD)] + line[tail:])
    try:
        rollout = short or json.loads(line)
        usage = rollout.get("usage", {})
        parts = rollout.get("reward", {}).get("parts", {})
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


def parse_feedback(line: bytes) -> Said | None:
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
