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
    rows = run.rows()
    last = max((row["step"] for row in rows), default=0)
    wanted = _wanted(run)
    over = last >= wanted if wanted is not None else bool(run.evals)
    age = time.time() - run.changed_at
    step_s = sum(rows[-1][key] for key in ("rollout_s", "train_s") if is_number(rows[-1].get(key))) if rows else 0.0
    silent = list(takewhile(lambda said: isinstance(said, str), (row.get("no_signal") for row in reversed(rows))))
    return {
        "name": run.name,
        "version": run.version,
        "sentence": _sentence(run),
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
        "look": said_in(run.files["look"]),
        "decisions": len(said_in(run.files["decision"])),
        "now": {name: value for name, value in run.now.items() if is_number(value)},
        "evals": {name: _measured(result, run.verb) for name, result in run.evals.items()},
        "config": {name: value for name, value in flatten(run.config).items() if name != "out"},
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
    which, on, overlap = _measured_on(result, verb)
    return {**numbers, "heading": f"Measured on {which}tasks" if which else "Measured", "on": on, "overlap": overlap}


def _measured_on(result: dict[str, Any], verb: str) -> tuple[str, str, str]:
    """Which tasks: held-out or training ones where all are, then all in words, and what they share with others."""
    count = result.get("tasks")
    if not is_number(count):
        return "", "", ""
    overlap = result.get("contamination") if verb == "train" else None  # learned from data, a run never saw the tasks
    overlap = overlap if isinstance(overlap, dict) else {}
    trained_on: Any = overlap.get("same_task")
    which = {0: "held-out ", count: "training "}.get(trained_on, "")
    on = plural(int(count), f"{which}task")
    if isinstance(suites := result.get("suites"), list):
        on += f" of {', '.join(map(str, suites))}"
    if trained_on and not which:
        on += f", {trained_on} of them trained on"
    contained = overlap.get("contained") if trained_on != count else 0
    return which, on, f"{contained} of them share words or code with training tasks." if contained else ""


def sentence(runs: Sequence[RunIndex]) -> str:
    """What was done, as far as the folders say it: once if all say the same, else run by run."""
    trained = [run for run in runs if run.trains] or runs
    said = {run.name: _sentence(run) for run in trained}
    return said[trained[0].name] if len({*said.values()}) == 1 else " ".join(f"{n}: {text}" for n, text in said.items())


def _sentence(run: RunIndex) -> str:
    model = f"the model {run.config['model']}" if "model" in run.config else "a model"
    places = {source: lines.places for source, lines in run.rollouts.items()}
    if not run.trains:
        labels = {str(result["model"]) for result in run.evals.values() if "model" in result}
        model = f"the model {labels.pop()}" if len(labels) == 1 else model
        tasks = {place.said["task"] for found in places.values() for place in found}
        count = plural(sum(map(len, places.values())), "rollout")
        return _capital(f"{model} worked on {plural(len(tasks), 'task')} in {count}, without training.")
    done = len({row["step"] for row in run.rows()})
    wanted = _wanted(run)
    steps = plural(done, "step")
    if wanted is not None and done < wanted:
        steps = f"{done} of {plural(int(wanted), 'step')}"
    if run.verb == "train":
        text = f"{model} was trained for {steps}"
        tasks = {id for id, task in run.recorded().items() if task.get("split") == "train"}
        if tasks:
            steps_places = (place for source, found in places.items() if source.startswith("step_") for place in found)
            text += f" on {plural(len(tasks | {place.said['task'] for place in steps_places}), 'task')}"
    else:
        names = [str(name) for name in run.data.get("sources", [])]
        named = ", ".join(names[:MAX_SOURCES]) or "unnamed data"
        named += f" and {len(names) - MAX_SOURCES} more" if len(names) > MAX_SOURCES else ""
        text = FROM_DATA.get(run.verb, FROM_DATA["live"]).format(model=model, steps=steps, sources=named)
    measured_on = {_measured_on(result, run.verb)[1] for result in run.evals.values()}
    if len(measured_on) == 1 and "" not in measured_on:
        text += f", and measured on {measured_on.pop()}"
    return _capital(text + ".")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
