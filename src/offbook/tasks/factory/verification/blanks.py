"""Blanks of a task (tasks/blanks.py): what the right code bears to have blanked, and what it reports there."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from offbook.tasks.blanks import BlankRound, Blanks, Place, blank_round, holds, is_unknown
from offbook.tasks.factory.verification.expectations import NONE, Found, found_in
from offbook.tasks.mutants import Mutants, base_of, digest_of
from offbook.tasks.suite_run import Round, SuiteRun

OBJECTS = "objects"
CHANGED = "the right code does not pass it blanked"
UNSTABLE = "the right code does not report the same twice"
TRIES = 4
LONGEST = 100_000  # characters of all that the cases of a test report

Run = Callable[[Sequence[Round], int], Awaitable[Sequence[SuiteRun]]]  # rounds and a hash seed


async def blanks_of(
    files: Mapping[str, bytes],
    fail_to_pass: Collection[str],
    right: Mapping[str, str | None],
    run: Run,
    limit_s: float,
) -> Blanks:
    """Of the tests that need a feature, with what the right code reports. `files` are their test files, `right` is what
    brings the right code into the tree."""
    bases = sorted({base_of(node) for node in fail_to_pass})
    found = found_in(files, bases)
    cases: dict[str, tuple[str, ...]] = dict.fromkeys(bases, ())
    texts = {path: data.decode() for path, data in files.items()}
    plain = Round(sorted(files), bases, {**right, **texts}, limit_s)
    for _ in range(TRIES):
        blanks = _blanks(found, cases)
        this = blank_round(blanks, blanks.cases, files, limit_s, random.Random(0))
        if this is None:
            return blanks
        blanked = replace(this.round, changes={**right, **this.round.changes})
        blank, whole = await run([blanked, plain], 0)
        cases = {base: tuple(node for node in whole.collected if base_of(node) == base) for base in bases}
        this = replace(this, blanks=_blanks(found, cases))
        if _pruned(found, this, blank, fail_to_pass):
            continue
        this = replace(this, blanks=reported(this, blank, fail_to_pass))
        blank, _ = await run([blanked, plain], 1)
        return _without(this.blanks, {base_of(node) for node in this.wrong(blank)[0]}, UNSTABLE)
    return _without(_blanks(found, cases), bases, CHANGED)


def blank_of(files: Mapping[str, bytes], tests: Collection[str]) -> BlankRound:
    """Of tests without parameters in which everything can be blanked."""
    blanks = _blanks(found_in(files, tests), {test: (test,) for test in tests})
    this = blank_round(blanks, tests, files, 60.0, random.Random(0))
    assert this is not None
    return this


def only(blanks: Blanks, tests: Collection[str], files: Mapping[str, bytes]) -> Mutants:
    """A task of these tests, without mutants."""
    bases = {base_of(test) for test in tests}
    paths = {base.partition("::")[0] for base in bases}
    blanks = _without(blanks, blanks.cases.keys() - bases, "")
    blanks = replace(
        blanks,
        edits=tuple(edit for edit in blanks.edits if edit.path in paths),
        names=tuple(edit for edit in blanks.names if edit.path in paths),
        left={base: why for base, why in blanks.left.items() if base in bases},
    )
    return Mutants(files={path: digest_of(files[path]) for path in sorted(paths)}, blanks=blanks)


def reported(this: BlankRound, run: SuiteRun, fail_to_pass: Collection[str]) -> Blanks:
    """With what the right code reports in `run`; without tests that it does not pass in it."""
    reports: dict[str, list[list[Any]]] = {}
    bad = set[str]()
    for base, own in this.blanks.cases.items():
        names = this.cases(run, base)
        pairs = [(node, name) for node, name in zip(own, names, strict=False) if node in fail_to_pass]
        of_test = {n: [[this.tokens[token], data] for token, data in run.blanks.get(name, ())] for n, name in pairs}
        is_short = len(json.dumps(of_test)) <= LONGEST
        if len(own) == len(names) and is_short and all(name in run.passed for _, name in pairs):
            reports |= of_test
        else:
            bad.add(base)
    return _without(replace(this.blanks, reports=reports), bad, CHANGED)


def _blanks(found: Found, cases: Mapping[str, tuple[str, ...]]) -> Blanks:
    """Without reports yet. `cases` are tests with their node ids."""
    tests = {test for one in found.candidates for test in one.tests}
    kept = {base: nodes for base, nodes in cases.items() if base in tests}
    left = {base: found.left.get(base, NONE) for base in cases if base in found.left or base not in kept}
    edits = tuple(one.edit for one in found.candidates)
    return Blanks(edits, tuple(found.names), tuple(found.renamed), tuple(found.places), kept, {}, left)


def _pruned(found: Found, this: BlankRound, run: SuiteRun, fail_to_pass: Collection[str]) -> bool:
    """Drop what the right code does not bear. Whether there was something: then all have to be run again."""
    before = len(found.candidates)
    failing = set[str]()
    for base, own in this.blanks.cases.items():
        names = this.cases(run, base)
        if len(names) != len(own) and (found.names or found.renamed):
            found.names = []
            found.renamed = []
            return True
        pairs = list(zip(own, names, strict=False))
        if len(names) != len(own) or any(name not in run.passed for node, name in pairs if node in fail_to_pass):
            failing.add(base)
        reports = [report for _, name in pairs for report in run.blanks.get(name, ())]
        bad = {this.tokens[token] for token, data in reports if not _holds(found.places[this.tokens[token]], data)}
        found.drop(lambda one, bad=bad: not bad.isdisjoint(one.places), OBJECTS)  # type: ignore[misc]
    soft = {test for one in found.candidates if one.is_soft for test in one.tests}
    found.drop(lambda one: bool(one.tests & failing) and (one.is_soft or not one.tests & soft), CHANGED)
    return before != len(found.candidates)


def _holds(place: Place, data: Any) -> bool:
    """Whether what the right code reports has a plain form, and passes the check outside."""
    try:
        return holds(place, data, data) and (place.asks in {"truth", "is not"} or not is_unknown(data))
    except (TypeError, ValueError, OverflowError):
        return False


def _without(blanks: Blanks, tests: Collection[str], why: str) -> Blanks:
    """These are not blanked, and the reason is kept."""
    cases = {test: nodes for test, nodes in blanks.cases.items() if test not in tests}
    reports = {node: told for node, told in blanks.reports.items() if base_of(node) in cases}
    return replace(blanks, cases=cases, reports=reports, left={**blanks.left, **dict.fromkeys(tests, why)})
