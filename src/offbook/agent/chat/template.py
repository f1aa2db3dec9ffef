"""What a model's own template says: whether it writes messages as we do, how it opens an answer, how it tells of
tools."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from offbook.agent.chat.strict import Tools
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


def first_token(folder: Path) -> str:
    """What templates call bos_token."""
    config = folder / "tokenizer_config.json"
    found: Any = json.loads(config.read_text()).get("bos_token") if config.is_file() else None
    return (found["content"] if isinstance(found, dict) else found) or ""


def as_json(tools: Tools) -> list[dict[str, Any]]:
    """In the envelope that templates are written for."""
    return [{"type": "function", "function": asdict(tool)} for tool in tools]


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
