"""ChatML: <|im_start|>role, a newline, the text, <|im_end|>, a newline. Qwen2.5 and later, SmolLM2, the pocket model.
Gemma 3, whose messages have the same build under other marks.

Text that comes from outside (files, tool output, users) cannot forge a message: the control tokens in it are encoded as
ordinary characters.

Where the ids differ from what a model's own template gives:
- Header and text are encoded apart, so a text that begins with white space may be cut into other tokens. The characters
  are the same.
- Thinking stays in the conversation. Qwen3's template drops that of earlier turns when it renders again; nothing is
  rendered again here.
- No system message is made up where there is none. SmolLM2 and Qwen2.5 have a default one.
- Gemma's template refuses two messages of the user in a row. A tool's answer is one there, and so is a hint behind it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbook.agent.chat.calls import dialect_named, spoken
from offbook.agent.chat.chat import Chat, Laid, Line, Span
from offbook.agent.chat.strict import CALL_END, CALL_START, Tools
from offbook.agent.chat.template import (
    BLOCK_END,
    BLOCK_START,
    CHATML,
    GEMMA,
    RESPONSE_END,
    RESPONSE_START,
    Marks,
    answer_opening,
    calls_as_written,
    first_token,
    read_template,
    results_tail,
    system_with_tools,
)
from offbook.core.thoughts import THINK_START
from offbook.types import OffbookError, Role, ToolCall

Results = Literal["tool", "user", "response"]


class ChatFormat(Chat):
    """Turns messages into ids and ids into text, with one tokenizer.

    `results` says how a tool's answer is written: as a message of the role tool (SmolLM2, pocket), as one of the user
    (mini-swe-agent), or as <tool_response> in one of the user, all in a row in one message (Qwen), with `tail` behind
    the last. `opening` is what stands behind the assistant's header: Qwen3's thinking models begin with <think>, and
    with thinking switched off it is an empty thought. `template` is the model's own; it tells of tools where it knows
    them. `ends` are tokens that a model may end its message with beside the format's own.
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
            raise OffbookError(f"{folder} has no tokenizer.json; save the tokenizer beside the model")
        tokenizer = Tokenizer.from_file(str(path))
        marks = marks_of(tokenizer) or CHATML
        template = read_template(Path(folder))
        opening = answer_opening(template, marks, first_token(Path(folder))) if template else ""
        results: Results = "user" if marks == GEMMA or dialect == "bash" else "tool"
        tail = ""
        if RESPONSE_START in template and results != "user":
            results, tail = "response", results_tail(template)
        template = "" if dialect == "bash" else template
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

    def lay(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Laid:
        """The lines as blocks, one after the other."""
        laid = Laid([], [])
        index = 0
        if opening:
            laid.ids.extend(self.begin_ids)
            if self.marks.merged and [role for role, _ in lines[:2]] == ["system", "user"]:
                self._lay_merged(lines[0][1], lines[1][1], laid)
                index = 2
        while index < len(lines):
            role, text = lines[index]
            if role == "tool" and self.results == "response":
                last = next((n for n in range(index, len(lines)) if lines[n][0] != "tool"), len(lines))
                self._lay_responses([line for _, line in lines[index:last]], laid)
                index = last
                continue
            if role == "tool" and self.results == "user":
                role = "user"
            if opening and index == 0 and role == "system" and tools and self.tells_tools:
                text = system_with_tools(self.template, text, tools)
            self._lay_block(role, text, laid)
            index += 1
        return laid

    def _lay_block(self, role: Role, text: str, laid: Laid) -> None:
        start = laid.spans[-1][3] if laid.spans else 0
        laid.ids.extend(self.header(role))
        body = len(laid.ids)
        laid.ids.extend(self.encode(text.strip() if self.marks.stripped else text))
        body_end = len(laid.ids)
        laid.ids.extend([self.end_id, *self.newline_ids])
        laid.spans.append((start, body, body_end, len(laid.ids)))

    def _lay_merged(self, system: str, user: str, laid: Laid) -> None:
        """One block for the two. The user's part begins where the system's words and the empty line behind them end."""
        laid.ids.extend(self.header("user"))
        body = len(laid.ids)
        laid.ids.extend(self.encode(f"{system}\n\n"))
        seam = len(laid.ids)
        laid.ids.extend(self.encode(user.strip()))
        body_end = len(laid.ids)
        laid.ids.extend([self.end_id, *self.newline_ids])
        laid.spans.extend([(0, body, seam, seam), (seam, seam, body_end, len(laid.ids))])

    def _lay_responses(self, texts: list[str], laid: Laid) -> None:
        """Results in a row are one text to the tokenizer, as in the template. A token is where it begins."""
        start = len(laid.ids)
        laid.ids.extend([self.start_id, *self.encode("user")])
        words = len(laid.ids)
        whole, bounds = "", []
        for text in texts:
            whole += f"\n{RESPONSE_START}\n"
            body = len(whole)
            whole += text
            bounds.append((body, len(whole), len(whole) + len(RESPONSE_END) + 1))
            whole += f"\n{RESPONSE_END}"
        whole += self.tail
        encoding = self.tokenizer.encode(whole, add_special_tokens=False)
        laid.ids.extend(encoding.ids)
        laid.ids.extend([self.end_id, *self.newline_ids])
        firsts = [first for first, _ in encoding.offsets]
        for number, bound in enumerate(bounds):
            body, body_end, end = (words + bisect_left(firsts, character) for character in bound)
            end = len(laid.ids) if number == len(texts) - 1 else end
            span: Span = (start, body, body_end, end)
            laid.spans.append(span)
            start = end

    def closing(self, sampled: list[int]) -> list[int]:
        """A message cut off by a limit gets the end token that the model did not write."""
        ended = bool(set(sampled[-1:]) & self.stop_ids)
        return self.newline_ids if ended else [self.end_id, *self.newline_ids]

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        return self.dialect.parse(self.decode(sampled), tools, self.thinking)

    def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Calls as the model's own template writes them, if it knows of any."""
        written = calls_as_written(self.template, calls) if calls and self.tells_tools else ""
        return self.encode(spoken(text, [written] if written else [self.dialect.write(call) for call in calls]))


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Those whose tokens the tokenizer has."""
    for marks in (CHATML, GEMMA):
        if all(tokenizer.token_to_id(mark) is not None for mark in (marks.start, marks.end, marks.begin) if mark):
            return marks
    return None


def _generation_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """What the model's maker says may end its output: Qwen3 and Gemma 3 have the end of a text beside their own.

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
