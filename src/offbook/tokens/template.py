"""What a model's own ChatML template says: how it opens an answer, and how it tells of tools."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbook.tokens.strict import Tools
from offbook.types import OffbookError

BLOCK_START, BLOCK_END = "<|im_start|>", "<|im_end|>"


def read_template(folder: Path) -> str:
    """The Jinja text in a model's folder, empty where there is none."""
    beside, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if beside.is_file():
        return beside.read_text()
    found: Any = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # several by name; the one for tools says most
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("tool_use", named.get("default"))
    return found or ""


def as_json(tools: Tools) -> list[dict[str, Any]]:
    """In the envelope that templates are written for."""
    return [{"type": "function", "function": asdict(tool)} for tool in tools]


def answer_opening(template: str) -> str:
    """What the template puts between the assistant's header and the answer: nothing, or the begin of thinking."""
    text = _render(template, [{"role": "user", "content": "x"}], (), add_generation_prompt=True)
    _, header, opening = text.rpartition(f"{BLOCK_START}assistant\n")
    if not header:
        raise OffbookError("this model's chat template does not open an answer in the ChatML way")
    return opening


def system_with_tools(template: str, text: str, tools: Tools) -> str:
    """The text of the system message as the template writes it where there are tools."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "x"}]
    rendered = _render(template, messages, tools, add_generation_prompt=False)
    before, after = f"{BLOCK_START}system\n", f"{BLOCK_END}\n{BLOCK_START}user\nx{BLOCK_END}\n"
    if not (rendered.startswith(before) and rendered.endswith(after)):
        raise OffbookError("this model's chat template does not put its tools into the system message")
    return rendered[len(before) : -len(after)]


def _render(template: str, messages: list[dict[str, str]], tools: Tools, add_generation_prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # seconds; the pocket model needs none

    rendered, _ = render_jinja_template(
        [messages], as_json(tools) or None, chat_template=template, add_generation_prompt=add_generation_prompt
    )
    text: str = rendered[0]
    return text
