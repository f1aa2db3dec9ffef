"""A round of tests as the worker gets it, and the worker's report as a SuiteRun. Standard library only: task folders
carry a copy of this for their own judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PER_TEST_S = 10.0
FIRST_ROW = '["round"]\n'
FOREIGN = "something else than the test runner wrote to its results"
Function = tuple[str, str]  # a path and a qualified name


@dataclass(slots=True)
class SuiteRun:
    """A test is in at most one of passed, failed and skipped, and in none where the run ended before it."""

    timed_out: bool
    output: str  # the end of what it printed
    tampered: str  # why the results are not to be believed
    collected: tuple[str, ...] = ()
    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # node id -> why
    skipped: dict[str, str] = field(default_factory=dict)  # expected failures too
    broken: dict[str, str] = field(default_factory=dict)  # files that could not be collected
    seconds: dict[str, float] = field(default_factory=dict)
    running: str | None = None  # the test that the run ended in, if it did not reach its end
    exit_code: int | None = None  # of pytest, None where it did not come to its end
    errors: dict[str, str] = field(default_factory=dict)  # failed -> "assertion", or the type of another exception
    saw: set[tuple[str, str]] = field(default_factory=set)  # (what, path) of what code of the product looked at
    returned: dict[int, str] = field(default_factory=dict)  # number of a call -> JSON of its value
    blanks: dict[str, list[Any]] = field(default_factory=dict)  # node id -> (place, data) in the order of reporting
    functions: list[Function] = field(default_factory=list)  # traced runs only
    enters: dict[str, tuple[int, ...]] = field(default_factory=dict)  # node id, or "" for the import, -> functions


@dataclass(frozen=True, slots=True)
class Round:
    """One run of tests. What it changes in the tree is undone after it, except in the last round."""

    files: Sequence[str]
    tests: Sequence[str] | None = None  # node ids, with or without parameters; None: all
    changes: Mapping[str, str | None] = field(default_factory=dict)  # path -> text, None takes a file away
    timeout_s: float = 60.0  # except in the last round, which has what is left
    per_test_s: float = PER_TEST_S
    blank: bool = False  # expected values are recorders
    calls: Sequence[tuple[str, str, str]] = ()  # in the place of tests: module, function, text of its arguments
    apart: bool = False  # the calls, then the tests, in a process that does not look like pytest (inside/apart.py)

    def order(self, options: Sequence[str]) -> str:
        """For the worker."""
        names = ("tests", "files", "changes", "timeout_s", "per_test_s", "calls", "blank", "apart")
        fields = {name: getattr(self, name) for name in names}
        return json.dumps({**fields, "options": list(options)}, default=list)


def has_begun(report: str) -> bool:
    """Whether the worker reached its first round. Before that, no code of the tree has run."""
    return report.startswith(FIRST_ROW)


def runs_of(report: str, num_rounds: int, output: str, timed_out: bool) -> list[SuiteRun]:
    """One SuiteRun per round. The code under test shares the worker's process, so all of it is a claim; `tampered` says
    why the worker cannot have written it."""
    rounds: list[list[list[Any]]] = []
    tampered = ""
    for line in report.split("\n")[:-1]:  # after the last line break stands what a killed run left half-written
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if row == ["round"]:
            rounds.append([])
        elif isinstance(row, list) and row and rounds:
            rounds[-1].append(row)
        else:
            tampered = FOREIGN
            break
    if len(rounds) > num_rounds:
        tampered = FOREIGN
    rounds = [*rounds[:num_rounds], *([] for _ in range(num_rounds - len(rounds)))]
    return [_read(rows, output, timed_out, tampered) for rows in rounds]


def _read(rows: list[list[Any]], output: str, timed_out: bool, tampered: str) -> SuiteRun:
    run = SuiteRun(timed_out, output, tampered)
    for row in rows:
        number = row[1] if len(row) > 1 and type(row[1]) is int and 0 <= row[1] < len(run.collected) else None
        node = "" if number is None else run.collected[number]
        match row:
            case ["collected", list(nodes)] if not run.collected and all(isinstance(one, str) for one in nodes):
                run.collected = tuple(nodes)
            case ["broken", str(path), str(reason)]:
                run.broken[path] = reason
            case ["start", _] if node:
                run.running = node
            case ["blanks", _, list(reports)] if node and node == run.running and node not in run.blanks:
                run.blanks[node] = reports
            case ["done", _, str(outcome), int() | float() as duration, str(reason), str(error)] if (
                node and node == run.running and node not in run.seconds
            ):
                run.running = None
                run.seconds[node] = duration
                if outcome == "passed":
                    run.passed.add(node)
                else:
                    (run.failed if outcome == "failed" else run.skipped)[node] = reason
                    run.errors[node] = error
            case ["saw", str(what), str(path)]:
                run.saw.add((what, path))
            case ["returned", int(call), str(text)]:
                run.returned[call] = text
            case ["function", int(), str(path), str(name)]:
                run.functions.append((path, name))
            case ["enters", int(), list(keys)] if node or row[1] < 0:
                run.enters[node] = tuple(keys)
            case ["end", int(code)]:
                run.exit_code = code
            case _:
                run.tampered = run.tampered or FOREIGN
    return run
