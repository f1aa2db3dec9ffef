"""Calls with their answers. What a call is for shows in the tool's own name, or in its arguments."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Literal

from offbook.signals.trajectory.shell import Command, Words, name_of, relative
from offbook.types import INVALID, Message, Rollout, ToolCall

# Tools have other names from task to task and from agent to agent. So have their parameters, which these are.
COMMANDS = ("command", "cmd", "command_line", "script", "code", "keystrokes", "bash", "input")
PATHS = ("path", "file", "file_path", "filename", "filepath", "target_file", "notebook_path")
NEW_PARTS = ("new", "new_text", "replacement", "after", "new_str", "new_string")
NEW_WHOLES = ("file_text", "content", "contents")
OLD_TEXTS = ("old", "old_text", "search_text", "before", "old_str", "old_string")
SEARCHING = frozenset({"pattern", "query", "regex", "text", "glob", "search_term"})
EDITOR_VERBS = frozenset({"view", "create", "str_replace", "insert", "undo_edit"})
FINISHING = frozenset({"finish", "submit", "done", "complete_task"})

Kind = Literal["read", "edit", "command", "tests", "finish", "other"]
OWN_KINDS: dict[str, Kind] = {
    "read_file": "read",
    "edit_file": "edit",
    "run_command": "command",
    "bash": "command",
    "run_tests": "tests",
    "finish": "finish",
}
SUMMARY = re.compile(r"(?:^|[ =,])(\d{1,9}) (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)\b")
SECONDS = re.compile(r"\bin (\d{1,9}(?:\.\d{1,9})?) ?s\b")
TAIL = 4000  # characters of an answer in which the summary of a test run is looked for
ERROR_CHARS = 400  # of an answer in which an edit is said to have failed; further on it may quote a file
NOT_APPLIED = re.compile(  # the text to replace was not there, or there more than once
    r"the text to replace (is not in|occurs (more than )?\d+ times)"
    r"|no replacement was (performed|made)|did not appear verbatim|string to replace (was )?not found"
    r"|old_?str(ing)?\W? (was )?not found|old_?str(ing)?\W? is not unique|\d+ matches of the string to replace",
    re.IGNORECASE,
)
At = tuple[int, int]  # segment and message


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a run of tests says of itself; `failed` is None where it does not."""

    selection: str
    failed: int | None
    seconds: float


@dataclass(frozen=True)
class ToolUse:
    """One call of the agent's and the answer to it. `tool` is the tool's own name, where it is one of ours."""

    order: int
    at: At
    call: ToolCall
    tool: str
    kind: Kind
    answer: Message | None
    files: Mapping[str, str]  # path -> text of what the agent had written by then, as far as calls show it

    @property
    def segment(self) -> int:
        return self.at[0]

    @property
    def message(self) -> int:
        return self.at[1]

    @property
    def ran(self) -> bool:
        """Whether there is such a tool and it takes such arguments."""
        return not self.call.error and (self.answer is None or self.answer.status not in INVALID)

    @property
    def went_well(self) -> bool:
        return self.answer is not None and self.answer.status in ("ok", None) and not self.call.error

    @property
    def output(self) -> str:
        return self.answer.text if self.answer else ""

    @cached_property
    def given_path(self) -> str:
        """As the agent wrote it."""
        return text_of(self.call, PATHS) or ""

    @cached_property
    def path(self) -> str:
        return relative(self.given_path)

    @cached_property
    def command(self) -> Command:
        """Nothing in it where the call is no command."""
        return Command((self.kind == "command" and text_of(self.call, COMMANDS)) or "", self.files)

    @property
    def text(self) -> str:
        """The command with what it runs; of other calls the path."""
        return self.command.text if self.kind == "command" else self.given_path

    @property
    def reads(self) -> bool:
        """Whether it does something with a path, and neither edits nor runs a command."""
        return self.kind not in ("edit", "command") and bool(self.given_path) and not self.call.error

    @property
    def simple(self) -> list[Words]:
        """The simple commands in it."""
        return self.command.simple

    @cached_property
    def programs(self) -> frozenset[str]:
        """The names of the programs that it starts; of `python -m NAME` the module's."""
        modules = [word for words in self.simple if words[1:2] == ["-m"] for word in words[2:3]]
        return frozenset([*map(name_of, self.simple), *modules])

    @property
    def python(self) -> list[str]:
        """Code that it runs."""
        return self.command.python

    @cached_property
    def written(self) -> dict[str, str]:
        """Path -> what it puts there, as far as the call shows it: a part where the whole is unknown."""
        if self.kind == "command":
            return self.command.files_inside
        new, old = new_text(self.call), text_of(self.call, OLD_TEXTS)
        if self.kind != "edit" or not self.path or new is None:
            return {}
        whole = self.files.get(self.path, "").replace(old, new, 1) if old else new
        return {self.path: whole or new}

    @cached_property
    def replacements(self) -> list[tuple[str, str]]:
        """What an edit takes away and puts there; nothing is taken away where it writes the whole file."""
        if self.kind != "edit":
            return []
        listed = [value for value in self.call.arguments.values() if isinstance(value, list)]
        several = [(one.get("old"), one.get("new")) for value in listed for one in value if isinstance(one, dict)]
        texts = [(old, new) for old, new in several if isinstance(old, str) and isinstance(new, str)]
        return [(text_of(self.call, OLD_TEXTS) or "", new_text(self.call) or ""), *texts]

    @property
    def may_write(self) -> bool:
        """Whether files may be others after it. An edit that was refused changed none."""
        if self.kind == "edit":
            return self.answer is None or self.answer.status in ("ok", None)
        return self.ran and self.command.may_write

    @property
    def runs_tests(self) -> bool:
        return self.ran and (self.kind == "tests" or self.command.runs_tests)

    @cached_property
    def tests(self) -> TestRun | None:
        selection = self.command.tests
        if self.kind == "tests":
            selection = next((value for value in self.call.arguments.values() if isinstance(value, str)), "")
        return _test_run(selection, self.output) if selection is not None and self.answer and self.ran else None


def shown(text: str, limit: int) -> str:
    """What shows a fault, in one line."""
    text = " ".join(text[: 4 * limit].split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def spoken(rollout: Rollout) -> Iterator[tuple[At, Message]]:
    """The messages that the agent wrote."""
    for number, segment in enumerate(rollout.segments):
        for index, message in enumerate(segment.messages):
            if segment.is_own(message):
                yield (number, index), message


def with_siblings(rollouts: Iterable[Rollout]) -> Iterator[tuple[Rollout, list[Rollout]]]:
    """Each with the others of its group. What the machine ended is no sibling; other agents' groups are not known."""
    rollouts = list(rollouts)
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if not rollout.foreign and not rollout.fault:
            groups[rollout.group].append(rollout)
    for rollout in rollouts:
        yield rollout, [other for other in groups[rollout.group] if other is not rollout]


def tool_uses_of(rollout: Rollout) -> list[ToolUse]:
    uses: list[ToolUse] = []
    files: dict[str, str] = {}
    for at, message in spoken(rollout):
        answers = answers_to(rollout.segments[at[0]].messages, at[1])
        for call, answer in zip(message.calls, answers, strict=True):
            tool = rollout.own_names.get(call.name, call.name)
            uses.append(ToolUse(len(uses), at, call, tool, _kind(rollout, call, tool), answer, files))
            files = {**files, **uses[-1].written}
    return uses


def answers_to(messages: list[Message], index: int) -> list[Message | None]:
    """The tool messages right after a message, one per call. None where their numbers differ."""
    count = len(messages[index].calls)
    following: list[Message | None] = [*takewhile(lambda one: one.role == "tool", messages[index + 1 :])]
    return following if len(following) == count else [None] * count


def text_of(call: ToolCall, names: tuple[str, ...]) -> str | None:
    """The first argument of these names that is text, or a command as a list of words."""
    for name in names:
        value = call.arguments.get(name)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return value[-1] if value[0] in ("bash", "sh", "/bin/sh", "/bin/bash") else shlex.join(value)
        if isinstance(value, str):
            return value
    return None


def new_text(call: ToolCall) -> str | None:
    """What an edit puts into a file: a part of it, or all of it."""
    return text_of(call, (*NEW_PARTS, *NEW_WHOLES))


def _kind(rollout: Rollout, call: ToolCall, tool: str) -> Kind:
    """By name where the rollout knows its tools, else by what the call is given."""
    if call.error:
        return "other"
    if call.name in rollout.own_names:
        return OWN_KINDS.get(tool, "other")
    path, command = text_of(call, PATHS), text_of(call, COMMANDS)
    if path and new_text(call) is not None:
        return "edit"
    if command is not None and not (path and command in EDITOR_VERBS):
        return "command"
    if path and SEARCHING.isdisjoint(call.arguments) and command in (None, "view"):
        return "read"
    if tool == "run_tests":
        return "tests"
    return "finish" if tool in FINISHING else "other"


def _test_run(selection: str, answer: str) -> TestRun:
    for line in reversed(answer[-TAIL:].splitlines()):
        counts = {kind: int(number) for number, kind in SUMMARY.findall(line)}
        seconds = SECONDS.search(line)
        if seconds and counts:
            failed = sum(count for kind, count in counts.items() if kind in ("failed", "error", "errors"))
            ran = failed or counts.get("passed")
            return TestRun(selection, failed if ran else None, float(seconds.group(1)))
    return TestRun(selection, None, 0.0)
