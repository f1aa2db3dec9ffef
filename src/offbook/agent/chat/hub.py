"""Which chat a model's folder asks for, and RenderedChat: families that are not ChatML, by the package `renderers`.

A renderer writes a conversation as its family's template does. What makes it usable here is that a conversation can be
built from pieces: a header for the model's message, an end behind it, and blocks in between that do not depend on what
came before. Whether a family has such pieces is tried out once, on a short conversation, when the chat is made; a
family without them is refused, because its next prompt would not extend the ids of the last.

Text from outside cannot forge a message: special tokens in it are encoded as ordinary characters, and a family that
writes its own marks as text would lose them and is refused. Thinking stays in the conversation. Where a family's own
parser lets a call end unfinished thinking, so does this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from offbook.agent.chat.chat import Chat, Encoded, Line, Span
from offbook.agent.chat.chatml import ChatFormat, mark_ids, own_dialect, read_template
from offbook.agent.chat.dialects import (
    HERMES,
    Dialect,
    Tools,
    as_json,
    can_be_written,
    dialect_named,
    malformed,
    other_attempt,
    read_json,
)
from offbook.types import OffbookError, Role, ToolCall

HARMONY = "gpt-oss"  # its renderer loads a vocabulary from the net, and all that for a family that is refused
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TRIED: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "r"},
    {"role": "user", "content": "h"},
]
ASKED: list[dict[str, str]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
ANSWER = "t</think>\n\nw"  # ends a thought that the header may have begun; to other families it is a word
BARE_JSON = {"llama-3"}  # no mark says where a call begins: a message that begins like an object is an attempt
AS_TOLD = "Write calls in the format that the description of the tools gives."

REASONS = {
    "invalid_json": "the call is not valid JSON",
    "unclosed_block": "the call is not closed",
    "missing_name": "the call needs a name",
    "malformed_structure": "the call is not in the form of a call",
}


def chat_for(folder: Path | str, dialect: str = "auto", family: str = "") -> Chat:
    """ChatFormat where the tokenizer has its tokens, the renderer of the model's family otherwise.

    `dialect` auto takes the calls that the model's own template writes. `family` names a family of `renderers`, for a
    model that neither its template nor its name gives away.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not family and path.is_file() and mark_ids(Tokenizer.from_file(str(path))):
        return ChatFormat.from_folder(folder, own_dialect(read_template(folder)) if dialect == "auto" else dialect)
    try:
        import renderers.base
        import renderers.configs
    except ImportError:
        raise OffbookError(
            "this model's chat is not ChatML and needs one more package: pip install offbook[hub]"
        ) from None
    if not family and not (folder / "config.json").is_file() and not _name(folder):
        raise OffbookError(f"{folder} has no config.json, so it is not a model folder")
    tokenizer = renderers.base.load_tokenizer(str(folder))
    family = family or renderers.base.MODEL_RENDERER_MAP.get(_name(folder)) or _family(tokenizer, folder, renderers)
    if family == HARMONY:
        raise OffbookError(
            f"{folder} is of the chat family {HARMONY}, whose messages have several ends; no such model "
            "can be trained here"
        )
    try:
        renderer = _renderer(family, tokenizer, renderers)
    except (AssertionError, ValueError) as error:  # it asserts that a family's tokens are there
        raise OffbookError(f"the chat of {folder} is not of the family {family}: {error}") from None
    return RenderedChat(renderer, tokenizer, None if dialect == "auto" else dialect_named(dialect))


def _renderer(family: str, tokenizer: Any, renderers: ModuleType) -> Any:
    config = renderers.configs.config_from_name(family)
    # the bridge between turns, not the template, says what a conversation is made of: nothing is dropped from it
    return renderers.create_renderer(tokenizer, config.model_copy(update={"thinking_retention": "all"}))


def _name(folder: Path) -> str:
    """On the hub, where the folder is in the hub's cache or its configuration has it."""
    cached = re.search(r"models--([^/]+?)--([^/]+)", folder.as_posix())
    if cached:
        return f"{cached[1]}/{cached[2]}"
    config = folder / "config.json"
    named: str = json.loads(config.read_text()).get("_name_or_path", "") if config.is_file() else ""
    return named


def _family(tokenizer: Any, folder: Path, renderers: ModuleType) -> str:
    """The one that writes what the folder's own template writes. A checkpoint has no name, and a tuned model has one of
    its own; the template stays."""
    try:
        # Llama's date is today's where none is given, and a run is to read the same tomorrow
        asked = {"tools": [TOOL], "date_string": "26 Jul 2024", "add_generation_prompt": True}
        written = tokenizer.apply_chat_template(TRIED, tokenize=False, **asked)
        wanted = tokenizer.encode(written, add_special_tokens=False)
    except (TemplateError, ValueError):  # it has none, or none that knows tools
        wanted = None
    for family in sorted(set(renderers.base.MODEL_RENDERER_MAP.values()) - {HARMONY}):
        try:
            renderer = _renderer(family, tokenizer, renderers)
        except (AssertionError, ValueError):
            continue
        if wanted == renderer.render_ids(TRIED, tools=[TOOL], add_generation_prompt=True):
            return family
    raise OffbookError(
        f"the chat format of {folder} is not known: it is not ChatML, and neither its chat template nor its name on "
        "the hub is that of a known family; docs/models.md says which models work"
    )


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
        user = self._message("user", "u")
        answer = self.encode(ANSWER)
        self.end_id: int = self._bridge(answer, [user])[0]
        self._ended = [*answer, self.end_id]
        after = self._bridge(self._ended, [user])
        for stop_id in {self.end_id, *self.stop_ids}:  # GLM ends a message by the header of the next
            self._require(self._bridge([*answer, stop_id], [user]) == after, "ends messages in more than one way")
        self._require(self._bridge(answer, [user])[1:] == after, "has no token that ends a message")
        owners = renderer.bridge_to_next_turn(self._prompt, self._ended, [user]).message_indices
        self._after_end = after[: owners.index(0) - len(self._prompt) - len(self._ended)]
        # A hint is a message of the user between two others; what stands around it must not change with it.
        result, hint = self.block("tool", "r"), self.block("user", "h")
        together = self.encode_lines([("tool", "r"), ("user", "h")]).ids
        opened = renderer.render([*ASKED, self._message("user", "h")]).token_ids
        self._require(together == result + hint and opened == asked + hint, "writes a message differently elsewhere")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode_lines(self, lines: Sequence[Line], tools: Tools = (), opening: bool = False) -> Encoded:
        """Some families cannot open a conversation before the user speaks: until then nothing is encoded."""
        messages = [self._message(role, text) for role, text in lines]
        if not opening:
            rendered = self.renderer.bridge_to_next_turn(self._prompt, self._ended, messages)
            first = len(self._prompt) + len(self._ended) + len(self._after_end)
            return _spans(rendered, first, len(rendered.token_ids) - len(self.assistant_header), len(lines))
        if all(role != "user" for role, _ in lines):
            return Encoded([], [(0, 0, 0, 0)] * len(lines))
        rendered = self.renderer.render(messages, tools=None if self.dialect else as_json(tools) or None)
        return _spans(rendered, 0, len(rendered.token_ids), len(lines))

    def closing(self, sampled: list[int]) -> list[int]:
        ended = bool(set(sampled[-1:]) & self.stop_ids)
        return list(self._after_end) if ended else [self.end_id, *self._after_end]

    def parse(self, sampled: list[int], tools: Tools = ()) -> tuple[ToolCall, ...]:
        text = self.decode(sampled)
        thinking = self.decode(self.assistant_header).rstrip().endswith("<think>")
        if self.dialect:
            return self.dialect.read(text, tools, thinking)
        parsed = self.renderer.parse_response(sampled, tools=as_json(tools) or None, prompt_ids=self._prompt)
        if not parsed.tool_calls and self.family in BARE_JSON and text.lstrip().startswith("{"):
            return (malformed("", "the call is not one JSON object with name and parameters", 0),)
        calls = tuple(self._call(attempt, sampled) for attempt in parsed.tool_calls)
        return calls or other_attempt(text, tools, thinking, AS_TOLD)

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
        return self.encode((self.dialect or HERMES).answer(text, calls))

    def _call(self, attempt: Any, sampled: list[int]) -> ToolCall:
        """The renderer's reading, held to this package's rules where its own are looser."""
        start = len(self.decode(sampled[: attempt.token_span[0]])) if attempt.token_span else 0
        name, reason = str(attempt.name or ""), ""
        if attempt.status not in ("ok", "unknown_tool"):  # the harness knows best which tools there are
            reason = REASONS[attempt.status]
        elif not isinstance(attempt.arguments, dict):
            reason = "the call needs arguments, a JSON object"
        else:
            problem = None
            if attempt.raw.strip().startswith("{"):
                try:
                    _, _, problem = read_json(attempt.raw.strip(), 0)
                except ValueError as error:
                    problem = str(error)
            if problem:
                reason = f"the call is not valid JSON ({problem})"
            elif not can_be_written(attempt.arguments):
                reason = "the call's arguments cannot be written as JSON"
        return malformed(name, reason, start) if reason else ToolCall(name, attempt.arguments, start=start)

    def _message(self, role: Role, text: str) -> dict[str, str]:
        assert role != "assistant", "the model's messages are sampled, not rendered"
        return {"role": "user" if role == "tool" and self.dialect else role, "content": text}

    def _bridge(self, completion: list[int], messages: list[dict[str, str]]) -> list[int]:
        """The ids of the next prompt after this completion; the prompt must end with the model's header."""
        rendered = self.renderer.bridge_to_next_turn(self._prompt, completion, messages)
        ids = rendered.token_ids if rendered else []
        before, header = [*self._prompt, *completion], self.assistant_header
        extends = ids[: len(before)] == before and ids[-len(header) :] == header
        self._require(extends, "cannot extend the ids of a turn by the next one")
        new: list[int] = ids[len(before) :]
        return new

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise OffbookError(f"models of the chat family {self.family} cannot be trained here: the family {problem}")


def _spans(rendered: Any, first: int, end: int, count: int) -> Encoded:
    """Messages follow each other without a gap; one's own words are what the renderer marks as content."""
    owners, content = rendered.message_indices, rendered.is_content
    starts = [first, *(owners.index(number, first) for number in range(1, count)), end]
    spans: list[Span] = []
    for start, stop in pairwise(starts):
        words = [place for place in range(start, stop) if content[place]]
        body, body_end = (words[0], words[-1] + 1) if words else (stop, stop)
        spans.append((start - first, body - first, body_end - first, stop - first))
    return Encoded(rendered.token_ids[first:end], spans)
