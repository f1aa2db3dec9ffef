"""How a task's tests are checked (tasks/blanks.py, tasks/mutants.py): blanks, and mutants of tests without them.

A mutant is a single edit that makes a test wrong: another expected value, or another raised type. An edit can be used
if the right code fails it in a check, and no trivial body passes it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from offbook.sandbox import SandboxSpec
from offbook.tasks.blanks import edited
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.types import files_of
from offbook.tasks.factory.verification.blanks import Run, blanks_of
from offbook.tasks.factory.verification.expectations import Found, Test, TestFile
from offbook.tasks.folder import rewrite_mutants
from offbook.tasks.grade import hidden_files, put
from offbook.tasks.mutants import Mutant, Mutants, base_of, digest_of
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox
from offbook.types import Task

VARIANTS = 4  # of a test: code may cheat in one of its checks alone
MAX_TESTS = 40  # that get mutants

Changes = Mapping[str, str | None]


async def checks_of(
    files: Mapping[str, bytes],
    fail_to_pass: Collection[str],
    pass_to_pass: Collection[str],
    right: Changes,
    trivial: Sequence[tuple[Changes, Collection[str]]],
    run: Run,
    limit_s: float,
    rng: random.Random,
) -> Mutants:
    """Of the tests that need a feature. `files` are their test files, `right` is what brings the right code into the
    tree, `trivial` are trivial bodies and the tests that they pass, `run` takes rounds and a hash seed."""
    expected = {*fail_to_pass, *pass_to_pass}
    blanks = await blanks_of(files, fail_to_pass, right, run, limit_s)
    found = Mutants(blanks=blanks)
    tests = {base_of(node) for node in fail_to_pass} - found.blank(fail_to_pass)
    mutants = await mutants_of(tests, files, expected, right, trivial, run, limit_s, rng)
    paths = sorted({mutant.path for mutant in mutants} | {base.partition("::")[0] for base in blanks.cases})
    return replace(found, mutants=mutants, files={path: digest_of(files[path]) for path in paths})


async def mutants_of(
    tests: Collection[str],
    files: Mapping[str, bytes],
    expected: Collection[str],
    right: Changes,
    trivial: Sequence[tuple[Changes, Collection[str]]],
    run: Run,
    limit_s: float,
    rng: random.Random,
) -> tuple[Mutant, ...]:
    """Usable mutants of tests."""
    read = {}
    for path, data in files.items():
        with suppress(SyntaxError, ValueError):  # what this Python cannot read
            read[path] = TestFile(path, data)
    drawn: list[list[Mutant]] = [[] for _ in range(VARIANTS)]  # each has at most one mutant of a test
    for test in rng.sample(sorted(tests), min(MAX_TESTS, len(tests))):
        path, _, name = test.partition("::")
        if path in read and name in read[path].functions:
            for mutants, mutant in zip(drawn, Test(Found({}), read[path], name).mutants(rng, VARIANTS), strict=False):
                mutants.append(mutant)
    # The right code with each set of mutants, then each trivial body with those of the tests that it passes.
    bodies = [(right, tests), *((changes, {base_of(node) for node in passed}) for changes, passed in trivial)]
    tried: list[tuple[Changes, list[Mutant]]] = []
    rounds = []
    for changes, bases in bodies:
        for mutants in drawn:
            if chosen := [mutant for mutant in mutants if mutant.test in bases]:
                tried.append((changes, chosen))
                paths = sorted({mutant.path for mutant in chosen})
                texts = {path: edited(files[path], [one for one in chosen if one.path == path]) for path in paths}
                names = sorted({mutant.test for mutant in chosen})
                rounds.append(Round(paths, names, {**changes, **texts}, limit_s))
    usable: list[tuple[Mutant, Mutant]] = []
    trivially: dict[Mutant, set[str]] = defaultdict(set)  # what passes with a trivial body
    for (changes, mutants), done in zip(tried, await run(rounds, 0) if rounds else (), strict=True):
        for mutant in mutants:
            if changes is not right:
                trivially[mutant] |= done.passed
            elif done.exit_code is not None and not done.tampered:
                nodes = [node for node in done.collected if base_of(node) == mutant.test]
                fails = tuple(node for node in nodes if node in done.failed)
                if fails and all(_in_a_check(done, node, mutant.kind) for node in fails):
                    others = tuple(node for node in nodes if node not in fails and node in expected)
                    usable.append((mutant, replace(mutant, fails=fails, others=others)))
    return tuple(one for mutant, one in usable if trivially[mutant].isdisjoint(one.fails))


def _in_a_check(run: SuiteRun, node: str, kind: str) -> bool:
    error = run.errors[node]
    is_meant = error == "assertion" or (kind == "raises" and error not in {"NameError", "ImportError"})
    return is_meant and run.failed[node].startswith("call: ")


async def add_mutants(task: Task, spec: SandboxSpec, timeout_s: float = 300.0) -> int:
    """Blanks and mutants for a task that is on disk already; how many of its tests have some now."""
    files = {path: (task.hidden_tests / path).read_bytes() for path in files_of(task.fail_to_pass)}
    saw = set[tuple[str, str]]()
    async with await suite_sandbox(task.tree, task.suite, spec) as sandbox:
        await put(sandbox, hidden_files(task))

        async def run(rounds: Sequence[Round], seed: int) -> list[SuiteRun]:
            runs = await run_rounds(sandbox, task.suite, rounds, timeout_s, hash_seed=seed, product=task.sources)
            saw.update(*(one.saw for one in runs))
            return runs

        right, rng = gold_changes(task), random.Random(task.id)
        tests = task.fail_to_pass, task.pass_to_pass
        found = await checks_of(files, *tests, right, (), run, timeout_s / 4, rng)
    found = replace(found, saw=tuple(sorted(saw)))
    rewrite_mutants(task, found)
    return len(found.blank(task.fail_to_pass) | found.tests)
