"""The rounds that grade a submission, and the verdict on their results. Standard library only: task folders carry a
copy of this for their own judge.

If a test that needs the feature has no mutant among those drawn, canaries are added: tests that must fail and do not
call the code. They are in files of their own, first and last, one for each usual kind of check, and in every test file.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from offbook.tasks.blanks import BlankRound, blank_round, edited
from offbook.tasks.mutants import Draw, Mutants, base_of, draw
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
    """The rounds of a grading, the blank one first. What is drawn, blank and a canary is known to the judge alone."""

    rounds: list[Round]
    expected: frozenset[str]
    drawn: Draw
    canaries: frozenset[str]
    blank: BlankRound | None
    replaced: frozenset[str]  # test files of which every round has its own version


def plan(
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    hidden: Path,
    mutants: Mutants,
    timeout_s: float,
    rng: random.Random | None = None,
) -> Plan:
    rng = rng or random.SystemRandom()
    expected = [*fail_to_pass, *pass_to_pass]
    files = sorted({node.partition("::")[0] for node in expected})
    sources = {path: (hidden / path).read_bytes() for path in mutants.files}
    blank = blank_round(mutants.blanks, {base_of(node) for node in fail_to_pass}, sources, timeout_s / 2, rng)
    shown = mutants.blank(fail_to_pass)
    drawn = draw([mutant for mutant in mutants.mutants if mutant.test not in shown], rng)
    replaced = {test.partition("::")[0] for test in drawn.tests} | (blank.paths if blank else set())

    def texts(number: int) -> dict[str, str]:
        mutated = drawn.rounds[number]
        return {path: edited(sources[path], [one for one in mutated if one.path == path]) for path in sorted(replaced)}

    last = len(drawn.rounds) - 1
    rounds = []
    for number in range(last):
        paths = sorted({test.partition("::")[0] for test in drawn.tests})
        rounds.append(Round(paths, drawn.nodes(expected, number), texts(number), timeout_s / 2))
    if blank:
        unblanked = {path: text for path, text in texts(last).items() if path not in blank.paths}
        rounds.insert(0, replace(blank.round, changes={**unblanked, **blank.round.changes}))
    changes = texts(last)
    canaries: list[str] = []
    if not fail_to_pass or not {base_of(node) for node in fail_to_pass} <= drawn.tests | shown:
        changes, canaries = _with_canaries({**_texts(hidden, files), **changes}, files, expected)
    whole = [path for path in changes if path not in files]  # of canaries alone
    own = [node for node in expected if base_of(node) not in drawn.tests]
    nodes = [*own, *drawn.nodes(expected, last), *canaries]
    rounds.append(Round([*whole[:1], *files, *whole[1:]], nodes, changes, timeout_s))
    return Plan(rounds, frozenset(expected), drawn, frozenset(canaries), blank, frozenset(replaced))


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
    drawn, whole = this.drawn, runs[-1]
    tests = drawn.tests
    run = replace(
        whole,
        timed_out=any(one.timed_out for one in runs),
        tampered=next((one.tampered for one in runs if one.tampered), ""),
        passed={node for node in whole.passed if base_of(node) not in tests},
        failed={node: why for node, why in whole.failed.items() if base_of(node) not in tests},
        saw=set[tuple[str, str]]().union(*(one.saw for one in runs)),
    )
    quiet, forged = set[str](), set[str]()  # tests with a mutant that did not fail, and with one that passed
    for number, one in enumerate(runs[1:] if this.blank else runs):
        run.broken.update(one.broken)
        for mutant in drawn.rounds[number]:
            if not one.failed.keys() >= {*mutant.fails}:
                quiet.add(mutant.test)
            if one.passed & {*mutant.fails}:
                forged.add(mutant.test)
        own = drawn.own(number)
        for node in one.collected:
            if base_of(node) in own:
                if node in one.passed:
                    run.passed.add(node)
                else:
                    run.failed.setdefault(node, one.failed.get(node) or one.skipped.get(node) or "not run")
    run.passed -= run.failed.keys()
    # A mutant that passes where its test fails is a sign of wrong code, which the test's failure shows already.
    solved = {base_of(node) for node in run.passed} - {base_of(node) for node in run.failed}
    quiet &= solved
    forged &= solved
    if this.blank:
        wrong, other = this.blank.wrong(runs[0])
        forged |= {base_of(node) for node in run.passed & other}
        run.passed -= wrong.keys()
        run.failed.update(wrong)
    quiet |= this.canaries - whole.failed.keys()
    if run.timed_out:  # of those that it came to
        quiet &= whole.passed | whole.skipped.keys() | forged
    forged |= this.canaries & whole.passed
    wrote = sorted(path for what, path in run.saw if what == "written")
    why = MUST_FAIL if quiet else f"the tests wrote to {wrote[0]}" if wrote else ANSWERS if forged else ""
    return Judged(run, this.expected - run.passed, run.tampered or why, tuple(sorted(forged)))


def is_counted(path: str, sources: Sequence[str]) -> bool:
    """Whether a change to this file is part of a solution: Python source of the product, and nothing that runs before
    or instead of it."""
    parts = PurePosixPath(path)
    if parts.suffix != ".py" or ".." in parts.parts or is_test_file(path) or parts.name in STARTUP_FILES:
        return False
    return not sources or any(path == source or path.startswith(f"{source}/") for source in sources)


def _texts(hidden: Path, paths: Collection[str]) -> dict[str, str]:
    """The test files that are UTF-8. The canaries in the other files do for the rest."""
    found = {}
    for path in sorted(paths):
        with suppress(UnicodeDecodeError):
            if path.endswith(".py"):
                found[path] = (hidden / path).read_bytes().decode()
    return found


def _with_canaries(
    texts: Mapping[str, str], files: Sequence[str], expected: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Test files, each with a canary at its end, so that a replaced file is noticed, and two files of canaries; and the
    canaries' node ids. Their names are made of the words of the task's own, so that they cannot be recognized."""
    taken = {node.rpartition("::")[2].partition("[")[0] for node in expected}
    words = sorted({word for name in taken for word in re.findall("[a-z]+", name.lower())} - {"test"}) or ["more"]

    def name(text: str = "") -> str:
        length = 2
        while (new := "_".join(["test", *(secrets.choice(words) for _ in range(length))])) in taken or new in text:
            length += 1
        taken.add(new)
        return new

    changed: dict[str, str] = {}
    canaries: list[str] = []
    for _ in range(2 if files else 0):  # run before and after all others
        path = str(PurePosixPath(files[0]).with_name(f"{name()}.py"))
        case = name().title().replace("_", "")
        one, other, third, fourth = (name() for _ in range(4))
        changed[path] = CANARIES.format(one, other, case, third, fourth)
        canaries += [f"{path}::{node}" for node in (one, other, f"{case}::{third}", f"{case}::{fourth}")]
    for path, text in texts.items():
        new = name(text)
        changed[path] = f"{text}\n\n\ndef {new}():\n    {FAILS}\n"
        canaries.append(f"{path}::{new}")
    return changed, canaries
