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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.core import pycode
from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.types import FunctionKey, Map, Repository, Unprepared, files_of, is_inside, last_words
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


@dataclass
class _Baseline:
    """The runs of one repository's tests, and what they say about each test so far."""

    repository: Repository
    spec: SandboxSpec
    limits: BaselineLimits
    collected: tuple[str, ...] = ()  # all of them, whatever became of them
    excluded: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    async def run(self, tests: Sequence[str] | None, hash_seed: int) -> SuiteRun:
        """Run all or these tests to the end, without those that end the process or do not end."""
        suite = self.repository.suite
        limits = self.limits
        run = SuiteRun(False, "", "")
        for _ in range(ATTEMPTS):
            files = self.repository.test_files if tests is None else files_of(tests)
            async with await suite_sandbox(self.repository.tree, suite, self.spec) as sandbox:
                began = time.monotonic()
                rounds = [Round(files, tests, per_test_s=limits.per_test_s)]
                (run,) = await run_rounds(
                    sandbox,
                    suite,
                    rounds,
                    limits.suite_s,
                    hash_seed=hash_seed,
                    max_tests=limits.max_tests,
                    collect_s=limits.collect_s,
                )
                run.timed_out |= not run.collected and time.monotonic() - began > limits.collect_s
            self.collected = self.collected or run.collected
            for path, reason in run.broken.items():
                self.excluded.setdefault(path, f"cannot be collected: {reason}")
            if run.exit_code is not None or run.running is None:
                break
            if run.timed_out and sum(run.seconds.values()) > (1 - HANGING) * limits.suite_s:
                break  # the suite is long; tests that were not reached are excluded as such
            self.excluded[run.running] = "does not end" if run.timed_out else "ends the test process"
            chosen = run.collected if tests is None else tests
            tests = [test for test in chosen if test not in self.excluded]
        return run

    def keep(self, run: SuiteRun, tests: Sequence[str], prefix: str = "") -> list[str]:
        """Return the tests that this run speaks for, and note why the others are excluded."""
        kept = []
        for test in tests:
            if test in self.excluded:
                continue
            if test in run.failed:
                self.excluded[test] = f"{prefix}fails in {run.failed[test]}"
            elif test in run.skipped:
                self.excluded[test] = f"{prefix}skipped: {run.skipped[test]}"
            elif test not in run.passed:
                self.excluded[test] = prefix + ("not collected" if run.exit_code is not None else "not reached in time")
            elif run.seconds[test] > self.limits.per_test_s:
                self.excluded[test] = f"slow: {run.seconds[test]:.1f} s"
            else:
                self.seconds[test] = max(run.seconds[test], self.seconds.get(test, 0.0))
                kept.append(test)
        return kept


async def find_baseline(
    repository: Repository,
    spec: SandboxSpec,
    limits: BaselineLimits,
    progress: Callable[[str], None],
) -> Repository:
    """The repository with its reliable tests, and the rest with the reason."""
    progress(f"{repository.name}: first run of its tests")
    baseline = _Baseline(repository, spec, limits)
    run = await _first_run(baseline)
    if any("use a unique basename" in reason for reason in run.broken.values()):
        options = (*baseline.repository.pytest_options, "--import-mode=importlib")
        other = _Baseline(replace(baseline.repository, pytest_options=options), spec, limits)
        other_run = await other.run(None, HASH_SEEDS[0])
        if len(other_run.passed) > len(run.passed):
            baseline = other
            run = other_run
    _refuse(run, repository.name, limits)
    alive = baseline.keep(run, baseline.collected)
    for number, seed in enumerate(HASH_SEEDS[1:], start=2):
        progress(f"{repository.name}: run {number} of {len(HASH_SEEDS)}, {len(alive)} tests pass so far")
        if alive:
            alive = baseline.keep(await baseline.run(alive, seed), alive, f"flickers: in run {number} ")
    repository = baseline.repository
    timed = timed_tests(repository.tree, alive)
    baseline.excluded |= dict.fromkeys(sorted(timed), "looks at a clock")
    alive = [test for test in alive if test not in timed]
    if len(alive) < limits.min_tests:
        reasons = Counter(baseline.excluded.values()).most_common(1)
        most = f"; most often: {reasons[0][0]}" if reasons else ""
        few = f"{len(alive)} reliable tests and at least {limits.min_tests} are needed"
        raise Unprepared(f"{repository.name} has {few}{most}")
    files = files_of(alive)
    return replace(
        repository,
        test_files=tuple(path for path in repository.test_files if path in files),
        support_files=tuple(sorted({*repository.support_files, *repository.test_files} - {*files})),
        tests=tuple(alive),
        excluded=baseline.excluded,
        seconds={test: baseline.seconds[test] for test in alive},
    )


async def _first_run(baseline: _Baseline) -> SuiteRun:
    """All tests, without folders whose conftest.py, or the package around it, ends the run before any test.

    Files are given to pytest one by one, so it loads every conftest at the start, also one that skips its folder.
    """
    run = await baseline.run(None, HASH_SEEDS[0])
    for _ in range(MOST_CONFTESTS):
        if run.collected or run.exit_code in COMPLETED:
            break
        repository = baseline.repository
        named = re.findall(r"/app/([^\"'\n]+)/(?:conftest|__init__)\.py", run.output)
        tests_in = {place: [path for path in repository.test_files if is_inside(path, [place])] for place in named}
        folder = next((each for each in reversed(named) if 0 < len(tests_in[each]) < len(repository.test_files)), "")
        if not folder:
            break
        below = tests_in[folder]
        baseline.excluded[f"{folder}/conftest.py"] = f"cannot be loaded: {last_words(run.output)}"
        rest = tuple(path for path in repository.test_files if path not in below)
        support = (*repository.support_files, *below)
        baseline.repository = replace(repository, test_files=rest, support_files=support)
        run = await baseline.run(None, HASH_SEEDS[0])
    return run


def _refuse(run: SuiteRun, name: str, limits: BaselineLimits) -> None:
    if run.timed_out and not run.collected:
        raise Unprepared(f"the tests of {name} cannot be imported within {limits.collect_s:.0f} s")
    if run.exit_code not in COMPLETED and not run.passed:
        raise Unprepared(f"the tests of {name} cannot be run ({last_words(run.output)})")
    if not run.collected and run.broken:
        raise Unprepared(f"the tests of {name} cannot be imported ({next(iter(run.broken.values()))})")
    if not run.collected:
        raise Unprepared(f"{name} has no tests that pytest finds")
    if len(run.collected) > limits.max_tests:
        raise Unprepared(f"{name} has more than {limits.max_tests} tests")


def timed_tests(tree: Path, tests: Sequence[str]) -> set[str]:
    """Those of `tests` (node ids) that call a clock themselves: whether they pass depends on the load."""
    timed = set()
    for file in files_of(tests):
        parsed = pycode.try_parse((tree / file).read_text(errors="replace"))
        for node in ast.walk(parsed) if parsed else ():
            if isinstance(node, pycode.Function) and CLOCKS & pycode.called_names(node):
                timed.add((file, node.name))
    return {test for test in tests if (test.partition("::")[0], test.partition("[")[0].rpartition("::")[2]) in timed}


async def map_tests(repository: Repository, sandbox: SandboxSpec) -> Map:
    """The map of a prepared repository. It is kept in folder/map.json and made only once.

    A test that passes without a tracer and fails with it is mapped as far as it came.
    """
    path = repository.folder / "map.json"
    if path.is_file():
        return load_map(path)
    tests_of = defaultdict[FunctionKey, set[str]](set)  # "" enters what runs at import
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
            for test, numbers in run.enters.items():
                for number in numbers:
                    tests_of[FunctionKey(*run.functions[number])].add(test)
            traced |= run.enters.keys()
            again += [test for test in chosen if test not in run.passed or test not in run.enters]
        pending = again
        size = max(1, size // 4)
    lost = [test for test in pending if test not in traced]
    if lost:
        raise Unprepared(f"{len(lost)} tests of {repository.name} cannot be traced, among them {lost[0]}")
    # Tests are written once and then named by their numbers: node ids are long and every function has many.
    tests = ["", *repository.tests]
    numbers_of = {test: number for number, test in enumerate(tests)}
    functions = [
        (key.path, key.name, sorted(numbers_of[test] for test in found)) for key, found in sorted(tests_of.items())
    ]
    write_atomic(path, json.dumps({"tests": tests, "functions": functions}, separators=(",", ":")))
    return load_map(path)


def load_map(path: Path) -> Map:
    data = json.loads(path.read_bytes())
    tests = data["tests"]
    found = {
        FunctionKey(file, name): {tests[number] for number in numbers} for file, name, numbers in data["functions"]
    }
    at_import = frozenset(key for key, entering in found.items() if "" in entering)
    return Map({key: frozenset(entering - {""}) for key, entering in found.items() if entering - {""}}, at_import)
