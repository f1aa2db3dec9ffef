"""What of a suite is in the training tasks: the same words, the same code, the same functions under other names.

Compared are a suite task's request, its solution and the functions that the solution completes with everything that
the agents and graders of the training tasks see: runs of 13 tokens of the request, runs of 8 tokens of the solution's
code, and functions whose bodies are equal but for names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from packaging.utils import canonicalize_name

from offbook.core.copies import function_bodies, named_shingles, normalise, texts_below, tokens_of
from offbook.tasks.check import gold_changes
from offbook.types import OffbookError, Task

WORDS = 13  # tokens in a run
CODE = 8
ALARM = 0.5  # the share of a task's runs from which on it counts as contained
NUM_WORST = 10
ARCHIVE = re.compile(r"\.(git|zip|tgz|tar(\.\w+)?)$")
STATE = re.compile(r"-(main|master|trunk|develop|head|[0-9a-f]{40}|v\d[\w.+-]*|\d+\.[\w.+-]*)$", re.IGNORECASE)


class Sought:
    """What would give tasks away: their requests, the code that their solutions add, and the functions that these
    complete."""

    def __init__(self, tasks: Iterable[Task]):
        self.words: list[set[int]] = []  # runs of each task
        self.code: list[set[int]] = []
        self.functions: list[dict[str, str]] = []  # names by bodies
        for task in tasks:
            added: list[str] = []
            functions: dict[str, str] = {}
            for path, before, after in _solution(task):
                known = {*before.splitlines()}
                added += [line for line in after.splitlines() if line not in known]
                if path.endswith(".py"):
                    functions.update({*function_bodies(after)} - {*function_bodies(before)})
            self.words.append(runs(task.instruction, WORDS))
            self.code.append(runs("\n".join(added), CODE))
            self.functions.append(functions)
        self.every_word = set().union(*self.words)
        self.every_code = set().union(*self.code)
        self.bodies = set().union(*self.functions)

    def in_text(self, text: str) -> bool:
        """Whether a file has half of a solution's code, or a function with an equal body."""
        is_copied = max(shares(self.code, runs(text, CODE)), default=0.0) >= ALARM
        return is_copied or any(body in self.bodies for body, _ in function_bodies(text))


def shares(sought: Iterable[set[int]], found: set[int]) -> list[float]:
    """Of each the share that was found."""
    return [len(each & found) / max(1, len(each)) for each in sought]


def contamination(suite: list[Task], train: list[Task]) -> dict[str, Any]:
    """Means over the suite's tasks, how many are contained by each sign, and the worst by name."""
    sought = Sought(suite)
    found_words: set[int] = set()
    found_code: set[int] = set()
    bodies: set[str] = set()
    seen: set[int] = set()  # files that several tasks have in common are read once
    for path, text in (shown for task in train for shown in _shown(task)):
        if hash(text) in seen:
            continue
        seen.add(hash(text))
        found_words |= runs(text, WORDS) & sought.every_word
        if path.endswith(".py"):
            found_code |= runs(text, CODE) & sought.every_code
            bodies |= {body for body, _ in function_bodies(text)} & sought.bodies
    ids = {task.id for task in train}
    repositories = {repository_of(task.origin) for task in train}
    words = shares(sought.words, found_words)
    code = shares(sought.code, found_code)
    rows: list[dict[str, Any]] = []
    for task, of_words, of_code, functions in zip(suite, words, code, sought.functions, strict=True):
        equal = tuple(sorted({name for body, name in functions.items() if body in bodies}))
        same = task.id in ids
        if same or equal or max(of_words, of_code) >= ALARM:
            rows.append({"task": task.id, "words": of_words, "code": of_code, "bodies": equal, "same_id": same})
    rows.sort(key=lambda row: (row["same_id"], row["bodies"] != (), row["code"] + row["words"]), reverse=True)
    sizes = zip(sought.words, sought.code, sought.functions, strict=True)
    return {
        "train_tasks": len(train),
        "suite_tasks": len(suite),
        "same_task": sum(row["same_id"] for row in rows),
        "same_repository": sum(repository_of(task.origin) in repositories for task in suite),
        "words_13": sum(words) / max(1, len(suite)),
        "code_8": sum(code) / max(1, len(suite)),
        "tasks_words_13": sum(share >= ALARM for share in words),
        "tasks_code_8": sum(share >= ALARM for share in code),
        "tasks_equal_body": sum(row["bodies"] != () for row in rows),
        "contained": len(rows),
        "too_short": sum(not any(each) for each in sizes),
        "worst": rows[:NUM_WORST],
    }


def repository_of(origin: str) -> str:
    """As the package index would spell it, in any version: of `pypi:NAME`, `NAME==1.0`, a URL, `OWNER/NAME`,
    `NAME-1.0.tar.gz` or `NAME-main` the name."""
    last = re.split(r"[/:]", re.split(r"[?#;]", origin)[0].rstrip("/ "))[-1]
    name = ARCHIVE.sub("", re.split(r"[@=<>~!\[ ]", last)[0])
    return canonicalize_name(STATE.sub("", name))


def runs(text: str, length: int) -> set[int]:
    """Every run of `length` tokens, as one number each."""
    return {*named_shingles(tokens_of(normalise(text)), length).tolist()}


def _solution(task: Task) -> Iterator[tuple[str, str, str]]:
    """The files that the solution changes, before and after. A folder of others may have none: then nothing."""
    with suppress(OffbookError):
        for path, text in gold_changes(task).items():
            before = task.tree / path
            if text is not None:
                yield path, before.read_text(errors="replace") if before.is_file() else "", text


def _shown(task: Task) -> Iterator[tuple[str, str]]:
    yield "instruction.md", task.instruction
    for path, _, text in _solution(task):
        yield path, text
    for root in (task.tree, task.hidden_tests):
        for name, text in texts_below(root):
            yield name.as_posix(), text
