"""What a run is, as far as its folder says: the head of every page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from offbook.view.index import RunIndex, said_in
from offbook.view.lines import is_number

FROM_DATA = {  # what runs without tasks did, by verb
    "distill": "hints were distilled into {model} for {steps}, on recorded conversations of {sources}",
    "sft": "{model} was trained for {steps} to imitate conversations of {sources}",
    "pretrain": "{model} was pretrained for {steps} on code of {sources}",
    "mtp": "a draft head for {model} was trained for {steps} on text of {sources}",
    "live": "{model} was trained for {steps} on {sources}",
}
SETTLED_BY = {"train": "train", "distill": "train", "live": "train", "mtp": "mtp"}  # settings that say how many steps
MAX_SOURCES = 3  # named in a sentence
RECENT_S = 60.0  # a run that wrote less than this ago, or than three steps take, counts as going on


def overview(run: RunIndex) -> dict[str, Any]:
    """What every page needs of a run, and how to see that it went on."""
    rows, flat = run.rows(), flatten(run.config)
    last = max((row["step"] for row in rows), default=0)
    wanted = _wanted(run)
    over = last >= wanted if wanted is not None else bool(run.evals)
    age = time.time() - run.changed_at
    step_s = sum(rows[-1][key] for key in ("rollout_s", "train_s") if is_number(rows[-1].get(key))) if rows else 0.0
    silent = list(takewhile(lambda said: isinstance(said, str), (row.get("no_signal") for row in reversed(rows))))
    return {
        "name": run.name,
        "version": run.version,
        "sentence": sentence([run]),
        "trains": run.trains,
        "verb": run.verb,
        "steps": last,
        "no_signal": {"steps": len(silent), "why": next(iter(silent), "")},  # of the last steps
        "wanted": wanted,
        "live": bool(rows or run.rollouts or run.now) and not over and age < max(RECENT_S, 3 * step_s),
        "changed_at": run.changed_at,
        "rollouts": sum(len(lines.places) for lines in run.rollouts.values()),
        "targets": sum(len(lines.places) for lines in run.feedback.values()),
        "unreadable": dict(run.unreadable),
        "look": said_in(run.looks),
        "decisions": len(said_in(run.decisions)),
        "now": {name: value for name, value in run.now.items() if is_number(value)},
        "evals": {name: _measured(result, run.verb) for name, result in run.evals.items()},
        "config": {name: value for name, value in flat.items() if name != "out"},
    }


def _wanted(run: RunIndex) -> float | None:
    """How many steps the run is to have, where its folder says so."""
    section = SETTLED_BY.get(run.verb)
    steps = flatten(run.config).get(f"{section}.steps") if section else run.data.get("steps")
    return steps if run.trains and is_number(steps) else None


def _measured(result: dict[str, Any], verb: str) -> dict[str, Any]:
    """The numbers, their intervals, and which tasks they are of. An evaluation also has a row for each rollout, and
    those stay in the folder."""
    numbers = {name: value for name, value in result.items() if is_number(value) or name.endswith("_ci")}
    return {**numbers, **_measured_on(result, verb)}


def _measured_on(result: dict[str, Any], verb: str) -> dict[str, str]:
    """By the evaluation's own file, which says less where it is older. A run that learned from data never saw the tasks
    that the file compares with."""
    count: Any = result.get("tasks")
    overlap = result.get("contamination")
    if not is_number(count):
        return {"heading": "Measured", "on": "", "overlap": ""}
    if not isinstance(overlap, dict) or verb != "train":
        overlap = {}
    num_trained_on: Any = overlap.get("same_task")
    which = {0: "held-out ", count: "training "}.get(num_trained_on, "")
    on = plural(int(count), f"{which}task")
    if isinstance(suites := result.get("suites"), list):
        on += f" of {', '.join(map(str, suites))}"
    if num_trained_on and not which:
        on += f", {num_trained_on} of them trained on"
    shared = f"{overlap.get('contained')} of them share words or code with training tasks."
    return {
        "heading": f"Measured on {which}tasks" if which else "Measured",
        "on": on,
        "overlap": shared if overlap.get("contained") and num_trained_on != count else "",
    }


def sentence(runs: Sequence[RunIndex]) -> str:
    """What was done, as far as the folders say it and agree."""
    trained = [run for run in runs if run.trains]
    verbs = {run.verb for run in trained}
    if len(verbs) > 1:
        return " ".join(f"{run.name}: {sentence([run])}" for run in trained)
    config = _agreed([flatten(run.config) for run in trained or runs])
    model = f"the model {config['model']}" if "model" in config else "a model"
    if not trained:
        labels = {str(result["model"]) for run in runs for result in run.evals.values() if "model" in result}
        model = f"the model {labels.pop()}" if len(labels) == 1 else model
        tasks = {place.said["task"] for run in runs for lines in run.rollouts.values() for place in lines.places}
        count = sum(len(lines.places) for run in runs for lines in run.rollouts.values())
        return _capital(
            f"{model} worked on {plural(len(tasks), 'task')} in {plural(count, 'rollout')}, without training."
        )
    [verb] = verbs
    done, wanted = max(len({row["step"] for row in run.rows()}) for run in trained), {_wanted(run) for run in trained}
    steps = plural(done, "step")
    if len(wanted) == 1 and (of := wanted.pop()) is not None:
        steps = plural(int(of), "step") if done >= of else f"{done} of {plural(int(of), 'step')}"
    if verb == "train":
        text = f"{model} was trained for {steps}{_rollouts_and_tasks(config, trained)}"
    else:
        sources = {tuple(map(str, run.data.get("sources", []))) for run in trained}
        names = sources.pop() if len(sources) == 1 else ()
        named = ", ".join(names[:MAX_SOURCES]) or "unnamed data"
        named += f" and {len(names) - MAX_SOURCES} more" if len(names) > MAX_SOURCES else ""
        text = FROM_DATA.get(verb, FROM_DATA["live"]).format(model=model, steps=steps, sources=named)
    measured_on = {_measured_on(result, verb)["on"] for run in trained for result in run.evals.values()}
    if len(measured_on) == 1 and (tasks_measured := measured_on.pop()):
        text += f", and measured on {tasks_measured}"
    if is_number(config.get("seed")):
        text += f" (seed {config['seed']})"
    return _capital(text + ".")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _rollouts_and_tasks(config: dict[str, Any], runs: Sequence[RunIndex]) -> str:
    """The number of tasks is what the folders record: settings know that of made-up tasks alone."""
    text = ""
    groups, group_size = config.get("train.groups"), config.get("train.group_size")
    if is_number(groups) and is_number(group_size):
        text += f" of {groups * group_size} rollouts"
    counts = set()
    for run in runs:
        recorded = {id for id, task in run.recorded().items() if task.get("split") == "train"}
        steps = [lines for source, lines in run.rollouts.items() if source.startswith("step_")]
        worked_on = {place.said["task"] for lines in steps for place in lines.places}
        counts.add(len(recorded | worked_on) if recorded else 0)
    num_tasks = counts.pop() if len(counts) == 1 else 0
    return text + (f" on {plural(num_tasks, 'task')}" if num_tasks else "")


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
