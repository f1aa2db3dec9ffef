"""How the tests of a tree go, node id by node id."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from offbook.sandbox import Box, BoxSpec, open_box

WORKER = Path(__file__).with_name("pytest_worker.py")
OUTPUT_TAIL = 4000  # characters


@dataclass(frozen=True, slots=True)
class TestRun:
    """A test is named only if it ran: skipped tests, and those after a crash or the deadline, are in neither set.

    `failed` also names a test file that could not be imported.
    """

    __test__: ClassVar[bool] = False  # not a test, whatever pytest thinks of its name

    passed: frozenset[str]
    failed: frozenset[str]
    output: str  # the end of what pytest printed
    timed_out: bool


async def run_tests(tree: Path, test_files: Sequence[str], timeout_s: float, spec: BoxSpec) -> TestRun:
    """Run the test files in a box around the tree, which stays as it is."""
    async with await open_box(tree, spec) as box:
        return await run_tests_in(box, test_files, timeout_s)


async def run_tests_in(box: Box, test_files: Sequence[str], timeout_s: float) -> TestRun:
    """Run the box's test files in a fresh interpreter, with none of the tree's pytest configuration or conftest files.

    The results come through a pipe of their own. Code under test runs in the same process as pytest and could forge
    them: a grader of work that is not trusted needs more than this.
    """
    worker = [sys.executable, "-I", "-B", "-c", WORKER.read_text()]
    result = await box.exec(shlex.join([*worker, *test_files]), timeout_s, report=True)
    passed, failed = _outcomes(result.report.splitlines())
    return TestRun(passed, failed, result.output[-OUTPUT_TAIL:], result.timed_out)


def _outcomes(lines: list[str]) -> tuple[frozenset[str], frozenset[str]]:
    """A test passed if its call and its teardown did and no phase of it failed."""
    reports = {tuple(json.loads(line)) for line in lines}
    failed = frozenset(node for node, _, outcome in reports if outcome == "failed")
    nodes = {node for node, _, _ in reports}
    passed = frozenset(
        node
        for node in nodes - failed
        if (node, "call", "passed") in reports and (node, "teardown", "passed") in reports
    )
    return passed, failed
