"""offbook distill: teach what other agents did wrong, by hints."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offbook.cli.options import Json, Plain, config_to_train, follow_run
from offbook.core.config import ConfigError


def distill(
    ctx: typer.Context,
    trajectories: Annotated[
        str, typer.Argument(help="A run folder, a file, or a folder of files: ATIF, OpenAI or Anthropic messages.")
    ],
    model: Annotated[str, typer.Option(help="`pocket`, `smollm2-135m`, a run or model folder, or a hub id.")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the faulty messages.")] = 1,
    out: Annotated[str, typer.Option(help="The run folder; runs/distill if not given.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train on hints alone, from logs and without an environment.

    Takes configuration as `train` does; --epochs, train.groups and train.group_size give the number of steps. Faults
    are found by the rules of docs/feedback.md and by what people said to `offbook serve`. First says how far the model
    is from the logged tokens. The same command resumes a run (--out).
    """
    own = {"model": model, "out": out, "sft.data": json.dumps([trajectories])}
    config = config_to_train(ctx, own, "runs/distill")
    if not config.feedback.weight:
        raise ConfigError("feedback.weight is 0, so no hint would teach anything; give a weight above 0")
    from offbook.stages.distill import distill as run

    numbers = {"hints": "hinted_targets", "divergence": "hint/loss"}
    done = follow_run(lambda config, *callbacks: run(config, epochs, *callbacks), config, None, plain, numbers)
    if done is None:
        return
    folder, last = done
    mismatch = json.loads((folder.path / "mismatch.json").read_text())
    print(json.dumps({**last, "mismatch": mismatch}) if as_json else f"{config.out}: {last['step']} steps done")
