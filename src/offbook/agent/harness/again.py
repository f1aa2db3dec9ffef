"""Replays a rollout up to one of its messages, puts another message there, and runs that message's tool calls.

Nothing is sampled here; the replay ends with the tools' answers. Up to the message it is the rollout's own record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from offbook.agent.chat import Chat, Transcript
from offbook.agent.harness.agent import Harness, diff_of, run_calls
from offbook.agent.harness.tool import Workbench
from offbook.sandbox import Sandbox, SandboxSpec
from offbook.signals.trajectory import At, Trajectory
from offbook.tasks.suite import suite_sandbox
from offbook.types import Completion, OffbookError, Rollout, StopReason, Task


class NotRestored(OffbookError):
    """The sandbox could not be restored to its earlier state."""


@dataclass(frozen=True, slots=True)
class Before:
    """A rollout right before one of its messages."""

    rollout: Rollout
    at: At
    task: Task
    harness: Harness
    chat: Chat

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A fresh sandbox in the state of that point: every earlier call that may have written is run again."""
        toolset = self.harness.toolset(self.task)
        async with await suite_sandbox(self.task.tree, self.task.suite, spec) as sandbox:
            bench = self._bench(sandbox)
            for use in Trajectory(self.rollout, self.task).uses:
                if use.at >= self.at:
                    break
                if use.may_write:
                    ((status, _),) = await run_calls([use.call], toolset, bench)
                    if use.answer is None or status != use.answer.status:
                        raise NotRestored("a call before it went otherwise when it was made again")
            yield sandbox

    async def with_message(self, sampled: Completion, sandbox: Sandbox | None) -> Rollout:
        """The rollout with this message and its tools' answers. Without a sandbox valid calls have empty ones."""
        toolset, (number, message) = self.harness.toolset(self.task), self.at
        transcript = Transcript.after(self.rollout.segments[number].up_to(message), self.chat, toolset.specs())
        # It may have been sampled after a hint that is not here, so its own routes would be at other positions.
        said = transcript.add_sampled(replace(sampled, routes=transcript.segment.routes))
        answers = await run_calls(said.calls, toolset, None if sandbox is None else self._bench(sandbox))
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
