"""The agent loop: prompt, message, tool calls, results, until it finishes or a limit ends it.

Nothing is dropped. An invalid call is answered with an error and counted; a crash ends one rollout and stays on it.
"""

from __future__ import annotations

import asyncio
import difflib
import time
import traceback

from offbook.harness.tools import TOOLS, ToolFailed
from offbook.sandbox import Box, PathRefused
from offbook.tokens import ChatFormat, Transcript
from offbook.types import INVALID, CallStatus, Event, Limits, Policy, Rollout, StopReason, Task, ToolCall

SYSTEM = "You are a coding agent. Call one tool at a time: {tools}"


def system_prompt(tools: tuple[str, ...]) -> str:
    return SYSTEM.format(tools=", ".join(TOOLS[name].signature for name in tools))


async def run_agent(
    task: Task, box: Box, policy: Policy, chat: ChatFormat, limits: Limits, rollout_id: str, group: str
) -> Rollout:
    """One rollout, unscored. It always returns: what goes wrong in the policy or the box is on the Rollout."""
    rollout = Rollout(id=rollout_id, task=task.id, group=group, tools=task.tools)
    transcript = Transcript(chat)
    rollout.segments.append(transcript.segment)
    started = time.monotonic()
    try:
        async with asyncio.timeout(limits.wall_s):
            transcript.add("system", system_prompt(task.tools))
            transcript.add("user", task.instruction)
            rollout.stop = await _converse(rollout, transcript, box, policy, limits)
    except TimeoutError:
        rollout.stop = "wall"
    except Exception:  # the border of a rollout: one crash is one rollout's event, never the run's
        rollout.stop = "crash"
        rollout.events.append(Event(len(transcript.segment.messages) - 1, "crash", traceback.format_exc(limit=-4)))
    rollout.changed = box.changes()
    rollout.diff = _diff(task, rollout.changed)
    rollout.usage.seconds = time.monotonic() - started
    rollout.usage.sampled_tokens = sum(transcript.segment.sampled)
    rollout.usage.prompt_tokens = len(transcript.segment.ids) - rollout.usage.sampled_tokens
    return rollout


async def _converse(rollout: Rollout, transcript: Transcript, box: Box, policy: Policy, limits: Limits) -> StopReason:
    for _ in range(limits.turns):
        prompt = transcript.prompt()
        room = min(limits.message_tokens, limits.tokens - len(prompt))
        if room <= 0:
            return "tokens"
        message = transcript.add_sampled(await policy.complete(prompt, room))
        rollout.usage.turns += 1
        if not message.calls:
            return "answer"
        for call in message.calls:
            status, text = await _call(call, rollout.tools, box, limits)
            transcript.add("tool", text, status)
            rollout.usage.calls += 1
            rollout.usage.invalid_calls += status in INVALID
            if status == "ok" and call.name == "finish":
                return "finish"
    return "turns"


async def _call(call: ToolCall, tools: tuple[str, ...], box: Box, limits: Limits) -> tuple[CallStatus, str]:
    if call.error:
        return "malformed", f"error: {call.error}"
    if call.name not in tools:
        return "unknown_tool", f"error: there is no tool {call.name}"
    tool = TOOLS[call.name]
    problem = tool.check(call.arguments)
    if problem:
        return "malformed", f"error: {problem}"
    try:
        return "ok", await tool.run(box, limits, call.arguments)
    except (ToolFailed, PathRefused) as error:
        return "failed", f"error: {error}"
    except OSError as error:  # the border of a tool call: no such file, a folder, no permission, no space
        return "failed", f"error: {error.strerror or error}"


def _diff(task: Task, changed: dict[str, str | None]) -> str:
    lines: list[str] = []
    for path, new in sorted(changed.items()):
        original = task.tree / path
        old = original.read_text(errors="replace") if original.is_file() else ""
        before, after = old.splitlines(keepends=True), (new or "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
