"""Secrets, taken out before anything of a session is stored: of its texts, and of the tokens that are the truth.

Found by form: keys of well-known makers, private keys, passwords in addresses and in assignments. A secret that looks
like any other word is not found, and no list of forms is complete; who cannot live with that keeps numbers alone
(live.consent).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from offbook.tokens import Chat
from offbook.types import Event, Message, Rollout, Segment

SECRET = "[secret]"
PATTERNS = (
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----[\w\s+/=\\:.,()@<>-]{4,8000}?"
    r"(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # AWS
    r"\bgh[pousr]_[A-Za-z0-9]{20,}\b|\bgithub_pat_\w{20,}\b|\bglpat-[\w-]{20,}",
    r"\bsk-[A-Za-z0-9_-]{16,}|\bhf_[A-Za-z0-9]{20,}\b|\bpypi-[\w-]{16,}|\bnpm_[A-Za-z0-9]{20,}\b",
    r"\bxox[abeoprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}\b",
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}|(?<=hooks\.slack\.com/services/)[\w/]{16,}",
    r"\beyJ[\w-]{8,800}\.[\w-]{8,800}\.[\w-]{8,}",  # JWT
    r"(?<=://)[^\s/:@\"'\\]{0,200}:[^\s/@\"'\\]{1,200}(?=@)",  # a password in an address
    r"(?<=://)(?<!http://)(?<!https://)[^\s/:@\"'\\]{0,200}:[^\s@\"'\\]{1,200}(?=@)",  # with slashes, and no port there
    r"(?<=://)[\w-]{20,200}(?=@)|(?<=--password )[^\s\"'\\]{4,}|(?<= -u )[^\s:/\"'\\]{1,60}:[^\s\"'\\]{4,}",
    r"(?<=[Bb][Ee][Aa][Rr][Ee][Rr] )[\w.~+/-]{16,}=*|(?<=[Bb]asic )(?=\S{0,60}[\d+/=])[A-Za-z0-9+/]{8,}=*",
)
FORMS = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.DOTALL)
# The end of a name, what stands between it and the value (the end of a key or an index, a type), and the value: up to
# the end of its quotes, or one word. Quotes may be escaped, as in the arguments of a call. No part is without a bound:
# what a session holds may have been written to take long.
ASSIGNED = re.compile(
    r"""(?x) (?P<name>
        (?i:passw(?:or)?d|passphrase|secret|token(?!iz|s\b|_type)|(?:api|access|private|account)[_-]?key|credential)
            [\w-]{0,40}
        | (?<![A-Za-z])(?i:pass|pwd)\b)
    \\{0,8}["']?\]?(?:\ {0,4}:\ {0,4}[A-Za-z_][\w.|\[\]\ ]{0,60}(?==))?
    (?P<sign>(?:[\ \t]|\\{1,8}t){0,20}(?::=|=>|==|[=:,])(?:[\ \t]|\\{1,8}t){0,20}) \(?[rbfuRBFU]{0,2}
    (?: (?P<quote>(?:\\{0,8}["']){3}|\\{0,8}["'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n])){6,200})
        | (?P<word>[^\s"'\\,;)}\]]{6,}) )"""
)
# What stands there in code and is none: nothing yet, a place for it, a variable, a call.
PLACE = re.compile(r"\$\{?\w+\}?|\$\(.*|<[^>]*>?|\{[^}]*\}?|%\(?\w+\)?s?|[*x.]+|\[secret\]")
CODE = re.compile(r"(?i)(?:none|null|true|false|bytes|string|optional)|[a-z_][\w.]*[(\[].*|[a-z_]\w*(?:\.[a-z_]\w*)+")


def secrets_in(text: str) -> list[tuple[int, int]]:
    """Where they stand, one behind the other: what overlaps is one."""
    found = [match.span() for match in FORMS.finditer(text)]
    for match in ASSIGNED.finditer(text):
        if match["quoted"] is not None:
            if not PLACE.fullmatch(match["quoted"]):
                found.append(match.span("quoted"))
        elif "," not in match["sign"] and _is_secret(match["word"], match["name"].isupper() and match["sign"] == "="):
            found.append(match.span("word"))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _is_secret(word: str, of_environment: bool) -> bool:
    """Without quotes it is likelier code. `NAME=word` is how a variable of the environment is set."""
    if PLACE.fullmatch(word) or of_environment:
        return not PLACE.fullmatch(word)
    return any(one.isdigit() for one in word) and any(one.isalpha() for one in word) and not CODE.fullmatch(word)


def scrubbed(text: str) -> str:
    for start, end in reversed(secrets_in(text)):
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
    clean.task = scrubbed(rollout.task)
    clean.flags = flags
    return clean, count


def _event(event: Event) -> Event:
    return replace(event, detail=scrubbed(event.detail), paths=tuple(map(scrubbed, event.paths)))


def _segment(segment: Segment, chat: Chat, filler: int) -> tuple[Segment, int]:
    messages = [_message(message) for message in segment.messages]
    pieces = chat.pieces(segment.ids)
    spans = secrets_in("".join(pieces))
    new = replace(segment, ids=[*segment.ids], sampled=[*segment.sampled], logprobs=[*segment.logprobs])
    new.versions, new.messages = [*segment.versions], messages
    place = count = 0
    for index, piece in enumerate(pieces):
        start, place = place, place + len(piece)
        while spans and spans[0][1] <= start:
            spans.pop(0)
        if spans and spans[0][0] < max(place, start + 1):
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
        named = {key: f'{key}="{inner}"' for key, inner in value.items() if isinstance(inner, str)}
        hidden = {
            key for key, told in named.items() if any(start <= len(str(key)) + 2 for start, _ in secrets_in(told))
        }
        return {key: SECRET if key in hidden else _value(inner) for key, inner in value.items()}
    return [_value(inner) for inner in value] if isinstance(value, list) else value
