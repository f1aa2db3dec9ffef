"""How a repository's own tests go in a box, node id by node id.

A suite may have an interpreter of its own: a folder with python/ and deps/, where deps/ is the site-packages of
python/. Then the code under test, and every process that it starts, can import the standard library, deps/ and the
tree, and nothing of offbook's. Without one, tests run on offbook's own interpreter and pytest, and the tree's conftest
files and pytest settings do not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbook.sandbox import Box, BoxSpec, open_box
from offbook.types import OffbookError, Suite

WORKER = Path(__file__).with_name("suite_worker.py")
OUTPUT_TAIL = 4000  # characters
PER_TEST_S = 10.0
MAX_TESTS = 20_000
START_S = 120.0
Function = tuple[str, str]  # a path and a qualified name


@dataclass(slots=True)
class SuiteRun:
    """A test is in at most one of passed, failed and skipped, and in none where the run ended before it."""

    timed_out: bool
    output: str  # the end of what it printed
    tampered: str  # why the results are not to be believed
    collected: tuple[str, ...] = ()
    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # node id -> why
    skipped: dict[str, str] = field(default_factory=dict)  # expected failures too
    broken: dict[str, str] = field(default_factory=dict)  # files that could not be collected
    seconds: dict[str, float] = field(default_factory=dict)
    running: str | None = None  # the test that the run ended in, if it did not reach its end
    exit_code: int | None = None  # of pytest, None where it did not come to its end
    functions: list[Function] = field(default_factory=list)  # traced runs only
    enters: dict[str, tuple[int, ...]] = field(default_factory=dict)  # node id, or "" for the import, -> functions


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


async def suite_box(tree: Path, suite: Suite, spec: BoxSpec) -> Box:
    """A box around the tree, in which `python` is the suite's interpreter and what the tests need has been started."""
    box = await open_box(tree, spec, python=suite.environment)
    if suite.start:
        result = await box.exec(suite.start, START_S)
        if result.exit_code or result.timed_out:
            await box.close()
            words = (result.output.strip().splitlines() or ["no output"])[-1]
            raise OffbookError(f"the start command `{suite.start}` failed: {words}")
    return box


@dataclass(frozen=True, slots=True)
class Round:
    """One run of tests. What it changes in the tree is undone after it, except in the last round."""

    files: Sequence[str]
    tests: Sequence[str] | None = None  # of these files; None: all of them
    changes: Mapping[str, str | None] = field(default_factory=dict)  # path -> text, None takes a file away
    timeout_s: float = 60.0  # except in the last round, which has what is left
    per_test_s: float = PER_TEST_S


async def run_rounds(
    box: Box,
    suite: Suite,
    rounds: Sequence[Round],
    timeout_s: float,
    *,
    hash_seed: int = 0,
    max_tests: int = MAX_TESTS,
    sources: Sequence[str] = (),
) -> list[SuiteRun]:
    """Run tests in a box made by `suite_box`. Several rounds, one after the other, take little more than their tests:
    Python and pytest start once. The functions of `sources` that each test enters are told too."""
    keys = [secrets.token_hex(16) for _ in rounds]
    order = {
        "keys": keys,
        "rounds": [
            {
                "tests": None if one.tests is None else list(one.tests),
                "files": list(one.files),
                "changes": dict(one.changes),
                "timeout_s": one.timeout_s,
                "options": [*_options(suite, one.per_test_s), *suite.options],
            }
            for one in rounds
        ],
        "import_roots": list(suite.import_roots),
        "plugins": suite.environment is not None,
        "preload": ["hypothesis"] if _uses_hypothesis(suite) else [],
        "sources": list(sources),
        "max_tests": max_tests,
    }
    # In the tree, because that is the only place of a box that can be written to; the worker takes it away at once.
    order_file = f".offbook-{secrets.token_hex(16)}.json"
    await box.write(order_file, json.dumps(order))
    settings = {"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "TZ": "UTC"}
    assignments = " ".join(f"{name}={value}" for name, value in settings.items())
    own = suite.environment and suite.environment.resolve() / "python" / "bin" / "python"
    python = [str(own or sys.executable), "-P", "-s", "-B", "-c", WORKER.read_text(), order_file]
    result = await box.exec(f"{assignments} {shlex.join(python)}", timeout_s, report=True)
    parts, tampered = _rows(result.report, keys)
    output = result.output[-OUTPUT_TAIL:]
    return [_read(rows, output, result.timed_out, tampered) for rows in parts]


def _options(suite: Suite, per_test_s: float) -> list[str]:
    """What every run has. A repository's `addopts` do not count: they bring coverage, reports and parallel runs."""
    every = [
        *("-q", "--color=no", "--tb=short", "--rootdir=.", "--continue-on-collection-errors", "-o", "addopts="),
        *("-o", "xfail_strict=false"),
        "--assert=plain",  # rewriting the assertions of a test file takes longer than most of its tests
    ]
    if suite.environment is None:
        return [*every, "--noconftest", "-c", os.devnull]
    return [
        *(*every, "--confcutdir=.", "-o", "required_plugins=", "-o", "log_cli=false"),
        *("-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::pytest.PytestUnknownMarkWarning"),
        *(f"--timeout={per_test_s:g}", "--timeout-method=signal"),
        *(() if _uses_hypothesis(suite) else ("-p", "no:hypothesispytest")),
    ]


def _uses_hypothesis(suite: Suite) -> bool:
    """As found when the repository was prepared. Its plugin takes a second to start, also where nothing uses it."""
    return any(option.startswith("--hypothesis") for option in suite.options)


def _rows(report: str, keys: Sequence[str]) -> tuple[list[list[list[Any]]], str]:
    """The worker's rows, round by round, up to the first row that it did not write itself.

    Each row ends with a digest, keyed with what only the worker was told, of the round up to here. So a row that the
    code under test writes to the pipe, takes away or says twice is noticed.
    """
    rounds: list[list[list[Any]]] = [[] for _ in keys]
    left = iter(zip(keys, rounds, strict=True))
    chain, rows = hashlib.blake2b(), list[list[Any]]()
    for line in report.split("\n")[:-1]:  # after the last line break stands what a killed run left half-written
        text, _, digest = line.rpartition(" ")
        if text == '["round"]':
            key, rows = next(left, ("", rows))
            chain = hashlib.blake2b(key=bytes.fromhex(key), digest_size=16)
        chain.update(text.encode())
        if digest != chain.hexdigest():
            return rounds, "something else than the test runner wrote to its results"
        rows.append(json.loads(text))
    return rounds, ""


def _read(rows: list[list[Any]], output: str, timed_out: bool, tampered: str) -> SuiteRun:
    run = SuiteRun(timed_out, output, tampered)
    for row in rows:
        match row:
            case ["collected", list(nodes)]:
                run.collected = tuple(nodes)
            case ["broken", str(node), str(reason)]:
                run.broken[node] = reason
            case ["start", int(number)]:
                run.running = run.collected[number]
            case ["done", int(number), str(outcome), int() | float() as duration, str(reason)]:
                node = run.collected[number]
                if run.running != node or node in run.seconds:
                    run.tampered = run.tampered or f"{node} was reported out of turn"
                run.running = None
                run.seconds[node] = duration
                if outcome == "passed":
                    run.passed.add(node)
                else:
                    (run.failed if outcome == "failed" else run.skipped)[node] = reason
            case ["function", int(), str(path), str(name)]:
                run.functions.append((path, name))
            case ["enters", int(number), list(keys)]:
                run.enters[run.collected[number] if number >= 0 else ""] = tuple(keys)
            case ["end", int(code)]:
                run.exit_code = code
    return run
