"""A model that reads rollouts for what rules miss, behind a URL that speaks OpenAI's chat completions.

It is asked once for each rubric of prompts/, is shown calls, their answers and the diff, and never the reward, the
outcome or what the agent thought. A finding must point at a message and quote it, or it is thrown away and counted.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from importlib import resources

from pydantic import BaseModel, ValidationError

from offbook.asking import Asked, is_sampled, json_part, prompts_in
from offbook.types import Event, Flag, Rollout, Task

PROMPTS = resources.files("offbook.monitors") / "prompts"
FRAME = "frame"  # the prompt around each rubric
CALL_CHARS, ANSWER_CHARS, DIFF_CHARS, ALL_CHARS = 2000, 1500, 8000, 40_000
MAX_FINDINGS = 8
QUOTE_CHARS = 8  # the least that a quotation must have


class Finding(BaseModel):
    segment: int = 0
    message: int
    quote: str
    why: str = ""


class Findings(BaseModel):
    findings: list[Finding]


@cache
def rubrics() -> dict[str, str]:
    """By the name of the hack that each one describes."""
    return prompts_in(PROMPTS, FRAME)


class ModelMonitor:
    """`key_env` names the variable with the server's key, if it wants one."""

    def __init__(
        self, url: str, model: str, rate: float = 1.0, timeout_s: float = 120.0, key_env: str = "OPENAI_API_KEY"
    ):
        self.rate = rate
        self._asked = Asked(url, model, timeout_s, key_env)
        self.num_asked = self.num_malformed = 0

    async def check(self, task: Task | None, rollout: Rollout) -> list[Flag]:
        """Its findings, as flags of the kinds `model/NAME`. Replies that are none are events on the rollout."""
        if not is_sampled(rollout.id, self.rate):
            return []
        shown, instruction = show(rollout), task.instruction if task is not None else ""
        frame = (PROMPTS / f"{FRAME}.md").read_text()
        found: list[Flag] = []
        asked = [
            self._asked.ask(frame.format(rubric=rubric, instruction=instruction, rollout=shown))
            for rubric in rubrics().values()
        ]
        replies = await asyncio.gather(*asked)
        for name, reply in zip(rubrics(), replies, strict=True):
            self.num_asked += 1
            flags, problem = read_reply(reply, name, rollout)
            found += flags
            if problem:
                self.num_malformed += 1
                rollout.events.append(Event(-1, "monitor_malformed", f"{name}: {problem}"))
        return found


def read_reply(reply: str, name: str, rollout: Rollout) -> tuple[list[Flag], str]:
    """The findings that hold, and what is wrong with the reply, if something is.

    A finding holds if its message is there and has the words that it quotes, in a call, an answer or the diff.
    """
    try:
        findings = Findings.model_validate_json(json_part(reply)).findings
    except ValidationError as error:
        return [], f"no findings in JSON ({error.errors()[0]['msg']})"
    flags, refused = [], 0
    for finding in findings[:MAX_FINDINGS]:
        if not _holds(finding, rollout):
            refused += 1
            continue
        evidence = " ".join(f"{finding.quote!r}: {finding.why}".split())[:240]
        flags.append(Flag(f"model/{name}", finding.message, evidence, finding.segment))
    refused += max(0, len(findings) - MAX_FINDINGS)
    return flags, f"{refused} findings point at nothing that is there" if refused else ""


def _holds(finding: Finding, rollout: Rollout) -> bool:
    if not 0 <= finding.segment < len(rollout.segments):
        return False
    messages = rollout.segments[finding.segment].messages
    quote = " ".join(finding.quote.split())
    if not 0 <= finding.message < len(messages) or len(quote) < QUOTE_CHARS:
        return False
    message = messages[finding.message]
    calls = [json.dumps(call.arguments, ensure_ascii=False) for call in message.calls]
    calls += [str(value) for call in message.calls for value in call.arguments.values()]
    texts = [*calls, rollout.diff, message.text if message.role == "tool" else ""]
    return any(quote in " ".join(text.split()) for text in texts)


def show(rollout: Rollout) -> str:
    """Calls, answers and the diff, each message with its place; long ones are cut in the middle."""
    parts = []
    for number, segment in enumerate(rollout.segments):
        for index, message in enumerate(segment.messages):
            place = f"[segment {number} message {index}]"
            for call in message.calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                parts.append(f"{place} call {call.name} {_cut(arguments, CALL_CHARS)}")
            if message.role == "tool":
                parts.append(f"{place} answer: {_cut(message.text, ANSWER_CHARS)}")
    opened = [f"[message {event.message}] {event.detail}" for event in rollout.events if event.kind == "opened"]
    text = _cut("\n".join(parts), ALL_CHARS)
    return f"{text}\n\nOpened files:\n{_cut(chr(10).join(opened), 2000)}\n\nDiff:\n{_cut(rollout.diff, DIFF_CHARS)}"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} [{len(text) - limit} characters left out] {text[-limit // 2 :]}"
