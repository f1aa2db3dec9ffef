"""Text search: what it finds, what it leaves out and says so, and that no pattern holds anybody up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from toolbench import ALL, LIMITS, answer, one, session, small_tree

from offbook.agent.harness.tool import Workbench
from offbook.sandbox import ProcessSandbox
from offbook.types import Limits, ToolCall


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return small_tree(tmp_path)


def test_search_finds_lines(tree: Path) -> None:
    (tree / ".git").mkdir()
    (tree / ".git" / "config").write_text("return 0\n")
    (tree / "pkg2").mkdir()
    (tree / "pkg2" / "two.py").write_text("return 2\n")
    (tree / "huge.txt").write_text("return 0\n" * 120_000)
    (tree / "windows.txt").write_bytes(b"return 0\r\n")
    (tree / "broken.bin").write_bytes(b"return 0\0")
    answers, _ = session(
        tree,
        ("search_codebase", {"pattern": r"return \d$"}),
        ("search_codebase", {"pattern": "(?i)COUNTS", "path": "./"}),
        ("search_codebase", {"pattern": "return 2", "path": "pkg/"}),
        ("search_codebase", {"pattern": "return 2", "path": "pkg/calc.py"}),
        ("search_codebase", {"pattern": "return 2", "path": "README.md"}),
        ("search_codebase", {"pattern": "^$", "path": "pkg"}),
    )
    skipped = "\n[2 files not searched: too large, binary or unreadable]"
    assert answers == [
        "pkg/calc.py:2:     return 0\npkg/calc.py:7:         return 0\npkg/calc.py:8:     return 2\n"
        "pkg2/two.py:1: return 2\nwindows.txt:1: return 0" + skipped,
        "README.md:1: Counts to two." + skipped,
        "pkg/calc.py:8:     return 2",
        "pkg/calc.py:8:     return 2",
        "no match",
        "pkg/calc.py:3: \npkg/calc.py:4: ",
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"pattern": "("}, "not a regular expression: missing ), unterminated subpattern at position 0"),
        ({"pattern": "a{99999999999}"}, "not a regular expression: the repetition number is too large"),
        ({"pattern": "(" * 500 + ")" * 500}, "not a regular expression: it is nested too deeply"),
        ({"pattern": "x" * 1001}, "what you look for is longer than 1000 characters"),
        ({"pattern": "a", "path": "absent"}, "No such file or directory"),
        ({"pattern": "a", "path": "/etc"}, None),
        ({"pattern": "a", "path": ".."}, None),
    ],
)
def test_a_search_that_cannot_be_made_is_said_so(tree: Path, arguments: dict[str, Any], problem: str | None) -> None:
    text = one(tree, "search_codebase", arguments)
    assert text.startswith("failed: ")
    assert problem is None or text == f"failed: {problem}"


def test_what_a_search_leaves_out_is_counted(tree: Path) -> None:
    (tree / "many.txt").write_text("match\n" * 80)
    (tree / "wide.txt").write_text("x" * 5000 + "needle" + "y" * 5000 + "\n")
    answers, _ = session(tree, ("search_codebase", {"pattern": "match"}), ("search_codebase", {"pattern": "needle"}))
    assert answers[0].endswith("many.txt:50: match\n[30 more matches; say more closely what you look for]")
    assert answers[1].startswith("wide.txt:1: [4880 characters] xxx")
    assert answers[1].endswith("yyy [4886 characters]")
    assert "needle" in answers[1]


def test_a_pattern_that_never_ends_is_ended_and_holds_nobody_up(tree: Path) -> None:
    (tree / "evil.txt").write_text("a" * 60 + "b\n")

    async def work() -> tuple[str, float]:
        gaps = [0.0]

        async def beat() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - before)

        async with ProcessSandbox(tree) as sandbox:
            beating = asyncio.create_task(beat())
            bench = Workbench(sandbox, Limits(command_s=0.7))
            text = await answer(ALL, bench, ToolCall("search_codebase", {"pattern": "(a|a)*$"}))
            beating.cancel()
            return text, max(gaps)

    text, longest = asyncio.run(work())
    assert text == "failed: the search took more than 0.7 s; look for less, or in fewer files"
    assert longest < 0.5


def test_names_that_are_no_text_can_be_answered(tree: Path) -> None:
    Path(bytes(tree).decode(), "b\udce9d.txt").write_text("needle\n")
    answers, _ = session(tree, ("list_dir", {"path": "."}), ("search_codebase", {"pattern": "(needle)+"}))
    for text in answers:
        text.encode()
    assert "needle" in answers[1]


def test_the_history_can_be_read_and_searched(tree: Path) -> None:
    async def work() -> list[str]:
        async with ProcessSandbox(tree) as sandbox:
            await sandbox.publish("segment_1.md", "it was a lark\n")
            bench, search = Workbench(sandbox, LIMITS), "search_codebase"
            calls = [(search, {"pattern": "lark", "path": path}) for path in ("/history", "/history/segment_1.md", ".")]
            calls.append(("read_file", {"path": "/history/segment_1.md"}))
            calls.append((search, {"pattern": "lark", "path": "/history/absent"}))
            return [await answer(ALL, bench, ToolCall(*call)) for call in calls]

    found = "/history/segment_1.md:1: it was a lark"
    assert asyncio.run(work()) == [found, found, "no match", "it was a lark\n", "failed: No such file or directory"]
