"""A conversation of a session, and a request that may go on with it."""

from __future__ import annotations

from dataclasses import dataclass

from offbook.agent.chat.dialects import Tools
from offbook.agent.recorder.said import Answer, Said, num_shared, status_of
from offbook.types import CallStatus, Completion, Segment


@dataclass(frozen=True, slots=True)
class Request:
    messages: tuple[Said, ...]
    tools: Tools

    def is_like(self, other: Request) -> bool:
        count = len(self.messages)
        same = count == len(other.messages) and self.tools == other.tools
        return same and num_shared(self.messages, other.messages) == count


@dataclass(slots=True, eq=False)
class Track:
    """A segment as of its last answer, and its messages as the client knows them. The next answer makes another."""

    tools: Tools
    said: tuple[Said, ...]  # one for each message of the segment
    names: tuple[str, ...]  # the answers that they are, empty for others
    segment: Segment
    answer: Answer
    completion: Completion
    room: int  # tokens that the answer could have had
    before: Track | None = None  # without this answer; None where it is the first, or can no longer be taken back
    is_busy: bool = False  # somebody waits for its next message

    @property
    def request(self) -> Request:
        return Request(self.said[:-1], self.tools)

    def words(self, index: int) -> list[int]:
        """The ids of a message of the model's, with the token that ends it."""
        message = self.segment.messages[index]
        return self.segment.ids[message.body : message.body_end + 1]


def answer_status(request: Request, index: int) -> CallStatus:
    """How the call went that a tool's message answers: answers stand behind the calls in their order."""
    begin = index
    while request.messages[begin].role == "tool":
        begin -= 1
    calls, place = request.messages[begin].calls, index - begin - 1
    status = status_of(calls[place], request.tools)[0] if place < len(calls) else "ok"
    return "failed" if status == "ok" and request.messages[index].failed else status
