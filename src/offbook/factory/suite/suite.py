"""How a repository's own test suite goes in a box: with its conftest files, its pytest settings and its dependencies.

Beside a repository's tree/ and deps/ lies python/: an interpreter whose site-packages is deps/. So the code under test,
and every process that it starts, can import the standard library, deps/ and the tree, and nothing of offbook's.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offbook.factory.nouns import FunctionKey, Repository
from offbook.sandbox import Box, BoxSpec, open_box

WORKER = Path(__file__).with_name("suite_worker.py")
OUTPUT_TAIL = 4000  # characters
PER_TEST_S = 10.0
MAX_TESTS = 20_000
Engine = Literal["monitoring", "inserted"]


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """A test is in at most one of passed, failed and skipped, and in none where the run ended before it."""

    collected: tuple[str, ...]
    passed: frozenset[str]
    failed: dict[str, str]  # node id -> why
    skipped: dict[str, str]  # expected failures too
    broken: dict[str, str]  # files that could not be collected
    seconds: dict[str, float]
    running: str | None  # the test that the run ended in, if it did not reach its end
    exit_code: int | None  # of pytest, None where it did not come to its end
    timed_out: bool
    output: str  # the end of what it printed
    functions: tuple[FunctionKey, ...] = ()  # traced runs only
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


def interpreter(repository: Repository) -> Path:
    return repository.folder / "python" / "bin" / "python"


@asynccontextmanager
async def suite_box(repository: Repository, spec: BoxSpec) -> AsyncIterator[Box]:
    """A box around the repository's tree, in which its interpreter and its dependencies can be read."""
    prefix = Path(os.path.realpath(interpreter(repository))).parent.parent
    more = () if prefix == Path(os.path.realpath(sys.base_prefix)) else (prefix,)
    box = await open_box(repository.tree, spec, readonly=(repository.deps, repository.folder / "python", *more))
    try:
        yield box
    finally:
        await box.close()


async def run_suite(
    box: Box,
    repository: Repository,
    tests: Sequence[str] | None,
    timeout_s: float,
    *,
    hash_seed: int = 0,
    per_test_s: float = PER_TEST_S,
    max_tests: int = MAX_TESTS,
    engine: Engine | None = None,
) -> SuiteRun:
    """Run the given tests, or all of the repository's test files, in a box made by `suite_box`.

    The results come through a pipe of their own. The tests could forge them: this is for repositories as they were
    published, not for grading.
    """
    files = repository.test_files if tests is None else sorted({test.partition("::")[0] for test in tests})
    order = {
        "tests": None if tests is None else list(tests),
        "files": list(files),
        "import_roots": list(repository.import_roots),
        "options": [*_options(per_test_s), *repository.pytest_options],
        "sources": list(repository.source_files) if engine else [],
        "engine": engine,
        "max_tests": max_tests,
    }
    # In the tree, because that is the only place of a box that can be written to; the worker takes it away at once.
    order_file = f".offbook-{uuid.uuid4().hex}.json"
    await box.write(order_file, json.dumps(order))
    settings = {"PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "", "TZ": "UTC"}
    assignments = [f"{name}={value}" for name, value in settings.items()]
    python = [str(interpreter(repository)), "-P", "-s", "-B", "-c", WORKER.read_text(), order_file]
    result = await box.exec(shlex.join(["env", *assignments, *python]), timeout_s, report=True)
    rows = []
    for line in result.report.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a run that was killed
            continue
    return _read(rows, result.output[-OUTPUT_TAIL:], result.timed_out)


def _options(per_test_s: float) -> list[str]:
    """What every run has. A repository's `addopts` do not count: they bring coverage, reports and parallel runs."""
    return [
        *("-q", "--color=no", "--tb=short", "--rootdir=.", "--confcutdir=.", "--continue-on-collection-errors"),
        *("-o", "addopts=", "-o", "required_plugins=", "-o", "xfail_strict=false", "-o", "log_cli=false"),
        *("-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::pytest.PytestUnknownMarkWarning"),
        *(f"--timeout={per_test_s:g}", "--timeout-method=signal"),
    ]


def _read(rows: list[list[Any]], output: str, timed_out: bool) -> SuiteRun:
    collected = tuple(next((row[1] for row in rows if row[0] == "collected"), ()))
    passed: set[str] = set()
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    broken: dict[str, str] = {}
    seconds: dict[str, float] = {}
    functions: dict[int, FunctionKey] = {}
    enters: dict[str, tuple[int, ...]] = {}
    running: str | None = None
    exit_code: int | None = None
    for row in rows:
        match row:
            case ["broken", str(node), str(reason)]:
                broken[node] = reason
            case ["start", int(number)]:
                running = collected[number]
            case ["done", int(number), str(outcome), int() | float() as duration, str(reason)]:
                node, running = collected[number], None
                seconds[node] = duration
                if outcome == "passed":
                    passed.add(node)
                else:
                    (failed if outcome == "failed" else skipped)[node] = reason
            case ["function", int(key), str(path), str(name)]:
                functions[key] = FunctionKey(path, name)
            case ["enters", int(number), list(keys)]:
                enters[collected[number] if number >= 0 else ""] = tuple(keys)
            case ["end", int(code)]:
                exit_code = code
    table = tuple(functions[key] for key in sorted(functions))
    return SuiteRun(
        collected=collected,
        passed=frozenset(passed),
        failed=failed,
        skipped=skipped,
        broken=broken,
        seconds=seconds,
        running=running,
        exit_code=exit_code,
        timed_out=timed_out,
        output=output,
        functions=table,
        enters=enters,
    )
