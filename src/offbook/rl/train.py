"""A training run on one machine: `Run` has its parts, `Run.step` is one round of them.

The trainer has a thread of its own; rollouts are sampled meanwhile (rl/scheduler.py). By default each waits for the
other: a step's rollouts are all sampled by the weights that the step before left. All randomness comes from (seed,
batch, task, number, turn), never from a generator with state. A killed run resumes from its last checkpoint and from
what its folder has beyond that (rl/scheduler.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from shlex import quote
from typing import Any, TypeVar

import torch

from offbook.core.client import Client, NoAnswer
from offbook.core.config import JUDGED, Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer
from offbook.core.weights import Weights
from offbook.engine.sync import Publisher, open_store
from offbook.engine.vllm import refuse_missing_engine
from offbook.rl.checks import Judges, refuse_run
from offbook.rl.collector import Collector
from offbook.rl.fit import refuse_unreadable
from offbook.rl.harder import Harder
from offbook.rl.hint_probe import probe_hints
from offbook.rl.models import (
    Progress,
    chat_folder,
    model_folder,
    model_to_sample,
    model_to_train,
    positions,
    quiet,
    weights_in,
)
from offbook.rl.plan import planned
from offbook.rl.ranks import HOST, follow, follows, go_on, joined, make_trainer, share_in
from offbook.rl.resume import begin_run, resumed, work_fingerprint
from offbook.rl.samplers import RayCollector
from offbook.rl.scheduler import RolloutBuffer, Scheduler, Selected, Shuffled
from offbook.rl.tasks import record_tasks, task_sets
from offbook.rl.train_step import TrainContext, WholeResponse, shares_without, train_step
from offbook.signals.feedback import MISTAKES, rules_of
from offbook.signals.judge import Judge, Judgement
from offbook.signals.monitors.policy import WITHHELD
from offbook.tasks import load_task
from offbook.train.checkpoint import Checkpoints
from offbook.train.lora import adapter_of
from offbook.train.parallel.spmd import ALONE
from offbook.train.trainer import NotFinite, WeightsLost
from offbook.types import Hung, OffbookError, Rollout, Task

SILENT_STEPS = 3  # in a row in which the judge answered no question, after which a run stops
LIMITS = {"turns": "turns", "tokens": "tokens", "context": "context", "wall": "wall_s"}  # keys of harness, by the end
SHAPING = ("effort", "unfinished")  # rewards that say how the work ends, and not whether it is any good
SLOW_S = 60.0  # of sampling: a step that takes longer says what it waited for
OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # prints a line for people
T = TypeVar("T")
log = logging.getLogger(__name__)


def train(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
    fit_check: bool = False,
) -> RunFolder:
    """Run or resume the training that `config` describes. Returns when its last step is in a checkpoint.

    `fit_check` refuses a model whose first messages hardly have a readable call.
    """
    folder = RunFolder(config.out)
    folder.refuse_file()
    with joined() as orders:
        if orders is not None and follows(orders):
            follow(orders)
            return folder
        judges = refuse_run(config, to_train=True)
        with only_writer(folder.path):
            run = Run(resumed(folder, config), folder, judges, progress, tell, orders)
            hangs = False
            try:
                with run.checkpoints, asyncio.Runner() as runner:
                    runner.run(run.steps(on_step, fit_check))
            except Hung:
                hangs = True
                raise
            finally:
                run.thread.shutdown(wait=not hangs)
                if not hangs:
                    run.wait_for_store(close=True)
    return folder


class Run:
    """All parts of a run, restored to where its folder says it is. Cheap refusals come first, models last. `orders` is
    the group of other ranks, if there are any."""

    def __init__(self, config: Config, folder: RunFolder, judges: Judges, progress: Progress, tell: Tell, orders: Any):
        torch.set_num_threads(config.threads)
        share = ALONE if orders is None else share_in(config.train)
        rules = rules_of(config.feedback.files)
        if config.engine.kind == "vllm":
            refuse_missing_engine(config)
        self.judge = step_judge_of(config)
        by_ray = config.loop.ray.samplers > 0
        config, plan = planned(config, engine_apart=by_ray, share=share)
        self.config = config
        self.folder = folder
        self.tell = tell
        self.publisher: Publisher | None = None  # for engines elsewhere (offbook.engine.sync)
        if config.loop.store:
            precision = getattr(torch, config.engine.precision)  # of matrices
            self.publisher = Publisher(
                open_store(config.loop.store), dtype=None if precision == torch.float32 else precision
            )
            self.publisher.look()  # before anything is trained
        start = model_folder(config.model, config.seed, progress)
        sets = task_sets(config, progress)
        tell(f"model {config.model}, loaded from {start}")
        tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
        rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
        tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
        tell(str(plan))

        trained = model_to_train(config, start, "" if orders is None else HOST)
        self.collector: Collector  # makes rollouts
        if by_ray:
            self.collector = RayCollector(config, start, judges=judges, progress=progress)
        else:
            sampled = model_to_sample(config, start, trained) if config.train.lora.rank else None
            self.collector = Collector(config, start, judges=judges, progress=progress, loaded=sampled)

        self.done = begin_run(folder, config)  # steps, before this process began
        if 0 < self.done < config.train.steps:
            tell(f"resuming at step {self.done + 1}")
        self.trainer = make_trainer(config, trained, start, progress, orders)
        if self.done:
            self.trainer.together(go_on, latest_checkpoint(folder))
        chat_files = chat_folder(start)
        kept = folder.path / "ckpt"
        self.checkpoints = Checkpoints(self.trainer, kept, chat_files, config.checkpoint, config.loop.deadline_s)
        tell(str(self.checkpoints))

        self.buffer = RolloutBuffer(folder, config.train.group_size, work_fingerprint(config, start), self.done)
        to_train = [*sets.train, *(load_task(folder.path / "harder" / id) for id in sorted(self.buffer.made))]
        tasks = {task.id: task for task in to_train}
        record_tasks(folder, {"train": to_train, "heldout": sets.heldout})
        self.buffer.restore(tasks, self.collector.recall)
        self.order: Shuffled | Selected = Shuffled(to_train, config.seed)
        if config.tasks.order == "select":
            self.order = Selected(to_train, config.seed, folder, self.done, drawn=self.buffer.taken)
            self.order.learn((), self.buffer.learned)
        self.scheduler = Scheduler(config, self.collector, self.buffer, self.order)

        whole = None
        if any(config.teachers.weights.values()):
            whole = WholeResponse(config.teachers, self.collector.chat, tasks, positions(chat_files))
        probed = {row["rule"]: row["why_not"] for row in folder.looks(self.done)}  # the newest of each rule
        unhelpful = {rule for rule, why_not in probed.items() if why_not}
        chat = self.collector.chat
        self.context = TrainContext(config, folder, tasks, rules, chat, self.trainer, unhelpful, whole=whole)
        self.harder: Harder | None = None
        if config.tasks.harden and isinstance(self.order, Selected):
            self.harder = Harder(config, self.buffer, tasks, self.order, self.done)
        self.thread = ThreadPoolExecutor(1, "train", torch.set_num_threads, (config.threads,))

    async def steps(self, on_step: OnStep, fit_check: bool) -> None:
        config = self.config
        silent = 0
        async with aclosing(self.collector), aclosing(self.scheduler):
            await self.scheduler.apply(self._first_weights())
            self._to_store(self.done)
            # The pocket model writes what it was made with, and other agents read their calls themselves.
            is_known = config.harness.profile == "pocket" or config.harness.command or config.loop.ray.samplers
            if fit_check and not is_known and not self.done:
                await refuse_unreadable(self.collector, [*self.context.tasks.values()])
            if self.harder:
                self.scheduler.in_background(self.harder.run())
            for step in range(self.done + 1, config.train.steps + 1):
                row = await self.step(step)
                on_step(row)
                silent = silent + 1 if "no_signal" in row else 0
                if silent and step < config.train.steps and silent == config.train.no_signal_steps:
                    self._keep_all_steps(step)
                    problem = OffbookError(f"{silent} steps in a row had no signal: {row['no_signal']}")
                    raise self._stopped(step, problem, "--train.no_signal_steps 0 goes on anyway")
            await self._in_thread("the last checkpoint to be written", self.checkpoints.wait)
            await self._in_thread(f"the store {config.loop.store} to take the last weights", self.wait_for_store)

    def _first_weights(self) -> Weights:
        """The weights that the next batch is sampled by. In lockstep these are the weights it would have been sampled
        by without the restart, if their checkpoint is there."""
        older = self.done - self.config.loop.max_staleness
        path = self.folder.checkpoints().get(older)
        if older == 0 and adapter_of(self.trainer.model) is None:
            path = self.collector.model
        is_new = older == self.done or self.scheduler.has_batch(self.done + 1)
        if path is None or is_new or not self.scheduler.in_lockstep:
            return self.trainer.publish(self.done)
        return weights_in(path, older)

    async def step(self, step: int) -> dict[str, Any]:
        """Weights to the engine, rollouts, hints, gradient, metrics and checkpoint. Returns the step's metrics.

        Whatever ends the run, earlier steps are kept; a step that is being trained is finished first.
        """
        context = self.context
        engine = self.collector.engine
        started = time.monotonic()
        probe_s = 0.0
        try:
            if engine.version != step - 1:
                await self.scheduler.apply(self.trainer.publish(version=step - 1))
            groups = await self.scheduler.take(step)
            collected = time.monotonic()
            filtered, self.buffer.filtered = self.buffer.filtered, []
            if isinstance(self.order, Selected):
                self.order.learn(groups, filtered)
            if self.harder:
                self.harder.observe(groups, filtered)
            judgement = Judgement()
            if self.judge:
                rollouts = [(rollout, context.tasks.get(rollout.task)) for group in groups for rollout in group]
                judgement = await self.judge.read(f"step {step}", rollouts)
            if step == 1 and self.config.feedback.is_look_due:
                async with self.scheduler.paused():
                    began = time.monotonic()
                    for line in await probe_hints(step, groups, context, self.collector, self._in_thread):
                        self.tell(line)
                    probe_s = time.monotonic() - began
            if not self.config.loop.max_staleness:
                engine.pause()
        except BaseException:  # also Ctrl-C
            self._keep_all_steps(step - 1)
            raise
        try:
            work = self._in_thread(f"step {step} to be trained", train_step, step, groups, judgement, context)
            row, stopped = await _uninterrupted(work)
        except NotFinite as problem:
            self._keep_all_steps(step - 1)
            raise self._stopped(step, problem, "--train.on_nonfinite skip goes on without such a step") from None
        except WeightsLost as problem:  # they are not those of any step that can be kept
            raise self._stopped(step, problem, "try a lower train.learning_rate") from None
        row = {
            "step": step,
            **row,
            "skipped_steps": step - self.trainer.steps,
            **self.scheduler.metrics(step, groups),
            **self.collector.metrics(),
            **waits(groups, collected - started, self.scheduler.in_lockstep),
            "rollout_s": collected - started,
            "train_s": time.monotonic() - collected - probe_s,
            "groups_filtered": len(filtered),
            **({"probe_s": probe_s} if probe_s else {}),
        }
        if not has_signal(row, self.config):
            row["no_signal"] = why_no_signal(groups, self.config)
        _, stopped_later = await _uninterrupted(self._keep(step, row))
        if stopped := stopped or stopped_later:
            self._keep_all_steps(step)
            raise stopped
        return row

    async def _keep(self, step: int, row: dict[str, Any]) -> None:
        """The weights of a trained step go to the store, its metrics and its checkpoint to the folder."""

        def save() -> None:
            waited = self.checkpoints.ready(step, step == self.config.train.steps)
            if waited:
                row["checkpoint_wait_s"] = waited
            self.folder.append_metrics(row)
            if waited is not None:
                self.checkpoints.save(step)

        taken = f"the store {self.config.loop.store} to take the weights before those of step {step}"
        await self._in_thread(taken, self._to_store, step)
        await self._in_thread(f"the checkpoint before that of step {step}", save)

    async def _in_thread(self, what: str, work: Callable[..., T], *arguments: Any) -> T:
        """In the trainer's thread. No timeout as long as micro-batches are done."""
        job = asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)
        signs = lambda: self.trainer.micro_batches  # noqa: E731
        return await wait_with_heartbeat(job, Watchdog(lambda: what, self.config.loop.deadline_s, signs, "train"))

    def _keep_all_steps(self, last: int) -> None:
        """Write a checkpoint of the steps since the last one. Only between steps, where the weights are whole."""
        if last > max(self.done, self.checkpoints.last):
            log.warning("the checkpoint of step %d is written before the run ends", last)
            self.checkpoints.save(last)

    def _stopped(self, step: int, problem: OffbookError, way_out: str) -> OffbookError:
        self.checkpoints.wait()
        last = max(self.folder.checkpoints(), default=0)
        kept = f"the last checkpoint is of step {last}" if last else "there is no checkpoint yet"
        return OffbookError(f"step {step}: {problem}; {kept}; {way_out}")

    def _to_store(self, version: int) -> None:
        """To engines elsewhere. The weights are copied here and written in the background."""
        self.wait_for_store()
        if self.publisher:
            self.publisher.publish(self.trainer.publish(version))

    def wait_for_store(self, close: bool = False) -> None:
        """A lost store does not end the run: the next version carries all that changed."""
        if self.publisher:
            try:
                self.publisher.close() if close else self.publisher.wait()
            except Exception as problem:
                log.warning("weights could not be published to %s: %s", self.publisher.store, problem)


def has_signal(row: Mapping[str, Any], config: Config) -> bool:
    """Whether rewards, hints or other teachers taught anything in a step with these metrics.

    Where nothing is solved and rewards differ by effort and handing in alone, they teach to give up: in seven steps
    a model went from 12 turns to 4, most rollouts without an edit (docs/results/repositories.md).
    """
    parts = {name.removeprefix("reward/") for name in row if name.startswith("reward/")}
    teaches_work = row.get("reward/outcome", 1.0) > 0 or not parts <= {"outcome", WITHHELD, *SHAPING}
    if config.train.rl_weight and row["groups_with_gradient"] and teaches_work:
        return True
    others = [name for name in row if name.endswith("/signal_tokens") and not name.startswith("rl/")]
    is_punished = config.feedback.control == "constant_negative" and row["hinted_targets"]
    return bool("ce/loss" in row or is_punished or any(row[name] for name in others))


def why_no_signal(groups: Sequence[Sequence[Rollout]], config: Config) -> str:
    """The likely cause of a step whose groups are all alike, and what would help."""
    rollouts = [rollout for group in groups for rollout in group if not rollout.fault]
    if not rollouts:
        return "the machine or the model's server ended every rollout; offbook doctor looks at this machine"
    solved = sum(rollout.solved for rollout in rollouts)
    if solved == len(rollouts):
        return f"all {solved} rollouts solved their task; take harder tasks: offbook tasks make REPOSITORY --level gone"
    if solved:
        return (
            f"each task was solved by all of its rollouts or by none ({solved} of {len(rollouts)} rollouts); more "
            f"rollouts a task show a difference: --train.group_size {2 * config.train.group_size}"
        )
    model, source = quote(config.model), quote(config.tasks.source)
    data = source if source.startswith("pocket") else f"demos:{source}"
    sft = f"offbook sft --model {model} --data {data} shows the model how"
    fit = f"offbook fit {model} --tasks.source {source} finds out how this model calls tools"
    without = {name: round(share * len(rollouts)) for name, share in shares_without(rollouts).items()}
    ends = Counter(rollout.stop for rollout in rollouts)
    stop = max(LIMITS, key=lambda stop: ends[stop])  # type: ignore[index]
    crash = next((rollout.cause for rollout in rollouts if rollout.stop == "crash"), "")
    withheld = sum(WITHHELD in rollout.reward.parts for rollout in rollouts)
    causes = (
        (ends["crash"], f"crashed ({crash})", "offbook view shows them"),
        (without["no_call"], "made no call that can be read", f"{fit}, or {sft}"),
        (withheld, "lost their reward to a monitor's finding", "offbook view shows what was found"),
        (ends[stop], f"were cut off by harness.{LIMITS[stop]}", f"raise it, or {sft}"),  # type: ignore[index]
        (without["no_edit"], "made calls and changed no file", sft),
        (
            len(rollouts),
            "were not solved, and most of them edited files: the tests never pass",
            f"take easier tasks: offbook tasks make REPOSITORY --level stub; or {sft}",
        ),
    )
    count, cause, help = next(each for each in causes if 2 * each[0] > len(rollouts))
    return f"{count} of {len(rollouts)} rollouts {cause}; {help}"


def waits(groups: Sequence[Sequence[Rollout]], rollout_s: float, in_lockstep: bool) -> dict[str, Any]:
    """Where the time of the slowest rollout went, and the longest call of all; in words if the step took long."""
    rollouts = [rollout for group in groups for rollout in group]

    def parts(rollout: Rollout) -> dict[str, float]:
        usage = rollout.usage
        return {
            "slot": usage.slot_seconds,
            "model": usage.model_seconds - usage.summary_seconds,
            "summary": usage.summary_seconds,
            "tools": usage.seconds - usage.model_seconds,
            "scoring": usage.scoring_seconds,
        }

    last = max(rollouts, key=lambda one: sum(parts(one).values()))
    called = max(rollouts, key=lambda one: one.usage.longest_call_seconds)
    spent = parts(last)
    found: dict[str, Any] = {
        **{f"slowest/{name}_s": seconds for name, seconds in spent.items()},
        "longest_call_s": called.usage.longest_call_seconds,
        "timeouts": sum(one.usage.timeouts for one in rollouts),
    }
    if rollout_s > SLOW_S:
        others = " (in lockstep with others' tools)" if in_lockstep else ""
        words = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items() if seconds >= 1)
        call = f"`{called.usage.longest_call}` of {called.id}, {called.usage.longest_call_seconds:.0f} s"
        found["waited_for"] = (
            f"waited {rollout_s:.0f} s for rollouts; last was {last.id}: {words}{others}; longest call: {call}"
        )
    return found


async def _uninterrupted(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """The result, and the interrupt that came meanwhile, such as Ctrl-C."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job), None
    except asyncio.CancelledError as reason:
        return await job, reason


@dataclass
class StepJudge:
    """The judge of a run, asked once per step. It warns about questions without an answer, and stops the run after
    SILENT_STEPS steps in a row without any."""

    judge: Judge
    silent_steps: int = 0

    async def read(self, when: str, rollouts: Iterable[tuple[Rollout, Task | None]]) -> Judgement:
        judgement = await self.judge.read(rollouts)
        lost = judgement.unanswered.total()
        if not lost:
            self.silent_steps = 0
            return judgement
        reasons = ", ".join(f"{reason}: {count}" for reason, count in judgement.unanswered.most_common())
        problem = f"{when}: the judge left {lost} of {lost + judgement.answered} questions unanswered"
        log.warning("%s (%s)", problem, reasons)
        self.silent_steps = 0 if judgement.answered else self.silent_steps + 1
        if self.silent_steps >= SILENT_STEPS:
            raise OffbookError(
                f"{problem} ({reasons}), and all of the {SILENT_STEPS - 1} steps before; give the same command again "
                "when its server answers"
            )
        return judgement


def step_judge_of(config: Config) -> StepJudge | None:
    """The judge of a run's feedback. Any judge is asked one question first: a wrong URL, name or key stops the run
    before its first step."""
    settings = config.judge
    reads = (settings.feedback and config.feedback.weight) or (settings.monitors and config.monitors.on)
    if settings.url and (reads or any(map(config.rewards.weights.get, JUDGED))):
        try:
            asyncio.run(Client(settings.url, settings.name).ask("Are you there? Answer with one word.", max_tokens=16))
        except NoAnswer as problem:
            way_out = "start the server, correct judge.url and judge.name, or leave judge out"
            raise OffbookError(f"the judge does not answer: {problem}; {way_out}") from None
    judge = hint_judge_of(config)
    return StepJudge(judge) if judge else None


def hint_judge_of(config: Config) -> Judge | None:
    """The judge of feedback."""
    judge = config.judge
    if not (judge.feedback and config.feedback.weight):
        return None
    turned_off = [rule for rule, weight in config.feedback.rule_weights.items() if not weight]
    return Judge(Client(judge.url, judge.name), MISTAKES, judge.feedback, without=turned_off)
