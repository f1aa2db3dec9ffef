"""offbook rollout: let a model work on tasks, and watch it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offbook.cli.options import Json, Plain, config_from, note, progress_display, rollout_display


def rollout(
    ctx: typer.Context,
    tasks: Annotated[str, typer.Argument(help="`pocket`, a task folder, or a folder of task folders.")],
    model: Annotated[
        str, typer.Option(help="`pocket`, `smollm2-135m`, a run or model folder, a hub id, or a URL.")
    ] = "",
    samples: Annotated[int, typer.Option("-n", min=1, help="Rollouts per task.")] = 1,
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many tasks; 0 is all.")] = 0,
    name: Annotated[str, typer.Option(help="The model's name, if --model is a URL.")] = "",
    out: Annotated[str, typer.Option(help="The run folder; runs/rollout if not given.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Roll out and score, without training. `offbook view` shows the run folder.

    Takes configuration as `train` does. Without a model it is `pocket`. The same command resumes.
    """
    config = config_from(ctx, {"model": model, "out": out}, defaults={"model": "pocket", "out": "runs/rollout"})
    from offbook.rl.checks import refuse_run
    from offbook.rl.tasks import tasks_at

    refuse_run(config)  # before torch is imported, which takes seconds
    with progress_display(plain) as progress:
        chosen = tasks_at(tasks, config, progress)
        chosen = chosen[:limit] if limit else chosen
        from offbook.evals.tables import crashes_sentence
        from offbook.rl.evaluate import roll_out
        from offbook.rl.models import local_or_remote

        local_or_remote(config.model, name, config.seed, progress)  # making one shows its own progress
    with rollout_display("rollouts", len(chosen) * samples, plain, each=True) as watch:
        result = roll_out(config, chosen, samples, watch, name)
    before = f" ({result['resumed']} from before)" if result["resumed"] else ""
    sentence = f"{config.out}: {result['rollouts']} rollouts{before}, {result['solved']:.0%} solved"
    print(json.dumps(result) if as_json else sentence)
    if result["crashes"]:
        note(crashes_sentence(result["crashes"]))
