"""Which test enters which function of the product, found by running every reliable test once with a tracer.

Two engines (suite_worker.py). `monitoring` asks the interpreter, which has to be Python 3.12 or later. `inserted` works
on every Python: it puts a statement into each function as its file is imported. Left out: functions entered only in
processes that a test starts, and lambdas, which count as a part of the function around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from offbook.runfolder import write_atomic
from offbook.sandbox import BoxSpec
from offbook.taskgen.nouns import FunctionKey, Map, Repository, Unprepared, files_of
from offbook.tasks.suite import Engine, run_suite, suite_box

TESTS_A_RUN = 2000  # the pipe for results holds 4 MB
ROUNDS = 4  # for tests whose results did not fit, or that came after one which ended the process
SLOWER = 4.0  # how much slower than in the baseline the tests may be before they count as endless
START_S = 60.0


async def map_tests(repository: Repository, box: BoxSpec | None = None, engine: Engine | None = None) -> Map:
    """The map of a prepared repository. It is kept in folder/map.json and made only once.

    A test that passes without a tracer and fails with it is mapped as far as it came, and named in that file.
    """
    path = repository.folder / "map.json"
    if path.is_file():
        return load_map(path)
    engine = engine or best_engine(repository)
    tests_of: dict[FunctionKey, set[str]] = {}
    at_import: set[FunctionKey] = set()
    pending, size = list(repository.tests), TESTS_A_RUN
    traced: set[str] = set()
    for _ in range(ROUNDS):
        again: list[str] = []
        for start in range(0, len(pending), size):
            chosen = pending[start : start + size]
            limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in chosen)
            async with await suite_box(repository.tree, repository.suite, box or BoxSpec()) as opened:
                run = await run_suite(
                    opened, repository.suite, files_of(chosen), limit_s, chosen,
                    engine=engine, sources=repository.source_files,
                )  # fmt: skip
            keys = [FunctionKey(*pair) for pair in run.functions]
            for test, numbers in run.enters.items():
                for number in numbers:
                    if test:
                        tests_of.setdefault(keys[number], set()).add(test)
                    else:
                        at_import.add(keys[number])
            traced |= run.enters.keys()
            again += [test for test in chosen if test not in run.passed or test not in run.enters]
        pending, size = again, max(1, size // 4)
        if not pending:
            break
    lost = [test for test in pending if test not in traced]
    if lost:
        raise Unprepared(f"{len(lost)} tests of {repository.name} cannot be traced, among them {lost[0]}")
    found = Map({key: frozenset(tests) for key, tests in sorted(tests_of.items())}, frozenset(at_import), engine)
    write_atomic(path, dump_map(found, repository.tests, pending))
    return found


def best_engine(repository: Repository) -> Engine:
    (library,) = (repository.folder / "python" / "lib").iterdir()
    version = re.fullmatch(r"python(\d+)\.(\d+)", library.name)
    assert version, library
    return "monitoring" if (int(version[1]), int(version[2])) >= (3, 12) else "inserted"


def dump_map(found: Map, tests: Sequence[str], failed: Sequence[str]) -> str:
    """Tests are written once and then named by their numbers: node ids are long and every function has many."""
    numbers = {test: number for number, test in enumerate(tests)}
    functions = [
        [key.path, key.name, sorted(numbers[test] for test in found.tests_of.get(key, ()))]
        for key in sorted(found.tests_of.keys() | found.at_import)
    ]
    at_import = sorted([key.path, key.name] for key in found.at_import)
    data = {
        "engine": found.engine,
        "tests": tests,
        "functions": functions,
        "at_import": at_import,
        "failed_when_traced": failed,
    }
    return json.dumps(data, separators=(",", ":"))


def load_map(path: Path) -> Map:
    data = json.loads(path.read_bytes())
    tests = data["tests"]
    return Map(
        {
            FunctionKey(file, name): frozenset(tests[number] for number in numbers)
            for file, name, numbers in data["functions"]
            if numbers
        },
        frozenset(FunctionKey(file, name) for file, name in data["at_import"]),
        data["engine"],
    )
