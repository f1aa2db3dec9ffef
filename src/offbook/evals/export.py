"""Rollouts in other formats: ATIF v1 or OpenAI messages as a file, and data frames with a row per rollout and
per target.

import offbook.api
frames = offbook.api.frames("runs/train")
frames.rollouts.groupby("step").solved.mean()

In a file, a rollout with several segments becomes several conversations; each starts from a summary, as the agent saw
it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import offbook
from offbook.core.runfolder import RunFolder, load_lines, write_atomic
from offbook.evals.metrics import row_of
from offbook.types import Message, OffbookError, Rollout, Segment

ATIF = "ATIF-v1.4"
SOURCES = {"user": "user", "system": "system", "assistant": "agent"}
Record = dict[str, Any]


def export(folder: RunFolder, to: str, out: Path) -> tuple[int, int]:
    """Write a file of one JSON object a line. Returns the numbers of rollouts and of unreadable lines."""
    lines = []
    rollouts = 0
    unreadable = 0
    for where, stored, broken in stored_rollouts(folder):
        unreadable += broken
        rollouts += len(stored)
        for rollout in stored:
            conversations = (
                to_atif(rollout) if to == "atif" else ({**each, "step": where} for each in to_messages(rollout))
            )
            lines += [json.dumps(each) + "\n" for each in conversations]
    if not rollouts:
        raise OffbookError(f"{folder.path} has no rollouts to export ({unreadable} lines cannot be read)")
    write_atomic(out, "".join(lines))
    return rollouts, unreadable


def to_messages(rollout: Rollout) -> Iterator[dict[str, Any]]:
    for number, segment in enumerate(rollout.segments):
        messages = []
        for message, ids, answers in _turns(segment):
            said: dict[str, Any] = {"role": message.role, "content": _spoken(message)}
            calls = zip(ids, message.calls, strict=True)
            functions = [(id, {"name": call.name, "arguments": json.dumps(call.arguments)}) for id, call in calls]
            if functions:
                said["tool_calls"] = [{"id": id, "type": "function", "function": each} for id, each in functions]
            messages += [said, *({"role": "tool", "tool_call_id": id, "content": text} for id, text in answers)]
        yield {
            "id": _name(rollout, number),
            "task": rollout.task,
            "messages": messages,
            "reward": rollout.reward.total,
            "solved": rollout.solved,
            "stop": rollout.stop,
        }


def to_atif(rollout: Rollout) -> Iterator[dict[str, Any]]:
    for number, segment in enumerate(rollout.segments):
        yield {
            "schema_version": ATIF,
            "session_id": _name(rollout, number),
            "agent": {"name": "offbook", "version": offbook.__version__, "extra": {"task": rollout.task}},
            "steps": list(_steps(segment)),
            "final_metrics": {
                "total_prompt_tokens": rollout.usage.prompt_tokens,
                "total_completion_tokens": rollout.usage.sampled_tokens,
                "total_cost_usd": rollout.usage.cost,
                "total_steps": rollout.usage.turns,
                "extra": {"reward": rollout.reward.parts, "stop": rollout.stop, "usage": asdict(rollout.usage)},
            },
        }


def _name(rollout: Rollout, segment: int) -> str:
    return rollout.id if len(rollout.segments) == 1 else f"{rollout.id}#{segment}"


def _turns(segment: Segment) -> Iterator[tuple[Message, list[str], list[tuple[str, str]]]]:
    """Each message except tool results, with ids for its calls, and the tool results after it with their call ids."""
    messages = segment.messages
    starts = [number for number, message in enumerate(messages) if message.role != "tool"]
    for turn, (start, end) in enumerate(pairwise([*starts, len(messages)])):
        answers = [message.text for message in messages[start + 1 : end]]
        ids = [f"call_{turn}_{place}" for place in range(len(messages[start].calls))]
        yield messages[start], ids, list(zip_longest(ids[: len(answers)], answers, fillvalue=""))


def _steps(segment: Segment) -> Iterator[dict[str, Any]]:
    """Token ids and log-probabilities are as sampled."""
    for number, (message, ids, answers) in enumerate(_turns(segment), 1):
        step: dict[str, Any] = {"step_id": number, "source": SOURCES[message.role], "message": _spoken(message)}
        if message.calls:
            step["tool_calls"] = [
                {"tool_call_id": id, "function_name": call.name, "arguments": call.arguments}
                for id, call in zip(ids, message.calls, strict=True)
            ]
        own = [place for place in range(message.body, message.end) if segment.sampled[place]]
        if own:
            step["metrics"] = {
                "prompt_tokens": message.body,
                "completion_tokens": len(own),
                "completion_token_ids": [segment.ids[place] for place in own],
                "logprobs": [segment.logprobs[place] for place in own],
            }
        if answers:
            results = [{"source_call_id": id or None, "content": text} for id, text in answers]
            step["observation"] = {"results": results}
        yield step


def _spoken(message: Message) -> str:
    """Text before the calls, which have their own field."""
    return message.text[: message.calls[0].start].rstrip() if message.calls else message.text


@dataclass
class Tables:
    """Two tables: data frames, or lists of rows."""

    rollouts: Any = field(default_factory=list[Record])
    targets: Any = field(default_factory=list[Record])
    unreadable: int = 0  # lines of the run that were skipped


def frames(run: Path | str) -> Tables:
    """pandas data frames of a run or evaluation."""
    try:
        DataFrame = importlib.import_module("pandas").DataFrame
    except ImportError:
        raise OffbookError("frames need pandas: pip install 'offbook[frames]'") from None
    found = records(RunFolder.open(run))
    return Tables(DataFrame(found.rollouts), DataFrame(found.targets), found.unreadable)


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
