"""offbook train: run, or go on with, the training that a configuration describes."""

from __future__ import annotations

import json
import os
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Json, Log, Plain, config_to_train, console, progress_display, say, show_config
from offbook.core.config import Config
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.trackers import Kind, Tracker


def train(
    ctx: typer.Context,
    out: Annotated[str, typer.Option(help="The run folder; runs/train if not given.")] = "",
    log: Log = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the memory plan, and stop.")
    ] = False,
    no_fit_check: Annotated[
        bool, typer.Option("--no-fit-check", help="Train even if the model hardly writes a readable call.")
    ] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train. Configuration: @ FILE.toml ... and --KEY VALUE, such as --model, --tasks.source, --train.steps.

    --dry-run prints all keys with their values and, on stderr, what `offbook plan` does. --model is `pocket`,
    `smollm2-135m`, a run or model folder, a hub id; it gets the recipe that fits it, unless one is named: @ pocket,
    small or standard.
    The same command goes on where the run (--out) stopped: at its last checkpoint.
    """
    config = config_to_train(ctx, {"out": out})
    tracker = tracker_of(log, config) if log else None
    from offbook.rl.checks import judges_of, refuse_run
    from offbook.rl.tasks import refuse_missing_tasks

    refuse_missing_tasks(config, "train")
    if dry_run:
        judges_of(config)
        show_config(config, as_json)
        _show_plan(config)
        return
    refuse_run(config, to_train=True)  # before torch is imported, which takes seconds
    from offbook.rl.train import train as run

    with progress_display(plain) as progress:

        def on_step(row: dict[str, Any]) -> None:
            progress(f"train {config.out}", row["step"] / config.train.steps)
            numbers = [
                "solved",
                "invalid_per_100",
                "turns",
                "hinted_targets",
                "groups_with_gradient",
            ]
            if tracker:
                tracker.follow()
            console.print(f"step {row['step']}: " + ", ".join(f"{key} {row[key]:.3g}" for key in numbers))
            if "waited_for" in row:
                say(f"step {row['step']} {row['waited_for']}", to=console)
            if "no_signal" in row:
                say(f"step {row['step']} had no signal: {row['no_signal']}", to=console)

        folder = run(config, on_step, progress, partial(say, to=console), fit_check=not no_fit_check)
    if int(os.environ.get("RANK", "0")):  # another rank is the run
        return
    if tracker:
        tracker.close()
    rows, _ = folder.metrics()
    if as_json:
        print(json.dumps(rows[-1]))
        return
    done, wanted = rows[-1]["step"], config.train.steps
    print(f"{config.out}: {done} steps done" if done >= wanted else f"{config.out}: {done} of {wanted} steps done")
    say(f"next: {what_next(config)}", to=console)


def what_next(config: Config) -> str:
    """The commands that work now."""
    from offbook.rl.tasks import has_heldout

    out, source = quote(config.out), quote(config.tasks.source)
    if has_heldout(config):
        return f"offbook eval {out}, or offbook view {out}"
    return (
        f"offbook view {out}; there is no held-out task to measure on: make tasks of another repository (offbook tasks "
        f"make ANOTHER --out {source}), or train into another --out with --tasks.heldout_share 0.2"
    )


def _show_plan(config: Config) -> None:
    """For people: what is printed of the configuration may go to a file. The machine that trains may be another."""
    from offbook.cli.plan import show_plan
    from offbook.engine.vllm import refuse_missing_engine
    from offbook.rl.plan import make_plan, refuse_too_large, this_device

    def show(config: Config) -> None:
        found = make_plan(config, this_device())
        show_plan(found, to=console)
        refuse_too_large(config, found)

    for look in (refuse_missing_engine, show):
        try:
            look(config)
        except OffbookError as reason:  # no hub to ask for the model's shape, or `train` would say so
            say(f"on this machine: {reason}", to=console)


def tracker_of(kind: Kind, config: Config) -> Tracker:
    """Before minutes go into a run: is its package there?"""
    from offbook.rl.trackers import Tracker

    return Tracker(kind, config)
