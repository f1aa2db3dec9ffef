"""One feature becomes one task folder, or is refused with the reason."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offbook.sandbox import BoxSpec
from offbook.taskgen.audit import Leak, single_commit
from offbook.taskgen.delete.delete import delete, without_tests
from offbook.taskgen.instruct import instructions, leaks_in_instruction
from offbook.taskgen.nouns import Deletion, Feature, Level
from offbook.taskgen.rewrite import Rewrite
from offbook.taskgen.verify import Verdict, VerifySettings, verify
from offbook.taskgen.workshop import (
    TEST_COMMAND,
    TOOLS,
    Workshop,
    given_away,
    hidden_of,
    product_of,
    requirements_of,
)
from offbook.tasks.check import check_gold
from offbook.tasks.folder import NewTask, load_task, write_task
from offbook.tasks.patch import gold_patch
from offbook.types import Deleted

EASY_LINES, HARD_LINES = 12, 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a candidate. `refused` is a reason out of few; the evidence is about this one."""

    id: str
    repository: str
    kind: str
    level: str
    refused: str = ""
    evidence: str = ""
    lines: int = 0
    files: int = 0
    num_tests: int = 0
    floor: float = 0.0
    exact: bool = False
    rewritten: int = 0  # instructions that are a model's words
    seconds: float = 0.0
    test_s: float = 0.0


async def make_task(
    workshop: Workshop,
    feature: Feature,
    level: Level,
    folder: Path,
    spec: BoxSpec,
    wording: str = "normal",
    settings: VerifySettings | None = None,
    rewrite: Rewrite | None = None,
) -> Outcome:
    deletion = await asyncio.to_thread(delete, workshop.files, workshop.symbols, feature, level)
    return await task_from(workshop, deletion, folder, spec, wording, settings, rewrite)


async def task_from(
    workshop: Workshop,
    deletion: Deletion,
    folder: Path,
    spec: BoxSpec,
    wording: str = "normal",
    settings: VerifySettings | None = None,
    rewrite: Rewrite | None = None,
) -> Outcome:
    """`folder` is written only if all went well. The gold patch is tried on the folder as it is."""
    began = time.monotonic()
    feature = deletion.feature
    outcome = Outcome(feature.id, workshop.repository.name, feature.kind, deletion.level)

    def ended(refused: str, evidence: str = "", test_s: float = 0.0) -> Outcome:
        seconds = time.monotonic() - began
        return replace(outcome, refused=refused, evidence=evidence, seconds=seconds, test_s=test_s)

    if not deletion.removed:
        return ended("there is nothing to delete")
    leaks = await asyncio.to_thread(workshop.leaks, deletion.removed, targets_of(deletion), deletion.files)
    if leaks:
        return ended("its code is in another place too", _said(leaks[0]))
    verdict = await verify(workshop.repository, workshop.files, workshop.map, deletion, spec, settings)
    if verdict.refused:
        return ended(verdict.refused, verdict.evidence, verdict.test_s)
    new = await asyncio.to_thread(new_task, workshop, deletion, verdict, wording)
    if isinstance(new, tuple):
        return ended(*new, verdict.test_s)
    rewritten = await rewrite(new.instructions, deletion) if rewrite else {}
    words = {**new.instructions, **rewritten}
    new = replace(new, instructions=words, instruction=words[wording])
    draft = folder.with_name(f".{folder.name}")  # a folder that is not complete is hidden
    shutil.rmtree(draft, ignore_errors=True)
    writing = asyncio.ensure_future(asyncio.to_thread(_write, draft, new))
    try:
        await asyncio.shield(writing)
        why = await check_gold(load_task(draft), spec)  # without it the tests were seen red
        if why:
            return ended("the finished task does not hold", why, verdict.test_s)
        draft.rename(folder)
    finally:
        await asyncio.wait([writing])  # a thread cannot be stopped, and what it writes must go too
        shutil.rmtree(draft, ignore_errors=True)
    assert new.deleted is not None
    return replace(
        ended("", "", verdict.test_s),
        lines=new.deleted.lines,
        files=new.deleted.files,
        num_tests=len(new.fail_to_pass),
        floor=verdict.floor,
        exact=verdict.exact,
        rewritten=len(rewritten),
    )


def _said(leak: Leak) -> str:
    return f"{leak.what} in {leak.path} ({leak.how}): {leak.evidence}"


def _write(folder: Path, new: NewTask) -> None:
    write_task(folder, new)
    single_commit(folder / "environment" / "repo")


def new_task(workshop: Workshop, deletion: Deletion, verdict: Verdict, wording: str) -> NewTask | tuple[str, str]:
    """What the folder is written from, or why there is none."""
    repository, files = workshop.repository, workshop.files
    visible = without_tests(files, verdict.fail_to_pass, deletion, repository.import_roots)
    tree: dict[str, str | None] = {**visible, **deletion.files}
    found = workshop.corpus.leaks(deletion.removed, files=tree)  # the library was searched before
    leaks = given_away(found, deletion.removed, targets_of(deletion), product_of(repository))
    if leaks:
        return "its code is in another place too", _said(leaks[0])
    words = instructions(deletion.feature, workshop.symbols, deletion, verdict.fail_to_pass)
    for text in words.values():
        if why := leaks_in_instruction(text, deletion):
            return "the instruction gives it away", why
    gold = {path: files[path] for path in deletion.files}
    facts = _deleted(workshop, deletion, verdict)
    return NewTask(
        instruction=words[wording],
        instructions=words,
        tree=tree,
        gold=gold,
        hidden_tests=hidden_of(repository),
        test_files=repository.test_files,
        id=deletion.feature.id,
        origin=f"{repository.name}=={repository.version}",
        difficulty=difficulty(facts, len(verdict.fail_to_pass)),
        tools=TOOLS,
        fail_to_pass=verdict.fail_to_pass,
        pass_to_pass=verdict.pass_to_pass,
        base=repository.tree,
        suite=repository.suite,
        sources=product_of(repository),
        test_command=TEST_COMMAND,
        requirements=requirements_of(repository),
        deleted=facts,
        removed=deletion.removed,
    )


def _deleted(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Deleted:
    feature, symbols = deletion.feature, workshop.symbols
    users = {user for key in feature.targets for user in symbols.callers.get(key, ())} - {*feature.functions}
    code = {path: text for path, text in deletion.files.items() if path.endswith(".py")}
    return Deleted(
        kind=feature.kind,
        level=deletion.level,
        targets=targets_of(deletion),
        functions=tuple(f"{key.path}::{key.name}" for key in feature.functions),
        lines=added_lines({path: workshop.files[path] for path in code}, code),
        files=len(code),
        callers=len(users),
        floor=round(verdict.floor, 3),
    )


def targets_of(deletion: Deletion) -> tuple[str, ...]:
    return tuple(f"{key.path}::{key.name}" for key in deletion.feature.targets)


def added_lines(before: Mapping[str, str], after: Mapping[str, str | None]) -> int:
    patch = gold_patch(before, after).split("\n")
    return sum(line.startswith("+") and not line.startswith("+++") for line in patch)


def difficulty(facts: Deleted, num_tests: int) -> str:
    """From what can be counted, before anyone has tried: how much is to be written, in how many places."""
    if facts.files > 1 or facts.lines >= HARD_LINES:
        return "hard"
    gentle = facts.lines < EASY_LINES and len(facts.functions) == 1 and facts.level != "gone"
    return "easy" if gentle and num_tests <= 10 else "normal"
