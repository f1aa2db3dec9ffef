"""Mutants: which edits are made, which are kept, what they show, and the judge that task folders carry."""

from __future__ import annotations

import ast
import asyncio
import os
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from wrong_bodies import EQUAL, ORACLES, submission

from offbook.pocket.tasks import make_pocket_tasks
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task, load_tasks
from offbook.tasks.check import check_all, gold_changes
from offbook.tasks.factory.verification.expectations import Found, Test, TestFile
from offbook.tasks.factory.verification.mutants import mutants_of
from offbook.tasks.folder import rewrite_mutants
from offbook.tasks.grade import Grade, grade
from offbook.tasks.judging import MUST_FAIL, Plan, judged, plan
from offbook.tasks.mutants import Draw, Mutant, Mutants, base_of, digest_of, draw
from offbook.tasks.perturbed import read_apart
from offbook.tasks.suite import make_interpreter, run_rounds, suite_sandbox
from offbook.tasks.suite_run import Round, SuiteRun
from offbook.types import OffbookError, Suite, Task

TESTS = textwrap.dedent("""
    import unittest
    import pytest
    from pkg import f, g, items

    def test_value(): assert f(2) == 4
    def test_text(): assert g("a") == "a!é"
    def test_wrapped(): assert tuple(items(2)) == tuple([0, 1])
    def test_raises():
        with pytest.raises(TypeError): f(None)
    def test_expected():
        expected = {"a": [1, 2]}
        assert {"a": items(3)[1:]} == expected
    @pytest.mark.parametrize("n, twice", [(1, 2), (3, 6)])
    def test_cases(n, twice): assert f(n) == twice
    def test_loop():
        for item in items(1): assert item == 0
    TABLE = (("a", "a!é"), ("b", "b!é"))
    WORDS = {"c": "c!é"}
    @pytest.mark.parametrize("s, loud", TABLE + tuple(WORDS.items()))
    def test_table(s, loud): assert g(s) == loud
    @pytest.mark.parametrize("s, loud", TABLE)
    def test_same_table(s, loud): assert f(s) == s + s
    OWN = {"d": "d!é",
           "e": "e!é"}
    def test_own_table():
        for s, loud in OWN.items(): assert loud == g(s)
    class TestUnit(unittest.TestCase):
        def test_value(self): self.assertEqual(f(7), 14)
""")
CODE = "def f(n): return n + n\ndef g(s): return s and s + '!é'\ndef items(n): return list(range(n))\n"
NAMES = ("value", "text", "wrapped", "raises", "expected", "cases", "loop", "table", "own_table")
SAME_TABLE = tuple(f"test_pkg.py::test_same_table[{row}]" for row in ("a-a!\\xe9", "b-b!\\xe9"))
OF_TABLE = tuple(f"test_pkg.py::test_table[{row}]" for row in ("a-a!\\xe9", "b-b!\\xe9", "c-c!\\xe9"))


def run_in(folder: Path, rounds: Sequence[Round]) -> list[SuiteRun]:
    async def run() -> list[SuiteRun]:
        async with await suite_sandbox(folder, Suite(), SandboxSpec(backend="process")) as sandbox:
            return await run_rounds(sandbox, Suite(), rounds, 60.0)

    return asyncio.run(run())


def tried(tmp_path: Path, trivial: str) -> Mutants:
    """The usable ones of all candidates, with a trivial body that passes test_loop."""
    (tmp_path / "test_pkg.py").write_text(TESTS)
    (tmp_path / "pkg.py").write_text("")
    tests = [*(f"test_pkg.py::test_{name}" for name in NAMES), "test_pkg.py::TestUnit::test_value"]
    expected = [*tests, "test_pkg.py::test_cases[1-2]", "test_pkg.py::test_cases[3-6]", *SAME_TABLE, *OF_TABLE]
    bodies = [({"pkg.py": trivial}, ["test_pkg.py::test_loop", "test_pkg.py::test_cases[3-6]"])]

    async def run(rounds: Sequence[Round], seed: int) -> list[SuiteRun]:
        for round_ in rounds:
            text = str(round_.changes["test_pkg.py"])
            ast.parse(text)
            assert text != TESTS
            assert [text.count(one) for one in ("\n", "def ")] == [TESTS.count(one) for one in ("\n", "def ")]
        return await asyncio.to_thread(run_in, tmp_path, rounds)

    files = {"test_pkg.py": TESTS.encode()}
    mutants = asyncio.run(mutants_of(tests, files, expected, {"pkg.py": CODE}, bodies, run, 60.0, random.Random(1)))
    return Mutants(mutants, {"test_pkg.py": digest_of(TESTS.encode())})


def test_mutants_are_edits_that_right_code_fails_in_a_check(tmp_path: Path) -> None:
    trivial = "def f(n): return 6 if n == 3 else []\ng = items = f\n"
    mutants = tried(tmp_path, trivial)
    kinds = {mutant.test.partition("::")[2]: mutant.kind for mutant in mutants.mutants}
    names = ("value", "text", "wrapped", "expected", "cases", "table", "own_table")
    assert kinds == {
        **{f"test_{name}": "value" for name in names},
        "TestUnit::test_value": "value",
        "test_raises": "raises",
    }, "a test that passes with nothing to check has none, and a table that others use is not edited"
    others = [mutant.others for mutant in mutants.mutants if mutant.test.endswith("cases")]
    assert ("test_pkg.py::test_cases[3-6]",) in others, "the other case is run too, whatever passes it"


SCAN = """import sys
def g(s):
    for module in [*sys.modules.values()]:
        for table in [*vars(module).values()] if "test_pkg" in str(module) else ():
            for row in table.items() if type(table) is dict else ():
                if row[0] is s:
                    return row[1]
"""
SLUG = """class Slug(str):
    __hash__ = str.__hash__
    def __eq__(self, other): return str(self) in other
    def __ne__(self, other): return str(self) not in other
def g(s): return Slug("")
"""
ANYTHING = {"slug": SLUG, "any": "from unittest.mock import ANY\ndef g(s): return ANY\n", "scan": SCAN}


def test_what_equals_everything_or_finds_the_table_passes_a_mutant(tmp_path: Path) -> None:
    """Right code is right whatever is drawn."""
    mutants = tried(tmp_path, "f = g = items = None\n")
    failing = ["test_pkg.py::test_own_table"]
    own = replace(mutants, mutants=tuple(one for one in mutants.mutants if one.test in failing))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test_pkg.py").write_text(TESTS)

    def solved(code: str, seed: int) -> tuple[bool, bool]:
        this = plan(failing, list(SAME_TABLE), tmp_path / "hidden", own, 60.0, random.Random(seed))
        (tmp_path / "pkg.py").write_text(CODE + code)
        result = judged(this, run_in(tmp_path, this.rounds))
        return result.solved, bool(result.forged)

    assert {solved("", seed) for seed in range(5)} == {(True, False)}
    for name, code in ANYTHING.items():
        assert solved(code, 1) == (False, True), name


def test_a_test_that_others_call_has_no_mutant() -> None:
    tests = textwrap.dedent("""
        def test_called(f=f): assert f(1) == 2
        def test_caller(): test_called(abs)
        def test_other(): assert f(2) == 4
        class TestShared:
            def test_shared(self): assert f(4) == 8
        class TestOne(TestShared): pass
        class TestBase:
            def test_method(self): assert f(3) == 6
            def test_by_name(self): self.test_method()
        class TestMore(TestBase):
            def test_method(self): super().test_method()
    """)
    file = TestFile("test_pkg.py", tests.encode())
    found = {name: Test(Found({}), file, name).mutants(random.Random(1), 4) for name in file.functions}
    assert {name for name, mutants in found.items() if mutants} == {"test_other"}


def test_the_none_of_assert_is_none_has_no_mutant() -> None:
    file = TestFile("test_pkg.py", b"class TestUnit:\n    def test_none(self): self.assertIsNone(f(0))\n")
    mutants = Test(Found({}), file, "TestUnit::test_none").mutants(random.Random(1), 4)
    assert all(mutant.text != "False" for mutant in mutants)


def test_a_drawn_test_is_itself_in_some_rounds_and_its_mutant_in_others() -> None:
    for number in (1, 2, 3, 5, 30):
        mutants = [Mutant(f"t.py::test_{n}", n, n, "", "value", (f"t.py::test_{n}",)) for n in range(number)]
        seen = set()
        for seed in range(120):
            drawn = draw(mutants, random.Random(seed))
            for test in drawn.tests:
                pattern = tuple(any(mutant.test == test for mutant in mutants) for mutants in drawn.rounds)
                assert {*pattern} == {True, False}
                seen.add(pattern)
            assert (2 ** len(drawn.rounds) - 2) ** len(drawn.tests) >= (14 if number == 1 else 16)
        assert len(seen) == 2 ** len(drawn.rounds) - 2
    assert draw([]) == Draw()


def test_only_what_passes_with_its_mutant_is_forged() -> None:
    test = node = "t.py::Case::test_a"
    drawn = Draw(((Mutant(test, 0, 0, "", "value", (node,)),), ()))
    this = Plan([], frozenset({node}), drawn, frozenset(), None, frozenset())

    def run(passed: bool) -> SuiteRun:
        failed = {} if passed else {node: "call: assert"}
        return SuiteRun(False, "", "", (node,), {node} if passed else set(), failed)

    def said(*runs: SuiteRun) -> tuple[bool, str, tuple[str, ...]]:
        found = judged(this, runs)
        return found.solved, found.invalid, found.forged

    assert said(run(False), run(True)) == (True, "", ())
    assert said(run(True), run(True)) == (False, MUST_FAIL, (test,))
    assert said(run(True), run(False)) == (False, "", ()), "wrong code that happens to fit the other value"
    ended = SuiteRun(False, "", "", (node,))
    assert said(ended, run(True)) == (False, MUST_FAIL, ()), "a mutant that was not run proves nothing of anybody"


# --- pocket tasks


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    root = tmp_path_factory.mktemp("pocket") / "tasks"
    assert asyncio.run(make_pocket_tasks(root, 3, 1, 0, lambda share: None)) == []
    return load_tasks(root / "train")[0]


def graded(task: Task, changes: dict[str, str | None], perturbed: str = "finding") -> Grade:
    return asyncio.run(grade(task, changes, SandboxSpec(), 40.0, perturbed))  # type: ignore[arg-type]


def test_right_code_is_right_whatever_is_drawn(task: Task) -> None:
    for _ in range(3):
        result = graded(task, gold_changes(task))
        assert (result.solved, result.findings, result.shown) == (True, (), 0)
        assert result.blank == len({base_of(node) for node in task.fail_to_pass})


@pytest.mark.parametrize(
    "name",
    ["the line of the test", "remembered", "remembered in the tree", "remembered in /tmp", "through a traceback"],
)
def test_an_oracle_is_not_paid(task: Task, name: str) -> None:
    result = graded(task, submission(task, *ORACLES[name]))
    assert not result.solved
    assert "frames" in {finding.kind for finding in result.findings}
    assert all(
        finding.path in {*gold_changes(task), *{base_of(n) for n in task.fail_to_pass}} for finding in result.findings
    )


def test_what_equals_everything_is_forged(task: Task) -> None:
    assert graded(task, submission(task, *EQUAL["equals everything, an object"])).forged


def test_no_round_can_read_another_one(task: Task) -> None:
    """What a round is told lies in files that are gone, of which only its parent has the descriptor."""
    look = """
        import glob, os
        for place in glob.glob("/proc/[0-9]*"):
            try:
                for name in os.listdir(place + "/fd"):
                    if ".offbook-" in os.readlink(place + "/fd/" + name):
                        print("FOUND", place, open(place + "/fd/" + name).read(10))
            except OSError as error:
                print(type(error).__name__)
        print("LOOKED", os.environ.get("PYTEST_CURRENT_TEST"))
    """
    result = graded(task, submission(task, look, "None"))
    assert "FOUND" not in result.run.output
    code = "import os\nassert 'PYTEST_CURRENT_TEST' not in os.environ\n"
    assert graded(task, {path: code + str(text) for path, text in gold_changes(task).items()}).solved


def test_written_down_answers_are_a_finding_and_the_outcome_where_asked_for(task: Task) -> None:
    """As one that knows what the tests ask, and nothing else: here by what it does not know."""
    path, gold = next(iter(gold_changes(task).items()))
    cases = list(read_apart(task).cases)
    name, unknown = cases[0].function, [ast.literal_eval(case.arguments)[0][0] for case in cases]
    keep = f"right = {name}\ndef {name}(given):\n    return None if given in {unknown!r} else right(given)\n"
    table: dict[str, str | None] = {path: f"{gold}\n\n{keep}"}
    result = graded(task, table)
    assert (result.solved, [finding.kind for finding in result.findings]) == (True, ["perturbed"])
    assert "gives None, not" in result.findings[0].evidence
    assert not graded(task, table, "outcome").solved
    assert graded(task, table, "off").findings == ()


def test_a_task_without_mutants_is_graded_with_canaries(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / task.id
    shutil.copytree(task.folder, folder)
    rewrite_mutants(load_task(folder), Mutants())
    old = load_task(folder)
    result = graded(old, gold_changes(old))
    assert (result.solved, result.blank, result.shown) == (True, 0, len(task.fail_to_pass))
    shutil.copy(task.folder / "tests/mutants.json", folder / "tests/mutants.json")
    assert graded(old, gold_changes(old)).blank
    edited_file = folder / "tests/hidden" / task.fail_to_pass[0].partition("::")[0]
    edited_file.write_text(edited_file.read_text() + "\n")
    with pytest.raises(OffbookError, match=r"mutants\.json does not fit .*; make it again"):
        graded(old, gold_changes(old))


def test_blanks_that_were_lost_are_missed(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / task.id
    shutil.copytree(task.folder, folder)
    file = folder / "tests/mutants.json"
    file.unlink()
    count = load_task(folder).num_mutants
    said = f"{file} has 0 of {count} mutants and blanks; make the task again"
    assert asyncio.run(check_all([load_task(folder)])) == [said]


# --- the judge in the folder

LATER = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for _ in range(200):
                time.sleep(0.01)
                for name, text in (("txt", "1"), ("json", '{"reward": 1}')):
                    try: open("LOGS/verifier/reward." + name, "w").write(text)
                    except OSError: pass
        os._exit(0)
"""


def test_the_folders_own_judge_pays_for_right_code_alone(task: Task, tmp_path: Path) -> None:
    logs = tmp_path / "logs"

    def reward(changes: dict[str, str | None]) -> dict[str, str]:
        app = tmp_path / "app"
        shutil.rmtree(app, ignore_errors=True)
        shutil.copytree(task.tree, app)
        for path, text in changes.items():
            (app / path).write_text(str(text))
        judge = task.folder / "tests/judge/judge.py"
        command = [sys.executable, "-I", str(judge), str(app), str(logs / "verifier")]
        subprocess.run(command, check=True, capture_output=True, cwd=app)
        return {file.name: file.read_text() for file in (logs / "verifier").iterdir()}

    assert reward(gold_changes(task)) == {"reward.txt": "1\n"}
    nothing = {"reward.txt": "0\n"}
    exits = "import sys\nsys.exit(0)\n"
    assert reward(dict.fromkeys(("pytest.py", "conftest.py", "sitecustomize.py", "json.py"), exits)) == nothing
    assert reward(submission(task, LATER.replace("LOGS", str(logs)), "None")) == nothing
    assert reward(submission(task, *EQUAL["equals everything, an object"])) == nothing


def test_the_folders_own_judge_pays_nothing_where_pytest_is_missing(task: Task, tmp_path: Path) -> None:
    (tmp_path / "deps").mkdir()
    make_interpreter(tmp_path, Path(os.path.realpath(sys.executable)))
    judge = [str(tmp_path / "python/bin/python"), "-I", str(task.folder / "tests/judge/judge.py")]
    done = subprocess.run([*judge, str(task.tree), str(tmp_path / "logs")], capture_output=True, text=True, check=False)
    assert (done.returncode, [*(tmp_path / "logs").iterdir()]) == (1, [])
    assert done.stderr.startswith("the tests cannot be run here: pytest did not start on ")


def test_what_the_code_looks_at_is_found_and_does_not_disturb_it(task: Task) -> None:
    """A child that a test forks looks too, and goes on."""
    look = """
        import gc, os, sys, threading
        def _look():
            return sys._getframe(0), gc.get_referents([])
        if not (child := os.fork()):
            _look()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        _look()
        (lambda: None).__code__ = (lambda: 1).__code__
    """
    path, gold = next(iter(gold_changes(task).items()))
    result = graded(task, {path: textwrap.dedent(look) + str(gold)})
    assert result.solved
    assert {(one.kind, one.path) for one in result.findings} == {
        (kind, path) for kind in ("frames", "gc", "code replaced")
    }
