"""Other agents' work as rollouts: ATIF v1 (JSON), messages as OpenAI's or Anthropic's API has them, or our rollouts.

The format of a file is recognised by its content. What cannot be read is counted. Left out of ATIF: token ids, images,
and the trajectories of subagents in files of their own. What a rollout lost is an event: a judge can do without it,
training leaves such a rollout out (stages/sources.py).
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offbook.core.client import mend_escapes
from offbook.core.runfolder import read_lines
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.signals.trajectory.shell import relative
from offbook.signals.trajectory.tool_calls import (
    ERROR_CHARS,
    NEW_PARTS,
    NEW_WHOLES,
    NOT_APPLIED,
    PATHS,
    answers_to,
    text_of,
)
from offbook.types import Event, Message, OffbookError, Role, Rollout, Segment, ToolCall, ToolSpec, Usage

MAX_BYTES = 512 << 20
SHOWN = 3  # of the lines that are no trajectory
MAX_DEPTH = 100  # of lists and objects in each other; what reads them later must not run out of stack
ATIF_ROLES: dict[str, Role] = {"user": "user", "system": "system", "agent": "assistant"}
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "tool": "tool", "function": "tool"}  # fmt: skip
KEYS = ("messages", "conversation", "conversations", "history", "trajectory", "traj")
TASK_KEYS = ("task_id", "task", "task_name", "instance_id")
WRITES = re.compile(r"writ|creat|edit|insert|append|replac|save|update", re.IGNORECASE)
REFUSED = re.compile(  # for another reason
    r"\A\W*(tool_use_)?error\b|\bno (replacements?|changes?|edits?) (was|were) (performed|made|applied)"
    r"|(changes|edit) (have|has|was|were) not (been )?applied|file has not been read yet"
    r"|(string|text) to replace (was |is )?not (found|in)\b|old_?str(ing)?\W? (was |is )?not (found|unique)",
    re.IGNORECASE,
)
# Kinds of events.
LOST = "lost"  # something of the trajectory is not in its messages
UNLEARNED = "unlearned"  # the data marks this message as context that is not trained on
UNLEARNED_CODE = "unlearned_code"  # of this message the code that its calls insert is not trained on


@dataclass(slots=True)
class Loaded:
    rollouts: list[Rollout] = field(default_factory=list)
    tools: list[tuple[ToolSpec, ...]] = field(default_factory=list)  # of each, where its file has definitions
    lines: list[int] = field(default_factory=list)  # where each of them is
    problems: list[tuple[int, str]] = field(default_factory=list)  # lines that are no trajectory, and why

    @property
    def unreadable(self) -> int:
        return len(self.problems)


def read_trajectories(path: Path) -> Loaded:
    """As `load_trajectories`, with an error if nothing in the file is a trajectory."""
    loaded = load_trajectories(path)
    if not loaded.rollouts:
        reasons = "; ".join(f"line {line}: {reason}" for line, reason in loaded.problems[:SHOWN])
        more = f"; and {loaded.unreadable - SHOWN} more" if loaded.unreadable > SHOWN else ""
        why = reasons + more or "neither ATIF, nor messages, nor rollouts of offbook"
        raise OffbookError(f"{path} has no trajectory in it: {why}")
    return loaded


def load_trajectories(path: Path, name: str = "") -> Loaded:
    """One JSON value, a trajectory or a list of them; or one JSON value a line, trajectories or the messages of one.

    `name` is for trajectories without a name: the file's, if empty.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OffbookError(f"{path} has more than {MAX_BYTES >> 20} MB; split it")
        text = path.read_text(errors="replace")
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    values: list[tuple[int, Any]] = []
    try:
        value = _parsed(text)
        is_list = isinstance(value, list) and not (value and isinstance(value[0], dict) and "role" in value[0])
        values = [(1, one) for one in (value if is_list else [value])]
    except ValueError:
        for number, line in enumerate(text.split("\n"), 1):  # JSON may have other line ends in its strings
            if line.strip():
                values.append((number, None))
                with suppress(ValueError):
                    values[-1] = number, _parsed(line)
        if values and all(isinstance(value, dict) and "role" in value for _, value in values):
            values = [(1, [value for _, value in values])]  # one conversation, a message a line
    if any(isinstance(value, dict) and "segments" in value for _, value in values):
        rollouts, unreadable = read_lines(path, Rollout)
        problems = [(line, "no rollout of offbook") for line in unreadable]
        return Loaded(rollouts, [()] * len(rollouts), [0] * len(rollouts), problems)
    loaded, name = Loaded(), name or path.stem
    for place, (number, value) in enumerate(values):
        try:
            rollout, tools = from_value(value, name if len(values) == 1 else f"{name}/{place}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            loaded.problems.append((number, "not JSON" if value is None else reason))
            continue
        loaded.rollouts.append(rollout)
        loaded.tools.append(tools)
        loaded.lines.append(number)
    return loaded


def _parsed(text: str) -> Any:
    """The value of a JSON text that anything may have written. A ValueError if it is none that can be worked with."""

    def is_deeper(value: Any, limit: int) -> bool:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return limit < 0 or any(is_deeper(one, limit - 1) for one in inside)

    try:
        value = json.loads(mend_escapes(text))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deep")
    return value


def from_value(value: Any, name: str) -> tuple[Rollout, tuple[ToolSpec, ...]]:
    """A trajectory of either format, and the tools that it defines. Raises as `from_messages` does."""
    rollout = (from_atif if isinstance(value, dict) and "steps" in value else from_messages)(value, name)
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    defined = about.get("tools") or (about.get("agent") or {}).get("tool_definitions") or ()
    tools: list[ToolSpec] = []
    for one in _parsed(defined) if isinstance(defined, str) else defined:  # tables keep them as text
        if not isinstance(one, dict):  # a name alone defines nothing
            continue
        function = one.get("function") or one
        tool, parameters = function["name"], function.get("parameters", function.get("input_schema"))
        if not isinstance(tool, str) or not isinstance(parameters, dict | None):
            raise ValueError("a tool needs a name, and a schema of its parameters")
        schema = parameters or {"type": "object", "properties": {}}
        tools.append(ToolSpec(tool, str(function.get("description") or ""), schema))
    if tools:
        rollout.tools = tuple(tool.name for tool in tools)
        _mark_unknown(rollout)
    return rollout, tuple(tools)


def _mark_unknown(rollout: Rollout) -> None:
    """Sets the status of answers to calls of tools that are not defined, whatever they say."""
    for segment in rollout.segments:
        waiting: list[ToolCall] = []
        for number, message in enumerate(segment.messages):
            if message.calls:
                waiting = [*message.calls]
            elif message.role == "tool" and waiting and (call := waiting.pop(0)).name not in rollout.tools:
                segment.messages[number] = replace(message, status="unknown_tool")
                rollout.usage.invalid_calls += call.error is None


def lost_of(rollout: Rollout) -> str:
    """The first thing that its messages lack, in a few words; empty where nothing is lost."""
    return next((event.detail for event in rollout.events if event.kind == LOST), "")


def from_atif(value: dict[str, Any], name: str) -> Rollout:
    """Steps of a user, the system or the agent, with calls and their observations.

    A ValueError or KeyError if it is not what it says it is.
    """
    version = str(value.get("schema_version", ""))
    if not version.startswith("ATIF-v1"):
        raise ValueError(f"{version or 'no version'} is not ATIF v1")
    conversation = Conversation()
    for step in value["steps"]:
        made = step.get("tool_calls") or ()
        calls = tuple(_call(call["function_name"], call.get("arguments")) for call in made)
        role, ids = _role(step["source"], ATIF_ROLES), (call.get("tool_call_id") for call in made)
        conversation.add(role, step.get("message"), calls, ids=ids, thought=step.get("reasoning_content"))
        for result in (step.get("observation") or {}).get("results") or ():
            conversation.add("tool", result.get("content"), ids=[result.get("source_call_id")])
    id = str(value.get("session_id") or value.get("trajectory_id") or name)
    # ATIF has no field for the task, so every writer has its own; agents are no tasks.
    agent = value.get("agent") or {}
    places = (value, value.get("extra"), value.get("metadata"), agent.get("extra"))
    tasks = (about.get(key) for about in places if isinstance(about, dict) for key in TASK_KEYS)
    task = next((str(task) for task in tasks if isinstance(task, str | int) and str(task)), id)
    return conversation.rollout(id, task)


def from_messages(value: Any, name: str) -> Rollout:
    """A list of messages, bare or under a key. A ValueError or KeyError if it is no conversation."""
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    listed = value if isinstance(value, list) else next((about[key] for key in KEYS if key in about), None)
    if not listed:
        raise ValueError("no messages")
    conversation = Conversation()
    if about.get("system"):  # outside of the messages, as Anthropic has it
        conversation.add("system", about["system"])
    for one in listed:
        content = one.get("content")
        blocks = content if isinstance(content, list) else []
        kinds = [block.get("type") if isinstance(block, dict) else "text" for block in blocks]
        if "tool_use" in kinds or "tool_result" in kinds:  # Anthropic's: answers come before the words of the user
            results = [block for block in blocks if block["type"] == "tool_result"]
            uses = [block for block in blocks if block["type"] == "tool_use"]
            words = [block for block in blocks if block["type"] not in ("tool_result", "tool_use")]
            for block in results:
                answer = conversation.add("tool", block.get("content"), ids=[block.get("tool_use_id")])
                answer.status = "failed" if block.get("is_error") else "ok"
            if words or uses:
                calls = tuple(_call(block["name"], block.get("input")) for block in uses)
                ids = [block.get("id") for block in uses]
                conversation.add(_role(one["role"], ROLES), words, calls, ids=ids)
        else:
            made = [*(one.get("tool_calls") or ()), *([one["function_call"]] if one.get("function_call") else [])]
            functions = [call.get("function", call) for call in made]
            calls = tuple(_call(function["name"], function.get("arguments")) for function in functions)
            role, thought = _role(one["role"], ROLES), one.get("reasoning_content") or one.get("reasoning")
            ids = [one.get("tool_call_id")] if role == "tool" else [call.get("id") for call in made]
            conversation.add(role, content, calls, ids=ids, thought=thought)
        if one["role"] == "assistant":
            conversation.weigh(one.get("weight"))
    id = next((str(about[key]) for key in ("id", "session_id", "instance_id") if about.get(key)), name)
    return conversation.rollout(id, str(about.get("task") or about.get("instance_id") or name))


def _role(name: Any, roles: dict[str, Role]) -> Role:
    if name not in roles:
        raise ValueError(f"{name!r} is none of the roles {', '.join(roles)}")
    return roles[name]


def _call(name: Any, arguments: Any) -> ToolCall:
    """Arguments are an object, or a string of JSON. What is neither is a call that could not be read."""
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments or "{}")
        except ValueError:
            return ToolCall(str(name), {}, "its arguments are not JSON")
    return ToolCall(str(name), arguments if isinstance(arguments, dict) else {"input": arguments})


@dataclass(slots=True)
class Conversation:
    """Collects the messages of a trajectory: text and thoughts, answers in the order of their calls, what was lost."""

    messages: list[Message] = field(default_factory=list)
    ids: list[tuple[str, ...]] = field(default_factory=list)  # of its calls, or of the call that it answers; may be ""
    events: list[Event] = field(default_factory=list)

    def add(
        self, role: Role, content: Any, calls: Sequence[ToolCall] = (), *, ids: Iterable[Any] = (), thought: Any = None
    ) -> Message:
        """Content is a string, or parts of which text and thoughts are read; `thought` comes from another field."""
        if not isinstance(content, str | list | None):
            raise ValueError("content is neither text nor parts")
        thoughts, texts = [thought] if thought else [], list[str]()
        for part in content if isinstance(content, list) else [content or ""]:
            read = part if isinstance(part, dict) else {"text": str(part)}
            if isinstance(read.get("text"), str):
                texts.append(read["text"])
            elif read.get("type") == "thinking":
                thoughts.append(read.get("thinking"))
            else:
                self._lose(f"a part of the type {read.get('type')!r}")
        text = "\n".join(texts)
        if role in ("user", "assistant") and not text.strip() and not calls:
            self._lose(f"a message of the {role} without text")
        if role == "assistant" and thoughts and not answer_start(text):
            answer = f"\n{text}" if text else ""
            if all(isinstance(one, str) for one in thoughts):
                text = "\n".join([THINK_START, *(one.strip() for one in thoughts), THINK_END, ""]) + answer
            else:
                self._lose("a thought that is no text")
                text = answer
        self.messages.append(Message(role, text, 0, 0, 0, 0, tuple(calls), "ok" if role == "tool" else None))
        self.ids.append(tuple(str(id or "") for id in ids))
        return self.messages[-1]

    def weigh(self, weight: object) -> None:
        """OpenAI's weight of the last message: 0 is not trained on."""
        if weight == 0:
            self.events.append(Event(len(self.messages) - 1, UNLEARNED, "weight 0"))
        elif weight not in (None, 1):
            self._lose(f"a weight of {weight!r}, which is neither 0 nor 1")

    def rollout(self, name: str, task: str) -> Rollout:
        heads = [number for number, message in enumerate(self.messages) if message.role != "tool"]
        for head, end in zip(heads, [*heads[1:], len(self.messages)], strict=True):
            if end > head + 1:
                self._order_answers(head, end)
        calls = [call for one in self.messages for call in one.calls]
        usage = Usage(
            turns=sum(one.role == "assistant" for one in self.messages),
            calls=len(calls),
            invalid_calls=sum(call.error is not None for call in calls),
        )
        tools = tuple(dict.fromkeys(call.name for call in calls))
        changed = _changes(self.messages)
        segments = [Segment(messages=self.messages)]
        rollout = Rollout(name, task, task, tools, segments, "answer", usage, changed, foreign=True)
        rollout.events += self.events
        if changed:
            rollout.events.append(Event(-1, "changes_partial", f"{len(changed)} files as far as calls show them"))
        return rollout

    def _order_answers(self, head: int, end: int) -> None:
        """By the call's id where an answer has one, else by order. Ids that only answers have say nothing."""
        calls, place = self.ids[head], dict[int, int]()
        free = list(range(len(calls)))
        for answer in range(head + 1, end):
            (id,) = self.ids[answer]
            fitting = [call for call in free if id and calls[call] == id]
            if fitting:
                place[answer] = fitting[0]
                free.remove(fitting[0])
            elif id and (any(calls) or not calls):
                self._lose(f"an answer to {id!r}, which is no call of the message before")
                return
        if not place:
            return
        for answer in range(head + 1, end):
            if answer not in place:
                place[answer] = free.pop(0) if free else len(calls)
        if free and end < len(self.messages):  # the last calls of all may end the work
            self._lose(f"no answer to the call {calls[free[0]]!r}")
        order = sorted(place, key=lambda answer: (place[answer], answer))
        self.messages[head + 1 : end] = [self.messages[answer] for answer in order]

    def _lose(self, what: str) -> None:
        self.events.append(Event(-1, LOST, what))


def _changes(messages: list[Message]) -> dict[str, str | None]:
    """The files as far as the calls show them: whole where one wrote the whole, else the new pieces in order.

    An edit whose answer says that it was refused changed nothing, and its answer is one of a call that failed.
    """
    pieces: dict[str, list[str]] = {}
    for index, message in enumerate(messages):
        for call, answer in zip(message.calls, answers_to(messages, index), strict=True):
            path, whole, part = (text_of(call, names) for names in (PATHS, NEW_WHOLES, NEW_PARTS))
            if whole is None and WRITES.search(call.name):
                whole = text_of(call, ("text",))  # of any other tool, more often what it searches for
            if not path or (whole is None and part is None):
                continue
            said = answer.text[:ERROR_CHARS] if answer else ""
            if answer and (NOT_APPLIED.search(said) or REFUSED.search(said)):
                answer.status = "failed"
            elif part is not None:
                pieces.setdefault(relative(path), []).append(textwrap.dedent(part))
            elif whole is not None:
                pieces[relative(path)] = [whole]
    return {path: "\n\n".join(texts) for path, texts in pieces.items()}
