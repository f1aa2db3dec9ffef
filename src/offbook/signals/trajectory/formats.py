"""Other agents' work as rollouts: ATIF v1 (JSON), messages as OpenAI's or Anthropic's API has them, or our rollouts.

Files are told apart by what is in them and not by their names. What cannot be read is counted. Left out of ATIF: token
ids, images, and the trajectories of subagents that live in files of their own.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
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


@dataclass(slots=True)
class Loaded:
    rollouts: list[Rollout] = field(default_factory=list)
    tools: list[tuple[ToolSpec, ...]] = field(default_factory=list)  # of each, where its file tells of them
    lines: list[int] = field(default_factory=list)  # where each of them is
    problems: list[tuple[int, str]] = field(default_factory=list)  # lines that are no trajectory, and why

    @property
    def unreadable(self) -> int:
        return len(self.problems)


def read_trajectories(path: Path) -> Loaded:
    """One sentence if nothing in the file is a trajectory."""
    loaded = load_trajectories(path)
    if not loaded.rollouts:
        raise OffbookError(f"{path} has no trajectory in it: {_why_none(loaded)}")
    return loaded


def _why_none(loaded: Loaded) -> str:
    told = [f"line {line}: {reason}" for line, reason in loaded.problems[:SHOWN]]
    more = f"; and {loaded.unreadable - SHOWN} more" if loaded.unreadable > SHOWN else ""
    return "; ".join(told) + more if told else "neither ATIF, nor messages, nor rollouts of offbook"


def load_trajectories(path: Path, name: str = "") -> Loaded:
    """One sentence if the file cannot be opened. `name` is for what has none of its own: the file's, if empty."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OffbookError(f"{path} has more than {MAX_BYTES >> 20} MB; split it")
        text = path.read_text(errors="replace")
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    name = name or path.stem
    return _whole(text, path, name) or _lines(text, path, name)


def _whole(text: str, path: Path, name: str) -> Loaded | None:
    """The file as one JSON value: one trajectory, or a list of them; None if it is not JSON."""
    try:
        value = _parsed(text)
    except ValueError:
        return None
    many = isinstance(value, list) and not (value and isinstance(value[0], dict) and "role" in value[0])
    return _collect([(1, one) for one in value] if many else [(1, value)], path, name)


def _lines(text: str, path: Path, name: str) -> Loaded:
    values: list[tuple[int, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have other ends of lines in its strings
        if line.strip():
            try:
                values.append((number, _parsed(line)))
            except ValueError:
                values.append((number, None))
    if values and all(isinstance(value, dict) and "role" in value for _, value in values):
        return _collect([(1, [value for _, value in values])], path, name)  # one conversation, a message a line
    return _collect(values, path, name)


def _collect(values: list[tuple[int, Any]], path: Path, name: str) -> Loaded:
    if any(isinstance(value, dict) and "segments" in value for _, value in values):
        rollouts, unreadable = read_lines(path, Rollout)
        problems = [(line, "no rollout of offbook") for line in unreadable]
        return Loaded(rollouts, [()] * len(rollouts), [0] * len(rollouts), problems)
    loaded = Loaded()
    for number, (line, value) in enumerate(values):
        try:
            rollout, tools = from_value(value, name if len(values) == 1 else f"{name}/{number}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            loaded.problems.append((line, _reason(value, error)))
            continue
        loaded.rollouts.append(rollout)
        loaded.tools.append(tools)
        loaded.lines.append(line)
    return loaded


def _reason(value: Any, error: Exception) -> str:
    if value is None:
        return "not JSON"
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def from_value(value: Any, name: str) -> tuple[Rollout, tuple[ToolSpec, ...]]:
    """A trajectory of either format, and the tools that it tells of. Raises as `from_messages` does."""
    read = from_atif if isinstance(value, dict) and "steps" in value else from_messages
    rollout, tools = read(value, name), _tools(value)
    if tools:
        rollout.tools = tuple(tool.name for tool in tools)
        _mark_unknown(rollout)
    return rollout, tools


def _mark_unknown(rollout: Rollout) -> None:
    """Answers to calls of tools that the agent was not told of: whatever they say, there is no such tool."""
    for segment in rollout.segments:
        waiting: list[ToolCall] = []
        for number, message in enumerate(segment.messages):
            if message.calls:
                waiting = [*message.calls]
            elif message.role == "tool" and waiting and (call := waiting.pop(0)).name not in rollout.tools:
                segment.messages[number] = replace(message, status="unknown_tool")
                rollout.usage.invalid_calls += call.error is None


def lost_of(rollout: Rollout) -> str:
    """The first thing that its messages do not have, in a few words; empty where they have all."""
    return next((event.detail for event in rollout.events if event.kind == LOST), "")


def _tools(value: Any) -> tuple[ToolSpec, ...]:
    """What the agent was told of its tools: OpenAI's `tools`, or ATIF's definitions of them."""
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    told = about.get("tools") or (about.get("agent") or {}).get("tool_definitions") or ()
    found = []
    for one in _parsed(told) if isinstance(told, str) else told:  # tables keep them as text
        if not isinstance(one, dict):  # a name alone tells of nothing
            continue
        function = one.get("function") or one
        name, about_it = function["name"], function.get("description")
        parameters = function.get("parameters", function.get("input_schema"))
        if not isinstance(name, str) or not isinstance(parameters, dict | None):
            raise ValueError("a tool needs a name, and a schema of its parameters")
        found.append(ToolSpec(name, str(about_it or ""), parameters or {"type": "object", "properties": {}}))
    return tuple(found)


def _parsed(text: str) -> Any:
    """The value of a JSON text that anybody may have written. A ValueError if it is none that can be worked with."""
    try:
        value = json.loads(mend_escapes(text))
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deep")
    return value


def _is_deeper(value: Any, limit: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return limit < 0 or any(_is_deeper(one, limit - 1) for one in inside)


def from_atif(value: dict[str, Any], name: str) -> Rollout:
    """Steps of a user, the system or the agent, with calls and what came back of them.

    A ValueError or KeyError if it is not what it says it is.
    """
    version = str(value.get("schema_version", ""))
    if not version.startswith("ATIF-v1"):
        raise ValueError(f"{version or 'no version'} is not ATIF v1")
    told = Conversation()
    for step in value["steps"]:
        made = step.get("tool_calls") or ()
        calls = tuple(_call(call["function_name"], call.get("arguments")) for call in made)
        role, ids = _role(step["source"], ATIF_ROLES), (call.get("tool_call_id") for call in made)
        told.add(role, step.get("message"), calls, ids, step.get("reasoning_content"))
        for result in (step.get("observation") or {}).get("results") or ():
            told.add("tool", result.get("content"), ids=[result.get("source_call_id")])
    id = str(value.get("session_id") or value.get("trajectory_id") or name)
    return _rollout(id, _task_of(value) or id, told)


def _task_of(value: dict[str, Any]) -> str:
    """ATIF has no field for it, so that every writer has its own; agents are no tasks."""
    agent = value.get("agent") or {}
    places = (value, value.get("extra"), value.get("metadata"), agent.get("extra"))
    found = (about.get(key) for about in places if isinstance(about, dict) for key in TASK_KEYS)
    return next((str(task) for task in found if isinstance(task, str | int) and str(task)), "")


def from_messages(value: Any, name: str) -> Rollout:
    """A list of messages, bare or under a key. A ValueError or KeyError if it is no conversation."""
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    listed = value if isinstance(value, list) else next((about[key] for key in KEYS if key in about), None)
    if not listed:
        raise ValueError("no messages")
    told = Conversation()
    if about.get("system"):  # beside the messages, as Anthropic has it
        told.add("system", about["system"])
    for one in listed:
        blocks = one["content"] if isinstance(one.get("content"), list) else []
        kinds = [block.get("type") if isinstance(block, dict) else "text" for block in blocks]
        if "tool_use" in kinds or "tool_result" in kinds:
            _add_blocks(told, one["role"], blocks)
        else:
            _add_message(told, one)
        if one["role"] == "assistant":
            told.weigh(one.get("weight"))
    id = next((str(about[key]) for key in ("id", "session_id", "instance_id") if about.get(key)), name)
    return _rollout(id, str(about.get("task") or about.get("instance_id") or name), told)


def _add_message(told: Conversation, one: dict[str, Any]) -> None:
    made = [*(one.get("tool_calls") or ()), *([one["function_call"]] if one.get("function_call") else [])]
    functions = [call.get("function", call) for call in made]
    calls = tuple(_call(function["name"], function.get("arguments")) for function in functions)
    role, thought = _role(one["role"], ROLES), one.get("reasoning_content") or one.get("reasoning")
    ids = [one.get("tool_call_id")] if role == "tool" else [call.get("id") for call in made]
    told.add(role, one.get("content"), calls, ids, thought)


def _add_blocks(told: Conversation, role: str, blocks: list[Any]) -> None:
    """A message of Anthropic's: answers of tools come before the words of the user."""
    results, uses = ([block for block in blocks if block["type"] == kind] for kind in ("tool_result", "tool_use"))
    words = [block for block in blocks if block["type"] not in ("tool_result", "tool_use")]
    for block in results:
        answer = told.add("tool", block.get("content"), ids=[block.get("tool_use_id")])
        answer.status = "failed" if block.get("is_error") else "ok"
    if words or uses:
        calls = tuple(_call(block["name"], block.get("input")) for block in uses)
        told.add(_role(role, ROLES), words, calls, [block.get("id") for block in uses])


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


def _rollout(name: str, task: str, told: Conversation) -> Rollout:
    told.pair()
    messages = told.messages
    calls = [call for one in messages for call in one.calls]
    usage = Usage(
        turns=sum(one.role == "assistant" for one in messages),
        calls=len(calls),
        invalid_calls=sum(call.error is not None for call in calls),
    )
    tools = tuple(dict.fromkeys(call.name for call in calls))
    changed = _changes(messages)
    rollout = Rollout(name, task, task, tools, [Segment(messages=messages)], "answer", usage, changed, foreign=True)
    rollout.events += told.events
    if changed:
        rollout.events.append(Event(-1, "changes_partial", f"{len(changed)} files as far as calls show them"))
    return rollout


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
            told = answer.text[:ERROR_CHARS] if answer else ""
            if answer and (NOT_APPLIED.search(told) or REFUSED.search(told)):
                answer.status = "failed"
            elif part is not None:
                pieces.setdefault(relative(path), []).append(textwrap.dedent(part))
            elif whole is not None:
                pieces[relative(path)] = [whole]
    return {path: "\n\n".join(texts) for path, texts in pieces.items()}


# Kinds of events.
LOST = "lost"  # something of the trajectory is not in its messages
UNLEARNED = "unlearned"  # whoever wrote the data says that this message is to be read alone


@dataclass(slots=True)
class Conversation:
    messages: list[Message] = field(default_factory=list)
    ids: list[tuple[str, ...]] = field(default_factory=list)  # of its calls, or of the call that it answers; may be ""
    events: list[Event] = field(default_factory=list)

    def add(
        self, role: Role, content: Any, calls: tuple[ToolCall, ...] = (), ids: Iterable[Any] = (), thought: Any = None
    ) -> Message:
        """Content is a string, or parts of which text and thoughts are read; `thought` is what stands beside it."""
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
            text = self._thought(thoughts) + (f"\n{text}" if text else "")
        self.messages.append(Message(role, text, 0, 0, 0, 0, calls, "ok" if role == "tool" else None))
        self.ids.append(tuple(str(id or "") for id in ids))
        return self.messages[-1]

    def _thought(self, thoughts: list[Any]) -> str:
        """As it stands in the text of a message everywhere."""
        if not all(isinstance(one, str) for one in thoughts):
            self._lose("a thought that is no text")
            return ""
        return "\n".join([THINK_START, *(one.strip() for one in thoughts), THINK_END, ""])

    def weigh(self, weight: object) -> None:
        """OpenAI's mark on the message that was added last: 0 is not learned."""
        if weight == 0:
            self.events.append(Event(len(self.messages) - 1, UNLEARNED, "weight 0"))
        elif weight not in (None, 1):
            self._lose(f"a weight of {weight!r}, which is neither 0 nor 1")

    def pair(self) -> None:
        """Puts answers into the order of their calls."""
        heads = [number for number, message in enumerate(self.messages) if message.role != "tool"]
        for head, end in zip(heads, [*heads[1:], len(self.messages)], strict=True):
            if end > head + 1:
                self._pair(head, end)

    def _pair(self, head: int, end: int) -> None:
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
