"""A rollout as a page reads it: the conversation with its targets and hints, the diff, the reward."""

from __future__ import annotations

import json
import re

from offbook.types import INVALID, Feedback, Message, Rollout, ToolCall
from offbook.view.load import Pick
from offbook.view.markup import MINUS, TIMES, Html, join, number, plural, tag
from offbook.view.signature import effect, headline, is_scored, peak_index, strip

MAX_MESSAGES = 60
MAX_CHARACTERS = 60_000  # of one rollout's conversation; longer messages are cut in the middle
MAX_DIFF_LINES = 300
LONG_LINES, LONG_CHARACTERS = 8, 600  # longer tool output starts folded
SYSTEM_LINES = 2
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ENDED = {
    "finish": "called finish",
    "answer": "answered without a call",
    "turns": "out of turns",
    "tokens": "out of tokens",
    "context": "out of context",
    "wall": "out of time",
    "cost": "out of money",
    "crash": "crashed",
}


def rollout_section(pick: Pick, index: int, scale: float, max_tokens: int, is_open: bool) -> Html:
    rollout = pick.rollout
    inside = [
        _facts(pick, index),
        conversation(rollout, pick.feedback, index, scale, max_tokens),
        tag("div", _diff(rollout.diff), _reward(rollout), class_="outcome"),
        _findings(rollout),
    ]
    return tag(
        "details",
        tag("summary", *_summary(pick)),
        tag("div", *inside, class_="inside"),
        class_="rollout",
        id=f"rollout-{index}",
        open=is_open,
    )


def _summary(pick: Pick) -> list[Html]:
    rules = list(dict.fromkeys(feedback.target.rule for feedback in pick.feedback))
    scored = [feedback for feedback in pick.feedback if is_scored(feedback)]
    shift: list[Html] = []
    if scored:
        strongest = max(scored, key=lambda feedback: feedback.divergence[peak_index(feedback)])
        shift = [tag("span", headline(strongest), class_="headline")]
    solved = pick.rollout.solved
    return [
        tag("span", f"step {pick.step}", class_="when"),
        tag("h3", ", ".join(rule.replace("_", " ") for rule in rules) or pick.rollout.task),
        *shift,
        tag("span", "✓ solved" if solved else "○ not solved", class_="result solved" if solved else "result"),
    ]


def _place(index: int, segment: int, message: int) -> str:
    """The id of a message in the page."""
    return f"rollout-{index}-message-{segment}-{message}"


def _facts(pick: Pick, index: int) -> Html:
    rollout, usage = pick.rollout, pick.rollout.usage
    invalid = f", {usage.invalid_calls} invalid" if usage.invalid_calls else ""
    rows = {
        "run": pick.run.name,
        "task": rollout.task,
        "ended": ENDED[rollout.stop],
        "turns": str(usage.turns),
        "calls": f"{usage.calls}{invalid}",
        "sampled": plural(usage.sampled_tokens, "token"),
        "reward": _points(rollout.reward.total),
    }
    places = dict.fromkeys((one.target.segment, one.target.message) for one in pick.feedback)
    links = [tag("a", f"message {place[1]}", href=f"#{_place(index, *place)}") for place in places]
    if links:
        rows["target"] = Html(", ".join(links))
    return tag("dl", *(tag("div", tag("dt", key), tag("dd", value)) for key, value in rows.items()), class_="facts")


def conversation(rollout: Rollout, feedback: list[Feedback], index: int, scale: float, max_tokens: int) -> Html:
    """Every message in order, each hint exactly before the message it corrects."""
    targets: dict[tuple[int, int], list[Feedback]] = {}
    for one in feedback:
        targets.setdefault((one.target.segment, one.target.message), []).append(one)
    places = [(s, m) for s, segment in enumerate(rollout.segments) for m in range(len(segment.messages))]
    shown = _shown(places, targets)
    limit = max(400, MAX_CHARACTERS // max(1, len(shown)))
    items, left_out = [], 0
    for place in places:
        segment, number_ = place
        if number_ == 0 and segment > 0:
            items.append(tag("li", f"context window {segment + 1}, after a summary", class_="window"))
        if place not in shown:
            left_out += 1
            continue
        if left_out:
            items.append(tag("li", f"{plural(left_out, 'message')} not shown", class_="window"))
            left_out = 0
        here = targets.get(place, [])
        items += [_hint(one) for one in here]
        message = rollout.segments[segment].messages[number_]
        kind = f"message {message.role}" + (" target" if here else "")
        item = _message(message, number_, here, limit, scale, max_tokens)
        items.append(tag("li", item, class_=kind, id=_place(index, *place)))
    return tag("ol", *items, class_="conversation")


def _shown(places: list[tuple[int, int]], targets: dict[tuple[int, int], list[Feedback]]) -> set[tuple[int, int]]:
    """All places, or in a long conversation its start, its end and what surrounds the targets."""
    if len(places) <= MAX_MESSAGES:
        return set(places)
    reach = max(2, MAX_MESSAGES // (2 * (len(targets) + 1)))
    near = {*places[:4], *places[-reach:]}
    for position, place in enumerate(places):
        if place in targets:
            near.update(places[max(0, position - reach) : position + reach + 1])
    return near


def _hint(feedback: Feedback) -> Html:
    return tag(
        "li",
        tag("div", tag("span", "hint", class_="role"), class_="gutter"),
        tag(
            "div",
            tag("p", feedback.hint.text, class_="hint-text"),
            tag("p", "inserted here; only the teacher sees this", class_="aside"),
            class_="content",
        ),
        class_="hint",
    )


def _message(message: Message, index: int, feedback: list[Feedback], limit: int, scale: float, max_tokens: int) -> Html:
    marks = [tag("span", tag("span", str(index), class_="index"), message.role, class_="role")]
    if feedback:
        marks.append(tag("span", "target", class_="chip target-chip"))
    if message.status and message.status != "ok":
        kind = "chip invalid" if message.status in INVALID else "chip"
        marks.append(tag("span", message.status.replace("_", " "), class_=kind))
    if feedback:
        body = join([_target(one, message, limit, scale, max_tokens) for one in feedback])
    elif message.role == "assistant":
        body = _spoken(message, limit)
    else:
        body = _quoted(message, limit)
    return join([tag("div", *marks, class_="gutter"), tag("div", body, class_="content")])


def _target(feedback: Feedback, message: Message, limit: int, scale: float, max_tokens: int) -> Html:
    why = tag("p", tag("strong", feedback.target.rule.replace("_", " ")), " ", feedback.target.evidence, class_="why")
    if not is_scored(feedback):
        note = tag("p", "The teacher did not score this message.", class_="aside")
        return join([why, _spoken(message, limit), note])
    return join([why, strip(feedback, scale, max_tokens), tag("p", effect(feedback), class_="effect")])


def _spoken(message: Message, limit: int) -> Html:
    """The model's words, with well-formed calls laid out; anything else stands as it was written."""
    parts = CALL.split(message.text)
    if len(parts) != 2 * len(message.calls) + 1 or any(call.error for call in message.calls):
        return tag("div", clip(message.text, limit), class_="text code")
    laid_out = []
    for index, prose in enumerate(parts[::2]):
        if prose.strip():
            laid_out.append(tag("div", clip(prose.strip(), limit), class_="text"))
        if index < len(message.calls):
            laid_out.append(_call(message.calls[index], limit))
    return join(laid_out) if laid_out else tag("p", "an empty message", class_="aside")


def _call(call: ToolCall, limit: int) -> Html:
    rows = []
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        block = "\n" in text or len(text) > 80
        rows.append(tag("div", tag("dt", key), tag("dd", clip(text, limit), class_="block" if block else None)))
    return tag("div", tag("code", call.name, class_="tool-name"), tag("dl", *rows), class_="call")


def _quoted(message: Message, limit: int) -> Html:
    """System, user and tool text."""
    lines = message.text.count("\n") + 1
    many = SYSTEM_LINES if message.role == "system" else LONG_LINES
    text = tag("div", clip(message.text, limit), class_="text code" if message.role == "tool" else "text")
    if message.role == "user" or (lines <= many and len(message.text) <= LONG_CHARACTERS):
        return text
    first = message.text.strip().split("\n", 1)[0][:120]
    size = plural(lines, "line") if lines > 1 else f"{len(message.text):,} characters"
    summary = tag("summary", tag("span", first, class_="first-line"), tag("span", size, class_="size"))
    return tag("details", summary, text, class_="fold")


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, cut in the middle with the number of those left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters not shown …\n{text[-tail:]}"


def _diff(diff: str) -> Html:
    lines = diff.splitlines()
    if not lines:
        return tag("p", "The workspace was not changed.", class_="aside")
    kinds = [_line_kind(line) for line in lines]
    rows = [
        tag("span", clip(line, 500) + "\n", class_=kind)
        for line, kind in zip(lines[:MAX_DIFF_LINES], kinds[:MAX_DIFF_LINES], strict=True)
    ]
    if len(lines) > MAX_DIFF_LINES:
        rows.append(tag("span", f"… {plural(len(lines) - MAX_DIFF_LINES, 'line')} not shown", class_="meta"))
    count = f"+{kinds.count('added')} {MINUS}{kinds.count('removed')}"
    heading = tag("h4", "What the agent changed ", tag("span", count, class_="size"))
    return tag("div", heading, tag("div", *rows, class_="diff", tabindex=0, role="region", aria_label="Diff"))


def _line_kind(line: str) -> str:
    if line.startswith(("+++", "---", "diff ", "index ")):
        return "meta"
    return {"+": "added", "-": "removed", "@": "hunk"}.get(line[:1], "same")


def _reward(rollout: Rollout) -> Html:
    rows = []
    for name, value in rollout.reward.parts.items():
        weight = rollout.reward.weights.get(name, 1.0)
        cells = (tag("td", text) for text in (_points(value), f"{TIMES} {number(weight)}", _points(weight * value)))
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    total = tag("tr", tag("th", "total", scope="row"), tag("td"), tag("td"), tag("td", _points(rollout.reward.total)))
    return tag("div", tag("h4", "Reward"), tag("table", tag("tbody", *rows), tag("tfoot", total), class_="reward"))


def _points(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def _findings(rollout: Rollout) -> Html:
    """What monitors flagged and what else happened."""
    found = [(flag.kind, flag.message, flag.evidence) for flag in rollout.flags]
    found += [(event.kind, event.message, event.detail) for event in rollout.events]
    items = [
        tag("li", tag("strong", kind.replace("_", " ")), f" at message {message}: {clip(text, 600)}")
        for kind, message, text in found
    ]
    return tag("ul", *items, class_="findings") if items else Html("")
