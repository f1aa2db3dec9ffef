"""Rollouts: a sandbox, an agent, grading and scoring for each, many side by side, with results in a fixed order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from offbook.agent.chat import Chat, render_call
from offbook.agent.harness import Door, Harness, more_tools, record_crash, run_agent, run_command
from offbook.agent.recorder import Recorder
from offbook.core.client import Client
from offbook.core.config import Config, EngineConfig, VllmConfig
from offbook.core.draft import FOLDER
from offbook.core.runfolder import is_adapter
from offbook.engine import Engine, LocalEngine, RemoteEngine, Session
from offbook.engine.vllm import SeveralEngines, VllmEngine, servers_of
from offbook.engine.vllm.server import DRAFTS
from offbook.pocket.tasks import level_named
from offbook.rl.checks import Judges, rewards_and_monitors_of
from offbook.rl.models import Progress, chat_folder, chat_of, load_model, mixture_in, pocket_cache, positions, quiet
from offbook.sandbox import SandboxSpec
from offbook.signals.monitors.policy import PENALTY, withhold
from offbook.signals.rewards import Grader
from offbook.tasks.grade import Grade
from offbook.tasks.suite import suite_sandbox
from offbook.train.lora import stored_adapter
from offbook.train.precision import compute_linears
from offbook.types import (
    MENDED_FAULT,
    OWN_FAULT,
    Event,
    Limits,
    MachineFault,
    OffbookError,
    Prices,
    Rollout,
    Task,
)

OnRollout = Callable[[Rollout, bool], None]  # a rollout as it is now, and whether it is over
T = TypeVar("T")
FREE: AbstractAsyncContextManager[Any] = nullcontext()  # no limit on how many run at once


def unwatched(rollout: Rollout, over: bool) -> None:
    """No-op callback."""


@dataclass(eq=False)
class Job:
    """One rollout: what is asked for, and in a run its folder and its result."""

    task: Task
    id: str
    group: str
    folder: str = ""  # in OUT/slots
    rollout: Rollout | None = None  # once scored


def rollout_ids(name: str, task: Task, size: int) -> list[str]:
    return [f"{name}/{task.id}/{number}" for number in range(size)]


class Collector:
    """Yields scored groups of rollouts. Owns engine, chat format, harness, sandboxes, grader, rewards and monitors.

    The model is in the folder `model` or, without one, behind the URL `config.model`, where it is called `remote_name`.
    It is loaded when the first rollout asks for it, so never if all rollouts are stored already. `loaded` is a model in
    memory that a local engine samples from. `lent` is an engine that the caller owns and closes.
    """

    def __init__(
        self,
        config: Config,
        model: Path | None,
        remote_name: str = "",
        judges: Judges | None = None,
        progress: Progress = quiet,
        loaded: PreTrainedModel | None = None,
        lent: Engine | None = None,
    ):
        self.config, self.model, self.remote_name = config, model, remote_name
        self._progress, self._loaded, self._lent = progress, loaded, lent
        self._counted = dict(lent.counters) if lent else {}
        self._sessions: dict[Job, Session] = {}  # open, of jobs that have not begun
        self.rewards, self.monitors = judges or rewards_and_monitors_of(config)
        settings, spec = config.harness, SandboxSpec(**config.sandbox.model_dump())
        self.harness = Harness(
            settings.limits(),
            settings.profile,
            settings.variation,
            Prices(**settings.prices),
            tools_in_api=model is None,
            own_tools=more_tools(config.tools),
            added=tuple(config.tools.add),
            command=settings.command,
        )
        self._door: Door | None = None
        if settings.command:
            self._door = Door({where: Path(folder) for where, folder in settings.mounts.items()})
        self.sandbox = replace(spec, watch=self.monitors is not None)
        rewards = config.rewards
        grades = pocket_cache() / "grades" if level_named(config.tasks.source) else None
        self._grader = Grader(spec, rewards.grade_s, rewards.partial, rewards.perturbed, grades)

    @cached_property
    def chat(self) -> Chat:
        return chat_of(self.model, self.config)

    @cached_property
    def limits(self) -> Limits:
        """Limits for agents that are commands: they get the size of the context before they ask."""
        limits = self.harness.limits
        most = limits.context if self.model is None else positions(chat_folder(self.model))
        return replace(limits, context=min(limits.context, most))

    @cached_property
    def engine(self) -> Engine:
        if self._lent is not None:
            self._lent.seed = self.config.seed
            return self._lent
        settings = self.config.engine
        if self.model is None:
            return RemoteEngine(
                Client(self.config.model, self.remote_name, timeout_s=settings.timeout_s, max_retries=5),
                temperature=settings.temperature,
                encode=self.chat.encode,
                end_id=self.chat.end_id,
                render_call=render_call,
            )
        if settings.kind == "vllm":
            return self._vllm_engine(self.model)
        torch.set_num_threads(self.config.threads)
        network = self._loaded or load_model(self.model, settings.precision)
        compute_linears(network, self.config.train.linear)
        return LocalEngine(
            network,
            self.chat.stop_ids,
            settings.temperature,
            settings.kv_tokens,
            self.config.seed,
            settings.kind,
            context=self.config.harness.context,
            deadline_s=self.config.loop.deadline_s,
        )

    def _vllm_engine(self, model: Path) -> Engine:
        settings = self.config.engine
        base = chat_folder(model)
        servers = servers_of(
            base,
            with_drafts(settings),
            min(self.config.harness.context, positions(base)),
            Path(self.config.out) / "logs",
            self._progress,
            mixture_in(base),
        )
        engines = [
            VllmEngine(server, self.chat.stop_ids, settings.temperature, settings.timeout_s) for server in servers
        ]
        engine: Engine = SeveralEngines(engines) if len(engines) > 1 else engines[0]
        if is_adapter(model):
            engine.apply(stored_adapter(model))
        return engine

    async def aclose(self) -> None:
        if self._door:
            await self._door.aclose()
        if self._lent is None and "engine" in self.__dict__:
            await self.engine.aclose()

    def recall(self, rollouts: Iterable[Rollout]) -> None:
        """What earlier rollouts showed of their tasks."""
        if self.monitors is not None:
            self.monitors.recall(rollouts)

    @property
    def grades(self) -> int:
        return self._grader.runs

    def metrics(self) -> dict[str, float]:
        """Totals so far, but of the engine what it did since the last call."""
        engine = self.__dict__.get("engine")  # not made if all rollouts were stored
        before = self._counted
        self._counted = dict(engine.counters) if engine else {}
        counted = {name: total - before.get(name, 0) for name, total in self._counted.items()}
        quarantined = {} if self.monitors is None else {"quarantined": len(self.monitors.quarantined)}
        return {"grades": self.grades, **counted, **quarantined}

    async def groups(
        self,
        tasks: Sequence[Task],
        size: int,
        name: str,
        kept: Sequence[Rollout] = (),
        on_rollout: OnRollout = unwatched,
        parallel: int = 0,
    ) -> list[list[Rollout]]:
        """For each task, in order, a group of `size` scored rollouts. `name` makes their ids, and so their RNG, unique.

        `kept` are from before and not run again. `parallel` is how many rollouts are open at once; 0: all. A local
        model decodes them in lockstep, so they come in waves of whole groups.
        """
        found = {rollout.id: rollout for rollout in kept}
        self.recall(kept)
        jobs = [Job(task, id, f"{name}/{task.id}") for task in tasks for id in rollout_ids(name, task, size)]
        left = [job for job in jobs if job.id not in found]
        wave = max(1, len(left))
        limit = FREE
        if parallel and self.model is not None and self.config.engine.kind != "vllm":
            wave = max(1, parallel // size) * size
        elif parallel:
            limit = asyncio.Semaphore(parallel)
        for start in range(0, len(left), wave):
            found |= {one.id: one for one in await self.rollouts(left[start : start + wave], on_rollout, limit)}
        groups = [[found[id] for id in rollout_ids(name, task, size)] for task in tasks]
        for group in groups:
            if self.monitors is not None:
                self.monitors.settle(group)
        return groups

    async def rollouts(
        self, jobs: Sequence[Job], on_rollout: OnRollout = unwatched, limit: AbstractAsyncContextManager[Any] = FREE
    ) -> list[Rollout]:
        """Scored rollouts, in the order of the jobs. Each enters `limit` while it works."""

        async def one(job: Job) -> Rollout:
            async with limit:
                rollout = await self.rollout(job, on_rollout)
            on_rollout(rollout, True)
            return rollout

        return await self.side_by_side(jobs, one)

    async def side_by_side(self, jobs: Sequence[Job], work: Callable[[Job], Coroutine[Any, Any, T]]) -> list[T]:
        """Do `work`, which calls `rollout`, for all jobs at once. All sessions are open before the first one asks, so
        that they decode together."""
        try:
            for job in jobs:
                self._sessions[job] = self.engine.open(job.id)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(work(job)) for job in jobs]
        except ExceptionGroup as problems:
            for problem in problems.exceptions:
                if isinstance(problem, OffbookError):  # one sentence: a reward that broke, a server that is lost
                    raise problem from None
            raise
        finally:
            for job in jobs:
                if session := self._sessions.pop(job, None):
                    session.close()
        return [each.result() for each in running]

    async def rollout(self, job: Job, on_rollout: OnRollout = unwatched, session: Session | None = None) -> Rollout:
        """One scored rollout. A machine fault gets one retry: a fresh attempt in a new sandbox, with the same
        RNG: an agent that broke the machine itself does so again, and gains no second draw by it."""
        rollout = first = await self.work(job, session or self._sessions.pop(job), on_rollout)
        if fault := _machine_fault(first):
            rollout = await self.work(job, self.engine.open(job.id), on_rollout)
            if first.has_acted and _machine_fault(rollout) and not rollout.has_acted:
                rollout = first  # an agent that acted and met a second fault is judged by what it did
            _mark_second_attempt(rollout, fault)
        await self.scored(job.task, rollout)
        return rollout

    async def work(self, job: Job, session: Session, on_rollout: OnRollout = unwatched) -> Rollout:
        """One attempt, not graded yet. Without a sandbox it is a crash, of which nothing but the fault is known."""
        task = job.task
        rollout = Rollout(job.id, task.id, job.group, task.tools)
        mounts = self._door.mounts() if self._door else None
        try:
            async with await suite_sandbox(task.tree, task.suite, self.sandbox, mounts=mounts) as sandbox:
                if self._door:
                    rollout.tools = ()  # the agent names its own
                    limits = self.limits, self.harness.prices, lambda: on_rollout(rollout, False)
                    recorder = Recorder(rollout, self.chat, self.engine.open, *limits, line=session)
                    rollout = await run_command(task, sandbox, recorder, self.harness.command, self._door)
                else:
                    agent = task, sandbox, session, self.chat, self.harness, job.id, job.group
                    rollout = await run_agent(*agent, lambda rollout: on_rollout(rollout, False))
        except OSError as error:  # no space, no processes, a sandbox that was killed from outside
            record_crash(rollout, error)
        finally:
            session.close()
        if rollout.stop == "wall":
            await session.alive()  # if the model died, the timeout is no failure of the agent
        return rollout

    async def scored(self, task: Task, rollout: Rollout) -> Grade | None:
        """Grade the rollout, set its reward and findings. The grade is there where tests were run."""
        began = time.monotonic()
        outcome, grade = await self._graded(task, rollout)
        action = None
        if self.monitors is not None:
            await self.monitors.judge(task, rollout)
            action = self.monitors.action(rollout, grade)
        is_hack = action not in (None, "count")
        rollout.reward.parts["outcome"] = 0.0 if is_hack else outcome  # a hack is scored as a failure
        self.rewards.score(task, rollout)
        await self.rewards.assess(task, rollout)
        if is_hack:
            withhold(rollout, outcome, PENALTY if action == "penalise" else 0.0)
        rollout.usage.scoring_seconds = time.monotonic() - began
        return grade

    async def _graded(self, task: Task, rollout: Rollout) -> tuple[float, Grade | None]:
        """A grading that broke off is repeated once. What the agent's changes do to it, they do again; where tests
        could not even start, the rollout is not scored, and where no grading works here, the run ends."""
        try:
            return await self._grader.graded(task, rollout)
        except (MachineFault, OSError) as error:
            first = getattr(error, "strerror", None) or str(error)
        outcome, grade = 0.0, None
        try:
            outcome, grade = await self._grader.graded(task, rollout)
        except (MachineFault, OSError) as error:
            is_machine = isinstance(error, MachineFault)
            if is_machine and self._grader.is_broken:
                raise MachineFault(f"{task.id} cannot be graded, and no other rollout can: {error}") from error
            record_crash(rollout, error)
            if is_machine:
                return outcome, grade
        _mark_second_attempt(rollout, first)
        return outcome, grade


def _machine_fault(rollout: Rollout) -> str:
    return next((event.detail for event in rollout.events if event.kind == "machine_fault"), "")


def _mark_second_attempt(rollout: Rollout, first: str) -> None:
    """After a second attempt. A fault that came again after commands is the agent's own doing: if it were not, breaking
    the sandbox would be a way out of tasks that are too hard."""
    if rollout.stop != "crash":
        rollout.events.append(Event(-1, MENDED_FAULT, first))
    elif rollout.has_acted:
        own = {"machine_fault": OWN_FAULT}
        rollout.events = [replace(event, kind=own.get(event.kind, event.kind)) for event in rollout.events]


DRAFT_TOKENS = 3  # that a draft head drafts per step


def with_drafts(settings: EngineConfig) -> VllmConfig:
    """vLLM's options with a draft head. By default vLLM drafts only the likeliest token, and few drafts are kept."""
    if not settings.draft:
        return settings.vllm
    head = Path(settings.draft)
    head = head / FOLDER if (head / FOLDER).is_dir() else head
    option = {
        "method": "eagle",
        "model": str(head.resolve()),
        "num_speculative_tokens": DRAFT_TOKENS,
        "draft_sample_method": "probabilistic",
    }
    return settings.vllm.model_copy(update={"options": [*settings.vllm.options, DRAFTS, json.dumps(option)]})
