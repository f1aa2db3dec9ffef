"""Conversations whose ids are another tokenizer's, or that have none, in a chat's own ids."""

from __future__ import annotations

from offbook.agent.chat.chat import Chat, Transcript
from offbook.agent.chat.strict import Tools
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import Completion, Message, Segment


def is_in(segment: Segment, chat: Chat, vocabulary: int) -> bool:
    """Whether the ids are this chat's: they say in it what the messages say, and open the model's as it does."""
    if not segment.ids or max(segment.ids) >= vocabulary:
        return False
    own = [message for message in segment.messages if message.role == "assistant"]
    return all(
        chat.decode(segment.ids[message.body : message.body_end]) == message.text
        and (not segment.is_own(message) or segment.ids[message.start : message.body] == chat.assistant_header)
        for message in own
    )


def written_again(segment: Segment, chat: Chat, tools: Tools = ()) -> Segment:
    """The same messages in this chat's ids; what the agent said counts as sampled."""
    transcript = Transcript(chat, tools)
    for message in segment.messages:
        if message.role != "assistant":
            transcript.add(message.role, message.text, message.status)
            continue
        ids = [*_words(message, chat, bool(segment.ids)), chat.end_id]
        said = transcript.add_sampled(Completion(ids, [0.0] * len(ids), [-1] * len(ids)))
        if not segment.is_own(message):  # a worked example
            transcript.segment.sampled[said.body : said.end] = [False] * (said.end - said.body)
    return transcript.segment


def _words(message: Message, chat: Chat, is_whole: bool) -> list[int]:
    """Where there were ids before, the text has the calls in it; it stays as it is if this chat reads them there."""
    text, calls = message.text, message.calls
    if is_whole:
        ids = chat.encode(text)
        if any(call.error for call in calls) or [c.name for c in chat.parse(ids)] == [c.name for c in calls]:
            return ids
        text = text[: calls[0].start].rstrip() if calls else text
        return chat.answer(text, calls)
    return chat.answer(_behind_header(text, chat), calls)


def has_no_thoughts(chat: Chat) -> bool:
    """Thinking is switched off: the header of every answer ends an empty thought."""
    return chat.decode(chat.assistant_header).rstrip().endswith(THINK_END)


def _behind_header(text: str, chat: Chat) -> str:
    """A thought that the header begins is not begun again, and is ended where the message has none. Where the chat has
    no thoughts, it is left out."""
    begin = answer_start(text)
    if begin and has_no_thoughts(chat):
        return text[begin:].lstrip()
    if not chat.decode(chat.assistant_header).rstrip().endswith(THINK_START):
        return text
    return text.lstrip().removeprefix(THINK_START).lstrip("\n") if begin else f"\n{THINK_END}\n\n{text}"
