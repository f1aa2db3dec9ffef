"""A run as data frames: one row per rollout, per message and per target.

import offbook.api
frames = offbook.api.frames("runs/train")
frames.rollouts.groupby("step").solved.mean()
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from offbook.core.runfolder import RunFolder, load_lines
from offbook.evals.metrics import row_of
from offbook.types import Feedback, OffbookError, Rollout

Library = Literal["pandas", "polars"]
Record = dict[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class Tables(Generic[T]):
    """Three tables: data frames, or lists of rows."""

    rollouts: T
    messages: T
    targets: T
    unreadable: int = 0  # lines of the run that were skipped


def frames(run: Path | str, library: Library | None = None) -> Tables[Any]:
    """Data frames of a run or evaluation. Without `library`: pandas if it is installed, else polars."""
    module = _library(library)
    found = records(RunFolder.open(run))
    rollouts, messages, targets = map(module.DataFrame, (found.rollouts, found.messages, found.targets))
    return Tables(rollouts, messages, targets, found.unreadable)


def _library(name: Library | None) -> Any:
    for wanted in [name] if name else ["pandas", "polars"]:
        try:
            return importlib.import_module(wanted)
        except ImportError:
            continue
    raise OffbookError(f"frames need {name or 'pandas or polars'}: pip install 'offbook[frames]'")


def stored_rollouts(folder: RunFolder) -> Iterator[tuple[str, list[Rollout], int]]:
    """Rollouts of every step and evaluation of a run, and the number of unreadable lines of each."""
    for step in folder.steps():
        yield str(step), *folder.rollouts(step)
    for path in sorted((folder.path / "eval").glob("*.rollouts.jsonl")):
        yield f"eval/{path.name.removesuffix('.rollouts.jsonl')}", *load_lines(path, Rollout)


def records(folder: RunFolder) -> Tables[list[Record]]:
    found: Tables[list[Record]] = Tables([], [], [])
    for where, rollouts, broken in stored_rollouts(folder):
        found.unreadable += broken
        step = int(where) if where.isdigit() else None
        for rollout in rollouts:
            found.rollouts.append({"step": step, "where": where, **_rollout(rollout)})
            found.messages.extend({"step": step, "where": where, **one} for one in _messages(rollout))
    for step in folder.steps():
        feedback, broken = folder.feedback(step)
        found.unreadable += broken
        found.targets.extend({"step": step, **_target(item)} for item in feedback)
    return found


def _rollout(rollout: Rollout) -> Record:
    row = row_of(rollout, None)
    flags = ", ".join(row.flags)
    about = {"rollout": rollout.id, "task": rollout.task, "group": rollout.group, "stop": rollout.stop, "flags": flags}
    parts = {f"reward/{name}": value for name, value in rollout.reward.parts.items()}
    return {**about, **row.numbers, **parts, "diff": rollout.diff}


def _messages(rollout: Rollout) -> Iterator[Record]:
    for segment_number, segment in enumerate(rollout.segments):
        for number, message in enumerate(segment.messages):
            sampled = segment.logprobs[message.body : message.end]
            yield {
                "rollout": rollout.id,
                "task": rollout.task,
                "segment": segment_number,
                "message": number,
                "role": message.role,
                "text": message.text,
                "tokens": message.end - message.start,
                "sampled": any(segment.sampled[message.body : message.end]),
                "logprob": float(sum(sampled)),
                "calls": ", ".join(call.name for call in message.calls),
                "status": message.status or "",
            }


def _target(item: Feedback) -> Record:
    return {
        **asdict(item.target),
        "hint": item.hint.text,
        "tokens": len(item.pieces),
        "student": float(sum(item.student)),
        "teacher": float(sum(item.teacher)),
        "divergence": float(sum(item.divergence)),
        "peak": max(item.divergence, default=0.0),
    }
