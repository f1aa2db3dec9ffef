"""Several rounds of a suite, for which pytest is imported once: each as if it were the only one."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from offbook.sandbox import SandboxSpec
from offbook.tasks.folder import write_files
from offbook.tasks.suite import run_rounds, suite_sandbox, worker_text
from offbook.tasks.suite_run import Round, SuiteRun
from offbook.types import Suite

PRODUCT = "VALUE = 1\nSEEN = []\n\n\ndef value():\n    SEEN.append(1)\n    return VALUE\n"
TESTS = """\
import os
import unittest

import pytest

from product import SEEN, value


@pytest.mark.parametrize("times", [1, 2], ids=["a::b", "[c]"])
def test_value(times):
    assert value() * times == times


def test_first():
    value()
    assert len(SEEN) == 1


def test_nothing_is_left():
    assert not os.path.exists("/tmp/left")
    assert not os.path.exists("left")


class Shared:
    def test_shared(self):
        assert value() == 1


class TestCase(Shared):
    class TestInner(Shared):
        pass


class OldStyle(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(value(), 1)


def test_says_nothing():
    assert (
        value() == 2
    )
"""
FILE = "tests/test_product.py"
CASES = ["test_value", "TestCase::test_shared", "TestCase::TestInner::test_shared", "OldStyle::test_unit"]
ALL = Round([FILE], [f"{FILE}::{name}" for name in CASES])
LEAVES = "import os\n\nopen('/tmp/left', 'w').close()\nopen('left', 'w').close()\nprint('FOUND', flush=True)\n"
OTHERS = {
    "another value": replace(
        ALL, tests=[f"{FILE}::test_value[a::b]"], changes={"product.py": "VALUE = 2\n" + PRODUCT[9:]}
    ),
    "another test": replace(ALL, changes={FILE: TESTS.replace("== times", "!= times")}),
    "one that leaves things": replace(ALL, changes={"product.py": LEAVES + PRODUCT}),
    "one that ends": replace(ALL, changes={"product.py": LEAVES + "os._exit(0)\n"}),
    "one that is endless": replace(ALL, changes={"product.py": "while True: pass\n"}, timeout_s=2.0),
    "one that cannot be read": replace(ALL, changes={"product.py": "def"}),
}
KEPT_TESTS = [f"{FILE}::test_first", f"{FILE}::test_nothing_is_left"]
KEPT = replace(ALL, tests=KEPT_TESTS)


def run_in(folder: Path, rounds: Sequence[Round]) -> list[SuiteRun]:
    async def run() -> list[SuiteRun]:
        async with await suite_sandbox(folder, Suite(), SandboxSpec()) as sandbox:
            return await run_rounds(sandbox, Suite(), rounds, 60.0, product=["product.py"])

    return asyncio.run(run())


def told(run: SuiteRun) -> SuiteRun:
    return replace(run, output="", seconds={}, saw=set())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path, {"product.py": PRODUCT, FILE: TESTS})
    return tmp_path


def test_a_round_is_what_it_would_be_alone(folder: Path) -> None:
    rounds = [round_ for other in OTHERS.values() for round_ in (other, KEPT)]
    runs = run_in(folder, [*rounds, ALL])
    assert len(runs) == len(rounds) + 1
    for name, run, kept in zip(OTHERS, runs[::2], runs[1::2], strict=False):
        assert kept.passed == {*KEPT_TESTS}, name
        assert not kept.tampered, name
        if OTHERS[name].timeout_s == ALL.timeout_s:
            (alone,) = run_in(folder, [OTHERS[name]])
            assert told(run) == told(alone), name
    values = {f"{FILE}::test_value[{name}]" for name in ("a::b", "[c]")}
    assert runs[-1].passed == {f"{FILE}::{name}" for name in CASES[1:]} | values


def test_of_an_assertion_that_says_nothing_the_code_is_told(folder: Path) -> None:
    fails, skipped, broken = (
        f"{FILE}::test_says_nothing",
        "tests/test_expected.py::test_expected",
        "tests/test_broken.py",
    )
    expected = "import pytest\n\n\n@pytest.mark.xfail\ndef test_expected():\n    assert not 3\n"
    write_files(folder, {"tests/test_expected.py": expected, broken: "assert not 4\n"})
    (run,) = run_in(folder, [Round([FILE, "tests/test_expected.py", broken], [fails, skipped])])
    assert run.failed == {fails: "call: value() == 2"}
    assert run.skipped == {skipped: "assert not 3"}
    assert run.broken == {broken: "assert not 4"}


def test_what_is_put_back_was_not_written_to(folder: Path) -> None:
    """By a round before it. What a round writes to is reported."""
    changes = replace(ALL, changes={"product.py": PRODUCT + "\n", FILE: TESTS + "\n"})
    by_itself = replace(KEPT, changes={"data.txt": ""})
    writes = replace(KEPT, changes={"product.py": "open('tests/other.txt', 'w').close()\n" + PRODUCT})
    write_files(folder, {"data.txt": "", "tests/other.txt": ""})
    rounds = [changes, KEPT, by_itself, KEPT, writes, KEPT]
    told_of = [{path for what, path in run.saw if what == "written"} for run in run_in(folder, rounds)]
    assert told_of == [set(), set(), set(), set(), {"tests/other.txt"}, set()]


def test_a_git_status_is_no_write_and_hands_nothing_on(folder: Path) -> None:
    """git refreshes its index when it is only asked for the status. Each round finds the index as it was."""
    write_files(folder, {".git/index": "as it was"})
    tells = "import pathlib\nif pathlib.Path('.git/index').read_text() != 'as it was': raise SystemExit\n"
    writes = replace(KEPT, changes={"product.py": tells + "open('.git/index', 'w').write('a sign')\n" + PRODUCT})
    first, second = runs = run_in(folder, [writes, writes])
    assert first.passed == second.passed != set()
    assert not [path for run in runs for what, path in run.saw if what == "written"]


def test_what_is_mounted_to_be_read_is_not_looked_through(tmp_path: Path) -> None:
    """An interpreter that lies in /tmp has tens of thousands of files, and there are several rounds to a grading."""
    write_files(tmp_path, {"tree/own.py": "", "lib/far/deep.py": ""})
    look = worker_text().rpartition("if __name__")[0] + "print(sorted(there(['/tmp'])))"

    async def seen() -> str:
        mounts = {"/tmp/lib": tmp_path / "lib"}
        async with await suite_sandbox(tmp_path / "tree", Suite(), SandboxSpec(), mounts=mounts) as sandbox:
            await sandbox.exec("echo > /tmp/left", 10)
            return (await sandbox.exec(shlex.join([sandbox.python, "-B", "-c", look]), 60)).output

    assert "['/tmp/left', 'own.py']" in asyncio.run(seen())
