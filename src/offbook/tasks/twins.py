"""Twins: a task's own tests with another expected value, which right code fails.

Code under test shares a process with the tests and can make that process say anything. What it cannot do is to tell a
test from its twin without knowing the right answer: a twin is one edit of the test file, so names, lines and the number
of tests are the same, and a process never sees both. A grading has a few rounds, each in a process of its own. In each
a test that was drawn is itself or one of its twins, at random, and only the judge outside knows which. Whoever passes
the test and does not fail the twin has forged one of them.

Standard library only: task folders carry a copy of this for their own judge.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from offbook.tasks.claims import SuiteRun

NAME = "twins.json"
DRAWN = 12  # tests whose twins are run in a grading
ENOUGH = 16  # as many ways to draw make guessing hopeless; few tests need more rounds for that
MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Twin:
    """One edit of a test file: these bytes of it become `text`."""

    test: str  # path::name or path::Class::name, where the test is written down
    start: int
    end: int
    text: str
    kind: str  # value, raises or check: what was changed
    fails: tuple[str, ...] = ()  # node ids that right code fails then
    others: tuple[str, ...] = ()  # its other cases, which are run too: a twin has as many as the test

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Twins:
    """What lies beside the hidden tests."""

    twins: tuple[Twin, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)  # path -> digest of the test file that they are edits of
    saw: tuple[tuple[str, str], ...] = ()  # what the right code itself looks at (SuiteRun.saw)
    inherited: Mapping[str, str] = field(default_factory=dict)  # a test of a class -> where it is written down

    def test_of(self, node: str) -> str:
        """What a node id is a case of."""
        base = base_of(node)
        return self.inherited.get(base, base)


def write_twins(tests: Path, twins: Twins) -> None:
    """No file where there are none: such a task is graded without."""
    if twins.twins:
        (tests / NAME).write_text(json.dumps(asdict(twins), indent=1) + "\n")
    else:
        (tests / NAME).unlink(missing_ok=True)


def read_twins(tests: Path, hidden: Path | None = None) -> Twins:
    """Of a task's tests/ folder; the hidden tests may be in another place.

    Those that do not fit the hidden tests any more are a ValueError.
    """
    file = tests / NAME
    if not file.is_file():
        return Twins()
    found = json.loads(file.read_bytes())
    for path, digest in found["files"].items():
        test = (hidden or tests / "hidden") / path
        if digest != digest_of(test.read_bytes()):
            raise ValueError(f"{file} does not fit {test}; make the task again, or remove {NAME}")
    twins = tuple(
        Twin(**{**twin, "fails": tuple(twin["fails"]), "others": tuple(twin["others"])}) for twin in found["twins"]
    )
    saw = tuple((what, path) for what, path in found["saw"])
    return Twins(twins, found["files"], saw, found["inherited"])


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def base_of(node: str) -> str:
    """A test without its parameters."""
    return node.partition("[")[0]


def edited(data: bytes, twins: Iterable[Twin]) -> str:
    """A test file with twins in the place of some of its tests."""
    for twin in sorted(twins, key=lambda twin: -twin.start):
        data = data[: twin.start] + twin.text.encode() + data[twin.end :]
    return data.decode()


@dataclass(frozen=True, slots=True)
class Draw:
    """For each round the twins that stand in for their tests. The last round runs everything else too."""

    rounds: tuple[tuple[Twin, ...], ...]
    twins: Twins = field(default_factory=Twins)

    @property
    def tests(self) -> set[str]:
        return {twin.test for twins in self.rounds for twin in twins}

    def files(self, hidden: Path, number: int) -> dict[str, str]:
        """The test files of the drawn tests, as a round has them."""
        by_path: dict[str, list[Twin]] = {path: [] for path in sorted({test.partition("::")[0] for test in self.tests})}
        for twin in self.rounds[number]:
            by_path[twin.path].append(twin)
        return {path: edited((hidden / path).read_bytes(), twins) for path, twins in by_path.items()}

    def nodes(self, expected: Sequence[str], number: int) -> list[str]:
        """What a round runs of the drawn tests: those that are themselves, and the twins of the others."""
        twins = self.rounds[number]
        themselves = self.tests - {twin.test for twin in twins}
        nodes = {node for node in expected if self.twins.test_of(node) in themselves}
        return sorted(nodes.union(*(twin.fails + twin.others for twin in twins)))


def draw(twins: Twins, rng: random.Random | None = None) -> Draw | None:
    """None where there are no twins. A test is itself in one round at least, and not in all of them."""
    rng = rng or random.SystemRandom()
    variants: dict[str, list[Twin]] = defaultdict(list)
    for twin in twins.twins:
        variants[twin.test].append(twin)
    if not variants:
        return None
    tests = rng.sample(sorted(variants), min(DRAWN, len(variants)))
    num_rounds = 2
    while (2**num_rounds - 2) ** len(tests) < ENOUGH and num_rounds < MAX_ROUNDS:
        num_rounds += 1
    rounds: list[list[Twin]] = [[] for _ in range(num_rounds)]
    for test in tests:
        pattern = rng.randrange(1, 2**num_rounds - 1)
        for number in range(num_rounds):
            if pattern >> number & 1:
                rounds[number].append(rng.choice(variants[test]))
    return Draw(tuple(map(tuple, rounds)), twins)


def told(runs: Sequence[SuiteRun], drawn: Draw) -> tuple[SuiteRun, set[str], set[str]]:
    """What the rounds say of the tests themselves; the tests that pass although a twin of theirs did not fail; and
    those of them of which a twin passes.

    A twin that passes where its test fails is what wrong code does, and the test's failure says so already.
    """
    whole, test_of, tests = runs[-1], drawn.twins.test_of, drawn.tests
    run = replace(
        whole,
        timed_out=any(one.timed_out for one in runs),
        tampered=next((one.tampered for one in runs if one.tampered), ""),
        passed={node for node in whole.passed if test_of(node) not in tests},
        failed={node: why for node, why in whole.failed.items() if test_of(node) not in tests},
        saw=set[tuple[str, str]]().union(*(one.saw for one in runs)),
    )
    quiet, passed = set[str](), set[str]()
    for one, twins in zip(runs, drawn.rounds, strict=True):
        run.broken.update(one.broken)
        for twin in twins:
            if not one.failed.keys() >= {*twin.fails}:
                quiet.add(twin.test)
            if one.passed & {*twin.fails}:
                passed.add(twin.test)
        for node in one.collected:
            if test_of(node) in tests - {twin.test for twin in twins}:
                if node in one.passed:
                    run.passed.add(node)
                else:
                    run.failed.setdefault(node, one.failed.get(node) or one.skipped.get(node) or "not run")
    run.passed -= run.failed.keys()
    solved = {test_of(node) for node in run.passed} - {test_of(node) for node in run.failed}
    return run, quiet & solved, passed & solved
