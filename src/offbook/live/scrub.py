"""Secrets, taken out before anything of a session is stored: of its texts, and of the tokens that are the truth.

Found by form: keys of well-known makers, private keys, passwords in addresses and in assignments. A secret that looks
like any other word is not found, and no list of forms is complete; who cannot live with that keeps numbers alone
(live.consent).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from offbook.tokens import Chat
from offbook.types import Event, Message, Rollout, Segment

SECRET = "[secret]"
PATTERNS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w-]{20,}",
    r"\bsk-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{20,}\b|\bpypi-[\w-]{16,}|\bnpm_[A-Za-z0-9]{20,}\b",
    r"\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\b[rs]k_live_[A-Za-z0-9]{16,}\b",
    r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",  # JWT
    r"(?<=://)[^\s/:@\"']+:[^\s/@\"']+(?=@)",  # a password in an address
    r"(?<=[Bb]earer )[\w.~+/-]{16,}=*",
)
ASSIGNED = re.compile(
    r"""(?ix) \b[\w.-]*(?:passw(?:or)?d|passphrase|secret|token|api_?key|access_?key|credential)[\w-]*
    ["']?\ *(?::=|=>|[=:])\ *(?P<quote>["']?)(?P<value>[^\s"',;)}\]]{6,})"""
)
# What stands behind such a name in code and is none: a call, a variable of the environment, nothing yet.
HARMLESS = re.compile(r"(?i)^(?:none|null|true|false|str|int|bytes|self|os|env|get|settings|config|\$|<|\{|\[|\w+\()")
FORMS = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.DOTALL)


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """Where they stand."""
    for found in FORMS.finditer(text):
        yield found.span()
    for found in ASSIGNED.finditer(text):
        value = found["value"]
        is_mixed = any(one.isdigit() for one in value) and any(one.isalpha() for one in value)
        if (found["quote"] or is_mixed) and not HARMLESS.match(value) and value != SECRET:
            yield found.span("value")


def scrubbed(text: str) -> str:
    for start, end in sorted(secrets_in(text), reverse=True):
        text = text[:start] + SECRET + text[end:]
    return text


def scrub(rollout: Rollout, chat: Chat) -> tuple[Rollout, int]:
    """A copy without secrets, and how many tokens were blotted out. Those are no longer learned from, and every other
    token keeps its place."""
    filler = chat.encode("x")[0]
    segments, count = [], 0
    for segment in rollout.segments:
        new, blotted = _segment(segment, chat, filler)
        segments.append(new)
        count += blotted
    changed = {path: None if text is None else scrubbed(text) for path, text in rollout.changed.items()}
    events = [_event(event) for event in rollout.events]
    flags = [replace(flag, evidence=scrubbed(flag.evidence)) for flag in rollout.flags]
    clean = replace(rollout, segments=segments, changed=changed, diff=scrubbed(rollout.diff), events=events)
    clean.flags = flags
    return clean, count


def _event(event: Event) -> Event:
    return replace(event, detail=scrubbed(event.detail), paths=tuple(map(scrubbed, event.paths)))


def _segment(segment: Segment, chat: Chat, filler: int) -> tuple[Segment, int]:
    messages = [_message(message) for message in segment.messages]
    pieces = chat.pieces(segment.ids)
    spans = sorted(secrets_in("".join(pieces)))
    new = replace(segment, ids=[*segment.ids], sampled=[*segment.sampled], logprobs=[*segment.logprobs])
    new.versions, new.messages = [*segment.versions], messages
    place = count = 0
    for index, piece in enumerate(pieces):
        start, place = place, place + len(piece)
        if any(first < max(place, start + 1) and start < last for first, last in spans):
            new.ids[index], new.sampled[index], new.logprobs[index], new.versions[index] = filler, False, 0.0, -1
            count += 1
    return new, count


def _message(message: Message) -> Message:
    calls = tuple(
        replace(call, arguments=_value(call.arguments), error=scrubbed(call.error) if call.error else call.error)
        for call in message.calls
    )
    return replace(message, text=scrubbed(message.text), calls=calls)


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: _value(inner) for key, inner in value.items()}
    return [_value(inner) for inner in value] if isinstance(value, list) else value
