"""Verification: a reason for each deletion that makes no task, and what the tests say of the others."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from little_repo import deps, feature, workshop

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.types import Deletion
from offbook.tasks.factory.verification.verify import Verdict, VerifySettings, impacted, verify
from offbook.tasks.factory.workshop import Workshop
from offbook.tasks.suite import Round, run_rounds, suite_sandbox
from offbook.types import Suite

__all__ = ["deps", "workshop"]

STUB = 'raise NotImplementedError("{}")'
HASTY = VerifySettings(trivial_s=1.0)


def stubbed(workshop: Workshop, *names: str, without: tuple[str, ...] = ()) -> Deletion:
    return delete(workshop.files, workshop.symbols, feature(workshop, *names, without=without), "stub")


def verdict(workshop: Workshop, deletion: Deletion, settings: VerifySettings = HASTY) -> Verdict:
    return asyncio.run(verify(workshop, deletion, SandboxSpec(), settings))


def test_what_makes_a_task_is_told_with_its_tests(workshop: Workshop) -> None:
    result = verdict(workshop, stubbed(workshop, "words.squeeze"))
    assert result.refused == ""
    assert result.fail_to_pass == ("tests/test_words.py::test_squeeze", "tests/test_words.py::test_squeeze_nothing")
    assert "tests/test_words.py::test_initials" in result.pass_to_pass
    assert not {*result.fail_to_pass} & {*result.pass_to_pass}
    assert result.floor == 0.5  # return "" passes one of the two
    [example] = [each for each in result.examples if each.text == "assert squeeze(' a   b ') == 'a b'"]
    assert example.lines


def test_tests_that_pass_without_it_are_not_asked_for(workshop: Workshop) -> None:
    deletion = stubbed(workshop, "odd.flicker")
    fine = replace(deletion, feature=replace(deletion.feature, tests=deletion.feature.tests[1:]))
    assert "test_flicker" not in [test.rpartition("::")[2] for test in fine.feature.tests]
    result = verdict(workshop, replace(fine, stubbed=()), VerifySettings(max_others=0))
    assert (result.refused, result.floor) == ("", 0.0)
    assert result.fail_to_pass == ("tests/test_odd.py::test_flicker_twice",)
    assert result.pass_to_pass == ("tests/test_odd.py::test_indifferent",)


def refused(workshop: Workshop, deletion: Deletion, settings: VerifySettings = HASTY) -> tuple[str, str]:
    result = verdict(workshop, deletion, settings)
    assert (result.fail_to_pass, result.pass_to_pass) == ((), ())
    return result.refused, result.evidence


def test_other_tests_fail_too(workshop: Workshop) -> None:
    deletion = stubbed(workshop, "words.squeeze", without=("tests/test_words.py::test_squeeze",))
    reason, evidence = refused(workshop, deletion)
    assert reason == "other tests fail too"
    assert evidence.startswith("tests/test_words.py::test_squeeze: call: NotImplementedError")


def test_no_test_fails(workshop: Workshop) -> None:
    path = "little/words.py"
    harmless = replace(
        stubbed(workshop, "words.squeeze"), files={path: workshop.files[path] + "# shorter\n"}, stubbed=()
    )
    assert refused(workshop, harmless) == ("no test fails without it", "tests/test_words.py::test_squeeze")


def test_a_trivial_body_solves_it(workshop: Workshop) -> None:
    assert refused(workshop, stubbed(workshop, "figures.nothing")) == ("a trivial body solves it", "none")


def test_a_test_that_does_not_fail_every_time(workshop: Workshop) -> None:
    deletion = replace(stubbed(workshop, "odd.flicker"), stubbed=())  # without trivial bodies, one of which is right
    assert refused(workshop, deletion) == ("flaky", "tests/test_odd.py::test_flicker")


@pytest.mark.parametrize(
    ("code", "reason", "evidence"),
    [
        (
            "raise ImportError('no more')",
            "tests can no longer be imported",
            "tests/test_figures.py: ImportError: no more",
        ),
        (
            "import os\ndef initials(*a): os._exit(0)\nplural = squeeze = initials\n",
            "the tests do not come to an end",
            "tests/test_figures.py::test_described",
        ),
    ],
)
def test_a_tree_that_breaks_the_tests(workshop: Workshop, code: str, reason: str, evidence: str) -> None:
    broken = replace(stubbed(workshop, "words.squeeze"), files={"little/words.py": code}, stubbed=())
    told = refused(workshop, broken)
    assert (told[0], told[1][: len(evidence)]) == (reason, evidence)


def test_tests_that_take_too_long(workshop: Workshop) -> None:
    deletion = stubbed(workshop, "words.squeeze")
    slow = replace(workshop.repository, seconds=dict.fromkeys(workshop.repository.seconds, 5.0))
    result = verdict(replace(workshop, repository=slow), deletion, VerifySettings(feature_s=9.0))
    assert result == Verdict("its tests take too long")


def test_a_trivial_body_that_keeps_a_loop_from_ending_is_stopped(workshop: Workshop) -> None:
    """With `return False` in reached, climb goes on for ever. There are four such bodies."""
    began = time.monotonic()
    result = verdict(workshop, stubbed(workshop, "odd.reached"), VerifySettings(trivial_s=1.0))
    assert time.monotonic() - began < 40
    assert result.refused == ""
    assert result.fail_to_pass == ("tests/test_odd.py::test_climb", "tests/test_odd.py::test_reached")
    assert result.floor == 0.0


def test_only_tests_that_could_notice_are_run(workshop: Workshop) -> None:
    deletion = stubbed(workshop, "words.squeeze")
    others = impacted(workshop, deletion, HASTY)
    assert "tests/test_words.py::test_initials" in others
    assert "tests/test_figures.py::test_described" in others  # it needs plural, of the same file
    assert "tests/test_figures.py::test_spread" not in others
    assert len(impacted(workshop, deletion, VerifySettings(max_others=2))) == 2
    gone = delete(workshop.files, workshop.symbols, feature(workshop, "words.squeeze"), "gone")
    files = {test.partition("::")[0] for test in impacted(workshop, gone, HASTY)}
    assert files == {"tests/test_words.py", "tests/test_figures.py", "tests/test_odd.py"}


def test_rounds_leave_the_tree_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "pkg.py").write_text("VALUE = 1\n")
    (tmp_path / "other.py").write_text("OTHER = 1\n")
    (tmp_path / "test_pkg.py").write_text(
        "import os, pkg, pytest\n\n\ndef test_one(): assert pkg.VALUE == 1\n\n\n"
        "def test_other(): assert os.path.exists('other.py') and not os.path.exists('new/one.py')\n"
    )
    changes: list[dict[str, str | None]] = [
        {"pkg.py": "VALUE = 2\n"},
        {"other.py": None, "new/one.py": "x = 1\n"},
        {"pkg.py": "while True: pass\n"},
        {"pkg.py": "import os\nos._exit(0)\n"},
        {},
    ]
    rounds = [Round(["test_pkg.py"], changes=change, timeout_s=2.0) for change in changes]

    async def run() -> list[tuple[list[str], bool]]:
        async with await suite_sandbox(tmp_path, Suite(), SandboxSpec()) as sandbox:
            runs = await run_rounds(sandbox, Suite(), rounds, 30.0)
            assert {path for path, text in (await sandbox.changes()).items() if text is not None} == set()
            assert not any(run.tampered for run in runs)
            return [(sorted(test[-3:] for test in run.passed), run.exit_code is not None) for run in runs]

    assert asyncio.run(run()) == [
        (["her"], True),
        (["one"], True),
        ([], False),
        ([], False),
        (["her", "one"], True),
    ]
