"""What a side suite's task is drafted from, and how it is verified before it becomes a folder.

The repositories are those of the pocket tasks, held-out side: small, real, with tests that pass.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from offbook.pocket.repos import Repository, Spot, make_repository
from offbook.sandbox import SandboxSpec
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.delete import delete_functions
from offbook.tasks.factory.verification.mutants import add_mutants
from offbook.tasks.folder import Contents, load_task, places, write_task
from offbook.tasks.grade import grade
from offbook.types import Interrupt, OffbookError, Task

TOOLS = ("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "finish")
REQUEST_TESTS = "tests/test_request.py"
REQUEST_NODE = f"{REQUEST_TESTS}::test_request"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Scene:
    """A repository in which some functions are deleted."""

    repository: Repository
    tree: dict[str, str]  # what the agent sees
    tests: dict[str, str]  # as they were
    nodes: tuple[str, ...]  # of the tests that need none of the functions


@dataclass(frozen=True)
class SideDraft:
    """A task, and submissions that must be refused: each is a plausible way to miss what the request is about."""

    id: str
    scene: Scene
    instruction: str
    gold: dict[str, str]  # the files that the right submission changes, as it leaves them
    wrong: dict[str, dict[str, str]]
    fail_to_pass: tuple[str, ...] = ()
    request_tests: str = ""  # of what the request says beyond the repository's own tests
    stays_green: tuple[str, ...] = ()  # tests among those that the untouched tree passes
    difficulty: str = "normal"
    leave: bool = False
    interrupt: Interrupt | None = None


def draw_spots(rng: random.Random, number: int, count: int, one_step: bool = False) -> list[Spot]:
    """Functions of one repository, in modules of their own."""
    while True:
        repository = make_repository(rng, "heldout", number)
        spots = [spot for spot in repository.spots if not one_step or len(spot.function.steps) == 1]
        first_of = {spot.module.name: spot for spot in reversed(spots)}
        if len(first_of) >= count:
            return rng.sample([first_of[name] for name in sorted(first_of)], count)


def without(repository: Repository, *spots: Spot) -> Scene:
    """Deleted are these functions and, in what the agent sees, the tests that need them."""
    gone = {node for spot in spots for node in spot.nodes}
    files = delete_functions(repository.files, [(spot.path, spot.name) for spot in spots], gone)
    tests = {path: repository.files[path] for path in repository.test_files}
    nodes = [f"{path}::{name}" for path in tests for name in re.findall(r"^def (test_\w+)", tests[path], re.MULTILINE)]
    return Scene(repository, files, tests, tuple(node for node in nodes if node not in gone))


async def write_verified(folder: Path, draft: SideDraft) -> Task:
    """The folder, if it behaves as drafted; one sentence if not: then the template is wrong."""
    scene = draft.scene
    hidden = scene.tests | ({REQUEST_TESTS: draft.request_tests} if draft.request_tests else {})
    drafted = Task(
        **places(folder),
        instruction=draft.instruction,
        test_files=tuple(sorted(hidden)),
        id=draft.id,
        origin=scene.repository.name,
        difficulty=draft.difficulty,
        tools=TOOLS,
        fail_to_pass=draft.fail_to_pass,
        pass_to_pass=(*scene.nodes, *draft.stays_green),
        sources=(scene.repository.package,),
        leave=draft.leave,
        interrupt=draft.interrupt,
    )
    write_task(drafted, Contents(scene.tree, draft.gold, hidden))
    task = load_task(folder)
    spec = SandboxSpec(backend="process")
    if task.fail_to_pass:
        await add_mutants(task, spec, TIMEOUT_S)
    untouched = await grade(task, {}, spec, TIMEOUT_S)
    if untouched.invalid or untouched.missing != frozenset(draft.fail_to_pass):
        raise OffbookError(f"{draft.id}: the untouched tree fails {sorted(untouched.missing)} {untouched.invalid}")
    gold = await grade(task, gold_changes(task), spec, TIMEOUT_S)
    if not gold.solved:
        raise OffbookError(f"{draft.id}: the right submission is refused: {sorted(gold.missing)} {gold.invalid}")
    for why, files in draft.wrong.items():
        if (await grade(task, files, spec, TIMEOUT_S)).solved:
            raise OffbookError(f"{draft.id}: a submission that {why} is accepted")
    return task
