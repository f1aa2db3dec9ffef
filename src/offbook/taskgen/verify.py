"""Whether a deletion makes a task: what its tests say without the feature, and with trivial bodies in its place.

Only the tests that matter are run: those that enter a file which the deletion touches, as the map has it, and one of
every other test file where names have gone, because an import may need one. The gold patch is verified on the folder
that is written at the end (check.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offbook.sandbox import Box, BoxSpec
from offbook.taskgen.delete.delete import trivial_bodies, without_tests
from offbook.taskgen.nouns import Deletion, Map, Repository
from offbook.tasks.grade import put
from offbook.tasks.suite import Round, SuiteRun, run_rounds, run_suite, suite_box

START_S = 30.0
SLOWER = 4.0  # than in the baseline


@dataclass(frozen=True, slots=True)
class VerifySettings:
    others_s: float = 4.0  # how long the tests may take, together, that do not need the feature
    max_others: int = 400
    feature_s: float = 20.0  # and those that need it: above this it makes no task
    max_trivial_tests: int = 30  # run with each trivial body; a sample of those that need the feature
    trivial_s: float = 2.5  # on top of what the tests take: a trivial body may keep a loop from ending


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the deletion makes no task, or `refused` is empty and the rest says what the tests do."""

    refused: str = ""
    evidence: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    exact: bool = False  # the failing tests are just those that the map says
    floor: float = 0.0  # the largest share of fail_to_pass that a trivial body passes
    test_s: float = 0.0  # how long tests ran, all rounds together


async def verify(
    repository: Repository,
    files: Mapping[str, str],
    map: Map,
    deletion: Deletion,
    spec: BoxSpec,
    settings: VerifySettings | None = None,
) -> Verdict:
    """`files` is the tree before the deletion, as text."""
    settings = settings or VerifySettings()
    needing = deletion.feature.tests
    if sum(repository.seconds[test] for test in needing) > settings.feature_s:
        return Verdict("its tests take too long")
    others = impacted(repository, map, deletion, settings)
    tests = [*needing, *others]
    limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
    whole = Round(_files_of(tests), tests, timeout_s=limit_s)
    sample = _sample(needing, settings.max_trivial_tests)
    sample_s = settings.trivial_s + SLOWER * sum(repository.seconds[test] for test in sample)
    trivial = [
        Round(_files_of(sample), sample, bodies, timeout_s=sample_s, per_test_s=settings.trivial_s / 2)
        for _, bodies in trivial_bodies(files, deletion)
    ]
    async with await suite_box(repository.tree, repository.suite, spec) as box:
        await put(box, deleted_tree(files, deletion, repository))
        *with_trivial, first = await run_rounds(
            box, repository.suite, [*trivial, whole], limit_s + len(trivial) * sample_s
        )
        refusal = _refusal(first, needing, others, repository.excluded)
        again = await _again(box, repository, whole, limit_s) if refusal is None else first
    runs = [first, again, *with_trivial]
    test_s = sum(sum(run.seconds.values()) for run in runs)
    refusal = refusal or _unsteady(first, again)
    if refusal:
        return Verdict(*refusal, test_s=test_s)
    fail_to_pass = tuple(test for test in needing if test in first.failed)
    solved, floor = _trivially(with_trivial, fail_to_pass, sample)
    if solved:
        names = [name for name, _ in trivial_bodies(files, deletion)]
        return Verdict("a trivial body solves it", names[solved[0]], test_s=test_s)
    return Verdict(
        fail_to_pass=fail_to_pass,
        pass_to_pass=tuple(sorted(first.passed)),
        exact=set(fail_to_pass) == {*needing},
        floor=floor,
        test_s=test_s,
    )


def deleted_tree(files: Mapping[str, str], deletion: Deletion, repository: Repository) -> dict[str, str | None]:
    """What the deletion changes, and what makes the original tests run on it where names that they import are gone."""
    if deletion.level == "stub":
        return dict(deletion.files)
    return {**without_tests(files, (), deletion, repository.import_roots), **deletion.files}


def impacted(repository: Repository, map: Map, deletion: Deletion, settings: VerifySettings) -> list[str]:
    """Tests besides the feature's own that could notice: the quick ones of those that enter a file it touches."""
    needing = {*deletion.feature.tests}
    entering = {test for key, tests in map.tests_of.items() if key.path in deletion.files for test in tests} - needing
    quick = sorted(entering, key=lambda test: (repository.seconds[test], test))
    chosen: dict[str, None] = {}
    left_s = settings.others_s
    for test in quick[: settings.max_others]:
        left_s -= repository.seconds[test]
        if left_s < 0:
            break
        chosen[test] = None
    if deletion.level != "stub":
        seen = {test.partition("::")[0] for test in [*needing, *chosen]}
        for test in sorted({*repository.tests} - needing, key=lambda test: (repository.seconds[test], test)):
            path = test.partition("::")[0]
            if path not in seen and repository.seconds[test] <= settings.others_s / 4:
                seen.add(path)
                chosen[test] = None
    return sorted(chosen)


def _files_of(tests: Sequence[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def _sample(tests: Sequence[str], most: int) -> list[str]:
    """The same ones for the same tests, from anywhere among them."""
    return sorted(sorted(tests, key=lambda test: hashlib.sha256(test.encode()).digest())[:most])


async def _again(box: Box, repository: Repository, whole: Round, limit_s: float) -> SuiteRun:
    return await run_suite(box, repository.suite, whole.files, limit_s, whole.tests, hash_seed=1)


def _refusal(
    run: SuiteRun, needing: Sequence[str], others: Sequence[str], known: Collection[str]
) -> tuple[str, str] | None:
    """`known` are the tests and files that were left out when the repository was prepared."""
    broken = {path: why for path, why in run.broken.items() if path not in known}
    if broken:
        path, why = next(iter(broken.items()))
        return "tests can no longer be imported", f"{path}: {why}"
    unexpected = [test for test in others if test not in run.passed]
    if run.exit_code is None:
        return "the tests do not come to an end", run.running or (unexpected or [*needing])[0]
    if unexpected:
        return "other tests fail too", f"{unexpected[0]}: {run.failed.get(unexpected[0], 'not run')}"
    if not run.failed:
        return "no test fails without it", needing[0]
    return None


def _unsteady(first: SuiteRun, again: SuiteRun) -> tuple[str, str] | None:
    changed = sorted((first.failed.keys() ^ again.failed.keys()) | (first.passed ^ again.passed))
    return ("flaky", changed[0]) if changed else None


def _trivially(runs: Sequence[SuiteRun], fail_to_pass: Sequence[str], sample: Sequence[str]) -> tuple[list[int], float]:
    """Which of the trivial bodies pass every test that is asked, and the largest share that one of them passes."""
    asked = {*fail_to_pass} & {*sample}
    if not asked:
        return [], 0.0
    shares = [len(run.passed & asked) / len(asked) for run in runs]
    return [number for number, share in enumerate(shares) if share == 1], max(shares, default=0.0)
