"""Mutants: which edits are made, which are kept, what they show, and the judge that task folders carry."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from wrong_bodies import EQUAL, ORACLES, submission

from offbook.pocket.tasks import make_pocket_tasks
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task, load_tasks
from offbook.tasks.check import check_all, gold_changes
from offbook.tasks.export import swebench_instance
from offbook.tasks.factory.verification.mutants import only, trial_of
from offbook.tasks.folder import rewrite_mutants
from offbook.tasks.git import single_commit
from offbook.tasks.grade import Grade, grade
from offbook.tasks.judging import judged, plan
from offbook.tasks.mutants import Draw, Mutant, Mutants, base_of, combined, draw, edited
from offbook.tasks.perturbed import read_apart
from offbook.tasks.suite import make_interpreter, run_rounds, suite_sandbox
from offbook.tasks.suite_run import SuiteRun
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
    def test_turned(): assert not g("")
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
    def test_looped():
        for s, loud in TABLE: assert loud == g(s)
    class Base:
        def test_value(self): assert f(5) == 10
    class TestOne(Base): pass
    class TestTwo(Base): pass
    class TestCase(unittest.TestCase):
        def test_value(self): self.assertEqual(f(7), 14)
""")
CODE = "def f(n): return n + n\ndef g(s): return s and s + '!é'\ndef items(n): return list(range(n))\n"
NAMES = ("value", "text", "wrapped", "raises", "turned", "expected", "cases", "loop", "table", "looped")
SAME_TABLE = tuple(f"test_pkg.py::test_same_table[{row}]" for row in ("a-a!\\xe9", "b-b!\\xe9"))
OF_TABLE = tuple(f"test_pkg.py::test_table[{row}]" for row in ("a-a!\\xe9", "b-b!\\xe9", "c-c!\\xe9"))
CLASSES = ("TestOne::test_value", "TestTwo::test_value", "TestCase::test_value")


def tried(tmp_path: Path, trivial: str) -> tuple[Mutants, list[list[Mutant]]]:
    """The usable ones of all candidates, with a trivial body that passes test_loop."""
    (tmp_path / "test_pkg.py").write_text(TESTS)
    (tmp_path / "pkg.py").write_text("")
    files = {"test_pkg.py": TESTS.encode()}
    tests = [f"test_pkg.py::{name}" for name in (*(f"test_{name}" for name in NAMES), *CLASSES)]
    expected = [*tests, "test_pkg.py::test_cases[1-2]", "test_pkg.py::test_cases[3-6]", *SAME_TABLE, *OF_TABLE]
    trial = trial_of(files, tests, expected, {"pkg.py": CODE}, random.Random(1))
    trial = replace(trial, trivial=[({"pkg.py": trivial}, ["test_pkg.py::test_loop", "test_pkg.py::test_cases[3-6]"])])

    async def run() -> list[SuiteRun]:
        async with await suite_sandbox(tmp_path, Suite(), SandboxSpec(backend="process")) as sandbox:
            return await run_rounds(sandbox, Suite(), trial.rounds, 60.0)

    return trial.usable(asyncio.run(run()), expected), [list(mutants) for mutants in trial.drawn]


def test_mutants_are_edits_that_right_code_fails_in_a_check(tmp_path: Path) -> None:
    trivial = "def f(n): return 6 if n == 3 else []\ng = items = f\n"
    mutants, drawn = tried(tmp_path, trivial)
    written = {*(f"test_{name}" for name in NAMES), "Base::test_value", "TestCase::test_value"}
    assert {mutant.test.partition("::")[2] for mutants in drawn for mutant in mutants} == written
    for mutant in [mutant for mutants in drawn for mutant in mutants]:
        text = edited(TESTS.encode(), [mutant])
        ast.parse(text)
        assert (text != TESTS, text.count("\n"), text.count("def ")) == (True, TESTS.count("\n"), TESTS.count("def "))
    kinds = {mutant.test.partition("::")[2]: mutant.kind for mutant in mutants.mutants}
    assert kinds == {
        **dict.fromkeys(written - {"test_loop"}, "value"),
        "test_raises": "raises",
        "test_turned": "check",
    }, "a test that passes with nothing to check has none"
    inherited = next(mutant for mutant in mutants.mutants if mutant.test.endswith("Base::test_value"))
    assert inherited.fails == ("test_pkg.py::TestOne::test_value", "test_pkg.py::TestTwo::test_value")
    assert {mutants.test_of(node) for node in inherited.fails} == {inherited.test}
    others = [mutant.others for mutant in mutants.mutants if mutant.test.endswith("cases")]
    assert ("test_pkg.py::test_cases[3-6]",) in others, "the other case is run too, whatever passes it"
    assert "test_pkg.py::test_turned" not in mutants.tests, "what equals everything fails a turned check by itself"
    tables = [
        mutant for mutant in mutants.mutants if "S = {" not in TESTS[: len(TESTS.encode()[: mutant.start].decode())]
    ]
    reached = {mutant.test.partition("::")[2]: mutant.shared for mutant in tables if mutant.shared}
    assert reached["test_looped"] == ("test_pkg.py::test_same_table", "test_pkg.py::test_table")


SCAN = """import sys
def g(s):
    for module in [*sys.modules.values()]:
        for table in [*vars(module).values()] if "test_pkg" in str(module) else ():
            for row in table if type(table) is tuple else table.items() if type(table) is dict else ():
                if type(row) is tuple and len(row) == 2 and row[0] is s:
                    return row[1]
"""
SLUG = """class Slug(str):
    __hash__ = str.__hash__
    def __eq__(self, other): return str(self) in other
    def __ne__(self, other): return str(self) not in other
def g(s): return Slug("")
"""
ANYTHING = {"slug": SLUG, "any": "from unittest.mock import ANY\ndef g(s): return ANY\n", "scan": SCAN}


def test_a_table_is_edited_for_all_tests_that_share_it(tmp_path: Path) -> None:
    """Right code is right whatever is drawn; what equals everything, or finds the table, is not."""
    mutants = tried(tmp_path, "f = g = items = None\n")[0]
    failing = ["test_pkg.py::test_looped", *OF_TABLE]
    own = only(mutants, failing)
    assert own.tests == {"test_pkg.py::test_looped", "test_pkg.py::test_table"}
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "test_pkg.py").write_text(TESTS)

    async def solved(code: str, seed: int) -> tuple[bool, bool]:
        this = plan(failing, list(SAME_TABLE), tmp_path / "hidden", own, 60.0, random.Random(seed))
        (tmp_path / "pkg.py").write_text(CODE + code)
        async with await suite_sandbox(tmp_path, Suite(), SandboxSpec(backend="process")) as sandbox:
            result = judged(this, await run_rounds(sandbox, Suite(), this.rounds, 60.0))
        return result.solved, bool(result.forged)

    assert {asyncio.run(solved("", seed)) for seed in range(5)} == {(True, False)}
    for name, code in ANYTHING.items():
        assert asyncio.run(solved(code, 1)) == (False, True), name


def test_a_mutant_reaches_the_tests_that_call_its_test() -> None:
    tests = textwrap.dedent("""
        def test_called(f=f): assert f(1) == 2
        def helper(): test_called(abs)
        def test_caller(): helper()
        def test_other(): assert f(2) == 4
        class TestBase:
            def test_method(self): assert f(3) == 6
            def test_by_name(self): self.test_method()
            def test_by_another(self): self.test_by_name()
        class TestMore(TestBase):
            def test_method(self): super().test_method()
    """)
    names = ["test_called", "test_caller", "test_other", "TestMore::test_method"]
    names += [f"TestBase::test_{name}" for name in ("method", "by_name", "by_another")]
    nodes = [f"test_pkg.py::{name}" for name in names]
    trial = trial_of({"test_pkg.py": tests.encode()}, nodes, nodes, {}, random.Random(1))
    shared = {mutant.test.partition("::")[2]: {*mutant.shared} for mutants in trial.drawn for mutant in mutants}
    assert shared == {"test_called": {nodes[1]}, "test_other": set(), "TestBase::test_method": {nodes[3], *nodes[5:]}}


def test_a_drawn_test_is_itself_in_some_rounds_and_its_mutant_in_others() -> None:
    for number in (1, 2, 3, 5, 30):
        mutants = Mutants(
            tuple(Mutant(f"t.py::test_{n}", n, n, "", "value", (f"t.py::test_{n}",)) for n in range(number))
        )
        seen = set()
        for seed in range(120):
            drawn = draw(mutants, random.Random(seed))
            assert drawn is not None
            for test in drawn.tests:
                pattern = tuple(any(mutant.test == test for mutant in mutants) for mutants in drawn.rounds)
                assert {*pattern} == {True, False}
                seen.add(pattern)
            assert (2 ** len(drawn.rounds) - 2) ** len(drawn.tests) >= (14 if number == 1 else 16)
        assert len(seen) == 2 ** len(drawn.rounds) - 2
    assert draw(Mutants()) is None


def test_only_what_passes_with_its_mutant_is_forged() -> None:
    test, node = "t.py::Base::test_a", "t.py::Case::test_a"
    drawn = Draw(((Mutant(test, 0, 0, "", "value", (node,)),), ()), Mutants(inherited={node: test}))

    def run(passed: bool) -> SuiteRun:
        failed = {} if passed else {node: "call: assert"}
        return SuiteRun(False, "", "", (node,), {node} if passed else set(), failed)

    assert combined([run(False), run(True)], drawn)[1:] == (set(), set())
    assert combined([run(True), run(True)], drawn)[1:] == ({test}, {test})
    merged, quiet, forged = combined([run(True), run(False)], drawn)
    assert (merged.passed, quiet, forged) == (set(), set(), set()), "wrong code that happens to fit the other value"
    ended = SuiteRun(False, "", "", (node,))
    assert combined([ended, run(True)], drawn)[1:] == ({test}, set()), (
        "a mutant that was not run proves nothing of anybody"
    )


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
        assert (result.solved, result.findings, result.bare) == (True, (), 0)
        assert (result.mutants, result.blank) == (0, len({base_of(node) for node in task.fail_to_pass}))


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


def test_a_task_without_mutants_is_graded_as_before(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / task.id
    shutil.copytree(task.folder, folder)
    rewrite_mutants(load_task(folder), Mutants())
    old = load_task(folder)
    result = graded(old, gold_changes(old))
    assert (result.solved, result.mutants, result.bare) == (True, 0, len(task.fail_to_pass))
    written = json.loads((task.folder / "tests/mutants.json").read_text())
    del written["blanks"]  # as a task has it that was made before there were any
    (folder / "tests/mutants.json").write_text(json.dumps(written))
    before_blanks = graded(old, gold_changes(old))
    assert (before_blanks.solved, before_blanks.mutants, before_blanks.blank) == (True, len(task.fail_to_pass), 0)
    equal = graded(old, submission(old, *EQUAL["equals everything, an object"]))
    assert (equal.solved, equal.forged) == (False, True)
    shutil.copy(task.folder / "tests/mutants.json", folder / "tests/mutants.json")
    assert graded(old, gold_changes(old)).blank
    edited_file = folder / "tests/hidden" / task.fail_to_pass[0].partition("::")[0]
    edited_file.write_text(edited_file.read_text() + "\n")
    with pytest.raises(OffbookError, match=r"mutants\.json does not fit .*; make the task again"):
        graded(old, gold_changes(old))


def test_mutants_that_were_lost_are_missed(task: Task, tmp_path: Path) -> None:
    folder = tmp_path / task.id
    shutil.copytree(task.folder, folder)
    file = folder / "tests/mutants.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "mutants": written["mutants"][1:]}))
    count, some = len(written["mutants"]), f"{file} has {len(written['mutants']) - 1} of"
    assert asyncio.run(check_all([load_task(folder)])) == [f"{some} {count} mutants; make the task again"]
    file.unlink()
    assert asyncio.run(check_all([load_task(folder)])) == [f"{file} is gone, with {count} mutants; make the task again"]


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


def test_an_exported_instance_brings_the_judge_along(task: Task, tmp_path: Path) -> None:
    """The lines and marks are those that swebench reads."""
    shutil.copytree(task.folder, tmp_path / "task")
    own = load_tasks(tmp_path)[0]
    single_commit(own.tree)
    instance = swebench_instance(own)
    for path, text in gold_changes(own).items():
        (own.tree / path).write_text(str(text))
    places = {"/opt/judge": tmp_path / "judge", "/testbed": own.tree, "python3": shlex.quote(sys.executable)}
    script = instance["eval_script"]
    for place, moved in places.items():
        script = script.replace(place, str(moved))
    log = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    between = log.split(">>>>> Start Test Output")[1].split(">>>>> End Test Output")[0]
    passed = {line.split()[1] for line in between.splitlines() if line.startswith("PASSED ")}
    assert passed == {*json.loads(instance["FAIL_TO_PASS"]), *json.loads(instance["PASS_TO_PASS"])}
