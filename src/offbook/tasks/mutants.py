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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offbook.tasks.blanks import Blanks, blanks_from

NAME = "mutants.json"
DRAWN = 12  # tests whose mutants are run in a grading


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of a test file: these bytes of it become `text`. No other test uses them."""

    test: str  # path::name or path::Class::name
    start: int
    end: int
    text: str
    kind: str  # value or raises: what was changed
    fails: tuple[str, ...] = ()  # node ids that right code fails then
    others: tuple[str, ...] = ()  # its other cases, which are run too: a mutant has as many as the test

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Mutants:
    """The contents of mutants.json: how a task's tests are checked."""

    mutants: tuple[Mutant, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # path -> digest of the test file that they are edits of
    saw: tuple[tuple[str, str], ...] = ()  # what the right code itself looks at (SuiteRun.saw)
    blanks: Blanks = field(default_factory=Blanks)

    def __len__(self) -> int:
        """The number of mutants and blanked tests, by which a task knows that its file is whole."""
        return len(self.mutants) + len(self.blanks.cases)

    @property
    def tests(self) -> set[str]:
        return {mutant.test for mutant in self.mutants}

    def blank(self, nodes: Iterable[str]) -> set[str]:
        """The tests of which a blank round hides every expected value."""
        return {base_of(node) for node in nodes} & self.blanks.cases.keys() - self.blanks.left.keys()


def write_mutants(tests: Path, mutants: Mutants) -> None:
    """No file where there are none: such a task is graded without."""
    if mutants:
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
        mutants = [{**one, "fails": tuple(one["fails"]), "others": tuple(one["others"])} for one in found["mutants"]]
        if any(base_of(node) != one["test"] for one in mutants for node in one["fails"]):
            raise ValueError("inherited tests")
        for path, digest in found["files"].items():
            if digest != digest_of(((hidden or tests / "hidden") / path).read_bytes()):
                raise ValueError(path)
        return Mutants(
            tuple(Mutant(**one) for one in mutants),
            found["files"],
            tuple((what, path) for what, path in found["saw"]),
            blanks_from(found["blanks"]),
        )
    except (ValueError, TypeError, LookupError) as error:
        why = f"{file} does not fit this version or the hidden tests ({error}); make it again"
        raise ValueError(why) from None


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def base_of(node: str) -> str:
    """A test without its parameters."""
    return node.partition("[")[0]


@dataclass(frozen=True, slots=True)
class Draw:
    """The mutants that replace their tests, by round. The last round also runs everything else."""

    rounds: tuple[tuple[Mutant, ...], ...] = ((),)

    @property
    def tests(self) -> set[str]:
        return {mutant.test for mutants in self.rounds for mutant in mutants}

    def own(self, number: int) -> set[str]:
        """The drawn tests that are themselves in a round."""
        return self.tests - {mutant.test for mutant in self.rounds[number]}

    def nodes(self, expected: Sequence[str], number: int) -> list[str]:
        """Node ids of a round: tests that are themselves, and mutants."""
        own = self.own(number)
        nodes = {node for node in expected if base_of(node) in own}
        return sorted(nodes.union(*(mutant.fails + mutant.others for mutant in self.rounds[number])))


def draw(mutants: Collection[Mutant], rng: random.Random | None = None) -> Draw:
    """Choose which tests are mutated in which rounds. Each drawn test is itself in at least one round and a mutant in
    at least one."""
    rng = rng or random.SystemRandom()
    by_test: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_test.setdefault(mutant.test, []).append(mutant)
    if not by_test:
        return Draw()
    drawn = rng.sample(sorted(by_test), min(DRAWN, len(by_test)))
    num_rounds = 2 if len(drawn) >= 4 else 4  # so that there are over a dozen ways to draw
    rounds: list[list[Mutant]] = [[] for _ in range(num_rounds)]
    for test in drawn:
        pattern = rng.randrange(1, 2**num_rounds - 1)
        for number, mutated in enumerate(rounds):
            if pattern >> number & 1:
                mutated.append(rng.choice(by_test[test]))
    return Draw(tuple(map(tuple, rounds)))
