"""The agent loop: prompt, message, tool calls, results, until it finishes or a limit ends it.

A conversation that outgrows its window continues in a new segment that starts from the agent's own summary. Nothing is
dropped: an invalid call is answered with an error and counted, a crash ends one rollout and is recorded on it.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from offbook.agent.chat import Chat, Transcript, count_tokens
from offbook.agent.harness.tool import Tool, ToolFailed, Workbench
from offbook.agent.harness.toolsets import Toolset, make_toolset, prompt
from offbook.core.client import NoAnswer
from offbook.sandbox import HISTORY, PathRefused, Sandbox
from offbook.sandbox.access import MAX_KEPT, Opened, describe, notable, own_packages
from offbook.sandbox.sandbox import HOST_ERRORS
from offbook.types import (
    INVALID,
    CallStatus,
    Event,
    Limits,
    MachineFault,
    Message,
    ModelLost,
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
CALLS_AT_ONCE = 8  # of one message: hundreds of commands would starve one another
OnTurn = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True)
class RolloutCheckpoint:
    """A checkpoint of a rollout between two turns: with the state of its sandbox, all that is needed to resume."""

    rollout: Rollout
    todos: list[dict[str, str]] = field(default_factory=list)
    interrupted: bool = False
    stop: StopReason | None = None  # set if it has ended and only the score is missing


Keep = Callable[[RolloutCheckpoint], Awaitable[None]]


@dataclass(frozen=True, slots=True)
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
    keep: Keep | None = None,
    checkpoint: RolloutCheckpoint | None = None,
) -> Rollout:
    """Run one rollout, unscored. Errors of the policy or the sandbox are recorded on it; only a lost model is raised.

    `keep` is a callback after every turn. With `checkpoint` it resumes there, in a sandbox in that state.
    """
    toolset = harness.toolset(task)
    rollout = checkpoint.rollout if checkpoint else Rollout(rollout_id, task.id, group, toolset.names)
    rollout.own_names = {name: tool.own_name for name, tool in toolset.tools.items()}
    episode = _Episode(task, rollout, sandbox, toolset, chat, policy, harness, on_turn, keep)
    episode.begin(checkpoint)
    wall_s = harness.limits.wall_s
    # Before its first turn a rollout waits for the model's server and nothing else.
    try:
        async with asyncio.timeout(wall_s - rollout.usage.seconds):
            rollout.stop = (checkpoint and checkpoint.stop) or await episode.run()
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
    rollout.usage.seconds = time.monotonic() - episode.started
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


async def run_calls(
    calls: Sequence[ToolCall],
    toolset: Toolset,
    bench: Workbench | None,
    record: Callable[[str, str], None] = lambda kind, detail: None,
    took: Callable[[ToolCall, float], None] = lambda call, seconds: None,
) -> list[tuple[CallStatus, str]]:
    """The answers to the calls of one message, in their order. Calls run concurrently, except for those that run alone:
    a command sees the edit before it, and two edits of a file are both kept. Without a workbench valid calls have empty
    answers."""
    slots = asyncio.Semaphore(CALLS_AT_ONCE)

    async def run(call: ToolCall) -> tuple[CallStatus, str]:
        async with slots:
            began = time.monotonic()
            try:
                return await _run_call(call, toolset, bench, record)
            finally:  # also on a timeout of the rollout
                took(call, time.monotonic() - began)

    answers: list[tuple[CallStatus, str]] = []
    for alone, group in groupby(calls, lambda call: call.name in toolset.tools and toolset.tools[call.name].alone):
        if alone:
            answers += [await run(call) for call in group]
        else:
            answers += await asyncio.gather(*map(run, group))
    return answers


async def _run_call(
    call: ToolCall, toolset: Toolset, bench: Workbench | None, record: Callable[[str, str], None]
) -> tuple[CallStatus, str]:
    if call.error:
        return "malformed", f"error: {call.error}"
    if call.name not in toolset.tools:
        return "unknown_tool", f"error: there is no tool {call.name}"
    problem = toolset.check(call)
    if problem:
        return "malformed", f"error: {problem}"
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
        keep: Keep | None,
    ):
        self.task = task
        self.rollout = rollout
        self.toolset = toolset
        self.chat = chat
        self.policy = policy
        self.harness = harness
        self.limits = harness.limits
        self.on_turn = on_turn
        self.keep = keep
        self.bench = Workbench(sandbox, harness.limits, test_command=task.test_command)
        self.packages = own_packages(task.tree)
        self.started = time.monotonic() - rollout.usage.seconds
        self.interrupted = False
        self.fed: list[int] = []  # the ids of this segment that the policy has seen and written
        # What must stay free at the end of a window: the query and the summary.
        asking = len(chat.block("user", prompt("summarize")))
        self.reserved = self.limits.summary_tokens + asking if self.limits.summarize_at else 0

    def begin(self, checkpoint: RolloutCheckpoint | None) -> None:
        if checkpoint is None:
            self._open_segment(first_message(self.task))
            return
        self.transcript = Transcript.after(self.rollout.segments[-1], self.chat, self.toolset.specs())
        self.bench.todos = [*checkpoint.todos]  # type: ignore[list-item]
        self.interrupted = checkpoint.interrupted

    async def _keep(self, stop: StopReason | None = None) -> None:
        if self.keep is not None:
            self.rollout.usage.seconds = time.monotonic() - self.started
            todos: list[dict[str, str]] = [dict(item) for item in self.bench.todos]  # type: ignore[arg-type]
            await self.keep(RolloutCheckpoint(self.rollout, todos, self.interrupted, stop))

    def record(self, kind: str, detail: str) -> None:
        record_at_end(self.rollout, kind, detail)

    async def run(self) -> StopReason:
        limits, usage = self.limits, self.rollout.usage
        while usage.turns < limits.turns:
            length = len(self.transcript.prompt())
            window = limits.context - length - self.reserved
            has_begun = any(self.transcript.segment.sampled)
            if has_begun and limits.summarize_at and (length >= limits.summarize_at or window <= 0):
                await self._summarize()
                await self._keep()
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
            await self._keep(stop)
            if stop:
                return stop
        return "turns"

    async def _sample(self, room: int) -> Message:
        usage, prices = self.rollout.usage, self.harness.prices
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
        usage, bench = self.rollout.usage, self.bench

        def took(call: ToolCall, seconds: float) -> None:
            if seconds > usage.longest_call_seconds:
                said = " ".join([call.name, *map(str, call.arguments.values())])
                usage.longest_call, usage.longest_call_seconds = " ".join(said.split())[:LONGEST_CHARS], seconds

        answers = await run_calls(message.calls, self.toolset, bench, self.record, took)
        record_opened(self.rollout, bench.opened, self.packages)
        usage.timeouts += bench.timeouts
        bench.opened, bench.timeouts = [], 0
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
        usage, limits, segment = self.rollout.usage, self.limits, self.transcript.segment
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
        if self.task.interrupt and self.interrupted:
            asked.append(self.task.interrupt.text)
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
