"""Whether a task is solved: its hidden tests, run on a clean copy of its tree with somebody's changes on it.

Nothing that decides comes from whoever made the changes. Of the changes only source files of the product count. Test
files, conftest and settings are the task's. The interpreter is fresh and the box has no network. Every expected
test has to be among the passed ones.

The code under test runs in the runner's own process, so what that process reports is a claim. This module, which never
imports the code, believes it only if the twins among the tests failed (twins.py). Where a test has no twin, tests run
along that must fail and do not call the code: in files of their own, first and last, for each way in which tests
usually judge, and in every test file.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from offbook.sandbox import Box, BoxSpec
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_box
from offbook.tasks.twins import Draw, base_of, draw, read_twins, told
from offbook.types import OffbookError, Task, is_test_file

STARTUP_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})  # run before any test does
MUST_FAIL = "tests that must fail did not"
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
class Finding:
    """Something about a submission that the grading saw. It does not decide by itself."""

    kind: str  # forged, perturbed, or what the code looked at: frames, tracing, gc, ctypes, tests read, code replaced
    path: str  # a file of the product, or a test
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    run: SuiteRun
    missing: frozenset[str]  # expected tests that did not pass
    invalid: str = ""  # why the run says nothing
    twins: int = 0  # tests whose twins were run; 0 where the task has none
    findings: tuple[Finding, ...] = ()

    @property
    def forged(self) -> bool:
        """The tests were made to pass by something else than right code."""
        return any(finding.kind == "forged" for finding in self.findings)

    @property
    def solved(self) -> bool:
        return not self.missing and not self.invalid and not self.run.timed_out

    def share(self, task: Task) -> float:
        """Of the tests that need the feature, those that pass; 0 where one fails that passed without it."""
        if self.invalid or self.run.timed_out or self.missing & {*task.pass_to_pass}:
            return 0.0
        return 1 - len(self.missing) / len(task.fail_to_pass)


async def grade(task: Task, changes: Mapping[str, str | None], spec: BoxSpec, timeout_s: float) -> Grade:
    """`changes` are path -> new text, None for a file that went. Whatever is not `counted` of them is left out."""
    expected = [*task.fail_to_pass, *task.pass_to_pass]
    files = sorted({node.partition("::")[0] for node in expected})
    twins = read_twins(task)
    drawn = draw(twins) or Draw(((),))
    last = len(drawn.rounds) - 1
    alone = {*files} - {twin.path for twins in drawn.rounds for twin in twins}
    texts = drawn.files(task, last)
    first, more, canaries = dict[str, str](), dict[str, str](), list[str]()
    if not {base_of(node) for node in task.fail_to_pass} <= drawn.tests or not task.fail_to_pass:
        names = _names(task)
        texts, within = _canaries_within({**_texts(task, alone), **texts}, names)
        (first, before), (more, after) = _canary_file(task, names), _canary_file(task, names)
        canaries = [*before, *within, *after]
    rounds = [
        Round(sorted(edits), drawn.nodes(expected, number), edits, timeout_s / 2)
        for number, edits in ((number, drawn.files(task, number)) for number in range(last))
    ]
    own = [node for node in expected if base_of(node) not in drawn.tests]
    whole = Round([*first, *files, *more], [*own, *drawn.nodes(expected, last), *canaries], {**first, **texts, **more})
    async with await suite_box(task.tree, task.suite, spec) as box:
        await put(box, {path: text for path, text in changes.items() if counted(task, path)})
        await put(box, {path: text for path, text in hidden_files(task).items() if path in alone or path not in files})
        runs = await run_rounds(box, task.suite, [*rounds, whole], timeout_s, product=task.sources)
    run, quiet, forged = told(runs, drawn)
    quiet |= {*canaries} - runs[-1].failed.keys()
    if run.timed_out:  # of those that it came to
        quiet &= runs[-1].passed | runs[-1].skipped.keys() | forged
    forged |= {*canaries} & runs[-1].passed
    invalid = run.tampered or (MUST_FAIL if quiet else "")
    findings = [Finding("forged", node, MUST_FAIL) for node in sorted(forged)]
    findings += [Finding(what, path) for what, path in sorted(run.saw - {*twins.saw})]
    return Grade(run, frozenset(expected) - run.passed, invalid, len(drawn.tests), tuple(findings))


def counted(task: Task, path: str) -> bool:
    """Whether a change to this file is part of a solution: Python source of the product, and nothing that runs before
    or instead of it."""
    parts = PurePosixPath(path)
    if parts.suffix != ".py" or ".." in parts.parts or is_test_file(path) or parts.name in STARTUP_FILES:
        return False
    return not task.sources or any(path == source or path.startswith(f"{source}/") for source in task.sources)


def hidden_files(task: Task) -> dict[str, str]:
    """The hidden tests and what they need, as far as the agent's tree has them differently. Those are texts."""
    found = {}
    for file in sorted(task.hidden_tests.rglob("*")):
        path = file.relative_to(task.hidden_tests).as_posix()
        visible = task.tree / path
        if file.is_file() and not (visible.is_file() and visible.read_bytes() == file.read_bytes()):
            try:
                found[path] = file.read_bytes().decode()
            except UnicodeDecodeError as error:
                raise OffbookError(f"{task.folder} hides {path}, which is no text") from error
    return found


def _texts(task: Task, paths: Collection[str]) -> dict[str, str]:
    """Test files that are text."""
    found = {}
    for path in sorted(paths):
        with suppress(UnicodeDecodeError):  # the others speak for it
            if path.endswith(".py"):
                found[path] = (task.hidden_tests / path).read_bytes().decode()
    return found


async def put(box: Box, files: Mapping[str, str | None]) -> None:
    for path, text in files.items():
        if text is None:
            await box.remove(path)
        else:
            await box.write(path, text)


def _names(task: Task) -> Iterator[str]:
    """Names of tests, made of the words of the task's own: nothing in a name tells them apart."""
    nodes = (*task.fail_to_pass, *task.pass_to_pass)
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


def _canary_file(task: Task, names: Iterator[str]) -> tuple[dict[str, str], list[str]]:
    """A file of tests that must fail, beside the task's own, and their node ids."""
    path = str(PurePosixPath(task.test_files[0]).with_name(f"{next(names)}.py"))
    case = "".join(word.title() for word in next(names).split("_"))
    one, other, third, fourth = (next(names) for _ in range(4))
    nodes = [one, other, f"{case}::{third}", f"{case}::{fourth}"]
    return {path: CANARIES.format(one, other, case, third, fourth)}, [f"{path}::{node}" for node in nodes]


def _canaries_within(texts: Mapping[str, str], names: Iterator[str]) -> tuple[dict[str, str], list[str]]:
    """Test files, each with a test at its end that must fail: a file that somebody puts in the place of one would have
    to have it too."""
    found, nodes = {}, []
    for path, text in texts.items():
        name = next(name for name in names if name not in text)
        found[path] = f"{text}\n\n\ndef {name}():\n    {FAILS}\n"
        nodes.append(f"{path}::{name}")
    return found, nodes
