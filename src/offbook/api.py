"""offbook from Python, in six functions; docs/api.md has examples. torch comes with the first call that needs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from offbook.types import Json

if TYPE_CHECKING:
    from offbook.core.config import Config
    from offbook.core.runfolder import RunFolder
    from offbook.types import Rollout, Task

T = TypeVar("T")
__all__ = ["configure", "evaluate", "frames", "rollouts", "sft", "train"]


def configure(*files: str | Path, **sections: Any) -> Config:
    """A configuration: recipes by name and TOML files, left to right, then what is given by name, sections as tables.

    `configure("pocket", seed=1, train={"steps": 10})`. Without a recipe the one that fits the model is taken.
    """
    from offbook.core.config import load_config

    return load_config(files, json.loads(json.dumps(sections, default=str)))


def _in_a_thread(call: Callable[[], T]) -> T:
    """Where an event loop runs already, as in a notebook: what is called has one of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def train(config: Config, on_step: Callable[[Json], None] = lambda row: None) -> RunFolder:
    """Run, or go on with, the training that the configuration describes; `on_step` gets each step's metrics."""
    from offbook.rl.train import train as run

    return _in_a_thread(lambda: run(config, on_step))


def sft(config: Config, on_step: Callable[[Json], None] = lambda row: None) -> RunFolder:
    """Run, or go on with, the imitation that the configuration describes, of what `sft.data` names."""
    from offbook.stages.sft import sft as run

    return _in_a_thread(lambda: run(config, on_step))


def rollouts(
    config: Config, tasks: str | list[Task] = "", samples: int = 1, name: str = "", model: str | Path = ""
) -> list[Rollout]:
    """Scored rollouts on tasks: `pocket`, a folder, or loaded ones; without any, the configuration's held-out tasks.

    `model` is a model, or a run for its newest checkpoint; without it `config.model`, which training begins with.
    Nothing is written. `name` is the model's, where it is behind a URL.
    """
    from offbook.rl.tasks import task_sets, tasks_at

    if isinstance(tasks, str):
        tasks = tasks_at(tasks, config) if tasks else task_sets(config).heldout
    return _collect(config, str(model or config.model), tasks, samples, "rollout", name)


def evaluate(config: Config, model: str | Path = "") -> Json:
    """Numbers of a model, a run's newest checkpoint or, without one, `config.model` on the held-out tasks of the
    configuration, with 95% intervals over tasks under `intervals`."""
    from offbook.evals.metrics import measure, row_of
    from offbook.rl.tasks import refuse_no_heldout, task_sets

    tasks = {task.id: task for task in task_sets(config).heldout}
    if not tasks:
        refuse_no_heldout(config.tasks.source)
    found = _collect(config, str(model or config.model), list(tasks.values()), config.eval.samples, "eval")
    return {"tasks": len(tasks), **measure([row_of(rollout, tasks[rollout.task]) for rollout in found])}


def _collect(
    config: Config, model: str, tasks: list[Task], samples: int, name: str, remote_name: str = ""
) -> list[Rollout]:
    from offbook.rl.collector import Collector
    from offbook.rl.evaluate import PARALLEL
    from offbook.rl.models import local_or_remote

    async def collect() -> list[list[Rollout]]:
        folder = local_or_remote(model, remote_name, config.seed)
        measured = config.model_copy(update={"model": model})
        async with aclosing(Collector(measured, folder, remote_name)) as collector:
            return await collector.groups(tasks, samples, name, parallel=PARALLEL)

    return [rollout for group in _in_a_thread(lambda: asyncio.run(collect())) for rollout in group]


def frames(run: Any) -> Any:
    """A run as data frames: `.rollouts` and `.targets`, in pandas. See offbook.evals.export."""
    from offbook.evals.export import frames as made

    return made(run)
