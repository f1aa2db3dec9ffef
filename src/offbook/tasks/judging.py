"""The rounds that grade a submission, and the verdict on their results. Standard library only: task folders carry a
copy of this for their own judge.

If a test that needs the feature has no mutant among those drawn, canaries are added: tests that must fail and do not
call the code. They are in files of their own, first and last, one for each usual kind of check, and in every test file.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from offbook.tasks.blanks import BlankRound, blank_round
from offbook.tasks.mutants import Draw, Mutants, base_of, combined, draw
from offbook.tasks.suite_run import Round, SuiteRun
from offbook.types import is_test_file

STARTUP_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})  # run before any test does
MUST_FAIL = "tests that must fail did not"
ANSWERS = "the code gives another answer where the expected value is hidden"
FAILS = 'assert "a" == "b"'
# The second and the last pass if one of the ways does not fail that they try.
CANARIES = """\
import unittest

import pytest


def all_fail(*ways):
    for way in ways:
        try:
            way()
        except BaseException:
            continue
        return
    assert not ways


def raises(*settings, text=None):
    with pytest.raises(ValueError, match=text):
        for setting in settings:
            raise ValueError(setting)


def warns():
    with pytest.warns(UserWarning):
        int("1")


def {0}():
    assert "a" == "b"


def {1}():
    all_fail(
        lambda: pytest.fail("a"),
        lambda: raises(),
        lambda: raises("a", text="b"),
        lambda: warns(),
        lambda: (_ for _ in ()).throw(AssertionError) if 1 != pytest.approx(2) else None,
        lambda: (_ for _ in ()).throw(AssertionError) if [0.1] != pytest.approx([0.2]) else None,
    )


class {2}(unittest.TestCase):
    def {3}(self):
        self.assertEqual("a", "b")

    def raises(self):
        with self.assertRaises(ValueError):
            int("1")

    def {4}(self):
        all_fail(
            lambda: self.fail("a"),
            lambda: self.raises(),
            lambda: self.assertNotEqual("a", "a"),
            lambda: self.assertTrue(0),
            lambda: self.assertFalse(1),
            lambda: self.assertIs("a", 1),
            lambda: self.assertIsNone(1),
            lambda: self.assertIsNotNone(None),
            lambda: self.assertIn("a", "b"),
            lambda: self.assertNotIn("a", "a"),
            lambda: self.assertIsInstance("a", int),
            lambda: self.assertGreater(1, 2),
            lambda: self.assertGreaterEqual(1, 2),
            lambda: self.assertLess(2, 1),
            lambda: self.assertLessEqual(2, 1),
            lambda: self.assertAlmostEqual(1, 2),
            lambda: self.assertListEqual(["a"], ["b"]),
            lambda: self.assertDictEqual({{"a": 1}}, {{"a": 2}}),
            lambda: self.assertCountEqual(["a"], ["b"]),
            lambda: self.assertRegex("a", "b"),
        )
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The rounds of a grading, the blank one first. `drawn`, `canaries` and `blank` are known to the judge alone."""

    rounds: list[Round]
    expected: frozenset[str]
    drawn: Draw
    canaries: frozenset[str]
    blank: BlankRound | None = None

    @property
    def replaced(self) -> set[str]:
        """Test files of which every round has its own version."""
        return {test.partition("::")[0] for test in self.drawn.tests} | (self.blank.paths if self.blank else set())


def plan(
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    hidden: Path,
    mutants: Mutants,
    timeout_s: float,
    rng: random.Random | None = None,
) -> Plan:
    expected = [*fail_to_pass, *pass_to_pass]
    files = sorted({node.partition("::")[0] for node in expected})
    sources = {path: (hidden / path).read_bytes() for path in mutants.files}
    bases = {base_of(node) for node in fail_to_pass}
    blank = blank_round(mutants.blanks, bases, sources, timeout_s / 2, rng or random.SystemRandom())
    shown = mutants.blank(fail_to_pass)
    drawn = draw(
        replace(mutants, mutants=tuple(mutant for mutant in mutants.mutants if mutant.test not in shown)), rng
    ) or Draw(((),))
    plain = {path: sources[path].decode() for path in (sorted(blank.paths) if blank else ())}
    last = len(drawn.rounds) - 1
    texts = {**plain, **drawn.files(hidden, last)}
    first, more, canaries = dict[str, str](), dict[str, str](), list[str]()
    if files and not (fail_to_pass and {mutants.test_of(node) for node in fail_to_pass} <= drawn.tests | shown):
        names = _names(expected)
        texts, within = _canaries_within({**_texts(hidden, files), **texts}, names)
        (first, before), (more, after) = _canary_file(files[0], names), _canary_file(files[0], names)
        canaries = [*before, *within, *after]
    rounds = [
        Round(sorted(edits), drawn.nodes(expected, number), {**plain, **edits}, timeout_s / 2)
        for number, edits in ((number, drawn.files(hidden, number)) for number in range(last))
    ]
    if blank:
        unblanked = {path: text for path, text in drawn.files(hidden, last).items() if path not in blank.paths}
        rounds.insert(0, replace(blank.round, changes={**unblanked, **blank.round.changes}))
    own = [node for node in expected if mutants.test_of(node) not in drawn.tests]
    nodes = [*own, *drawn.nodes(expected, last), *canaries]
    whole = Round([*first, *files, *more], nodes, {**first, **texts, **more}, timeout_s)
    return Plan([*rounds, whole], frozenset(expected), drawn, frozenset(canaries), blank)


@dataclass(frozen=True, slots=True)
class Judged:
    run: SuiteRun  # of the tests themselves
    missing: frozenset[str]  # expected tests that did not pass
    invalid: str  # why nothing of it counts
    forged: tuple[str, ...]  # tests that pass, and would whatever they asked for

    @property
    def solved(self) -> bool:
        return not self.missing and not self.invalid and not self.run.timed_out


def judged(this: Plan, runs: Sequence[SuiteRun]) -> Judged:
    """`runs` are the results that the rounds' processes reported."""
    run, quiet, forged = combined(runs[1:] if this.blank else runs, this.drawn)
    whole = runs[-1]
    if this.blank:
        wrong, other = this.blank.wrong(runs[0])
        forged |= {base_of(node) for node in run.passed & other}
        run.passed -= wrong.keys()
        run.failed.update(wrong)
        run.saw |= runs[0].saw
        run.timed_out |= runs[0].timed_out
        run.tampered = run.tampered or runs[0].tampered
    quiet |= this.canaries - whole.failed.keys()
    if run.timed_out:  # of those that it came to
        quiet &= whole.passed | whole.skipped.keys() | forged
    forged |= this.canaries & whole.passed
    wrote = sorted(path for what, path in run.saw if what == "written")
    why = MUST_FAIL if quiet else f"the tests wrote to {wrote[0]}" if wrote else ANSWERS if forged else ""
    invalid = run.tampered or why
    return Judged(run, this.expected - run.passed, invalid, tuple(sorted(forged)))


def is_counted(path: str, sources: Sequence[str]) -> bool:
    """Whether a change to this file is part of a solution: Python source of the product, and nothing that runs before
    or instead of it."""
    parts = PurePosixPath(path)
    if parts.suffix != ".py" or ".." in parts.parts or is_test_file(path) or parts.name in STARTUP_FILES:
        return False
    return not sources or any(path == source or path.startswith(f"{source}/") for source in sources)


def _texts(hidden: Path, paths: Collection[str]) -> dict[str, str]:
    """The test files that are UTF-8."""
    found = {}
    for path in sorted(paths):
        with suppress(UnicodeDecodeError):  # the canaries in the other files do
            if path.endswith(".py"):
                found[path] = (hidden / path).read_bytes().decode()
    return found


def _names(nodes: Sequence[str]) -> Iterator[str]:
    """Test names made of the words of the task's own, so that canaries cannot be recognized."""
    taken = {node.rpartition("::")[2].partition("[")[0] for node in nodes}
    words = sorted({word for name in taken for word in re.findall("[a-z]+", name.lower())} - {"test"}) or ["more"]
    length = 2
    while True:
        name = "_".join(["test", *(secrets.choice(words) for _ in range(length))])
        if name in taken:
            length += 1
            continue
        taken.add(name)
        yield name


def _canary_file(neighbour: str, names: Iterator[str]) -> tuple[dict[str, str], list[str]]:
    """A file of canaries in the folder of a test file, and their node ids."""
    path = str(PurePosixPath(neighbour).with_name(f"{next(names)}.py"))
    case = "".join(word.title() for word in next(names).split("_"))
    one, other, third, fourth = (next(names) for _ in range(4))
    nodes = [one, other, f"{case}::{third}", f"{case}::{fourth}"]
    return {path: CANARIES.format(one, other, case, third, fourth)}, [f"{path}::{node}" for node in nodes]


def _canaries_within(texts: Mapping[str, str], names: Iterator[str]) -> tuple[dict[str, str], list[str]]:
    """Test files, each with a canary at its end, so that a replaced file is noticed; and the canaries' node ids."""
    found, nodes = {}, []
    for path, text in texts.items():
        name = next(name for name in names if name not in text)
        found[path] = f"{text}\n\n\ndef {name}():\n    {FAILS}\n"
        nodes.append(f"{path}::{name}")
    return found, nodes
