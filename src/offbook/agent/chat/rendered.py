"""Chats of model families that are no ChatML, through the package `renderers`.

A renderer writes a conversation as its family's template does. What makes it usable here is that a conversation can be
built from pieces: a header for the model's message, an end behind it, and blocks in between that do not depend on what
came before. Whether a family has such pieces is tried out once, on a short conversation, when the chat is made; a
family without them is refused, because its next prompt would not extend the ids of the last.

Text from outside cannot forge a message: special tokens in it are encoded as ordinary characters, and a family that
writes its own marks as text would lose them and is refused. Thinking stays in the conversation. Where a family's own
parser lets a call end unfinished thinking, so does this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from offbook.agent.chat.calls import HERMES, Dialect, spoken
from offbook.agent.chat.chat import Chat, Laid, Line, Span
from offbook.agent.chat.strict import Tools, can_be_written, malformed, read_json
from offbook.agent.chat.template import as_json
from offbook.types import OffbookError, Role, ToolCall

ASKED: list[dict[str, str]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
ANSWER = "t</think>\n\nw"  # ends a thought that the header may have begun; to other families it is a word
BARE_JSON = {"llama-3"}  # no mark says where a call begins: a message that begins like an object is an attempt

REASONS = {
    "invalid_json": "the call is not valid JSON",
    "unclosed_block": "the call is not closed",
    "missing_name": "the call needs a name",
    "malformed_structure": "the call is not in the form of a call",
}


class RenderedChat(Chat):
    """A chat for the family of a renderer. `tokenizer` is transformers' and the renderer's.

    `dialect` reads calls from the text in place of the renderer's parser; results are messages of the user then.
    """

    def __init__(self, renderer: Any, tokenizer: Any, dialect: Dialect | None = None):
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.dialect = dialect
        self.call_marks = dialect.marks if dialect else ()
        self.tells_tools = dialect is None
        self.family: str = renderer.config.name
        self.stop_ids = frozenset(renderer.get_stop_token_ids())
        with_marks = renderer.render(ASKED, add_generation_prompt=True).token_ids
        tokenizer.split_special_tokens = True
        asked = renderer.render(ASKED).token_ids
        self._prompt: list[int] = renderer.render(ASKED, add_generation_prompt=True).token_ids
        self._require(self._prompt == with_marks, "writes its control tokens as text")
        self._require(self._prompt[: len(asked)] == asked, "has no header for the model's message")
        self.assistant_header = self._prompt[len(asked) :]
        self._answer: list[int] = self.encode(ANSWER)
        cut_off = self._behind(self._answer)
        self.end_id: int = cut_off[0]
        self._ended = [*self._answer, self.end_id]
        behind = self._behind(self._ended)
        self._require(self.end_id in self.stop_ids and cut_off[1:] == behind, "has no token that ends a message")
        for stop_id in self.stop_ids:  # GLM ends a message by the header of the next
            self._require(self._behind([*self._answer, stop_id]) == behind, "ends messages in more than one way")
        first = self._bridge(self._ended, [{"role": "user", "content": "u"}]).message_indices
        self._after_end = behind[: first.index(0) - len(self._prompt) - len(self._ended)]
        self._require_free_blocks()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def lay(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Laid:
        """Some families cannot open a conversation before the user speaks: until then nothing is laid."""
        messages = [self._message(role, text) for role, text in lines]
        if opening:
            if not any(role == "user" for role, _ in lines):
                return Laid([], [(0, 0, 0, 0)] * len(lines))
            rendered = self.renderer.render(messages, tools=None if self.dialect else as_json(tools) or None)
            return _spans(rendered, 0, len(rendered.token_ids), len(lines))
        rendered = self._bridge(self._ended, messages)
        first = len(self._prompt) + len(self._ended) + len(self._after_end)
        return _spans(rendered, first, len(rendered.token_ids) - len(self.assistant_header), len(lines))

    def closing(self, sampled: list[int]) -> list[int]:
        ended = bool(set(sampled[-1:]) & self.stop_ids)
        return list(self._after_end) if ended else [self.end_id, *self._after_end]

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        text = self.decode(sampled)
        if self.dialect:
            return self.dialect.parse(text, tools, self.decode(self.assistant_header).rstrip().endswith("<think>"))
        parsed = self.renderer.parse_response(sampled, tools=as_json(tools) or None, prompt_ids=self._prompt)
        if not parsed.tool_calls and self.family in BARE_JSON and text.lstrip().startswith("{"):
            return (malformed("", "the call is not one JSON object with name and parameters", 0),)
        return tuple(self._call(attempt, sampled) for attempt in parsed.tool_calls)

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """As the family writes it, where what comes out is read back as the same calls."""
        if calls and self.dialect is None:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            made = [{"type": "function", "function": function} for function in functions]
            rendered = self.renderer.render([*ASKED, {"role": "assistant", "content": text, "tool_calls": made}])
            ids: list[int] = rendered.token_ids
            if ids[: len(self._prompt)] == self._prompt and self.end_id in ids[len(self._prompt) :]:
                own = ids[len(self._prompt) : len(ids) - ids[::-1].index(self.end_id) - 1]
                if [(one.name, one.arguments) for one in self.parse(own)] == [(c.name, c.arguments) for c in calls]:
                    return own
        return self.encode(spoken(text, [(self.dialect or HERMES).write(call) for call in calls]))

    def _call(self, attempt: Any, sampled: list[int]) -> ToolCall:
        """The renderer's reading, held to this package's rules where its own are looser."""
        start = len(self.decode(sampled[: attempt.token_span[0]])) if attempt.token_span else 0
        name = attempt.name or ""
        if attempt.status not in ("ok", "unknown_tool"):  # the harness knows best which tools there are
            return malformed(name, REASONS[attempt.status], start)
        if not isinstance(attempt.arguments, dict) or not isinstance(name, str):
            return malformed(str(name), "the call needs arguments, a JSON object", start)
        problem = _looseness(attempt.raw.strip(), attempt.arguments)
        return malformed(name, problem, start) if problem else ToolCall(name, attempt.arguments, start=start)

    def _message(self, role: Role, text: str) -> dict[str, str]:
        assert role != "assistant", "the model's messages are sampled, not rendered"
        return {"role": "user" if role == "tool" and self.dialect else role, "content": text}

    def _bridge(self, completion: list[int], messages: list[dict[str, str]]) -> Any:
        """The ids of a next prompt, which must extend those of the last and end with the model's header."""
        rendered = self.renderer.bridge_to_next_turn(self._prompt, completion, messages)
        before = [*self._prompt, *completion]
        extends = rendered is not None and rendered.token_ids[: len(before)] == before
        self._require(extends, "cannot extend the ids of a turn by the next one")
        header = self.assistant_header
        self._require(rendered.token_ids[-len(header) :] == header, "opens the model's later messages differently")
        return rendered

    def _behind(self, completion: list[int]) -> list[int]:
        rendered = self._bridge(completion, [{"role": "user", "content": "u"}])
        ids: list[int] = rendered.token_ids[len(self._prompt) + len(completion) :]
        return ids

    def _require_free_blocks(self) -> None:
        """A hint is a message of the user between two others; what stands around it must not change with it."""
        asked = self._prompt[: -len(self.assistant_header)]
        result, hint = self._message("tool", "r"), self._message("user", "h")
        spliced = self.lay([("tool", "r"), ("user", "h")]).ids == self.block("tool", "r") + self.block("user", "h")
        spliced &= self.renderer.render([*ASKED, hint]).token_ids == asked + self.block("user", "h")
        self._require(spliced, "writes a message differently after another one")
        named = {**result, "name": "n", "tool_call_id": "functions.n:0"}
        alike = self._bridge(self._ended, [named]).token_ids == self._bridge(self._ended, [result]).token_ids
        self._require(alike, "writes the tool's name to its result")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise OffbookError(f"models of the chat family {self.family} cannot be trained here: the family {problem}")


def _spans(rendered: Any, first: int, end: int, count: int) -> Laid:
    """Messages follow each other without a gap; one's own words are what the renderer marks as content."""
    owners, content = rendered.message_indices, rendered.is_content
    starts = [first, *(owners.index(number, first) for number in range(1, count)), end]
    spans: list[Span] = []
    for start, stop in pairwise(starts):
        words = [place for place in range(start, stop) if content[place]]
        body, body_end = (words[0], words[-1] + 1) if words else (stop, stop)
        spans.append((start - first, body - first, body_end - first, stop - first))
    return Laid(rendered.token_ids[first:end], spans)


def _looseness(raw: str, arguments: dict[str, Any]) -> str | None:
    """What the renderer's parser let pass: JSON that is none, or a key that is there twice."""
    if raw.startswith("{"):
        try:
            _, _, problem = read_json(raw, 0)
        except ValueError as error:
            problem = str(error)
        if problem:
            return f"the call is not valid JSON ({problem})"
    return None if can_be_written(arguments) else "the call's arguments cannot be written as JSON"
