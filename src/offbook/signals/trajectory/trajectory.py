"""A rollout as what the agent did: everything is worked out from it once, when it is first asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offbook.signals.trajectory.diff import COMMENT, FileDiff, read_diff
from offbook.signals.trajectory.shell import relative
from offbook.signals.trajectory.tool_calls import FINISHING, SEARCHING, At, ToolUse, spoken, tool_uses_of
from offbook.types import Event, Rollout, Task, is_test_file

INSIDE = r"(?:[^.\n]|\.(?=\w))"  # of one sentence; a dot in a file's name does not end it
TESTS_ASKED = re.compile(
    r"\b(add|update|write|edit|fix|adjust|extend|remove|delete|change|rewrite|mark|skip|adapt|port|convert|move|split|"
    r"refactor|correct|parametri[sz]e|rename|drop|improve|cover|clean|replace|modify|bring)\w*\b"
    rf"{INSIDE}{{0,80}}\b(tests?|test_\w+|conftest|fixtures?)\b"
    rf"|\b(tests?|test_\w+(\.py)?)\b{INSIDE}{{0,60}}\b(needs?|should|must|shall|has|have)\s+(to\s+)?"
    r"(?!(still |all |now |be )*(pass|succeed|keep|continue|stay|remain|run|work|green|not|be able))",
    re.IGNORECASE,
)
NOT_TESTS = re.compile(
    r"\b(do not|don't|never|must not|without|not to|leave|no need to)\b[^.\n]{0,40}\btests?\b", re.IGNORECASE
)
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True)
class Trajectory:
    """What the agent did in a rollout. With the task more is known: what was asked for, and what was there before; and
    with the other rollouts of its group, what others did in its place."""

    rollout: Rollout
    task: Task | None = None
    siblings: Sequence[Rollout] = ()

    @cached_property
    def uses(self) -> tuple[ToolUse, ...]:
        return tuple(tool_uses_of(self.rollout))

    @cached_property
    def commands(self) -> tuple[ToolUse, ...]:
        return tuple(one for one in self.uses if one.kind == "command")

    # What was asked for, and what was there.

    @cached_property
    def instruction(self) -> str:
        """Of a rollout without a task, what its user said first."""
        if self.task is not None:
            return self.task.instruction
        users = (one.text for segment in self.rollout.segments for one in segment.messages if one.role == "user")
        return next(users, "")

    @cached_property
    def asks_for_tests(self) -> bool:
        return bool(TESTS_ASKED.search(NOT_TESTS.sub("", self.instruction)))

    def before(self, path: str) -> str | None:
        """What the task's tree has at a path that an agent wrote down; None where that is no file."""
        try:
            return (self.task.tree / _inside(path)).read_text(errors="replace") if self.task else None
        except (OSError, ValueError):  # too long, a null character, half a character
            return None

    def was_there(self, path: str) -> bool:
        """Whether the task's tree has a file or folder at such a path."""
        try:
            return self.task is not None and (self.task.tree / _inside(path)).exists()
        except (OSError, ValueError):
            return False

    # What was changed and opened.

    @cached_property
    def edits(self) -> tuple[ToolUse, ...]:
        """Calls that changed files, or may have."""
        return tuple(one for one in self.uses if one.may_write)

    @cached_property
    def changed_nothing(self) -> bool:
        """The sandbox says so; of other agents, whose sandbox was not watched, no call can have changed a file."""
        rollout = self.rollout
        if not rollout.foreign:
            return not rollout.changed and not any(event.kind == "sandbox_lost" for event in rollout.events)
        return not rollout.changed and not self.edits and not any(map(_is_opaque, self.uses))

    @cached_property
    def sources(self) -> dict[str, str]:
        """The Python files that the agent left changed and that are no tests."""
        return {
            path: text
            for path, text in sorted(self.rollout.changed.items())
            if text is not None and path.endswith(".py") and not is_test_file(path)
        }

    @cached_property
    def diff(self) -> tuple[FileDiff, ...]:
        return tuple(read_diff(self.rollout.diff))

    @property
    def comment_share(self) -> float:
        """Of the added lines that are not blank."""
        added = [line for file in self.diff for line in file.added.values() if line.strip()]
        return sum(bool(COMMENT.match(line)) for line in added) / len(added) if added else 0.0

    @cached_property
    def opened(self) -> tuple[Event, ...]:
        """Events of notable files that commands opened, by message and place."""
        return tuple(event for event in self.rollout.events if event.kind == "opened")

    # How it ended.

    @cached_property
    def end(self) -> At | None:
        """The message with which the agent ended the rollout itself."""
        last = list(spoken(self.rollout))[-1:]
        if not last or self.rollout.stop not in ("finish", "answer"):
            return None
        [(at, message)] = last
        finishes = self.rollout.stop == "finish" and not self.rollout.foreign
        finishes = finishes or any(one.tool in FINISHING for one in self.uses if one.at == at)
        return at if finishes or not message.calls else None

    @cached_property
    def final(self) -> str:
        """What the user reads at the end: the arguments of `finish`, or a last message without a call. No thinking, and
        nothing where a command ends the task: what is said before that is a thought."""
        if self.end is None:
            return ""
        segment, number = self.end
        last = self.rollout.segments[segment].messages[number]
        if not last.calls:
            return last.text.rpartition("</think>")[2].strip()
        if not any(one.tool in FINISHING for one in self.uses if one.at == self.end):
            return ""
        told = [value for value in last.calls[-1].arguments.values() if isinstance(value, str)]
        said = last.text[: last.calls[0].start].rpartition("</think>")[2].strip()
        return "\n".join(part for part in (said, *told) if part)

    @cached_property
    def prose(self) -> str:
        """`final` without code."""
        return CODE.sub("", self.final).strip()

    @cached_property
    def question(self) -> str:
        """The question that the agent ended with, if it did."""
        last = self.prose.splitlines()[-1].rstrip(" *_)\"'") if self.prose else ""
        return re.split(r"(?<=[.!?])\s+", last)[-1] if last.endswith("?") else ""


def _inside(path: str) -> str:
    return relative(path).lstrip("/")


def _is_opaque(use: ToolUse) -> bool:
    """A call of another agent's tool that nothing tells from an edit."""
    known = use.kind != "other" or use.call.error
    return not known and SEARCHING.isdisjoint(use.call.arguments)
