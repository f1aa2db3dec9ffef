"""offbook rollout: let a model work on tasks, and watch it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbook.cli.defaults import suited
from offbook.cli.options import Json, Plain, config_from, console, is_plain, progress_display, refuse_mistyped
from offbook.runfolder import checkpoint_named

if TYPE_CHECKING:
    from offbook.loop.collect import Watch
    from offbook.types import Rollout

ROWS = 20
COLUMNS = ("rollout", "turns", "calls", "invalid", "tokens", "state", "last call")


def rollout(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Argument(help="`pocket`, a task folder, or a folder of task folders.")],
    model: Annotated[
        str, typer.Option(help="`pocket`, `smollm2-135m`, a run or model folder, a hub id, or a URL.")
    ] = "pocket",
    samples: Annotated[int, typer.Option("-n", min=1, help="Rollouts a task.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many tasks; 0 is all.")] = 0,
    name: Annotated[str, typer.Option(help="The model's name, where --model is a URL.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Roll out and score, without training. The run folder (--out) is one that `offbook view` shows.

    The same command goes on where it stopped.
    """
    refuse_mistyped(ctx)
    model = checkpoint_named(model)
    config = config_from(ctx.args, defaults={**suited(model), "model": model, "out": "runs/rollout"})

    from offbook.loop.rollout import is_url, refuse_password, roll_out, tasks_at
    from offbook.types import OffbookError

    if is_url(model):
        refuse_password(model)
        if not name:
            raise OffbookError("a URL may serve several models; say which with --name")
    with progress_display(plain) as progress:
        chosen = tasks_at(tasks, config, progress)
        chosen = chosen[:limit] if limit else chosen
        if not is_url(model):
            from offbook.loop.models import model_folder

            model_folder(model, config.seed, progress)
    with _display(len(chosen) * samples, is_plain(plain)) as watch:
        result = roll_out(config, chosen, samples, watch, name)
    before = f" ({result['resumed']} were there from before)" if result["resumed"] else ""
    sentence = f"{config.out}: {result['rollouts']} rollouts{before}, {result['solved']:.0%} solved"
    print(json.dumps(result) if as_json else sentence)


@contextmanager
def _display(total: int, plain: bool) -> Iterator[Watch]:
    if plain:
        header = iter([COLUMNS])

        def line(rollout: Rollout, over: bool) -> None:
            for cells in (*header, _cells(rollout, over)) if over else ():
                console.print("  ".join(cells), highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    seen: dict[str, tuple[Rollout, bool]] = {}
    with Live(_picture(seen, total), console=console, refresh_per_second=4, transient=False) as live:

        def update(rollout: Rollout, over: bool) -> None:
            seen[rollout.id] = rollout, over
            live.update(_picture(seen, total))

        yield update


def _picture(seen: dict[str, tuple[Rollout, bool]], total: int) -> Group:
    table = Table(*COLUMNS)
    running = [entry for entry in seen.values() if not entry[1]]
    over = [entry for entry in seen.values() if entry[1]]
    for rollout, is_over in [*over, *running][-ROWS:]:
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in _cells(rollout, is_over)))
    solved = sum(rollout.solved for rollout, _ in over)
    invalid = sum(rollout.usage.invalid_calls for rollout, _ in seen.values())
    calls = sum(rollout.usage.calls for rollout, _ in seen.values())
    footer = f"{len(over)} of {total} over, {solved} solved, {invalid} of {calls} calls invalid"
    return Group(table, Text(footer))


def _cells(rollout: Rollout, over: bool) -> list[str]:
    usage = rollout.usage
    sampled = sum(sum(segment.sampled) for segment in rollout.segments)
    state = f"{rollout.stop}, {'solved' if rollout.solved else 'not solved'}" if over else "working"
    numbers = [str(number) for number in (usage.turns, usage.calls, usage.invalid_calls, sampled)]
    return [rollout.id, *numbers, state, _last_call(rollout)]


def _last_call(rollout: Rollout) -> str:
    calls = [call for segment in rollout.segments for message in segment.messages for call in message.calls]
    if not calls:
        return ""
    arguments = ", ".join(str(value) for value in calls[-1].arguments.values())
    return f"{calls[-1].name}({arguments})".replace("\n", " ")[:60]
