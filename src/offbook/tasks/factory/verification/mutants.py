"""Mutants of a task's tests: which candidates can be used.

An edit (edits.py) can be used if the right code fails it in a check, and if no trivial body passes it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from offbook.sandbox import SandboxSpec
from offbook.tasks.blanks import Blanks
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.types import files_of
from offbook.tasks.factory.verification.blanks import blanks_of, without
from offbook.tasks.factory.verification.edits import Module
from offbook.tasks.folder import rewrite_mutants
from offbook.tasks.grade import hidden_files, put
from offbook.tasks.mutants import Mutant, Mutants, base_of, digest_of, edited
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox
from offbook.types import Task

VARIANTS = 4  # of a test: somebody may cheat in one of its checks alone
MAX_TESTS = 40  # that get mutants


def trial_of(
    files: Mapping[str, bytes],
    fail_to_pass: Collection[str],
    expected: Collection[str],
    right: Mapping[str, str | None],
    rng: random.Random,
    variants: int = VARIANTS,
) -> Trial:
    """Candidates for the tests that need a feature. `files` has their test files, `right` what brings it back."""
    bases = sorted({base_of(test) for test in fail_to_pass})
    chosen = {*rng.sample(bases, min(MAX_TESTS, len(bases)))}
    rounds: list[list[Mutant]] = []
    inherited: dict[str, str] = {}
    for path, data in sorted(files.items()):
        try:
            module = _module(data)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        places: dict[str, bool] = {}  # where a test is written down, and whether it gets mutants
        for base in sorted({base_of(node) for node in expected if node.startswith(f"{path}::")} | chosen):
            if base.startswith(f"{path}::") and (name := module.place(base.partition("::")[2])):
                if f"{path}::{name}" != base:
                    inherited[base] = f"{path}::{name}"
                places[name] = places.get(name, False) or base in chosen
        for name in (name for name, is_chosen in places.items() if is_chosen):
            for mutant in module.mutants(path, name, places, rng, variants):
                free = (round_ for round_ in rounds if not any(mutant.reaches & one.reaches for one in round_))
                if (place := next(free, None)) is None:
                    rounds.append(place := [])
                place.append(mutant)
    return Trial(files, rounds, right, inherited)


_module = lru_cache(maxsize=64)(Module)  # the deletions of a package share its test files


@dataclass(frozen=True, slots=True)
class Trial:
    """Candidates for a set of tests, and the rounds that show which of them can be used."""

    files: Mapping[str, bytes]  # the test files
    drawn: Sequence[Sequence[Mutant]]  # in each of these a test has one at most
    right: Mapping[str, str | None]  # what brings the right code into the tree
    inherited: Mapping[str, str] = field(default_factory=dict)  # as Mutants has it
    trivial: Sequence[tuple[Mapping[str, str | None], Collection[str]]] = ()  # bodies, and the tests that they pass
    limit_s: float = 60.0

    @property
    def rounds(self) -> list[Round]:
        """The right code with each set of candidates; then each trivial body with those of the tests that it passes."""
        rounds = [self._round(mutants, self.right) for mutants in self.drawn]
        return rounds + [self._round(mutants, bodies) for bodies, mutants in self._doubtful()]

    def _doubtful(self) -> list[tuple[Mapping[str, str | None], list[Mutant]]]:
        found = []
        for bodies, passed in self.trivial:
            bases = {self._test_of(test) for test in passed}
            found += [(bodies, [mutant for mutant in mutants if mutant.test in bases]) for mutants in self.drawn]
        return [(bodies, mutants) for bodies, mutants in found if mutants]

    def _round(self, mutants: Sequence[Mutant], changes: Mapping[str, str | None]) -> Round:
        paths = sorted({mutant.path for mutant in mutants})
        tests = {
            path: edited(self.files[path], [mutant for mutant in mutants if mutant.path == path]) for path in paths
        }
        chosen = {mutant.test for mutant in mutants}
        bases = [*chosen, *(base for base, test in self.inherited.items() if test in chosen)]
        return Round(paths, sorted(bases), {**changes, **tests}, timeout_s=self.limit_s)

    async def blanks(
        self, fail_to_pass: Collection[str], run: Callable[[Sequence[Round], int], Awaitable[Sequence[SuiteRun]]]
    ) -> Blanks:
        files = {
            path: data for path, data in self.files.items() if any(n.startswith(f"{path}::") for n in fail_to_pass)
        }
        return await blanks_of(files, fail_to_pass, self.inherited, self.right, run, self.limit_s)

    def _test_of(self, node: str) -> str:
        return self.inherited.get(base_of(node), base_of(node))

    def usable(self, runs: Sequence[SuiteRun], expected: Collection[str]) -> Mutants:
        """Those that do as they should. `runs` are of `rounds`, `expected` all tests that the task asks for."""
        trivially: dict[Mutant, set[str]] = defaultdict(set)  # what passes with a trivial body
        for (_, doubtful), run in zip(self._doubtful(), runs[len(self.drawn) :], strict=True):
            for mutant in doubtful:
                trivially[mutant] |= run.passed
        found: list[Mutant] = []
        for mutants, run in zip(self.drawn, runs, strict=False):
            if run.exit_code is not None and not run.tampered:
                tried = [(mutant, self._tried(mutant, run, expected)) for mutant in mutants]
                # What a trivial body passes too is not checked at all.
                found += [one for mutant, one in tried if one and not trivially[mutant] & {*one.fails}]
        better = {mutant.test for mutant in found if mutant.kind != "check"}
        found = [mutant for mutant in found if mutant.kind != "check" or mutant.test not in better]
        digests = {path: digest_of(self.files[path]) for path in sorted({mutant.path for mutant in found})}
        saw = set[tuple[str, str]]().union(*(run.saw for run in runs[: len(self.drawn)]))
        tests = {mutant.test for mutant in found}
        inherited = {base: test for base, test in self.inherited.items() if test in tests}
        return Mutants(tuple(found), digests, tuple(sorted(saw)), inherited)

    def _tried(self, mutant: Mutant, run: SuiteRun, expected: Collection[str]) -> Mutant | None:
        """With the node ids that the right code fails; nothing where it fails none, or not in a check."""
        nodes = [node for node in run.collected if self._test_of(node) == mutant.test]
        fails = tuple(node for node in nodes if node in run.failed)
        if not fails or not all(_in_a_check(run, node, mutant.kind) for node in fails):
            return None
        return replace(
            mutant, fails=fails, others=tuple(node for node in nodes if node not in fails and node in expected)
        )


def only(mutants: Mutants, tests: Collection[str]) -> Mutants:
    """Those of these tests."""
    wanted = {mutants.test_of(test) for test in tests}
    kept = tuple(mutant for mutant in mutants.mutants if mutant.test in wanted)
    bases = {base_of(test) for test in tests}
    blanks = without(mutants.blanks, mutants.blanks.cases.keys() - bases, "")
    blank_paths = {base.partition("::")[0] for base in blanks.cases}
    blanks = replace(
        blanks,
        edits=tuple(edit for edit in blanks.edits if edit.path in blank_paths),
        names=tuple(edit for edit in blanks.names if edit.path in blank_paths),
        left={base: why for base, why in blanks.left.items() if base in bases},
    )
    paths = {mutant.path for mutant in kept} | blank_paths
    return replace(mutants, mutants=kept, files={path: mutants.files[path] for path in sorted(paths)}, blanks=blanks)


def with_blanks(mutants: Mutants, blanks: Blanks, files: Mapping[str, bytes], inherited: Mapping[str, str]) -> Mutants:
    """A test that several classes have is where it is written down for blanks too."""
    digests = {path: digest_of(files[path]) for path in {base.partition("::")[0] for base in blanks.cases}}
    named = {base: test for base, test in inherited.items() if base in blanks.cases}
    return replace(
        mutants,
        blanks=blanks,
        files=dict(sorted({**mutants.files, **digests}.items())),
        inherited={**named, **mutants.inherited},
    )


def _in_a_check(run: SuiteRun, node: str, kind: str) -> bool:
    if not run.failed[node].startswith("call: "):
        return False
    return run.errors[node] == "assertion" or (
        kind == "raises" and run.errors[node] not in {"NameError", "ImportError"}
    )


async def add_mutants(task: Task, spec: SandboxSpec, timeout_s: float = 300.0) -> int:
    """Mutants for a task that is on disk already; how many of its tests have one now."""
    files = {path: (task.hidden_tests / path).read_bytes() for path in files_of(task.fail_to_pass)}
    expected = {*task.fail_to_pass, *task.pass_to_pass}
    trial = trial_of(files, task.fail_to_pass, expected, gold_changes(task), random.Random(task.id))
    trial = replace(trial, limit_s=timeout_s / 4)
    mutants = Mutants()
    async with await suite_sandbox(task.tree, task.suite, spec) as sandbox:
        await put(sandbox, hidden_files(task))

        async def run(rounds: Sequence[Round], hash_seed: int) -> list[SuiteRun]:
            return await run_rounds(sandbox, task.suite, rounds, timeout_s, hash_seed=hash_seed, product=task.sources)

        if trial.drawn:
            mutants = trial.usable(await run(trial.rounds, 0), expected)
        blanks = await trial.blanks(task.fail_to_pass, run)
    mutants = with_blanks(mutants, blanks, files, trial.inherited)
    rewrite_mutants(task, mutants)
    return len(mutants.tests)
