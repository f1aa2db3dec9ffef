"""The tools in real sandboxes: what they answer, and what they say when they cannot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolbench import ALL, BASH_SET, CALC, LIMITS, Step, answer, edit, one, session, small_tree

from offbook.agent.harness.tool import Workbench
from offbook.agent.harness.tools import OUTPUT_CHARS, TOOLS, mismatch
from offbook.sandbox import ExecResult, ProcessSandbox
from offbook.types import Limits, ToolCall


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return small_tree(tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("read_file", {}, "read_file needs path"),
        ("read_file", {"path": 3}, "path must be a string"),
        ("read_file", {"path": "a", "start": "3"}, "start must be an integer"),
        ("read_file", {"path": "a", "start": True}, "start must be an integer"),
        ("read_file", {"path": "a", "line": 1}, "read_file takes no line"),
        ("read_file", {"path": "\ud800"}, "path holds characters that are no text"),
        ("search_codebase", {"pattern": 3}, "pattern must be a string"),
        ("edit_file", {"path": "a", "old": "", "new": "", "edits": {}}, "edits must be a list of objects"),
        (
            "edit_file",
            {"path": "a", "old": "", "new": "", "edits": [{"old": "x"}]},
            "item 1 of edits must be an object with old and new",
        ),
        ("todo", {"items": [{"text": 1, "status": "done"}]}, "text of item 1 of items must be a string"),
        (
            "todo",
            {"items": [{"text": "a", "status": "done"}, {"text": "b", "status": "open"}]},
            "status of item 2 of items must be one of pending, in_progress, done",
        ),
    ],
)
def test_arguments_are_checked_and_the_problem_is_said(name: str, arguments: dict[str, Any], problem: str) -> None:
    assert TOOLS[name].check(arguments) == problem


def test_reading_without_a_range_is_the_text_itself(tree: Path) -> None:
    odd = "a\x0cb\r\nc\u2028d"
    (tree / "odd").write_bytes(odd.encode())
    (tree / "empty").write_bytes(b"")
    paths = ("pkg/calc.py", "odd", "empty")
    assert session(tree, *(("read_file", {"path": path}) for path in paths))[0] == [CALC, odd, ""]


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        ({"start": 2, "end": 3}, "[lines 2-3 of 8]\n    return 0\n\n"),
        ({"start": 7}, "[lines 7-8 of 8]\n        return 0\n    return 2\n"),
        ({"end": 1}, "[lines 1-1 of 8]\ndef one():\n"),
        ({"start": 8, "end": 99}, "[lines 8-8 of 8]\n    return 2\n"),
        ({"start": 9}, "failed: pkg/calc.py has only 8 lines"),
        ({"start": 0}, "failed: lines count from 1"),
        ({"start": 3, "end": 2}, "failed: line 2 comes before line 3"),
    ],
)
def test_reading_a_range(tree: Path, lines: dict[str, int], answer: str) -> None:
    assert one(tree, "read_file", {"path": "pkg/calc.py", **lines}) == answer


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_long_file_can_be_read_to_its_end(tree: Path, ending: str) -> None:
    text = "\n".join(f"line {number} {'x' * (number % 90)}" for number in range(1, 1001)) + ending
    (tree / "long").write_text(text)
    first = one(tree, "read_file", {"path": "long"})
    assert len(first) < OUTPUT_CHARS + 100
    whole, _, note = first.rpartition("[")
    while note:
        start = int(note.split("read on from line ")[1].rstrip("]"))
        part = one(tree, "read_file", {"path": "long", "start": start})
        header, _, body = part.partition("\n")
        assert header.startswith(f"[lines {start}-")
        body, _, note = body.rpartition("[") if part.endswith("]") else (body, "", "")
        whole += body
    assert whole == text


def test_a_long_line_is_cut_and_said_so(tree: Path) -> None:
    (tree / "min.js").write_text("x" * 20_000 + "\nshort\n")
    text = one(tree, "read_file", {"path": "min.js"})
    assert text.endswith("x\n[cut: line 1 goes on for 12000 characters, read on from line 2]")
    assert one(tree, "read_file", {"path": "min.js", "start": 2}) == "[lines 2-2 of 2]\nshort\n"


def test_edits_apply_in_order_and_new_files_are_made(tree: Path) -> None:
    answers, changed = session(
        tree,
        edit("pkg/calc.py", "def one():\n    return 0", "def one():\n    return 1", ("return 1", "return 3")),
        edit("new/deep.py", "", "x = 1\n"),
        edit("README.md", "Counts to two.\n", ""),
        edit("README.md", "", "Counts.\n"),
    )
    assert answers == ["edited pkg/calc.py", "created new/deep.py", "edited README.md", "edited README.md"]
    assert changed == {
        "pkg/calc.py": CALC.replace("return 0", "return 3", 1),
        "new/deep.py": "x = 1\n",
        "README.md": "Counts.\n",
    }


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (edit("absent.py", "a", "b"), "No such file or directory"),
        (edit("pkg/calc.py", "", "b"), "pkg/calc.py has text already; say which part of it to replace"),
        (edit("pkg/calc.py", "one", "one"), "the new text is the same as the old: nothing would change"),
        (
            edit("pkg/calc.py", "return 0", "return 1"),
            "the text to replace occurs 2 times in pkg/calc.py, at lines 2, 7; give more of what surrounds it",
        ),
        (
            edit("pkg/calc.py", "return 2", "return 3", ("absent", "x")),
            "replacement 2 of 2 fails, so none was made: the text to replace is not in pkg/calc.py, "
            "nor anything like it; the file has 8 lines",
        ),
        (edit("latin", "x", "y"), "latin is not UTF-8 text; an edit would damage it"),
        (
            edit("aaa", "aa", "b"),
            "the text to replace occurs 2 times in aaa, at lines 1, 1; give more of what surrounds it",
        ),
    ],
)
def test_an_edit_that_cannot_be_made_changes_nothing(tree: Path, step: Step, problem: str) -> None:
    (tree / "latin").write_bytes(b"x\xe9")
    (tree / "aaa").write_text("aaa")
    answers, changed = session(tree, step)
    assert answers == [f"failed: {problem}"]
    assert changed == {}


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            "def one():\n  return 0\n",
            "the text to replace is not in f, but this differs from it in spaces only "
            "(line 2 starts with 4 spaces, yours with 2 spaces):\n1: def one():\n2:     return 0",
        ),
        (
            "\treturn 2",
            "the text to replace is not in f, but this differs from it in spaces only "
            "(line 8 starts with 4 spaces, yours with 1 tab):\n8:     return 2",
        ),
        (
            "def two(): \n",
            "the text to replace is not in f, but this differs from it in spaces only "
            "(line 5 differs in spaces at its end):\n5: def two():",
        ),
        (
            "def two():\n    if one() or x:",
            "the text to replace is not in f; the nearest is:\n5: def two():\n6:     if one():",
        ),
        (
            "one():\\n    return 0",
            "the text to replace is not in f: you wrote \\n as two characters where the file has line breaks",
        ),
        (
            CALC.replace("    ", "\t"),
            "the text to replace is not in f, but this differs from it in spaces only (line 2 starts with 4 spaces, "
            "yours with 1 tab):\n1: def one():\n2:     return 0\n3: \n4: \n[4 more lines]",
        ),
        ("completely different words", "the text to replace is not in f, nor anything like it; the file has 8 lines"),
    ],
)
def test_a_mismatch_says_what_is_nearest(old: str, message: str) -> None:
    assert mismatch("f", CALC, old) == message


@given(st.text("ab \n\t\\", max_size=60), st.text("ab \n\t\\", min_size=1, max_size=40))
def test_a_mismatch_is_always_short(text: str, old: str) -> None:
    message = mismatch("f", text, old)
    assert message.startswith("the text to replace is not in f")
    assert message.count("\n") <= 6
    assert len(mismatch("f", CALC.replace("\n", "x" * 500 + "\n") * 50, "x" * 400 + old)) < 1000


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"command": "echo hi; echo there >&2"}, "hi\nthere\n"),
        ({"command": "true"}, "no output"),
        ({"command": "echo no; exit 3"}, "exit 3\nno\n"),
        ({"command": "kill -9 $$"}, "exit 137\n"),
        ({"command": "echo before; sleep 9", "timeout": 1}, "failed: stopped after 1 s\nbefore\n"),
        ({"command": "echo hi", "timeout": 0}, "failed: the time for a command must be at least 1 second"),
        ({"command": "echo hi", "timeout": "3"}, "malformed: timeout must be an integer"),
        ({"command": "echo \0"}, "failed: a command cannot hold a null character"),
    ],
)
def test_commands(tree: Path, arguments: dict[str, Any], answer: str) -> None:
    assert one(tree, "run_command", arguments) == answer


def test_long_output_is_cut_in_the_middle(tree: Path) -> None:
    text = one(tree, "run_command", {"command": "seq 1 5000"})
    assert text.startswith("1\n2\n")
    assert text.endswith("4999\n5000\n")
    assert "\n[15893 characters left out]\n" in text
    assert len(text) == OUTPUT_CHARS + len("\n[15893 characters left out]\n")


def test_tests_are_run_where_the_task_offers_them(tree: Path) -> None:
    command = "seq 1 3000; echo FAILED; false"
    answers, _ = session(tree, ("run_tests", {}), tests=command)
    assert answers[0].startswith("exit 1\n[")
    assert answers[0].endswith("3000\nFAILED\n")
    assert one(tree, "run_tests", {"path": "a  b.py::test"}, tests="echo") == "a  b.py::test\n"
    assert one(tree, "run_tests", {}) == "failed: this task offers no tests to run"
    assert one(tree, "run_tests", {}, tests="sleep 9", limits=Limits(command_s=0.3)).startswith("failed: stopped after")


def test_listing(tree: Path) -> None:
    (tree / "empty").mkdir()
    (tree / "many").mkdir()
    for number in range(100):
        (tree / "many" / f"{'x' * 90}_{number:04}").touch()
    answers, _ = session(tree, *(("list_dir", {"path": path}) for path in (".", "empty", "many", "absent")))
    assert answers[0] == "README.md\nempty/\nmany/\npkg/"
    assert answers[1] == "empty"
    assert answers[2].endswith("x_0082\n[17 more names]")
    assert answers[3] == "failed: No such file or directory"


def test_the_todo_list_is_replaced_and_rendered(tree: Path) -> None:
    first = [{"text": "read\n it", "status": "done"}, {"text": "fix it", "status": "in_progress"}]
    second = [{"text": "test it", "status": "pending"}]
    answers, _ = session(
        tree,
        ("todo", {"items": first}),
        ("todo", {"items": second}),
        ("todo", {"items": [{"text": " ", "status": "done"}]}),
        ("todo", {"items": []}),
    )
    assert answers == ["[x] read it\n[>] fix it", "[ ] test it", "failed: item 1 says nothing", "the list is empty"]


class SmallSandbox(ProcessSandbox):
    """A sandbox in which every command runs out of memory."""

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        return replace(await super().exec(command, timeout_s, report), exhausted="memory")


def test_a_limit_of_the_sandbox_that_ended_a_command_is_named(tree: Path) -> None:
    async def work() -> list[str]:
        async with SmallSandbox(tree) as sandbox:
            bench, echo = Workbench(sandbox, LIMITS, test_command="echo tested"), {"command": "echo so far"}
            calls = [("run_command", echo), ("run_tests", {})]
            answers = [await answer(ALL, bench, ToolCall(*call)) for call in calls]
            return [*answers, await answer(BASH_SET, bench, ToolCall("bash", echo))]

    assert asyncio.run(work()) == [
        "failed: ended by the limit on memory\nso far\n",
        "failed: ended by the limit on memory\ntested\n",
        "<exception>ended by the limit on memory</exception>\n<returncode>-1</returncode>\n<output>\nso far\n</output>",
    ]
