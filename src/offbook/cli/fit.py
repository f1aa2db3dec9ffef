"""offbook fit: which profile and dialect a model works with, before it is trained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offbook.cli.options import CHOICES, Json, Plain, config_from, note, progress_display, say, show_table
from offbook.core.config import ConfigError, is_url


def fit(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A hub id, a run or model folder, or `pocket`.")] = "",
    out: Annotated[Path, typer.Option(help="The recipe to write, for `offbook train @ FILE`.")] = Path("fit.toml"),
    limit: Annotated[int, typer.Option(min=1, help="Training tasks to try.")] = 8,
    samples: Annotated[int, typer.Option("-n", min=1, help="First messages a task.")] = 4,
    rollouts: Annotated[int, typer.Option(min=0, help="Whole rollouts of each that writes readable calls.")] = 8,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Try MODEL with every profile and call dialect on training tasks, and write what fits as a recipe.

    Takes configuration as `train` does: --tasks.source, --harness.context, --engine.kind.
    """
    config = config_from(ctx, {"model": model})
    if not config.model or is_url(config.model):
        given = "give one" if not config.model else f"not one behind a URL, as {config.model} is"
        raise ConfigError(f"fit needs a model: {given}; for example {CHOICES}".replace("`--model ", "`"))
    from offbook.rl.checks import refuse_run
    from offbook.rl.tasks import refuse_missing_tasks

    refuse_run(config)
    refuse_missing_tasks(config, "train")
    from offbook.core.runfolder import write_atomic
    from offbook.rl.fit import best, next_step, recipe_of
    from offbook.rl.fit import fit as tried

    with progress_display(plain) as progress:
        found = tried(config, limit, samples, rollouts, progress)
    write_atomic(out, recipe_of(found, config))
    sentence, command = next_step(found, config, str(out))
    if as_json:
        chosen = best(found)
        told = {"profile": chosen.profile, "dialect": chosen.dialect, "fits": chosen.fits, "next": command}
        print(json.dumps({**told, "candidates": [asdict(one) for one in found]}))
        return
    rows = [one.row() for one in found]
    show_table([list(rows[0]), *(list(row.values()) for row in rows)])
    for one in found:
        if not one.fits:
            say(f"{one.profile}, {one.dialect}: {one.first.problem}")
    say(sentence)
    print(out)
    note(f"next: {command}")
