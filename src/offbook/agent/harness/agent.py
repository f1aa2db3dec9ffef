"""The agent loop: prompt, message, tool calls, results, until it finishes or a limit ends it.

A conversation that outgrows its window continues in a new segment that starts from the agent's own summary. Nothing is
dropped: an invalid call is answered with an error and counted, a crash ends one rollout and is recorded on it.
"""

import asyncio
import difflib
import errno
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from offbook.agent.chat import Chat, Transcript, count_tokens
from offbook.agent.harness.tool import Tool, ToolFailed, Workbench
from offbook.agent.harness.toolsets import Toolset, make_toolset, prompt
from offbook.core.client import NoAnswer
from offbook.sandbox import HISTORY, PathRefused, Sandbox, SandboxSpec
from offbook.sandbox.access import MAX_KEPT, Opened, describe, notable, own_packages
from offbook.sandbox.sandbox import HOST_ERRORS
from offbook.signals.trajectory import At, Trajectory
from offbook.tasks.suite import suite_sandbox
from offbook.types import (
    INVALID,
    CallStatus,
    Completion,
    Event,
    Limits,
    MachineFault,
    Message,
    ModelLost,
    OffbookError,
    Policy,
    Prices,
    Prompt,
    PromptTooLong,
    Rollout,
    StopReason,
    Task,
    ToolCall,
)

OUTPUT_CUT = "\n[the rest was cut: the context is nearly full]"
ENDED_FROM_OUTSIDE = {None, errno.EPIPE, errno.ECONNRESET, *HOST_ERRORS}  # what no command can cause by itself
LONGEST_CHARS = 120  # kept of the call that took longest
OnTurn = Callable[[Rollout], None]


@dataclass(frozen=True)
class Harness:
    """What rollouts share whatever their task: limits, how tools are shown, what tokens cost."""

    limits: Limits
    profile: str = "standard"
    variation: float = 0.0
    prices: Prices = field(default_factory=Prices)
    tools_in_api: bool = False  # the request to the model's server has the tools, so the prompt does not
    own_tools: Mapping[str, Tool] = field(default_factory=dict)  # the user's, for tasks that name them
    added: tuple[str, ...] = ()  # tools that every task has in addition to its own
    command: str = ""  # the user's own agent, run in place of this one

    def toolset(self, task: Task) -> Toolset:
        more = (name for name in self.added if name not in task.tools)
        return make_toolset((*task.tools, *more), self.profile, self.variation, task.id, self.own_tools)


async def run_agent(
    task: Task,
    sandbox: Sandbox,
    policy: Policy,
    chat: Chat,
    harness: Harness,
    rollout_id: str,
    group: str,
    on_turn: OnTurn = lambda rollout: None,
) -> Rollout:
    """Run one rollout, unscored. Errors of the policy or the sandbox are recorded on it; a lost model is raised."""
    toolset = harness.toolset(task)
    rollout = Rollout(rollout_id, task.id, group, tuple(toolset.tools))
    rollout.own_names = {name: tool.own_name for name, tool in toolset.tools.items()}
    wall_s = harness.limits.wall_s
    began = time.monotonic()
    episode = _Episode(task, rollout, sandbox, toolset, chat, policy, harness, on_turn)
    # Before its first turn a rollout waits for the model's server and nothing else.
    try:
        async with asyncio.timeout(wall_s):
            rollout.stop = await episode.run()
    except TimeoutError:
        rollout.stop = "wall"
        if harness.tools_in_api and not rollout.usage.turns:
            record_crash(rollout, NoAnswer(f"no answer within {wall_s:g} s", "no answer in time"))
    except ModelLost:
        raise
    except PromptTooLong as error:
        rollout.stop = "context"
        record_at_end(rollout, "outgrown", str(error))
        if harness.tools_in_api and not rollout.usage.turns:
            record_at_end(rollout, "server_fault", "the first prompt and its answer do not fit the model's context")
    except Exception as error:  # the border of a rollout: one crash is one rollout's event, never the run's
        record_crash(rollout, error)
    await take_changes(rollout, task, sandbox)
    rollout.usage.seconds = time.monotonic() - began
    count_tokens(rollout.segments, chat, rollout.usage)
    return rollout


async def take_changes(rollout: Rollout, task: Task, sandbox: Sandbox) -> None:
    try:
        changes = await sandbox.changes()
        rollout.changed = changes
        rollout.partial = changes.partial
    except OSError as error:
        record_crash(rollout, error)
    except Exception:  # the sandbox is gone: the rollout is scored with no changes
        record_at_end(rollout, "sandbox_lost", traceback.format_exc(limit=-2))
    rollout.diff = diff_of(task, rollout.changed)


def record_crash(rollout: Rollout, error: Exception) -> None:
    """Record a crash, and whether it looks like a fault of the machine or of the model's server.

    A sandbox limit is no fault of the machine: the agent filled its disk. Neither is anything else that commands can
    cause, once there were some.
    """
    rollout.stop = "crash"
    record_at_end(rollout, "crash", "".join(traceback.format_exception(error, limit=-4)))
    if isinstance(error, NoAnswer):
        record_at_end(rollout, "server_fault", error.reason)
    elif isinstance(error, MachineFault):
        record_at_end(rollout, "machine_fault", str(error))
    elif isinstance(error, OSError) and (error.errno in ENDED_FROM_OUTSIDE or not rollout.has_acted):
        record_at_end(rollout, "machine_fault", error.strerror or str(error) or type(error).__name__)


def record_at_end(rollout: Rollout, kind: str, detail: str, place: str = "", paths: tuple[str, ...] = ()) -> None:
    """Add an event at the last message."""
    segment = len(rollout.segments) - 1
    message = len(rollout.segments[segment].messages) - 1 if rollout.segments else -1
    rollout.events.append(Event(message, kind, detail, max(0, segment), place, paths))


def record_opened(rollout: Rollout, opened: Iterable[Opened], packages: Collection[str]) -> None:
    """Add events for suspicious files that commands opened, at the last message."""
    opened = [*opened]
    paths = dict.fromkeys(path for one in opened for path in one.paths)
    num_cut = sum(one.num_cut for one in opened)
    for place, found in notable(paths, packages).items():
        record_at_end(rollout, "opened", describe(place, found), place, tuple(found[:MAX_KEPT]))
        num_cut += len(found[MAX_KEPT:])
    if num_cut:
        record_at_end(rollout, "opened_unseen", f"{num_cut} opens of files were not kept")


async def run_call(
    call: ToolCall,
    toolset: Toolset,
    bench: Workbench | None,
    record: Callable[[str, str], None] = lambda kind, detail: None,
) -> tuple[CallStatus, str]:
    """The answer to a call. Without a workbench a valid call has an empty answer."""
    if call.error:
        return "malformed", f"error: {call.error}"
    problem = toolset.check(call)
    if problem:
        return "malformed" if call.name in toolset.tools else "unknown_tool", f"error: {problem}"
    if bench is None:
        return "ok", ""
    try:
        return "ok", await toolset.run(call, bench)
    except PathRefused as error:
        record("path_refused", str(error))
        return "failed", f"error: {error}"
    except ToolFailed as error:
        return "failed", f"error: {error}"
    except OSError:  # a fault of the machine: not an answer to the agent
        raise
    except Exception:  # the border of a tool call: a tool that breaks is an answer and an event
        record("tool_crash", traceback.format_exc(limit=-4))
        return "failed", "error: the tool broke; try another way"


class _Episode:
    def __init__(
        self,
        task: Task,
        rollout: Rollout,
        sandbox: Sandbox,
        toolset: Toolset,
        chat: Chat,
        policy: Policy,
        harness: Harness,
        on_turn: OnTurn,
    ):
        self.task = task
        self.rollout = rollout
        self.toolset = toolset
        self.chat = chat
        self.policy = policy
        self.harness = harness
        self.limits = harness.limits
        self.on_turn = on_turn
        self.bench = Workbench(sandbox, harness.limits, test_command=task.test_command)
        self.packages = own_packages(task.tree)
        self.interrupted = False
        self.fed: list[int] = []  # the ids of this segment that the policy has seen and written
        # What must stay free at the end of a window: the query and the summary.
        asking = len(chat.block("user", prompt("summarize")))
        self.reserved = self.limits.summary_tokens + asking if self.limits.summarize_at else 0
        self._open_segment(first_message(task))

    def record(self, kind: str, detail: str) -> None:
        record_at_end(self.rollout, kind, detail)

    async def run(self) -> StopReason:
        limits = self.limits
        usage = self.rollout.usage
        while usage.turns < limits.turns:
            length = len(self.transcript.prompt())
            window = limits.context - length - self.reserved
            has_begun = any(self.transcript.segment.sampled)
            if has_begun and limits.summarize_at and (length >= limits.summarize_at or window <= 0):
                await self._summarize()
                continue
            budget = limits.tokens - sum(len(segment.ids) for segment in self.rollout.segments)
            room = min(limits.message_tokens, budget, window)
            if room <= 0:
                return "tokens" if budget <= 0 else "context"
            message = await self._sample(room)
            usage.turns += 1
            stop: StopReason | None = None if message.calls else "answer"
            if await self._answer(message):
                stop = "finish"
            interrupt = self.task.interrupt  # once: at its turn, or earlier if the agent would end before
            if interrupt and not self.interrupted and (stop or usage.turns >= interrupt.after_turns):
                self.interrupted = True
                self.transcript.add("user", interrupt.text)
                self.record("interrupted", interrupt.text)
                stop = None
            self.on_turn(self.rollout)
            if stop:
                return stop
        return "turns"

    async def _sample(self, room: int) -> Message:
        usage = self.rollout.usage
        prices = self.harness.prices
        ids = self.transcript.prompt()
        usage.drift += ids[: len(self.fed)] != self.fed
        asked = time.monotonic()
        request = Prompt(ids, tuple(self.transcript.segment.messages), self.toolset.specs())
        try:
            completion = await self.policy.complete(request, room)
        finally:  # also on a timeout
            usage.model_seconds += time.monotonic() - asked
        self.fed = [*ids, *completion.ids]
        num_read, num_written = completion.billed or (len(ids), len(completion.ids))
        usage.cost += (prices.input * num_read + prices.output * num_written) / 1e6
        return self.transcript.add_sampled(completion)

    async def _answer(self, message: Message) -> bool:
        """Run the message's calls and add their answers. True if one ends the task."""
        usage = self.rollout.usage
        bench = self.bench
        answers = []
        for call in message.calls:
            began = time.monotonic()
            try:
                answers.append(await run_call(call, self.toolset, bench, self.record))
            finally:  # also on a timeout of the rollout
                seconds = time.monotonic() - began
                if seconds > usage.longest_call_seconds:
                    usage.longest_call_seconds = seconds
                    said = " ".join([call.name, *map(str, call.arguments.values())])
                    usage.longest_call = " ".join(said.split())[:LONGEST_CHARS]
        record_opened(self.rollout, bench.opened, self.packages)
        bench.opened = []
        usage.timeouts = bench.timeouts
        finished = False
        for call, (status, text) in zip(message.calls, answers, strict=True):
            self.transcript.add("tool", self._fitting(text), status)
            usage.calls += 1
            if status in INVALID:
                usage.invalid_calls += 1
                self.record(status, text)
            finished |= status == "ok" and self.toolset.finishes(call, text)
        return finished

    async def _summarize(self) -> None:
        """Ask for a summary at the end of this segment and start a new one from it."""
        usage = self.rollout.usage
        limits = self.limits
        segment = self.transcript.segment
        usage.summaries += 1
        self.transcript.add("user", prompt("summarize"))
        room = max(1, min(limits.summary_tokens, limits.context - len(self.transcript.prompt())))
        before = usage.model_seconds
        try:
            message = await self._sample(room)
        finally:
            usage.summary_seconds += usage.model_seconds - before
        segment.summary = len(segment.messages) - 1
        self.on_turn(self.rollout)
        name = f"segment_{usage.summaries}.md"
        said = [f"## {one.role}\n{one.text}" for one in segment.messages]
        await self.bench.sandbox.publish(name, "\n\n".join(said))
        asked = [first_message(self.task)]
        if self.interrupted:
            asked.append(self.task.interrupt.text)  # type: ignore[union-attr]
        self._open_segment(
            prompt("resume").format(
                task="\n\n".join(asked),
                summary=message.text.rpartition("</think>")[2].strip(),
                todos=self.bench.todo_text() or "none",
                count=usage.summaries,
                history=f"{HISTORY}/{name}",
            )
        )

    def _open_segment(self, first: str) -> None:
        self.transcript = opening(self.toolset, self.chat, self.harness, first)
        self.fed = []
        self.rollout.segments.append(self.transcript.segment)

    def _fitting(self, text: str) -> str:
        """Truncate tool output to the room in the window, so that no segment outgrows it."""
        taken = len(self.transcript.prompt()) + len(self.chat.block("tool", OUTPUT_CUT))
        room = max(0, self.limits.context - taken - self.reserved)
        if len(text.encode()) <= room:  # no token is shorter than a byte
            return text
        fitting = text
        while (size := len(self.chat.encode(fitting))) > room and fitting:
            fitting = fitting[: int(len(fitting) * room / size * 0.95)]
        if fitting == text:
            return text
        self.record("output_cut", f"{len(text)} characters to {len(fitting)}")
        return fitting + OUTPUT_CUT


def opening(toolset: Toolset, chat: Chat, harness: Harness, first: str) -> Transcript:
    """A segment up to the agent's first message: system prompt, worked turns and what the user says."""
    transcript = Transcript(chat, toolset.specs())
    telling = "" if harness.tools_in_api else chat.telling(toolset.specs())
    transcript.add("system", toolset.system_prompt(telling))
    for role, text in toolset.worked_turns(chat):
        transcript.add(role, text)
    transcript.add("user", first)
    return transcript


def diff_of(task: Task, changed: dict[str, str | None]) -> str:
    lines: list[str] = []
    for path, new in sorted(changed.items()):
        original = task.tree / path
        old = original.read_bytes().decode(errors="replace") if original.is_file() else ""
        before, after = old.splitlines(keepends=True), (new or "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def first_message(task: Task) -> str:
    """The request and, if the task has it, what the user's editor shows."""
    context = task.context
    if context is None:
        return task.instruction
    parts = {"Open files": context.open, "Recent edits": context.edits}
    shown = [f"{title}:\n" + "\n".join(f"- {line}" for line in lines) for title, lines in parts.items() if lines]
    if not shown:
        return task.instruction
    return "\n\n".join([task.instruction, "My editor, as it is now (not all of it has to do with this):", *shown])


class NotRestored(OffbookError):
    """The sandbox could not be restored to its earlier state."""


@dataclass(frozen=True)
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
            bench = Workbench(sandbox, self.harness.limits, test_command=self.task.test_command)
            for use in Trajectory(self.rollout, self.task).uses:
                if use.at >= self.at:
                    break
                if use.may_write:
                    status, _ = await run_call(use.call, toolset, bench)
                    if use.answer is None or status != use.answer.status:
                        raise NotRestored("a call before it went otherwise when it was made again")
            yield sandbox

    async def with_message(self, sampled: Completion, sandbox: Sandbox | None) -> Rollout:
        """The rollout with this message and its tools' answers. Without a sandbox valid calls have empty ones."""
        toolset, (number, message) = self.harness.toolset(self.task), self.at
        transcript = Transcript.after(self.rollout.segments[number].up_to(message), self.chat, toolset.specs())
        # It may have been sampled after a hint that is not here, so its own routes would be at other positions.
        said = transcript.add_sampled(replace(sampled, routes=transcript.segment.routes))
        bench = Workbench(sandbox, self.harness.limits, test_command=self.task.test_command) if sandbox else None
        stop: StopReason = "turns" if said.calls else "answer"
        for call in said.calls:
            status, text = await run_call(call, toolset, bench)
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
