"""Runs a repository's own tests in a sandbox, with a result per node id.

A suite may have an interpreter of its own: a folder with python/ and deps/, where deps/ is the site-packages of
python/. Then the code under test, and every process that it starts, can import the standard library, deps/ and the
tree, and nothing of offbook's. Without one, tests run on offbook's own interpreter and pytest, and the tree's conftest
files and pytest settings do not count.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from offbook.sandbox import BwrapSandbox, Sandbox, SandboxSpec, open_sandbox
from offbook.tasks.suite_run import PER_TEST_S, Function, Round, SuiteRun, has_begun, runs_of
from offbook.types import MachineFault, Suite

__all__ = ["MAX_TESTS", "PER_TEST_S", "Function", "Round", "StartFailed", "SuiteRun", "run_rounds", "suite_sandbox"]

INSIDE = ("blank", "report", "apart", "watch", "rounds", "main")  # one after the other
OUTPUT_TAIL = 4000  # characters
MAX_TESTS = 20_000
START_S = 120.0
PLACES = ["/tmp", "/dev/shm", "/home/agent"]  # that are a sandbox's own and can be written to


class StartFailed(MachineFault):
    """The suite's start command failed."""


@cache
def worker_text() -> str:
    """The modules of inside/ as one text, without what they import from each other: in a sandbox nothing of it is
    there."""
    folder = Path(__file__).parent / "inside"
    own = re.compile(r"^from (offbook\.|__future__ ).*\n", re.MULTILINE)
    texts = [own.sub("", (folder / f"{name}.py").read_text()) for name in INSIDE]
    return "\n".join(["from __future__ import annotations", *texts])


def make_interpreter(folder: Path, base: Path) -> None:
    """An interpreter in folder/python that has folder/deps as its site-packages. `base` is the one it stands on."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if base != Path(os.path.realpath(sys.executable)):
        version = base.name
    library = folder / "python" / "lib" / version
    (folder / "python" / "bin").mkdir(parents=True)
    library.mkdir(parents=True)
    (folder / "python" / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3"):
        (folder / "python" / "bin" / name).symlink_to(base)
    (library / "site-packages").symlink_to(Path("..", "..", "..", "deps"))


async def suite_sandbox(
    tree: Path, suite: Suite, spec: SandboxSpec, mounts: Mapping[str, Path] | None = None
) -> Sandbox:
    """A sandbox around the tree, in which `python` is the suite's interpreter and what the tests need is running."""
    sandbox = await open_sandbox(tree, spec, suite.environment, mounts)
    if suite.start:
        result = await sandbox.exec(suite.start, START_S)
        if result.exit_code or result.timed_out:
            await sandbox.close()
            shown = suite.start.strip().partition("\n")[0]
            words = (result.output.strip().splitlines() or ["no output"])[-1]
            why = f"did not end within {START_S:.0f} s" if result.timed_out else f"failed: {words}"
            raise StartFailed(f"the start command `{shown}` {why}")
    return sandbox


async def run_rounds(
    sandbox: Sandbox,
    suite: Suite,
    rounds: Sequence[Round],
    timeout_s: float,
    *,
    hash_seed: int = 0,
    max_tests: int = MAX_TESTS,
    sources: Sequence[str] = (),
    product: Sequence[str] = (),
    collect_s: float = 0.0,
) -> list[SuiteRun]:
    """Run tests in a sandbox made by `suite_sandbox`. Python and pytest start once for all rounds. The report includes
    which functions of `sources` each test enters, and what code below `product` looks at. `collect_s` is the timeout of
    collection; 0 is none."""
    # In the tree, the only part of a sandbox that can be written from outside; the worker removes them at once.
    order_file, *round_files = (f".offbook-{secrets.token_hex(16)}.json" for _ in range(1 + len(rounds)))
    for path, one in zip(round_files, rounds, strict=True):
        await sandbox.write(path, one.order(options_of(suite, one.per_test_s)))
    order = {
        "rounds": round_files,
        **settings_of(suite),
        "sources": list(sources),
        "product": list(product),
        "max_tests": max_tests,
        "collect_s": collect_s,
        "pytest": not all(one.calls and not one.apart for one in rounds),
        "places": PLACES if isinstance(sandbox, BwrapSandbox) else [],
    }
    await sandbox.write(order_file, json.dumps(order))
    settings = {"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "TZ": "UTC"}
    assignments = " ".join(f"{name}={value}" for name, value in settings.items())
    python = [sandbox.python, "-P", "-s", "-B", "-c", worker_text(), order_file]
    result = await sandbox.exec(f"{assignments} {shlex.join(python)}", timeout_s, report=True)
    if not has_begun(result.report):
        words = (result.output.strip().splitlines() or [f"exit code {result.exit_code}, no output"])[-1]
        why = f"it took longer than {timeout_s:.0f} s to start" if result.timed_out else words
        raise MachineFault(f"tests cannot be run here: {sandbox.python} did not start pytest: {why}")
    return runs_of(result.report, len(rounds), result.output[-OUTPUT_TAIL:], result.timed_out)


def settings_of(suite: Suite) -> dict[str, Any]:
    """The worker's settings for a suite."""
    return {
        "import_roots": list(suite.import_roots),
        "plugins": suite.environment is not None,
        "preload": ["hypothesis"] if _uses_hypothesis(suite) else [],
    }


def options_of(suite: Suite, per_test_s: float = PER_TEST_S) -> list[str]:
    """What every run has. A repository's `addopts` do not count: they bring coverage, reports and parallel runs."""
    every = [
        *("-q", "--color=no", "--rootdir=.", "--continue-on-collection-errors", "-o", "addopts="),
        *("-o", "xfail_strict=false"),
        "--tb=line",  # the source lines of a traceback cost a test that fails fifty times what it costs itself
        "--assert=plain",  # rewriting the assertions of a test file takes longer than most of its tests
    ]
    if suite.environment is None:
        return [*every, "--noconftest", "-c", os.devnull, "--confcutdir=.", *suite.options]
    return [
        *(*every, "--confcutdir=.", "-o", "required_plugins=", "-o", "log_cli=false"),
        *("-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::pytest.PytestUnknownMarkWarning"),
        *(f"--timeout={per_test_s:g}", "--timeout-method=signal"),
        *(() if _uses_hypothesis(suite) else ("-p", "no:hypothesispytest")),
        *suite.options,
    ]


def _uses_hypothesis(suite: Suite) -> bool:
    """As found when the repository was prepared. Its plugin takes a second to start, also where nothing uses it."""
    return any(option.startswith("--hypothesis") for option in suite.options)
