"""Feature-deletion tasks for small models: drafted by the thousand, or verified and written as task folders.

`pocket` tasks lack one function, `pocket-long` tasks several, over several files, and keep the first test of each, so
that a test run says what is left to do. The toolset differs from task to task, so that calling a tool which another
task had is a mistake the model can make.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from offbook.core.runfolder import whole_folder
from offbook.pocket.repos import LONG, MORE, SHORT, WORDS, Repository, Split, Spot, evaluate, make_repository
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.types import last_words
from offbook.tasks.factory.verification.blanks import blank_of, only, reported
from offbook.tasks.factory.verification.perturb import computed
from offbook.tasks.folder import Contents, places, write_files, write_task
from offbook.tasks.perturbed import Apart, Case
from offbook.tasks.suite import Round, SuiteRun, run_rounds, suite_sandbox
from offbook.types import MachineFault, OffbookError, Suite, Task

TASKS_PER_REPOSITORY = 3
REPOSITORIES_AT_ONCE = max(2, os.cpu_count() or 2)
TIMEOUT_S = 60.0
TEST_COMMAND = "python -m pytest"  # with the repository's own settings


@dataclass(frozen=True)
class Level:
    """Number of missing functions per task. Tasks with one are short."""

    fewest: int = 1
    most: int = 1

    @property
    def is_long(self) -> bool:
        return self.most > 1


SHORT_LEVEL = Level()
LONG_LEVEL = Level(4, 6)
FUNCTIONS = range(2, 11)  # that a long task may lack: the smallest repository has ten


def level_named(source: str) -> Level | None:
    """The level of `pocket`, `pocket-long`, `pocket-long-5` (functions) or `pocket-long-3-8`; None for other names."""
    found = re.fullmatch(r"pocket(-long(?:-(\d+)(?:-(\d+))?)?)?", source)
    if found is None:
        return None
    is_long, fewest, most = found.groups()
    if not fewest:
        return LONG_LEVEL if is_long else SHORT_LEVEL
    level = Level(int(fewest), int(most or fewest))
    if not FUNCTIONS[0] <= level.fewest <= level.most <= FUNCTIONS[-1]:
        raise OffbookError(
            f"{source}: a long task lacks {FUNCTIONS[0]} to {FUNCTIONS[-1]} functions, as in pocket-long-3-8"
        )
    return level


@dataclass(frozen=True)
class Draft:
    """An unverified task in memory."""

    gold: Repository  # before the deletion
    spots: tuple[Spot, ...]  # what is deleted, file by file
    instruction: str
    tools: tuple[str, ...]
    is_long: bool = False

    @property
    def id(self) -> str:
        return self.gold.name if self.is_long else f"{self.gold.name}-{self.spots[0].name}"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(spot.path for spot in self.spots))

    @property
    def difficulty(self) -> str:
        return "long" if self.is_long else self.spots[0].function.difficulty

    @property
    def test_command(self) -> str:
        return TEST_COMMAND if self.is_long else ""

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node for spot in self.spots for node in spot.nodes))

    @property
    def unseen(self) -> tuple[str, ...]:
        """The tests that the agent does not see."""
        return tuple(node for node in self.fail_to_pass if not self.is_long or node.endswith(MORE))

    @cached_property
    def files(self) -> dict[str, str]:
        """What the agent sees."""
        return self.gold.without([spot.function for spot in self.spots], self.unseen)


def draft_tasks(seed: int, count: int, split: Split, level: Level = SHORT_LEVEL) -> Iterator[Draft]:
    """Drafts that are disjoint from those of `make_pocket_tasks` for all seeds."""
    rng = random.Random(f"draft {split} {seed}")
    return itertools.islice(itertools.chain.from_iterable(_drafts_by_repository(rng, split, level)), count)


def _drafts_by_repository(rng: random.Random, split: Split, level: Level) -> Iterator[list[Draft]]:
    for number in itertools.count():
        repository = make_repository(rng, split, number, LONG if level.is_long else SHORT)
        if level.is_long:
            yield [_long_draft(rng, repository, level)]
            continue
        drafts = []
        for spot in rng.sample(repository.spots, TASKS_PER_REPOSITORY):
            instruction = rng.choice(WORDS["instructions"]).format(name=spot.name, path=spot.path)
            reading = rng.choice(WORDS["reading_tools"])
            tools = (*reading, "edit_file", *rng.choice(WORDS["finding_tools"]), "finish")
            drafts.append(Draft(repository, (spot,), instruction, tools))
        yield drafts


def _long_draft(rng: random.Random, repository: Repository, level: Level) -> Draft:
    """One instruction for several functions, grouped by file."""
    count = rng.randint(level.fewest, level.most)
    everything = repository.spots
    spots = tuple(everything[place] for place in sorted(rng.sample(range(len(everything)), count)))
    by_file: dict[str, list[str]] = {}
    for spot in spots:
        by_file.setdefault(spot.path, []).append(spot.name)
    functions = ", ".join(f"{' and '.join(names)} in {path}" for path, names in by_file.items())
    instruction = rng.choice(WORDS["long_instructions"]).format(functions=functions, files=" and ".join(by_file))
    reading = rng.choice(WORDS["reading_tools"])
    testing = () if "run_command" in reading else ("run_tests",)
    tools = (*reading, "edit_file", *rng.choice(WORDS["finding_tools"]), *testing, "finish")
    return Draft(repository, spots, instruction, tools, is_long=True)


async def make_pocket_tasks(
    root: Path,
    seed: int,
    num_train: int,
    num_heldout: int,
    on_progress: Callable[[float], None],
    level: Level = SHORT_LEVEL,
) -> list[str]:
    """Write verified tasks to root/train and root/heldout. `root` is created atomically.

    `on_progress` gets the share that is done. Returns the drafts that failed verification, with reasons.
    """
    if root.exists():
        raise OffbookError(f"{root} exists already; remove it to make its tasks again")
    discarded: list[str] = []
    num_made = 0
    sizes: dict[Split, int] = {"train": num_train, "heldout": num_heldout}
    with whole_folder(root) as part:
        for split, num_tasks in sizes.items():
            (part / split).mkdir(parents=True)
            repositories = _drafts_by_repository(random.Random(f"task {split} {seed}"), split, level)
            left = num_tasks
            while left:
                drafted = itertools.islice(repositories, REPOSITORIES_AT_ONCE)
                async with asyncio.TaskGroup() as group:
                    running = [group.create_task(verify(drafts, part / split)) for drafts in drafted]
                for verified, refused in (job.result() for job in running):
                    discarded += refused
                    for task, contents in verified[:left]:
                        write_task(task, contents)
                        left -= 1
                        num_made += 1
                        on_progress(num_made / (num_train + num_heldout))
                if len(discarded) > num_train + num_heldout:  # then it is not the drafts
                    raise OffbookError(f"the pocket tasks cannot be verified on this machine: {discarded[-1]}")
    return discarded


async def verify(drafts: Sequence[Draft], folder: Path) -> tuple[list[tuple[Task, Contents]], list[str]]:
    """Run the tests of one repository's drafts. Returns verified tasks for `folder`, and why others were refused."""
    repository = drafts[0].gold
    tests = repository.test_files
    hidden_tests = {path: repository.files[path] for path in tests}
    data = {path: text.encode() for path, text in hidden_tests.items()}
    needing = list(dict.fromkeys(test for draft in drafts for test in draft.fail_to_pass))
    blank = blank_of(data, needing)
    rounds = [blank.round, Round(tests)]
    for draft in drafts:
        changed = {path: draft.files[path] for path in draft.paths}
        rounds.append(Round(tests, changes=changed))
    try:
        # All in one sandbox, because the code is our own: Python and pytest start once.
        with tempfile.TemporaryDirectory(prefix="offbook-verify-") as tree:
            write_files(Path(tree), repository.files)
            async with await suite_sandbox(Path(tree), Suite(), SandboxSpec(backend="process")) as sandbox:
                blanked, gold, *runs = await run_rounds(sandbox, Suite(), rounds, TIMEOUT_S)
    except MachineFault as error:
        return [], [str(error)] * len(drafts)
    if gold.failed or gold.broken or not gold.passed:
        why = f"the tests of {repository.name} do not pass before the deletion: {_why(gold)}"
        return [], [why] * len(drafts)
    blanks = reported(blank, blanked, needing)
    verified = []
    refused = []
    for draft, run in zip(drafts, runs, strict=True):
        fail_to_pass = frozenset(draft.fail_to_pass)
        if run.failed.keys() == fail_to_pass and not run.broken and run.passed == gold.passed - fail_to_pass:
            cases = []  # calls of the deleted functions with changed inputs
            for spot in draft.spots:
                function = spot.function
                module = spot.path.removesuffix(".py").replace("/", ".")
                calls = [Case(module, function.name, repr(([given], {})), "") for given, _ in function.examples]
                cases += computed(calls, partial(evaluate, function.steps), random.Random(function.name))
            contents = Contents(
                draft.files,
                {path: repository.files[path] for path in draft.paths},
                hidden_tests,
                mutants=only(blanks, fail_to_pass, data),
                apart=Apart(tuple(cases)),
            )
            task = Task(
                **places(folder / draft.id),
                instruction=draft.instruction,
                test_files=tests,
                id=draft.id,
                origin=repository.name,
                difficulty=draft.difficulty,
                tools=draft.tools,
                test_command=draft.test_command,
                fail_to_pass=tuple(sorted(run.failed)),
                pass_to_pass=tuple(sorted(run.passed)),
                sources=(repository.package,),
            )
            verified.append((task, contents))
        else:
            refused.append(f"{draft.id} breaks other tests than it should: {_why(run)}")
    return verified, refused


def _why(run: SuiteRun) -> str:
    return f"stopped after {TIMEOUT_S:g} s" if run.timed_out else last_words(run.output)
