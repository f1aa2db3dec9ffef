"""Feature-deletion tasks for the pocket model: drafted by the thousand, or verified and written as task folders.

The toolset differs from task to task, so that calling a tool which another task had is a mistake the model can make.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from offbook.runfolder import whole_folder
from offbook.sandbox import BoxSpec
from offbook.taskgen.delete.delete import delete_function
from offbook.taskgen.perturb import computed
from offbook.taskgen.pocket.functions import Function, evaluate
from offbook.taskgen.pocket.repos import Module, Repository, Split, make_repository
from offbook.taskgen.twins import only, trial_of
from offbook.tasks.folder import Contents, places, write_files, write_task
from offbook.tasks.perturbed import Case
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_box
from offbook.types import OffbookError, Suite, Task

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
FINDING_TOOLS = ((), ("search_codebase",), ("list_dir",), ("search_codebase", "list_dir"))


@dataclass(frozen=True)
class Draft:
    """A task that nobody has verified and that is on no disk."""

    gold: Repository  # before the deletion
    module: Module
    function: Function
    instruction: str
    tools: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.gold.name}-{self.function.name}"

    @property
    def repository(self) -> str:
        return self.gold.name

    @property
    def path(self) -> str:
        return self.gold.path(self.module.name)

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return self.gold.tests_of(self.module, self.function)

    @cached_property
    def files(self) -> dict[str, str]:
        """What the agent sees."""
        return self.gold.without(self.module, self.function)

    @property
    def old(self) -> str:
        """What an edit of `path` has to replace ..."""
        return self.function.stub

    @property
    def new(self) -> str:
        """... and what it should put there."""
        return self.function.body


def draft_tasks(seed: int, count: int, split: Split) -> Iterator[Draft]:
    """Other drafts than those that `make_pocket_tasks` verifies, whatever the seeds."""
    rng = random.Random(f"draft {split} {seed}")
    return itertools.islice(itertools.chain.from_iterable(_drafts_by_repository(rng, split)), count)


def _drafts_by_repository(rng: random.Random, split: Split) -> Iterator[list[Draft]]:
    return (_draft_from(rng, make_repository(rng, split, number)) for number in itertools.count())


def _draft_from(rng: random.Random, repository: Repository) -> list[Draft]:
    functions = [(module, function) for module in repository.modules for function in module.functions]
    return [
        Draft(
            repository,
            module,
            function,
            rng.choice(INSTRUCTIONS).format(name=function.name, path=repository.path(module.name)),
            (*rng.choice(READING_TOOLS), "edit_file", *rng.choice(FINDING_TOOLS), "finish"),
        )
        for module, function in rng.sample(functions, TASKS_PER_REPOSITORY)
    ]


async def make_pocket_tasks(
    root: Path, seed: int, num_train: int, num_heldout: int, on_progress: Callable[[float], None]
) -> list[str]:
    """Verified tasks in root/train and root/heldout. `root` appears when all are there, so it is never half made.

    `on_progress` is told the share that is done. Returned are the drafts that did not behave as drafted, and how.
    """
    if root.exists():
        raise OffbookError(f"{root} exists already; remove it to make its tasks again")
    num_made = 0

    def made_one() -> None:
        nonlocal num_made
        num_made += 1
        on_progress(num_made / (num_train + num_heldout))

    with whole_folder(root) as part:
        discarded = await _make_split(part / "train", seed, "train", num_train, made_one)
        discarded += await _make_split(part / "heldout", seed, "heldout", num_heldout, made_one)
    return discarded


async def _make_split(folder: Path, seed: int, split: Split, num_tasks: int, made_one: Callable[[], None]) -> list[str]:
    folder.mkdir(parents=True)
    repositories = _drafts_by_repository(random.Random(f"task {split} {seed}"), split)
    num_made, discarded = 0, list[str]()
    while num_made < num_tasks:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(_verify(drafts, folder))
                for drafts in itertools.islice(repositories, REPOSITORIES_AT_ONCE)
            ]
        for verified, refused in (job.result() for job in running):
            discarded += refused
            for task, contents in verified[: num_tasks - num_made]:
                write_task(task, contents)
                num_made += 1
                made_one()
        if len(discarded) > num_tasks:  # then it is not the drafts
            raise OffbookError(f"the pocket tasks cannot be verified on this machine: {discarded[-1]}")
    return discarded


async def _verify(drafts: Sequence[Draft], folder: Path) -> tuple[list[tuple[Task, Contents]], list[str]]:
    """The drafts of one repository that behave as drafted, as tasks for `folder`, and why the others do not."""
    repository = drafts[0].gold
    hidden_tests = {path: repository.files[path] for path in repository.test_files}
    data = {path: text.encode() for path, text in hidden_tests.items()}
    needing = [test for draft in drafts for test in draft.fail_to_pass]
    trial = trial_of(data, needing, needing, {}, random.Random(repository.name), variants=1)
    *tried, gold = await _run(repository.files, [*trial.rounds, Round(repository.test_files)])
    if gold.failed or gold.broken or not gold.passed:
        why = f"the tests of {repository.name} do not pass before the deletion: {_last_words(gold)}"
        return [], [why] * len(drafts)
    # What trivial bodies do is known: the tests of these functions are written so that all of them fail.
    twins = trial.usable(tried, gold.passed)
    verified, refused = list[tuple[Task, Contents]](), list[str]()
    for draft in drafts:
        tree = delete_function(repository.files, draft.path, draft.function.name, draft.fail_to_pass)
        (run,) = await _run({**tree, **hidden_tests}, [Round(repository.test_files)])
        fail_to_pass = frozenset(draft.fail_to_pass)
        if run.failed.keys() == fail_to_pass and not run.broken and run.passed == gold.passed - fail_to_pass:
            own = only(twins, fail_to_pass)
            gold_files = {draft.path: repository.files[draft.path]}
            contents = Contents(tree, gold_files, hidden_tests, twins=own, cases=_cases([(draft.path, draft.function)]))
            verified.append((_task(draft, folder / draft.id, run), contents))
        else:
            refused.append(f"{draft.id} breaks other tests than it should: {_last_words(run)}")
    return verified, refused


def _task(draft: Draft, folder: Path, run: SuiteRun) -> Task:
    return Task(
        **places(folder),
        instruction=draft.instruction,
        test_files=draft.gold.test_files,
        id=draft.id,
        origin=draft.gold.name,
        difficulty=draft.function.difficulty,
        tools=draft.tools,
        fail_to_pass=tuple(sorted(run.failed)),
        pass_to_pass=tuple(sorted(run.passed)),
        sources=(draft.path.partition("/")[0],),
    )


def _cases(deleted: Sequence[tuple[str, Function]]) -> list[Case]:
    """Calls with changed inputs, of functions with their paths."""
    found = []
    for path, function in deleted:
        module = path.removesuffix(".py").replace("/", ".")
        calls = [Case(module, function.name, repr(([given], {})), "") for given, _ in function.examples]
        found += computed(calls, partial(evaluate, function.steps), random.Random(function.name))
    return found


def _last_words(run: SuiteRun) -> str:
    if run.timed_out:
        return f"stopped after {TIMEOUT_S:g} s"
    return (run.output.strip().splitlines() or ["no output"])[-1]


async def _run(files: Mapping[str, str], rounds: Sequence[Round]) -> list[SuiteRun]:
    with tempfile.TemporaryDirectory(prefix="offbook-verify-") as tree:
        write_files(Path(tree), files)
        async with await suite_box(Path(tree), Suite(), BoxSpec(backend="process")) as box:
            return await run_rounds(box, Suite(), rounds, TIMEOUT_S)
