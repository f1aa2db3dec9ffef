"""Chat as token ids: ChatML blocks with Hermes tool calls, the format of Qwen2.5, Qwen3 and SmolLM2.

The ids are the truth. A conversation only ever grows at its end, so the prompt of turn n+1 is the ids of turn n plus
new ids; what a model sampled is never decoded and encoded again. Text that comes from outside (files, tool output,
users) cannot forge a block: control tokens inside it are encoded as ordinary characters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from offbook.types import CallStatus, Completion, Message, OffbookError, Role, Segment, ToolCall

BLOCK_START, BLOCK_END = "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


class ChatFormat:
    """Turns messages into ids and ids into text, with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        start_id, end_id = tokenizer.token_to_id(BLOCK_START), tokenizer.token_to_id(BLOCK_END)
        if start_id is None or end_id is None:
            raise OffbookError(f"this model's tokenizer has no {BLOCK_START} and {BLOCK_END}: only ChatML is supported")
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # control tokens in outside text become ordinary characters
        self.start_id: int = start_id
        self.end_id: int = end_id
        self.newline_ids = self.encode("\n")

    @classmethod
    def from_folder(cls, folder: Path | str) -> ChatFormat:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise OffbookError(f"{folder} has no tokenizer.json; save the tokenizer beside the model")
        return cls(Tokenizer.from_file(str(path)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def header(self, role: Role) -> list[int]:
        return [self.start_id, *self.encode(role + "\n")]

    def block(self, role: Role, text: str) -> list[int]:
        """A closed message, complete in itself: it can be spliced in between any two others."""
        return [*self.header(role), *self.encode(text), self.end_id, *self.newline_ids]

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token; joined, they are the text of all. A character cut across tokens goes to its last."""
        pieces, held = [], 0
        for position in range(len(ids)):
            text = self.decode(ids[position - held : position + 1])
            if text.endswith("\ufffd") and position + 1 < len(ids) and held < 8:
                pieces.append("")
                held += 1
            else:
                pieces.append(text)
                held = 0
        return pieces


class Transcript:
    """A segment as it grows, message by message."""

    def __init__(self, chat: ChatFormat):
        self.chat = chat
        self.segment = Segment()

    def _feed(self, ids: list[int]) -> None:
        self.segment.ids.extend(ids)
        self.segment.sampled.extend([False] * len(ids))
        self.segment.logprobs.extend([0.0] * len(ids))
        self.segment.versions.extend([-1] * len(ids))

    def add(self, role: Role, text: str, status: CallStatus | None = None) -> Message:
        """A message that the model did not write."""
        start = len(self.segment.ids)
        self._feed(self.chat.header(role))
        body = len(self.segment.ids)
        self._feed(self.chat.encode(text))
        body_end = len(self.segment.ids)
        return self._close(Message(role, text, start, body, body_end, body_end, status=status))

    def prompt(self) -> list[int]:
        """What the model is to continue: everything so far and the header of its own message."""
        return [*self.segment.ids, *self.chat.header("assistant")]

    def add_sampled(self, completion: Completion) -> Message:
        """The model's own message, its ids kept as they were sampled."""
        start = len(self.segment.ids)
        self._feed(self.chat.header("assistant"))
        body = len(self.segment.ids)
        self.segment.ids.extend(completion.ids)
        self.segment.sampled.extend([True] * len(completion.ids))
        self.segment.logprobs.extend(completion.logprobs)
        self.segment.versions.extend(completion.versions)
        ended = completion.ids[-1:] == [self.chat.end_id]
        body_end = len(self.segment.ids) - ended
        text = self.chat.decode(self.segment.ids[body:body_end])
        return self._close(Message("assistant", text, start, body, body_end, body_end, calls=parse_calls(text)), ended)

    def _close(self, message: Message, ended: bool = False) -> Message:
        """End the block: a message cut off by a limit gets the end token that the model did not write."""
        self._feed(self.chat.newline_ids if ended else [self.chat.end_id, *self.chat.newline_ids])
        message.end = len(self.segment.ids)
        self.segment.messages.append(message)
        return message


def render_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{CALL_START}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CALL_END}"


def parse_calls(text: str) -> tuple[ToolCall, ...]:
    """Every attempted call in order. An attempt that is not a well-formed call is kept, with the reason."""
    calls = []
    for attempt in text.split(CALL_START)[1:]:
        body, closed, _ = attempt.partition(CALL_END)
        calls.append(_parse_call(body) if closed else _malformed(body, f"the call is not closed by {CALL_END}"))
    return tuple(calls)


def _parse_call(body: str) -> ToolCall:
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        return _malformed(body, f"the call is not valid JSON ({error.msg})")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed(body, "the call needs a name")
    if not isinstance(value.get("arguments"), dict):
        return _malformed(body, "the call needs arguments, a JSON object")
    return ToolCall(value["name"], value["arguments"])


def _malformed(body: str, reason: str) -> ToolCall:
    """The name is kept where it can be seen, so that feedback can speak of the tool that was meant."""
    name = re.search(r'"name"\s*:\s*"(\w+)"', body)
    return ToolCall(name.group(1) if name else "", error=reason)
