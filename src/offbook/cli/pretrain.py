"""offbook pretrain: continued pretraining on repositories."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from offbook.cli.options import Json, Plain, config_from, console, say
from offbook.cli.stage import show_run
from offbook.cli.train import CHOICES, tracker_of
from offbook.config import ConfigError


def pretrain(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A repository: folder, archive, git URL, `pypi:NAME`, `pocket-code:200`; repeatable."),
    ] = None,
    out: Annotated[str, typer.Option(help="The run folder; runs/pretrain if not given.")] = "",
    log: Annotated[
        Literal["trackio", "wandb", "tensorboard"] | None, typer.Option(help="Show the metrics there, too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Pretrain further on code. Configuration as in `offbook train`, and of its own: --pretrain.context, .rope, .guard.

    What comes out is a model like any other: `offbook sft --model RUN`, `eval --suite base` and `export` take it.
    The same command goes on where the run (--out) stopped: at its last checkpoint.
    """
    given = {"pretrain.data": json.dumps(data)} if data else {}
    config = config_from(ctx, {**given, **({"out": out} if out else {})}, defaults={"out": "runs/pretrain"})
    if not config.model:
        raise ConfigError(f"there is no model to train; give one, such as {CHOICES}")
    tracker = tracker_of(log, config) if log else None
    from offbook.stages.corpus import refuse_missing_sources
    from offbook.stages.pretrain import pretrain as run

    refuse_missing_sources(config.pretrain)
    if dry_run:
        print(json.dumps(config.model_dump(), indent=2) if as_json else config.to_toml(), end="\n" if as_json else "")
        return
    if show_run(run, config, tracker, plain, as_json) and not as_json:
        say(f"next: offbook eval {config.out} --suite base, or offbook sft --model {config.out}", to=console)
