"""What of a suite stands in the training tasks: the same words, the same code, the same functions under other names.

A suite's task is looked at as its request, its solution and the functions that the solution completes; a training task
as everything that its agent and its grader see. Three overlaps: runs of 13 tokens of the request, runs of 8 tokens of
the solution's code, and functions whose body is equal but for its names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Overlap:
    """Shares of one task's runs that training tasks have too; `bodies` are functions with an equal body there."""

    task: str
    words: float
    code: float
    bodies: tuple[str, ...]
    same_id: bool
    too_short: bool  # neither request nor solution is as long as a run

    @property
    def contained(self) -> bool:
        return self.same_id or self.words >= ALARM or self.code >= ALARM or bool(self.bodies)


class Runs:
    """The runs of tokens of several texts, and which of them other texts have too."""

    def __init__(self, texts: Iterable[str], length: int):
        each = [runs(text, length) for text in texts]
        self.length = length
        self.sizes = np.array([len(one) for one in each], dtype=int)
        self.owner = np.repeat(np.arange(len(each)), self.sizes)
        self.hashes = np.concatenate([NO_RUNS, *each])
        self.found = np.zeros(len(self.hashes), dtype=bool)

    def in_text(self, text: str) -> Any:
        return np.isin(self.hashes, runs(text, self.length))

    def shares(self, found: Any) -> Any:
        """Of each text the share of its runs."""
        return np.bincount(self.owner[found], minlength=len(self.sizes)) / np.maximum(1, self.sizes)


class Sought:
    """What would give tasks away: their requests, the code that their solutions add, and the functions that these
    complete."""

    def __init__(self, tasks: Sequence[Task]):
        solutions = [_solution(task) for task in tasks]
        pairs = list(zip(tasks, solutions, strict=True))
        self.words = Runs([task.instruction for task in tasks], WORDS)
        self.code = Runs(["\n".join(_added(task, solution)) for task, solution in pairs], CODE)
        self.functions = [list(_completed(task, solution)) for task, solution in pairs]  # names and bodies
        self.bodies = frozenset(body for functions in self.functions for _, body in functions)

    def in_text(self, text: str) -> bool:
        """Whether a file has half of a solution's code, or a function with an equal body."""
        hits = self.code.shares(self.code.in_text(text))
        return bool((hits >= ALARM).any()) or any(body in self.bodies for _, body in function_bodies(text))


def contamination(suite: list[Task], train: list[Task]) -> dict[str, Any]:
    """Means over the suite's tasks, how many are contained by each sign, and the worst by name."""
    sought = Sought(suite)
    bodies = set[str]()
    seen = set[int]()  # files that several tasks have in common are read once
    for path, text in (shown for task in train for shown in _shown(task)):
        if hash(text) in seen:
            continue
        seen.add(hash(text))
        sought.words.found |= sought.words.in_text(text)
        if path.endswith(".py"):
            sought.code.found |= sought.code.in_text(text)
            bodies |= {body for _, body in function_bodies(text)} & sought.bodies
    ids = {task.id for task in train}
    repositories = {repository_of(task.origin) for task in train}
    words, code = (each.shares(each.found) for each in (sought.words, sought.code))
    overlaps = [
        Overlap(
            task=task.id,
            words=float(words[number]),
            code=float(code[number]),
            bodies=tuple(sorted({name for name, body in sought.functions[number] if body in bodies})),
            same_id=task.id in ids,
            too_short=not (sought.words.sizes[number] or sought.code.sizes[number] or sought.functions[number]),
        )
        for number, task in enumerate(suite)
    ]
    count = max(1, len(overlaps))
    worst = sorted(overlaps, key=lambda one: (one.same_id, len(one.bodies) > 0, one.code + one.words), reverse=True)
    return {
        "train_tasks": len(train),
        "suite_tasks": len(suite),
        "same_task": sum(one.same_id for one in overlaps),
        "same_repository": sum(repository_of(task.origin) in repositories for task in suite),
        "words_13": float(words.sum()) / count,
        "code_8": float(code.sum()) / count,
        "tasks_words_13": int((words >= ALARM).sum()),
        "tasks_code_8": int((code >= ALARM).sum()),
        "tasks_equal_body": sum(bool(one.bodies) for one in overlaps),
        "contained": sum(one.contained for one in overlaps),
        "too_short": sum(one.too_short for one in overlaps),
        "worst": [asdict(one) for one in worst[:NUM_WORST] if one.contained],
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


def _solution(task: Task) -> dict[str, str]:
    """The files that the solution changes, as it leaves them. A folder of others may have none: then nothing."""
    try:
        return {path: text for path, text in gold_changes(task).items() if text is not None}
    except OffbookError:
        return {}


def _added(task: Task, solution: dict[str, str]) -> Iterator[str]:
    """The lines of the solution that the tree does not have."""
    for path, text in solution.items():
        before = set(_read(task.tree / path).splitlines())
        yield "\n".join(line for line in text.splitlines() if line not in before)


def _completed(task: Task, solution: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The functions that are different, or only there, with the solution."""
    for path, text in solution.items():
        if path.endswith(".py"):
            before = set(function_bodies(_read(task.tree / path)))
            yield from (each for each in function_bodies(text) if each not in before)


def _shown(task: Task) -> Iterator[tuple[str, str]]:
    yield "instruction.md", task.instruction
    yield from _solution(task).items()
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
