"""Export rollouts: ATIF v1, OpenAI messages, parquet tables.

A rollout with several segments becomes several conversations; each starts from a summary, as the agent saw it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import offbook
from offbook.core.runfolder import RunFolder, write_atomic, writing
from offbook.evals.frames import records, stored_rollouts
from offbook.types import Message, OffbookError, Rollout, Segment

ATIF = "ATIF-v1.4"
SOURCES = {"user": "user", "system": "system", "assistant": "agent"}


@dataclass(frozen=True, slots=True)
class Written:
    rollouts: int
    unreadable: int


def export(folder: RunFolder, to: str, out: Path) -> Written:
    """`out` is a file of one JSON object a line or, for parquet, a folder."""
    if to == "parquet":
        return _parquet(folder, out)
    write: Callable[[Rollout], Iterator[dict[str, Any]]] = to_atif if to == "atif" else to_messages
    lines, rollouts, unreadable = [], 0, 0
    for where, stored, broken in stored_rollouts(folder):
        unreadable += broken
        for rollout in stored:
            rollouts += 1
            lines += [json.dumps({**each, "step": where} if to == "openai" else each) for each in write(rollout)]
    if not rollouts:
        raise OffbookError(f"{folder.path} has no rollouts to export ({unreadable} lines cannot be read)")
    write_atomic(out, "".join(line + "\n" for line in lines))
    return Written(rollouts, unreadable)


def to_messages(rollout: Rollout) -> Iterator[dict[str, Any]]:
    for number, segment in enumerate(rollout.segments):
        yield {
            "id": _name(rollout, number),
            "task": rollout.task,
            "messages": list(_messages(segment)),
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
        ids = [f"call_{turn}_{place}" for place in range(len(messages[start].calls))]
        answers = [message.text for message in messages[start + 1 : end]]
        yield messages[start], ids, list(zip(chain(ids, repeat("")), answers, strict=False))


def _messages(segment: Segment) -> Iterator[dict[str, Any]]:
    for message, ids, answers in _turns(segment):
        calls = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for id, call in zip(ids, message.calls, strict=True)
        ]
        yield {"role": message.role, "content": _spoken(message), **({"tool_calls": calls} if calls else {})}
        yield from ({"role": "tool", "tool_call_id": id, "content": text} for id, text in answers)


def _steps(segment: Segment) -> Iterator[dict[str, Any]]:
    for number, (message, ids, answers) in enumerate(_turns(segment), 1):
        step = {"step_id": number, "source": SOURCES[message.role], "message": _spoken(message)}
        if message.calls:
            step["tool_calls"] = [
                {"tool_call_id": id, "function_name": call.name, "arguments": call.arguments}
                for id, call in zip(ids, message.calls, strict=True)
            ]
        if any(segment.sampled[message.body : message.end]):
            step["metrics"] = _metrics(segment, message)
        if answers:
            results = [{"source_call_id": id or None, "content": text} for id, text in answers]
            step["observation"] = {"results": results}
        yield step


def _metrics(segment: Segment, message: Message) -> dict[str, Any]:
    """Token ids and log-probabilities as sampled."""
    at = slice(message.body, message.end)
    sampled = segment.sampled[at]
    return {
        "prompt_tokens": message.body,
        "completion_tokens": sum(sampled),
        "completion_token_ids": [id for id, own in zip(segment.ids[at], sampled, strict=True) if own],
        "logprobs": [value for value, own in zip(segment.logprobs[at], sampled, strict=True) if own],
    }


def _spoken(message: Message) -> str:
    """Text before the calls, which have their own field."""
    return message.text[: message.calls[0].start].rstrip() if message.calls else message.text


def _parquet(folder: RunFolder, out: Path) -> Written:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise OffbookError("parquet needs pyarrow: pip install 'offbook[frames]'") from None
    found = records(folder)
    if not found.rollouts:
        raise OffbookError(f"{folder.path} has no rollouts to export ({found.unreadable} lines cannot be read)")
    with writing(out):
        out.mkdir(exist_ok=True)
    for name in ("rollouts", "messages", "targets"):
        rows: list[dict[str, Any]] = getattr(found, name)
        keys = dict.fromkeys(key for row in rows for key in row)  # a reward's parts may come late
        parquet.write_table(arrow.table({key: [row.get(key) for row in rows] for key in keys}), out / f"{name}.parquet")
    return Written(len(found.rollouts), found.unreadable)
