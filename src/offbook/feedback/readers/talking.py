"""How a rollout ends: with nothing done, with a question, or with words that tell too much or too little."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from offbook.feedback.readers.reading import Reading
from offbook.rewards.behaviour import CODE, FINAL_WORDS
from offbook.types import Target

WORDS_A_FILE = 25  # more for each changed file after the third
FREE_FILES = 3
CHANGE = re.compile(
    r"\b(add|fix|implement|make|change|update|write|create|remove|delete|rename|refactor|restore|replace|complete|port|"
    r"repair|rewrite|extend|convert|move|build|support|introduce|correct|finish|bring|reimplement|modify)\b|missing",
    re.IGNORECASE,
)
NO_CHANGE_ASKED = re.compile(
    r"\b(do not|don't|without|no need to|never) (chang|edit|modif|touch|writ)\w*|\b(explain|describe|review|why|"
    r"what does|how does|summari[sz]e|tell me|list all|analy[sz]e|investigate|report)\b",
    re.IGNORECASE,
)
NOT_NEEDED = re.compile(
    r"already|no (code |further |source )?(change|edit|modification)s?|nothing (to|needs|is|was|has)|\bnot (needed|"
    r"necessary|required|possible|able|been|changed|exist)|unnecessary|cannot|can't|could(n't| not)|unable|impossible|"
    r"blocked|do(es)? not|did(n't| not)|won't|refus",
    re.IGNORECASE,
)
INVITED = re.compile(r"\b(ask|question|clarif\w*|check with|confirm)\b", re.IGNORECASE)
ASKED_TO_TELL = re.compile(
    r"\b(explain|describe|report|summar\w+|write-?up|in detail|document|walk me|list (all|every|what))\b", re.IGNORECASE
)
DEFINED = re.compile(r"^[-+ ]?\s*(?:async\s+)?(?:def|class|func|fn|function)\s+(\w+)", re.MULTILINE)
CODE_NAME = re.compile(r"\b(?:[A-Za-z]\w*_\w+|_\w+|[a-z]+[A-Z]\w*|[A-Z]\w*[a-z][A-Z]\w*)\b")


def finished_without_edit(reading: Reading) -> Iterator[Target]:
    """A task that asks for a change ends with none, and the last message does not say why."""
    if not _was_to_change(reading) or not reading.changed_nothing or not reading.end:
        return
    if NOT_NEEDED.search(reading.final) or "?" in _prose(reading):
        return
    yield from reading.final_target("finished_without_edit", "no file was changed")


def asked_instead(reading: Reading) -> Iterator[Target]:
    """A task that asks for a change ends with a question and nothing changed."""
    if not _was_to_change(reading) or not reading.changed_nothing or INVITED.search(reading.instruction):
        return
    words = _prose(reading)
    last = words.splitlines()[-1].rstrip(" *_)\"'") if words else ""
    if last.endswith("?") and not NOT_NEEDED.search(words):
        yield from reading.final_target("asked_instead", re.split(r"(?<=[.!?])\s+", last)[-1])


def final_too_long(reading: Reading) -> Iterator[Target]:
    """More words than the change needs, where nobody asked for an account of it."""
    if not reading.rollout.changed or ASKED_TO_TELL.search(reading.instruction):
        return
    allowed = FINAL_WORDS + WORDS_A_FILE * max(0, len(reading.rollout.changed) - FREE_FILES)
    count = len(reading.final.split())
    if count > allowed:
        yield from reading.final_target(
            "final_too_long", f"{count} words for {len(reading.rollout.changed)} changed files"
        )


def final_names_nothing(reading: Reading) -> Iterator[Target]:
    """Something was changed, and the closing words name neither a file nor a function of it."""
    words = reading.final
    if not reading.rollout.changed or not words.strip():
        return
    said = set(re.findall(r"\w+", words.lower()))
    names = {name.lower() for name in _changed_names(reading)}
    files = [path.rpartition("/")[2] for path in reading.rollout.changed]
    if not said & names and not any(name in words for name in files):
        yield from reading.final_target("final_names_nothing", f"changed {', '.join(files[:3])}; says: {words}")


def _changed_names(reading: Reading) -> Iterator[str]:
    """Every name by which what was changed can be told: files and their folders, functions, names in the lines."""
    rollout = reading.rollout
    for path, text in rollout.changed.items():
        yield from (part for part in re.findall(r"\w+", path) if len(part) > 1 and part not in ("py", "src", "lib"))
        if not rollout.diff:
            yield from _names(text or "")
    lines = [line for line in rollout.diff.splitlines() if not line.startswith(("---", "+++"))]
    yield from _names("\n".join(lines))


def _names(text: str) -> set[str]:
    return {*DEFINED.findall(text), *CODE_NAME.findall(text)} - set(keyword.kwlist)


def _was_to_change(reading: Reading) -> bool:
    """A task of ours asks for one, unless it is there to be left alone."""
    if reading.task is not None and reading.task.leave:
        return False
    if reading.task is not None and (reading.task.deleted or reading.task.fail_to_pass):
        return True
    return bool(CHANGE.search(reading.instruction)) and not NO_CHANGE_ASKED.search(reading.instruction)


def _prose(reading: Reading) -> str:
    return CODE.sub("", reading.final).strip()
