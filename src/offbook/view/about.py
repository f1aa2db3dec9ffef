"""What a run is, as far as its folder says: the head of every page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from offbook.view.index import RunIndex, said_in
from offbook.view.lines import is_number

RECENT_S = 60.0  # a run that wrote less than this ago, or than three steps take, counts as going on


def overview(run: RunIndex) -> dict[str, Any]:
    """What every page needs of a run, and how to see that it went on."""
    rows, flat = run.rows(), flatten(run.config)
    last = max((row["step"] for row in rows), default=0)
    wanted = flat.get("train.steps") if run.trains else None
    over = last >= wanted if is_number(wanted) else bool(run.evals)
    age = time.time() - run.changed_at
    step_s = sum(rows[-1][key] for key in ("rollout_s", "train_s") if is_number(rows[-1].get(key))) if rows else 0.0
    return {
        "name": run.name,
        "version": run.version,
        "sentence": sentence([run]),
        "trains": run.trains,
        "steps": last,
        "wanted": wanted if is_number(wanted) else None,
        "live": bool(rows or run.rollouts or run.now) and not over and age < max(RECENT_S, 3 * step_s),
        "changed_at": run.changed_at,
        "rollouts": sum(len(lines.places) for lines in run.rollouts.values()),
        "targets": sum(len(lines.places) for lines in run.feedback.values()),
        "unreadable": dict(run.unreadable),
        "look": said_in(run.looks),
        "decisions": len(said_in(run.decisions)),
        "now": {name: value for name, value in run.now.items() if is_number(value)},
        "evals": {name: _measured(result) for name, result in run.evals.items()},
        "config": {name: value for name, value in flat.items() if name != "out"},
    }


def _measured(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers and their intervals; an evaluation also has a row for each rollout, and those stay in the folder."""
    return {name: value for name, value in result.items() if is_number(value) or name.endswith("_ci")}


def sentence(runs: Sequence[RunIndex]) -> str:
    """What was done, as far as the configurations say it and agree."""
    trained = [run for run in runs if run.trains]
    config = _agreed([flatten(run.config) for run in trained or runs])
    text = f"The model {config['model']}" if "model" in config else "A model"
    if not trained:
        tasks = {place.said["task"] for run in runs for lines in run.rollouts.values() for place in lines.places}
        count = sum(len(lines.places) for run in runs for lines in run.rollouts.values())
        return f"{text} worked on {plural(len(tasks), 'task')} in {plural(count, 'rollout')}, without training."
    wanted, done = config.get("train.steps"), max(len({row["step"] for row in run.rows()}) for run in trained)
    steps = plural(done, "step")
    if is_number(wanted):
        steps = plural(int(wanted), "step") if done >= wanted else f"{done} of {plural(int(wanted), 'step')}"
    text += f" was trained for {steps}"
    groups, group_size = config.get("train.groups"), config.get("train.group_size")
    if is_number(groups) and is_number(group_size):
        text += f" of {groups * group_size} rollouts"
    num_tasks = _num_tasks(trained) or config.get("tasks.num_train")
    if is_number(num_tasks):
        text += f" on {plural(int(num_tasks), 'task')}"
    if any(run.evals for run in trained) and is_number(config.get("tasks.num_heldout")):
        text += f", and measured on {config['tasks.num_heldout']} others"
    if is_number(config.get("seed")):
        text += f" (seed {config['seed']})"
    return text + "."


def _num_tasks(runs: Sequence[RunIndex]) -> int:
    """To train on, by what the folders record: settings know the number of made-up tasks alone. 0 where it is unknown,
    or not the same in all runs."""
    counts = set()
    for run in runs:
        recorded = {id for id, task in run.recorded().items() if task.get("split") == "train"}
        steps = [lines for source, lines in run.rollouts.items() if source.startswith("step_")]
        worked_on = {place.said["task"] for lines in steps for place in lines.places}
        counts.add(len(recorded | worked_on) if recorded else 0)
    return counts.pop() if len(counts) == 1 else 0


def _agreed(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all runs share."""
    first = configs[0] if configs else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in configs)}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
