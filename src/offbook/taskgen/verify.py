"""Whether a deletion makes a task: what its tests say without the feature, and with trivial bodies in its place.

Only the tests that matter are run: those that enter a file which the deletion touches, as the map has it, and one of
every other test file where names have gone, because an import may need one. The gold patch is verified on the folder
that is written at the end (check.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import libcst as cst

from offbook.sandbox import BoxSpec
from offbook.taskgen.delete.surgery import Orders, operate
from offbook.taskgen.delete.visible import without_tests
from offbook.taskgen.nouns import Deletion, files_of
from offbook.taskgen.perturb import answered, functions_of, perturbed, recorded, recording
from offbook.taskgen.twins import Trial, trial_of
from offbook.taskgen.workshop import Workshop, product_of
from offbook.tasks.grade import put
from offbook.tasks.perturbed import Case
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_box
from offbook.tasks.twins import Twins

START_S = 30.0
SLOWER = 4.0  # than in the baseline
# What trivial bodies return. False is 0 too.
VALUES = {"none": "None", "true": "True", "false": "False", "text": '""', "list": "[]", "dictionary": "{}"}


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
    twins: Twins = field(default_factory=Twins)
    cases: tuple[Case, ...] = ()
    test_s: float = 0.0  # how long tests ran, all rounds together


async def verify(workshop: Workshop, deletion: Deletion, spec: BoxSpec, settings: VerifySettings) -> Verdict:
    repository, needing = workshop.repository, deletion.feature.tests
    if sum(repository.seconds[test] for test in needing) > settings.feature_s:
        return Verdict("its tests take too long")
    others = impacted(workshop, deletion, settings)
    tests = [*needing, *others]
    limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
    whole = Round(files_of(tests), tests, timeout_s=limit_s)
    sample = _sample(needing, settings.max_trivial_tests)
    sample_s = settings.trivial_s + SLOWER * sum(repository.seconds[test] for test in sample)
    ways = dict(trivial_bodies(workshop.files, deletion))
    trivial = [
        Round(files_of(sample), sample, bodies, timeout_s=sample_s, per_test_s=settings.trivial_s / 2)
        for bodies in ways.values()
    ]
    async with await suite_box(repository.tree, repository.suite, spec) as box:
        await put(box, deleted_tree(workshop, deletion))
        rounds_s = limit_s + len(trivial) * sample_s
        watched = product_of(repository)
        *with_trivial, first = await run_rounds(box, repository.suite, [*trivial, whole], rounds_s, product=watched)
        again, refusal = first, _refusal(first, needing, others, repository.excluded)
        twins, cases = Twins(), list[Case]()
        if refusal is None:
            passed = [run.passed for run in with_trivial]
            trial = await asyncio.to_thread(_trial, workshop, deletion, first, zip(ways.values(), passed, strict=True))
            listening = await asyncio.to_thread(_listening, workshop, deletion, sample, sample_s)
            rounds_s = limit_s + trial.limit_s * len(trial.rounds) + sample_s
            # What a round leaves goes, but for the last one's: the calls that were written down.
            *tried, again, _ = await run_rounds(
                box, repository.suite, [*trial.rounds, whole, listening], rounds_s, hash_seed=1, product=watched
            )
            await put(box, trial.right)
            calls = await recorded(box, functions_of(deletion.targets), repository.import_roots)
            cases = await answered(box, repository.suite, perturbed(calls, random.Random(deletion.feature.id)))
            twins = trial.usable(tried, tests)
            twins = replace(twins, saw=tuple(sorted({*twins.saw} | first.saw | again.saw)))
    runs = [first, again, *with_trivial]
    test_s = sum(sum(run.seconds.values()) for run in runs)
    if refusal:
        return Verdict(*refusal, test_s=test_s)
    if changed := (first.failed.keys() ^ again.failed.keys()) | (first.passed ^ again.passed):
        return Verdict("flaky", min(changed), test_s=test_s)
    fail_to_pass = tuple(test for test in needing if test in first.failed)
    asked = {*fail_to_pass} & {*sample}
    shares = [len(run.passed & asked) / len(asked) for run in with_trivial] if asked else []
    if 1 in shares:
        return Verdict("a trivial body solves it", [*ways][shares.index(1)], test_s=test_s)
    return Verdict(
        fail_to_pass=fail_to_pass,
        pass_to_pass=tuple(sorted(first.passed)),
        exact=set(fail_to_pass) == {*needing},
        floor=max(shares, default=0.0),
        twins=twins,
        cases=tuple(cases),
        test_s=test_s,
    )


def _trial(
    workshop: Workshop,
    deletion: Deletion,
    first: SuiteRun,
    trivial: Iterable[tuple[Mapping[str, str | None], Collection[str]]],
) -> Trial:
    """Of the tests that fail without the feature."""
    failing = [test for test in deletion.feature.tests if test in first.failed]
    seconds = sum(workshop.repository.seconds[test] for test in failing)
    files = {path: workshop.files[path].encode() for path in files_of(failing) if path in workshop.files}
    right: dict[str, str | None] = {path: workshop.files[path] for path in deletion.files}
    expected = [*failing, *first.passed]
    trial = trial_of(files, failing, expected, right, random.Random(deletion.feature.id))
    return replace(trial, trivial=[*trivial], limit_s=START_S / 3 + SLOWER * seconds)


def _listening(workshop: Workshop, deletion: Deletion, tests: Sequence[str], limit_s: float) -> Round:
    """The right code, which writes down what the tests call it with."""
    right: dict[str, str | None] = {path: workshop.files[path] for path in deletion.files}
    for path, names in functions_of(deletion.targets).items():
        right[path] = recording(workshop.files[path], names)
    originals = {path: workshop.files[path] for path in files_of(tests) if path in workshop.files}
    return Round(files_of(tests), tests, {**right, **originals}, timeout_s=limit_s)


def deleted_tree(workshop: Workshop, deletion: Deletion) -> dict[str, str | None]:
    """What the deletion changes, and what makes the original tests run on it where names that they import are gone."""
    if deletion.level == "stub":
        return dict(deletion.files)
    return {**without_tests(workshop.files, (), deletion, workshop.repository.import_roots), **deletion.files}


def impacted(workshop: Workshop, deletion: Deletion, settings: VerifySettings) -> list[str]:
    """Tests besides the feature's own that could notice: the quick ones of those that enter a file it touches."""
    seconds, needing = workshop.repository.seconds, {*deletion.feature.tests}
    touching = [tests for key, tests in workshop.map.tests_of.items() if key.path in deletion.files]
    quick = sorted({*workshop.repository.tests} - needing, key=lambda test: (seconds[test], test))
    entering = [test for test in quick if any(test in tests for tests in touching)][: settings.max_others]
    spent = accumulate(seconds[test] for test in entering)
    chosen = [test for test, so_far_s in zip(entering, spent, strict=True) if so_far_s <= settings.others_s]
    if deletion.level != "stub":
        seen = {*files_of([*needing, *chosen])}
        for test in quick:
            path = test.partition("::")[0]
            if path not in seen and seconds[test] <= settings.others_s / 4:
                seen.add(path)
                chosen.append(test)
    return sorted(chosen)


def _sample(tests: Sequence[str], most: int) -> list[str]:
    """The same ones for the same tests, from anywhere among them."""
    return sorted(sorted(tests, key=lambda test: hashlib.sha256(test.encode()).digest())[:most])


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


def trivial_bodies(files: Mapping[str, str], deletion: Deletion) -> Iterator[tuple[str, dict[str, str]]]:
    """(what every stub returns, the stubs' files with those bodies). `files` is the tree before the deletion.

    A deletion that left no stub has no variants.
    """
    if not deletion.stubbed:
        return
    tree = {**files, **deletion.files}
    stubs: dict[str, set[str]] = defaultdict(set)
    for key in deletion.stubbed:
        stubs[key.path].add(key.name)
    ways: dict[str, Callable[[cst.FunctionDef], str]] = {"first argument": _first_argument}
    ways |= {name: lambda _, value=value: value for name, value in VALUES.items()}  # type: ignore[misc]
    for way, value_of in ways.items():
        orders = {path: Orders(stub=names, body=_returning(value_of)) for path, names in stubs.items()}
        yield way, {path: operate(str(tree[path]), order).source for path, order in orders.items()}


def _returning(value_of: Callable[[cst.FunctionDef], str]) -> Callable[[cst.FunctionDef], str]:
    """__init__ may return nothing but None."""
    return lambda function: "pass" if function.name.value == "__init__" else f"return {value_of(function)}"


def _first_argument(function: cst.FunctionDef) -> str:
    parameters = function.params
    star = [parameters.star_arg] if isinstance(parameters.star_arg, cst.Param) else []
    names = [p.name.value for p in [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params, *star]]
    return next((name for name in names if name not in {"self", "cls"}), "None")
