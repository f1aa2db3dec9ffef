"""ChatML: <|im_start|>role, a newline, the text, <|im_end|>, a newline. Qwen2.5 and later, SmolLM2, the pocket model.
Gemma 3, whose messages have the same build under other marks.

Text that comes from outside (files, tool output, users) cannot forge a message: the control tokens in it are encoded as
ordinary characters.

Where the ids differ from what a model's own template gives:
- Header and text are encoded separately, so a text that begins with white space may be cut into other tokens. The
  characters are the same.
- Thinking stays in the conversation. Qwen3's template drops that of earlier turns when it renders again; nothing is
  rendered again here.
- No system message is made up where there is none. SmolLM2 and Qwen2.5 have a default one.
- Gemma's template refuses two messages of the user in a row. A tool's answer is one there, and so is a hint behind it.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.agent.chat.chat import Chat, Encoded, Line, Span
from offbook.agent.chat.dialects import CALL_END, CALL_START, Tools, as_json, dialect_named
from offbook.core.thoughts import THINK_START
from offbook.types import OffbookError, Role, ToolCall

BLOCK_START, BLOCK_END = "<|im_start|>", "<|im_end|>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"
RENDER_S = 20.0  # that a template may take; a sound one takes milliseconds


@dataclass(frozen=True, slots=True)
class Marks:
    """A message is `start`, who speaks, a newline, the text, `end`, a newline; `begin` stands before the first one.

    `model` is what the model's own messages are headed. Gemma has no messages of the system: their text opens the first
    one of the user (`merged`). And its template takes white space off both ends of a message's text (`stripped`).
    """

    start: str
    end: str
    model: str = "assistant"
    begin: str = ""
    merged: bool = False
    stripped: bool = False

    def speaker(self, role: Role) -> str:
        if role == "assistant":
            return self.model
        return "user" if role == "system" and self.merged else role


CHATML = Marks(BLOCK_START, BLOCK_END)
GEMMA = Marks("<start_of_turn>", "<end_of_turn>", "model", "<bos>", merged=True, stripped=True)

Results = Literal["tool", "user", "response"]


class ChatFormat(Chat):
    """Turns messages into ids and ids into text, with one tokenizer.

    `results` says how a tool's answer is written: as a message of the role tool (SmolLM2, pocket), as one of the user
    (mini-swe-agent), or as <tool_response> in one of the user, all in a row in one message (Qwen), with `tail` behind
    the last. `opening` is what stands behind the assistant's header: Qwen3's thinking models begin with <think>, and
    with thinking switched off it is an empty thought. `template` is the model's own; it tells of tools where it knows
    them. `ends` are further tokens that a model may end its message with.
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
        marks = marks_of(tokenizer)
        if marks is None:
            raise OffbookError(f"this model's tokenizer has no {BLOCK_START} and {BLOCK_END}, so its chat is no ChatML")
        self.marks = marks
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # control tokens in outside text become ordinary characters
        self.dialect = dialect_named(dialect)
        self.call_marks = self.dialect.marks
        self.results = results
        self.template = template
        self.tells_tools = "tools" in template
        self.tail = tail
        self.begin_ids = [self._id(marks.begin)] if marks.begin else []
        self.start_id = self._id(marks.start)
        self.end_id = self._id(marks.end)
        self.stop_ids = frozenset({self.end_id, *ends})
        self.newline_ids = self.encode("\n")
        self.assistant_header = [*self.header("assistant"), *self.encode(opening)]
        self.thinking = opening.rstrip().endswith(THINK_START)

    @classmethod
    def from_folder(cls, folder: Path | str, dialect: str = "hermes") -> ChatFormat:
        """The format of a model's folder; its chat template says how it writes results and opens answers."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise OffbookError(f"{folder} has no tokenizer.json; save the tokenizer in the model's folder")
        tokenizer = Tokenizer.from_file(str(path))
        marks = marks_of(tokenizer) or CHATML
        template = read_template(Path(folder))
        opening = answer_opening(template, marks, first_token(Path(folder))) if template else ""
        results: Results = "user" if marks == GEMMA or dialect == "bash" else "tool"
        tail = ""
        if RESPONSE_START in template and results != "user":
            results, tail = "response", results_tail(template)
        template = template if dialect == own_dialect(template) else ""  # it would describe another one
        return cls(tokenizer, dialect, results, opening, template, tail, _generation_ends(Path(folder), tokenizer))

    def _id(self, mark: str) -> int:
        found = self.tokenizer.token_to_id(mark)
        assert found is not None  # these marks were chosen because the tokenizer has them
        return found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def header(self, role: Role) -> list[int]:
        return [self.start_id, *self.encode(self.marks.speaker(role) + "\n")]

    def encode_lines(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Encoded:
        """The lines as blocks, one after the other."""
        encoded = Encoded([], [])
        index = 0
        if opening:
            encoded.ids.extend(self.begin_ids)
            if self.marks.merged and [role for role, _ in lines[:2]] == ["system", "user"]:
                self._encode_merged(lines[0][1], lines[1][1], encoded)
                index = 2
        while index < len(lines):
            role, text = lines[index]
            if role == "tool" and self.results == "response":
                last = next((n for n in range(index, len(lines)) if lines[n][0] != "tool"), len(lines))
                self._encode_responses([line for _, line in lines[index:last]], encoded)
                index = last
                continue
            if role == "tool" and self.results == "user":
                role = "user"
            if opening and index == 0 and role == "system" and tools and self.tells_tools:
                text = system_with_tools(self.template, text, tools)
            self._encode_block(role, text, encoded)
            index += 1
        return encoded

    def _encode_block(self, role: Role, text: str, encoded: Encoded) -> None:
        start = encoded.spans[-1][3] if encoded.spans else 0
        encoded.ids.extend(self.header(role))
        body = len(encoded.ids)
        encoded.ids.extend(self.encode(text.strip() if self.marks.stripped else text))
        body_end = len(encoded.ids)
        encoded.ids.extend([self.end_id, *self.newline_ids])
        encoded.spans.append((start, body, body_end, len(encoded.ids)))

    def _encode_merged(self, system: str, user: str, encoded: Encoded) -> None:
        """One block for the two. The user's part begins where the system's words and the empty line behind them end."""
        encoded.ids.extend(self.header("user"))
        body = len(encoded.ids)
        encoded.ids.extend(self.encode(f"{system}\n\n"))
        seam = len(encoded.ids)
        encoded.ids.extend(self.encode(user.strip()))
        body_end = len(encoded.ids)
        encoded.ids.extend([self.end_id, *self.newline_ids])
        encoded.spans.extend([(0, body, seam, seam), (seam, seam, body_end, len(encoded.ids))])

    def _encode_responses(self, texts: list[str], encoded: Encoded) -> None:
        """Results in a row are one text to the tokenizer, as in the template. A token is where it begins."""
        start = len(encoded.ids)
        encoded.ids.extend([self.start_id, *self.encode("user")])
        words = len(encoded.ids)
        whole, bounds = "", []
        for text in texts:
            whole += f"\n{RESPONSE_START}\n"
            body = len(whole)
            whole += text
            bounds.append((body, len(whole), len(whole) + len(RESPONSE_END) + 1))
            whole += f"\n{RESPONSE_END}"
        whole += self.tail
        encoding = self.tokenizer.encode(whole, add_special_tokens=False)
        encoded.ids.extend(encoding.ids)
        encoded.ids.extend([self.end_id, *self.newline_ids])
        firsts = [first for first, _ in encoding.offsets]
        for number, bound in enumerate(bounds):
            body, body_end, end = (words + bisect_left(firsts, character) for character in bound)
            end = len(encoded.ids) if number == len(texts) - 1 else end
            span: Span = (start, body, body_end, end)
            encoded.spans.append(span)
            start = end

    def closing(self, sampled: list[int]) -> list[int]:
        """A message cut off by a limit gets the end token that the model did not write."""
        ended = bool(set(sampled[-1:]) & self.stop_ids)
        return self.newline_ids if ended else [self.end_id, *self.newline_ids]

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        return self.dialect.read(self.decode(sampled), tools, self.thinking)

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Calls as the model's own template writes them, if it knows of any."""
        written = calls_as_written(self.template, calls) if calls and self.tells_tools else ""
        return self.encode("\n".join(filter(None, (text, written))) if written else self.dialect.answer(text, calls))


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Those whose tokens the tokenizer has."""
    for marks in (CHATML, GEMMA):
        if all(tokenizer.token_to_id(mark) is not None for mark in (marks.start, marks.end, marks.begin) if mark):
            return marks
    return None


def _generation_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Further end tokens from generation_config.json: Qwen3 and Gemma 3 also have the end of a text.

    Only control tokens count: a configuration's default is a number that may be any word of this tokenizer.
    """
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    control = {token for token, mark in tokenizer.get_added_tokens_decoder().items() if mark.special}
    return [token for token in (found if isinstance(found, list) else [found]) if token in control]


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


def own_dialect(template: str) -> str:
    """The dialect of the calls that a template writes."""
    return "xml" if "<function=" in template else "hermes"


def first_token(folder: Path) -> str:
    """What templates call bos_token."""
    config = folder / "tokenizer_config.json"
    found: Any = json.loads(config.read_text()).get("bos_token") if config.is_file() else None
    return (found["content"] if isinstance(found, dict) else found) or ""


def answer_opening(template: str, marks: Marks, bos_token: str) -> str:
    """What the template puts between the model's header and the answer: nothing, or the begin of thinking.

    A template that writes the messages before it otherwise than `marks` say is refused.
    """
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = _render(template, messages, (), add_generation_prompt=True, bos_token=bos_token)
    between = "\n\n" if marks.merged else f"{marks.end}\n{marks.start}user\n"
    opened = f"{marks.begin}{marks.start}{marks.speaker('system')}\ns{between}u{marks.end}\n"
    opened += f"{marks.start}{marks.model}\n"
    if not text.startswith(opened):
        raise OffbookError(
            f"this model's tokenizer has {marks.start} and {marks.end}, but its chat template writes {text!r} where "
            f"{opened!r} was expected; such a chat cannot be trained here"
        )
    return text[len(opened) :]


def results_tail(template: str) -> str:
    """What the template puts between the last </tool_response> and the end of its message: Qwen3-Coder a newline."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    text = _render(template, [*messages, {"role": "tool", "content": "x"}], (), add_generation_prompt=False)
    _, closed, tail = text.rpartition(RESPONSE_END)
    return tail.partition(BLOCK_END)[0] if closed else ""


def system_with_tools(template: str, text: str, tools: Tools) -> str:
    """The text of the system message as the template writes it where there are tools."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "x"}]
    rendered = _render(template, messages, tools, add_generation_prompt=False)
    before, after = f"{BLOCK_START}system\n", f"{BLOCK_END}\n{BLOCK_START}user\nx{BLOCK_END}\n"
    if not (rendered.startswith(before) and rendered.endswith(after)):
        raise OffbookError("this model's chat template does not put its tools into the system message")
    return rendered[len(before) : -len(after)]


def calls_as_written(template: str, calls: Sequence[ToolCall]) -> str:
    """What the template makes of calls alone; empty where it makes nothing of them. What follows keeps it from taking
    the message for the last one, which may get an empty thought."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    made = {"content": "", "tool_calls": [{"type": "function", "function": function} for function in functions]}
    asked: dict[str, Any] = {"role": "user", "content": "x"}
    messages = [asked, {"role": "assistant", **made}, {"role": "tool", "content": "x"}, asked]
    try:
        text = _render(template, messages, (), add_generation_prompt=False)
    except OffbookError:
        return ""
    return text.partition(f"{BLOCK_START}assistant\n")[2].partition(BLOCK_END)[0].strip()


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: Tools,
    add_generation_prompt: bool,
    bos_token: str = "",
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # seconds; the pocket model needs none

    asked = {"add_generation_prompt": add_generation_prompt, "bos_token": bos_token}
    done: list[str | Exception] = []

    def render() -> None:
        try:
            rendered, _ = render_jinja_template([messages], as_json(tools) or None, chat_template=template, **asked)
            done.append(rendered[0])
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
