"""The tests of a repository: which can be relied on, and which function of the product each of them enters.

Those can be relied on that pass, quickly, every time, whatever the order of sets. Each is then run once with a tracer
(tasks/inside/watch.py). Left out: functions entered only in processes that a test starts, and lambdas, which count as a
part of the function around them.
"""

from __future__ import annotations

import ast
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.core import pycode
from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.types import FunctionKey, Map, Repository, Unprepared, files_of, last_words
from offbook.tasks.suite import PER_TEST_S, Round, SuiteRun, run_rounds, suite_sandbox

HASH_SEEDS = (0, 1, 42)  # one per run: a test that depends on the order of a set shows it
ATTEMPTS = 6  # runs that end in the middle of a test: each time without that test
HANGING = 0.8  # of the time limit not spent in tests that ended: then one test hangs, else the suite is long
COMPLETED = (0, 1, 2, 5)  # pytest's exit codes for having run what there was to run
TESTS_A_RUN = 2000  # the pipe for results holds 4 MB
SLOWER = 4.0  # how much slower than in the baseline the tests may be before they count as endless
START_S = 60.0
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "monotonic", "timeit"}


@dataclass(frozen=True)
class BaselineLimits:
    suite_s: float = 300.0
    per_test_s: float = PER_TEST_S
    collect_s: float = 60.0  # until all tests are imported
    min_tests: int = 10


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
                (run,) = await run_rounds(
                    sandbox,
                    suite,
                    [Round(files, tests, per_test_s=limits.per_test_s)],
                    limits.suite_s,
                    hash_seed=hash_seed,
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
    run = await baseline.run(None, HASH_SEEDS[0])
    _refuse(run, repository.name, limits)
    alive = baseline.keep(run, baseline.collected)
    for number, seed in enumerate(HASH_SEEDS[1:], start=2):
        progress(f"{repository.name}: run {number} of {len(HASH_SEEDS)}, {len(alive)} tests pass so far")
        if alive:
            alive = baseline.keep(await baseline.run(alive, seed), alive, f"flickers: in run {number} ")
    repository = baseline.repository
    timed = timed_tests(repository.tree, alive)
    excluded = baseline.excluded | dict.fromkeys(sorted(timed), "looks at a clock")
    alive = [test for test in alive if test not in timed]
    if len(alive) < limits.min_tests:
        few = f"{len(alive)} reliable tests and at least {limits.min_tests} are needed"
        most = "".join(f"; most often: {reason}" for reason, _ in Counter(excluded.values()).most_common(1))
        raise Unprepared(f"{repository.name} has {few}{most}")
    files = files_of(alive)
    return replace(
        repository,
        test_files=tuple(path for path in repository.test_files if path in files),
        support_files=tuple(sorted({*repository.support_files, *repository.test_files} - {*files})),
        tests=tuple(alive),
        excluded=excluded,
        seconds={test: baseline.seconds[test] for test in alive},
    )


def _refuse(run: SuiteRun, name: str, limits: BaselineLimits) -> None:
    if run.timed_out and not run.collected:
        raise Unprepared(f"the tests of {name} cannot be imported within {limits.collect_s:.0f} s")
    if run.exit_code not in COMPLETED and not run.passed:
        raise Unprepared(f"the tests of {name} cannot be run ({last_words(run.output)})")
    if not run.collected:
        why = [f"the tests of {name} cannot be imported ({reason})" for reason in run.broken.values()]
        raise Unprepared([*why, f"{name} has no tests that pytest finds"][0])


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
    while pending and size:
        chosen = pending[:size]
        limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in chosen)
        async with await suite_sandbox(repository.tree, repository.suite, sandbox) as opened:
            one = Round(files_of(chosen), chosen)
            (run,) = await run_rounds(opened, repository.suite, [one], limit_s, sources=repository.source_files)
        for test, numbers in run.enters.items():
            for number in numbers:
                tests_of[FunctionKey(*run.functions[number])].add(test)
        left = [test for test in chosen if test not in run.enters]
        pending = left + pending[size:]
        size //= 4 if left == chosen else 1
    if pending:
        raise Unprepared(f"{len(pending)} tests of {repository.name} cannot be traced, among them {pending[0]}")
    # Tests are written once and then named by their numbers: node ids are long and every function has many.
    tests = ["", *repository.tests]
    numbers_of = {test: number for number, test in enumerate(tests)}
    rows = [(key.path, key.name, [numbers_of[test] for test in found]) for key, found in sorted(tests_of.items())]
    write_atomic(path, json.dumps({"tests": tests, "functions": rows}))
    return load_map(path)


def load_map(path: Path) -> Map:
    data = json.loads(path.read_bytes())
    tests_of = {}
    at_import = set()
    for file, name, numbers in data["functions"]:
        key = FunctionKey(file, name)
        tests_of[key] = frozenset(data["tests"][number] for number in numbers if number)
        if 0 in numbers:
            at_import.add(key)
    return Map({key: entering for key, entering in tests_of.items() if entering}, frozenset(at_import))
