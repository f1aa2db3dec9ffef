"""offbook pretrain: continued pretraining on repositories."""

from __future__ import annotations

import json
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import DryRun, Json, Log, Plain, config_to_train, follow_run, note, show_config
from offbook.cli.sft import NUMBERS


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

    `offbook sft --model RUN`, `eval --suite base` and `export` take the result. The same command resumes a run (--out)
    at its last checkpoint.
    """
    config = config_to_train(ctx, {"pretrain.data": json.dumps(data) if data else "", "out": out}, "runs/pretrain")
    from offbook.stages.corpus import refuse_missing_sources

    refuse_missing_sources(config.pretrain)
    if dry_run:
        show_config(config, as_json)
        return
    from offbook.stages.pretrain import pretrain as run

    if done := follow_run(run, config, log, plain, NUMBERS):
        out = quote(config.out)
        print(json.dumps(done[1]) if as_json else f"{config.out}: {done[1]['step']} steps done")
        note(f"next: offbook eval {out} --suite base, or offbook sft --model {out}")
