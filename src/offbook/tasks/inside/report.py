"""Rows of the report, and the pytest plugin that writes how each test went."""

from __future__ import annotations

import itertools
import json
import linecache
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from offbook.tasks.inside.blank import Blanks

if TYPE_CHECKING:
    import pytest

REASON = 300  # characters


class Pipe:
    """Rows for the report."""

    __slots__ = ("descriptor", "process")

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.process = os.getpid()
        self.tell("round")

    def tell(self, *row: Any) -> None:
        if os.getpid() != self.process:  # a test forked and its child came back here
            os._exit(1)
        data = memoryview(json.dumps(row).encode() + b"\n")
        while data:  # a signal of pytest-timeout can cut a write short
            data = data[os.write(self.descriptor, data) :]


class Recorder:
    """Which tests run and how they end: one outcome a test, from the reports of its phases."""

    blanks: Blanks | None = None  # in a blank round
    collecting: threading.Timer | None = None  # ends the process if that takes too long; it is gone before any test

    def __init__(self, pipe: Pipe, max_tests: int, tests: Sequence[str] | None, is_narrow: bool):
        """`is_narrow`: what is not selected is not even collected, which is most of the work in a large file."""
        self.pipe, self.max_tests = pipe, max_tests
        self.selected = None if tests is None else set(tests)
        self.within: set[str] | None = None  # files, classes and functions that the selected tests are, or are in
        if tests is not None and is_narrow:
            self.within = set()
            for path, _, name in (test.partition("::") for test in tests):
                self.within.update(itertools.accumulate([path, *name.partition("[")[0].split("::")], "{}::{}".format))
        self.numbers: dict[str, int] = {}
        self.phases: list[pytest.TestReport] = []
        self.error = ""

    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
        return None if self.within is None or f"{collector.nodeid}::{name}" in self.within else []

    def pytest_make_parametrize_id(self) -> str | None:
        """In a blank round the cases of a test have no names that say something."""
        return "case" if self.blanks else None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pipe.tell("broken", report.nodeid, why_failed(report))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.selected is not None:
            chosen = [{item.nodeid, item.nodeid.partition("[")[0]} & self.selected for item in items]
            dropped = [item for item, wanted in zip(items, chosen) if not wanted]  # noqa: B905
            items[:] = [item for item, wanted in zip(items, chosen) if wanted]  # noqa: B905
            config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.collecting:
            self.collecting.cancel()
            self.collecting.join()
        self.numbers = {node: number for number, node in enumerate(item.nodeid for item in session.items)}
        self.pipe.tell("collected", list(self.numbers))
        if len(self.numbers) > self.max_tests:
            session.items.clear()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.phases, self.error = [], ""
        if self.blanks:
            self.blanks.taken()
        self.pipe.tell("start", self.numbers[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases.append(report)

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and not self.error:
            bases = {base.__name__ for base in call.excinfo.type.__mro__}
            self.error = "assertion" if bases & {"AssertionError", "Failed"} else call.excinfo.type.__name__

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = next((phase for phase in self.phases if phase.failed), None)
        skipped = next((phase for phase in self.phases if phase.skipped), None)
        unexpected = any(hasattr(phase, "wasxfail") for phase in self.phases)
        ended = {phase.when for phase in self.phases}
        outcome, reason = "passed", ""
        if failed:
            outcome, reason = "failed", f"{failed.when}: {why_failed(failed)}"
        elif skipped or unexpected:
            outcome, reason = "skipped", why_skipped(skipped) if skipped else "passes against expectation"
        elif not {"call", "teardown"} <= ended:
            outcome, reason = "failed", "it did not run to its end"
        if self.blanks:
            self.pipe.tell("blanks", self.numbers[nodeid], self.blanks.taken())
        seconds = round(sum(phase.duration for phase in self.phases), 4)
        self.pipe.tell("done", self.numbers[nodeid], outcome, seconds, reason, self.error)


def why_failed(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line of a traceback that names the error; of an assertion that says nothing, the line of code."""
    lines = [line for line in report.longreprtext.splitlines() if line.strip()]
    error = next((line[1:] for line in lines if line.startswith("E ")), (lines or [""])[-1]).strip()
    if error == "AssertionError" and (crash := getattr(report.longrepr, "reprcrash", None)):
        error = linecache.getline(crash.path, crash.lineno).strip()
    return error[:REASON]


def why_skipped(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:REASON]
    return why_failed(report)
