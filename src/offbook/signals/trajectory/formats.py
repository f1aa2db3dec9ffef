"""Other agents' work as rollouts: ATIF v1 (JSON), messages as OpenAI's or Anthropic's API has them, or our rollouts.

The format of a file is recognised by its content. What cannot be read is counted. Left out of ATIF: token ids, images,
and the trajectories of subagents in files of their own. What a rollout lost is an event: a judge can do without it,
training leaves such a rollout out (stages/sources.py).
"""

from __future__ import annotations

import json
import re
import textwrap
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

SHOWN = 3  # of the lines that are no trajectory
MAX_DEPTH = 100  # of lists and objects in each other; what reads them later must not run out of stack
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
        text = path.read_text(errors="replace")
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    values = _values(text)
    if any(isinstance(value, dict) and "segments" in value for _, value in values):
        rollouts, unreadable = read_lines(path, Rollout)
        problems = [(line, "no rollout of offbook") for line in unreadable]
        return Loaded(rollouts, [()] * len(rollouts), [0] * len(rollouts), problems)
    loaded = Loaded()
    name = name or path.stem
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


def _values(text: str) -> list[tuple[int, Any]]:
    """The trajectories of a file with their lines; None for a line that is no JSON."""
    with suppress(ValueError):
        value = _parsed(text)
        return (
            [(1, one) for one in ([value] if _is_message(value[:1]) else value)]
            if isinstance(value, list)
            else [(1, value)]
        )
    values: list[tuple[int, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):  # JSON may have other line ends in its strings
        if line.strip():
            values.append((number, None))
            with suppress(ValueError):
                values[-1] = number, _parsed(line)
    messages = [value for _, value in values]
    return [(1, messages)] if _is_message(messages) else values  # one conversation, a message a line


def _is_message(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) and "role" in value for value in values)


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


@dataclass(slots=True)
class Turn:
    """A message of any format, before it is checked."""

    role: Any
    content: Any  # a string, or parts of which text and thoughts are read
    thought: Any = None
    calls: list[tuple[Any, Any, Any]] = field(default_factory=list)  # id, name, arguments
    answers: list[tuple[Any, Any, bool]] = field(
        default_factory=list
    )  # the id that it names, content, whether it failed
    weight: Any = None


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
    places = (value, value.get("extra"), value.get("metadata"), (value.get("agent") or {}).get("extra"))
    tasks = (about.get(key) for about in places if isinstance(about, dict) for key in TASK_KEYS)
    return _rollout(turns, id, next((str(task) for task in tasks if task and isinstance(task, str | int)), id))


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
        blocks = content if isinstance(content, list) else []
        of_tools = [block for block in blocks if isinstance(block, dict) and str(block.get("type")).startswith("tool_")]
        for block in of_tools:  # Anthropic's: answers come before the words of the user
            if block["type"] == "tool_use":
                turn.calls.append((block.get("id"), block["name"], block.get("input")))
            else:
                turns[-1].answers.append((block.get("tool_use_id"), block.get("content"), bool(block.get("is_error"))))
        turn.content = [block for block in blocks if block not in of_tools] if of_tools else content
        if turn.content or turn.calls or not of_tools:
            turns.append(turn)
    id = next((str(about[key]) for key in ("id", "session_id", "instance_id") if about.get(key)), name)
    return _rollout(turns, id, str(about.get("task") or about.get("instance_id") or name))


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
        thoughts = [turn.thought] if turn.thought else []
        text = _text(turn.content, thoughts, events)
        if role != "system" and not text.strip() and not calls:
            _lose(events, f"a message of the {role} without text")
        if role == "assistant" and thoughts and not answer_start(text):
            answer = f"\n{text}" if text else ""
            if all(isinstance(one, str) for one in thoughts):
                text = "\n".join([THINK_START, *(one.strip() for one in thoughts), THINK_END, ""]) + answer
            else:
                _lose(events, "a thought that is no text")
                text = answer
        if turn.weight == 0:  # OpenAI's: not trained on
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


def _text(content: Any, thoughts: list[Any], events: list[Event]) -> str:
    if not isinstance(content, str | list | None):
        raise ValueError("content is neither text nor parts")
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content or ""]:
        read = part if isinstance(part, dict) else {"text": str(part)}
        if isinstance(read.get("text"), str):
            texts.append(read["text"])
        elif read.get("type") == "thinking":
            thoughts.append(read.get("thinking"))
        else:
            _lose(events, f"a part of the type {read.get('type')!r}")
    return "\n".join(texts)


def _answers(turn: Turn, events: list[Event], is_last: bool) -> list[Message]:
    """In the order of the calls: by the call's id where an answer has one, else by order. Ids that only answers have
    say nothing."""
    places = {str(id): place for place, (id, _, _) in enumerate(turn.calls) if id}
    has_ids = bool(places) or not turn.calls
    found: dict[int, Message] = {}
    rest: list[Message] = []
    stray = ""
    for id, content, failed in turn.answers:
        message = Message("tool", _text(content, [], events), 0, 0, 0, 0, status="failed" if failed else "ok")
        if id and str(id) in places and not stray:
            found[places.pop(str(id))] = message
            continue
        stray = stray or (str(id) if id and has_ids else "")
        rest.append(message)
    if stray:
        _lose(events, f"an answer to {stray!r}, which is no call of the message before")
        return [*found.values(), *rest]
    for place in range(len(turn.calls)):
        if place not in found and rest:
            found[place] = rest.pop(0)
    silent = [str(id or "") for place, (id, _, _) in enumerate(turn.calls) if place not in found]
    if turn.answers and silent and not is_last:  # the last calls of all may end the work
        _lose(events, f"no answer to the call {silent[0]!r}")
    return [*(found[place] for place in sorted(found)), *rest]


def _lose(events: list[Event], what: str) -> None:
    events.append(Event(-1, LOST, what))


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
