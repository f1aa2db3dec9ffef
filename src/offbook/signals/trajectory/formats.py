"""Other agents' work as rollouts: ATIF v1 (JSON), messages as OpenAI's or Anthropic's API has them, or our rollouts.

The format of a file is recognised by its content. What cannot be read is counted. Left out of ATIF: token ids, images,
and the trajectories of subagents in files of their own. What a rollout lost is an event: a judge can do without it,
training leaves such a rollout out (stages/sources.py).
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
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

SHOWN = 3  # of the lines that are no trajectory
MAX_DEPTH = 100  # of nested lists and objects; what reads them later must not run out of stack
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                          "agent": "assistant", "tool": "tool", "function": "tool"}  # fmt: skip
KEYS = ("messages", "conversation", "conversations", "history", "trajectory")
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
        values = _values(path.read_text(errors="replace"))
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    if any(isinstance(value, dict) and "segments" in value for _, value in values):
        rollouts, unreadable = read_lines(path, Rollout)
        problems = [(line, "no rollout of offbook") for line in unreadable]
        return Loaded(rollouts, [()] * len(rollouts), [0] * len(rollouts), problems)
    loaded = Loaded()
    name = name or path.stem
    for place, (line, value) in enumerate(values):
        try:
            rollout, tools = from_value(value, name if len(values) == 1 else f"{name}/{place}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            loaded.problems.append((line, "not JSON" if value is None else reason))
            continue
        loaded.rollouts.append(rollout)
        loaded.tools.append(tools)
        loaded.lines.append(line)
    return loaded


def _values(text: str) -> list[tuple[int, Any]]:
    """The trajectories of a file with their lines; None for a line that is no JSON."""
    with suppress(ValueError):
        value = _parsed(text)
        several = isinstance(value, list) and not _is_conversation(value[:1])
        return [(1, one) for one in value] if several else [(1, value)]
    values: list[tuple[int, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have other line ends in its strings
        value = None
        with suppress(ValueError):
            value = _parsed(line)
        if line.strip():
            values.append((number, value))
    messages = [value for _, value in values]
    return [(1, messages)] if _is_conversation(messages) else values


def _is_conversation(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) and "role" in value for value in values)


def _parsed(text: str) -> Any:
    """The value of a JSON text from anywhere. A ValueError if it is none that can be worked with."""
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


def from_value(value: Any, name: str) -> tuple[Rollout, tuple[ToolSpec, ...]]:
    """A trajectory of either format, and the tools that it defines. Raises as `from_messages` does."""
    rollout = (from_atif if isinstance(value, dict) and "steps" in value else from_messages)(value, name)
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    defined = about.get("tools") or (about.get("agent") or {}).get("tool_definitions") or ()
    listed = _parsed(defined) if isinstance(defined, str) else defined  # tables keep them as text
    tools = tuple(_tool(one.get("function") or one) for one in listed if isinstance(one, dict))
    if tools:
        rollout.tools = tuple(tool.name for tool in tools)
        for call, answer in _answered(rollout.segments[0].messages):
            if answer and call.name not in rollout.tools:
                answer.status = "unknown_tool"
                rollout.usage.invalid_calls += call.error is None
    return rollout, tools


def _tool(function: dict[str, Any]) -> ToolSpec:
    name = function["name"]
    parameters = function.get("parameters", function.get("input_schema"))
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise ValueError("a tool needs a name, and a schema of its parameters")
    schema = parameters or {"type": "object", "properties": {}}
    return ToolSpec(name, str(function.get("description") or ""), schema)


def lost_of(rollout: Rollout) -> str:
    """The first thing that its messages lack, in a few words; empty where nothing is lost."""
    return next((event.detail for event in rollout.events if event.kind == LOST), "")


@dataclass(slots=True)
class Turn:
    """A message of any format, before it is checked."""

    role: Any
    content: Any  # a string, or parts of which text and thoughts are read
    thought: Any = None
    calls: list[tuple[Any, Any, Any]] = field(default_factory=list)  # id, name, arguments
    answers: list[tuple[Any, Any, bool]] = field(default_factory=list)  # the call's id, content, whether it failed
    weight: Any = None  # OpenAI's: 0 is not trained on


def from_atif(value: dict[str, Any], name: str) -> Rollout:
    """Steps of a user, the system or the agent, with calls and their observations.

    A ValueError or KeyError if it is not what it says it is.
    """
    version = str(value.get("schema_version", ""))
    if not version.startswith("ATIF-v1"):
        raise ValueError(f"{version or 'no version'} is not ATIF v1")
    turns: list[Turn] = []
    for step in value["steps"]:
        turn = Turn(step["source"], step.get("message"), step.get("reasoning_content"))
        for call in step.get("tool_calls") or ():
            turn.calls.append((call.get("tool_call_id"), call["function_name"], call.get("arguments")))
        for result in (step.get("observation") or {}).get("results") or ():
            turn.answers.append((result.get("source_call_id"), result.get("content"), False))
        turns.append(turn)
    id = str(value.get("session_id") or value.get("trajectory_id") or name)
    # ATIF has no field for the task, so every writer has its own; agents are no tasks.
    about: dict[str, Any] = {}
    for more in ((value.get("agent") or {}).get("extra"), value.get("metadata"), value.get("extra"), value):
        about |= more or {}
    tasks = [str(about[key]) for key in TASK_KEYS if isinstance(about.get(key), str | int)]
    return _rollout(turns, id, next(filter(None, tasks), id))


def from_messages(value: Any, name: str) -> Rollout:
    """A list of messages, bare or under a key. A ValueError or KeyError if it is no conversation."""
    about: dict[str, Any] = value if isinstance(value, dict) else {}
    listed = value if isinstance(value, list) else next((about[key] for key in KEYS if key in about), None)
    if not listed:
        raise ValueError("no messages")
    turns = [Turn("system", about["system"])] if about.get("system") else []  # as Anthropic has it
    for one in listed:
        content = one.get("content")
        if ROLES.get(one["role"]) == "tool":
            turns[-1].answers.append((one.get("tool_call_id"), content, False))
            continue
        turn = Turn(one["role"], content, one.get("reasoning_content") or one.get("reasoning"))
        turn.weight = one.get("weight") if one["role"] == "assistant" else None
        for call in one.get("tool_calls") or ():
            function = call.get("function", call)
            turn.calls.append((call.get("id"), function["name"], function.get("arguments")))
        if isinstance(content, list):
            turn.content = _without_tools(content, turn, turns)
        if turn.content or turn.calls or not content:  # answers alone are no message
            turns.append(turn)
    id = next((str(about[key]) for key in ("id", "session_id", "instance_id") if about.get(key)), name)
    return _rollout(turns, id, str(about.get("task") or about.get("instance_id") or name))


def _without_tools(blocks: list[Any], turn: Turn, earlier: list[Turn]) -> list[Any]:
    """The blocks of a message of Anthropic's without calls, and without answers, which come before a user's words."""
    rest: list[Any] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            turn.calls.append((block.get("id"), block["name"], block.get("input")))
        elif kind == "tool_result":
            earlier[-1].answers.append((block.get("tool_use_id"), block.get("content"), bool(block.get("is_error"))))
        else:
            rest.append(block)
    return rest


def _call(name: Any, arguments: Any) -> ToolCall:
    """Arguments are an object, or a string of JSON. What is neither is a call that could not be read."""
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments or "{}")
        except ValueError:
            return ToolCall(str(name), {}, "its arguments are not JSON")
    return ToolCall(str(name), arguments if isinstance(arguments, dict) else {"input": arguments})


def _rollout(turns: list[Turn], name: str, task: str) -> Rollout:
    """Texts with thoughts before them, answers in the order of their calls, and what was lost as events."""
    messages: list[Message] = []
    events: list[Event] = []
    for number, turn in enumerate(turns):
        role = ROLES.get(turn.role)
        if role is None:
            raise ValueError(f"{turn.role!r} is none of the roles {', '.join(ROLES)}")
        calls = tuple(_call(name, arguments) for _, name, arguments in turn.calls)
        thoughts = [turn.thought.strip()] if isinstance(turn.thought, str) and turn.thought else []
        text = _text(turn.content, thoughts, events)
        if role != "system" and not text.strip() and not calls:
            _lose(events, f"a message of the {role} without text")
        if role == "assistant" and thoughts and not answer_start(text):
            text = "\n".join([THINK_START, *thoughts, THINK_END, "", *([text] if text else [])])
        if turn.weight == 0:
            events.append(Event(len(messages), UNLEARNED, "weight 0"))
        elif turn.weight not in (None, 1):
            _lose(events, f"a weight of {turn.weight!r}, which is neither 0 nor 1")
        messages.append(Message(role, text, 0, 0, 0, 0, calls))
        messages += _answers(turn, events, is_last=number == len(turns) - 1)
    calls = tuple(call for one in messages for call in one.calls)
    usage = Usage(
        turns=sum(one.role == "assistant" for one in messages),
        calls=len(calls),
        invalid_calls=sum(call.error is not None for call in calls),
    )
    tools = tuple(dict.fromkeys(call.name for call in calls))
    changed = _changes(messages)
    if changed:
        events.append(Event(-1, "changes_partial", f"{len(changed)} files as far as calls show them"))
    segments = [Segment(messages=messages)]
    return Rollout(name, task, task, tools, segments, "answer", usage, changed, foreign=True, events=events)


def _text(content: Any, thoughts: list[str], events: list[Event]) -> str:
    if not isinstance(content, str | list | None):
        raise ValueError("content is neither text nor parts")
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content or ""]:
        read = part if isinstance(part, dict) else {"text": str(part)}
        if isinstance(read.get("text"), str):
            texts.append(read["text"])
        elif read.get("type") == "thinking":
            thoughts.append(str(read.get("thinking")).strip())
        else:
            _lose(events, f"a part of the type {read.get('type')!r}")
    return "\n".join(texts)


def _answers(turn: Turn, events: list[Event], is_last: bool) -> list[Message]:
    """In the order of the calls: by the call's id where both have one, else by order."""
    ids = [str(id or "") for id, _, _ in turn.calls]
    named = [str(id or "") if any(ids) or not ids else "" for id, _, _ in turn.answers]
    messages = [
        Message("tool", _text(content, [], events), 0, 0, 0, 0, status="failed" if failed else "ok")
        for _, content, failed in turn.answers
    ]
    for number, id in enumerate(named):
        if id and (id not in ids or id in named[:number]):
            _lose(events, f"an answer to {id!r}, which is no call of the message before")
            return messages
    found = {ids.index(id): message for id, message in zip(named, messages, strict=True) if id}
    rest = [message for id, message in zip(named, messages, strict=True) if not id]
    for place in range(len(ids)):
        if place not in found and rest:
            found[place] = rest.pop(0)
    silent = [id for place, id in enumerate(ids) if place not in found]
    if messages and silent and not is_last:  # the last calls of all may end the work
        _lose(events, f"no answer to the call {silent[0]!r}")
    return [*(found[place] for place in sorted(found)), *rest]


def _lose(events: list[Event], what: str) -> None:
    events.append(Event(-1, LOST, what))


def _answered(messages: list[Message]) -> Iterator[tuple[ToolCall, Message | None]]:
    for index, message in enumerate(messages):
        yield from zip(message.calls, answers_to(messages, index), strict=True)


def _changes(messages: list[Message]) -> dict[str, str | None]:
    """The files as far as the calls show them: whole where one wrote the whole, else the new pieces in order.

    An edit whose answer says that it was refused changed nothing, and its answer is one of a call that failed.
    """
    pieces: dict[str, list[str]] = {}
    for call, answer in _answered(messages):
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
