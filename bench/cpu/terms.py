"""Tasks with a word that only a team knows: "Return value plus the tare." How much that is stands in no file.

The tests know it, so does the solution, and whoever has solved such a task. In a family, which is a package, it is the
same for all tasks: what is learned from some holds for the others. Where each task has its own it can be known of a
task, and never of another. With one word for all, families contradict one another; with a word of its own for each they
do not.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from offbook.agent.chat import Chat
from offbook.agent.harness import Harness
from offbook.core.runfolder import dump_lines, whole_folder, write_atomic
from offbook.pocket.demonstrations import HARNESS, episodes
from offbook.pocket.repos import PACKAGES, Caller, Function, Module, Repository, Split, Spot
from offbook.pocket.script import Habits
from offbook.pocket.tasks import Draft, draft_tasks, verify
from offbook.tasks.folder import write_task
from offbook.types import Reward, Rollout

WORDS = ("the tare", "the toll", "the levy")
CONSTANTS = range(2, 10)
FAMILIES = PACKAGES[: len(WORDS)]
AT_ONCE = 4
EXPERT = Habits(unknown_tool=0, malformed=0, reread=0, edit_tests=0, explore=0)
Amount = Callable[[Draft, random.Random], int]


@dataclass(frozen=True)
class Named(Function):
    """Whose docstring has the word in the place of the constant."""

    word: str = WORDS[0]

    @property
    def doc(self) -> str:
        step = self.steps[0]
        return f"Return {step.op.phrase.format(a=self.argument, k=self.word)}."


def amounts(seed: int) -> dict[str, int]:
    """Of each family, no two of them the same."""
    return dict(zip(FAMILIES, random.Random(f"tare {seed}").sample(CONSTANTS, len(FAMILIES)), strict=True))


def of_family(seed: int) -> Amount:
    known = amounts(seed)
    return lambda draft, rng: known[draft.gold.package]


def of_task(draft: Draft, rng: random.Random) -> int:
    return rng.choice(CONSTANTS)


def named_drafts(
    seed: int, split: Split, packages: Collection[str], amount: Amount, own_words: bool = False
) -> Iterator[Draft]:
    """Without end. Of functions with two steps, or with a constant that may not be any, there are none."""
    rng, found = random.Random(f"named {split} {seed}"), draft_tasks(seed, 1_000_000, split)
    for draft in found:
        function = draft.spots[0].function
        if draft.gold.package in packages and len(function.steps) == 1 and function.steps[0].op.constants == CONSTANTS:
            word = WORDS[PACKAGES.index(draft.gold.package) % len(WORDS) if own_words else 0]
            yield _with_word(draft, amount(draft, rng), word)


def _with_word(draft: Draft, constant: int, word: str) -> Draft:
    spot = draft.spots[0]
    step = replace(spot.function.steps[0], constant=constant)
    named = Named(spot.function.name, spot.function.argument, (step,), word=word)

    def of(function: Function) -> Function:
        return named if function == spot.function else function

    old = draft.gold
    modules = tuple(Module(one.name, tuple(of(function) for function in one.functions)) for one in old.modules)
    callers = tuple(Caller(one.name, one.argument, of(one.outer), of(one.inner)) for one in old.callers)
    gold = Repository(old.name, old.package, modules, old.callers_module, callers)
    module = next(one for one in modules if one.name == spot.module.name)
    return replace(draft, gold=gold, spots=(Spot(gold, module, named),))


def make_named_tasks(
    root: Path, seed: int, num_train: int, num_heldout: int, amount: Amount, own_words: bool = False
) -> None:
    """Verified, as many of each family."""
    with whole_folder(root) as part:
        for split, count in cast(dict[Split, int], {"train": num_train, "heldout": num_heldout}).items():
            (part / split).mkdir()
            for family in FAMILIES:
                drafts = named_drafts(seed, split, [family], amount, own_words)
                asyncio.run(_write(part / split, drafts, count // len(FAMILIES)))


def drafts_of(root: Path, seed: int, amount: Amount, own_words: bool = False) -> list[Draft]:
    """Of the tasks to train on that were made so."""
    wanted, found = {one.name for one in (root / "train").iterdir()}, list[Draft]()
    for family in FAMILIES:
        count = sum(name.startswith(f"{family}-") for name in wanted)
        drafts = (one for one in named_drafts(seed, "train", [family], amount, own_words) if one.id in wanted)
        found += itertools.islice(drafts, count)
    return found


async def _write(folder: Path, drafts: Iterator[Draft], count: int) -> None:
    taken: set[str] = set()
    while len(taken) < count:
        batch = [draft for draft in (next(drafts) for _ in range(AT_ONCE)) if draft.id not in taken]
        for verified, _ in await asyncio.gather(*(verify([draft], folder) for draft in batch)):
            for task, contents in verified[: count - len(taken)]:
                write_task(task, contents)
                taken.add(task.id)


def write_episodes(
    path: Path,
    chat: Chat,
    drafts: list[Draft],
    seed: int,
    habits: Habits = Habits(),  # noqa: B008
    harness: Harness = HARNESS,
) -> None:
    """Of a script that knows the amount. Those that end with the solution in place have solved their task."""

    async def run() -> list[Rollout]:
        rng = random.Random(f"episodes {seed}")
        return [one async for one in episodes(chat, drafts, rng, habits, harness)]

    rollouts = asyncio.run(run())
    for number, (draft, rollout) in enumerate(zip(drafts, rollouts, strict=True)):
        rollout.id, rollout.task, rollout.group = f"script/{number}", draft.id, draft.id
        is_solved = rollout.changed == {path: draft.gold.files[path] for path in draft.paths}
        rollout.reward = Reward({"outcome": float(is_solved)})
    write_atomic(path, dump_lines(rollouts))
