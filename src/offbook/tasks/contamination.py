"""What of a suite stands in the training tasks: the same words, the same code, the same functions under other names.

A suite's task is looked at as its request, its solution and the functions that the solution completes; a training task
as everything that its agent and its grader see. Three overlaps: runs of 13 tokens of the request, runs of 8 tokens of
the solution's code, and functions whose body is equal but for its names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from packaging.utils import canonicalize_name

from offbook.core.copies import Hashes, named_shingles, normalise, parsed, structure, tokens_of, undocumented
from offbook.tasks.check import gold_changes
from offbook.types import OffbookError, Task

WORDS = 13  # tokens in a run
CODE = 8
FEWEST_PARTS = 12  # of a body: shorter ones, such as `return self.name`, are equal by chance
ALARM = 0.5  # the share of a task's runs from which on it counts as contained
MAX_BYTES = 1 << 20  # of a file that is read
NUM_WORST = 10
ARCHIVE = re.compile(r"\.(git|zip|tgz|tar(\.\w+)?)$")
STATE = re.compile(r"-(main|master|trunk|develop|head|[0-9a-f]{40}|v\d[\w.+-]*|\d+\.[\w.+-]*)$", re.IGNORECASE)
NO_RUNS: Hashes = np.zeros(0, dtype=np.uint64)


class Sought:
    """What would give tasks away: their requests, the code that their solutions add, and the functions that these
    complete."""

    def __init__(self, tasks: Iterable[Task]):
        self.words: list[Hashes] = []  # runs of each task
        self.code: list[Hashes] = []
        self.functions: list[set[tuple[str, str]]] = []  # names and bodies
        for task in tasks:
            added = []
            functions = set[tuple[str, str]]()
            for path, before, after in _solution(task):
                known = {*before.splitlines()}
                added += [line for line in after.splitlines() if line not in known]
                if path.endswith(".py"):
                    functions |= {*function_bodies(after)} - {*function_bodies(before)}
            self.words.append(runs(task.instruction, WORDS))
            self.code.append(runs("\n".join(added), CODE))
            self.functions.append(functions)
        self.every_word = np.concatenate([NO_RUNS, *self.words])
        self.every_code = np.concatenate([NO_RUNS, *self.code])
        self.bodies = {body for functions in self.functions for _, body in functions}

    def in_text(self, text: str) -> bool:
        """Whether a file has half of a solution's code, or a function with an equal body."""
        common = np.intersect1d(self.every_code, runs(text, CODE))
        if max(shares(self.code, common), default=0.0) >= ALARM:
            return True
        return any(body in self.bodies for _, body in function_bodies(text))


def shares(sought: Iterable[Hashes], found: Hashes) -> list[float]:
    """Of each the share that was found."""
    return [float(np.isin(each, found).mean()) if len(each) else 0.0 for each in sought]


def contamination(suite: list[Task], train: list[Task]) -> dict[str, Any]:
    """Means over the suite's tasks, how many are contained by each sign, and the worst by name."""
    sought = Sought(suite)
    found_words = [NO_RUNS]
    found_code = [NO_RUNS]
    bodies = set[str]()
    seen = set[int]()  # files that several tasks have in common are read once
    for path, text in (shown for task in train for shown in _shown(task)):
        if hash(text) in seen:
            continue
        seen.add(hash(text))
        found_words.append(np.intersect1d(sought.every_word, runs(text, WORDS)))
        if path.endswith(".py"):
            found_code.append(np.intersect1d(sought.every_code, runs(text, CODE)))
            bodies |= {body for _, body in function_bodies(text)} & sought.bodies
    words = shares(sought.words, np.concatenate(found_words))
    code = shares(sought.code, np.concatenate(found_code))
    ids = {task.id for task in train}
    repositories = {repository_of(task.origin) for task in train}
    rows: list[dict[str, Any]] = []
    for number, task in enumerate(suite):
        equal = tuple(sorted({name for name, body in sought.functions[number] if body in bodies}))
        row = {"task": task.id, "words": words[number], "code": code[number], "bodies": equal}
        rows.append({**row, "same_id": task.id in ids})
    contained = [row for row in rows if row["same_id"] or row["bodies"] or max(row["words"], row["code"]) >= ALARM]
    worst = sorted(contained, key=lambda row: (row["same_id"], row["bodies"] != (), row["code"] + row["words"]))
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
        "contained": len(contained),
        "too_short": sum(not any(len(one) for one in each) for each in sizes),
        "worst": worst[::-1][:NUM_WORST],
    }


def repository_of(origin: str) -> str:
    """As the package index would spell it, in any version: of `pypi:NAME`, `NAME==1.0`, a URL, `OWNER/NAME`,
    `NAME-1.0.tar.gz` or `NAME-main` the name."""
    last = re.split(r"[/:]", re.split(r"[?#;]", origin)[0].rstrip("/ "))[-1]
    name = ARCHIVE.sub("", re.split(r"[@=<>~!\[ ]", last)[0])
    return canonicalize_name(STATE.sub("", name))


def runs(text: str, length: int) -> Hashes:
    """Every run of `length` tokens, as one number each."""
    return np.unique(named_shingles(tokens_of(normalise(text)), length))


def function_bodies(source: str) -> Iterator[tuple[str, str]]:
    """The functions of a file and their bodies with names numbered as they come (copies.structure)."""
    _, tree = parsed(source)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = structure(node.body) if undocumented(node.body) else ""
            if body.count(" ") + 1 >= FEWEST_PARTS:
                yield node.name, body


def _solution(task: Task) -> Iterator[tuple[str, str, str]]:
    """The files that the solution changes, before and after. A folder of others may have none: then nothing."""
    with suppress(OffbookError):
        for path, text in gold_changes(task).items():
            if text is not None:
                yield path, _read(task.tree / path), text


def _shown(task: Task) -> Iterator[tuple[str, str]]:
    yield "instruction.md", task.instruction
    for path, _, text in _solution(task):
        yield path, text
    for root in (task.tree, task.hidden_tests):
        for file in sorted(root.rglob("*")):
            if file.is_file() and ".git" not in file.relative_to(root).parts:
                yield file.name, _read(file)


def _read(path: Path) -> str:
    """Nothing of a file that is missing, very large or no text."""
    try:
        return path.read_text() if path.is_file() and path.stat().st_size <= MAX_BYTES else ""
    except UnicodeDecodeError:
        return ""
