"""Teachers of whole responses, as a run is configured: what each of them sees, and who it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.agent.chat import Chat
from offbook.agent.harness.agent import diff_of
from offbook.core.config import Config, TeachersConfig
from offbook.core.runfolder import RunFolder, read_lines
from offbook.signals.feedback.leaks import leak
from offbook.tasks.check import gold_changes
from offbook.train.algorithms import OTHER, opd_branches, opsd_branches, sdft_branches
from offbook.types import Branch, Distill, OffbookError, Rollout, Task


@dataclass(frozen=True, slots=True)
class WholeResponse:
    """Those that a run has, and what they know of its tasks."""

    settings: TeachersConfig
    chat: Chat
    tasks: Mapping[str, Task]  # by id
    positions: int  # that the model reads
    demonstrations: Mapping[str, Rollout] = field(default_factory=dict)  # by task
    _solutions: dict[str, str] = field(default_factory=dict)

    def branches(
        self, rollout: Rollout, siblings: Sequence[Rollout], counts: Counter[str]
    ) -> Iterator[tuple[int, Branch]]:
        """With the number of the segment that each is of. What cannot be shown, or does not fit, is counted."""
        settings = self.settings
        if settings.opd.weight:
            yield from opd_branches(rollout, settings.opd.weight, self._distill("opd", OTHER)).items()
        if settings.opsd.weight:
            if solution := self._solution(rollout.task):
                how = settings.opsd.weight, self._distill("opsd", settings.opsd.teacher)
                yield from self._fitting(rollout.task, opsd_branches(rollout, solution, self.chat, *how), counts)
            else:
                counts["left_out/no_solution"] += 1
        if settings.sdft.weight:
            if demonstration := self._demonstration(rollout, siblings):
                how = settings.sdft.weight, self._distill("sdft", settings.sdft.teacher)
                yield from self._fitting(rollout.task, sdft_branches(rollout, demonstration, self.chat, *how), counts)
            else:
                counts["left_out/no_demonstration"] += 1

    def _distill(self, part: str, teacher: str) -> Distill:
        return Distill(teacher=teacher, part=part, direction=self.settings.direction, cap=self.settings.token_cap)

    def _fitting(self, id: str, branches: Mapping[int, Branch], counts: Counter[str]) -> Iterator[tuple[int, Branch]]:
        """A teacher whose context was cut would have lost the task and kept its answer. Those that see what only the
        solution has are counted: what they teach may make sense with it in sight alone."""
        for number, branch in branches.items():
            if branch.end + len(branch.inserted) > self.positions:
                counts["left_out/teacher_context"] += 1
                continue
            if id in self.tasks and leak(self.chat.decode(branch.inserted), self.tasks[id]):
                counts[f"leaks/{branch.distill.part}"] += 1
            yield number, branch

    def _solution(self, id: str) -> str:
        if id not in self._solutions:
            task = self.tasks.get(id)
            try:
                self._solutions[id] = diff_of(task, gold_changes(task)) if task else ""
            except OffbookError:  # a folder of others, without one
                self._solutions[id] = ""
        return self._solutions[id]

    def _demonstration(self, rollout: Rollout, siblings: Sequence[Rollout]) -> Rollout | None:
        if self.settings.sdft.data:
            return self.demonstrations.get(rollout.task)
        return next((one for one in siblings if one.id != rollout.id and one.solved and not one.fault), None)


def whole_response(config: Config, chat: Chat, tasks: Mapping[str, Task], positions: int) -> WholeResponse | None:
    """None where the configuration has no such teacher."""
    settings = config.teachers
    if not (settings.opd.weight or settings.opsd.weight or settings.sdft.weight):
        return None
    shown = demonstrations(settings.sdft.data) if settings.sdft.weight else {}
    return WholeResponse(settings, chat, tasks, positions, shown)


def demonstrations(sources: Sequence[str]) -> dict[str, Rollout]:
    """Of each task the shortest rollout that solved it."""
    found: dict[str, Rollout] = {}
    for source in sources:
        solved = [one for one in _rollouts(Path(source)) if one.solved and not one.fault]
        if not solved:
            raise OffbookError(f"teachers.sdft.data: {source} has no rollout that solved its task")
        for rollout in solved:
            known = found.get(rollout.task)
            if known is None or rollout.usage.sampled_tokens < known.usage.sampled_tokens:
                found[rollout.task] = rollout
    return found


def _rollouts(path: Path) -> Iterator[Rollout]:
    if path.is_file():
        yield from read_lines(path, Rollout)[0]
    elif (path / "config.toml").is_file():
        folder = RunFolder.open(path)
        for step in folder.steps():
            yield from folder.rollouts(step)[0]
    else:
        raise OffbookError(f"teachers.sdft.data: {path} is neither a run folder nor a file of rollouts")
