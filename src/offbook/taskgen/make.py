"""One feature becomes one task folder, or is refused with the reason."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.copies import shared_code
from offbook.sandbox import BoxSpec
from offbook.taskgen.delete.delete import delete
from offbook.taskgen.delete.visible import without_tests
from offbook.taskgen.instruct import Rewrite, instructions
from offbook.taskgen.nouns import Deletion, Feature, Level
from offbook.taskgen.prepare.prepare import PrepareSettings
from offbook.taskgen.proposals import Propose
from offbook.taskgen.verify import Verdict, VerifySettings, verify
from offbook.taskgen.workshop import Workshop, hidden_of, product_of, requirements_of
from offbook.tasks.check import check_gold
from offbook.tasks.folder import Contents, load_task, places, write_task
from offbook.tasks.git import gold_patch, single_commit
from offbook.tasks.twins import Twins, write_twins
from offbook.types import Deleted, Task

TOOLS = ("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "run_tests", "todo", "finish")
TEST_COMMAND = "python -m pytest -q -p no:cacheprovider -o addopts="
EASY_LINES, HARD_LINES = 12, 40
COPIED = "its code is in another place too"


@dataclass(frozen=True, slots=True)
class MakeSettings:
    """How tasks are made of repositories."""

    level: str = "hybrid"  # one of LEVELS, or "mix"
    wording: str = "normal"
    max_tasks: int = 0  # of each repository; 0 is no limit
    jobs: int = field(default_factory=lambda: (os.cpu_count() or 1) + 1)  # candidates at a time: each waits for a box
    heldout: float = 0.2  # share of the repositories
    rewrite: Rewrite | None = None
    propose: Propose | None = None
    num_proposals: int = 0  # that a model is asked for, of each repository
    prepare: PrepareSettings = field(default_factory=PrepareSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)


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
    twins: int = 0  # tests that have one with another value or error
    bare: int = 0  # tests that need the feature and have none
    seconds: float = 0.0
    test_s: float = 0.0


async def make_task(
    workshop: Workshop, feature: Feature, level: Level, folder: Path, spec: BoxSpec, settings: MakeSettings
) -> Outcome:
    deletion = await asyncio.to_thread(delete, workshop.files, workshop.symbols, feature, level)
    return await task_from(workshop, deletion, folder, spec, settings)


async def task_from(
    workshop: Workshop, deletion: Deletion, folder: Path, spec: BoxSpec, settings: MakeSettings
) -> Outcome:
    """`folder` is written only if all went well. The gold patch is tried on the folder as it is."""
    began = time.monotonic()
    verdict = Verdict()
    feature = deletion.feature
    outcome = Outcome(feature.id, workshop.repository.name, feature.kind, deletion.level)

    def ended(refused: str, evidence: str = "") -> Outcome:
        seconds = time.monotonic() - began
        return replace(outcome, refused=refused, evidence=evidence, seconds=seconds, test_s=verdict.test_s)

    if not deletion.removed:
        return ended("there is nothing to delete")
    leaks = await asyncio.to_thread(workshop.leaks, deletion, deletion.files, library=True)
    if leaks:
        return ended(COPIED, str(leaks[0]))
    verdict = await verify(workshop, deletion, spec, settings.verify)
    if verdict.refused:
        return ended(verdict.refused, verdict.evidence)
    roots = workshop.repository.import_roots
    visible = await asyncio.to_thread(without_tests, workshop.files, verdict.fail_to_pass, deletion, roots)
    tree: dict[str, str | None] = {**visible, **deletion.files}
    leaks = await asyncio.to_thread(workshop.leaks, deletion, tree, library=False)  # which was searched before
    if leaks:
        return ended(COPIED, str(leaks[0]))
    words = instructions(feature, workshop.symbols, deletion, verdict.fail_to_pass)
    for text in words.values():
        if why := shared_code(text, deletion.removed):
            return ended("the instruction gives it away", why)
    words |= await settings.rewrite(words, deletion) if settings.rewrite else {}
    draft = folder.with_name(f".{folder.name}")  # a folder that is not complete is hidden
    task = task_of(workshop, deletion, verdict, draft, words[settings.wording])
    shutil.rmtree(draft, ignore_errors=True)
    contents = Contents(
        tree=tree,
        gold={path: workshop.files[path] for path in deletion.files},
        hidden_tests=hidden_of(workshop.repository),
        base=workshop.repository.tree,
        requirements=requirements_of(workshop.repository),
        instructions=words,
        removed=deletion.removed,
        twins=verdict.twins,
        cases=verdict.cases,
    )
    writing = asyncio.ensure_future(asyncio.to_thread(_write, task, contents))
    try:
        await asyncio.shield(writing)
        why = await check_gold(load_task(draft), spec)  # without it the tests were seen red
        if why and verdict.twins.twins:  # tests that do not bear to be run twice
            write_twins(draft / "tests", Twins())
            verdict = replace(verdict, twins=Twins())
            why = await check_gold(load_task(draft), spec)
        if why:
            return ended("the finished task does not hold", why)
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
        floor=verdict.floor,
        exact=verdict.exact,
        twins=len(verdict.twins.tests),
        bare=len({verdict.twins.test_of(node) for node in task.fail_to_pass} - verdict.twins.tests),
    )


def _write(task: Task, contents: Contents) -> None:
    write_task(task, contents)
    single_commit(task.tree)


def task_of(workshop: Workshop, deletion: Deletion, verdict: Verdict, folder: Path, instruction: str) -> Task:
    repository, facts = workshop.repository, _deleted(workshop, deletion, verdict)
    return Task(
        **places(folder),
        instruction=instruction,
        id=deletion.feature.id,
        test_files=repository.test_files,
        fail_to_pass=verdict.fail_to_pass,
        pass_to_pass=verdict.pass_to_pass,
        tools=TOOLS,
        origin=f"{repository.name}=={repository.version}",
        difficulty=difficulty(facts, len(verdict.fail_to_pass)),
        test_command=TEST_COMMAND,
        suite=repository.suite,
        sources=product_of(repository),
        deleted=facts,
    )


def _deleted(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Deleted:
    feature, symbols = deletion.feature, workshop.symbols
    users = {user for key in feature.targets for user in symbols.callers.get(key, ())} - {*feature.functions}
    code = {path: text for path, text in deletion.files.items() if path.endswith(".py")}
    patch = gold_patch({path: workshop.files[path] for path in code}, code)
    return Deleted(
        kind=feature.kind,
        level=deletion.level,
        targets=deletion.targets,
        functions=tuple(map(str, feature.functions)),
        lines=sum(line.startswith("+") and not line.startswith("+++") for line in patch.split("\n")),
        files=len(code),
        callers=len(users),
        floor=round(verdict.floor, 3),
    )


def difficulty(facts: Deleted, num_tests: int) -> str:
    """From what can be counted, before anyone has tried: how much is to be written, in how many places."""
    if facts.files > 1 or facts.lines >= HARD_LINES:
        return "hard"
    gentle = facts.lines < EASY_LINES and len(facts.functions) == 1 and facts.level != "gone"
    return "easy" if gentle and num_tests <= 10 else "normal"
