"""Runs pytest over the tree in the current directory and records how each test went. Started by testrun.py as

    python -I -B -c SOURCE TEST_FILE... 3>REPORT

in an interpreter of its own, in a box that has no file of offbook's. REPORT gets a JSON line [node id, phase, outcome]
a report, written at once, so that a test which ends the process takes only itself and its successors along.

Starting pytest is most of what grading a small task costs. What is saved here: plugins that no test can notice, garbage
collection during the imports, and the interpreter's shutdown.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

REPORT = 3  # file descriptor
UNNEEDED_PLUGINS = ("cacheprovider", "pastebin", "setuponly", "setupplan", "stepwise")


class Recorder:
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(report.nodeid, "collect", report.outcome)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report.nodeid, report.when, report.outcome)

    def _record(self, node: str, phase: str, outcome: str) -> None:
        os.write(REPORT, json.dumps([node, phase, outcome]).encode() + b"\n")


def main(test_files: list[str]) -> int:
    gc.disable()
    # Before the tree is on the path: a file of the tree called json.py or pytest.py must not be what pytest imports.
    import pytest

    gc.enable()
    gc.freeze()
    tree = os.getcwd()
    sys.path.insert(0, tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "--color=no", "--tb=short", "--noconftest", "--continue-on-collection-errors"]
    no_configuration = ["-c", os.devnull, "-o", "addopts=", "--rootdir", tree]
    plugins = [argument for name in UNNEEDED_PLUGINS for argument in ("-p", f"no:{name}")]
    return pytest.main([*options, *no_configuration, *plugins, *test_files], plugins=[Recorder()])


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
