"""Grading: the right code is accepted, and code that goes for the judge instead of the task is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_prepare import deps, installed
from wrong_bodies import RUNNER

from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task
from offbook.tasks.check import check, gold_changes
from offbook.tasks.factory.verification.mutants import add_mutants
from offbook.tasks.folder import Contents, places, write_task
from offbook.tasks.grade import Grade, counted, grade
from offbook.tasks.suite import make_interpreter
from offbook.types import MachineFault, OffbookError, Suite, Task

__all__ = ["deps"]

STUB = "def double(n):\n    raise NotImplementedError('double')\n\n\ndef triple(n):\n    return 3 * n\n"
GOLD = STUB.replace("raise NotImplementedError('double')", "return n + n")
WRONG = STUB.replace("raise NotImplementedError('double')", "return None")
TESTS = {
    "tests/test_core.py": """
        import unittest
        import pytest
        from pkg.core import double, triple
        def test_double(): assert double(2) == 4
        def test_double_raises():
            with pytest.raises(TypeError): double(None)
        def test_double_approximately(): assert double(0.1) == pytest.approx(0.2)
        def test_triple(): assert triple(2) == 6
        class CoreTest(unittest.TestCase):
            def test_double(self): self.assertEqual(double(3), 6)
            def test_words(self): self.assertIn("a", double("a"))
    """,
    "tests/test_more.py": """
        from pkg import core
        def test_more(): assert core.double(5) == 10
    """,
}
NEEDING = (
    *("tests/test_core.py::test_double", "tests/test_core.py::test_double_raises"),
    *("tests/test_core.py::test_double_approximately", "tests/test_core.py::CoreTest::test_double"),
    *("tests/test_core.py::CoreTest::test_words", "tests/test_more.py::test_more"),
)
OTHERS = ("tests/test_core.py::test_triple",)


@pytest.fixture(scope="module")
def environment(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(deps, tmp_path_factory.mktemp("environment") / "little")


@pytest.fixture(scope="module")
def task(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Task:
    made = make(tmp_path_factory.mktemp("tasks") / "pkg-double", Suite(environment))
    assert asyncio.run(add_mutants(made, SandboxSpec())) == len(NEEDING)
    return made


GRADED = """
import asyncio, sys
from pathlib import Path
from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task
from offbook.tasks.check import gold_changes
from offbook.tasks.grade import grade
task = load_task(Path(sys.argv[1]))
for backend in ("bwrap", "process"):
    print(asyncio.run(grade(task, gold_changes(task), SandboxSpec(backend), 60)).solved)
"""


def test_python_may_be_called_through_a_folder_that_sandboxes_do_not_have(tmp_path: Path) -> None:
    """As in `../.venv/bin/python -m offbook`."""
    own = make(tmp_path / "pkg-double", Suite())
    python = os.path.join(os.path.relpath(os.path.dirname(sys.executable), tmp_path), os.path.basename(sys.executable))
    command = [python, "-c", GRADED, str(own.folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_without_a_test_runner_nothing_is_graded(tmp_path: Path) -> None:
    said = {
        Path(os.path.realpath(sys.executable)): "did not start pytest: ModuleNotFoundError: No module named '_pytest'",
        tmp_path / "gone" / "bin" / "python": "gone should be mounted in sandboxes, but is no folder",
    }
    for number, (base, words) in enumerate(said.items()):
        environment = tmp_path / str(number)
        (environment / "deps").mkdir(parents=True)
        make_interpreter(environment, base)
        own = make(tmp_path / f"pkg-{number}", Suite(environment))
        for run in (grade(own, gold_changes(own), SandboxSpec(), 60), check(own)):
            with pytest.raises(MachineFault, match=words):
                asyncio.run(run)


def make(folder: Path, suite: Suite, stub: str = STUB, gold: str = GOLD) -> Task:
    hidden = {path: textwrap.dedent(text) for path, text in TESTS.items()}
    visible = {"tests/test_core.py": "from pkg.core import triple\ndef test_triple(): assert triple(2) == 6\n"}
    contents = Contents(
        tree={"pkg/__init__.py": "", "pkg/core.py": stub, **visible},
        gold={"pkg/core.py": gold},
        hidden_tests={**hidden, "conftest.py": ""},
    )
    new = Task(
        **places(folder),
        instruction="Bring back double.",
        test_files=tuple(hidden),
        id="pkg-double",
        origin="pkg==1",
        difficulty="easy",
        tools=("read_file", "edit_file"),
        fail_to_pass=NEEDING,
        pass_to_pass=OTHERS,
        suite=suite,
        sources=("pkg",),
    )
    write_task(new, contents)
    return load_task(folder)


def graded(task: Task, changes: dict[str, str | None], timeout_s: float = 30.0) -> Grade:
    return asyncio.run(grade(task, changes, SandboxSpec(), timeout_s))


def submitted(task: Task, code: str, body: str = WRONG) -> Grade:
    """The module with the attack before its functions, run at import."""
    return graded(task, {"pkg/core.py": textwrap.dedent(code) + "\n" + body})


def right_but_for(argument: object, wrong: object) -> str:
    return GOLD.replace("return n + n", f"return n + n if n != {argument!r} else {wrong!r}")


# --- what is right and what is wrong


@pytest.mark.parametrize("own", [True, False], ids=["own interpreter", "offbook's"])
def test_the_right_code_is_accepted_and_nothing_and_wrong_code_are_not(
    own: bool, environment: Path, tmp_path: Path
) -> None:
    task = make(tmp_path / "task", Suite(environment if own else None))
    right = graded(task, gold_changes(task))
    assert (right.solved, right.invalid, right.missing, right.share(task)) == (True, "", frozenset(), 1.0)
    nothing = graded(task, {})
    assert (nothing.solved, nothing.invalid, nothing.missing) == (False, "", frozenset(NEEDING))
    half = STUB.replace("raise NotImplementedError('double')", "return n + n if n != 5 else 0")
    result = graded(task, {"pkg/core.py": half})
    assert (result.solved, result.missing) == (False, {"tests/test_more.py::test_more"})
    assert result.share(task) == pytest.approx(5 / 6)
    breaks = graded(task, {"pkg/core.py": GOLD.replace("3 * n", "0")})
    assert (breaks.missing, breaks.share(task)) == ({*OTHERS}, 0.0)


def test_checking_says_what_is_wrong_with_a_task(environment: Path, tmp_path: Path) -> None:
    def why(name: str, stub: str = STUB, gold: str = GOLD) -> str:
        return asyncio.run(check(make(tmp_path / name, Suite(environment), stub, gold)))

    assert why("good") == ""
    refused = "its gold patch is refused: tests/test_more.py::test_more does not pass (call: "
    assert why("wrong", gold=right_but_for(5, 11)).startswith(refused)
    assert why("solved", GOLD, GOLD + "# more\n") == "it is solved by doing nothing"
    folder = make(tmp_path / "patched", Suite(environment)).folder
    patch = (folder / "solution/gold.patch").read_text()
    (folder / "solution/gold.patch").write_text(patch.replace("pkg/core.py", "other/core.py"))
    with pytest.raises(OffbookError, match=r"cannot be used: it does not apply: other/core\.py: No such file"):
        asyncio.run(check(load_task(folder)))
    (folder / "solution/gold.patch").unlink()
    with pytest.raises(OffbookError, match=r"has no solution/gold\.patch"):
        asyncio.run(check(load_task(folder)))


def test_a_submission_that_does_not_end_is_stopped(task: Task) -> None:
    stuck = WRONG.replace(
        "return None", "\n    while True:\n        try:\n            while True: pass\n        except: pass"
    )
    result = graded(task, {"pkg/core.py": stuck}, 3.0)
    assert (result.solved, result.run.timed_out, result.missing) == (False, True, {*NEEDING, *OTHERS})


# --- only the product's own source counts


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "pkg/conftest.py", "tests/conftest.py", "tests/test_core.py", "tests/__init__.py"),
        *("sitecustomize.py", "pkg/sitecustomize.py", "usercustomize.py", "pytest.py", "hypothesis.py", "json.py"),
        *("_pytest/runner.py", "pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini", "pkg/data.json", "pkg/x.pth"),
        *(
            "pkg/core.so",
            "../pkg/core.py",
            "/pkg/core.py",
            "pkg/../conftest.py",
            "pkg/../json.py",
            "pkg_more.py",
            "pkg/tests/x.py",
        ),
    ],
)
def test_nothing_but_source_of_the_product_counts(task: Task, path: str) -> None:
    assert not counted(task, path)
    assert counted(task, "pkg/core.py")
    assert counted(task, "pkg/deeper/new.py")


def test_files_beside_the_product_are_left_out_of_a_submission(task: Task) -> None:
    """Each would make every test pass, or end the run, if it were there."""
    cheat = "import os\nos._exit(0)\n"
    names = ("conftest.py", "tests/conftest.py", "sitecustomize.py", "pytest.py", "hypothesis.py", "tests/test_more.py")
    changes: dict[str, str | None] = {**dict.fromkeys(names, cheat), "pytest.ini": "[pytest]\naddopts = --co\n"}
    assert graded(task, {**changes, "pkg/core.py": GOLD}).solved
    assert graded(task, {**changes, "pkg/core.py": WRONG}).missing == {*NEEDING}
    assert graded(task, {"pkg/core.py": GOLD, "tests/test_core.py": None, "tests/test_more.py": None}).solved
    assert not graded(task, {"pkg/core.py": None}).solved


# --- code that goes for the judge

# These solve the task but for one test, and go for the judge of that one alone.
NARROW = {
    "only assertIn": ("import unittest; unittest.TestCase.assertIn = lambda *a, **k: None", right_but_for("a", "")),
    "only pytest.raises": (
        """
        import contextlib, pytest
        pytest.raises = lambda *a, **k: contextlib.nullcontext()
        """,
        GOLD.replace("return n + n", "return n and n + n"),
    ),
    "pytest.raises from inside": (
        """
        import sys, pytest
        for module in ("_pytest.python_api", "_pytest.raises"):
            for kind in vars(sys.modules.get(module, pytest)).values():
                if isinstance(kind, type) and "__exit__" in vars(kind): kind.__exit__ = lambda self, *error: True
        """,
        GOLD.replace("return n + n", "return n and n + n"),
    ),
    "pytest.approx": (
        """
        import pytest
        type(pytest.approx(1)).__eq__ = lambda self, other: True
        """,
        right_but_for(0.1, 7),
    ),
    "a test file that is known": (
        """
        text = open("tests/test_more.py").read().replace("assert ", "assert 1 or ")
        open("tests/test_more.py", "w").write(text)
        """,
        right_but_for(5, 0),
    ),
    "a test file put in its place and put back": (
        """
        path = __file__.replace("pkg/core.py", "tests/test_more.py")
        text = open(path).read()
        with open(path, "w") as file: file.write(f"open({path!r}, 'w').write({text!r})\\ndef test_more(): pass\\n")
        """,
        right_but_for(5, 0),
    ),
    "a test module that is there already": (
        """
        import sys, types
        for name in ("test_more", "tests.test_more"):
            module = types.ModuleType(name)
            module.__file__ = __file__.replace("pkg/core.py", "tests/test_more.py")
            module.test_more = lambda: None
            sys.modules[name] = module
        """,
        right_but_for(5, 0),
    ),
}


@pytest.mark.parametrize("code", RUNNER.values(), ids=RUNNER)
def test_going_for_the_judge_does_not_solve_a_task(task: Task, code: str) -> None:
    result = submitted(task, code)
    assert not result.solved
    assert result.share(task) < 1


@pytest.mark.parametrize(("code", "body"), NARROW.values(), ids=NARROW)
def test_going_for_one_judge_does_not_solve_a_task(task: Task, code: str, body: str) -> None:
    result = submitted(task, code, body)
    assert not result.solved
    assert result.forged or result.invalid or result.missing


def test_making_all_pass_and_then_waiting_for_the_deadline_does_not_solve_a_task(task: Task) -> None:
    code = textwrap.dedent(RUNNER["a report's outcome"]) + textwrap.dedent("""
        import time, _pytest.main
        _pytest.main.Session._teardown = _pytest.terminal.TerminalReporter.summary_stats = lambda *a: time.sleep(60)
    """)
    result = graded(task, {"pkg/core.py": code + WRONG}, 4.0)
    assert result.run.timed_out
    assert result.missing <= {*NEEDING}
    assert (result.solved, result.share(task)) == (False, 0.0)


def test_right_code_that_keeps_the_run_from_ending_earns_no_share(task: Task) -> None:
    waits = (
        "import time, _pytest.terminal\n_pytest.terminal.TerminalReporter.summary_stats = lambda *a: time.sleep(60)\n"
    )
    result = graded(task, {"pkg/core.py": waits + GOLD}, 4.0)
    assert (result.run.timed_out, result.missing, result.invalid) == (True, frozenset(), "")
    assert (result.solved, result.share(task)) == (False, 0.0)


# --- what nothing but a mutant shows

ORACLES = {
    "a value that equals everything": """
        class Both(str):
            __eq__ = lambda self, other: True
            __contains__ = lambda self, other: True
            __hash__ = None
        def double(n):
            if n is None: raise TypeError
            return Both()
    """,
    "outcomes of the tests whose code names the product": """
        main = __import__("__main__")
        run = __import__("_pytest.python").python.Function.runtest
        def runtest(self):
            if {"double", "core"} & {*self.function.__code__.co_names}: return None
            return run(self)
        __import__("_pytest.python").python.Function.runtest = runtest
        __import__("_pytest.unittest").unittest.TestCaseFunction.runtest = runtest
        def double(n): return None
    """,
    "constants of the caller": """
        import sys
        def double(n):
            if n is None: raise TypeError
            code = sys._getframe(1).f_code
            found = [c for c in code.co_consts if c is not None and c != n and type(c) is type(n)]
            return found[0] if found else n * 2
    """,
}


@pytest.mark.parametrize("code", ORACLES.values(), ids=ORACLES)
def test_what_passes_a_test_and_its_mutant_is_forged(task: Task, code: str) -> None:
    result = submitted(task, code, "def triple(n): return 3 * n\n")
    assert (result.solved, result.forged, result.share(task)) == (False, True, 0.0)
