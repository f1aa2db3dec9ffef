"""Tasks: deletion touches nothing else, test runs name every test, pocket tasks can be solved and only rightly."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.core.config import load_config
from offbook.pocket.repos import (
    ALL_STEPS,
    WORDS,
    Function,
    Split,
    Spot,
    Step,
    evaluate,
    mistakes,
    passes,
    render_tests,
)
from offbook.pocket.tasks import Draft, draft_tasks, make_pocket_tasks
from offbook.rl.checks import refuse_missing_tasks
from offbook.rl.tasks import task_sets
from offbook.sandbox import SandboxSpec
from offbook.signals.rewards import Grader
from offbook.tasks import load_task, load_tasks, suite
from offbook.tasks.check import check
from offbook.tasks.factory.delete.delete import delete_functions
from offbook.tasks.factory.delete.surgery import Orders, operate
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.folder import Contents, places, write_files, write_task
from offbook.tasks.mutants import Mutant, Mutants
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox
from offbook.types import Context, Deleted, Interrupt, OffbookError, Rollout, Suite, Task

# --- deletion: {name} stands for the function; the stubbed form of each is given beside it

FUNCTIONS = [
    ("def {name}(x):\n    return x\n", 'def {name}(x):\n    raise NotImplementedError("{name}")\n'),
    ("def {name}(x): return x  # gives it away\n", 'def {name}(x): raise NotImplementedError("{name}")\n'),
    ('def {name}(): "Doc."; return 1\n', 'def {name}(): "Doc."; raise NotImplementedError("{name}")\n'),
    (
        "@decorate(1)\ndef {name}(x,  y = 2) -> int:  # note\n"
        '    """Doc.\n\n    More.\n    """\n    z = x\n    return z\n',
        "@decorate(1)\ndef {name}(x,  y = 2) -> int:  # note\n"
        '    """Doc.\n\n    More.\n    """\n    raise NotImplementedError("{name}")\n',
    ),
    (
        "async def {name}():\n\tasync with a:\n\t\tyield 1\n\n\t# the end\n",
        'async def {name}():\n\traise NotImplementedError("{name}")\n',
    ),
    (
        'def {name}():\n  "Doc."; x = 1\n  def inner(): return 2\n  return inner\n',
        'def {name}():\n  "Doc."\n  raise NotImplementedError("{name}")\n',
    ),
]
BETWEEN = [
    "",
    "\n\n",
    "# a comment\n",
    "VALUE = {  'odd' :1 }\n",
    "class Thing:\n    def method(self): return 1\n",
    "if True:\n    import os;  import sys\n",
    "text = '''\ndef a():\n    return 1\n'''\n",
    "lambda: (yield)\n",
]

modules = st.lists(st.tuples(st.sampled_from(BETWEEN), st.sampled_from(FUNCTIONS)), min_size=1, max_size=6)


def stub_function(source: str, name: str) -> str:
    return operate(source, Orders(stub={name})).source


def module_source(parts: list[tuple[str, tuple[str, str]]], stubbed: int | None = None) -> str:
    return "".join(
        between + function[index == stubbed].replace("{name}", f"f{index}")
        for index, (between, function) in enumerate(parts)
    )


@given(parts=modules, data=st.data())
def test_stubbing_changes_one_body_and_not_a_byte_besides(
    parts: list[tuple[str, tuple[str, str]]], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(parts) - 1))
    assert stub_function(module_source(parts), f"f{index}") == module_source(parts, stubbed=index)


@given(parts=modules, data=st.data())
def test_removing_functions_leaves_the_others_as_they_are(
    parts: list[tuple[str, tuple[str, str]]], data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.integers(0, len(parts) - 1), min_size=1))
    source = "import os\n" + module_source(parts) + "\n\ndef test_last(): pass\n"
    failing = tuple(f"tests/test_it.py::f{index}" for index in gone)
    shorter = str(without_tests({"tests/test_it.py": source}, failing)["tests/test_it.py"])
    for index, (_, (function, _)) in enumerate(parts):
        assert (function.replace("{name}", f"f{index}") in shorter) == (index not in gone)


def test_methods_are_named_with_their_class() -> None:
    source = (
        "def m(): return 0\n\n\nclass A:\n    x = 1\n\n    def m(self):\n        return 1\n\n"
        "    class B:\n        def m(self): return 2\n"
    )
    assert stub_function(source, "A.m") == source.replace("return 1", 'raise NotImplementedError("A.m")')
    assert stub_function(source, "A.B.m") == source.replace("return 2", 'raise NotImplementedError("A.B.m")')
    assert stub_function(source, "m") == source.replace("return 0", 'raise NotImplementedError("m")')
    files = {"test_it.py": source + "\n\ndef test_last(): pass\n"}
    left = str(without_tests(files, ("test_it.py::A::B::m",))["test_it.py"])
    assert ("return 2" in left, "return 1" in left) == (False, True)


def test_line_endings_and_a_missing_last_one_are_kept() -> None:
    assert stub_function("def f():\r\n  return 1\r\nx = 1", "f") == (
        'def f():\r\n  raise NotImplementedError("f")\r\nx = 1'
    )
    assert stub_function("def f():\n  return 1", "f") == 'def f():\n  raise NotImplementedError("f")'


def test_a_name_that_is_not_there_is_an_error() -> None:
    source = "def f():\n    def inner(): pass\n\n\nclass A: pass\n"
    for name in ("g", "inner", "f.inner", "A", "A.f"):
        with pytest.raises(ValueError, match=re.escape(f"there is no function {name} ")):
            delete_functions({"a.py": source}, [("a.py", name)], ())


def test_deleting_a_feature_takes_its_tests_along() -> None:
    files = {
        "pkg.py": "def f(x):\n    return x\n",
        "tests/test_f.py": "from pkg import f\n\n\n@mark\ndef test_f(x):\n    assert f(x)\n",
        "tests/test_more.py": (
            "class TestF:\n    def test_a(self): ...\n\n    def test_b(self): ...\n\n\ndef test_c(): ...\n"
        ),
    }
    failing = ["tests/test_f.py::test_f[a::b]", "tests/test_f.py::test_f[2]", "tests/test_more.py::TestF::test_a"]
    assert delete_functions(files, [("pkg.py", "f")], failing) == {
        "pkg.py": 'def f(x):\n    raise NotImplementedError("f")\n',
        "tests/test_more.py": "class TestF:\n\n    def test_b(self): ...\n\n\ndef test_c(): ...\n",
    }


# --- test runs

TREE = {
    "pkg/__init__.py": "",
    "pkg/core.py": "def double(x):\n    return 2 * x\n",
    "json.py": "raise RuntimeError('pytest must not import this')\n",
    "conftest.py": "raise RuntimeError('conftest files are not for us')\n",
    "pytest.ini": "[pytest]\naddopts = --no-such-option\npython_functions = nothing\n",
    "tests/test_kinds.py": """\
import unittest

import pytest

from pkg.core import double


class TestDouble:
    def test_method(self):
        assert double(2) == 4

    class TestInner:
        def test_deep(self):
            assert double(1) == 3


class OldStyle(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(double(2), 4)


@pytest.mark.parametrize("given", ["a/b::c", "1 [x]", "ü"])
def test_text(given, tmp_path, tmpdir, capsys, monkeypatch, caplog, recwarn, record_property):
    assert double(given) == given + given


@pytest.fixture
def breaks_after():
    yield
    raise RuntimeError


def test_teardown(breaks_after):
    pass


@pytest.mark.skip
def test_skipped():
    pass


@pytest.mark.xfail
def test_expected_to_fail():
    assert False
""",
    "tests/test_broken.py": "import nothing_of_this_name\n\n\ndef test_never(): pass\n",
    "tests/test_crash.py": (
        "import os\n\n\ndef test_before(): pass\n\n\ndef test_exit(): os._exit(0)\n\n\ndef test_after(): pass\n"
    ),
    "tests/test_hang.py": "import time\n\n\ndef test_before(): pass\n\n\ndef test_hang(): time.sleep(60)\n",
}


def run_files(place: Path, files: Mapping[str, str], test_files: Iterable[str], timeout_s: float = 60.0) -> SuiteRun:
    shutil.rmtree(place, ignore_errors=True)
    write_files(place, files)

    async def run() -> SuiteRun:
        async with await suite_sandbox(place, Suite(), SandboxSpec()) as sandbox:
            (run,) = await run_rounds(sandbox, Suite(), [Round(list(test_files))], timeout_s)
            return run

    return asyncio.run(run())


def test_every_test_is_named_as_pytest_names_it(tmp_path: Path) -> None:
    run = run_files(tmp_path / "tree", TREE, ["tests/test_broken.py", "tests/test_kinds.py"])
    file = "tests/test_kinds.py"
    assert run.passed == {
        f"{file}::TestDouble::test_method",
        f"{file}::OldStyle::test_unit",
        f"{file}::test_text[a/b::c]",
        f"{file}::test_text[1 [x]]",
        f"{file}::test_text[\\xfc]",
    }
    assert run.failed.keys() == {f"{file}::TestDouble::TestInner::test_deep", f"{file}::test_teardown"}
    assert run.broken.keys() == {"tests/test_broken.py"}
    assert "nothing_of_this_name" in run.output
    assert sorted(path.name for path in (tmp_path / "tree").rglob("*.py*")) == sorted(
        Path(name).name for name in TREE if ".py" in name
    )


def test_a_test_that_ends_the_process_has_not_passed(tmp_path: Path) -> None:
    run = run_files(tmp_path / "tree", TREE, ["tests/test_crash.py"])
    assert (run.passed, run.failed) == ({"tests/test_crash.py::test_before"}, {})


def test_the_deadline_ends_a_test_run(tmp_path: Path) -> None:
    run = run_files(tmp_path / "tree", TREE, ["tests/test_hang.py"], timeout_s=2.0)
    assert run.timed_out
    assert run.passed <= {"tests/test_hang.py::test_before"}


# --- pocket functions and repositories

one_step = st.sampled_from(ALL_STEPS).map(lambda step: (step,))
two_steps = st.tuples(st.sampled_from(ALL_STEPS), st.sampled_from(ALL_STEPS)).filter(
    lambda steps: steps[0].op.gives == steps[1].op.takes
)


def passes_its_tests(function: Function, body: str) -> bool:
    namespace: dict[str, Any] = {}
    exec(function.source(body) + "".join(render_tests(function.name, function.examples).values()), namespace)
    try:
        namespace["test_amber"]()
        namespace["test_amber_more"]()
    except AssertionError:
        return False
    return True


def wrong_body(function: Function, rng: random.Random) -> str:
    """A plausible mistake that the tests catch: another constant, another op, or a step forgotten."""
    caught = [
        steps
        for steps in mistakes(function.steps)
        if not all(passes(expected, evaluate(steps, given)) for given, expected in function.examples)
    ]
    return replace(function, steps=rng.choice(caught)).body


@given(steps=one_step | two_steps, seed=st.integers(0, 99))
def test_the_right_body_passes_and_a_wrong_one_does_not(steps: tuple[Step, ...], seed: int) -> None:
    function = Function("amber", WORDS["arguments"][steps[0].op.takes][0], steps)
    assert passes_its_tests(function, function.body)
    assert not passes_its_tests(function, wrong_body(function, random.Random(seed)))


@given(step=st.sampled_from(ALL_STEPS))
def test_no_other_step_and_no_constant_passes(step: Step) -> None:
    function = Function("amber", WORDS["arguments"][step.op.takes][0], (step,))
    for other in ALL_STEPS:
        if other.op.takes == step.op.takes and other != step:
            assert not passes_its_tests(function, Function("amber", function.argument, (other,)).body)
    for _, expected in function.examples:
        assert not passes_its_tests(function, f"return {expected!r}")


def drafts(split: Split, count: int, seed: int = 1) -> list[Draft]:
    return list(draft_tasks(seed=seed, count=count, split=split))


def test_drafts_are_what_real_deletion_makes() -> None:
    for draft in [*drafts("train", 20), *drafts("heldout", 20)]:
        (spot,), gold = draft.spots, draft.gold.files
        assert draft.files == delete_functions(gold, [(spot.path, spot.name)], draft.fail_to_pass)
        assert draft.files[spot.path].count(spot.function.stub) == 1
        assert spot.with_body(spot.function.body, draft.files) == gold[spot.path]
        assert spot.with_body(wrong_body(spot.function, random.Random(0)), draft.files) != gold[spot.path]


def test_drafts_are_repeatable_and_differ_by_seed() -> None:
    def texts(seed: int) -> list[tuple[str, str, dict[str, str]]]:
        return [(draft.id, draft.instruction, draft.files) for draft in drafts("train", 12, seed)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_toolsets_differ_and_always_suffice() -> None:
    toolsets = {draft.tools for draft in drafts("train", 300)}
    for tools in toolsets:
        assert {"edit_file", "finish"} <= set(tools)
        assert {"read_file", "run_command"} & set(tools)
        assert set(tools) <= {"read_file", "run_command", "edit_file", "search_codebase", "list_dir", "finish"}
        assert len(set(tools)) == len(tools)
    assert len(toolsets) == 12


def pairs(spot: Spot) -> set[tuple[str, str, str]]:
    return {
        pair
        for step in spot.function.steps
        for pair in (("name", step.op.phrase, spot.name), ("module", step.op.phrase, spot.module.name))
    }


def test_held_out_pairs_are_nowhere_in_train_repositories() -> None:
    train = {pair for draft in drafts("train", 3000) for spot in draft.gold.spots for pair in pairs(spot)}
    heldout = {pair for draft in drafts("heldout", 1000) for pair in pairs(draft.spots[0])}
    assert not train & heldout
    assert {phrase for _, phrase, _ in heldout} == {phrase for _, phrase, _ in train}  # every op is on both sides


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_gold_body_passes_and_a_wrong_one_fails(tmp_path: Path, split: Split) -> None:
    for draft in drafts(split, 2, seed=5):
        tests = {path: draft.gold.files[path] for path in draft.gold.test_files}

        def run_with(body: str, draft: Draft = draft, tests: dict[str, str] = tests) -> SuiteRun:
            (spot,) = draft.spots
            solved = spot.with_body(body, draft.files)
            return run_files(tmp_path / "tree", {**draft.files, spot.path: solved, **tests}, tests)

        function = draft.spots[0].function
        gold, wrong = run_with(function.body), run_with(wrong_body(function, random.Random(0)))
        assert gold.passed >= set(draft.fail_to_pass)
        assert not gold.failed
        assert wrong.failed.keys() & set(draft.fail_to_pass)
        assert wrong.failed.keys() <= set(draft.fail_to_pass)


# --- task folders


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pocket") / "tasks"
    shares: list[float] = []
    discarded = asyncio.run(make_pocket_tasks(root, 0, 5, 2, shares.append))
    assert discarded == []
    assert shares == [number / 7 for number in range(1, 8)]
    return root


def test_gradings_are_shared_for_the_tasks_beside_them_and_no_others(pocket: Path, tmp_path: Path) -> None:
    original = load_tasks(pocket / "train")[0].folder
    task, elsewhere = (
        load_task(Path(shutil.copytree(original, tmp_path / place / original.name))) for place in ("cache", "own")
    )
    grades = tmp_path / "cache" / "grades"
    rollout = Rollout("r", task.id, "g", task.tools, changed={f"{task.sources[0]}/more.py": "x = 1\n"})

    def outcome(task: Task) -> float:
        return asyncio.run(Grader(shared=grades).outcome(task, rollout))

    assert outcome(task) == 0.0
    (kept,) = grades.iterdir()
    told = kept.read_text()
    assert set(json.loads(told)["missing"]) == set(task.fail_to_pass)
    kept.write_text(json.dumps({**json.loads(told), "missing": []}))
    assert outcome(task) == 1.0, "as another process found it"
    assert outcome(elsewhere) == 0.0
    assert list(grades.iterdir()) == [kept]


def test_pocket_tasks_are_written_and_load(pocket: Path) -> None:
    train, heldout = load_tasks(pocket / "train"), load_tasks(pocket / "heldout")
    assert (len(train), len(heldout)) == (5, 2)
    assert [task.id for task in train] == sorted(task.id for task in train)
    for task in [*train, *heldout]:
        assert task.fail_to_pass
        assert task.pass_to_pass
        assert not set(task.fail_to_pass) & set(task.pass_to_pass)
        visible = "".join(path.read_text() for path in (task.tree / "tests").iterdir())
        assert not any(f"def {node.rpartition('::')[2]}()" in visible for node in task.fail_to_pass)
        assert sorted(str(path.relative_to(task.hidden_tests)) for path in task.hidden_tests.rglob("*.py")) == list(
            task.test_files
        )
    assert {path.name for path in pocket.parent.iterdir()} == {"tasks"}


def run_script(script: Path, app: Path, logs: Path) -> None:
    """A script of a task folder as a container would run it, which has its own /app and /logs."""
    text = script.read_text().replace("/app", str(app)).replace("/logs", str(logs))
    moved = script.with_name(script.name + ".moved")
    moved.write_text(text)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(
        ["sh", str(moved)], check=True, capture_output=True, env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    moved.unlink()


def test_the_folders_scripts_solve_and_score(pocket: Path, tmp_path: Path) -> None:
    task = load_tasks(pocket / "heldout")[0]
    app, logs = tmp_path / "app", tmp_path / "logs"
    shutil.copytree(task.tree, app)
    run_script(task.folder / "tests/test.sh", app, logs)
    assert (logs / "verifier/reward.txt").read_text() == "0\n"
    run_script(task.folder / "solution/solve.sh", app, logs)
    run_script(task.folder / "tests/test.sh", app, logs)
    assert (logs / "verifier/reward.txt").read_text() == "1\n"


def test_tasks_are_not_made_over_others(pocket: Path) -> None:
    with pytest.raises(OffbookError, match="exists already"):
        asyncio.run(make_pocket_tasks(pocket, 0, 1, 0, lambda share: None))


def test_an_interrupted_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def interrupt(share: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        asyncio.run(make_pocket_tasks(tmp_path / "tasks", 0, 1, 0, interrupt))
    assert not (tmp_path / "tasks").exists()
    asyncio.run(make_pocket_tasks(tmp_path / "tasks", 0, 1, 0, lambda share: None))
    assert len(load_tasks(tmp_path / "tasks/train")) == 1


def test_tasks_that_cannot_be_verified_are_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "worker_text", lambda: "raise SystemExit('no pytest here')")
    with pytest.raises(OffbookError, match=r"cannot be verified on this machine.*no pytest here"):
        asyncio.run(make_pocket_tasks(tmp_path / "tasks", 0, 1, 0, lambda share: None))


EXAMPLE = Contents(
    tree={"pkg.py": 'def f():\n    raise NotImplementedError("f")', "docs/ü.md": "größer\r\n"},
    gold={"pkg.py": "def f():\n    return 1"},
    hidden_tests={"tests/test_f.py": "from pkg import f\n\n\ndef test_f(): assert f() == 1\n"},
)


def example(folder: Path, **more: Any) -> Task:
    return Task(
        **places(folder),
        instruction='Bring back f in "pkg.py".',
        test_files=("tests/test_f.py",),
        id="pkg-f",
        origin="pkg",
        difficulty="hard",
        tools=("read_file", "edit_file"),
        fail_to_pass=("tests/test_f.py::test_f[it's $HOME]",),
        pass_to_pass=("tests/test_g.py::test_g",),
        **more,
    )


def test_a_task_folder_round_trips(tmp_path: Path) -> None:
    folder = tmp_path / "pkg-f"
    write_task(example(folder), EXAMPLE)
    assert load_task(folder) == example(folder)
    assert example(folder).tree == folder / "environment/repo"
    assert example(folder).hidden_tests == folder / "tests/hidden"
    assert (folder / "environment/repo/docs/ü.md").read_bytes() == "größer\r\n".encode()
    subprocess.run(["sh", "-n", folder / "tests/test.sh"], check=True)
    subprocess.run(["patch", "-p1", "-i", folder / "solution/gold.patch"], cwd=folder / "environment/repo", check=True)
    assert (folder / "environment/repo/pkg.py").read_text() == EXAMPLE.gold["pkg.py"]


def test_every_field_of_a_task_is_in_its_folder(tmp_path: Path) -> None:
    """All that differs from a default comes back, the environment as a path that moves with the folders."""
    (tmp_path / "made" / "python").mkdir(parents=True)
    whole = example(
        tmp_path / "tasks" / "pkg-f",
        test_command="pytest",
        suite=Suite(tmp_path / "made", ("src",), ("-c", "setup.cfg"), "true"),
        sources=("src/pkg",),
        deleted=Deleted("single", "stub", ("pkg.py::f",), ("pkg.py::f", "pkg.py::g"), 1, 1, 0, 0.25),
        leave=True,
        interrupt=Interrupt(3, "Wait."),
        context=Context(("pkg.py:1",), ("pkg.py:1-2",)),
        allows=("frames",),
        num_mutants=1,
    )
    plain = example(whole.folder)
    alike = {field.name for field in fields(Task) if getattr(whole, field.name) == getattr(plain, field.name)}
    shared = {"id", "origin", "difficulty", "tools", "test_files", "fail_to_pass", "pass_to_pass", "instruction"}
    assert alike == shared | {"folder", "tree", "hidden_tests", "script"}, "a new field is to be tried here too"
    write_task(whole, replace(EXAMPLE, mutants=Mutants((Mutant("test_pkg.py::test_f", 0, 1, "", "value"),))))
    assert load_task(whole.folder) == whole
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert load_task(moved / "tasks" / "pkg-f").suite.environment == (moved / "made").resolve()


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "environment/repo", "tests/hidden"])
def test_a_folder_that_is_no_task_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    write_task(example(tmp_path / "task"), EXAMPLE)
    path = tmp_path / "task" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(OffbookError, match=f"is not a task folder: it has no {missing}"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no toml", "is not TOML"),
        ('[offbook]\nid = "a"', "test_files: Field required"),
        ("{table}\nmystery = 1", "mystery: Unexpected keyword argument"),
        (
            "{table}\n[offbook.interrupt]\nafter_turns = 1\ntext = 'a'\nmore = 2",
            r"interrupt\.more: Unexpected keyword",
        ),
    ],
)
def test_an_unreadable_table_is_said_in_a_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    write_task(example(tmp_path / "task"), EXAMPLE)
    table = tmp_path / "task/task.toml"
    table.write_text(text.format(table=table.read_text()))
    with pytest.raises(OffbookError, match=complaint):
        load_task(tmp_path / "task")


FOREIGN = {
    "task.toml": 'schema_version = "1.4"\n',
    "instruction.md": "Write `hello` into answer.txt.\n",
    "environment/Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY start /app\n",
    "environment/start/notes.txt": "nothing yet\n",
    "tests/test.sh": "#!/bin/bash\nmkdir -p /logs/verifier\npython /tests/judge.py\n",
    "tests/judge.py": (
        "import os\ngood = os.path.exists('/app/answer.txt') and open('/app/answer.txt').read() == 'hello\\n'\n"
        "open('/logs/verifier/reward.txt', 'w').write('1' if good else '0')\n"
    ),
    "solution/solve.sh": "echo hello > /app/answer.txt\n",
}


def test_a_folder_that_somebody_else_made_is_a_task(tmp_path: Path) -> None:
    write_files(tmp_path / "hello", FOREIGN)
    (task,) = load_tasks(tmp_path)
    assert (task.id, task.instruction, task.script) == ("hello", "Write `hello` into answer.txt.", "tests/test.sh")
    assert [path.name for path in task.tree.iterdir()] == ["notes.txt"]
    assert asyncio.run(check(task)) == ""
    rollout = Rollout("r", "hello", "g", task.tools, changed={"answer.txt": "hello\n"})
    assert asyncio.run(Grader().outcome(task, rollout)) == 1.0
    assert asyncio.run(Grader().outcome(task, replace(rollout, changed={"answer.txt": "goodbye\n"}))) == 0.0


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"solution/solve.sh": "true\n"}, "its solution earns 0, not 1"),
        ({"tests/judge.py": "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1.0}')"}, "by doing nothing"),
        ({"tests/judge.py": "raise ValueError('no judge today')"}, "no judge today"),
    ],
)
def test_a_foreign_task_that_does_not_hold_says_why(tmp_path: Path, broken: dict[str, str], complaint: str) -> None:
    write_files(tmp_path / "hello", {**FOREIGN, **broken})
    assert complaint in asyncio.run(check(load_task(tmp_path / "hello")))


def test_a_place_without_tasks_is_an_error(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OffbookError, match="holds no task folders"):
            load_tasks(root)


HALVES = "from pkg import f\n\n\ndef test_one(): assert f(1) == 1\n\n\ndef test_two(): assert f(2) == 4\n"


@pytest.mark.parametrize(
    ("body", "floor", "binary", "partial"),
    [
        ("n * n", 0.0, 1.0, 1.0),
        ("n", 0.0, 0.0, 0.5),
        ("n", 0.25, 0.0, 1 / 3),
        ("n", 0.5, 0.0, 0.0),  # what a trivial body passes earns nothing
        ("-n", 0.0, 0.0, 0.0),
        ("other(n)", 0.0, 0.0, 0.0),  # one half is right, and a test fails that passed before
    ],
)
def test_partial_credit_begins_at_the_floor(
    tmp_path: Path, body: str, floor: float, binary: float, partial: float
) -> None:
    stub = "def f(n):\n    raise NotImplementedError\n\n\ndef other(n):\n    return 7\n"
    contents = Contents(
        tree={"pkg.py": stub},
        gold={"pkg.py": stub.replace("raise NotImplementedError", "return n * n")},
        hidden_tests={
            "test_f.py": HALVES,
            "test_g.py": "from pkg import other\n\n\ndef test_g(): assert other(0) == 7\n",
        },
    )
    new = Task(
        **places(tmp_path / "f"),
        instruction="Bring back f.",
        test_files=("test_f.py", "test_g.py"),
        id="f",
        origin="pkg",
        difficulty="normal",
        tools=("read_file", "edit_file", "finish"),
        fail_to_pass=("test_f.py::test_one", "test_f.py::test_two"),
        pass_to_pass=("test_g.py::test_g",),
        deleted=Deleted("single", "stub", ("pkg.py::f",), ("pkg.py::f",), 1, 1, 0, floor),
    )
    write_task(new, contents)
    task = load_task(tmp_path / "f")
    done = stub.replace("raise NotImplementedError", f"return {body}")
    if body == "other(n)":
        done = done.replace("return other(n)", "return n").replace("return 7", "return 8")
    rollout = Rollout("r", "f", "g", task.tools, changed={"pkg.py": done})
    assert asyncio.run(Grader().outcome(task, rollout)) == binary
    assert asyncio.run(Grader(partial=True).outcome(task, rollout)) == pytest.approx(partial)


def test_a_folder_of_harbor_tasks_is_a_source_to_train_on(tmp_path: Path) -> None:
    """About a fifth is held out, by name; one that comes later moves none of the others."""
    for number in range(20):
        files = {
            "task.toml": 'version = "1.0"\n', "instruction.md": "x", "tests/test.sh": "true", "environment/a.txt": "a",
        }  # fmt: skip
        write_files(tmp_path / "theirs" / f"task-{number}", files)
    config = load_config([], {"model": "pocket", "tasks.source": str(tmp_path / "theirs")})
    refuse_missing_tasks(config, "train")
    sets = task_sets(config)
    assert len(sets.train) + len(sets.heldout) == 20
    assert 1 <= len(sets.heldout) <= 8
    shutil.rmtree(tmp_path / "theirs" / sets.train[0].id)
    again = task_sets(config)
    assert [task.id for task in again.heldout] == [task.id for task in sets.heldout]
    assert [task.id for task in again.train] == [task.id for task in sets.train[1:]]
    empty = load_config([], {"model": "pocket", "tasks.source": str(tmp_path)})
    with pytest.raises(OffbookError, match="holds no task folders"):
        refuse_missing_tasks(empty, "train")
