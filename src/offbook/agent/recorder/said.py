"""A conversation as agents send it, whatever API they speak, and a sampled message as they are shown it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from offbook.agent.chat import Chat
from offbook.agent.chat.dialects import Tools
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import CallStatus, OffbookError, Role, ToolCall


class Refused(OffbookError):
    """A request that can never be answered as it is; a retry fails again."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message. `ids` are the client's names of its calls or, of a tool's answer, of the call that it answers."""

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = ()
    failed: bool = False  # of a tool's answer: the client says so

    def is_like(self, other: Said) -> bool:
        """Whether it is the same message: clients send it back without thinking, stripped, with arguments rewritten."""
        if self.role != other.role or self.failed != other.failed:
            return False
        if self.role != "assistant":
            return self.text == other.text
        calls = [(call.name, call.arguments) for call in self.calls]
        return self.text.strip() == other.text.strip() and calls == [(c.name, c.arguments) for c in other.calls]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `after` names the answer whose conversation the messages continue, if they are not all of it."""

    messages: tuple[Said, ...]
    tools: Tools = ()
    max_tokens: int = 0  # 0 is as many as the session allows
    stream: bool = False
    after: str = ""
    retry: bool = False  # the client says that it retries because no answer came
    ignored: dict[str, Any] = field(default_factory=dict)  # parameters without effect
    id: str = field(default_factory=lambda: secrets.token_hex(12))  # of the answer


@dataclass(frozen=True, slots=True)
class Shown:
    """A call that cannot be read stays text. Words after a readable call are in the record only."""

    thinking: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    number: int  # in the order of answers
    shown: Shown
    call_ids: tuple[str, ...]
    is_cut: bool  # by a limit
    prompt_tokens: int
    sampled_tokens: int


def in_order(messages: Sequence[Said]) -> tuple[Said, ...]:
    """The messages as a model reads them: consecutive assistant messages joined, answers in the order of the calls."""
    joined: list[Said] = []
    for said in messages:
        last = joined[-1] if joined else None
        if last and last.role == said.role == "assistant":
            text = "\n".join(filter(None, (last.text, said.text)))
            joined[-1] = Said("assistant", text, (*last.calls, *said.calls), (*last.ids, *said.ids))
        else:
            joined.append(said)
    for place, said in enumerate(joined):
        answers = list(takewhile(lambda one: one.role == "tool", joined[place + 1 :]))
        if len(said.ids) > 1 and {one.ids[:1] for one in answers} == {(id,) for id in said.ids}:
            joined[place + 1 : place + 1 + len(answers)] = sorted(answers, key=lambda one: said.ids.index(one.ids[0]))
    return tuple(joined)


def num_shared(one: Sequence[Said], other: Sequence[Said]) -> int:
    """The length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].is_like(pair[1]), pairs))


def status_of(call: ToolCall, tools: Tools) -> tuple[CallStatus, str]:
    """Whether a call is of a tool that the client offered, and what is wrong with it."""
    if call.error:
        return "malformed", call.error
    if not tools:  # calls are text between the agent and the model
        return "ok", ""
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None:
        return "unknown_tool", f"there is no tool {call.name}"
    known = tool.parameters.get("properties")
    missing = [name for name in tool.parameters.get("required") or () if name not in call.arguments]
    if missing:
        return "malformed", f"{call.name} needs {', '.join(missing)}"
    extra = [name for name in call.arguments if known and name not in known]
    if extra:
        return "malformed", f"{call.name} takes no {', '.join(extra)}"
    return "ok", ""


class Reading:
    """Shows sampled ids to a client. Without tools everything is text."""

    def __init__(self, chat: Chat, tools: Tools):
        self._chat = chat
        self._tools = tools
        self._thinks = chat.decode(chat.assistant_header).rstrip().endswith(THINK_START)

    def whole(self, words: list[int]) -> Shown:
        """`words` are without the token that ends the message."""
        text = self._chat.decode(words)
        calls = self._chat.parse(words, self._tools) if self._tools else ()
        begin = answer_start(text, self._thinks)
        starts = [*(max(begin, call.start) for call in calls), len(text)]
        shown = text[begin : starts[0]]
        shown += "".join(text[starts[n] : starts[n + 1]] for n, call in enumerate(calls) if call.error)
        return Shown(_thought(text[:begin]), shown.strip(), tuple(call for call in calls if not call.error))

    def so_far(self, ids: list[int]) -> Shown:
        """The certain prefix of an unfinished message, for streaming. Calls are shown when it is complete."""
        words = ids[:-1] if set(ids[-1:]) & self._chat.stop_ids else ids
        text = self._chat.decode(words).rstrip("\ufffd")  # half a character
        if not self._thinks and THINK_START.startswith(text.lstrip()[: len(THINK_START)]) and THINK_START not in text:
            return Shown()  # it may be the begin of a thought
        begin = answer_start(text, self._thinks)
        if begin == len(text) and not text.endswith(THINK_END):
            return Shown(_thought(_before(text, (THINK_END,))))
        marks = self._chat.call_marks if self._tools else ()
        is_certain = bool(marks) or not self._tools
        return Shown(_thought(text[:begin]), _before(text[begin:], marks).strip() if is_certain else "")


def _thought(text: str) -> str:
    return text.strip().removeprefix(THINK_START).removesuffix(THINK_END).strip()


def _before(text: str, marks: Sequence[str]) -> str:
    """The text up to the first mark, or to a prefix of one at the end."""
    for mark in marks:
        text = text.partition(mark)[0]
    begun = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return text[: len(text) - max(begun, default=0)]
