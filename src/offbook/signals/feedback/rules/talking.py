"""How a rollout ends: with nothing done, with a question, or with a final message that says too much or too little."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator

from offbook.signals.trajectory import At, Trajectory
from offbook.signals.trajectory.diff import DEFINED

Found = Iterator[tuple[At, str]]  # messages that broke a rule, and what shows it
FINAL_WORDS = 150
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
CODE_NAME = re.compile(r"\b(?:[A-Za-z]\w*_\w+|_\w+|[a-z]+[A-Z]\w*|[A-Z]\w*[a-z][A-Z]\w*)\b")


def finished_without_edit(trajectory: Trajectory) -> Found:
    """A task that asks for a change ends with none, and the last message does not say why."""
    said_why = "?" in trajectory.prose or NOT_NEEDED.search(trajectory.final)
    if trajectory.end and _left_undone(trajectory) and not said_why:
        yield trajectory.end, "no file was changed"


def asked_instead(trajectory: Trajectory) -> Found:
    """A task that asks for a change ends with a question and nothing changed."""
    fine = INVITED.search(trajectory.instruction) or NOT_NEEDED.search(trajectory.prose)
    if trajectory.end and trajectory.question and _left_undone(trajectory) and not fine:
        yield trajectory.end, trajectory.question


def _left_undone(trajectory: Trajectory) -> bool:
    """Nothing was changed where a change was asked for: by a task of ours, unless it is there to be left alone."""
    task = trajectory.task
    if not trajectory.changed_nothing or (task is not None and task.leave):
        return False
    if task is not None and (task.deleted or task.fail_to_pass):
        return True
    return bool(CHANGE.search(trajectory.instruction)) and not NO_CHANGE_ASKED.search(trajectory.instruction)


def final_too_long(trajectory: Trajectory) -> Found:
    """More words than the change needs, where the request does not ask for an account of it."""
    changed, count = len(trajectory.rollout.changed), len(trajectory.final.split())
    allowed = FINAL_WORDS + WORDS_A_FILE * max(0, changed - FREE_FILES)
    if trajectory.end and changed and count > allowed and not ASKED_TO_TELL.search(trajectory.instruction):
        yield trajectory.end, f"{count} words for {changed} changed files"


def final_names_nothing(trajectory: Trajectory) -> Found:
    """Something was changed, and the closing words name neither a file nor a function of it."""
    words = trajectory.final
    changed = trajectory.rollout.changed
    if not trajectory.end or not changed or not words.strip():
        return
    texts = [line for file in trajectory.diff for line in (*file.added.values(), *file.removed, *file.around)]
    code = "\n".join(texts if trajectory.rollout.diff else [text or "" for text in changed.values()])
    parts = [part for path in changed for part in re.findall(r"\w+", path) if len(part) > 1]
    names = {*DEFINED.findall(code), *CODE_NAME.findall(code), *parts} - {*keyword.kwlist, "py", "src", "lib"}
    files = [path.rpartition("/")[2] for path in changed]
    said = re.findall(r"\w+", words.lower())
    is_named = not {name.lower() for name in names}.isdisjoint(said) or any(name in words for name in files)
    if not is_named:
        yield trajectory.end, f"changed {', '.join(files[:3])}; says: {words}"
