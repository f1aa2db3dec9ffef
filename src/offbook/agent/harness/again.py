"""A rollout once more from one of its messages on: another message in its place, and what the tools answer to it.

Nothing is sampled here and nothing goes on after the answers. Up to the message the record is the rollout's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from offbook.agent.chat import Chat, Transcript
from offbook.agent.harness.agent import Harness, diff_of, run_call
from offbook.agent.harness.tool import Workbench
from offbook.sandbox import Sandbox, SandboxSpec
from offbook.signals.trajectory import At, Trajectory
from offbook.tasks.suite import suite_sandbox
from offbook.types import CallStatus, Completion, OffbookError, Rollout, StopReason, Task, ToolCall


class NotRestored(OffbookError):
    """A sandbox that cannot be brought to where it was."""


@dataclass(frozen=True, slots=True)
class Before:
    """The place right before a message of a rollout."""

    rollout: Rollout
    at: At
    task: Task
    harness: Harness
    chat: Chat

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """As it was there: a fresh one in which every call before it that may have written something is made again."""
        toolset = self.harness.toolset(self.task)
        async with await suite_sandbox(self.task.tree, self.task.suite, spec) as sandbox:
            bench = self._bench(sandbox)
            for use in Trajectory(self.rollout, self.task).uses:
                if use.at >= self.at:
                    break
                if use.may_write:
                    status, _ = await run_call(use.call, toolset, bench)
                    if use.answer is None or status != use.answer.status:
                        raise NotRestored("a call before it went otherwise when it was made again")
            yield sandbox

    async def with_message(self, sampled: Completion, sandbox: Sandbox | None) -> Rollout:
        """What the rollout would have been by the answers to this message. Without a sandbox calls that could be run
        are
        taken to have answered nothing."""
        toolset, (number, message) = self.harness.toolset(self.task), self.at
        transcript = Transcript.after(self.rollout.segments[number].up_to(message), self.chat, toolset.specs())
        # It may have been sampled behind a hint that is not here: its own routes would lie at other places.
        said = transcript.add_sampled(replace(sampled, routes=transcript.segment.routes))
        bench = None if sandbox is None else self._bench(sandbox)

        async def answer(call: ToolCall) -> tuple[CallStatus, str]:
            if bench is None and not call.error and not toolset.check(call):
                return "ok", ""
            return await run_call(call, toolset, bench)

        answers = await asyncio.gather(*(answer(call) for call in said.calls))
        stop: StopReason = "turns" if said.calls else "answer"
        for call, (status, text) in zip(said.calls, answers, strict=True):
            transcript.add("tool", text, status)
            if status == "ok" and toolset.finishes(call, text):
                stop = "finish"
        changed = {} if sandbox is None else await sandbox.changes()
        return replace(
            self.rollout,
            segments=[*self.rollout.segments[:number], transcript.segment],
            stop=stop,
            changed=changed,
            diff=diff_of(self.task, changed),
            events=[event for event in self.rollout.events if (event.segment, event.message) < self.at],
        )

    def _bench(self, sandbox: Sandbox) -> Workbench:
        return Workbench(sandbox, self.harness.limits, test_command=self.task.test_command)
