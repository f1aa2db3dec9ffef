"""An evaluation and its folder. Each rollout is on disk when it is over, so a killed one goes on where it stopped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbook.config import Config
from offbook.evals.contamination import contamination
from offbook.evals.metrics import measure, row_of
from offbook.evals.place import Place
from offbook.evals.suites import Suites
from offbook.loop.claim import claim_of, differing
from offbook.loop.evaluate import PARALLEL, gather, rollout_ids, summary
from offbook.runfolder import dump_lines, load_lines, write_atomic
from offbook.types import OffbookError, Rollout, Task

Seen = Callable[[Rollout], None]
CHECKPOINT = {"model", "weights"}  # of a claim: what a run that was trained further changes


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a model in a folder or, without one, the one behind `config.model`."""

    label: str
    config: Config
    folder: Path | None
    remote_name: str = ""


def run_eval(
    subject: Subject,
    suites: Suites,
    place: Place,
    on_rollout: Seen = lambda rollout: None,
    train: list[Task] | None = None,
    fresh: bool = False,
    parallel: int = PARALLEL,
) -> dict[str, Any]:
    """The numbers of `results.json`. Rollouts that are there already are told to `on_rollout` first.

    `train` are the tasks that the model was trained on, where they are known: what of the suites is in them is said.
    """
    kept, unreadable = _begin(subject, suites, place, fresh)
    overlap = contamination(suites.tasks, train) if train is not None else None
    started = time.monotonic()
    for rollout in kept:
        on_rollout(rollout)

    def keep(rollout: Rollout, over: bool) -> None:
        if over:
            with open(place.rollouts, "ab") as file:
                file.write(dump_lines([rollout]))
            on_rollout(rollout)

    groups = asyncio.run(
        gather(suites.tasks, subject.config, subject.folder, subject.remote_name, kept, keep, parallel)
    )
    rollouts = [rollout for group in groups for rollout in group]
    rows = [row_of(rollout, suites.by_id[rollout.task], suites.suite_of[rollout.task]) for rollout in rollouts]
    numbers = measure(rows)
    result = {
        "model": subject.label,
        "suites": suites.names,
        **summary(groups, time.monotonic() - started),
        **numbers,
        **{f"{key}_ci": numbers["intervals"].get(key) for key in ("solved", "invalid_per_100")},
        "samples": subject.config.eval.samples,
        "resumed": len(kept),
        "unreadable": unreadable,
        "contamination": overlap,
        "rows": [asdict(row) for row in rows],
    }
    # Again and in order: what a task's other rollouts showed of it counts for all of them.
    write_atomic(place.rollouts, dump_lines(rollouts))
    write_atomic(place.results, json.dumps(result, indent=1) + "\n")
    return result


def _begin(subject: Subject, suites: Suites, place: Place, fresh: bool) -> tuple[list[Rollout], int]:
    """The rollouts that are there from before, and how many lines of the file could not be read."""
    claim = claim_of(subject.config, subject.folder, subject.remote_name, suites.tasks)
    before = json.loads(place.claim.read_text()) if place.claim.is_file() else {}
    if not before and place.config and place.config.exists():
        raise OffbookError(f"{place.claim.parent} holds a run and no evaluation; give another --out")
    differs = differing(before, claim)
    if fresh or place.is_empty or (place.replaceable and differs and CHECKPOINT.issuperset(differs)):
        place.rollouts.unlink(missing_ok=True)
        place.results.unlink(missing_ok=True)
    elif differs:
        held = place.results if place.replaceable else place.claim.parent
        another = f"another {', '.join(differs)}" if before else "of what, it does not say"
        raise OffbookError(f"{held} holds another evaluation ({another}); give another --out, or --fresh")
    write_atomic(place.claim, json.dumps(claim, indent=1) + "\n")
    if place.config:
        config = subject.config.model_copy(update={"out": str(place.config.parent)})
        write_atomic(place.config, config.to_toml())
    place.rollouts.parent.mkdir(parents=True, exist_ok=True)
    if not place.rollouts.is_file():
        return [], 0
    stored, unreadable = load_lines(place.rollouts, Rollout)
    wanted = {id for task in suites.tasks for id in rollout_ids(task, subject.config.eval.samples)}
    kept = {rollout.id: rollout for rollout in stored if rollout.id in wanted}
    write_atomic(place.rollouts, dump_lines(kept.values()))  # the next line must not come behind half of one
    return list(kept.values()), unreadable


def without_rows(result: Mapping[str, Any]) -> dict[str, Any]:
    """For people and pipes: a line a rollout is for the file."""
    return {key: value for key, value in result.items() if key != "rows"}
