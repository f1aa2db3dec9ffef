"""Twins of a task's tests: which candidates can be used.

An edit (edits.py) can be used if the right code fails it in a check, and if no trivial body passes it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from offbook.sandbox import BoxSpec
from offbook.tasks.blanks import Blanks
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.types import files_of
from offbook.tasks.factory.verification.blanks import blanks_of, without
from offbook.tasks.factory.verification.edits import Module
from offbook.tasks.folder import rewrite_twins
from offbook.tasks.grade import hidden_files, put
from offbook.tasks.mutants import Twin, Twins, base_of, digest_of, edited
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_box
from offbook.types import Task

VARIANTS = 4  # of a test: somebody may cheat in one of its checks alone
MAX_TESTS = 40  # that get twins


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
    rounds: list[list[Twin]] = []
    inherited: dict[str, str] = {}
    for path, data in sorted(files.items()):
        try:
            module = _module(data)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        places: dict[str, bool] = {}  # where a test is written down, and whether it gets twins
        for base in sorted({base_of(node) for node in expected if node.startswith(f"{path}::")} | chosen):
            if base.startswith(f"{path}::") and (name := module.place(base.partition("::")[2])):
                if f"{path}::{name}" != base:
                    inherited[base] = f"{path}::{name}"
                places[name] = places.get(name, False) or base in chosen
        for name in (name for name, is_chosen in places.items() if is_chosen):
            for twin in module.twins(path, name, places, rng, variants):
                free = (round_ for round_ in rounds if not any(twin.reaches & one.reaches for one in round_))
                if (place := next(free, None)) is None:
                    rounds.append(place := [])
                place.append(twin)
    return Trial(files, rounds, right, inherited)


_module = lru_cache(maxsize=64)(Module)  # the deletions of a package share its test files


@dataclass(frozen=True, slots=True)
class Trial:
    """Candidates for a set of tests, and the rounds that show which of them can be used."""

    files: Mapping[str, bytes]  # the test files
    drawn: Sequence[Sequence[Twin]]  # in each of these a test has one at most
    right: Mapping[str, str | None]  # what brings the right code into the tree
    inherited: Mapping[str, str] = field(default_factory=dict)  # as Twins has it
    trivial: Sequence[tuple[Mapping[str, str | None], Collection[str]]] = ()  # bodies, and the tests that they pass
    limit_s: float = 60.0

    @property
    def rounds(self) -> list[Round]:
        """The right code with each set of candidates; then each trivial body with those of the tests that it passes."""
        rounds = [self._round(twins, self.right) for twins in self.drawn]
        return rounds + [self._round(twins, bodies) for bodies, twins in self._doubtful()]

    def _doubtful(self) -> list[tuple[Mapping[str, str | None], list[Twin]]]:
        found = []
        for bodies, passed in self.trivial:
            bases = {self._test_of(test) for test in passed}
            found += [(bodies, [twin for twin in twins if twin.test in bases]) for twins in self.drawn]
        return [(bodies, twins) for bodies, twins in found if twins]

    def _round(self, twins: Sequence[Twin], changes: Mapping[str, str | None]) -> Round:
        paths = sorted({twin.path for twin in twins})
        tests = {path: edited(self.files[path], [twin for twin in twins if twin.path == path]) for path in paths}
        chosen = {twin.test for twin in twins}
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

    def usable(self, runs: Sequence[SuiteRun], expected: Collection[str]) -> Twins:
        """Those that do as they should. `runs` are of `rounds`, `expected` all tests that the task asks for."""
        trivially: dict[Twin, set[str]] = defaultdict(set)  # what passes with a trivial body
        for (_, doubtful), run in zip(self._doubtful(), runs[len(self.drawn) :], strict=True):
            for twin in doubtful:
                trivially[twin] |= run.passed
        found: list[Twin] = []
        for twins, run in zip(self.drawn, runs, strict=False):
            if run.exit_code is not None and not run.tampered:
                tried = [(twin, self._tried(twin, run, expected)) for twin in twins]
                # What a trivial body passes too is not checked at all.
                found += [one for twin, one in tried if one and not trivially[twin] & {*one.fails}]
        better = {twin.test for twin in found if twin.kind != "check"}
        found = [twin for twin in found if twin.kind != "check" or twin.test not in better]
        digests = {path: digest_of(self.files[path]) for path in sorted({twin.path for twin in found})}
        saw = set[tuple[str, str]]().union(*(run.saw for run in runs[: len(self.drawn)]))
        tests = {twin.test for twin in found}
        inherited = {base: test for base, test in self.inherited.items() if test in tests}
        return Twins(tuple(found), digests, tuple(sorted(saw)), inherited)

    def _tried(self, twin: Twin, run: SuiteRun, expected: Collection[str]) -> Twin | None:
        """With the node ids that the right code fails; nothing where it fails none, or not in a check."""
        nodes = [node for node in run.collected if self._test_of(node) == twin.test]
        fails = tuple(node for node in nodes if node in run.failed)
        if not fails or not all(_in_a_check(run, node, twin.kind) for node in fails):
            return None
        return replace(
            twin, fails=fails, others=tuple(node for node in nodes if node not in fails and node in expected)
        )


def only(twins: Twins, tests: Collection[str]) -> Twins:
    """Those of these tests."""
    wanted = {twins.test_of(test) for test in tests}
    kept = tuple(twin for twin in twins.twins if twin.test in wanted)
    bases = {base_of(test) for test in tests}
    blanks = without(twins.blanks, twins.blanks.cases.keys() - bases, "")
    blank_paths = {base.partition("::")[0] for base in blanks.cases}
    blanks = replace(
        blanks,
        edits=tuple(edit for edit in blanks.edits if edit.path in blank_paths),
        names=tuple(edit for edit in blanks.names if edit.path in blank_paths),
        left={base: why for base, why in blanks.left.items() if base in bases},
    )
    paths = {twin.path for twin in kept} | blank_paths
    return replace(twins, twins=kept, files={path: twins.files[path] for path in sorted(paths)}, blanks=blanks)


def with_blanks(twins: Twins, blanks: Blanks, files: Mapping[str, bytes], inherited: Mapping[str, str]) -> Twins:
    """A test that several classes have is where it is written down for blanks too."""
    digests = {path: digest_of(files[path]) for path in {base.partition("::")[0] for base in blanks.cases}}
    named = {base: test for base, test in inherited.items() if base in blanks.cases}
    return replace(
        twins,
        blanks=blanks,
        files=dict(sorted({**twins.files, **digests}.items())),
        inherited={**named, **twins.inherited},
    )


def _in_a_check(run: SuiteRun, node: str, kind: str) -> bool:
    if not run.failed[node].startswith("call: "):
        return False
    return run.errors[node] == "assertion" or (
        kind == "raises" and run.errors[node] not in {"NameError", "ImportError"}
    )


async def add_twins(task: Task, spec: BoxSpec, timeout_s: float = 300.0) -> int:
    """Twins for a task that is on disk already; how many of its tests have one now."""
    files = {path: (task.hidden_tests / path).read_bytes() for path in files_of(task.fail_to_pass)}
    expected = {*task.fail_to_pass, *task.pass_to_pass}
    trial = trial_of(files, task.fail_to_pass, expected, gold_changes(task), random.Random(task.id))
    trial = replace(trial, limit_s=timeout_s / 4)
    twins = Twins()
    async with await suite_box(task.tree, task.suite, spec) as box:
        await put(box, hidden_files(task))

        async def run(rounds: Sequence[Round], hash_seed: int) -> list[SuiteRun]:
            return await run_rounds(box, task.suite, rounds, timeout_s, hash_seed=hash_seed, product=task.sources)

        if trial.drawn:
            twins = trial.usable(await run(trial.rounds, 0), expected)
        blanks = await trial.blanks(task.fail_to_pass, run)
    twins = with_blanks(twins, blanks, files, trial.inherited)
    rewrite_twins(task, twins)
    return len(twins.tests)
