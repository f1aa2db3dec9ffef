"""offbook eval: measure a model, or a run's newest checkpoint, on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from offbook.cli.defaults import suited
from offbook.cli.options import Json, Plain, config_from, console, progress_display

COLUMNS = ("solved", "invalid_per_100", "turns", "tokens")


def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A run folder, `pocket`, a model folder or a hub id.")],
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Measure on the held-out tasks: solved, invalid calls per 100, turns, tokens.

    For a run folder its own configuration is the base and the result is kept in its eval/ folder.
    """
    run = Path(model) if (Path(model) / "config.toml").is_file() else None
    config = config_from(ctx.args, base=[run / "config.toml"]) if run else config_from(ctx.args, defaults=suited(model))

    from offbook.loop.circle import latest_checkpoint
    from offbook.loop.evaluate import evaluate as measure
    from offbook.loop.setup import model_folder, refuse_missing_tasks, task_sets
    from offbook.runfolder import RunFolder

    refuse_missing_tasks(config)
    with progress_display(plain) as progress:
        folder = latest_checkpoint(RunFolder.open(run)) if run else model_folder(model, config.seed, progress)
        tasks = task_sets(config, progress).heldout
        progress("measuring", 0.0)
        result, rollouts = measure(folder, tasks, config)
        progress("measuring", 1.0)
    if run:
        RunFolder(run).write_eval("final", result, rollouts)
    if as_json:
        print(json.dumps(result))
    else:
        console.print(result_table({model: result}))


def result_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table("", "solved", "invalid per 100 calls", "turns", "tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in results.items():
        solved, invalid, turns, tokens = (result[key] for key in COLUMNS)
        table.add_row(name, f"{solved:.1%}", f"{invalid:.1f}", f"{turns:.2f}", f"{tokens:.0f}")
    return table
