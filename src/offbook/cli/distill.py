"""offbook distill: what anybody's agent did wrong, taught by hints."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer

from offbook.cli.options import Json, Plain, config_to_train, console, progress_display, say
from offbook.core.config import ConfigError


def distill(
    ctx: typer.Context,
    trajectories: Annotated[
        str, typer.Argument(help="A run folder, a file, or a folder of files: ATIF, OpenAI or Anthropic messages.")
    ],
    model: Annotated[str, typer.Option(help="`pocket`, `smollm2-135m`, a run or model folder, or a hub id.")] = "",
    epochs: Annotated[int, typer.Option(min=1, help="Times through what has a fault.")] = 1,
    out: Annotated[str, typer.Option(help="The run folder; runs/distill if not given.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train on hints alone, from logs and without an environment.

    Takes configuration as `train` does; --epochs, train.groups and train.group_size give the number of steps. Faults
    are found by the rules of docs/feedback.md and by what people said to `offbook serve`. Says first how far the model
    is from the tokens it is to learn on. The same command goes on where the run (--out) stopped.
    """
    own = {"model": model, "out": out, "sft.data": json.dumps([trajectories])}
    config = config_to_train(ctx, own, "runs/distill")
    if not config.feedback.weight:
        raise ConfigError("feedback.weight is 0, so no hint would teach anything; give a weight above 0")
    from offbook.stages.distill import distill as run

    with progress_display(plain) as progress:

        def on_step(row: dict[str, Any]) -> None:
            numbers = {"hints": "hinted_targets", "divergence": "hint/loss"}
            shown = ", ".join(f"{name} {row[key]:.3g}" for name, key in numbers.items() if key in row)
            console.print(f"step {row['step']} of {row['steps']}: {shown}")

        folder = run(config, epochs, on_step, progress, partial(say, to=console))
    rows, _ = folder.metrics()
    if as_json:
        print(json.dumps({**rows[-1], "mismatch": json.loads((folder.path / "mismatch.json").read_text())}))
        return
    print(f"{config.out}: {rows[-1]['step']} steps done")
