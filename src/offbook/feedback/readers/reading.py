"""A rollout as the readers see it: calls with their answers, what kind each is, and how the tests last went."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from offbook.feedback.readers.commands import Command, read_command, relative
from offbook.monitors.acts import COMMANDS, NEW_TEXTS, OLD_TEXTS, PATHS, text_of
from offbook.monitors.scope import NOT_TESTS, TESTS_ASKED, instruction_of
from offbook.rewards.behaviour import final_message
from offbook.types import INVALID, Message, Rollout, Segment, Target, Task, ToolCall

Kind = Literal["read", "edit", "command", "tests", "finish", "other"]
OWN_KINDS: dict[str, Kind] = {
    "read_file": "read",
    "edit_file": "edit",
    "run_command": "command",
    "bash": "command",
    "run_tests": "tests",
    "finish": "finish",
}
FINISHING = frozenset({"finish", "submit", "done", "complete_task"})
SEARCHING = frozenset({"pattern", "query", "regex", "text", "glob", "search_term"})
EDITOR_VERBS = frozenset({"view", "create", "str_replace", "insert", "undo_edit"})
SUMMARY = re.compile(r"(?:^|[ =,])(\d{1,9}) (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)\b")
SECONDS = re.compile(r"\bin (\d{1,9}(?:\.\d{1,9})?) ?s\b")
UNITTEST = re.compile(r"^Ran (\d{1,9}) tests? in (\d{1,9}(?:\.\d{1,9})?)s$.*?^(OK|FAILED)\b", re.DOTALL | re.MULTILINE)
TAIL = 4000  # characters of an answer in which the summary of a test run is looked for
SHOWN = 160


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a run of tests says of itself; `failed` is None where it does not."""

    selection: str
    failed: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of the agent's and the answer to it. `tool` is the tool's own name, where it is one of ours."""

    order: int
    segment: int
    message: int
    call: ToolCall
    tool: str
    kind: Kind
    answer: Message | None
    path: str = ""
    command: Command | None = None
    tests: TestRun | None = None

    @property
    def text(self) -> str:
        return self.answer.text if self.answer else ""

    @property
    def went_well(self) -> bool:
        return self.answer is not None and self.answer.status in ("ok", None) and not self.call.error

    @property
    def may_write(self) -> bool:
        """Whether files may be others after it. An edit that was refused changed none."""
        if self.kind == "edit":
            return self.answer is None or self.answer.status in ("ok", None)
        return self.command is not None and self.command.may_write

    @property
    def replacements(self) -> list[tuple[str, str]]:
        """What an edit takes away and puts there; nothing is taken away where it writes the whole file."""
        if self.kind != "edit":
            return []
        pairs = [(text_of(self.call, OLD_TEXTS) or "", text_of(self.call, NEW_TEXTS) or "")]
        for value in self.call.arguments.values():
            further = value if isinstance(value, list) else []
            pairs += [(one["old"], one["new"]) for one in further if _is_replacement(one)]
        return pairs


@dataclass(frozen=True)
class Reading:
    """A rollout, its task if it is known, and what several readers need."""

    rollout: Rollout
    task: Task | None
    exchanges: tuple[Exchange, ...]

    @cached_property
    def instruction(self) -> str:
        return instruction_of(self.rollout, self.task)

    @cached_property
    def asks_for_tests(self) -> bool:
        return bool(TESTS_ASKED.search(NOT_TESTS.sub("", self.instruction)))

    @cached_property
    def edits(self) -> tuple[Exchange, ...]:
        """Calls that changed files, or may have."""
        return tuple(exchange for exchange in self.exchanges if exchange.may_write)

    @cached_property
    def changed_nothing(self) -> bool:
        """The box says so; without one, no call can have changed a file."""
        if self.rollout.own_names:
            return not self.rollout.changed and not any(event.kind == "box_lost" for event in self.rollout.events)
        return not self.rollout.changed and not self.edits and not any(map(_is_opaque, self.exchanges))

    @cached_property
    def end(self) -> tuple[int, int] | None:
        """The message with which the agent ended the rollout itself: segment and message."""
        if self.rollout.stop not in ("finish", "answer"):
            return None
        places = list(_spoken(self.rollout))
        if not places:
            return None
        number, index, message = places[-1]
        if message.calls and not self._finishes(number, index):
            return None
        return number, index

    @cached_property
    def final(self) -> str:
        """What the agent said last to the user; nothing where it did not end the rollout itself.

        What it says before a command that ends the task is a thought and for nobody.
        """
        last = [one for one in self.exchanges if (one.segment, one.message) == self.end]
        is_told = not last or any(one.tool in FINISHING for one in last)
        return final_message(self.rollout) if self.end and is_told else ""

    def may_matter(self, exchange: Exchange) -> bool:
        """Whether things may be otherwise after it, or the agent may think so. Unknown tools may do anything."""
        return (
            exchange.may_write or exchange.kind == "edit" or (not self.rollout.own_names and exchange.kind == "other")
        )

    def _finishes(self, segment: int, message: int) -> bool:
        if self.rollout.own_names:
            return self.rollout.stop == "finish"
        calls = [one for one in self.exchanges if (one.segment, one.message) == (segment, message)]
        return any(one.tool in FINISHING for one in calls)

    def target(self, exchange: Exchange, rule: str, evidence: str) -> Target:
        return Target(self.rollout.id, exchange.segment, exchange.message, rule, shown(evidence))

    def final_target(self, rule: str, evidence: str) -> Iterator[Target]:
        if self.end:
            yield Target(self.rollout.id, *self.end, rule, shown(evidence))


def read(rollout: Rollout, task: Task | None = None) -> Reading:
    return Reading(rollout, task, tuple(_exchanges(rollout)))


def shown(text: str) -> str:
    text = " ".join(text[: 4 * SHOWN].split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def tree_text(task: Task, path: str) -> str | None:
    """What the task's tree has at a path that an agent wrote down; None where that is no file."""
    try:
        return (task.tree / path.lstrip("/")).read_text(errors="replace")
    except (OSError, ValueError):  # too long, a null character, half a character
        return None


def exists(task: Task, path: str) -> bool:
    """Whether the task's tree has a file or folder at a path that an agent wrote down."""
    try:
        return (task.tree / path.lstrip("/")).exists()
    except (OSError, ValueError):
        return False


def _exchanges(rollout: Rollout) -> Iterator[Exchange]:
    order = 0
    for number, index, message in _spoken(rollout):
        answers = _answers(rollout.segments[number].messages, index)
        for call, answer in zip(message.calls, answers, strict=True):
            yield _exchange(rollout, order, number, index, call, answer)
            order += 1


def _spoken(rollout: Rollout) -> Iterator[tuple[int, int, Message]]:
    for number, segment in enumerate(rollout.segments):
        for index, message in enumerate(segment.messages):
            if is_own(segment, message):
                yield number, index, message


def is_own(segment: Segment, message: Message) -> bool:
    """A worked example is not the agent's. Rollouts of other agents have no tokens to tell by."""
    is_sampled = not segment.sampled or any(segment.sampled[message.body : message.end])
    return message.role == "assistant" and is_sampled


def _answers(messages: list[Message], index: int) -> list[Message | None]:
    """The tool messages right after a message, one a call. Where their numbers differ nobody knows which is whose."""
    count = len(messages[index].calls)
    following: list[Message | None] = []
    for message in messages[index + 1 :]:
        if message.role != "tool" or len(following) > count:
            break
        following.append(message)
    return following if len(following) == count else [None] * count


def _exchange(
    rollout: Rollout, order: int, segment: int, message: int, call: ToolCall, answer: Message | None
) -> Exchange:
    tool = rollout.own_names.get(call.name, call.name)
    kind = _kind(rollout, call, tool, answer)
    path = relative(text_of(call, PATHS) or "") if kind in ("read", "edit") else ""
    command = read_command(text_of(call, COMMANDS) or "") if kind == "command" else None
    selection = command.tests if command else None
    if kind == "tests":
        selection = next((value for value in call.arguments.values() if isinstance(value, str)), "")
    tests = None
    if selection is not None and answer is not None and answer.status not in INVALID:
        tests = _test_run(selection, answer.text)
    return Exchange(order, segment, message, call, tool, kind, answer, path, command, tests)


def _kind(rollout: Rollout, call: ToolCall, tool: str, answer: Message | None) -> Kind:
    """By name where the rollout knows its tools, else by what the call is given."""
    if call.error or (answer is not None and answer.status in INVALID):
        # What was meant can be said of a well-formed edit only.
        return "edit" if tool == "edit_file" and not call.error else "other"
    if rollout.own_names:
        return OWN_KINDS.get(tool, "other")
    path, new, command = text_of(call, PATHS), text_of(call, NEW_TEXTS), text_of(call, COMMANDS)
    if path and new is not None:
        return "edit"
    if command is not None and not (path and command in EDITOR_VERBS):
        return "command"
    if path and SEARCHING.isdisjoint(call.arguments) and command in (None, "view"):
        return "read"
    if tool == "run_tests":
        return "tests"
    return "finish" if tool in FINISHING else "other"


def _is_opaque(exchange: Exchange) -> bool:
    """A call of another agent's tool that no rule of ours can tell from an edit."""
    known = exchange.kind != "other" or exchange.call.error
    return not known and SEARCHING.isdisjoint(exchange.call.arguments)


def _is_replacement(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("old"), str) and isinstance(value.get("new"), str)


def _test_run(selection: str, answer: str) -> TestRun:
    tail = answer[-TAIL:]
    for line in reversed(tail.splitlines()):
        counts = {kind: int(number) for number, kind in SUMMARY.findall(line)}
        seconds = SECONDS.search(line)
        if seconds and counts:
            failed = sum(count for kind, count in counts.items() if kind in ("failed", "error", "errors"))
            ran = failed or counts.get("passed")
            return TestRun(selection, failed if ran else None, float(seconds.group(1)))
    found = UNITTEST.search(tail)
    if found:
        return TestRun(selection, int(found.group(3) == "FAILED"), float(found.group(2)))
    return TestRun(selection, None, 0.0)
