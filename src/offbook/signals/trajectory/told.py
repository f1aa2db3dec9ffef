"""Messages of another agent as a file tells of them: text and thoughts, answers by their calls, and what was lost.

Who reads a trajectory to judge it can do without what was lost; who learns from it leaves it out (stages/sources.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import Event, Message, Role, ToolCall

# Kinds of events.
LOST = "lost"  # something of the trajectory is not in its messages
UNLEARNED = "unlearned"  # whoever wrote the data says that this message is to be read alone


@dataclass(slots=True)
class Told:
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
