"""Stored work read for mistakes: a run folder, or a file of any agent's trajectories. Nothing is trained."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.signals.feedback.rules import RULES, Rule, read_all
from offbook.signals.trajectory import with_siblings
from offbook.signals.trajectory.formats import read_trajectories
from offbook.types import Feedback, OffbookError, Rollout, Task


@dataclass(slots=True)
class Found:
    rollout: Rollout
    feedback: Feedback
    source: str
    siblings: Sequence[Rollout] = ()


@dataclass(slots=True)
class Stored:
    """The rollouts of one run folder or file."""

    source: str
    folder: RunFolder | None  # None for a file
    rollouts: list[Rollout] = field(default_factory=list)
    unreadable: int = 0

    def setting(self, section: str, name: str, default: Any) -> Any:
        """Of a run's configuration, which an older or newer offbook may have written."""
        if self.folder is None:
            return default
        return tomllib.loads(self.folder.config_file.read_text()).get(section, {}).get(name, default)

    def last_checkpoint(self) -> str:
        """Nothing where there is none."""
        with suppress(OffbookError):
            return str(latest_checkpoint(self.folder)) if self.folder else ""
        return ""


def stored_in(paths: list[Path]) -> list[Stored]:
    """All of them, each once. No rollout of a file has the name of one that is read before it."""
    names: set[str] = set()
    sources = []
    for number, path in enumerate(paths):
        if path.resolve() in map(Path.resolve, paths[:number]):
            raise OffbookError(f"{path} is given twice")
        sources.append(stored_at(path, names))
        names.update(rollout.id for rollout in sources[-1].rollouts)
    return sources


def stored_at(path: Path, names: Collection[str] = ()) -> Stored:
    """One sentence if there is nothing to read. `names` are what rollouts of a file cannot be called."""
    if path.is_dir():
        folder = RunFolder.open(path)
        stored = Stored(str(path), folder)
        for step in folder.steps():
            rollouts, unreadable = folder.rollouts(step)
            stored.rollouts += rollouts
            stored.unreadable += unreadable
        if not stored.rollouts:
            raise OffbookError(f"{path} has no rollouts that can be read yet")
        return stored
    if not path.exists():
        raise OffbookError(f"there is no {path}; give a run folder, or a file of trajectories")
    loaded = read_trajectories(path)
    # Files often name several attempts by the task alone. The first one keeps its name if no other source has it.
    own = {rollout.id for rollout in loaded.rollouts}
    taken = set(names)
    for rollout in loaded.rollouts:
        numbered = (f"{rollout.id}#{number}" for number in count(2))
        if rollout.id in taken:
            rollout.id = next(id for id in numbered if id not in taken | own)
        taken.add(rollout.id)
    return Stored(str(path), None, loaded.rollouts, loaded.unreadable)


def by_rules(
    stored: Stored,
    tasks: Mapping[str, Task],
    progress: Callable[[float], None] = lambda share: None,
    rules: Mapping[str, Rule] = RULES,
) -> list[Found]:
    """Every message that broke a rule, with its hint. `tasks` are by id, as far as they are at hand."""
    found = []
    for number, (rollout, siblings) in enumerate(with_siblings(stored.rollouts), 1):
        for target in read_all(rollout, tasks.get(rollout.task), known=rules, siblings=siblings):
            hint = rules[target.rule].hint(rollout.tools)
            found.append(Found(rollout, Feedback(target, hint), stored.source, siblings))
        progress(number / len(stored.rollouts))
    return found


def grouped(found: list[Found]) -> dict[str, list[Found]]:
    """By rule, the most frequent one first."""
    counts = Counter(one.feedback.target.rule for one in found)
    return {rule: [one for one in found if one.feedback.target.rule == rule] for rule, _ in counts.most_common()}


def num_rollouts(found: list[Found]) -> int:
    return len({(one.source, one.rollout.id) for one in found})


def spread_out(found: list[Found], limit: int) -> Iterator[Found]:
    """At most `limit` of each rule, from the first to the last."""
    for of_rule in grouped(found).values():
        most = min(limit, len(of_rule))
        yield from (of_rule[len(of_rule) * number // most] for number in range(most))
