"""Whether a deletion makes a task: what its tests say without the feature, and with trivial bodies in its place.

Only the tests that matter are run: those that enter a file which the deletion touches, as the map has it, and one of
every other test file where names have gone, because an import may need one. The gold patch is verified on the folder
that is written at the end (check.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import libcst as cst

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.surgery import Orders, operate
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.instruction.examples import TRIED_S, Example, examples, reached, tried_in, trying_of
from offbook.tasks.factory.types import Deletion, FunctionKey, files_of, is_test_code
from offbook.tasks.factory.verification.mutants import checks_of
from offbook.tasks.factory.verification.perturb import (
    DOCUMENTED,
    answered,
    documented,
    functions_of,
    recorded,
    recording,
)
from offbook.tasks.factory.workshop import Workshop, product_of
from offbook.tasks.grade import put
from offbook.tasks.mutants import Mutants, base_of
from offbook.tasks.perturbed import Apart
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox

ENDLESS = "the tests do not come to an end"
START_S = 30.0
MAX_APART = 40  # tests that are tried without pytest
SLOWER = 4.0  # than in the baseline
# What trivial bodies return. False is 0 too.
MARK = re.compile(r"__offbook_value__\((\w+)\)")  # stands for it, with the function's first argument
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
    floor: float = 0.0  # the largest share of fail_to_pass that a trivial body passes
    mutants: Mutants = field(default_factory=Mutants)
    apart: Apart = field(default_factory=Apart)
    examples: tuple[Example, ...] = ()  # checks of its tests that are true of the right code


async def verify(
    workshop: Workshop,
    deletion: Deletion,
    spec: SandboxSpec,
    settings: VerifySettings,
    objection: Callable[[Verdict], Awaitable[tuple[str, str] | None]] | None = None,
) -> Verdict:
    """`objection` is asked after the first round: why the deletion makes no task all the same, and the evidence."""
    repository, needing = workshop.repository, deletion.feature.tests
    if sum(repository.seconds[test] for test in needing) > settings.feature_s:
        return Verdict("its tests take too long")
    gone = (*deletion.stubbed, *deletion.deleted)
    candidates = await asyncio.to_thread(_examples, workshop, deletion, gone)
    others = impacted(workshop, deletion, settings)
    tests = [*needing, *others]
    limit_s = START_S + SLOWER * sum(repository.seconds[test] for test in tests)
    whole, watched = Round(files_of(tests), tests, timeout_s=limit_s), product_of(repository)
    right = right_files(workshop.files, deletion)
    trying = trying_of(repository.suite, workshop.symbols, gone, candidates, right)
    saw = set[tuple[str, str]]()  # what the product itself looks at
    async with await suite_sandbox(repository.tree, repository.suite, spec) as sandbox:

        async def run(rounds: Sequence[Round], rounds_s: float, hash_seed: int = 0) -> list[SuiteRun]:
            done = await run_rounds(sandbox, repository.suite, rounds, rounds_s, hash_seed=hash_seed, product=watched)
            saw.update(*(one.saw for one in done))
            return done

        await put(sandbox, deleted_tree(workshop, deletion))
        *with_examples, first = await run([*([trying] if trying else []), whole], limit_s + TRIED_S)
        if refusal := _refusal(first, needing, others, repository.excluded):
            return Verdict(*refusal)
        fail_to_pass = tuple(test for test in needing if test in first.failed)
        seen = Verdict(
            fail_to_pass=fail_to_pass,
            pass_to_pass=tuple(sorted(first.passed)),
            examples=tried_in(with_examples[0], candidates) if trying else (),
        )
        if objection and (refusal := await objection(seen)):
            return Verdict(*refusal)
        sample = _sample(needing, settings.max_trivial_tests)
        sample_s = settings.trivial_s + SLOWER * sum(repository.seconds[test] for test in sample)
        ways = await asyncio.to_thread(lambda: dict(trivial_bodies(workshop.files, deletion)))
        trivial = [
            Round(files_of(sample), sample, bodies, timeout_s=sample_s, per_test_s=settings.trivial_s / 2)
            for bodies in ways.values()
        ]
        *with_trivial, again = await run([*trivial, whole], limit_s + len(trivial) * sample_s, hash_seed=1)
        if changed := (first.failed.keys() ^ again.failed.keys()) | (first.passed ^ again.passed):
            return Verdict("flaky", min(changed))
        asked = {*fail_to_pass} & {*sample}
        tried = [*zip(ways.values(), (run.passed for run in with_trivial), strict=True)]
        shares = [len(passed & asked) / len(asked) for _, passed in tried if asked]
        if 1 in shares:
            return Verdict("a trivial body solves it", [*ways][shares.index(1)])
        files = {path: workshop.files[path].encode() for path in files_of(fail_to_pass) if path in workshop.files}
        limit_s = START_S / 3 + SLOWER * sum(repository.seconds[test] for test in fail_to_pass)

        async def run_right(rounds: Sequence[Round], seed: int) -> list[SuiteRun]:
            return await run(rounds, limit_s * (len(rounds) + 1), hash_seed=seed)

        rng = random.Random(deletion.feature.id)
        mutants = await checks_of(files, fail_to_pass, first.passed, right, tried, run_right, limit_s, rng)
        mutants = replace(mutants, saw=tuple(sorted(saw)))
        texts = {path: data.decode() for path, data in files.items()}
        targets = functions_of(deletion.targets)
        listening = {path: recording(workshop.files[path], names) for path, names in targets.items()}
        listening[DOCUMENTED] = documented(targets, repository.import_roots)
        asking = _sample(fail_to_pass, settings.max_trivial_tests)
        asked_files = [*files_of(asking), DOCUMENTED]
        asking.append(f"{DOCUMENTED}::test_documented")
        await run([Round(asked_files, asking, {**right, **texts, **listening}, timeout_s=sample_s)], sample_s)
        calls = await recorded(sandbox, targets, repository.import_roots)  # what it wrote stays
        await put(sandbox, right)
        plain = _sample([*{base_of(node) for node in fail_to_pass if node.partition("::")[0] in texts}], MAX_APART)
        apart = await answered(sandbox, repository.suite, calls, plain, texts, deletion.feature.id)
    return replace(seen, floor=max(shares, default=0.0), mutants=mutants, apart=apart)


def _examples(workshop: Workshop, deletion: Deletion, gone: Sequence[FunctionKey]) -> list[Example]:
    """Checks that its tests make. Of a release the changelog says what it brings."""
    if deletion.level == "release":
        return []
    files = {path: text for path, text in workshop.files.items() if is_test_code(path)}
    roots = workshop.symbols.import_roots
    needing = deletion.feature.tests
    return examples(reached(files, roots, needing), files, roots, needing, gone)


def right_files(files: Mapping[str, str], deletion: Deletion) -> dict[str, str | None]:
    """What the deletion changed, as it was."""
    tests = [path for path, text in deletion.tests.items() if text != files[path]]
    return {path: files[path] for path in (*deletion.files, *tests)}


def deleted_tree(workshop: Workshop, deletion: Deletion) -> dict[str, str | None]:
    """What the deletion changes, and what makes the original tests run on it where names that they import are gone."""
    if deletion.level == "stub":
        return dict(deletion.files)
    if deletion.level == "release":  # what is None is not there yet
        return {**deletion.tests, **{path: text for path, text in deletion.files.items() if text is not None}}
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
        return ENDLESS, run.running or (unexpected or [*needing])[0]
    if unexpected:
        return "other tests fail too", f"{unexpected[0]}: {run.failed.get(unexpected[0], 'not run')}"
    if not run.failed:
        return "no test fails without it", needing[0]
    return None


def trivial_bodies(files: Mapping[str, str], deletion: Deletion) -> Iterator[tuple[str, dict[str, str | None]]]:
    """(what every stub returns, the stubs' files with those bodies). `files` is the tree before the deletion.

    A deletion that left no stub has no variants.
    """
    if not deletion.stubbed:
        return
    # The functions that a release brings are not there as stubs: the bodies go into the tree that has them.
    right = right_files(files, deletion) if deletion.level == "release" else {}
    tree = {**files, **({} if right else deletion.files)}
    stubs: dict[str, set[str]] = defaultdict(set)
    for key in deletion.stubbed:
        stubs[key.path].add(key.name)

    def mark(function: cst.FunctionDef) -> str:
        if function.name.value == "__init__":  # which may return nothing but None
            return "pass"
        return f"return __offbook_value__({_first_argument(function)})"

    # Once for all ways: writing a tree out as text is most of the work.
    marked = {path: operate(str(tree[path]), Orders(stub=names, body=mark)).source for path, names in stubs.items()}
    for way, value in {"first argument": r"\1", **VALUES}.items():
        yield way, {**right, **{path: MARK.sub(value, text) for path, text in marked.items()}}


def _first_argument(function: cst.FunctionDef) -> str:
    parameters = function.params
    every = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params, parameters.star_arg]
    names = [one.name.value for one in every if isinstance(one, cst.Param)]
    return next((name for name in names if name not in {"self", "cls"}), "None")
