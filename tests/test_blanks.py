"""Blank rounds: which expected values are hidden, what right code may return, and that nothing can be looked up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_grade import GOLD, deps, environment, task
from wrong_bodies import EQUAL, LOOKUPS, submission

from offbook.pocket.tasks import make_pocket_tasks
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task, load_tasks
from offbook.tasks.blanks import Blanks, Place, blank_round, holds
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.verification.blanks import CHANGED, UNSTABLE, blanks_of
from offbook.tasks.factory.verification.expectations import LOOSE, NONE, OPEN, VISIBLE
from offbook.tasks.grade import Grade, grade
from offbook.tasks.harbor import write_judge
from offbook.tasks.inside.blank import data_of
from offbook.tasks.mutants import base_of
from offbook.tasks.suite import run_rounds, suite_sandbox
from offbook.tasks.suite_run import Round, SuiteRun
from offbook.types import Suite, Task

__all__ = ["deps", "environment", "task"]

CODE = """
import collections, random
TWO = 2
def twice(n): return n + n
def words(s): return s.split()
def facts(n): return {"n": n, "half": n / 2}
def is_even(n): return n % 2 == 0
def thing(n): return object()
def drawn(): return random.random()
"""
TESTS = {
    "test_value": "assert twice(2) == 44400440 - 44400436",
    "test_left": "assert 4 == twice(2), 'it is 4'",
    "test_several": "assert twice(1) == 2 and words('a b') == ['a', 'b']\n    assert not is_even(3)",
    "test_expected": "expected = {'n': 4, 'half': 2}\n    assert facts(4) == expected",
    "test_again": "expected = 2\n    assert twice(1) == expected\n    expected = 4\n    assert twice(2) == expected",
    "test_helper": "expected = 8\n    assert_same(expected, twice(4))",
    "test_near": "assert twice(0.1) == pytest.approx(0.2, abs=1e-3)",
    "test_is": "assert is_even(2) is True\n    assert {}.get(twice(1)) is None",
    "test_in": "assert 'half' in facts(1)\n    assert twice(3) < 7\n    assert twice(1) in (2, 3)",
    "test_raises": "with pytest.raises((ZeroDivisionError, TypeError)): twice(None)",
    "test_loop": "for n, two in ((1, 2), (3, 6)): assert twice(n) == two",
    "test_own_loop": "for word in words('a a'): assert word == 'a'",
    "test_no_value": "assert isinstance(words(''), list)",
    "test_two_results": "assert twice(2) == twice(2)",
    "test_input_too": "expected = 6\n    assert twice(expected // 2) == expected",
    "test_object": "assert thing(1) != 3",
    "test_of_the_code": "assert twice(1) == TWO",
    "test_drawn": "assert drawn() > 0 and drawn() == drawn() or str(drawn()) > ''",
}
CLASSES = """
@pytest.mark.parametrize("n, two", [(1, 2), pytest.param(3, 6, id="six")])
def test_cases(n, two): assert twice(n) == two
TABLE = {"a b": ["a", "b"], "c": ["c"]}
@pytest.mark.parametrize("text, said", TABLE.items())
def test_table(text, said): assert words(text) == said
def test_not_needed(): assert "secret" == "sec" + "ret"
def test_not_needed_either():
    @property
    def inner(self): return "secret"
    assert inner
def assert_same(one, other): assert one == other
class Base:
    def test_same(self): assert twice(5) == 10
class TestOne(Base): pass
class TestCase(unittest.TestCase):
    def test_methods(self):
        self.assertEqual(twice(7), 14)
        self.assertListEqual(words("x y"), ["x", "y"])
        self.assertTrue(is_even(4))
        with self.assertRaises(TypeError): twice(None)
    def test_vague(self): self.assertAlmostEqual(twice(0.5), 1.0)
    def test_counted(self): self.assertCountEqual(words("p q"), ["q", "p"])
"""
FILE = "import unittest\nimport pytest\nfrom pkg import *\nfrom pkg import TWO\n"
FILE += "".join(f"def {name}():\n    {body}\n" for name, body in TESTS.items()) + CLASSES
NODES = [f"test_pkg.py::{name}" for name in TESTS]
NODES += [f"test_pkg.py::test_cases[{case}]" for case in ("1-2", "six")]
NODES += [f"test_pkg.py::test_table[{case}]" for case in ("a b-said0", "c-said1")]
NODES += [
    f"test_pkg.py::{name}"
    for name in ("TestOne::test_same", *(f"TestCase::test_{one}" for one in ("methods", "vague", "counted")))
]


def run_in(folder: Path, rounds: Sequence[Round], seed: int = 0) -> list[SuiteRun]:
    async def run() -> list[SuiteRun]:
        async with await suite_sandbox(folder, Suite(), SandboxSpec(backend="process")) as sandbox:
            return await run_rounds(sandbox, Suite(), rounds, 60.0, hash_seed=seed)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def blanks(tmp_path_factory: pytest.TempPathFactory) -> Blanks:
    folder = tmp_path_factory.mktemp("pkg")
    (folder / "test_pkg.py").write_text(FILE)
    (folder / "pkg.py").write_text("")

    async def run(rounds: Sequence[Round], seed: int) -> list[SuiteRun]:
        return await asyncio.to_thread(run_in, folder, rounds, seed)

    return asyncio.run(blanks_of({"test_pkg.py": FILE.encode()}, NODES, {"pkg.py": CODE}, run, 60.0))


def test_what_is_written_down_is_hidden(blanks: Blanks) -> None:
    named = {test.partition("::")[2]: why for test, why in blanks.left.items()}
    assert named == {
        "test_own_loop": LOOSE,
        "test_no_value": NONE,
        "test_two_results": OPEN,
        "test_input_too": VISIBLE,
        "test_object": "objects",
        "test_of_the_code": OPEN,
        "test_drawn": named["test_drawn"],
        "TestOne::test_same": NONE,
        "TestCase::test_vague": OPEN,
        "TestCase::test_counted": CHANGED,
    }
    assert named["test_drawn"] in {OPEN, UNSTABLE, CHANGED}
    cases = [blanks.cases[f"test_pkg.py::test_{name}"] for name in ("cases", "table")]
    assert [len(nodes) for nodes in cases] == [2, 2]
    this = blank_round(blanks, blanks.cases, {"test_pkg.py": FILE.encode()}, 60.0, random.Random(1))
    assert this is not None
    assert "test_pkg.py" not in this.round.files
    (text,) = (text for text in this.round.changes.values() if text is not None)
    for gone in (
        "test_value",
        "test_methods",
        "TestOne",
        "444004",
        "it is 4",
        "== 4",
        "'half': 2",
        '"x", "y"',
        "secret",
    ):
        assert gone not in text, gone
    assert this.round.changes["test_pkg.py"] is None, "the file with the values is not there"
    again = blank_round(blanks, blanks.cases, {"test_pkg.py": FILE.encode()}, 60.0, random.Random(2))
    assert again is not None
    assert again.round.files != this.round.files
    assert {*again.tokens} != {*this.tokens}, "numbers say nothing from one grading to the next"


OTHERS = {
    "right": ("", set()),
    "right with other types": (
        """
        class Text(str): pass
        def twice(n): return float(n + n) if type(n) is int else n + n + 1e-9
        def words(s): return type("Words", (list,), {})(map(Text, s.split()))
        def facts(n): return collections.OrderedDict(half=n / 2, n=n)
        """,
        set(),
    ),
    "True is not 2": (
        "def twice(n): return n + n if n != 1 else True",
        {"several", "again", "loop", "cases[1-2]", "in"},
    ),
    "equal to anything": (
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ntwice = lambda n: Any(n)",
        {"value", "left", "several", "again", "helper", "near", "in", "is", "loop", "cases", "methods"},
    ),
    "another error": ("def twice(n): return [][n] if n == [] else n + n if n else 1 / 0 if n is None else 0", set()),
    "no error type that is asked for": (
        "def twice(n): return n + n if n is not None else {}[n]",
        {"raises", "methods"},
    ),
    "more checks than there are": (
        "def words(s): return [*s.split(), ''] if s == 'a b' else s.split()",
        {"several", "table"},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_answers_are_compared_outside(name: str, blanks: Blanks, tmp_path: Path) -> None:
    code, wrong = OTHERS[name]
    this = blank_round(
        blanks, blanks.cases.keys() - blanks.left.keys(), {"test_pkg.py": FILE.encode()}, 60.0, random.Random(1)
    )
    assert this is not None
    (tmp_path / "pkg.py").write_text(CODE + textwrap.dedent(code))
    (run,) = run_in(tmp_path, [this.round])
    found = {node.partition("test_pkg.py::")[2].rpartition("test_")[2] for node in this.wrong(run)[0]}
    if name == "another error":
        assert found == {"methods"}, "a ZeroDivisionError is one of two that a test takes"
    else:
        assert {one for one in found if not any(one.startswith(other) for other in wrong)} == set()
        assert {other for other in wrong if not any(one.startswith(other) for one in found)} == set()


def test_reports_come_from_their_places_and_in_order(blanks: Blanks) -> None:
    test = "test_pkg.py::test_several"
    this = blank_round(blanks, [test], {"test_pkg.py": FILE.encode()}, 60.0, random.Random(1))
    assert this is not None
    token_of = {place: token for token, place in this.tokens.items()}
    right = [[token_of[place], data] for place, data in blanks.reports[test]]
    (name,) = this.tests

    def wrong(reports: list[list[object]]) -> tuple[bool, bool]:
        found, told = this.wrong(SuiteRun(False, "", "", (name,), {name}, blanks={name: reports}))
        return bool(found), bool(told)

    assert len(right) == 3
    assert wrong(right) == (False, False)
    for others in (right[::-1], right[:-1], [*right, right[-1]], [], [[0, one] for _, one in right], [["x", 1]] * 3):
        assert wrong(others) == (True, True)
    assert wrong([[right[0][0], ["?", "Thing", True, False]], *right[1:]]) == (True, False), "no proof of anything"
    assert wrong([[right[0][0], ["?", "Thing", True, True]], *right[1:]]) == (True, True), "it equals just anything"
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert wrong([[right[0][0], deep], *right[1:]]) == (True, True)


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [(1, 1.0, True), ([1, 2], [1.0, 2], (1, 2)), ({"b": 1, "a": 2}, {"a": 2, "b": 1}, {"a": 2}),
     ({3, 1}, frozenset({1, 3}), [1, 3]),
     (None, None, False), ("a", "a", b"a"), (0.1, 0.1, 0.1000001), (float("nan"), float("nan"), 0)],
)  # fmt: skip
def test_data_is_the_same_for_equal_values_of_plain_types(value: object, same: object, other: object) -> None:
    place = Place("eq")
    assert holds(place, data_of(same), data_of(value))
    assert not holds(place, data_of(other), data_of(value))


# --- wrong bodies


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Task:
    root = tmp_path_factory.mktemp("pocket") / "tasks"
    assert asyncio.run(make_pocket_tasks(root, 3, 1, 0, lambda share: None)) == []
    return load_tasks(root / "train")[0]


def all_graded(task: Task, bodies: Sequence[str]) -> dict[str, Grade]:
    """Without changed inputs, which most of these would fail too."""
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(name: str) -> Grade:
        async with slots:
            return await grade(task, submission(task, *LOOKUPS[name]), SandboxSpec(), 40.0, "off")

    async def every() -> list[Grade]:
        return await asyncio.gather(*map(one, bodies))

    return dict(zip(bodies, asyncio.run(every()), strict=True))


def paid(grades: dict[str, Grade]) -> list[str]:
    return [name for name, one in grades.items() if one.solved]


def test_looking_up_is_not_paid_on_a_pocket_task(pocket: Task, tmp_path: Path) -> None:
    assert len(LOOKUPS) >= 20
    grades = all_graded(pocket, [*LOOKUPS])
    assert paid(grades) == []
    assert {one.blank for one in grades.values()} == {len({base_of(node) for node in pocket.fail_to_pass})}


def test_looking_up_is_not_paid_on_a_task_with_all_kinds_of_checks(task: Task) -> None:
    changes = {"pkg/core.py": GOLD}
    result = asyncio.run(grade(task, dict(changes), SandboxSpec(), 40.0))
    assert (result.solved, result.findings, result.blank, result.shown) == (True, (), 6, 0)
    assert paid(all_graded(task, [*LOOKUPS])) == []


# --- the judge in the folder


def test_hidden_tests_cannot_be_read_while_the_folders_judge_runs(pocket: Task, tmp_path: Path) -> None:
    """Neither where they lie, nor in what a round left, nor in the tree of the round."""
    shutil.copytree(pocket.folder, tmp_path / "task")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    own = load_task(tmp_path / "task")
    write_judge(own)
    texts = "".join(file.read_text() for file in own.hidden_tests.rglob("*.py"))
    asked = re.findall(rf"{own.id.rpartition('-')[2]}\((.*)\) (?:==|is) ", texts)
    look = f"""
        import glob as __glob__, os as __os__, re as __re__
        __places__ = [{str(own.folder)!r}, "/tmp/judge-*", __os__.getcwd()]
        __texts__ = ""
        for __place__ in __places__:
            for __path__ in __glob__.glob(__place__ + "/**/*.*", recursive=True):
                try: __texts__ += open(__path__, errors="replace").read()
                except OSError: pass
        def __read__(name, given, right):
            if repr(given) not in {asked!r}: return right
            found = __re__.search(name + __re__.escape("(" + repr(given) + ")") + " (?:==|is) (.*)", __texts__)
            return eval(found[1]) if found else None
    """
    wrong = submission(own, look, "__read__('NAME', next(iter(locals().values())), RIGHT)")
    app = tmp_path / "app"

    def reward(changes: dict[str, str | None]) -> str:
        shutil.rmtree(app, ignore_errors=True)
        shutil.copytree(own.tree, app)
        for path, text in changes.items():
            (app / path).write_text(str(text))
        command = [sys.executable, "-I", str(own.folder / "tests/judge/judge.py"), str(app), str(tmp_path / "logs")]
        subprocess.run(command, check=True, capture_output=True, cwd=app)
        return (tmp_path / "logs" / "reward.txt").read_text()

    assert reward(gold_changes(own)) == "1\n"
    assert reward(wrong) == "0\n"
    assert reward(submission(own, *EQUAL["equals everything, a number"])) == "0\n"
    assert (own.folder / "tests").stat().st_mode & 0o777 == 0o755, "as it was"
    assert json.loads((own.folder / "tests" / "mutants.json").read_text())["blanks"]["reports"]
