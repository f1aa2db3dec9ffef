"""ChatML: <|im_start|>role, a newline, the text, <|im_end|>, a newline. Qwen2.5 and later, SmolLM2, the pocket model.

Text from outside (files, tool output, users) cannot forge a message: the control tokens in it are encoded as ordinary
characters.

Where the ids differ from what a model's own template gives:
- Header and text are encoded separately, so a text that begins with white space may be cut into other tokens. The
  characters are the same.
- Thinking stays in the conversation. Qwen3's template drops that of earlier turns when it renders again; nothing is
  rendered again here.
- No system message is made up where there is none. SmolLM2 and Qwen2.5 have a default one.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.agent.chat.chat import Chat, Encoded, Line
from offbook.agent.chat.dialects import CALL_END, CALL_START, Tools, as_json, dialect_named
from offbook.core.thoughts import THINK_START
from offbook.types import OffbookError, Role, ToolCall

BLOCK_START, BLOCK_END = "<|im_start|>", "<|im_end|>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

RENDER_S = 20.0  # timeout of a template; a sound one takes milliseconds

Results = Literal["tool", "user", "response"]


class ChatFormat(Chat):
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
        ids = mark_ids(tokenizer)
        if not ids:
            raise OffbookError(f"this model's tokenizer has no {BLOCK_START} and {BLOCK_END}, so its chat is no ChatML")
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # control tokens in outside text become ordinary characters
        self.dialect = dialect_named(dialect)
        self.call_marks = self.dialect.marks
        self.results = results
        self.template = template
        self.tells_tools = "tools" in template
        self.tail = tail
        self.start_id, self.end_id = ids
        self.stop_ids = frozenset({self.end_id, *ends})
        self.newline_ids = self.encode("\n")
        self.assistant_header = [*self.header("assistant"), *self.encode(opening)]
        self.thinking = opening.rstrip().endswith(THINK_START)

    @classmethod
    def from_folder(cls, folder: Path | str, dialect: str = "hermes") -> ChatFormat:
        """The format of a model's folder; its chat template says how it writes results and opens answers."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise OffbookError(f"{folder} has no tokenizer.json; save the tokenizer in the model's folder")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = read_template(folder)
        opening = _answer_opening(template) if template else ""
        results: Results = "user" if dialect == "bash" else "tool"
        tail = ""
        if RESPONSE_START in template and results != "user":
            results, tail = "response", _results_tail(template)
        template = template if dialect == own_dialect(template) else ""  # it would describe another one
        # Qwen3 also ends with the end of a text. Only control tokens count: a default may be any word.
        path = folder / "generation_config.json"
        ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        control = {token for token, mark in tokenizer.get_added_tokens_decoder().items() if mark.special}
        ends = control & set(ends if isinstance(ends, list) else [ends])
        return cls(tokenizer, dialect, results, opening, template, tail, sorted(ends))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def header(self, role: Role) -> list[int]:
        return [self.start_id, *self.encode(f"{role}\n")]

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
            encoded.ids.extend(self.header(role))
            body = len(encoded.ids)
            encoded.ids.extend(self.encode(text))
            body_end = len(encoded.ids)
            encoded.ids.extend([self.end_id, *self.newline_ids])
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
        encoded.ids.extend([self.end_id, *self.newline_ids])
        firsts = [first for first, _ in encoding.offsets]
        for number, bound in enumerate(bounds, 1):
            body, body_end, end = (words + bisect_left(firsts, character) for character in bound)
            end = len(encoded.ids) if number == len(texts) else end
            encoded.spans.append((start, body, body_end, end))
            start = end

    def closing(self, sampled: list[int]) -> list[int]:
        """A message cut off by a limit gets the end token that the model did not write."""
        ended = bool(set(sampled[-1:]) & self.stop_ids)
        return self.newline_ids if ended else [self.end_id, *self.newline_ids]

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        return self.dialect.read(self.decode(sampled), tools, self.thinking)

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Calls as the model's own template writes them, if it knows of any."""
        written = _calls_as_written(self.template, calls) if calls and self.tells_tools else ""
        return self.encode("\n".join(filter(None, (text, written))) if written else self.dialect.answer(text, calls))


def mark_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens that begin and end a message; None if the tokenizer lacks one."""
    start, end = tokenizer.token_to_id(BLOCK_START), tokenizer.token_to_id(BLOCK_END)
    return None if start is None or end is None else (start, end)


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

    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in lines]
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
