"""The circle on one machine: rollouts, rewards, feedback, samples, one optimizer step, new weights to the engine.

Rollouts are sampled beside the steps (loop/reconcile.py), which are in a thread of their own, and by default each waits
for the other: all of a step's are sampled by the weights that the step before left. All randomness comes from (seed,
batch, task, number, turn), never from a generator that lives on. A run that was killed goes on from its last checkpoint
with what is in its folder beyond that (loop/slots.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from offbook.core.config import Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer
from offbook.core.weights import Weights
from offbook.engine import Engine
from offbook.engine.sync import Publisher, open_store
from offbook.engine.vllm import refuse_missing_engine
from offbook.rl.background import Evaluations, Harder, harder_tasks
from offbook.rl.checks import judges_of, refuse_run
from offbook.rl.collector import Collector
from offbook.rl.hint_probe import HintProbe, NoHintHelps, correct, faults_in
from offbook.rl.hint_probe import table as look_table
from offbook.rl.judge import StepJudge, judge_of, local_judge, refuse_silent_judges
from offbook.rl.models import (
    Progress,
    chat_folder,
    load_weights,
    model_folder,
    model_to_sample,
    model_to_train,
    positions,
    quiet,
    weights_in,
)
from offbook.rl.plan import as_planned, make_plan, refuse_too_large, this_device
from offbook.rl.ranks import (
    HOST,
    follow,
    follows,
    go_on,
    joined,
    make_trainer,
    publish_by_all,
    refuse_ranks,
    share_in,
)
from offbook.rl.resume import begin_run, computed_as_before, refuse_another_run, work_fingerprint
from offbook.rl.rollout_buffer import RolloutBuffer, forget_other_work, holds_sandboxes, recall
from offbook.rl.scheduler import Scheduler
from offbook.rl.tasks import Selected, Shuffled, record_tasks, refuse_missing_tasks, task_order, task_sets
from offbook.rl.train_step import TrainContext, recall_look, train_step, whole_response
from offbook.signals.feedback import rules_of
from offbook.signals.judge import Judgement
from offbook.tasks.select import TasksUsedUp
from offbook.train.checkpoint_writer import Checkpoints
from offbook.train.lora import adapter_of
from offbook.train.trainer import NotFinite, Trainer, WeightsLost, weights_of
from offbook.types import Hung, OffbookError, Rollout, Sample

log = logging.getLogger(__name__)
LOOK_SAMPLES = 8  # messages sampled at each place, without and with the hint


def publisher_of(config: Config) -> Publisher | None:
    """Matrices are written as the engines sample with them."""
    if not config.loop.store:
        return None
    precision = getattr(torch, config.engine.precision)
    publisher = Publisher(open_store(config.loop.store), dtype=None if precision == torch.float32 else precision)
    publisher.look()  # before anything is trained
    return publisher


@contextmanager
def published(publisher: Publisher) -> Iterator[None]:
    """A store that is away ends no run: the next version carries all that changed."""
    try:
        yield
    except Exception as problem:
        log.warning("weights could not be published to %s: %s", publisher.store, problem)


def publish(publisher: Publisher | None, trainer: Trainer, version: int) -> None:
    """To engines elsewhere, which take it when they look. It is copied here and written beside what follows."""
    stored(publisher)
    if publisher is not None:
        publisher.publish(trainer.publish(version))


def stored(publisher: Publisher | None) -> None:
    """Waits for the last that was given to it."""
    if publisher is not None:
        with published(publisher):
            publisher.wait()


OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # a line for people
T = TypeVar("T")


@dataclass(slots=True)
class Loaded:
    """The model and the engine that runs of one process have in common, one after the other: to load and compile the
    one and to start the other takes longer than many steps. Runs put their own weights in. Their starts have the same
    shape, precision and adapter. Whoever holds them closes the engine."""

    trained: PreTrainedModel | None = None
    engine: Engine | None = None

    def load(self, config: Config, weights: Path, progress: Progress = quiet) -> PreTrainedModel:
        """The model with these weights in it."""
        if self.trained is not None:
            load_weights(self.trained, weights)
            return self.trained
        self.trained = model_to_train(config, weights)
        sampled = model_to_sample(config, weights, self.trained)
        self.engine = Collector(config, weights, progress=progress, loaded=sampled).engine
        return self.trained

    def publish(self, version: int) -> Engine:
        """The engine with the weights that are in the model."""
        assert self.trained is not None
        assert self.engine is not None
        self.engine.apply(weights_of(self.trained, version))
        return self.engine


def train(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
    held: Loaded | None = None,
) -> RunFolder:
    """Run, or go on with, the training that `config` describes. Returns when its last step is in a checkpoint."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    with joined() as orders:
        if follows(orders):
            follow(orders)
            return folder
        refuse_ranks(config.train, orders)
        refuse_run(config, to_train=True)
        refuse_missing_tasks(config, "train")
        with only_writer(folder.path):
            refuse_another_run(folder, config)
            _train(config, folder, on_step, progress, tell, held, orders)
    return folder


@dataclass(frozen=True, slots=True)
class _Run:
    """All that takes part in a run."""

    context: TrainContext
    collector: Collector
    engine: Engine
    judge: StepJudge | None
    order: Shuffled | Selected
    scheduler: Scheduler
    evaluations: Evaluations
    harder: Harder | None
    checkpoints: Checkpoints
    tell: Tell
    done: int  # steps, before this process began
    thread: ThreadPoolExecutor  # the trainer's
    publisher: Publisher | None  # for engines elsewhere


def _train(
    config: Config, folder: RunFolder, on_step: OnStep, progress: Progress, tell: Tell, held: Loaded | None, orders: Any
) -> None:
    run, hangs = _prepared(config, folder, progress, tell, held, orders), False
    try:
        with run.checkpoints, asyncio.Runner() as runner:
            runner.run(_circle(run, on_step))
    except Hung:
        hangs = True
        raise
    finally:
        run.thread.shutdown(wait=not hangs)
        if run.publisher and not hangs:
            with published(run.publisher):
                run.publisher.close()


async def _circle(run: _Run, on_step: OnStep) -> None:
    last = run.context.config.train.steps
    async with aclosing(run.collector), aclosing(run.scheduler):
        await run.scheduler.apply(_first_weights(run))
        publish(run.publisher, run.context.trainer, run.done)
        run.scheduler.start()
        run.scheduler.beside(run.evaluations.run())
        if run.harder:
            harder = run.harder
            run.scheduler.beside(harder.run(), lambda: harder.is_busy)
        for step in range(run.done + 1, last + 1):
            try:
                row = await _step(run, step)
            except TasksUsedUp as reason:
                if step == 1:
                    raise
                log.warning("the run ends after step %d of %d: %s", step - 1, last, reason)
                return
            on_step(row)
        await run.scheduler.until(lambda: run.evaluations.are_over, lambda: "the last evaluation")
        await _in_thread(run, "the last checkpoint to be written", run.checkpoints.wait)
        await _in_thread(run, f"{_store(run)} to take the last weights", stored, run.publisher)


def _prepared(
    config: Config, folder: RunFolder, progress: Progress, tell: Tell, held: Loaded | None, orders: Any
) -> _Run:
    """What can be refused is refused first, from the cheapest on; models are loaded last. `orders` are for other ranks,
    if there are any."""
    torch.set_num_threads(config.threads)
    judges, judge = judges_of(config), judge_of(config.feedback)
    rules = rules_of(config.feedback.files)
    refuse_missing_engine(config)
    refuse_silent_judges(config)
    config = computed_as_before(folder, config)
    placed = config.loop.ray.samplers > 0
    plan = make_plan(config, this_device(), engine_apart=placed, share=share_in(config.train, orders))
    refuse_too_large(config, plan)
    config = as_planned(config, plan)
    publisher = publisher_of(config)
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    tell(f"model {config.model}, loaded from {start}")
    tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
    rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
    tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
    tell(str(plan))
    if held is None:
        trained = model_to_train(config, start, "" if orders is None else HOST)
        sampled = None if placed else model_to_sample(config, start, trained)
        collector = Collector(config, start, judges=judges, progress=progress, loaded=sampled, placed=placed)
    else:
        trained = held.load(config, start, progress)
        collector = Collector(config, start, judges=judges, progress=progress, lent=held.engine)
    engine, chat = collector.engine, collector.chat
    done = begin_run(folder, config)
    if 0 < done < config.train.steps:
        tell(f"resuming at step {done + 1}")
    fingerprint = work_fingerprint(config, start)
    forget_other_work(folder, done, fingerprint)
    to_train = [*sets.train, *harder_tasks(folder.path)]
    record_tasks(folder, {"train": to_train, "heldout": sets.heldout})
    trainer = make_trainer(config, trained, start, progress, orders)
    if publisher:
        publish_by_all(publisher, trainer, config.loop.store)
    if done:
        trainer.together(go_on, latest_checkpoint(folder))
    slots, tasks = _slots(config, folder, fingerprint), {task.id: task for task in to_train}
    for step in (step for step in folder.steps() if step <= done):
        before, _ = folder.rollouts(step)
        collector.recall(before)
        slots.already(before)
    recalled = recall(slots, done, tasks)
    judge = judge or local_judge(config, engine, chat, progress)
    step_judge = StepJudge(judge) if judge else None
    order = task_order(config, to_train, folder, done, recalled.tasks())
    order.learn((), chain(*recalled.learned.values()))
    kept = folder.path / "ckpt", chat_folder(start), config.checkpoint, config.loop.deadline_s
    checkpoints = Checkpoints(trainer, *kept)
    tell(str(checkpoints))
    whole = whole_response(config, chat, tasks, positions(chat_folder(start)))
    context = TrainContext(config, folder, tasks, rules, chat, trainer, whole=whole)
    recall_look(context, folder.looks(done))
    scheduler = Scheduler(config, collector, engine, slots, order, recalled)
    evaluations = Evaluations(config, folder, slots, tell)
    harder = Harder(config, slots, tasks, scheduler.added, done, recalled.learned) if config.tasks.harden else None
    thread = ThreadPoolExecutor(1, "train", torch.set_num_threads, (config.threads,))
    together = context, collector, engine, step_judge, order, scheduler, evaluations, harder, checkpoints
    return _Run(*together, tell, done, thread, publisher)


def _slots(config: Config, folder: RunFolder, fingerprint: str) -> RolloutBuffer:
    """In lockstep turns are not kept: what goes on in other company than before is not what it would have been."""
    is_lockstep = config.engine.kind == "local" and config.engine.mode == "lockstep"
    keeps_turns = not is_lockstep and config.sandbox.backend == "bwrap" and not config.loop.ray.samplers
    if keeps_turns and not asyncio.run(holds_sandboxes(folder.path / "slots")):
        log.warning("no sandbox can live in %s: rollouts that are not over begin anew after a restart", folder.path)
        keeps_turns = False
    return RolloutBuffer(folder, config.train.group_size, keeps_turns, fingerprint)


def _first_weights(run: _Run) -> Weights:
    """Those that the next batch is sampled by: in lockstep the ones that it would have been, had nothing ended the run
    before, as long as their checkpoint is there."""
    trainer, older = run.context.trainer, run.done - run.context.config.loop.max_staleness
    path = run.context.folder.checkpoints().get(older)
    if older == 0 and adapter_of(trainer.model) is None:
        path = run.collector.model
    if path is None or not run.scheduler.in_lockstep or older == run.done or run.scheduler.has_batch(run.done + 1):
        return trainer.publish(run.done)
    return weights_in(path, older)


async def _step(run: _Run, step: int) -> dict[str, Any]:
    """Once around the circle. Whatever ends the run, the steps before are kept; one that has begun is ended first."""
    context, trainer, started = run.context, run.context.trainer, time.monotonic()
    try:
        if run.engine.version != step - 1:
            await run.scheduler.publish(trainer.publish(version=step - 1))
        groups = await run.scheduler.take(step)
        run.checkpoints.check()
        collected = time.monotonic()
        aside, run.scheduler.aside = run.scheduler.aside, []
        run.order.learn(groups, aside)
        if run.harder:
            run.harder.look_at(groups, aside)
        read = [(rollout, context.tasks.get(rollout.task)) for group in groups for rollout in group]
        judgement = Judgement() if run.judge is None else await run.judge.read(f"step {step}", read)
        began = time.monotonic()
        if is_look := step == 1 and context.config.feedback.is_look_due:
            async with run.scheduler.quiet():
                await _look(run, step, groups)
        looked_s, counts = time.monotonic() - began, Counter[str]()
        is_corrected = context.config.feedback.corrections.weight
        corrected: list[Sample] = []
        if is_corrected:
            async with run.scheduler.quiet():
                corrected = await correct(step, groups, context, run.collector, counts)
        if not context.config.loop.max_staleness:
            run.collector.rest()
    except BaseException:  # also Ctrl-C
        _keep_all_steps(run, step - 1)
        raise
    row, stopped = await _learned(run, step, groups, judgement, corrected)
    row |= {"epoch": run.order.epoch(step, context.config.train.groups), "skipped_steps": step - trainer.steps}
    row |= run.scheduler.metrics(step, groups) | run.collector.metrics() | _slowest(groups)
    row |= {"rollout_s": collected - started, "train_s": time.monotonic() - collected - looked_s}
    row["groups_refilled"] = len(aside)
    row |= ({"look_s": looked_s} if is_look else {}) | counts
    _, ended = await _to_its_end(_handed_on(run, step, row))
    run.evaluations.saved(step)
    if stopped := stopped or ended:
        _keep_all_steps(run, step)
        raise stopped
    return row


async def _learned(
    run: _Run, step: int, groups: list[list[Rollout]], judgement: Judgement, corrected: list[Sample]
) -> tuple[dict[str, Any], asyncio.CancelledError | None]:
    """The step's metrics, and what would have ended it in the middle: between steps alone the weights are whole."""
    what = f"step {step} to be trained"
    try:
        row, stopped = await _to_its_end(
            _in_thread(run, what, train_step, step, groups, judgement, run.context, corrected)
        )
    except NotFinite as problem:
        _keep_all_steps(run, step - 1)
        raise _stopped(run, step, problem, "--train.on_nonfinite skip goes on without such a step") from None
    except WeightsLost as problem:  # they are not those of any step that can be kept
        raise _stopped(run, step, problem, "try a lower train.learning_rate") from None
    return {"step": step, **row}, stopped


async def _handed_on(run: _Run, step: int, row: dict[str, Any]) -> None:
    """A step that was trained: its weights to the store, its metrics and its checkpoint to the folder."""
    taken = f"{_store(run)} to take the weights before those of step {step}"
    await _in_thread(run, taken, publish, run.publisher, run.context.trainer, step)
    await _in_thread(run, f"the checkpoint before that of step {step}", _keep, run, step, row)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """And what would have ended it in the middle, as Ctrl-C."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job), None
    except asyncio.CancelledError as reason:
        return await job, reason


async def _in_thread(run: _Run, what: str, work: Callable[..., T], *arguments: Any) -> T:
    """By the trainer's. It may take as long as it likes, while micro-batches are done or bytes are written."""
    job = asyncio.get_running_loop().run_in_executor(run.thread, work, *arguments)
    trainer, deadline_s = run.context.trainer, run.context.config.loop.deadline_s
    signs = lambda: (trainer.micro_batches, run.checkpoints.written())  # noqa: E731
    return await wait_with_heartbeat(job, Watchdog(lambda: what, deadline_s, signs, "train"))


def _store(run: _Run) -> str:
    return f"the store {run.context.config.loop.store}"


def _keep(run: _Run, step: int, row: dict[str, Any]) -> None:
    is_due = run.checkpoints.is_due(step) or run.evaluations.is_due(step) or step == run.context.config.train.steps
    if is_due and (waited := run.checkpoints.wait()):
        row["checkpoint_wait_s"] = waited
    run.context.folder.append_metrics(row)
    if is_due:
        run.checkpoints.save(step)


async def _look(run: _Run, step: int, groups: list[list[Rollout]]) -> None:
    """Whether hints help on the faults of this step, before any of them teaches."""
    context, settings, found = run.context, run.context.config.feedback, faults_in(groups, run.context)
    look = HintProbe(run.collector, context.tasks, context.rules, LOOK_SAMPLES)
    sampled = await look.sampled(found, f"look{step}")
    run.collector.rest()  # the trainer reads next
    own = context.trainer.teachers[settings.teacher].own
    decoder = own.decoder if own else context.trainer.student
    looked = await _in_thread(run, "hints to be looked at", look.measured, sampled, found, decoder)
    rows = [one.row() for one in looked]
    context.folder.write_look(step, rows)
    for line in look_table(looked) if looked else ["no rule was broken, so there was no hint to look at"]:
        run.tell(line)
    recall_look(context, rows)
    if step == 1 and looked and all(one.why_not for one in looked):
        raise NoHintHelps(", ".join(one.rule for one in looked))


def _slowest(groups: list[list[Rollout]]) -> dict[str, float]:
    """What the rollout that the step waited for spent its seconds on."""
    usage = max((one.usage for group in groups for one in group), key=lambda each: each.seconds + each.scoring_seconds)
    tools_s = usage.seconds - usage.model_seconds
    return {
        "slowest/model_s": usage.model_seconds,
        "slowest/tools_s": tools_s,
        "slowest/scoring_s": usage.scoring_seconds,
    }


def _keep_all_steps(run: _Run, last: int) -> None:
    """Those since the last checkpoint too. Only between steps, where the weights are whole."""
    if last > max(run.done, run.checkpoints.last):
        log.warning("the checkpoint of step %d is written before the run ends", last)
        run.checkpoints.save(last)


def _stopped(run: _Run, step: int, problem: OffbookError, way_out: str) -> OffbookError:
    run.checkpoints.wait()
    last = max(run.context.folder.checkpoints(), default=0)
    kept = f"the last checkpoint is of step {last}" if last else "there is no checkpoint yet"
    return OffbookError(f"step {step}: {problem}; {kept}; {way_out}")
