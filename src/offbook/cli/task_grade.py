"""offbook tasks grade: is somebody's solution right? By the grader, the rewards and the monitors of training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Json, Plain, progress_display, say
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.tasks.grade import Grade

BAD_INPUT = 2  # 1 says that it is not solved
MAX_SHOWN = 8  # failing tests


def grade(
    task: Annotated[Path, typer.Argument(help="A task folder.")],
    solution: Annotated[Path, typer.Argument(help="The task's tree as it was solved, or a patch for it.")],
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Whether a solution is right: the reward that a rollout would get for it, the failing tests, what monitors find.
    Exits with 0 if it is solved, with 1 if not, and with 2 if that cannot be said."""
    from offbook.tasks import load_task

    with _as_bad_input(), progress_display(plain) as progress:
        loaded = load_task(task)
        progress("grading", 0.0)
        rollout, result = asyncio.run(_scored(loaded, _changes(loaded, solution)))
        progress("grading", 1.0)
    facts = _facts(loaded, rollout, result)
    print(json.dumps(facts)) if as_json else _show(facts)
    if not rollout.solved:
        raise typer.Exit(1)


@contextmanager
def _as_bad_input() -> Iterator[None]:
    try:
        yield
    except OffbookError as error:
        error.exit_code = BAD_INPUT
        raise


def _changes(task: Task, solution: Path) -> dict[str, str | None]:
    """Path -> new text, None where a file went."""
    from offbook.tasks.check import changes_by
    from offbook.tasks.git import BadPatch

    if solution.is_dir():
        return _differences(task, solution)
    if not solution.is_file():
        raise OffbookError(f"there is no folder or patch {solution}")
    try:
        patch = solution.read_bytes().decode()
    except UnicodeDecodeError:
        raise OffbookError(f"{solution} is no patch: it is no text") from None
    try:
        return changes_by(task, patch)
    except BadPatch as error:
        raise OffbookError(f"{solution} is no patch for the tree of {task.folder}: {error}") from error


def _differences(task: Task, solved: Path) -> dict[str, str | None]:
    before, after = _files(task.tree), _files(solved)
    if not any(after.get(path) == content for path, content in before.items()):
        raise OffbookError(f"{solved} has no file of the tree of {task.folder}; give the whole tree, or a patch")
    changed: dict[str, str | None] = dict.fromkeys(before.keys() - after.keys())
    new = {path: content for path, content in after.items() if before.get(path) != content}
    return changed | {path: content.decode(errors="replace") for path, content in new.items()}


def _files(tree: Path) -> dict[str, bytes]:
    """But for what nobody wrote: compiled code, and folders with a dot before their name."""
    found = {}
    for path in sorted(tree.rglob("*")):
        *folders, _ = path.relative_to(tree).parts
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in folders):
            found[path.relative_to(tree).as_posix()] = path.read_bytes()
    return found


async def _scored(task: Task, changed: dict[str, str | None]) -> tuple[Rollout, Grade | None]:
    """As a rollout that left these changes and did nothing else."""
    from offbook.agent.harness.agent import diff_of
    from offbook.core.config import load_config
    from offbook.rl.collector import Collector

    rollout = Rollout(f"{task.id}/by-hand", task.id, "by-hand", task.tools, stop="finish", changed=changed)
    rollout.diff = diff_of(task, changed)
    result = await Collector(load_config([], {}), None).scored(task, rollout)
    if rollout.fault:
        raise OffbookError(f"it could not be graded: {rollout.fault}")
    return rollout, result


def _facts(task: Task, rollout: Rollout, result: Grade | None) -> dict[str, Any]:
    from offbook.tasks.check import why_refused
    from offbook.tasks.grade import counted

    why = "" if rollout.solved else "a finding takes the reward" if rollout.flags else ""
    if result is not None and not result.solved:
        why = why_refused(result)
    elif result is None and not task.script and not any(counted(task, path) for path in rollout.changed):
        why = "it changes no file that is graded"
    return {
        "id": task.id,
        "solved": rollout.solved,
        "reward": rollout.reward.total,
        "parts": rollout.reward.parts,
        "weights": rollout.reward.weights,
        "why": why,
        "failing": sorted(result.missing) if result else [],
        "flags": [asdict(flag) for flag in rollout.flags],
    }


def _show(facts: dict[str, Any]) -> None:
    from offbook.signals.monitors.rules import KINDS

    why = f" ({facts['why']})" if facts["why"] else ""
    parts = ", ".join(
        f"{name} {value:g}" + (f" x {weight:g}" if (weight := facts["weights"].get(name, 1.0)) != 1 else "")
        for name, value in facts["parts"].items()
    )
    say(f"{facts['id']}: {'solved' if facts['solved'] else 'not solved'}{why}")
    say(f"reward {facts['reward']:g}: {parts}")
    if failing := facts["failing"]:
        say(f"failing ({len(failing)}):")
        for test in failing[:MAX_SHOWN]:
            say(f"  {test}")
        if len(failing) > MAX_SHOWN:
            say(f"  and {len(failing) - MAX_SHOWN} more; --json has all")
    for flag in facts["flags"]:
        say(f"finding {flag['kind']}: {KINDS.get(flag['kind'], 'found by a model')} ({flag['evidence']})")
