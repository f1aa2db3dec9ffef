"""One feature becomes one task folder, or is refused with the reason."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbook.core.copies import shared_code, sketch_of
from offbook.sandbox import SandboxSpec
from offbook.tasks.check import check_gold
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.instruction.context import context_of
from offbook.tasks.factory.instruction.instruct import Rewrite, complete, instructions
from offbook.tasks.factory.instruction.needs import Needs
from offbook.tasks.factory.prepare.prepare import PrepareSettings
from offbook.tasks.factory.types import Deletion, Feature, Level
from offbook.tasks.factory.verification.verify import Verdict, VerifySettings, verify
from offbook.tasks.factory.workshop import Workshop, hidden_of, product_of, requirements_of
from offbook.tasks.folder import Contents, load_task, places, rewrite_settings, write_task
from offbook.tasks.git import gold_patch, single_commit
from offbook.tasks.shared import share
from offbook.types import Deleted, OffbookError, Task

if TYPE_CHECKING:
    from offbook.tasks.factory.records import Taken

TOOLS = ("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "run_tests", "todo", "finish")
TEST_COMMAND = "python -m pytest -q -p no:cacheprovider -o addopts="
EASY = 20  # lines, and what further files and callers count as
HARD = 60
FILE_LINES = 10
MAX_CALLERS = 10


@dataclass(frozen=True)
class MakeSettings:
    """How tasks are made of repositories."""

    level: str = "hybrid"  # one of LEVELS, or "mix"
    wording: str = "normal"
    max_tasks: int = 0  # of each repository; 0 is no limit
    # Candidates at a time: each waits for a sandbox.
    jobs: int = field(default_factory=lambda: (os.cpu_count() or 1) + 1)
    heldout: float = 0.2  # share of the repositories
    annotate: Callable[[Task], Task] | None = None  # what monitors find in the gold patch; raises where they cannot
    context: bool = False  # what an editor would show, for deletions too
    rewrite: Rewrite | None = None
    prepare: PrepareSettings = field(default_factory=PrepareSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate. `refused` is a reason out of few; the evidence is about this one."""

    id: str
    repository: str
    kind: str
    level: str  # that was asked for; the task says which came of it
    refused: str = ""
    evidence: str = ""
    lines: int = 0
    files: int = 0
    num_tests: int = 0
    sketch: tuple[int, ...] = ()  # of the deleted code (core/copies.py)


@dataclass(frozen=True)
class Shown:
    """What the agent gets to see, and the tests that it is judged by."""

    tree: Mapping[str, str | None]  # what the tree has other than the repository's
    words: Mapping[str, str]  # the request, in three lengths
    hidden: Mapping[str, str | bytes]
    needs: Needs


Show = Callable[[Workshop, Deletion, Verdict], Shown]


def shown_after(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Shown:
    """The tree after the deletion, without the tests that need what is gone."""
    visible = without_tests(workshop.files, verdict.fail_to_pass, deletion, workshop.repository.import_roots)
    tree: dict[str, str | None] = {**visible, **deletion.files}
    words = instructions(workshop.symbols, deletion, verdict.fail_to_pass)
    seen = {path: text for path, text in {**workshop.files, **tree}.items() if text is not None}
    needs = Needs(
        before=workshop.files,
        shown=seen,
        failing=verdict.fail_to_pass,
        removed=deletion.removed,
        functions=(*deletion.stubbed, *deletion.deleted),
        targets=deletion.feature.targets,
        symbols=workshop.symbols,
        examples=verdict.examples,
    )
    return Shown(tree, words, hidden_of(workshop.repository), needs)


async def make_task(
    workshop: Workshop,
    feature: Feature,
    level: Level,
    folder: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    taken: Taken | None = None,
) -> Outcome:
    deletion = await asyncio.to_thread(delete, workshop.files, workshop.symbols, feature, level)
    return replace(await task_from(workshop, deletion, folder, spec, settings, taken), level=level)


async def task_from(
    workshop: Workshop,
    deletion: Deletion,
    folder: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    taken: Taken | None = None,
    show: Show = shown_after,
) -> Outcome:
    """`folder` is written only if all went well. The gold patch is tried on the folder as it is.

    `taken` is what tasks of other repositories took away: what is nearly the same makes no task. `show` says what the
    agent sees of it.
    """
    removed = deletion.removed
    feature = deletion.feature
    sketch = sketch_of(removed.values())
    outcome = Outcome(feature.id, workshop.repository.name, feature.kind, deletion.level)
    shown: Shown
    words: dict[str, str] = {}

    def ended(refused: str, evidence: str = "") -> Outcome:
        return replace(outcome, refused=refused, evidence=evidence)

    async def objection(seen: Verdict) -> tuple[str, str] | None:
        """Whether what the agent sees and is asked gives the code away, or does not say what the tests ask for."""
        nonlocal shown
        shown = await asyncio.to_thread(show, workshop, deletion, seen)
        if leaks := await asyncio.to_thread(workshop.leaks, deletion, shown.tree):
            return "its code is in another place too", str(leaks[0])
        if not shown.words:
            return "nothing says what it is to do", ", ".join(deletion.targets)
        rewritten = await settings.rewrite(dict(shown.words), deletion) if settings.rewrite else {}
        words.update(await asyncio.to_thread(complete, {**shown.words, **rewritten}, shown.needs))
        for text in words.values():
            if why := shared_code(text, removed):
                return "the instruction gives it away", why
        lacking = shown.needs.missing()
        return lacking[0] if lacking else None

    if not removed:
        return ended("there is nothing to delete")
    verdict = await verify(workshop, deletion, spec, settings.verify, objection)
    if verdict.refused:
        return ended(verdict.refused, verdict.evidence)
    draft = folder.with_name(f".{folder.name}")  # a folder that is not complete is hidden
    task = task_of(workshop, deletion, verdict, draft, words[settings.wording])
    if settings.context or deletion.level == "release":
        task = replace(task, context=context_of(workshop, deletion, shown.tree))
    mutants = verdict.mutants
    contents = Contents(
        tree=shown.tree,
        gold={path: workshop.files[path] for path in deletion.files},
        hidden_tests=shown.hidden,
        base=workshop.repository.tree,
        requirements=requirements_of(workshop.repository),
        instructions=words,
        removed=removed,
        mutants=mutants,
        apart=verdict.apart,
    )

    def write() -> None:
        write_task(task, contents, harbor=False)
        single_commit(task.tree)

    shutil.rmtree(draft, ignore_errors=True)
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
        why = await check_gold(load_task(draft), spec)  # without it the tests were seen red
        if why:
            return ended("the finished task does not hold", why)
        blank = mutants.blank(task.fail_to_pass)
        if not mutants.tests and not blank and not verdict.apart.cases:
            return ended(
                "no test has a mutant or can be blanked, and no call was recorded",
                "every wrong answer that its tests accept would be paid",
            )
        if settings.annotate:
            try:
                rewrite_settings(settings.annotate(load_task(draft)))
            except OffbookError as error:
                return ended("no monitor can judge its gold patch", str(error))
        if taken and (other := taken.repeats(outcome.repository, sketch)):
            return ended("nearly the same as a task of another repository", other)
        share(draft, workshop.repository.tree)
        draft.rename(folder)
    finally:
        await asyncio.wait([writing])  # a thread cannot be stopped, and what it writes must go too
        shutil.rmtree(draft, ignore_errors=True)
    assert task.deleted is not None
    return replace(
        ended(""),
        lines=task.deleted.lines,
        files=task.deleted.files,
        num_tests=len(task.fail_to_pass),
        sketch=sketch,
    )


def task_of(workshop: Workshop, deletion: Deletion, verdict: Verdict, folder: Path, instruction: str) -> Task:
    repository = workshop.repository
    feature = deletion.feature
    users = {user for key in feature.targets for user in workshop.symbols.callers.get(key, ())} - {*feature.functions}
    code = {path: text for path, text in deletion.files.items() if path.endswith(".py")}
    patch = gold_patch({path: workshop.files[path] for path in code}, code)
    facts = Deleted(
        kind=feature.kind,
        level=deletion.level,
        targets=deletion.targets,
        functions=tuple(map(str, feature.functions)),
        lines=len(re.findall(r"^\+(?!\+\+)", patch, re.M)),
        files=len(code),
        callers=len(users),
        floor=round(verdict.floor, 3),
    )
    # From what can be counted before any attempt: lines to write, files they go to, functions that call them.
    num_files = len({key.path for key in feature.functions})
    effort = facts.lines + FILE_LINES * max(0, num_files - 1) + min(facts.callers, MAX_CALLERS)
    return Task(
        **places(folder),
        instruction=instruction,
        id=feature.id,
        test_files=repository.test_files,
        fail_to_pass=verdict.fail_to_pass,
        pass_to_pass=verdict.pass_to_pass,
        tools=TOOLS,
        origin=f"{repository.name}=={repository.version}",
        difficulty="easy" if effort < EASY else "normal" if effort < HARD else "hard",
        test_command=TEST_COMMAND,
        suite=repository.suite,
        sources=product_of(repository),
        deleted=facts,
    )
