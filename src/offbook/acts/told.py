"""Messages of another agent as a file tells of them: answers by their calls, and what could not be taken over.

Who reads a trajectory to judge it can do without what was lost; who learns from it leaves it out (stages/sources.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offbook.types import Event, Message

# Kinds of events.
LOST = "lost"  # something of the trajectory is not in its messages
UNLEARNED = "unlearned"  # whoever wrote the data says that this message is to be read alone


@dataclass(slots=True)
class Told:
    messages: list[Message] = field(default_factory=list)
    ids: list[tuple[str, ...]] = field(default_factory=list)  # of its calls, or of the call that it answers; may be ""
    events: list[Event] = field(default_factory=list)

    def add(self, message: Message, *ids: object) -> None:
        self.messages.append(message)
        self.ids.append(tuple(str(id or "") for id in ids))

    def weigh(self, weight: object) -> None:
        """OpenAI's mark on the message that was added last: 0 is not learned."""
        if weight == 0:
            self.events.append(Event(len(self.messages) - 1, UNLEARNED, "weight 0"))
        elif weight not in (None, 1):
            self._lose(len(self.messages) - 1, f"a weight of {weight!r}, which is neither 0 nor 1")

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
                self._lose(head, f"an answer to {id!r}, which is no call of the message before")
                return
        if not place:
            return
        for answer in range(head + 1, end):
            if answer not in place:
                place[answer] = free.pop(0) if free else len(calls)
        if free and end < len(self.messages):  # the last calls of all may end the work
            self._lose(head, f"no answer to the call {calls[free[0]]!r}")
        order = sorted(place, key=lambda answer: (place[answer], answer))
        self.messages[head + 1 : end] = [self.messages[answer] for answer in order]

    def _lose(self, message: int, what: str) -> None:
        self.events.append(Event(message, LOST, what))
