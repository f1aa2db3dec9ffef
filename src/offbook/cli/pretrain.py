"""offbook pretrain: continued pretraining on repositories."""

from __future__ import annotations

import json
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import DryRun, Json, Log, Plain, config_to_train, console, say, show_config
from offbook.cli.stage import show_run
from offbook.cli.train import tracker_of


def pretrain(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A repository: folder, archive, git URL, `pypi:NAME`, `pocket-code:200`; repeatable."),
    ] = None,
    out: Annotated[str, typer.Option(help="The run folder; runs/pretrain if not given.")] = "",
    log: Log = None,
    dry_run: DryRun = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Pretrain further on code. Configuration as in `offbook train`, and of its own: --pretrain.context, .rope, .guard.

    What comes out is a model like any other: `offbook sft --model RUN`, `eval --suite base` and `export` take it.
    The same command goes on where the run (--out) stopped: at its last checkpoint.
    """
    config = config_to_train(ctx, {"pretrain.data": json.dumps(data) if data else "", "out": out}, "runs/pretrain")
    tracker = tracker_of(log, config) if log else None
    from offbook.stages.corpus import refuse_missing_sources
    from offbook.stages.pretrain import pretrain as run

    refuse_missing_sources(config.pretrain)
    if dry_run:
        show_config(config, as_json)
    elif show_run(run, config, tracker, plain, as_json) and not as_json:
        out = quote(config.out)
        say(f"next: offbook eval {out} --suite base, or offbook sft --model {out}", to=console)
