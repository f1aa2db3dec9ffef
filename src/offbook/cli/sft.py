"""offbook sft: imitate what agents wrote."""

from __future__ import annotations

import json
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import DryRun, Json, Log, Plain, config_to_train, follow_run, note, show_config

NUMBERS = {
    "loss": "ce/loss",
    "validation": "validation/loss",
    "learning rate": "learning_rate",
}


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

    `offbook train --model RUN`, `eval`, `rollout` and `export` take the result. The same command resumes a run (--out)
    at its last checkpoint.
    """
    config = config_to_train(ctx, {"sft.data": json.dumps(data) if data else "", "out": out}, "runs/sft")
    from offbook.stages.sources import refuse_missing_data

    refuse_missing_data(config)
    if dry_run:
        show_config(config, as_json)
        return
    from offbook.stages.sft import sft as run

    done = follow_run(run, config, log, plain, NUMBERS)
    if done is None:
        return
    last, out = done[1], quote(config.out)
    if as_json:
        print(json.dumps(last))
        return
    print(f"{config.out}: {last['step']} steps done")
    note(f"next: offbook eval {out}, or offbook train --model {out} --out runs/train")
