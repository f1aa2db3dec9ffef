"""What the page asks for of single rollouts and of groups, as plain data."""

from __future__ import annotations

from typing import Any

from offbook.acts.exchanges import answers_to
from offbook.types import Message, OffbookError, Rollout, Segment
from offbook.view.answers import targets_of
from offbook.view.index import RunIndex, Unreadable, said_in

PREVIEW = 240  # characters of a message that a folded one shows
MAX_TEXT = 24_000  # characters of a message that come with it; the rest is asked for
MAX_DIFF = 400_000
NOT_SAMPLED = -1  # the policy version of a token that nobody sampled


def rollout(run: RunIndex, source: str, number: int) -> dict[str, Any]:
    """A rollout without the words of its messages: those are asked for as the page reaches them."""
    whole = run.rollout(source, number)
    hints, broken = run.hints(source, whole.id)
    known = {(s, m) for s, segment in enumerate(whole.segments) for m in range(len(segment.messages))}
    placed = [one for one in hints if (one["target"]["segment"], one["target"]["message"]) in known]
    said = run.place(source, number).said
    return {
        **said,
        "source": source,
        "number": number,
        "count": len(run.rollouts[source].places),
        "tools": whole.tools,
        "usage": {name: getattr(whole.usage, name) for name in whole.usage.__slots__},
        "parts": whole.reward.parts,
        "weights": whole.reward.weights,
        "advantage": _advantages(run, source, whole.group).get(number),
        "versions": _versions(whole),
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


def _versions(whole: Rollout) -> list[int]:
    """The oldest and the newest policy that wrote a token of it."""
    seen = {version for segment in whole.segments for version in set(segment.versions)} - {NOT_SAMPLED}
    return [min(seen), max(seen)] if seen else []


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
    """The words of some messages, counted over all segments. A very long one comes cut in the middle."""
    whole = run.rollout(source, number)
    every = [message for segment in whole.segments for message in segment.messages]
    return {"first": first, "messages": [_words(message) for message in every[first : first + count]]}


def _words(message: Message) -> dict[str, Any]:
    text, cut = message.text, 0
    if len(text) > MAX_TEXT:
        cut = len(text) - MAX_TEXT
        text = text[: MAX_TEXT * 2 // 3] + text[-(MAX_TEXT // 3) :]
    calls = [{"name": call.name, "arguments": call.arguments, "error": call.error} for call in message.calls]
    return {"text": text, "cut": cut, "cut_at": MAX_TEXT * 2 // 3, "calls": calls if not cut else []}


def message_text(run: RunIndex, source: str, number: int, index: int) -> dict[str, Any]:
    """One message whole, however long."""
    every = [message for segment in run.rollout(source, number).segments for message in segment.messages]
    if not 0 <= index < len(every):
        raise OffbookError(f"the rollout has no message {index}")
    return {"text": every[index].text}


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
    members, instruction = [], ""
    for number in numbers:
        try:
            members.append(_member(run, source, number, advantages.get(number), rules))
        except Unreadable:
            continue  # counted below
        asked = (m.text for s in run.rollout(source, number).segments for m in s.messages if m.role == "user")
        instruction = instruction or next(asked, "")
    task = run.place(source, numbers[0]).said["task"]
    found = {"group": name, "task": task, "source": source, "instruction": instruction, "members": members}
    return found | {"unreadable": len(numbers) - len(members)}


def _member(
    run: RunIndex, source: str, number: int, advantage: float | None, rules: dict[str, list[str]]
) -> dict[str, Any]:
    whole, said = run.rollout(source, number), run.place(source, number).said
    found = said_in(run.feedback, source)
    targets = {(one["segment"], one["message"]) for one in found if one["rollout"] == whole.id}
    beats = []
    for at, segment in enumerate(whole.segments):
        for index, message in enumerate(segment.messages):
            if message.role == "assistant":
                answer = next(iter(answers_to(segment.messages, index)), None)
                status = answer.status if answer else None
                said_ = message.calls[0].name if message.calls else message.text.strip()[:60]
                brief = _brief(message.calls[0].arguments) if message.calls else ""
                beat = {"segment": at, "message": index, "name": said_, "brief": brief, "status": status}
                beats.append({**beat, "calls": len(message.calls), "target": (at, index) in targets})
    parts = {"parts": whole.reward.parts, "weights": whole.reward.weights, "rules": rules.get(whole.id, [])}
    return {**said, **parts, "source": source, "number": number, "advantage": advantage, "beats": beats}


def _brief(arguments: dict[str, Any]) -> str:
    """The first argument, which is mostly a path or a command."""
    return next((str(value)[:60] for value in arguments.values()), "")
