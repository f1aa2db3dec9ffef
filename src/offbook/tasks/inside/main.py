"""Runs a repository's own pytest suite inside a sandbox and reports each test's result over a pipe. Started by
suite.py as

    python -P -s -B -c SOURCE ORDER_FILE 3>REPORT

in the repository's interpreter, which sees the standard library, deps/ and the tree, and no file of offbook's. Standard
library and pytest only. ORDER_FILE is JSON (see suite.py), it lies in the tree and is gone before pytest starts.
REPORT gets a JSON list per line, written at once: a test which ends the process takes only itself along. The code under
test runs in this process and could write there whatever it likes, so all of it is a claim that grade.py judges.

    ["round"]                          a round begins
    ["collected", [node id, ...]]      what is going to run, unless there are more than max_tests: then nothing is
    ["broken", node id, reason]        a file that cannot be collected
    ["start", number]                  numbers count the collected tests from 0
    ["done", number, outcome, seconds, reason, error]    error: "assertion", or the type of another exception
    ["blanks", number, [[place, data], ...]]    what was compared in a blank round, before "done"
    ["saw", what, path]                something that code of a watched file did
    ["returned", number, text]         of a call: JSON, see apart.py
    ["function", key, path, qualified name]
    ["enters", number, [key, ...]]     number -1: while the package was imported and the tests collected
    ["end", exit code]

There may be several rounds, each with changes of its own to the tree: all but the last run in a process of their own.
No round can read another round's order: each has a file of its own, which its process alone ever reads.
pytest is imported once, before anything of the tree, and each round is a fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import sys
import tempfile
from typing import NoReturn

from offbook.tasks.inside.report import Pipe
from offbook.tasks.inside.rounds import DUMPABLE, SUBREAPER, Rounds, end, run_round, unsealed

REPORT = 3
PRIVATE = 200  # file descriptors from here on are ours


def main(order_file: str) -> NoReturn:
    # Neither the code under test nor its children shall write to the pipe by accident, by number or by inheritance.
    # Nor to any other pipe that came with the sandbox.
    descriptor = fcntl.fcntl(REPORT, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    os.closerange(REPORT, PRIVATE)
    with open(order_file) as file:
        order = json.load(file)
    os.unlink(order_file)
    sealed = [taken(path) for path in order.pop("rounds")]
    forget_arguments()
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1)  # what a round leaves running becomes a child of this process, which then ends it
    if not order["plugins"]:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    # One of the names by which hypothesis knows that it runs unattended, and then keeps no examples and has no
    # deadlines. Of those names this is the one that no test suite looks at.
    os.environ["__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI"] = "1"
    gc.disable()  # the imports leave no garbage, and starting is most of what a small suite costs
    if order.get("pytest", True):  # calls alone do without
        import _pytest.runner  # before the tree is on the path: a json.py there must not be what pytest imports
        import pytest  # noqa: F401
        from _pytest.config import default_plugins

        setattr(_pytest.runner, "_update_current_test_var", lambda item, when: None)  # noqa: B010  # the running test's name is not in the environment
        for name in (*(f"_pytest.{name}" for name in default_plugins), *order["preload"]):  # or every round would
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    if len(sealed) > 1:
        rounds = Rounds(descriptor, sealed, order["places"], prctl)
        while len(sealed) > 1:
            if this := rounds.next():
                end(run_round(Pipe(descriptor), order, this, is_narrow=True))
    prctl(DUMPABLE, 1)
    end(run_round(Pipe(descriptor), order, unsealed(sealed[0])))


def forget_arguments() -> None:
    """The rounds must not read in /proc what their parent process is."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start:
        ctypes.memset(start, 0, end - start)


def taken(path: str) -> int:
    """A file that only this descriptor leads to."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    os.close(opened)
    os.unlink(path)
    return descriptor


if __name__ == "__main__":
    main(sys.argv[1])
