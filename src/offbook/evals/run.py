"""An evaluation and its folder. Each rollout is saved when it ends, so a killed evaluation resumes."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import write_atomic
from offbook.evals.metrics import measure, row_of
from offbook.evals.suites import Suites, load_suites, train_tasks
from offbook.rl.collector import Collector, OnRollout, unwatched
from offbook.rl.evaluate import PARALLEL, collect_into, crashes, summarize
from offbook.rl.models import Progress, model_folder, quiet
from offbook.rl.resume import RolloutFiles
from offbook.tasks.contamination import contamination
from offbook.types import Rollout, Task


@dataclass(frozen=True)
class Subject:
    """The evaluated model: a folder or, without one, the endpoint `config.model`."""

    label: str
    config: Config
    folder: Path | None
    remote_name: str = ""


def measure_heldout(config: Config, progress: Progress = quiet) -> dict[str, Any]:
    """Evaluate `config.model` on the held-out tasks of the configuration, in the folder `config.out`."""
    folder = model_folder(config.model, config.seed, progress)
    source = config.tasks.source
    suites = load_suites([source], config, progress=progress)
    done = set[str]()

    def watch(rollout: Rollout, over: bool) -> None:
        if over:
            done.add(rollout.id)
        progress(f"measuring {config.out}", len(done) / (len(suites.tasks) * config.eval.samples))

    files = RolloutFiles.folder(Path(config.out))
    return run_eval(Subject(config.model, config, folder), suites, files, watch, train_tasks(source, config))


def run_eval(
    subject: Subject,
    suites: Suites,
    files: RolloutFiles,
    watch: OnRollout = unwatched,
    train: list[Task] | None = None,
    fresh: bool = False,
    parallel: int = PARALLEL,
) -> dict[str, Any]:
    """The numbers of `results.json`. Saved rollouts are passed to `watch` first.

    `train` are the training tasks, if known, for the contamination check.
    """
    config = subject.config
    tasks = suites.tasks
    collector = Collector(config, subject.folder, subject.remote_name)
    with files.writing("evaluation", collector, tasks, fresh) as files:
        overlap = contamination(tasks, train) if train is not None else None
        started = time.monotonic()
        groups, counted = collect_into(files, collector, tasks, config.eval.samples, "eval", watch, parallel)
        rollouts = [rollout for group in groups for rollout in group]
        rows = [row_of(each, suites.by_id[each.task], suites.suite_of[each.task]) for each in rollouts]
        numbers = measure(rows)
        result = {
            "model": subject.label,
            "suites": suites.names,
            **summarize(groups),
            "tasks": len(tasks),
            "seconds": time.monotonic() - started,
            **numbers,
            **{f"{key}_ci": numbers["intervals"].get(key) for key in ("solved", "invalid_per_100")},
            "samples": config.eval.samples,
            **counted,
            "crashes": crashes(groups),
            "contamination": overlap,
            "rows": [asdict(row) for row in rows],
        }
        write_atomic(files.results, json.dumps(result, indent=1) + "\n")
        return result
