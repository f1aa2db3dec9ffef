"""Blank rounds: a task's own tests without their expected values.

Code under test can look up an expected value, in the running test or in a report, and can return an object that equals
everything. In a blank round there is nothing to look up: recorders replace the values (inside/blank.py), and files,
functions, classes and cases are renamed. What the code returned is compared here, outside its process, with what the
right code returned when the task was made. Each report belongs to a place in the test, and they must arrive in the
right code's order.

Standard library only: task folders carry a copy of this for their own judge.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from offbook.tasks.suite_run import Round, SuiteRun

RECORDER = re.compile(r"(__blank__(?:\.raises)?\()(\d+)")
Reports = Sequence[Sequence[Any]]  # (place, data)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, other: value in other,
    "not in": lambda value, other: value not in other,
}

ASKS = {"eq", "approx", "is", "is not", "truth", "raises", "same", *OPERATORS}


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces these bytes of a test file by `text`: one or more recorders, or the first part of a new name."""

    path: str
    start: int
    end: int
    text: str


def edited(data: bytes, edits: Iterable[Any]) -> str:
    """A test file with edits of it, or mutants."""
    for edit in sorted(edits, key=lambda edit: -edit.start):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


@dataclass(frozen=True, slots=True)
class Place:
    """The check of the data that one recorder reports.

    eq: the right code's; approx: the same but for `value` (relative, absolute); is, is not, truth: of the constant
    `value`; raises: one of the names in `value`; same: two equal values; an operator: of the literal `value`, which
    stands on the left where the operator begins with a dot.
    """

    asks: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class Blanks:
    edits: tuple[Edit, ...] = ()
    names: tuple[Edit, ...] = ()  # functions and classes that get other names
    files: tuple[str, ...] = ()  # test files that do
    places: tuple[Place, ...] = ()
    cases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # test without parameters -> its node ids
    reports: Mapping[str, Reports] = field(default_factory=dict)  # node id -> the right code's
    left: Mapping[str, str] = field(default_factory=dict)  # test -> why something in it is compared in the open


def blanks_from(found: Mapping[str, Any]) -> Blanks:
    """The inverse of `asdict`; ValueError for the checks of another version."""
    if unknown := {place["asks"].removeprefix(".") for place in found["places"]} - ASKS:
        raise ValueError(*unknown)
    return Blanks(
        edits=tuple(Edit(**edit) for edit in found["edits"]),
        names=tuple(Edit(**edit) for edit in found["names"]),
        files=tuple(found["files"]),
        places=tuple(Place(**place) for place in found["places"]),
        cases={test: tuple(nodes) for test, nodes in found["cases"].items()},
        reports=found["reports"],
        left=found["left"],
    )


@dataclass(frozen=True, slots=True)
class BlankRound:
    """A blank round, with what only the judge knows about it."""

    blanks: Blanks
    round: Round
    tests: Mapping[str, str]  # test, without parameters and as it is named in the round -> its own name
    tokens: Mapping[int, int]  # as a recorder has it -> place

    @property
    def paths(self) -> set[str]:
        """Test files that this round has in a renamed version."""
        return {test.partition("::")[0] for test in self.tests.values()}

    def cases(self, run: SuiteRun, test: str) -> list[str]:
        """The node ids that a test has in this round."""
        return [node for node in run.collected if self.tests.get(node.partition("[")[0]) == test]

    def wrong(self, run: SuiteRun) -> tuple[dict[str, str], set[str]]:
        """Failing node ids with the reason; and those of them that ran to the end and proved a different answer."""
        found: dict[str, str] = {}
        different: set[str] = set()
        for test in self.tests.values():
            own = self.blanks.cases[test]
            nodes = self.cases(run, test)
            if len(nodes) != len(own):
                found |= dict.fromkeys(own, f"{len(nodes)} of {len(own)} cases of it are there in a blank round")
                continue
            for node, name in zip(own, nodes, strict=True):
                if node not in self.blanks.reports:
                    continue
                if name not in run.passed:
                    reason = run.failed.get(name) or run.skipped.get(name) or "not run"
                    found[node] = f"where the expected value is hidden: {reason}"
                elif why := self._differs(self.blanks.reports[node], run.blanks.get(name, ())):
                    found[node] = f"where the expected value is hidden: {why[0]}"
                    different |= {node} if why[1] else set()
        return found, different

    def _differs(self, right: Reports, reports: Reports) -> tuple[str, bool] | None:
        """How these reports differ from the right code's, and whether that proves a different answer: an object that
        has no plain form proves nothing unless it equals everything."""
        valid = [one for one in reports if isinstance(one, list) and len(one) == 2 and isinstance(one[0], int)]
        for (place, gold), (token, data) in zip(right, valid, strict=False):
            if self.tokens.get(token) != place:
                return "another check came first", True
            try:
                if not holds(self.blanks.places[place], data, gold):
                    return f"{shown(data)}, not {shown(gold)}", not is_unknown(data) or is_loose(data)
            except (TypeError, ValueError, OverflowError, RecursionError):
                return "its report cannot be read", True
        if len(valid) != len(right) or len(valid) != len(reports):
            return f"{len(reports)} checks were reported, not {len(right)}", True
        return None


def blank_round(
    blanks: Blanks, tests: Collection[str], texts: Mapping[str, bytes], timeout_s: float, rng: random.Random
) -> BlankRound | None:
    """A round of those of the tests that can be blanked; None if there are none. `texts` are the test files."""
    chosen = sorted(test for test in tests if test in blanks.cases)
    paths = sorted({test.partition("::")[0] for test in chosen})
    if not chosen:
        return None
    tokens = rng.sample(range(10**6), len(blanks.places))
    numbers = iter(sorted(rng.sample(range(10**5, 10**6), len(blanks.names) + len(blanks.files))))
    old = {edit: texts[edit.path][edit.start : edit.end].decode() for edit in blanks.names if edit.path in paths}
    names: dict[tuple[str, str], str] = {}
    for edit in sorted(old, key=lambda edit: old[edit]):  # unittest runs tests in the order of their names
        names.setdefault((edit.path, old[edit]), f"{edit.text}{next(numbers)}")
    edits = [replace(edit, text=names[edit.path, name]) for edit, name in old.items()]
    for edit in blanks.edits:
        edits.append(replace(edit, text=RECORDER.sub(lambda found: f"{found[1]}{tokens[int(found[2])]}", edit.text)))
    new_paths = {path: _renamed(path, next(numbers)) if path in blanks.files else path for path in paths}
    changes: dict[str, str | None] = dict.fromkeys(paths)
    for path in paths:
        changes[new_paths[path]] = edited(texts[path], [edit for edit in edits if edit.path == path])
    named = {}
    for test in chosen:
        path, *parts = test.split("::")
        named["::".join([new_paths[path], *(names.get((path, part), part) for part in parts)])] = test
    this = Round(sorted(new_paths.values()), sorted(named), changes, timeout_s, blank=True)
    return BlankRound(blanks, this, named, {token: place for place, token in enumerate(tokens)})


def _renamed(path: str, number: int) -> str:
    name = PurePosixPath(path)
    return str(name.with_name(f"test_{number}.py" if name.name.startswith("test") else f"m{number}_test.py"))


# --- checks of reported data


def holds(place: Place, data: Any, gold: Any) -> bool:
    """Whether reported data passes the check of a place for which the right code reported `gold`."""
    match place.asks:
        case "truth":
            return truth_of(data) is (place.value == "True")
        case "is" | "is not":
            is_it = json.dumps(data) == json.dumps(ast.literal_eval(place.value))
            return is_it is (place.asks == "is") and (is_it or not is_unknown(data) or is_unknown(gold))
        case "raises":
            return isinstance(data, list) and any(name in data[1:] for name in place.value.split("|"))
    if is_unknown(data):
        return False
    match place.asks:
        case "eq":
            return json.dumps(data) == json.dumps(gold)
        case "approx":
            relative, absolute = ast.literal_eval(place.value)
            return _is_near(data, gold, relative, absolute)
        case "same":
            return isinstance(data, list) and len(data) == 3 and json.dumps(data[1]) == json.dumps(data[2])
        case asks:
            value, literal = value_of(data), ast.literal_eval(place.value)
            compare = OPERATORS[asks.removeprefix(".")]
            return bool(compare(literal, value) if asks.startswith(".") else compare(value, literal))


def is_unknown(data: Any) -> bool:
    """Whether something in it has no plain form."""
    return isinstance(data, list) and (data[:1] == ["?"] or any(map(is_unknown, data)))


def is_loose(data: Any) -> bool:
    """Whether something in it equals everything."""
    if not isinstance(data, list):
        return False
    return data[3:] == [True] if data[:1] == ["?"] else any(map(is_loose, data))


def truth_of(data: Any) -> bool:
    if not isinstance(data, list) or not data:
        return bool(data)
    match data[0]:
        case "?":
            return data[2:3] == [True]
        case "list" | "tuple" | "set" | "dict" | "deque" | "range":
            return len(data) > 1
        case "bytes":
            return bool(data[1])
    return True


def value_of(data: Any) -> Any:
    """Decode data into a plain value; ValueError for other kinds."""
    if not isinstance(data, list):
        return data
    match data:
        case ["list", *items]:
            return [*map(value_of, items)]
        case ["tuple", *items]:
            return tuple(map(value_of, items))
        case ["set", *items]:
            return {*map(value_of, items)}
        case ["dict", *pairs]:
            return {value_of(key): value_of(value) for key, value in pairs}
        case ["bytes", str(text)]:
            return text.encode("latin-1")
        case ["float", str(text)]:
            return float(text)
    raise ValueError(data)


def _is_near(data: Any, gold: Any, relative: float, absolute: float) -> bool:
    if isinstance(gold, list) and isinstance(data, list) and len(data) == len(gold):
        return all(_is_near(one, other, relative, absolute) for one, other in zip(data, gold, strict=True))
    if isinstance(gold, int | float) and isinstance(data, int | float):
        return abs(data - gold) <= 2 * max(relative * abs(gold), absolute)
    return json.dumps(data) == json.dumps(gold)


def shown(data: Any) -> str:
    try:
        text = repr(value_of(data))
    except (ValueError, TypeError):
        text = json.dumps(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
