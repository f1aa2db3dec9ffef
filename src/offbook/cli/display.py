"""Rollouts as they go, for people or for logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from offbook.cli.options import console, is_plain, say

if TYPE_CHECKING:
    from offbook.rl.collector import OnRollout
    from offbook.types import Rollout

ROWS = 20  # of the table
LINES = 10  # of progress, when plain
COLUMNS = ("rollout", "turns", "calls", "invalid", "tokens", "state", "last call")


@contextmanager
def rollout_display(label: str, total: int, plain: bool, each: bool = False) -> Iterator[OnRollout]:
    """A table of the newest, and a bar with the score so far and the time that is left.

    When plain: `each` that is over in a line of its own, or ten lines of the score so far.
    """
    if is_plain(plain):
        yield _lines() if each else _scores(label, total)
        return
    seen: dict[str, tuple[Rollout, bool]] = {}
    score = TextColumn("{task.fields[score]}")
    numbers = (MofNCompleteColumn(), score, TimeElapsedColumn(), TimeRemainingColumn())
    bars = Progress(TextColumn("{task.description}"), BarColumn(), *numbers, console=console)
    bar = bars.add_task(label, total=total, score="")
    with Live(bars, console=console, refresh_per_second=4) as live:

        def update(rollout: Rollout, over: bool) -> None:
            seen[rollout.id] = rollout, over
            finished = [rollout for rollout, is_over in seen.values() if is_over]
            bars.update(bar, completed=len(finished), score=_score(finished))
            live.update(Group(_table(seen), bars))

        yield update


def _lines() -> OnRollout:
    header = iter([COLUMNS])

    def line(rollout: Rollout, over: bool) -> None:
        for cells in (*header, _cells(rollout, over)) if over else ():
            say("  ".join(cells), to=console)

    return line


def _scores(label: str, total: int) -> OnRollout:
    finished: list[Rollout] = []

    def line(rollout: Rollout, over: bool) -> None:
        finished.extend([rollout] if over else [])
        done = len(finished)
        if over and (done == total or done * LINES // total > (done - 1) * LINES // total):
            say(f"{label}: {done} of {total}, {_score(finished)}", to=console)

    return line


def _score(finished: list[Rollout]) -> str:
    if not finished:
        return ""
    crashed = sum(rollout.stop == "crash" for rollout in finished)
    score = f"{sum(rollout.solved for rollout in finished) / len(finished):.0%} solved"
    return f"{score}, {crashed} crashed" if crashed else score


def _table(seen: dict[str, tuple[Rollout, bool]]) -> Table:
    table = Table(*COLUMNS)
    for rollout, over in sorted(seen.values(), key=lambda entry: not entry[1])[-ROWS:]:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in _cells(rollout, over)))
    return table


def _cells(rollout: Rollout, over: bool) -> list[str]:
    usage = rollout.usage
    sampled = sum(sum(segment.sampled) for segment in rollout.segments)
    ended = f"crash ({rollout.cause})" if rollout.stop == "crash" else rollout.stop
    state = f"{ended}, {'solved' if rollout.solved else 'not solved'}" if over else "working"
    numbers = [str(number) for number in (usage.turns, usage.calls, usage.invalid_calls, sampled)]
    return [rollout.id, *numbers, state, _last_call(rollout)]


def _last_call(rollout: Rollout) -> str:
    calls = [call for segment in rollout.segments for message in segment.messages for call in message.calls]
    if not calls:
        return ""
    arguments = ", ".join(str(value) for value in calls[-1].arguments.values())
    return f"{calls[-1].name}({arguments})".replace("\n", " ")[:60]
