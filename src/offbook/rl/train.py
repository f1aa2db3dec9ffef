"""A training run on one machine: `build` makes its parts, `_step` is one round of them.

The trainer has a thread of its own; rollouts are sampled meanwhile (rl/scheduler.py). By default each waits for the
other: a step's rollouts are all sampled by the weights that the step before left. All randomness comes from (seed,
batch, task, number, turn), never from a generator with state. A killed run resumes from its last checkpoint and from
what its folder has beyond that (rl/rollout_buffer.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from offbook.core.config import Config
from offbook.core.processes import Watchdog, wait_with_heartbeat
from offbook.core.runfolder import RunFolder, latest_checkpoint, only_writer
from offbook.core.weights import Weights
from offbook.engine.sync import Publisher, open_store
from offbook.engine.vllm import refuse_missing_engine
from offbook.rl.checks import refuse_run, rewards_and_monitors_of
from offbook.rl.collector import Collector
from offbook.rl.fit import is_checked, refuse_unreadable
from offbook.rl.harder import Harder, harder_tasks
from offbook.rl.hint_probe import probe_hints
from offbook.rl.judge import StepJudge, hint_judge_of, refuse_silent_judge
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
from offbook.rl.ranks import (
    HOST,
    follow,
    follows,
    go_on,
    joined,
    make_trainer,
    share_in,
)
from offbook.rl.report import has_signal, waits, why_no_signal
from offbook.rl.resume import begin_run, computed_as_before, refuse_another_run, work_fingerprint
from offbook.rl.rollout_buffer import RolloutBuffer
from offbook.rl.samplers import RayCollector
from offbook.rl.scheduler import Scheduler
from offbook.rl.tasks import Selected, Shuffled, record_tasks, refuse_missing_tasks, task_order, task_sets
from offbook.rl.train_step import TrainContext, WholeResponse, recall_probes, train_step
from offbook.signals.feedback import rules_of
from offbook.signals.judge import Judgement
from offbook.train.checkpoint import Checkpoints
from offbook.train.lora import adapter_of
from offbook.train.trainer import NotFinite, WeightsLost
from offbook.types import Hung, OffbookError

OnStep = Callable[[dict[str, Any]], None]
Tell = Callable[[str], None]  # prints a line for people
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run."""

    config: Config
    folder: RunFolder
    context: TrainContext  # trainer, chat, tasks, rules: what an optimizer step needs
    collector: Collector  # makes rollouts
    buffer: RolloutBuffer  # their state
    scheduler: Scheduler  # when they run, and which step gets them
    order: Shuffled | Selected  # of tasks
    judge: StepJudge | None
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
        refuse_run(config, to_train=True)
        refuse_missing_tasks(config, "train")
        with only_writer(folder.path):
            refuse_another_run(folder, config)
            run = build(config, folder, progress, tell, orders)
            hangs = False
            try:
                with run.checkpoints, asyncio.Runner() as runner:
                    runner.run(_steps(run, on_step, fit_check))
            except Hung:
                hangs = True
                raise
            finally:
                run.thread.shutdown(wait=not hangs)
                if run.publisher and not hangs:
                    with _logged(run.publisher):
                        run.publisher.close()
    return folder


def build(config: Config, folder: RunFolder, progress: Progress, tell: Tell, orders: Any) -> Run:
    """All parts of a run, restored to where its folder says it is. Cheap refusals come first, models last. `orders` is
    the group of other ranks, if there are any."""
    torch.set_num_threads(config.threads)
    share = share_in(config.train, orders)
    judges = rewards_and_monitors_of(config)
    rules = rules_of(config.feedback.files)
    refuse_missing_engine(config)
    refuse_silent_judge(config)
    by_ray = config.loop.ray.samplers > 0
    config, plan = planned(computed_as_before(folder, config), engine_apart=by_ray, share=share)
    publisher = _publisher(config)
    start = model_folder(config.model, config.seed, progress)
    sets = task_sets(config, progress)
    tell(f"model {config.model}, loaded from {start}")
    tell(f"tasks {config.tasks.source}: {len(sets.train)} to train on, {len(sets.heldout)} held out")
    rollouts = f"{config.train.groups} tasks x {config.train.group_size} rollouts"
    tell(f"{config.train.steps} steps of {rollouts}, kept in {config.out}")
    tell(str(plan))

    trained = model_to_train(config, start, "" if orders is None else HOST)
    collector: Collector
    if by_ray:
        collector = RayCollector(config, start, judges=judges, progress=progress)
    else:
        sampled = model_to_sample(config, start, trained)
        collector = Collector(config, start, judges=judges, progress=progress, loaded=sampled)

    done = begin_run(folder, config)
    if 0 < done < config.train.steps:
        tell(f"resuming at step {done + 1}")
    trainer = make_trainer(config, trained, start, progress, orders)
    if done:
        trainer.together(go_on, latest_checkpoint(folder))
    kept = folder.path / "ckpt"
    checkpoints = Checkpoints(trainer, kept, chat_folder(start), config.checkpoint, config.loop.deadline_s)
    tell(str(checkpoints))

    buffer = RolloutBuffer(folder, config.train.group_size, work_fingerprint(config, start), done)
    to_train = [*sets.train, *harder_tasks(folder.path)]
    tasks = {task.id: task for task in to_train}
    record_tasks(folder, {"train": to_train, "heldout": sets.heldout})
    buffer.restore(tasks, collector.recall)
    order = task_order(config, to_train, folder, done, drawn=buffer.taken)
    order.learn((), buffer.learned)

    whole = None
    if any(config.teachers.weights.values()):
        whole = WholeResponse(config.teachers, collector.chat, tasks, positions(chat_folder(start)))
    context = TrainContext(config, folder, tasks, rules, collector.chat, trainer, whole=whole)
    recall_probes(context, folder.looks(done))
    judge = hint_judge_of(config)
    harder = None
    if config.tasks.harden and isinstance(order, Selected):
        harder = Harder(config, buffer, tasks, order, done)
    return Run(
        config=config,
        folder=folder,
        context=context,
        collector=collector,
        buffer=buffer,
        scheduler=Scheduler(config, collector, buffer, order),
        order=order,
        judge=StepJudge(judge) if judge else None,
        harder=harder,
        checkpoints=checkpoints,
        publisher=publisher,
        thread=ThreadPoolExecutor(1, "train", torch.set_num_threads, (config.threads,)),
        tell=tell,
        done=done,
    )


async def _steps(run: Run, on_step: OnStep, fit_check: bool) -> None:
    scheduler, last, silent = run.scheduler, run.config.train.steps, 0
    async with aclosing(run.collector), aclosing(scheduler):
        await scheduler.apply(_first_weights(run))
        _publish(run, run.done)
        if fit_check and not run.done and is_checked(run.config):
            await refuse_unreadable(run.collector, [*run.context.tasks.values()])
        scheduler.start()
        if run.harder:
            scheduler.in_background(run.harder.run())
        for step in range(run.done + 1, last + 1):
            row = await _step(run, step)
            on_step(row)
            silent = silent + 1 if "no_signal" in row else 0
            if silent and step < last and silent == run.config.train.no_signal_steps:
                _keep_all_steps(run, step)
                problem = OffbookError(f"{silent} steps in a row had no signal: {row['no_signal']}")
                raise _stopped(run, step, problem, "--train.no_signal_steps 0 goes on anyway")
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
    """One step: weights to the engine, rollouts, hints, gradient, metrics and checkpoint. Returns its metrics.

    Whatever ends the run, earlier steps are kept; a step that is being trained is finished first.
    """
    context, trainer, collector, scheduler = run.context, run.context.trainer, run.collector, run.scheduler
    started = time.monotonic()
    try:
        if collector.engine.version != step - 1:
            await scheduler.publish(trainer.publish(version=step - 1))
        groups = await scheduler.take(step)
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
        probe_s = 0.0
        if step == 1 and run.config.feedback.is_look_due:
            async with scheduler.paused():
                judged = time.monotonic()
                for line in await probe_hints(step, groups, context, collector, partial(_in_thread, run)):
                    run.tell(line)
                probe_s = time.monotonic() - judged
        if not run.config.loop.max_staleness:
            collector.engine.pause()
    except BaseException:  # also Ctrl-C
        _keep_all_steps(run, step - 1)
        raise
    try:
        work = _in_thread(run, f"step {step} to be trained", train_step, step, groups, judgement, context)
        row, stopped = await _uninterrupted(work)
    except NotFinite as problem:
        _keep_all_steps(run, step - 1)
        raise _stopped(run, step, problem, "--train.on_nonfinite skip goes on without such a step") from None
    except WeightsLost as problem:  # they are not those of any step that can be kept
        raise _stopped(run, step, problem, "try a lower train.learning_rate") from None
    row = {
        "step": step,
        **row,
        "epoch": run.order.epoch(step, run.config.train.groups),
        "skipped_steps": step - trainer.steps,
        **scheduler.metrics(step, groups),
        **collector.metrics(),
        **waits(groups, collected - started, scheduler.in_lockstep),
        "rollout_s": collected - started,
        "train_s": time.monotonic() - collected - probe_s,
        "groups_filtered": len(filtered),
        **({"probe_s": probe_s} if probe_s else {}),
    }
    if not has_signal(row, run.config):
        row["no_signal"] = why_no_signal(groups, run.config)
    _, stopped_later = await _uninterrupted(_keep(run, step, row))
    if stopped := stopped or stopped_later:
        _keep_all_steps(run, step)
        raise stopped
    return row


async def _keep(run: Run, step: int, row: dict[str, Any]) -> None:
    """The weights of a trained step go to the store, its metrics and its checkpoint to the folder."""

    def save() -> None:
        is_last = step == run.config.train.steps
        is_due = run.checkpoints.is_due(step) or is_last
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
    """In the trainer's thread. No timeout as long as micro-batches are done."""
    job = asyncio.get_running_loop().run_in_executor(run.thread, work, *arguments)
    signs = lambda: run.context.trainer.micro_batches  # noqa: E731
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
