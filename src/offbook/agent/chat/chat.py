"""A conversation as token ids, in chat formats whose messages are blocks with a header and an end.

The ids are the truth. A conversation only ever grows at its end, so the prompt of turn n+1 is the ids of turn n plus
new ids; what a model sampled is never decoded and encoded again.

ChatML is <|im_start|>role, a newline, the text, <|im_end|>, a newline: Qwen2.5 and later, SmolLM2, the pocket model.
Llama 3's is <|start_header_id|>role<|end_header_id|>, an empty line, the text, <|eot_id|>.

Text from outside (files, tool output, users) cannot forge a message: the control tokens in it are encoded as ordinary
characters.

Where the ids differ from what a model's own template gives:
- Header and text are encoded separately, so a text that begins with white space may be cut into other tokens. The
  characters are the same.
- Thinking stays in the conversation. Qwen3's template drops that of earlier turns when it renders again; nothing is
  rendered again here.
- No system message is made up where there is none. SmolLM2 and Qwen2.5 have a default one.
- Of Llama's template nothing is used: tools are described by offbook, results are not quoted, there are no dates.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.agent.chat.dialects import CALL_END, CALL_START, DIALECTS, Tools, as_json
from offbook.core.thoughts import THINK_END, THINK_START, answer_start
from offbook.types import CallStatus, Completion, Json, Message, OffbookError, Role, Segment, ToolCall, Usage

Line = tuple[Role, str]
Span = tuple[int, int, int, int]  # start, body, body_end, end of a message, as in Message


@dataclass(frozen=True)
class Encoded:
    """Messages as ids, and the span of each. The spans follow each other without a gap."""

    ids: list[int]
    spans: list[Span]


BLOCK_START, BLOCK_END = "<|im_start|>", "<|im_end|>"
LLAMA_MARKS = ("<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>", "<|begin_of_text|>")
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

RENDER_S = 20.0  # timeout of a template; a sound one takes milliseconds

Results = Literal["tool", "user", "response"]


class ChatFormat:
    """Turns messages into ids and ids into text, with one tokenizer.

    `results` says how a tool's answer is written: as a message of the role tool (SmolLM2, pocket), as one of the user
    (mini-swe-agent), or as <tool_response> in one of the user, all in a row in one message (Qwen), with `tail` after
    the last. `opening` follows the assistant's header: Qwen3's thinking models begin with <think>, and with thinking
    switched off it is an empty thought. `template` is the model's own; it describes the tools if it knows of them.
    `ends` are further tokens that a model may end its message with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: str = "hermes",
        results: Results = "tool",
        opening: str = "",
        template: str = "",
        tail: str = "",
        ends: Sequence[int] = (),
    ):
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # control tokens in outside text become ordinary characters
        self.is_llama = tokenizer.token_to_id(BLOCK_END) is None
        marks = LLAMA_MARKS if self.is_llama else (BLOCK_START, BLOCK_END)
        ids = [token for token in map(tokenizer.token_to_id, marks) if token is not None]
        if len(ids) < len(marks):
            missing = f"{BLOCK_START} and {BLOCK_END}, nor {' and '.join(LLAMA_MARKS)}"
            fix = "its chat is not known; docs/models.md says which models work"
            raise OffbookError(f"this model's tokenizer has neither {missing}: {fix}")
        self.start_id, self.end_id, *self.llama_ids = ids
        self.dialect = DIALECTS[dialect]
        self.results = results
        self.template = template
        self.tells_tools = "tools" in template
        self.tail = tail
        self.stop_ids = frozenset({self.end_id, *ends})
        self.after_end = [] if self.is_llama else self.encode("\n")
        self.assistant_header = [*self.header("assistant"), *self.encode(opening)]

    @classmethod
    def from_folder(cls, folder: Path | str, dialect: str = "auto") -> ChatFormat:
        """The format of a model's folder; a template of ChatML says how it writes results and opens answers. `dialect`
        auto takes the calls that the model's own template writes."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise OffbookError(f"{folder} has no tokenizer.json; save the tokenizer in the model's folder")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        is_llama = tokenizer.token_to_id(BLOCK_END) is None
        template = "" if is_llama else read_template(folder)
        own = "json" if is_llama else "xml" if "<function=" in template else "hermes"
        dialect = own if dialect == "auto" else dialect
        opening = _answer_opening(template) if template else ""
        results: Results = "user" if dialect == "bash" else "tool"
        tail = ""
        if RESPONSE_START in template and results != "user":
            results, tail = "response", _results_tail(template)
        template = template if dialect == own else ""  # it would describe another one
        # Qwen3 also ends with the end of a text. Only control tokens count: a default may be any word.
        path = folder / "generation_config.json"
        ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        control = {token for token, mark in tokenizer.get_added_tokens_decoder().items() if mark.special}
        ends = control & set(ends if isinstance(ends, list) else [ends])
        return cls(tokenizer, dialect, results, opening, template, tail, sorted(ends))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def header(self, role: str) -> list[int]:
        if not self.is_llama:
            return [self.start_id, *self.encode(f"{role}\n")]
        role = "ipython" if role == "tool" else role
        return [self.start_id, *self.encode(role), self.llama_ids[0], *self.encode("\n\n")]

    def encode_lines(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Encoded:
        """The lines as blocks, one after the other."""
        encoded = Encoded([], [])
        for index, (role, text) in enumerate(lines):
            if role == "tool" and self.results == "response":
                if index == 0 or lines[index - 1][0] != "tool":
                    last = next((n for n in range(index, len(lines)) if lines[n][0] != "tool"), len(lines))
                    self._encode_responses([line for _, line in lines[index:last]], encoded)
                continue
            if role == "tool" and self.results == "user":
                role = "user"
            if opening and index == 0 and role == "system" and tools and self.tells_tools:
                text = _system_with_tools(self.template, text, tools)
            start = len(encoded.ids)
            if self.is_llama and opening and index == 0:
                encoded.ids.append(self.llama_ids[1])
            encoded.ids.extend(self.header(role))
            body = len(encoded.ids)
            encoded.ids.extend(self.encode(text))
            body_end = len(encoded.ids)
            encoded.ids.extend([self.end_id, *self.after_end])
            encoded.spans.append((start, body, body_end, len(encoded.ids)))
        return encoded

    def _encode_responses(self, texts: list[str], encoded: Encoded) -> None:
        """Results in a row are one text to the tokenizer, as in the template. A token is where it begins."""
        start = len(encoded.ids)
        encoded.ids.extend([self.start_id, *self.encode("user")])
        words = len(encoded.ids)
        whole = ""
        bounds = []
        for text in texts:
            whole += f"\n{RESPONSE_START}\n{text}"
            bounds.append((len(whole) - len(text), len(whole), len(whole) + len(RESPONSE_END) + 1))
            whole += f"\n{RESPONSE_END}"
        encoding = self.tokenizer.encode(whole + self.tail, add_special_tokens=False)
        encoded.ids.extend(encoding.ids)
        encoded.ids.extend([self.end_id, *self.after_end])
        firsts = [first for first, _ in encoding.offsets]
        for number, bound in enumerate(bounds, 1):
            body, body_end, end = (words + bisect_left(firsts, character) for character in bound)
            end = len(encoded.ids) if number == len(texts) else end
            encoded.spans.append((start, body, body_end, end))
            start = end

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        return self.dialect.read(self.decode(sampled), tools, self.thinking)

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Calls as the model's own template writes them, if it knows of any."""
        written = _calls_as_written(self.template, calls) if calls and self.tells_tools else ""
        return self.encode("\n".join(filter(None, (text, written))) if written else self.dialect.answer(text, calls))

    @property
    def thinking(self) -> bool:
        """Whether the header of the model's message opens a thought."""
        return self.decode(self.assistant_header).rstrip().endswith(THINK_START)

    def telling(self, tools: Tools) -> str:
        """The description of the tools for a system prompt; empty where the format itself describes them."""
        return self.dialect.telling(tools) if tools and not self.tells_tools else ""

    def block(self, role: Role, text: str) -> list[int]:
        """A closed message, complete in itself: it can be spliced in between any two others."""
        return self.encode_lines([(role, text)]).ids

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

    def closing(self, sampled: list[int]) -> list[int]:
        """What follows a sampled message: its end, where the model did not write it, and what belongs behind an end."""
        is_ended = bool(set(sampled[-1:]) & self.stop_ids)
        return [*([] if is_ended else [self.end_id]), *self.after_end]


def byte_chat(dialect: str = "hermes") -> ChatFormat:
    """Bytes and the marks of the format: it spells anything, and records what a model behind a URL said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BLOCK_START, BLOCK_END])
    tokenizer.add_tokens([CALL_START, CALL_END])
    return ChatFormat(tokenizer, dialect, results="user" if dialect == "bash" else "tool")


# A model's own template


def read_template(folder: Path) -> str:
    """The Jinja text in a model's folder, empty where there is none."""
    template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if template.is_file():
        return template.read_text()
    found: Any = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # several by name; the one for tools says most
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use", named.get("default"))
    return found or ""


def _answer_opening(template: str) -> str:
    """What the template puts between the model's header and the answer: nothing, or the begin of thinking. A template
    that is not ChatML is refused."""
    text = _render(template, [("system", "s"), ("user", "u")], add_generation_prompt=True)
    turns = "".join(f"{BLOCK_START}{role}\n{role[0]}{BLOCK_END}\n" for role in ("system", "user"))
    opened = f"{turns}{BLOCK_START}assistant\n"
    if not text.startswith(opened):
        raise OffbookError(
            f"this model's tokenizer has {BLOCK_START} and {BLOCK_END}, but its chat template writes {text!r} where "
            f"{opened!r} was expected; such a chat cannot be trained here"
        )
    return text[len(opened) :]


def _results_tail(template: str) -> str:
    """What the template puts between the last </tool_response> and the end of its message: Qwen3-Coder a newline."""
    text = _render(template, [("user", "x"), ("assistant", "x"), ("tool", "x")])
    _, closed, tail = text.rpartition(RESPONSE_END)
    return tail.partition(BLOCK_END)[0] if closed else ""


def _system_with_tools(template: str, text: str, tools: Tools) -> str:
    """The text of the system message as the template writes it where there are tools."""
    rendered = _render(template, [("system", text), ("user", "x")], tools)
    before, after = f"{BLOCK_START}system\n", f"{BLOCK_END}\n{BLOCK_START}user\nx{BLOCK_END}\n"
    if not (rendered.startswith(before) and rendered.endswith(after)):
        raise OffbookError("this model's chat template does not put its tools into the system message")
    return rendered[len(before) : -len(after)]


def _calls_as_written(template: str, calls: Sequence[ToolCall]) -> str:
    """What the template makes of calls alone; empty where it makes nothing of them. The messages after it keep the
    template from taking it for the last one, which may get an empty thought."""
    lines: list[Line] = [("user", "x"), ("assistant", ""), ("tool", "x"), ("user", "x")]
    try:
        text = _render(template, lines, calls=calls)
    except OffbookError:
        return ""
    return text.partition(f"{BLOCK_START}assistant\n")[2].partition(BLOCK_END)[0].strip()


def _render(
    template: str,
    lines: Sequence[Line],
    tools: Tools = (),
    add_generation_prompt: bool = False,
    calls: Sequence[ToolCall] = (),
) -> str:
    """`calls` are those of the model's message."""
    from transformers.utils.chat_template_utils import render_jinja_template  # seconds; the pocket model needs none

    messages: list[Json] = [{"role": role, "content": text} for role, text in lines]
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        messages[1]["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    # A template that begins with a token of its own is no ChatML, and is refused for that.
    asked = {"chat_template": template, "add_generation_prompt": add_generation_prompt, "bos_token": "<bos>"}
    done: list[str | Exception] = []

    def render() -> None:
        try:
            done.append(render_jinja_template([messages], as_json(tools) or None, **asked)[0][0])
        except Exception as error:  # raised again in the caller's thread
            done.append(error)

    # A template is a program that came with the weights. In a daemon thread an endless loop cannot hang this process.
    worker = threading.Thread(target=render, daemon=True)
    worker.start()
    worker.join(RENDER_S)
    if not done:
        raise OffbookError(f"this model's chat template does not finish a short conversation within {RENDER_S:g} s")
    if isinstance(done[0], TemplateError | MemoryError | OverflowError | RecursionError):
        said = str(done[0]).partition("\n")[0]
        raise OffbookError(f"this model's chat template cannot write a plain conversation: {said}")
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]


# Conversations


class Transcript:
    """A segment as it grows, message by message."""

    def __init__(self, chat: ChatFormat, tools: Tools = ()):
        self.chat = chat
        self.tools = tools
        self.segment = Segment()
        self._settled = 0  # up to here nothing changes any more: it has been in a prompt that a model continued
        self._lines: list[Message] = []  # the messages behind that; some formats write several results as one block

    @classmethod
    def after(cls, segment: Segment, chat: ChatFormat, tools: Tools = ()) -> Transcript:
        """One that goes on behind a segment which ends where the model is to speak. The segment grows with it."""
        transcript = cls(chat, tools)
        said = [place for place, message in enumerate(segment.messages) if segment.is_own(message)]
        transcript.segment = segment
        transcript._settled = segment.messages[said[-1]].end if said else 0
        transcript._lines = segment.messages[said[-1] + 1 if said else 0 :]
        return transcript

    def add(self, role: Role, text: str, status: CallStatus | None = None) -> Message:
        """A message that the model did not write."""
        message = Message(role, text, 0, 0, 0, 0, status=status)
        self._lines.append(message)
        self.segment.messages.append(message)
        lines = [(line.role, line.text) for line in self._lines]
        encoded = self.chat.encode_lines(lines, self.tools, opening=self._settled == 0)
        for stream in (self.segment.ids, self.segment.sampled, self.segment.logprobs, self.segment.versions):
            del stream[self._settled :]
        self._feed(encoded.ids)
        for line, span in zip(self._lines, encoded.spans, strict=True):
            line.start, line.body, line.body_end, line.end = (self._settled + place for place in span)
        return message

    def prompt(self) -> list[int]:
        """What the model is to continue: everything so far and the header of its own message."""
        return [*self.segment.ids, *self.chat.assistant_header]

    def add_sampled(self, completion: Completion) -> Message:
        """The model's own message, its ids kept as they were sampled."""
        start = len(self.segment.ids)
        self._feed(self.chat.assistant_header)
        body = len(self.segment.ids)
        self.segment.ids.extend(completion.ids)
        self.segment.sampled.extend([True] * len(completion.ids))
        self.segment.logprobs.extend(completion.logprobs)
        self.segment.versions.extend(completion.versions)
        self.segment.routes = completion.routes
        words = completion.ids[:-1] if set(completion.ids[-1:]) & self.chat.stop_ids else completion.ids
        body_end = body + len(words)
        self._feed(self.chat.closing(completion.ids))
        self._settled = len(self.segment.ids)
        self._lines = []
        calls = self.chat.parse(words, self.tools)
        message = Message("assistant", self.chat.decode(words), start, body, body_end, self._settled, calls)
        self.segment.messages.append(message)
        return message

    def _feed(self, ids: list[int]) -> None:
        self.segment.ids.extend(ids)
        self.segment.sampled.extend([False] * len(ids))
        self.segment.logprobs.extend([0.0] * len(ids))
        self.segment.versions.extend([-1] * len(ids))


def count_tokens(segments: list[Segment], chat: ChatFormat, usage: Usage) -> None:
    """What the tokens of a rollout were for."""
    usage.sampled_tokens = sum(sum(segment.sampled) for segment in segments)
    usage.prompt_tokens = sum(len(segment.ids) for segment in segments) - usage.sampled_tokens
    for segment in segments:
        for index, message in enumerate(segment.messages):
            if message.role == "tool":
                usage.output_tokens += message.body_end - message.body
            if message.role != "assistant":
                continue
            sampled = sum(segment.sampled[message.body : message.end])
            if not sampled:  # repeated, or not sampled by this model
                continue
            if index == segment.summary:
                usage.summary_tokens += sampled
            elif message.calls:
                thinking = _tokens_before(chat, segment.ids[message.body : message.body_end], message.calls[0].start)
                usage.thinking_tokens += thinking
                usage.call_tokens += sampled - thinking
            else:
                usage.final_tokens += sampled


def _tokens_before(chat: ChatFormat, ids: list[int], offset: int) -> int:
    """How many of the tokens end at or before a place in their text."""
    return bisect_right(range(1, len(ids) + 1), offset, key=lambda count: len(chat.decode(ids[:count])))


def is_in(segment: Segment, chat: ChatFormat, vocabulary: int) -> bool:
    """Whether the ids are this chat's: they decode to the messages' texts and have its headers."""
    if not segment.ids or max(segment.ids) >= vocabulary:
        return False
    own = [message for message in segment.messages if message.role == "assistant"]
    return all(
        chat.decode(segment.ids[message.body : message.body_end]) == message.text
        and (not segment.is_own(message) or segment.ids[message.start : message.body] == chat.assistant_header)
        for message in own
    )


def written_again(segment: Segment, chat: ChatFormat, tools: Tools = ()) -> Segment:
    """The same messages in this chat's ids; what the agent said counts as sampled. For conversations with another
    tokenizer's ids, or none."""
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


def _words(message: Message, chat: ChatFormat, is_whole: bool) -> list[int]:
    """A segment with ids has the calls in its text, which is kept if this chat reads the same calls from it."""
    text, calls = message.text, message.calls
    if is_whole:
        ids = chat.encode(text)
        if any(call.error for call in calls) or [c.name for c in chat.parse(ids)] == [c.name for c in calls]:
            return ids
        text = text[: calls[0].start].rstrip() if calls else text
        return chat.answer(text, calls)
    return chat.answer(behind_header(text, chat), calls)


def has_no_thoughts(chat: ChatFormat) -> bool:
    """Whether thinking is switched off: the header of every answer ends an empty thought."""
    return chat.decode(chat.assistant_header).rstrip().endswith(THINK_END)


def behind_header(text: str, chat: ChatFormat) -> str:
    """The text without what the header has already: the begin of a thought, which is ended if the message has none, or
    the whole thought if the chat has no thoughts."""
    begin = answer_start(text)
    if begin and has_no_thoughts(chat):
        return text[begin:].lstrip()
    if not chat.thinking:
        return text
    return text.lstrip().removeprefix(THINK_START).lstrip("\n") if begin else f"\n{THINK_END}\n\n{text}"
