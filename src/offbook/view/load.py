"""What the report needs from the run folders, and which rollouts it shows. What cannot be read is counted."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from offbook.runfolder import RunFolder
from offbook.types import Feedback, Rollout
from offbook.view.markup import plural

LARGEST = 1e300  # a JSON file can hold whole numbers that are no floats
MAX_STEPS_READ = 48  # feedback files opened per run when picking rollouts; a long run is sampled evenly


@dataclass(slots=True)
class Run:
    name: str
    folder: RunFolder
    config: dict[str, Any]
    rows: list[dict[str, Any]]  # of metrics.jsonl, each with a numeric `step`
    final: dict[str, Any] | None
    unreadable: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Pick:
    """One rollout to show, with every target found in it."""

    run: Run
    step: int
    rollout: Rollout
    feedback: list[Feedback]


def load_run(name: str, path: Path) -> Run:
    folder = RunFolder.open(path)
    lines, broken = folder.metrics()
    rows = [row for row in lines if isinstance(row, dict) and is_number(row.get("step"))]
    unreadable = Counter({"metrics line": broken + len(lines) - len(rows)})
    config: dict[str, Any] = {}
    try:
        config = tomllib.loads(folder.config_file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        unreadable["config file"] += 1
    return Run(name, folder, config, rows, folder.read_eval("final"), unreadable)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def series(run: Run, key: str) -> list[tuple[float, float]]:
    """(step, value) where the row has a finite number under `key`."""
    return [(row["step"], row[key]) for row in run.rows if is_number(row.get(key))]


def sentence(configs: list[dict[str, Any]], rows: list[list[dict[str, Any]]], measured: bool) -> str:
    """What was done, as far as the configurations say it and agree; `measured` says whether on held-out tasks too."""
    config = _agreed([flatten(one) for one in configs])
    wanted, done = config.get("train.steps"), max((len({row["step"] for row in one}) for one in rows), default=0)
    steps = plural(done, "step")
    if is_number(wanted):
        steps = plural(int(wanted), "step") if done >= wanted else f"{done} of {plural(int(wanted), 'step')}"
    text = f"The model {config['model']}" if "model" in config else "A model"
    text += f" was trained for {steps}"
    groups, group_size = config.get("train.groups"), config.get("train.group_size")
    if is_number(groups) and is_number(group_size):
        text += f" of {groups * group_size} rollouts"
    if is_number(config.get("tasks.num_train")):
        text += f" on {plural(config['tasks.num_train'], 'task')}"
    if measured and is_number(config.get("tasks.num_heldout")):
        text += f", and measured on {config['tasks.num_heldout']} others"
    if is_number(config.get("seed")):
        text += f" (seed {config['seed']})"
    return text + "."


def _agreed(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all runs share."""
    first = configs[0] if configs else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in configs)}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def peak(feedback: Feedback) -> float:
    return max(feedback.divergence, default=0.0)


def pick_rollouts(runs: list[Run], limit: int) -> list[Pick]:
    """Rollouts with targets from early to late, first the rules not shown yet, then the ones the hint moved most.

    Without any target: a few plain rollouts, first, middle and last.
    """
    found = {run.name: _read_feedback(run) for run in runs}
    hinted = [run for run in runs if found[run.name]]
    picks: list[Pick] = []
    shown: Counter[str] = Counter()
    for index, run in enumerate(hinted):
        slots = limit // len(hinted) + (index < limit % len(hinted))
        steps = list(found[run.name])
        for share in _split(steps, slots):
            candidates = [(step, one) for step in share for one in found[run.name][step]]
            candidates.sort(key=lambda pair: (shown[pair[1].target.rule], -peak(pair[1]), pair[0]))
            pick = _first_stored(run, candidates, found[run.name])
            if pick:
                shown.update(one.target.rule for one in pick.feedback)
                picks.append(pick)
    return picks or _plain(runs, min(limit, 3))


def _read_feedback(run: Run) -> dict[int, list[Feedback]]:
    """Feedback by step, leaving out steps without any."""
    steps = [share[0] for share in _split(run.folder.steps(), MAX_STEPS_READ)]
    found = {}
    for step in steps:
        records, broken = run.folder.feedback(step)
        run.unreadable["feedback line"] += broken
        if records:
            found[step] = records
    return found


def _first_stored(run: Run, candidates: list[tuple[int, Feedback]], found: dict[int, list[Feedback]]) -> Pick | None:
    """The first candidate whose rollout is stored and has the message that the target names."""
    stored: dict[int, dict[str, Rollout]] = {}
    for step, feedback in candidates:
        if step not in stored:
            rollouts, broken = run.folder.rollouts(step)
            run.unreadable["rollout line"] += broken
            stored[step] = {rollout.id: rollout for rollout in rollouts}
        rollout = stored[step].get(feedback.target.rollout)
        if rollout and _has_message(rollout, feedback):
            same = [one for one in found[step] if one.target.rollout == rollout.id and _has_message(rollout, one)]
            return Pick(run, step, rollout, same)
        run.unreadable["orphaned target"] += 1
    return None


def _has_message(rollout: Rollout, feedback: Feedback) -> bool:
    at = feedback.target
    return 0 <= at.segment < len(rollout.segments) and 0 <= at.message < len(rollout.segments[at.segment].messages)


def _plain(runs: list[Run], limit: int) -> list[Pick]:
    picks: list[Pick] = []
    for run in runs:
        for share in _split(run.folder.steps(), max(1, limit // len(runs))):
            rollouts, broken = run.folder.rollouts(share[0])
            run.unreadable["rollout line"] += broken
            if rollouts:
                picks.append(Pick(run, share[0], rollouts[0], []))
    return picks[:limit]


def _split(items: list[int], parts: int) -> list[list[int]]:
    """At most `parts` runs of neighbours, as even as possible, none of them empty."""
    parts = min(parts, len(items))
    return [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]
