"""What the page asks for of a run, as plain data. Each public function answers one address of the server."""

from __future__ import annotations

import json
import math
from typing import Any

from offbook.signals.trajectory.tool_calls import answers_to
from offbook.types import OffbookError, Rollout, Segment
from offbook.view.index import RunIndex, Said, Unreadable, said_in
from offbook.view.lines import SUMMARY, Lines, is_number
from offbook.view.scales import smooth, thin

COLUMNS = ["source", "number", *SUMMARY, "rules", "peak"]
MAX_POINTS = 240  # of a curve
LARGE = 0.25  # probability that a hint takes from a faulty token of the example
AT_A_GLANCE = 60  # tokens of a message that is read in one
PREVIEW = 240  # characters of a message that a folded one shows
MAX_MESSAGES = 200  # of one answer
MAX_DIFF = 400_000
NOT_SAMPLED = -1  # the policy version of a token that was not sampled


def to_json(value: Any) -> bytes:
    """JSON that a browser reads: what is not a finite number becomes null, half a surrogate pair a question mark."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def curves(run: RunIndex) -> dict[str, Any]:
    """Every number of metrics.jsonl as a line of its own: thinned where it is long, and a moving average.

    One that has the same value at every step is `constant`, and the page names it instead of drawing it.
    """
    rows = run.rows()
    keys = dict.fromkeys(name for row in rows for name in row if name != "step")
    series: dict[str, Any] = {}
    for key in keys:
        found = [(row["step"], row[key]) for row in rows if key in row]
        points = [(step, value) for step, value in found if is_number(value)]
        drawn = thin(points, MAX_POINTS)
        numeric = [value for _, value in found if not isinstance(value, str | list | dict | bool)]
        is_level = 1 < len(points) == len(rows) and len({value for _, value in points}) == 1
        if drawn or numeric:
            series[key] = {
                "constant": _short(points[0][1]) if is_level else None,
                "points": [(step, _short(value)) for step, value in drawn],
                "smooth": [(step, _short(value)) for step, value in smooth(drawn)],
                "skipped": len(numeric) - len(points),
            }
    return {"version": run.version, "series": series, "thinned": len(rows) > MAX_POINTS}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def in_order(run: RunIndex) -> list[tuple[str, Lines]]:
    """The files of rollouts, steps first and evaluations last."""
    return sorted(run.rollouts.items(), key=lambda pair: (pair[0].startswith("eval"), pair[0]))


def rollout_list(run: RunIndex) -> dict[str, Any]:
    """Every rollout of the run in a line."""
    rows = []
    for source, lines in in_order(run):
        rules, peaks = targets_of(run, source)
        for number, place in enumerate(lines.places):
            name = place.said["id"]
            said = {**place.said, "source": source, "number": number, "rules": rules.get(name, [])}
            said["peak"] = _short(peaks.get(name, 0.0))
            said["reward"] = _short(said["reward"])
            rows.append([said[column] for column in COLUMNS])
    return {"version": run.version, "columns": COLUMNS, "rows": rows}


def targets_of(run: RunIndex, source: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    rules: dict[str, list[str]] = {}
    peaks: dict[str, float] = {}
    for said in said_in(run.feedback, source):
        name = said["rollout"]
        rules.setdefault(name, []).append(said["rule"])
        peaks[name] = max(peaks.get(name, 0.0), said["peak"])
    return rules, peaks


def example(run: RunIndex) -> dict[str, Any]:
    """The target that shows best what a hint does: short, with a faulty token that became much less likely.

    `clear` is false where no faulty token did. Empty where no target was scored, or its rollout is not stored.
    """
    targets = [(place.said, source) for source, lines in run.feedback.items() for place in lines.places]
    for said, source in sorted(targets, key=_clearness, reverse=True):
        for number, one in enumerate(said_in(run.rollouts, source)):
            hints = run.hints(source, one["id"])[0] if one["id"] == said["rollout"] and said["tokens"] else []
            for hint in hints:
                is_it = all(hint["target"][name] == said[name] for name in ("segment", "message", "rule"))
                if is_it and len(hint["student"]) == said["tokens"]:
                    where = {"source": source, "number": number, "task": one["task"], "group": one["group"]}
                    return {**where, "hint": hint, "clear": said["fall"] >= LARGE}
    return {}


def _clearness(target: tuple[Said, str]) -> tuple[Any, ...]:
    said, _ = target
    is_clear = said["taught"] and said["fall"] >= LARGE
    is_short = said["tokens"] <= AT_A_GLANCE
    return is_clear, is_short, said["taught"], round(said["fall"], 1), -said["tokens"], said["peak"]


def tasks(run: RunIndex) -> dict[str, Any]:
    """Every task that was recorded or tried, and how often it was solved."""
    recorded = run.recorded()
    tried: dict[str, dict[str, list[Said]]] = {name: {} for name in recorded}
    for source, lines in in_order(run):
        for place in lines.places:
            tried.setdefault(place.said["task"], {}).setdefault(source, []).append(place.said)
    rows = []
    for name, by_source in sorted(tried.items()):
        steps = [(source, sum(one["solved"] for one in found), len(found)) for source, found in by_source.items()]
        turns = [one["turns"] for found in by_source.values() for one in found]
        task = recorded.get(name, {})
        rows.append(
            {
                "id": name,
                **{key: task.get(key, "") for key in ("split", "difficulty", "origin")},
                "rollouts": len(turns),
                "solved": sum(solved for _, solved, _ in steps),
                "turns": sum(turns) / len(turns) if turns else None,
                "steps": steps,
            }
        )
    return {"version": run.version, "recorded": len(recorded), "tasks": rows}


def task(run: RunIndex, name: str) -> dict[str, Any]:
    """One task: what the folder recorded of it or, failing that, what its first rollout was asked."""
    if found := run.recorded().get(name):
        return {**found, "recorded": True}
    for source, lines in run.rollouts.items():
        for number, place in enumerate(lines.places):
            if place.said["task"] == name:
                first = run.rollout(source, number).segments[:1]
                words = [message.text for segment in first for message in segment.messages if message.role == "user"]
                return {"id": name, "recorded": False, "instruction": words[0] if words else ""}
    raise OffbookError(f"{run.name} has no task {name}")


def rollout(run: RunIndex, source: str, number: int) -> dict[str, Any]:
    """A rollout without the words of its messages: those are asked for as the page reaches them."""
    whole = run.rollout(source, number)
    hints, broken = run.hints(source, whole.id)
    known = {(s, m) for s, segment in enumerate(whole.segments) for m in range(len(segment.messages))}
    placed = [one for one in hints if (one["target"]["segment"], one["target"]["message"]) in known]
    # The oldest and the newest policy that wrote a token of it.
    versions = {version for segment in whole.segments for version in set(segment.versions)} - {NOT_SAMPLED}
    return {
        **run.place(source, number).said,
        "source": source,
        "number": number,
        "count": len(run.rollouts[source].places),
        "tools": whole.tools,
        "usage": {name: getattr(whole.usage, name) for name in whole.usage.__slots__},
        "parts": whole.reward.parts,
        "weights": whole.reward.weights,
        "advantage": _advantages(run, source, whole.group).get(number),
        "versions": [min(versions), max(versions)] if versions else [],
        "outline": [_outline(whole.segments[s], s, m) for s, m in sorted(known)],
        "flag_list": [{"kind": f.kind, "segment": f.segment, "message": f.message, "text": f.evidence}
                      for f in whole.flags],
        "events": [{"kind": e.kind, "segment": e.segment, "message": e.message, "text": e.detail}
                   for e in whole.events],
        "hints": placed,
        "left_out": {"unreadable target": broken, "target of no message": len(hints) - len(placed)},
        "diff": whole.diff[:MAX_DIFF],
        "diff_left_out": max(0, len(whole.diff) - MAX_DIFF),
        "changed": {path: text is None for path, text in whole.changed.items()},
    }  # fmt: skip


def _outline(segment: Segment, at: int, index: int) -> dict[str, Any]:
    message = segment.messages[index]
    first = message.text.lstrip()[:PREVIEW].split("\n", 1)[0]
    return {
        "segment": at,
        "message": index,
        "role": message.role,
        "status": message.status,
        "characters": len(message.text),
        "lines": message.text.count("\n") + 1,
        "tokens": message.end - message.start,
        "first": first,
        "summary": segment.summary == index,
    }


def messages(run: RunIndex, source: str, number: int, first: int, count: int) -> dict[str, Any]:
    """The words of some messages, counted over all segments."""
    whole = run.rollout(source, number)
    every = [message for segment in whole.segments for message in segment.messages]
    found = []
    for message in every[first : first + min(count, MAX_MESSAGES)]:
        calls = [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in message.calls]
        found.append({"text": message.text, "calls": calls})
    return {"first": first, "messages": found}


def _advantages(run: RunIndex, source: str, group: str) -> dict[int, float]:
    """A = R − mean(R of the group), by the number of the rollout. A group of one has none."""
    rewards = {n: one["reward"] for n, one in enumerate(said_in(run.rollouts, source)) if one["group"] == group}
    mean = sum(rewards.values()) / max(1, len(rewards))
    return {number: reward - mean for number, reward in rewards.items()} if len(rewards) > 1 else {}


def group(run: RunIndex, source: str, name: str) -> dict[str, Any]:
    """The rollouts of one task in one step, each as the calls that it made."""
    numbers = [number for number, one in enumerate(said_in(run.rollouts, source)) if one["group"] == name]
    if not numbers:
        raise OffbookError(f"{run.name} has no group {name} in {source}")
    rules, _ = targets_of(run, source)
    advantages = _advantages(run, source, name)
    members = []
    asked: list[str] = []
    for number in numbers:
        try:
            whole = run.rollout(source, number)
        except Unreadable:
            continue  # counted below
        asked += [m.text for segment in whole.segments for m in segment.messages if m.role == "user"]
        members.append(
            {
                **run.place(source, number).said,
                "parts": whole.reward.parts,
                "weights": whole.reward.weights,
                "rules": rules.get(whole.id, []),
                "source": source,
                "number": number,
                "advantage": advantages.get(number),
                "beats": _beats(run, source, whole),
            }
        )
    return {
        "group": name,
        "task": run.place(source, numbers[0]).said["task"],
        "source": source,
        "instruction": asked[0] if asked else "",
        "members": members,
        "unreadable": len(numbers) - len(members),
    }


def _beats(run: RunIndex, source: str, whole: Rollout) -> list[dict[str, Any]]:
    """The messages of the assistant, each with its first call."""
    found = said_in(run.feedback, source)
    targets = {(one["segment"], one["message"]) for one in found if one["rollout"] == whole.id}
    beats = []
    for at, segment in enumerate(whole.segments):
        for index, message in enumerate(segment.messages):
            if message.role == "assistant":
                answer = next(iter(answers_to(segment.messages, index)), None)
                call = message.calls[0] if message.calls else None
                arguments = [str(value)[:60] for value in call.arguments.values()] if call else []
                beats.append(
                    {
                        "segment": at,
                        "message": index,
                        "name": call.name if call else message.text.strip()[:60],
                        "brief": arguments[0] if arguments else "",  # mostly a path or a command
                        "status": answer.status if answer else None,
                        "calls": len(message.calls),
                        "target": (at, index) in targets,
                    }
                )
    return beats
