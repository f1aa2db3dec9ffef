"""Which chat a model's folder asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

from tokenizers import Tokenizer

from offbook.tokens.calls import dialect_named
from offbook.tokens.chat import Chat
from offbook.tokens.chatml import ChatFormat
from offbook.tokens.rendered import RenderedChat
from offbook.tokens.template import BLOCK_END, BLOCK_START, read_template
from offbook.types import OffbookError


def chat_for(folder: Path | str, dialect: str = "auto", family: str = "") -> Chat:
    """ChatML where the tokenizer has its tokens, the renderer of the model's family otherwise.

    `dialect` auto takes the calls that the model's own template writes. `family` names a family of `renderers`, for a
    model whose name does not say it.
    """
    folder = Path(folder)
    if family or not _is_chatml(folder):
        return rendered_chat(folder, dialect, family)
    if dialect == "auto":
        dialect = "xml" if "<function=" in read_template(folder) else "hermes"
    return ChatFormat.from_folder(folder, dialect)


def rendered_chat(folder: Path, dialect: str = "auto", family: str = "") -> RenderedChat:
    renderers = _renderers()
    family = family or _family(folder, renderers)
    tokenizer = renderers.base.load_tokenizer(str(folder))
    try:
        config = renderers.configs.config_from_name(family)
        # the bridge between turns, not the template, says what a conversation is made of: nothing is dropped from it
        config = config.model_copy(update={"thinking_retention": "all"})
        renderer = renderers.create_renderer(tokenizer, config)
    except (AssertionError, ValueError) as error:  # it asserts that a family's tokens are there
        raise OffbookError(f"the chat of {folder} is not of the family {family}: {error}") from None
    return RenderedChat(renderer, tokenizer, None if dialect == "auto" else dialect_named(dialect))


def _is_chatml(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return False
    tokenizer = Tokenizer.from_file(str(path))
    return tokenizer.token_to_id(BLOCK_START) is not None and tokenizer.token_to_id(BLOCK_END) is not None


def _family(folder: Path, renderers: ModuleType) -> str:
    """By the hub name that the folder or its configuration carries. Names are matched whole: a tuned model of the same
    architecture may come with another template."""
    cached = re.search(r"models--([^/]+?)--([^/]+)", folder.as_posix())
    config = folder / "config.json"
    named = json.loads(config.read_text()).get("_name_or_path", "") if config.is_file() else ""
    for name in (f"{cached[1]}/{cached[2]}" if cached else "", named):
        if name in renderers.base.MODEL_RENDERER_MAP:
            found: str = renderers.base.MODEL_RENDERER_MAP[name]
            return found
    if not config.is_file():
        raise OffbookError(f"{folder} has no config.json, so it is not a model folder")
    raise OffbookError(
        f"the chat format of {folder} is not known: it is not ChatML, and `_name_or_path` in its config.json is no hub "
        "id of a model whose format is known, such as meta-llama/Llama-3.2-1B-Instruct"
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
