"""The three APIs: OpenAI's Chat Completions and Responses, and Anthropic's Messages. They differ in JSON alone.

An answer is a list of blocks (thinking, text, calls). Each API writes a finished answer, and the frames of a stream:
its begin, a block's start, deltas and stop, and its end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from offbook.agent.recorder import Answer, Asked, Shown
from offbook.agent.serve.reading import Json, read_chat, read_messages, read_responses

Frame = tuple[str, Json]  # the name of the event, empty where the API has none, and its data


@dataclass(frozen=True, slots=True)
class Block:
    """A part of an answer. `text` of a call is its arguments as JSON."""

    kind: Literal["thinking", "text", "call"]
    text: str
    id: str = ""
    name: str = ""


def blocks_of(shown: Shown, call_ids: tuple[str, ...] = ()) -> list[Block]:
    blocks = [Block("thinking", shown.thinking)] if shown.thinking else []
    blocks += [Block("text", shown.text)] if shown.text else []
    for id, call in zip(call_ids, shown.calls, strict=False):
        blocks.append(Block("call", json.dumps(call.arguments, ensure_ascii=False), id, call.name))
    return blocks


@dataclass
class ChatCompletions:
    path: ClassVar = "/v1/chat/completions"
    last: ClassVar = b"data: [DONE]\n\n"  # ends a stream
    read: ClassVar[Callable[[Json], Asked]] = staticmethod(read_chat)
    id: str
    model: str
    num_calls: int = 0

    @staticmethod
    def error(kind: str, sentence: str) -> Json:
        return {"error": {"message": sentence, "type": "invalid_request_error", "code": kind, "param": None}}

    def whole(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": None}
        for block in blocks_of(answer.shown, answer.call_ids):
            for key, value in self._part(block, block.text).items():
                message[key] = [*message.get(key, []), *value] if block.kind == "call" else value
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer), "logprobs": None}
        return {**self._about("chat.completion"), "choices": [choice], "usage": _chat_usage(answer)}

    def begin(self) -> Iterator[Frame]:
        yield self._chunk({"role": "assistant", "content": ""})

    def start(self, index: int, block: Block) -> Iterator[Frame]:
        yield from ()

    def delta(self, index: int, block: Block, new: str) -> Iterator[Frame]:
        yield self._chunk(self._part(block, new))

    def stop(self, index: int, block: Block) -> Iterator[Frame]:
        yield from ()

    def end(self, answer: Answer) -> Iterator[Frame]:
        yield self._chunk({}, _finish(answer))
        yield "", {**self._about("chat.completion.chunk"), "choices": [], "usage": _chat_usage(answer)}

    def _part(self, block: Block, text: str) -> Json:
        if block.kind != "call":
            return {"reasoning_content" if block.kind == "thinking" else "content": text}
        call = {"index": self.num_calls, "id": block.id, "type": "function"}
        self.num_calls += 1
        return {"tool_calls": [{**call, "function": {"name": block.name, "arguments": text}}]}

    def _chunk(self, delta: Json, finish: str | None = None) -> Frame:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return "", {**self._about("chat.completion.chunk"), "choices": [choice]}

    def _about(self, kind: str) -> Json:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": int(time.time()), "model": self.model}


def _finish(answer: Answer) -> str:
    return "length" if answer.is_cut else "tool_calls" if answer.shown.calls else "stop"


def _chat_usage(answer: Answer) -> Json:
    read, written = answer.prompt_tokens, answer.sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@dataclass
class Messages:
    path: ClassVar = "/v1/messages"
    last: ClassVar = b""
    read: ClassVar[Callable[[Json], Asked]] = staticmethod(read_messages)
    id: str
    model: str

    @staticmethod
    def error(kind: str, sentence: str) -> Json:
        kind = "invalid_request_error" if kind == "context_length_exceeded" else kind  # a name of OpenAI's
        return {"type": "error", "error": {"type": kind, "message": sentence}}

    def whole(self, answer: Answer) -> Json:
        content = [self._content(block, block.text) for block in blocks_of(answer.shown, answer.call_ids)]
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        return {**self._about(), "content": content, "stop_reason": _stop_reason(answer), "usage": usage}

    def begin(self) -> Iterator[Frame]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield _event("message_start", message={**self._about(), "content": [], "usage": usage})

    def start(self, index: int, block: Block) -> Iterator[Frame]:
        yield _event("content_block_start", index=index, content_block=self._content(block, ""))

    def delta(self, index: int, block: Block, new: str) -> Iterator[Frame]:
        delta = {"type": f"{block.kind}_delta", block.kind: new}
        if block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": new}
        yield _event("content_block_delta", index=index, delta=delta)

    def stop(self, index: int, block: Block) -> Iterator[Frame]:
        yield _event("content_block_stop", index=index)

    def end(self, answer: Answer) -> Iterator[Frame]:
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def _about(self) -> Json:
        about = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "model": self.model}
        return {**about, "stop_reason": None, "stop_sequence": None}

    def _content(self, block: Block, text: str) -> Json:
        if block.kind == "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(text or "{}")}
        signature = {"signature": ""} if block.kind == "thinking" else {}
        return {"type": block.kind, block.kind: text, **signature}


def _event(kind: str, **more: object) -> Frame:
    return kind, {"type": kind, **more}


def _stop_reason(answer: Answer) -> str:
    return "max_tokens" if answer.is_cut else "tool_use" if answer.shown.calls else "end_turn"


@dataclass
class Responses:
    """Left out: tools that OpenAI runs, background work, and reading a response back."""

    path: ClassVar = "/v1/responses"
    last: ClassVar = b""
    read: ClassVar[Callable[[Json], Asked]] = staticmethod(read_responses)
    error: ClassVar = staticmethod(ChatCompletions.error)
    id: str
    model: str
    items: list[Json] = field(default_factory=list)
    num_events: int = 0

    def whole(self, answer: Answer) -> Json:
        self.items = [self._item(block, block.text) for block in blocks_of(answer.shown, answer.call_ids)]
        return self._response("incomplete" if answer.is_cut else "completed", answer)

    def begin(self) -> Iterator[Frame]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def start(self, index: int, block: Block) -> Iterator[Frame]:
        item = self._item(block, "")
        if block.kind != "call":
            item = {**item, "content": []}
        yield self._event("output_item.added", output_index=index, item={**item, "status": "in_progress"})
        if block.kind != "call":
            yield self._event("content_part.added", **self._where(index, block), part=_part(block, ""))

    def delta(self, index: int, block: Block, new: str) -> Iterator[Frame]:
        yield self._event(f"{_PARTS[block.kind]}.delta", **self._where(index, block), delta=new, logprobs=[])

    def stop(self, index: int, block: Block) -> Iterator[Frame]:
        where, item = self._where(index, block), self._item(block, block.text)
        self.items.append(item)
        if block.kind == "call":
            done: Json = {"arguments": block.text, "name": block.name}
            yield self._event("function_call_arguments.done", **where, **done)
        else:
            yield self._event(f"{_PARTS[block.kind]}.done", **where, text=block.text, logprobs=[])
            yield self._event("content_part.done", **where, part=_part(block, block.text))
        yield self._event("output_item.done", output_index=index, item=item)

    def end(self, answer: Answer) -> Iterator[Frame]:
        status = "incomplete" if answer.is_cut else "completed"
        yield self._event(status, response=self._response(status, answer))

    def _event(self, kind: str, **more: object) -> Frame:
        name, number = f"response.{kind}", self.num_events
        self.num_events += 1
        return name, {"type": name, "sequence_number": number, **more}

    def _where(self, index: int, block: Block) -> Json:
        return {"item_id": self._item(block, "")["id"], "output_index": index, "content_index": 0}

    def _item(self, block: Block, text: str) -> Json:
        if block.kind == "call":
            about = {"type": "function_call", "id": f"fc_{block.id}", "call_id": block.id, "name": block.name}
            return {**about, "arguments": text, "status": "completed"}
        kind = "reasoning" if block.kind == "thinking" else "message"
        more: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return {"id": kind, "type": kind, "status": "completed", "content": [_part(block, text)], **more}

    def _response(self, status: str, answer: Answer | None = None) -> Json:
        read, written = (answer.prompt_tokens, answer.sampled_tokens) if answer else (0, 0)
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "model": self.model,
            "output": self.items,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }


_PARTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _part(block: Block, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": _PARTS[block.kind], "text": text, **more}


Api = ChatCompletions | Messages | Responses
APIS: tuple[type[Api], ...] = (ChatCompletions, Messages, Responses)


class Stream:
    """The frames of a growing answer."""

    def __init__(self, api: Api):
        self._api = api
        self._sent: list[Block] = []

    def more(self, blocks: list[Block]) -> Iterator[Frame]:
        """`blocks` are all there are by now: each is new, or longer than it was sent."""
        for index, block in enumerate(blocks):
            if index == len(self._sent):
                if index:
                    yield from self._api.stop(index - 1, self._sent[-1])
                yield from self._api.start(index, block)
                self._sent.append(Block(block.kind, ""))
            new = block.text[len(self._sent[index].text) :]
            if new:
                yield from self._api.delta(index, block, new)
                self._sent[index] = block

    def end(self, answer: Answer) -> Iterator[Frame]:
        yield from self.more(blocks_of(answer.shown, answer.call_ids))
        if self._sent:
            yield from self._api.stop(len(self._sent) - 1, self._sent[-1])
        yield from self._api.end(answer)
