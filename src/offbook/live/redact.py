"""Removes secrets before anything of a session is stored, from its texts and from its tokens.

Secrets are found by form: keys of well-known vendors, private keys, passwords in addresses and assignments. One that
looks like any other word is not found, and no list of forms is complete; `live.consent = "none"` stores nothing.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

from offbook.agent.chat import Chat
from offbook.types import Rollout, Segment, ToolCall

SECRET = "[secret]"
# No character that could belong to a key comes before it; the n of an escaped newline in a call's arguments does not.
EDGE = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))"
MARKED = (  # prefixes of vendors' keys that go on with letters and digits
    r"xapp-[\w-]{10,40}-|gl(?:rt|dt|ptt|ft|cbt|soat|agent)-|glsa_|glc_|whsec_|GOCSPX-|ya29\.|1//0|do[opr]_v1_"
    r"|dckr_[op]at_|shp(?:at|ss|ca|pa)_|lin_api_|ntn_|secret_|figd_|rubygems_|cio|hv[sbr]\.|\w{14}\.atlasv1\.|NRAK-"
    r"|sntry[su]_|gsk_|xai-|pplx-|nvapi-|tvly-|r8_|fw_|PMAK-|AGE-SECRET-KEY-|sq0\w{3}-|AT[AC]TT|sbp_|sb_secret_|vc[pk]_"
    r"|lsv2_\w\w_|key-|SK|dapi|pscale_\w{2,5}_|ph[cx]_|rnd_|EAAA|pat\w{14}\.|\d{8,10}:AA"
    r"|(?:api/webhooks|slack\.com/services)/[\w/]{3,40}/"
)
FLAG = r"(?i:pass\w{0,20}|secret|token|api-?key|access-?key)"
WORD, QUOTE, LINE = r"[^\s\"'\\]", r"\\{0,8}[\"'`]?", r"\b[^\n|;]{0,200}?\s"
SOME = rf"(?={WORD}{{0,40}}\d)(?=\d*[^\s\d]){WORD}"  # the first character of a word with a digit that is no number
BASE64 = r"(?:\W{0,12}n?[A-Za-z0-9+/=]{12,100}){1,400}"
PATTERNS = (  # the group is the secret; without a group the whole match
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:(?:(?!-----BEGIN).){4,20000}?"
    rf"-----END [A-Z ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----|{BASE64}|[\w\s+/=\\:.,()@<>-]{{4,8000}}?\Z)",
    rf"Private-Lines: \d+({BASE64})|{EDGE}LS0tLS1CRUdJTi(?!BDRVJU|BQVUJM)[A-Za-z0-9+/=]{{20,}}",  # and in base64
    rf"{EDGE}(?:AKIA|ASIA)[0-9A-Z]{{16}}\b",  # AWS
    rf"{EDGE}(?:gh[pousr]_[A-Za-z0-9]{{20,}}\b|github_pat_\w{{20,}}\b|glpat-[\w-]{{20,}}|sk-[A-Za-z0-9_-]{{16,}})",
    rf"{EDGE}(?:hf_[A-Za-z0-9]{{20,}}\b|pypi-[\w-]{{16,}}|npm_[A-Za-z0-9]{{20,}}\b|xox[abeoprs][-.][\w-]{{10,}})",
    rf"{EDGE}(?:AIza[\w-]{{30,}}|[rs]k_(?:live|test)_[A-Za-z0-9]{{16,}}\b|SG\.[\w-]{{16,}}\.[\w-]{{16,}})",
    rf"{EDGE}(?:{MARKED})(?=[A-Za-z0-9]{{0,30}}\d)[A-Za-z0-9]{{20,}}[\w-]*",
    r"(?<![\w-])[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}",  # Discord
    r"(?:(?<![\w-])|(?<=\\[nrt]))eyJ[\w-]{8,8000}\.[\w-]{8,8000}\.[\w-]{8,}",  # JWT
    r"(?<=://)(?:[^\s/:\"'\\]{0,200}:(?![${<%*])[^\s/\"'\\]{1,200}|[\w-]{20,200})(?=@)",  # a password in an address
    r"(?<=://)(?<!http://)(?<!https://)[^\s/:@\"'\\]{0,200}:(?![${<%*])[^\s@\"'\\]{1,200}(?=@)",  # with slashes
    r"[?&](?:key|sig|code|auth)=((?=[\w%.-]{0,40}\d)[\w%+/.~-]{16,})",
    r"(?i:bearer )([\w.~+/-]{16,}=*)|(?i:basic )((?=\S{0,60}[\d+/=])[A-Za-z0-9+/]{8,}=*)",
    rf"(?i:authorization){QUOTE}\s?[:=,]\s?{QUOTE}(?:\w{{1,20}} )?({SOME}{{16,}})",
    rf"\b_?auth{QUOTE}\s?[:=]\s?{QUOTE}((?=\w{{0,30}}\d)[A-Za-z0-9+/]{{16,}}=*)",  # of Docker and npm
    rf"(?i:cookie){QUOTE}: ?{QUOTE}((?=[^\n\"']{{0,99}}\d)[\w.%-]{{1,80}}=[^\n\"'\\{{}}<$]{{12,4000}})",
    rf"--password ({WORD}{{4,}})|(?:--[\w-]{{0,30}}|:_auth){FLAG} ({SOME}{{6,}})",
    rf"--[\w-]{{0,30}}{FLAG}=((?![${{<%]){WORD}{{6,}})",
    rf"curl{LINE}(?:-u ?|--user[ =]){QUOTE}([^\s:/\"'\\]{{1,60}}:{WORD}{{4,}})| -u ([^\s:/\"'\\]{{1,60}}:{SOME}{{4,}})",
    rf"(?:(?:mysql|maria)\w{{0,9}}{LINE}-p|(?:sshpass|login){LINE}-p |redis-cli{LINE}-a )((?![$]){WORD}{{4,}})",
    rf"login\s\S{{1,80}}?(?:[\s+-]|\\n){{1,9}}password\s({WORD}{{4,}})",  # .netrc, and .pgpass
    rf"(?<![\w.*-])[\w.*-]{{1,99}}:(?:\d{{4,5}}|[*]):(?:[A-Za-z]\w{{0,99}}|[*]):[\w.*-]{{1,99}}:({WORD}{{4,}})",
    rf"(?i:password|passphrase) is {QUOTE}(?!sha|base|md5|utf)({SOME}{{6,}})",
    r"(?i:password|secret|token)>((?=[^<]{0,60}\d)[^<\s]{6,200})</",
    rf"{EDGE}ENV \w{{0,40}}(?:PASS|TOKEN|SECRET|KEY)\w{{0,40}} ((?![$/]){WORD}{{6,}})",
)
FORMS = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.DOTALL)
# The end of a name, what stands between it and the value (the end of a key or an index, a type, a member `value`), and
# the value: up to the end of its quotes, or one word. Quotes may be escaped, as in the arguments of a call. No part is
# without a bound: what a session holds may have been written to take long.
ASSIGNED = re.compile(
    r"""(?x) (?P<name>
        (?i:passw(?:or)?d|passphrase|secret(?!ar)|(?P<mild>token(?!iz|s\b|_type)|credential)
            |(?:api|access|private|account|encrypt\w{0,4}|signing|master|auth|shared)[_-]?key)[\w-]{0,40}
        | (?:(?<![A-Za-z])|(?<=\\[nrt]))(?i:pass|pwd|psk)\b)
    \\{0,8}["']?\]?(?:\ {0,4}:\ {0,4}[A-Za-z_][\w.|\[\]\ ]{0,60}(?==)
        |,?(?:[\s+-]|\\{1,8}n){1,40}\\{0,8}["']?value\\{0,8}["']?)?
    (?P<sign>(?:[\ \t]|\\{1,8}t){0,20}(?::=|=>|==|[=:,])(?:[\ \t]|\\{1,8}t){0,20}) \(?[rbfuRBFU]{0,2}
    (?: (?P<quote>(?:\\{0,8}["']){3}|\\{0,8}["'])(?P<quoted>(?:(?!(?P=quote))(?:\\{3}(?:\\{4})?["']|\\.|[^\n])){6,8000})
        | (?P<word>[^\s"'\\,;)}\]]{6,}) )"""
)
# Values in code that are not secrets: nothing yet, a placeholder, a variable, a call. Or a sentence for people.
PLACE = re.compile(r"\$\{?\w+\}?|\$\(.*|<[^>]*>?|\{[^}]*\}?|%\(?\w+\)?s?|[*x.]+|\[secret\]")
CODE = re.compile(r"(?i)(?:none|null|true|false|bytes|string|optional)|[a-z_][\w.]*[(\[].*|[a-z_]\w*(?:\.[a-z_]\w*)+")
LABEL = re.compile(r"(?i:password|secret|token)|[A-Z][a-z]+(?:\ [A-Za-z']+)+[.!?:]?")


def secrets_in(text: str) -> list[tuple[int, int]]:
    """The spans of secrets, in order; overlapping ones are merged."""
    found = [match.span(match.lastindex or 0) for match in FORMS.finditer(text)]
    for match in ASSIGNED.finditer(text):
        if match["quoted"] is not None:
            is_mild = match["mild"] and not any(one.isdigit() for one in match["quoted"])  # a parser has tokens, too
            if not is_mild and not PLACE.fullmatch(match["quoted"]) and not LABEL.fullmatch(match["quoted"]):
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
    """Whether a value without quotes is a secret: it is likelier code. `NAME=word` sets an environment variable."""
    if PLACE.fullmatch(word) or of_environment:
        return not PLACE.fullmatch(word)
    return any(one.isdigit() for one in word) and any(one.isalpha() for one in word) and not CODE.fullmatch(word)


def scrubbed(text: str) -> str:
    for start, end in reversed(secrets_in(text)):
        text = text[:start] + SECRET + text[end:]
    return text


def scrub(rollout: Rollout, chat: Chat) -> Rollout:
    """A copy without secrets. Masked tokens are not trained on, and every other token keeps its position."""
    filler = chat.encode("x")[0]
    texts = {name: _cleaned(getattr(rollout, name)) for name in ("task", "changed", "diff", "events", "flags")}
    return replace(rollout, segments=[_segment(segment, chat, filler) for segment in rollout.segments], **texts)


def _segment(segment: Segment, chat: Chat, filler: int) -> Segment:
    pieces = chat.pieces(segment.ids)
    spans = secrets_in("".join(pieces))
    new = replace(segment, ids=[*segment.ids], sampled=[*segment.sampled], logprobs=[*segment.logprobs])
    new.versions, new.messages = [*segment.versions], _cleaned(segment.messages)
    place = 0
    for index, piece in enumerate(pieces):
        start, place = place, place + len(piece)
        while spans and spans[0][1] <= start:
            spans.pop(0)
        if spans and spans[0][0] < max(place, start + 1):
            new.ids[index], new.sampled[index], new.logprobs[index], new.versions[index] = filler, False, 0.0, -1
    return new


def _cleaned(value: Any) -> Any:
    """A copy with every text in it scrubbed."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {scrubbed(key): _cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_cleaned, value))
    if isinstance(value, ToolCall):
        # As one JSON text first, where a name comes before its value.
        with suppress(ValueError):  # a secret spanned the end of a string
            value = replace(value, arguments=json.loads(scrubbed(json.dumps(value.arguments, ensure_ascii=False))))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _cleaned(getattr(value, one.name)) for one in fields(value)})
    return value
