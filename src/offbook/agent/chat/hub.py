"""Which chat a model's folder asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from offbook.agent.chat.calls import dialect_named
from offbook.agent.chat.chat import Chat
from offbook.agent.chat.chatml import ChatFormat, marks_of
from offbook.agent.chat.rendered import RenderedChat
from offbook.agent.chat.template import read_template
from offbook.types import OffbookError

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


def chat_for(folder: Path | str, dialect: str = "auto", family: str = "") -> Chat:
    """ChatFormat where the tokenizer has its tokens, the renderer of the model's family otherwise.

    `dialect` auto takes the calls that the model's own template writes. `family` names a family of `renderers`, for a
    model that neither its template nor its name gives away.
    """
    folder = Path(folder)
    if family or not _has_marks(folder):
        return rendered_chat(folder, dialect, family)
    if dialect == "auto":
        dialect = "xml" if "<function=" in read_template(folder) else "hermes"
    return ChatFormat.from_folder(folder, dialect)


def rendered_chat(folder: Path, dialect: str = "auto", family: str = "") -> RenderedChat:
    renderers = _renderers()
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


def _has_marks(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and marks_of(Tokenizer.from_file(str(path))) is not None


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


def _renderers() -> ModuleType:
    try:
        import renderers.base
        import renderers.configs
    except ImportError:
        raise OffbookError(
            "this model's chat is not ChatML and needs one more package: pip install offbook[hub]"
        ) from None
    return renderers
