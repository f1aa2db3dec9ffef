"""Mutants: a task's own tests with another expected value, which right code fails.

Code under test shares a process with the tests and can make that process say anything. What it cannot do is to tell a
test from its mutant without knowing the right answer: a mutant is one edit of the test file, so names, lines and the
number of tests are the same, and a process never sees both. A grading has a few rounds, each in a process of its own.
In each a test that was drawn is itself or one of its mutants, at random, and only the judge outside knows which.
Code that passes the test and does not fail the mutant has forged one of them.

Standard library only: task folders carry a copy of this for their own judge.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from offbook.tasks.blanks import Blanks, blanks_from
from offbook.tasks.suite_run import SuiteRun

NAME = "mutants.json"
DRAWN = 12  # tests whose mutants are run in a grading
ENOUGH = 16  # as many ways to draw make guessing hopeless; few tests need more rounds for that
MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of a test file: these bytes of it become `text`."""

    test: str  # path::name or path::Class::name, where the test is written down
    start: int
    end: int
    text: str
    kind: str  # value, raises or check: what was changed
    fails: tuple[str, ...] = ()  # node ids that right code fails then
    others: tuple[str, ...] = ()  # its other cases, which are run too: a mutant has as many as the test
    shared: tuple[str, ...] = ()  # other tests that the edit reaches: of a table that they have in common

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]

    @property
    def reaches(self) -> set[str]:
        return {self.test, *self.shared}


@dataclass(frozen=True, slots=True)
class Mutants:
    """The contents of mutants.json."""

    mutants: tuple[Mutant, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # path -> digest of the test file that they are edits of
    saw: tuple[tuple[str, str], ...] = ()  # what the right code itself looks at (SuiteRun.saw)
    inherited: Mapping[str, str] = field(default_factory=dict)  # a test of a class -> where it is written down
    blanks: Blanks = field(default_factory=Blanks)

    @property
    def tests(self) -> set[str]:
        """The tests whose mutants prove something. An inverted check proves only that the runner runs: a value that
        equals everything fails it anyway."""
        return {mutant.test for mutant in self.mutants if mutant.kind != "check"}

    def blank(self, nodes: Iterable[str]) -> set[str]:
        """The tests, where they are written down, of which a blank round hides every expected value."""
        bases = {base_of(node) for node in nodes}
        return {self.test_of(base) for base in bases} - {
            self.test_of(base) for base in bases - self.blanks.whole(bases)
        }

    def test_of(self, node: str) -> str:
        """What a node id is a case of."""
        base = base_of(node)
        return self.inherited.get(base, base)


def write_mutants(tests: Path, mutants: Mutants) -> None:
    """No file where there are none: such a task is graded without."""
    if mutants.mutants or mutants.blanks.cases:
        (tests / NAME).write_text(json.dumps(asdict(mutants), indent=1) + "\n")
    else:
        (tests / NAME).unlink(missing_ok=True)


def read_mutants(tests: Path, hidden: Path | None = None) -> Mutants:
    """Read mutants.json of a task's tests/ folder. ValueError if it does not fit the hidden tests."""
    file = tests / NAME
    if not file.is_file():
        return Mutants()
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); make the task again, or remove {NAME}") from None
    for path, digest in found["files"].items():
        test = (hidden or tests / "hidden") / path
        if digest != digest_of(test.read_bytes()):
            raise ValueError(f"{file} does not fit {test}; make the task again, or remove {NAME}")
    nodes = ("fails", "others", "shared")
    mutants = tuple(
        Mutant(**{**mutant, **{key: tuple(mutant.get(key, ())) for key in nodes}}) for mutant in found["mutants"]
    )
    saw = tuple((what, path) for what, path in found["saw"])
    blanks = blanks_from(found["blanks"]) if "blanks" in found else Blanks()  # folders made before blank rounds
    return Mutants(mutants, found["files"], saw, found["inherited"], blanks)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def base_of(node: str) -> str:
    """A test without its parameters."""
    return node.partition("[")[0]


def edited(data: bytes, mutants: Iterable[Mutant]) -> str:
    """A test file with mutants in the place of some of its tests."""
    for mutant in sorted(mutants, key=lambda mutant: -mutant.start):
        data = data[: mutant.start] + mutant.text.encode() + data[mutant.end :]
    return data.decode()


@dataclass(frozen=True, slots=True)
class Draw:
    """The mutants that replace their tests, by round. The last round also runs everything else."""

    rounds: tuple[tuple[Mutant, ...], ...]
    mutants: Mutants = field(default_factory=Mutants)

    @property
    def tests(self) -> set[str]:
        return set[str]().union(*(mutant.reaches for mutants in self.rounds for mutant in mutants))

    def files(self, hidden: Path, number: int) -> dict[str, str]:
        """The test files of the drawn tests, as a round has them."""
        by_path: dict[str, list[Mutant]] = {
            path: [] for path in sorted({test.partition("::")[0] for test in self.tests})
        }
        for mutant in self.rounds[number]:
            by_path[mutant.path].append(mutant)
        return {path: edited((hidden / path).read_bytes(), mutants) for path, mutants in by_path.items()}

    def nodes(self, expected: Sequence[str], number: int) -> list[str]:
        """Node ids of this round: unmodified tests, mutants, and other tests that an edit reaches. The latter prove
        nothing; they keep the number of tests constant."""
        mutants = self.rounds[number]
        shared = set[str]().union(*(mutant.shared for mutant in mutants))
        nodes = {node for node in expected if self.mutants.test_of(node) in self.tests - self.changed(number)}
        nodes |= {base_of(node) for node in expected if self.mutants.test_of(node) in shared}
        return sorted(nodes.union(*(mutant.fails + mutant.others for mutant in mutants)))

    def changed(self, number: int) -> set[str]:
        """The tests that are not themselves in a round."""
        return set[str]().union(*(mutant.reaches for mutant in self.rounds[number]))


def draw(mutants: Mutants, rng: random.Random | None = None) -> Draw | None:
    """Choose which tests are mutated in which rounds; None without mutants. Each drawn test is unmodified in at least
    one round and a mutant in at least one. Tests that share a table are unmodified in the same rounds."""
    rng = rng or random.SystemRandom()
    tests = sorted({mutant.test for mutant in mutants.mutants})
    if not tests:
        return None
    drawn = {*rng.sample(tests, min(DRAWN, len(tests)))}
    groups = [group for group in _groups(mutants.mutants) if any(mutant.test in drawn for mutant in group)]
    num_rounds = 2
    while (2**num_rounds - 2) ** len(groups) < ENOUGH and num_rounds < MAX_ROUNDS:
        num_rounds += 1
    rounds: list[list[Mutant]] = [[] for _ in range(num_rounds)]
    for group in groups:
        pattern = rng.randrange(1, 2**num_rounds - 1)
        for number in range(num_rounds):
            reached = set[str]()
            for mutant in rng.sample(group, len(group)) if pattern >> number & 1 else ():
                if not reached & mutant.reaches:
                    reached |= mutant.reaches
                    rounds[number].append(mutant)
    return Draw(tuple(map(tuple, rounds)), mutants)


def _groups(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Mutants grouped so that those that reach a common test, directly or through others, are together."""
    groups: list[tuple[set[str], list[Mutant]]] = []
    for mutant in mutants:
        near = [group for group in groups if group[0] & mutant.reaches]
        groups = [group for group in groups if not group[0] & mutant.reaches]
        tests = mutant.reaches.union(*(tests for tests, _ in near))
        groups.append((tests, [mutant, *(one for _, group in near for one in group)]))
    return [group for _, group in groups]


def combined(runs: Sequence[SuiteRun], drawn: Draw) -> tuple[SuiteRun, set[str], set[str]]:
    """Combine the rounds into: the result of the unmodified tests; passing tests with a mutant that did not fail; those
    of them with a mutant that passed.

    A mutant that passes where its test fails is a sign of wrong code, which the test's failure shows already.
    """
    whole, test_of, tests = runs[-1], drawn.mutants.test_of, drawn.tests
    run = replace(
        whole,
        timed_out=any(one.timed_out for one in runs),
        tampered=next((one.tampered for one in runs if one.tampered), ""),
        passed={node for node in whole.passed if test_of(node) not in tests},
        failed={node: why for node, why in whole.failed.items() if test_of(node) not in tests},
        saw=set[tuple[str, str]]().union(*(one.saw for one in runs)),
    )
    quiet, passed = set[str](), set[str]()
    for number, (one, mutants) in enumerate(zip(runs, drawn.rounds, strict=True)):
        run.broken.update(one.broken)
        for mutant in mutants:
            if not one.failed.keys() >= {*mutant.fails}:
                quiet.add(mutant.test)
            if one.passed & {*mutant.fails}:
                passed.add(mutant.test)
        for node in one.collected:
            if test_of(node) in tests - drawn.changed(number):
                if node in one.passed:
                    run.passed.add(node)
                else:
                    run.failed.setdefault(node, one.failed.get(node) or one.skipped.get(node) or "not run")
    run.passed -= run.failed.keys()
    solved = {test_of(node) for node in run.passed} - {test_of(node) for node in run.failed}
    return run, quiet & solved, passed & solved
