"""How a repository's own tests go in a box, node id by node id.

A suite may have an interpreter of its own: a folder with python/ and deps/, where deps/ is the site-packages of
python/. Then the code under test, and every process that it starts, can import the standard library, deps/ and the
tree, and nothing of offbook's. Without one, tests run on offbook's own interpreter and pytest, and the tree's conftest
files and pytest settings do not count.
"""

from __future__ import annotations

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
FOREIGN = "something else than the test runner wrote to its results"
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
    errors: dict[str, str] = field(default_factory=dict)  # failed -> "assertion", or the type of another exception
    saw: set[tuple[str, str]] = field(default_factory=set)  # (what, path) of what code of the product looked at
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
    tests: Sequence[str] | None = None  # of these files, with or without parameters; None: all of them
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
    product: Sequence[str] = (),
) -> list[SuiteRun]:
    """Run tests in a box made by `suite_box`. Several rounds, one after the other, take little more than their tests:
    Python and pytest start once. The functions of `sources` that each test enters are told too, and what code below
    `product` looks at."""
    # In the tree, because that is the only place of a box that can be written to; the worker takes them away at once.
    order_file, *round_files = (f".offbook-{secrets.token_hex(16)}.json" for _ in range(1 + len(rounds)))
    for path, one in zip(round_files, rounds, strict=True):
        this = {
            "tests": None if one.tests is None else list(one.tests),
            "files": list(one.files),
            "changes": dict(one.changes),
            "timeout_s": one.timeout_s,
            "options": [*_options(suite, one.per_test_s), *suite.options],
        }
        await box.write(path, json.dumps(this))
    order = {
        "rounds": round_files,
        "import_roots": list(suite.import_roots),
        "plugins": suite.environment is not None,
        "preload": ["hypothesis"] if _uses_hypothesis(suite) else [],
        "sources": list(sources),
        "product": list(product),
        "max_tests": max_tests,
    }
    await box.write(order_file, json.dumps(order))
    settings = {"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "TZ": "UTC"}
    assignments = " ".join(f"{name}={value}" for name, value in settings.items())
    own = suite.environment and suite.environment.resolve() / "python" / "bin" / "python"
    python = [str(own or sys.executable), "-P", "-s", "-B", "-c", WORKER.read_text(), order_file]
    result = await box.exec(f"{assignments} {shlex.join(python)}", timeout_s, report=True)
    parts, tampered = _rows(result.report, len(rounds))
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


def _rows(report: str, num_rounds: int) -> tuple[list[list[list[Any]]], str]:
    """What the worker's process claims, round by round, and why it cannot be the worker alone that wrote it."""
    rounds: list[list[list[Any]]] = []
    for line in report.split("\n")[:-1]:  # after the last line break stands what a killed run left half-written
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if row == ["round"]:
            rounds.append([])
        elif isinstance(row, list) and row and rounds:
            rounds[-1].append(row)
        else:
            return _padded(rounds, num_rounds), FOREIGN
    return _padded(rounds, num_rounds), FOREIGN if len(rounds) > num_rounds else ""


def _padded(rounds: list[list[list[Any]]], length: int) -> list[list[list[Any]]]:
    return [*rounds[:length], *([] for _ in range(length - len(rounds)))]


def _read(rows: list[list[Any]], output: str, timed_out: bool, tampered: str) -> SuiteRun:
    run = SuiteRun(timed_out, output, tampered)
    for row in rows:
        match row:
            case ["collected", list(nodes)] if not run.collected and all(isinstance(node, str) for node in nodes):
                run.collected = tuple(nodes)
            case ["broken", str(node), str(reason)]:
                run.broken[node] = reason
            case ["start", int(number)] if 0 <= number < len(run.collected):
                run.running = run.collected[number]
            case ["done", int(number), str(outcome), int() | float() as duration, str(reason), str(error)] if (
                0 <= number < len(run.collected)
            ):
                node = run.collected[number]
                if run.running != node or node in run.seconds:
                    run.tampered = run.tampered or f"{node} was reported out of turn"
                run.running = None
                run.seconds[node] = duration
                if outcome == "passed":
                    run.passed.add(node)
                else:
                    (run.failed if outcome == "failed" else run.skipped)[node] = reason
                    run.errors[node] = error
            case ["saw", str(what), str(path)]:
                run.saw.add((what, path))
            case ["function", int(), str(path), str(name)]:
                run.functions.append((path, name))
            case ["enters", int(number), list(keys)] if number < len(run.collected):
                run.enters[run.collected[number] if number >= 0 else ""] = tuple(keys)
            case ["end", int(code)]:
                run.exit_code = code
            case _:
                run.tampered = run.tampered or FOREIGN
    return run
