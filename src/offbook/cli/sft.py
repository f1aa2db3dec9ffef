"""offbook sft: imitate what agents wrote."""

from __future__ import annotations

import json
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import DryRun, Json, Log, Plain, config_to_train, console, say, show_config
from offbook.cli.stage import show_run
from offbook.cli.train import tracker_of


def sft(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A run folder, a file of trajectories or chat, a dataset, `demos:TASKS`; repeatable."),
    ] = None,
    out: Annotated[str, typer.Option(help="The run folder; runs/sft if not given.")] = "",
    log: Log = None,
    dry_run: DryRun = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Imitate. Configuration as in `offbook train`, and of its own: --sft.epochs, --sft.learning_rate, --sft.reminders.

    What comes out is a model like any other: `offbook train --model RUN`, `eval`, `rollout` and `export` take it.
    The same command goes on where the run (--out) stopped: at its last checkpoint.
    """
    config = config_to_train(ctx, {"sft.data": json.dumps(data) if data else "", "out": out}, "runs/sft")
    tracker = tracker_of(log, config) if log else None
    from offbook.stages.sft import sft as run
    from offbook.stages.sources import refuse_missing_data

    refuse_missing_data(config)
    if dry_run:
        show_config(config, as_json)
        return
    last = show_run(run, config, tracker, plain, as_json)
    if as_json or not last:
        return
    out = quote(config.out)
    say(f"next: offbook eval {out}, or offbook train --model {out} --out runs/train", to=console)
