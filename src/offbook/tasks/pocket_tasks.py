"""Feature-deletion tasks for the pocket model: drafted by the thousand, or verified and written as task folders.

The toolset differs from task to task, so that calling a tool which another task had is a mistake the model can make.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, islice
from pathlib import Path

from offbook.tasks.deletion import delete_feature
from offbook.tasks.folder import NewTask, write_files, write_task
from offbook.tasks.pocket_functions import Function
from offbook.tasks.pocket_repos import Module, Repository, Split, make_repository
from offbook.tasks.testrun import TestRun, run_tests
from offbook.types import OffbookError

TASKS_PER_REPOSITORY = 3
REPOSITORIES_AT_ONCE = 2
TIMEOUT_S = 60.0

INSTRUCTIONS = (
    "Bring back {name} in {path}.",
    "Write the body of {name} in {path}.",
    "Implement {name} in {path} again.",
    "{name} in {path} is missing its body. Restore it.",
    "Make {name} in {path} do what its docstring says.",
)
# Without one of these the agent cannot see the docstring. Mostly it has only one of them.
READING_TOOLS = (("read_file",), ("read_file",), ("run_command",), ("run_command",), ("read_file", "run_command"))
FINDING_TOOLS = ((), ("search",), ("list_dir",), ("search", "list_dir"))


@dataclass(frozen=True)
class Draft:
    """A task that nobody has verified and that is on no disk."""

    repository: Repository
    module: Module
    function: Function
    instruction: str
    tools: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.repository.name}-{self.function.name}"

    @property
    def path(self) -> str:
        return self.repository.path(self.module)

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return self.repository.tests_of(self.module, self.function)

    @cached_property
    def tree(self) -> dict[str, str]:
        """What the agent sees."""
        return self.repository.without(self.module, self.function)

    @property
    def gold_edit(self) -> tuple[str, str]:
        """The text to replace in `path`, and what to put there."""
        return self.function.stub, self.function.body


def draft_tasks(seed: int, num_drafts: int, split: Split) -> Iterator[Draft]:
    return islice(chain.from_iterable(_drafts_by_repository(seed, split)), num_drafts)


def _drafts_by_repository(seed: int, split: Split) -> Iterator[list[Draft]]:
    rng = random.Random(f"{split} {seed}")
    return (_draft_from(rng, make_repository(rng, split, number)) for number in count())


def _draft_from(rng: random.Random, repository: Repository) -> list[Draft]:
    functions = [(module, function) for module in repository.modules for function in module.functions]
    return [
        Draft(
            repository,
            module,
            function,
            rng.choice(INSTRUCTIONS).format(name=function.name, path=repository.path(module)),
            (*rng.choice(READING_TOOLS), "edit_file", *rng.choice(FINDING_TOOLS), "finish"),
        )
        for module, function in rng.sample(functions, TASKS_PER_REPOSITORY)
    ]


@dataclass(frozen=True, slots=True)
class PocketSummary:
    num_train: int
    num_heldout: int
    discarded: tuple[str, ...]  # the drafts that did not behave as drafted, and how


async def make_pocket_tasks(
    root: Path, seed: int, num_train: int, num_heldout: int, on_progress: Callable[[int, int], None]
) -> PocketSummary:
    """Verified tasks in root/train and root/heldout. `root` appears when all are there, so it is never half made."""
    if root.exists():
        raise OffbookError(f"{root} exists already; remove it to make its tasks again")
    unfinished = root.with_name(root.name + ".part")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    num_made = 0

    def made_one() -> None:
        nonlocal num_made
        num_made += 1
        on_progress(num_made, num_train + num_heldout)

    discarded = await _make_split(unfinished / "train", seed, "train", num_train, made_one)
    discarded += await _make_split(unfinished / "heldout", seed, "heldout", num_heldout, made_one)
    unfinished.rename(root)
    return PocketSummary(num_train, num_heldout, tuple(discarded))


async def _make_split(folder: Path, seed: int, split: Split, num_tasks: int, made_one: Callable[[], None]) -> list[str]:
    folder.mkdir(parents=True)
    repositories = _drafts_by_repository(seed, split)
    num_made, discarded = 0, list[str]()
    while num_made < num_tasks:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_verify(drafts)) for drafts in islice(repositories, REPOSITORIES_AT_ONCE)]
        for verified, refused in (task.result() for task in running):
            discarded += refused
            for task in verified[: num_tasks - num_made]:
                write_task(folder / task.id, task)
                num_made += 1
                made_one()
        if len(discarded) > num_tasks:  # something is wrong with this machine and not with the drafts
            raise OffbookError(f"the pocket tasks cannot be verified here; the last one: {discarded[-1]}")
    return discarded


async def _verify(drafts: Sequence[Draft]) -> tuple[list[NewTask], list[str]]:
    """The drafts of one repository that behave as drafted, and why the others do not."""
    repository = drafts[0].repository
    gold = await _run(repository.files, repository.test_files)
    if gold.failed or not gold.passed:
        return [], [f"{draft.id}: its tests do not pass before the deletion: {gold.output}" for draft in drafts]
    verified, refused = list[NewTask](), list[str]()
    for draft in drafts:
        tree = delete_feature(repository.files, draft.path, draft.function.name, draft.fail_to_pass)
        hidden_tests = {path: repository.files[path] for path in repository.test_files}
        run = await _run({**tree, **hidden_tests}, repository.test_files)
        fail_to_pass = frozenset(draft.fail_to_pass)
        if run.failed != fail_to_pass or run.passed != gold.passed - fail_to_pass:
            refused.append(f"{draft.id}: not exactly its tests fail after the deletion: {run.output}")
            continue
        verified.append(
            NewTask(
                instruction=draft.instruction,
                tree=tree,
                gold={draft.path: repository.files[draft.path]},
                hidden_tests=hidden_tests,
                id=draft.id,
                origin=repository.name,
                difficulty=draft.function.difficulty,
                tools=draft.tools,
                fail_to_pass=tuple(sorted(run.failed)),
                pass_to_pass=tuple(sorted(run.passed)),
            )
        )
    return verified, refused


async def _run(files: Mapping[str, str], test_files: Sequence[str]) -> TestRun:
    with tempfile.TemporaryDirectory(prefix="offbook-verify-") as tree:
        write_files(Path(tree), files)
        return await run_tests(Path(tree), test_files, TIMEOUT_S)
