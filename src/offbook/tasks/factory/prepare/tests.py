"""The tests of a repository: which can be relied on, and which function of the product each of them enters.

Those can be relied on that pass, quickly, every time, whatever the order of sets. Each is then run once with a tracer
(tasks/inside/watch.py). Left out: functions entered only in processes that a test starts, and lambdas, which count as a
part of the function around them.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.types import FunctionKey, Map, Repository, Unprepared, files_of
from offbook.tasks.suite import MAX_TESTS, PER_TEST_S, Round, SuiteRun, run_rounds, suite_sandbox

HASH_SEEDS = (0, 1, 42)  # one per run: a test that depends on the order of a set shows it
ATTEMPTS = 6  # runs that end in the middle of a test: each time without that test
HANGING = 0.8  # of the time limit not spent in tests that ended: then one test hangs, else the suite is long
COMPLETED = (0, 1, 2, 5)  # pytest's exit codes for having run what there was to run
TESTS_A_RUN = 2000  # the pipe for results holds 4 MB
ROUNDS = 4  # for tests whose results did not fit, or that came after one which ended the process
SLOWER = 4.0  # how much slower than in the baseline the tests may be before they count as endless
START_S = 60.0
MOST_CONFTESTS = 20  # that may keep their folders' tests from running
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "monotonic", "timeit"}


@dataclass(frozen=True)
class BaselineLimits:
    suite_s: float = 300.0
    per_test_s: float = PER_TEST_S
    collect_s: float = 60.0  # until all tests are imported
    min_tests: int = 10
    max_tests: int = MAX_TESTS


@dataclass(slots=True)
class _State:
    collected: tuple[str, ...] = ()  # all of them, whatever became of them
    excluded: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


async def find_baseline(
    repository: Repository,
    spec: SandboxSpec,
    limits: BaselineLimits,
    progress: Callable[[str], None],
    strict_warnings: bool = False,
) -> Repository:
    """The repository with its reliable tests, and the rest with the reason.

    Where the repository's settings turn warnings into errors, or two test files of one name get into each other's way,
    the first run is tried once more without that.
    """
    state = _State()
    progress(f"{repository.name}: first run of its tests")
    run = await _whole_run(repository, None, HASH_SEEDS[0], spec, limits, state)
    for _ in range(MOST_CONFTESTS):
        if run.collected or run.exit_code in COMPLETED or not (folder := _broken_conftest(run, repository)):
            break
        state.excluded[f"{folder}/conftest.py"] = f"cannot be loaded: {_last_words(run)}"
        below = tuple(path for path in repository.test_files if path.startswith(f"{folder}/"))
        rest = tuple(path for path in repository.test_files if path not in below)
        repository = replace(repository, test_files=rest, support_files=(*repository.support_files, *below))
        run = await _whole_run(repository, None, HASH_SEEDS[0], spec, limits, state)
    more: tuple[str, ...] = ()
    if any("use a unique basename" in reason for reason in run.broken.values()):
        more += ("--import-mode=importlib",)
    if strict_warnings and (len(run.passed) * 2 <= len(run.collected) or run.broken):
        more += ("-o", "filterwarnings=")
    if more:
        other = replace(repository, pytest_options=(*repository.pytest_options, *more))
        other_state = _State()
        other_run = await _whole_run(other, None, HASH_SEEDS[0], spec, limits, other_state)
        if len(other_run.passed) > len(run.passed):
            repository = other
            run = other_run
            state = other_state
    if run.timed_out and not run.collected:
        raise Unprepared(f"the tests of {repository.name} cannot be imported within {limits.collect_s:.0f} s")
    if run.exit_code not in COMPLETED and not run.passed:
        raise Unprepared(f"the tests of {repository.name} cannot be run ({_last_words(run)})")
    if not run.collected and run.broken:
        reason = next(iter(run.broken.values()))
        raise Unprepared(f"the tests of {repository.name} cannot be imported ({reason})")
    if not run.collected:
        raise Unprepared(f"{repository.name} has no tests that pytest finds")
    if len(run.collected) > limits.max_tests:
        raise Unprepared(f"{repository.name} has more than {limits.max_tests} tests")
    alive = _sort_out(run, state.collected, state, limits, "")
    for number, seed in enumerate(HASH_SEEDS[1:], start=2):
        progress(f"{repository.name}: run {number} of {len(HASH_SEEDS)}, {len(alive)} tests pass so far")
        if not alive:
            break
        again = await _whole_run(repository, alive, seed, spec, limits, state)
        alive = _sort_out(again, alive, state, limits, f"flickers: in run {number} ")
    timed = timed_tests(repository.tree, (*repository.test_files, *repository.support_files), alive)
    state.excluded |= dict.fromkeys(sorted(timed), "looks at a clock")
    alive = [test for test in alive if test not in timed]
    if len(alive) < limits.min_tests:
        reasons = sorted(set(state.excluded.values()), key=list(state.excluded.values()).count, reverse=True)
        most = f"; most often: {reasons[0]}" if reasons else ""
        raise Unprepared(
            f"{repository.name} has {len(alive)} reliable tests and at least {limits.min_tests} are needed{most}"
        )
    files = files_of(alive)
    return replace(
        repository,
        test_files=tuple(path for path in repository.test_files if path in files),
        support_files=tuple(sorted({*repository.support_files, *repository.test_files} - {*files})),
        tests=tuple(alive),
        excluded=state.excluded,
        seconds={test: state.seconds[test] for test in alive},
    )


def _broken_conftest(run: SuiteRun, repository: Repository) -> str:
    """The folder whose conftest.py, or the package around it, ends the run before any test; one that is not all.

    Files are given to pytest one by one, so it loads every conftest at the start, also one that skips its folder.
    """
    for folder in reversed(re.findall(r"/app/([^\"'\n]+)/(?:conftest|__init__)\.py", run.output)):
        below = sum(path.startswith(f"{folder}/") for path in repository.test_files)
        if 0 < below < len(repository.test_files):
            return str(folder)
    return ""


def _last_words(run: SuiteRun) -> str:
    lines = [line.strip() for line in run.output.splitlines() if line.strip()] or ["no output"]
    return lines[-1].removeprefix("E ").strip()


async def _whole_run(
    repository: Repository,
    tests: Sequence[str] | None,
    hash_seed: int,
    spec: SandboxSpec,
    limits: BaselineLimits,
    state: _State,
) -> SuiteRun:
    """A run that came to its end, after leaving out tests which kill or outlast it. Every attempt has a fresh
    sandbox."""
    for attempt in range(ATTEMPTS):
        files = repository.test_files if tests is None else files_of(tests)
        async with await suite_sandbox(repository.tree, repository.suite, spec) as sandbox:
            whole = Round(files, tests, per_test_s=limits.per_test_s)
            began = time.monotonic()
            (run,) = await run_rounds(
                sandbox, repository.suite, [whole], limits.suite_s,
                hash_seed=hash_seed, max_tests=limits.max_tests, collect_s=limits.collect_s,
            )  # fmt: skip
            run.timed_out |= not run.collected and time.monotonic() - began > limits.collect_s
        state.collected = state.collected or run.collected
        for path, reason in run.broken.items():
            state.excluded.setdefault(path, f"cannot be collected: {reason}")
        if run.exit_code is not None or not run.collected or run.running is None or attempt == ATTEMPTS - 1:
            return run
        if run.timed_out and sum(run.seconds.values()) > (1 - HANGING) * limits.suite_s:
            return run  # those that were not reached are sorted out as such
        state.excluded[run.running] = "does not end" if run.timed_out else "ends the test process"
        chosen = run.collected if tests is None else tests
        tests = [test for test in chosen if test not in state.excluded]
    raise AssertionError("the last attempt returns")


def _sort_out(run: SuiteRun, tests: Sequence[str], state: _State, limits: BaselineLimits, prefix: str) -> list[str]:
    """The tests that this run speaks for. The others go to `state.excluded`."""
    alive = []
    for test in tests:
        if test in state.excluded:
            continue
        if test in run.failed:
            state.excluded[test] = f"{prefix}fails in {run.failed[test]}"
        elif test in run.skipped:
            state.excluded[test] = f"{prefix}skipped: {run.skipped[test]}"
        elif test not in run.passed:
            late = f"not reached in {limits.suite_s:.0f} s" if run.timed_out else "not reached: the run ended before it"
            state.excluded[test] = prefix + (late if run.exit_code is None else "not collected")
        elif run.seconds[test] > limits.per_test_s:
            state.excluded[test] = f"slow: {run.seconds[test]:.1f} s"
        else:
            state.seconds[test] = max(run.seconds[test], state.seconds.get(test, 0.0))
            alive.append(test)
    return alive


def timed_tests(tree: Path, files: Iterable[str], tests: Sequence[str]) -> set[str]:
    """Those of `tests` (node ids) that call a clock, or a helper in `files` (test code) that does, by its name: whether
    they pass depends on the load. In one file a name is one function; a helper's name that functions of
    other files have too, which do not, says nothing."""
    calls = defaultdict[tuple[str, str], set[str]](set)
    for file in files:
        for name, called in _calls_in(tree / file):
            calls[file, name] |= called
    named = defaultdict[str, list[tuple[str, str]]](list)
    for place in calls:
        named[place[1]].append(place)
    timed = {place for place, called in calls.items() if called & CLOCKS}
    while True:
        helpers = {name for name, places in named.items() if timed.issuperset(places)}
        more = {place for place, called in calls.items() if called & helpers} - timed
        if not more:
            break
        timed |= more
    return {test for test in tests if _place(test) in timed}


def _place(test: str) -> tuple[str, str]:
    file, *names = test.partition("[")[0].split("::")
    return file, names[-1] if names else ""


def _calls_in(file: Path) -> Iterable[tuple[str, set[str]]]:
    try:
        parsed = pycode.parse(file.read_text())
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(parsed):
        if isinstance(node, Definition):
            yield node.name, {_name_of(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}


def _name_of(func: ast.expr) -> str:
    """The last word of what is called; `timeit.repeat` is a clock, `itertools.repeat` is none."""
    if isinstance(func, ast.Attribute):
        return "timeit" if isinstance(func.value, ast.Name) and func.value.id == "timeit" else func.attr
    return func.id if isinstance(func, ast.Name) else ""


async def map_tests(repository: Repository, sandbox: SandboxSpec) -> Map:
    """The map of a prepared repository. It is kept in folder/map.json and made only once.

    A test that passes without a tracer and fails with it is mapped as far as it came, and named in that file.
    """
    path = repository.folder / "map.json"
    if path.is_file():
        return load_map(path)
    tests_of: dict[FunctionKey, set[str]] = {}
    at_import: set[FunctionKey] = set()
    pending = list(repository.tests)
    size = TESTS_A_RUN
    traced: set[str] = set()
    for _ in range(ROUNDS):
        again: list[str] = []
        for start in range(0, len(pending), size):
            chosen = pending[start : start + size]
            limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in chosen)
            async with await suite_sandbox(repository.tree, repository.suite, sandbox) as opened:
                one = Round(files_of(chosen), chosen)
                (run,) = await run_rounds(opened, repository.suite, [one], limit_s, sources=repository.source_files)
            keys = [FunctionKey(*pair) for pair in run.functions]
            for test, numbers in run.enters.items():
                for number in numbers:
                    if test:
                        tests_of.setdefault(keys[number], set()).add(test)
                    else:
                        at_import.add(keys[number])
            traced |= run.enters.keys()
            again += [test for test in chosen if test not in run.passed or test not in run.enters]
        pending = again
        size = max(1, size // 4)
        if not pending:
            break
    lost = [test for test in pending if test not in traced]
    if lost:
        raise Unprepared(f"{len(lost)} tests of {repository.name} cannot be traced, among them {lost[0]}")
    found = Map({key: frozenset(tests) for key, tests in sorted(tests_of.items())}, frozenset(at_import))
    write_atomic(path, dump_map(found, repository.tests, pending))
    return found


def dump_map(found: Map, tests: Sequence[str], failed: Sequence[str]) -> str:
    """Tests are written once and then named by their numbers: node ids are long and every function has many."""
    numbers = {test: number for number, test in enumerate(tests)}
    functions = [
        [key.path, key.name, sorted(numbers[test] for test in found.tests_of.get(key, ()))]
        for key in sorted(found.tests_of.keys() | found.at_import)
    ]
    at_import = sorted([key.path, key.name] for key in found.at_import)
    data = {"tests": tests, "functions": functions, "at_import": at_import, "failed_when_traced": failed}
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
    )
