"""Which tests of a repository can be relied on: those that pass, quickly, every time, whatever the order of sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offbook.sandbox import BoxSpec
from offbook.taskgen.nouns import Repository, Unprepared, files_of
from offbook.tasks.suite import MAX_TESTS, PER_TEST_S, SuiteRun, run_suite, suite_box

HASH_SEEDS = (0, 1, 42)  # one a run: a test that depends on the order of a set shows it
ATTEMPTS = 6  # runs that end in the middle of a test: each time without that test
HANGING = 0.8  # of the time limit not spent in tests that ended: then one test hangs, else the suite is long
COMPLETED = (0, 1, 2, 5)  # pytest's exit codes for having run what there was to run


@dataclass(frozen=True, slots=True)
class BaselineLimits:
    suite_s: float = 300.0
    per_test_s: float = PER_TEST_S
    min_tests: int = 10
    max_tests: int = MAX_TESTS


@dataclass(slots=True)
class _State:
    collected: tuple[str, ...] = ()  # all of them, whatever became of them
    excluded: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


async def find_baseline(
    repository: Repository,
    spec: BoxSpec,
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
    more: tuple[str, ...] = ()
    if any("use a unique basename" in reason for reason in run.broken.values()):
        more += ("--import-mode=importlib",)
    if strict_warnings and (len(run.passed) * 2 <= len(run.collected) or run.broken):
        more += ("-o", "filterwarnings=")
    if more:
        other, other_state = replace(repository, pytest_options=(*repository.pytest_options, *more)), _State()
        other_run = await _whole_run(other, None, HASH_SEEDS[0], spec, limits, other_state)
        if len(other_run.passed) > len(run.passed):
            repository, run, state = other, other_run, other_state
    _refuse_hopeless(repository, run, limits)
    alive = _sort_out(run, state.collected, state, limits, "")
    for number, seed in enumerate(HASH_SEEDS[1:], start=2):
        progress(f"{repository.name}: run {number} of {len(HASH_SEEDS)}, {len(alive)} tests pass so far")
        if not alive:
            break
        again = await _whole_run(repository, alive, seed, spec, limits, state)
        alive = _sort_out(again, alive, state, limits, f"flickers: in run {number} ")
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


def _refuse_hopeless(repository: Repository, run: SuiteRun, limits: BaselineLimits) -> None:
    if run.exit_code not in COMPLETED and not run.passed:
        lines = [line.strip() for line in run.output.splitlines() if line.strip()] or ["no output"]
        raise Unprepared(f"the tests of {repository.name} cannot be run ({lines[-1]})")
    if not run.collected and run.broken:
        reason = next(iter(run.broken.values()))
        raise Unprepared(f"the tests of {repository.name} cannot be imported ({reason})")
    if not run.collected:
        raise Unprepared(f"{repository.name} has no tests that pytest finds")
    if len(run.collected) > limits.max_tests:
        raise Unprepared(f"{repository.name} has more than {limits.max_tests} tests")


async def _whole_run(
    repository: Repository,
    tests: Sequence[str] | None,
    hash_seed: int,
    spec: BoxSpec,
    limits: BaselineLimits,
    state: _State,
) -> SuiteRun:
    """A run that came to its end, after leaving out tests which kill or outlast it. Every attempt has a fresh box."""
    for attempt in range(ATTEMPTS):
        files = repository.test_files if tests is None else files_of(tests)
        async with await suite_box(repository.tree, repository.suite, spec) as box:
            run = await run_suite(
                box, repository.suite, files, limits.suite_s, tests,
                hash_seed=hash_seed, per_test_s=limits.per_test_s, max_tests=limits.max_tests,
            )  # fmt: skip
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
