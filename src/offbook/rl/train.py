"""The circle on one machine: rollouts, rewards, feedback, samples, one optimizer step, new weights to the engine.

Rollouts are sampled while steps are trained (rl/scheduler.py), which run in a thread of their own. By default each
waits for the other: a step's rollouts are all sampled by the weights that the step before left. All randomness comes
from (seed, batch, task, number, turn), never from a generator with state. A run that was killed resumes from its last
checkpoint and from what its folder has beyond that (rl/rollout_buffer.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
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
from offbook.rl.fit import is_checked, refuse_unreadable
from offbook.rl.hint_probe import correct, probe_hints
from offbook.rl.judge import StepJudge, refuse_silent_judge, step_judge
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
from offbook.rl.no_signal import has_signal, why_no_signal
from offbook.rl.plan import planned
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
from offbook.rl.rollout_buffer import RolloutBuffer, forget_other_work, holds_sandboxes
from offbook.rl.samplers import RayCollector
from offbook.rl.scheduler import Scheduler
from offbook.rl.tasks import Selected, Shuffled, record_tasks, refuse_missing_tasks, task_order, task_sets
from offbook.rl.train_step import TrainContext, recall_probes, train_step, whole_response
from offbook.rl.waits import waits
from offbook.signals.feedback import rules_of
from offbook.signals.judge import Judgement
from offbook.train.checkpoint import Checkpoints
from offbook.train.lora import adapter_of
from offbook.train.trainer import NotFinite, WeightsLost, weights_of
from offbook.types import Hung, OffbookError, Rollout, Sample

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # prints a line for people
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """A model and an engine that several runs of one process use one after the other: loading and compiling the model
    and starting the engine takes longer than many steps. Each run puts its own weights in. All runs start from the same
    shape, precision and adapter. The owner closes the engine."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that takes part in a run."""

    config: Config
    folder: RunFolder
    context: TrainContext
    collector: Collector
    judge: StepJudge | None
    order: Shuffled | Selected
    buffer: RolloutBuffer
    scheduler: Scheduler
    evaluations: Evaluations
    harder: Harder | None
    checkpoints: Checkpoints
    publisher: Publisher | None  # for engines elsewhere
    thread: ThreadPoolExecutor  # the trainer's
    tell: Tell
    done: int  # steps, before this process began


def train(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
    loaded: Loaded | None = None,
    fit_check: bool = False,
) -> RunFolder:
    """Run or resume the training that `config` describes. Returns when its last step is in a checkpoint.

    `fit_check` refuses a model whose first messages hardly have a readable call.
    """
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
            run = _prepare(config, folder, progress=progress, tell=tell, loaded=loaded, orders=orders)
            hangs = False
            try:
                with run.checkpoints, asyncio.Runner() as runner:
                    runner.run(_circle(run, on_step, fit_check))
            except Hung:
                hangs = True
                raise
            finally:
                run.thread.shutdown(wait=not hangs)
                if run.publisher and not hangs:
                    with _logged(run.publisher):
                        run.publisher.close()
    return folder


def _prepare(
    config: Config, folder: RunFolder, progress: Progress, tell: Tell, loaded: Loaded | None, orders: Any
) -> Run:
    """Refuse what can be refused, the cheapest checks first; load models last. `orders` is the group of other ranks, if
    there are any."""
    torch.set_num_threads(config.threads)
    rewards_and_monitors = judges_of(config)
    rules = rules_of(config.feedback.files)
    refuse_missing_engine(config)
    refuse_silent_judge(config)
    by_ray = config.loop.ray.samplers > 0
    config, plan = planned(
        computed_as_before(folder, config), engine_apart=by_ray, share=share_in(config.train, orders)
    )
    publisher = _publisher(config)
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    tell(f"model {config.model}, loaded from {start}")
    tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
    rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
    tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
    tell(str(plan))

    collector: Collector
    if loaded:
        trained = loaded.load(config, start, progress)
        collector = Collector(config, start, judges=rewards_and_monitors, progress=progress, lent=loaded.engine)
    else:
        trained = model_to_train(config, start, "" if orders is None else HOST)
        if by_ray:
            collector = RayCollector(config, start, judges=rewards_and_monitors, progress=progress)
        else:
            sampled = model_to_sample(config, start, trained)
            collector = Collector(config, start, judges=rewards_and_monitors, progress=progress, loaded=sampled)

    done = begin_run(folder, config)
    if 0 < done < config.train.steps:
        tell(f"resuming at step {done + 1}")
    fingerprint = work_fingerprint(config, start)
    forget_other_work(folder, done, fingerprint)
    to_train = [*sets.train, *harder_tasks(folder.path)]
    tasks = {task.id: task for task in to_train}
    record_tasks(folder, {"train": to_train, "heldout": sets.heldout})

    trainer = make_trainer(config, trained, start, progress, orders)
    if publisher:
        publish_by_all(publisher, trainer, config.loop.store)
    if done:
        trainer.together(go_on, latest_checkpoint(folder))
    checkpoints = Checkpoints(
        trainer, folder.path / "ckpt", chat_folder(start), config.checkpoint, config.loop.deadline_s
    )
    tell(str(checkpoints))

    buffer = RolloutBuffer(folder, config.train.group_size, _keeps_turns(config, folder), fingerprint)
    for step in folder.steps():
        if step <= done:
            before, _ = folder.rollouts(step)
            collector.recall(before)
            buffer.already(before)
    buffer.restore(done, tasks)
    order = task_order(config, to_train, folder, done, drawn=buffer.taken())
    order.learn((), chain(*buffer.learned.values()))
    context = TrainContext(
        config=config,
        folder=folder,
        tasks=tasks,
        rules=rules,
        chat=collector.chat,
        trainer=trainer,
        whole=whole_response(config, collector.chat, tasks, positions(chat_folder(start))),
    )
    recall_probes(context, folder.looks(done))
    scheduler = Scheduler(config, collector, buffer, order)
    return Run(
        config=config,
        folder=folder,
        context=context,
        collector=collector,
        judge=step_judge(config, collector.engine, collector.chat, progress),
        order=order,
        buffer=buffer,
        scheduler=scheduler,
        evaluations=Evaluations(config, folder, buffer, tell),
        harder=Harder(config, buffer, tasks, scheduler.on_tasks, done) if config.tasks.harden else None,
        checkpoints=checkpoints,
        publisher=publisher,
        thread=ThreadPoolExecutor(1, "train", torch.set_num_threads, (config.threads,)),
        tell=tell,
        done=done,
    )


def _keeps_turns(config: Config, folder: RunFolder) -> bool:
    """Not in lockstep: a rollout that resumes in another batch would not be what it would have been."""
    is_lockstep = config.engine.kind == "lockstep"
    if is_lockstep or config.sandbox.backend != "bwrap" or config.loop.ray.samplers:
        return False
    if asyncio.run(holds_sandboxes(folder.path / "slots")):
        return True
    log.warning("no sandbox can live in %s: unfinished rollouts start over after a restart", folder.path)
    return False


async def _circle(run: Run, on_step: OnStep, fit_check: bool) -> None:
    last, silent = run.config.train.steps, 0
    async with aclosing(run.collector), aclosing(run.scheduler):
        await run.scheduler.apply(_first_weights(run))
        _publish(run, run.done)
        if fit_check and not run.done and is_checked(run.config):
            await refuse_unreadable(run.collector, [*run.context.tasks.values()])
        run.scheduler.start()
        run.scheduler.in_background(run.evaluations.run())
        if run.harder:
            run.scheduler.in_background(run.harder.run())
        for step in range(run.done + 1, last + 1):
            row = await _step(run, step)
            on_step(row)
            silent = silent + 1 if "no_signal" in row else 0
            if silent and step < last and silent == run.config.train.no_signal_steps:
                _keep_all_steps(run, step)
                problem = OffbookError(f"{silent} steps in a row had no signal: {row['no_signal']}")
                raise _stopped(run, step, problem, "--train.no_signal_steps 0 goes on anyway")
        await run.scheduler.until(lambda: run.evaluations.are_over, lambda: "the last evaluation")
        await _in_thread(run, "the last checkpoint to be written", run.checkpoints.wait)
        await _in_thread(run, f"the store {run.config.loop.store} to take the last weights", _wait_for_store, run)


def _first_weights(run: Run) -> Weights:
    """The weights that the next batch is sampled by. In lockstep these are the weights it would have been sampled by
    without the restart, if their checkpoint is there."""
    trainer = run.context.trainer
    older = run.done - run.config.loop.max_staleness
    path = run.folder.checkpoints().get(older)
    if older == 0 and adapter_of(trainer.model) is None:
        path = run.collector.model
    if path is None or not run.scheduler.in_lockstep or older == run.done or run.scheduler.has_batch(run.done + 1):
        return trainer.publish(run.done)
    return weights_in(path, older)


async def _step(run: Run, step: int) -> dict[str, Any]:
    """Once around the circle. Whatever ends the run, earlier steps are kept; a step that is being trained is finished
    first."""
    context, trainer, settings = run.context, run.context.trainer, run.config.feedback
    counts = Counter[str]()
    corrected: list[Sample] = []
    started = time.monotonic()
    try:
        if run.collector.engine.version != step - 1:
            await run.scheduler.publish(trainer.publish(version=step - 1))
        groups = await run.scheduler.take(step)
        run.checkpoints.check()
        collected = time.monotonic()
        filtered, run.buffer.filtered = run.buffer.filtered, []
        run.order.learn(groups, filtered)
        if run.harder:
            run.harder.look_at(groups, filtered)
        judgement = Judgement()
        if run.judge:
            rollouts = [(rollout, context.tasks.get(rollout.task)) for group in groups for rollout in group]
            judgement = await run.judge.read(f"step {step}", rollouts)
        judged = time.monotonic()
        is_probe = step == 1 and settings.is_look_due
        if is_probe:
            async with run.scheduler.paused():
                await probe_hints(step, groups, context, run.collector, partial(_in_thread, run), run.tell)
        probe_s = time.monotonic() - judged
        if settings.corrections.weight:
            async with run.scheduler.paused():
                corrected = await correct(step, groups, context, run.collector, counts)
        if not run.config.loop.max_staleness:
            run.collector.engine.pause()
    except BaseException:  # also Ctrl-C
        _keep_all_steps(run, step - 1)
        raise
    row, stopped = await _train(run, step, groups, judgement=judgement, corrected=corrected)
    if not has_signal(row, run.config):
        row["no_signal"] = why_no_signal(groups, run.config)
    row |= {
        "epoch": run.order.epoch(step, run.config.train.groups),
        "skipped_steps": step - trainer.steps,
        **run.scheduler.metrics(step, groups),
        **run.collector.metrics(),
        **waits(groups, collected - started, run.scheduler.in_lockstep),
        "rollout_s": collected - started,
        "train_s": time.monotonic() - collected - probe_s,
        "groups_filtered": len(filtered),
        **({"probe_s": probe_s} if is_probe else {}),
        **counts,
    }
    _, stopped_later = await _uninterrupted(_keep(run, step, row))
    run.evaluations.saved(step)
    if stopped := stopped or stopped_later:
        _keep_all_steps(run, step)
        raise stopped
    return row


async def _train(
    run: Run, step: int, groups: list[list[Rollout]], judgement: Judgement, corrected: list[Sample]
) -> tuple[dict[str, Any], asyncio.CancelledError | None]:
    """The optimizer step: its metrics, and an interrupt that came meanwhile. Only between steps are the weights
    whole."""
    what = f"step {step} to be trained"
    work = _in_thread(run, what, train_step, step, groups, judgement, run.context, corrected)
    try:
        row, stopped = await _uninterrupted(work)
    except NotFinite as problem:
        _keep_all_steps(run, step - 1)
        raise _stopped(run, step, problem, "--train.on_nonfinite skip goes on without such a step") from None
    except WeightsLost as problem:  # they are not those of any step that can be kept
        raise _stopped(run, step, problem, "try a lower train.learning_rate") from None
    return {"step": step, **row}, stopped


async def _keep(run: Run, step: int, row: dict[str, Any]) -> None:
    """The weights of a trained step go to the store, its metrics and its checkpoint to the folder."""

    def save() -> None:
        is_last = step == run.config.train.steps
        is_due = run.checkpoints.is_due(step) or run.evaluations.is_due(step) or is_last
        if is_due and (waited := run.checkpoints.wait()):
            row["checkpoint_wait_s"] = waited
        run.folder.append_metrics(row)
        if is_due:
            run.checkpoints.save(step)

    taken = f"the store {run.config.loop.store} to take the weights before those of step {step}"
    await _in_thread(run, taken, _publish, run, step)
    await _in_thread(run, f"the checkpoint before that of step {step}", save)


async def _uninterrupted(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """The result, and the interrupt that came meanwhile, such as Ctrl-C."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job), None
    except asyncio.CancelledError as reason:
        return await job, reason


async def _in_thread(run: Run, what: str, work: Callable[..., T], *arguments: Any) -> T:
    """In the trainer's thread. No timeout as long as micro-batches are done or bytes are written."""
    job = asyncio.get_running_loop().run_in_executor(run.thread, work, *arguments)
    signs = lambda: (run.context.trainer.micro_batches, run.checkpoints.written())  # noqa: E731
    return await wait_with_heartbeat(job, Watchdog(lambda: what, run.config.loop.deadline_s, signs, "train"))


def _keep_all_steps(run: Run, last: int) -> None:
    """Write a checkpoint of the steps since the last one. Only between steps, where the weights are whole."""
    if last > max(run.done, run.checkpoints.last):
        log.warning("the checkpoint of step %d is written before the run ends", last)
        run.checkpoints.save(last)


def _stopped(run: Run, step: int, problem: OffbookError, way_out: str) -> OffbookError:
    run.checkpoints.wait()
    last = max(run.folder.checkpoints(), default=0)
    kept = f"the last checkpoint is of step {last}" if last else "there is no checkpoint yet"
    return OffbookError(f"step {step}: {problem}; {kept}; {way_out}")


def _publisher(config: Config) -> Publisher | None:
    """For engines elsewhere (offbook.engine.sync). Matrices are written in the engines' precision."""
    if not config.loop.store:
        return None
    precision = getattr(torch, config.engine.precision)
    publisher = Publisher(open_store(config.loop.store), dtype=None if precision == torch.float32 else precision)
    publisher.look()  # before anything is trained
    return publisher


@contextmanager
def _logged(publisher: Publisher) -> Any:
    """A lost store does not end the run: the next version carries all that changed."""
    try:
        yield
    except Exception as problem:
        log.warning("weights could not be published to %s: %s", publisher.store, problem)


def _publish(run: Run, version: int) -> None:
    """To engines elsewhere. The weights are copied here and written in the background."""
    _wait_for_store(run)
    if run.publisher:
        run.publisher.publish(run.context.trainer.publish(version))


def _wait_for_store(run: Run) -> None:
    if run.publisher:
        with _logged(run.publisher):
            run.publisher.wait()
