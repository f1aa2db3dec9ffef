"""A run as data frames: one row per rollout, per message and per target.

import offbook.api
frames = offbook.api.frames("runs/train")
frames.rollouts.groupby("step").solved.mean()
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from offbook.core.runfolder import RunFolder, load_lines
from offbook.evals.metrics import row_of
from offbook.types import OffbookError, Rollout

Library = Literal["pandas", "polars"]
Record = dict[str, Any]


@dataclass
class Tables:
    """Three tables: data frames, or lists of rows."""

    rollouts: Any = field(default_factory=list[Record])
    messages: Any = field(default_factory=list[Record])
    targets: Any = field(default_factory=list[Record])
    unreadable: int = 0  # lines of the run that were skipped


def frames(run: Path | str, library: Library | None = None) -> Tables:
    """Data frames of a run or evaluation. Without `library`: pandas if it is installed, else polars."""
    for wanted in [library] if library else ["pandas", "polars"]:
        try:
            frame = importlib.import_module(wanted).DataFrame
        except ImportError:
            continue
        found = records(RunFolder.open(run))
        return Tables(frame(found.rollouts), frame(found.messages), frame(found.targets), found.unreadable)
    raise OffbookError(f"frames need {library or 'pandas or polars'}: pip install 'offbook[frames]'")


def stored_rollouts(folder: RunFolder) -> Iterator[tuple[str, list[Rollout], int]]:
    """Rollouts of every step and evaluation of a run, and the number of unreadable lines of each."""
    for step in folder.steps():
        yield str(step), *folder.rollouts(step)
    for path in sorted((folder.path / "eval").glob("*.rollouts.jsonl")):
        yield f"eval/{path.name.removesuffix('.rollouts.jsonl')}", *load_lines(path, Rollout)


def records(folder: RunFolder) -> Tables:
    found = Tables()
    for where, rollouts, broken in stored_rollouts(folder):
        found.unreadable += broken
        place = {"step": int(where) if where.isdigit() else None, "where": where}
        for rollout in rollouts:
            row = row_of(rollout, None)
            found.rollouts.append(
                {
                    **place,
                    "rollout": rollout.id,
                    "task": rollout.task,
                    "group": rollout.group,
                    "stop": rollout.stop,
                    "flags": ", ".join(row.flags),
                    **row.numbers,
                    **{f"reward/{name}": value for name, value in rollout.reward.parts.items()},
                    "diff": rollout.diff,
                }
            )
            found.messages += [place | message for message in _messages(rollout)]
    for step in folder.steps():
        feedback, broken = folder.feedback(step)
        found.unreadable += broken
        for item in feedback:
            found.targets.append(
                {
                    "step": step,
                    **asdict(item.target),
                    "hint": item.hint.text,
                    "tokens": len(item.pieces),
                    "student": float(sum(item.student)),
                    "teacher": float(sum(item.teacher)),
                    "divergence": float(sum(item.divergence)),
                    "peak": max(item.divergence, default=0.0),
                }
            )
    return found


def _messages(rollout: Rollout) -> Iterator[Record]:
    for segment_number, segment in enumerate(rollout.segments):
        for number, message in enumerate(segment.messages):
            body = slice(message.body, message.end)
            yield {
                "rollout": rollout.id,
                "task": rollout.task,
                "segment": segment_number,
                "message": number,
                "role": message.role,
                "text": message.text,
                "tokens": message.end - message.start,
                "sampled": any(segment.sampled[body]),
                "logprob": float(sum(segment.logprobs[body])),
                "calls": ", ".join(call.name for call in message.calls),
                "status": message.status or "",
            }
