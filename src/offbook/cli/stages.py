"""offbook stages: pretraining, long context, imitation, RL and evaluations, one after the other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from offbook.cli.compare import compared
from offbook.cli.options import Json, Plain, Row, config_to_train, note, progress_display, say, show_config, show_table


def stages(
    ctx: typer.Context,
    out: Annotated[str, typer.Option(help="The folder that has a run folder for each stage; runs/stages.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the configuration of each stage and stop.")] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Run stages one after the other, each from the model of the one before: --stages.order says which.

    Every stage is a run folder. The same command resumes. `offbook stages @ full` tries it on pocket. Several stages
    `eval` are compared at the end.
    """
    config = config_to_train(ctx, {"out": out}, "runs/stages")
    from offbook.rl.tasks import has_heldout, refuse_missing_tasks, refuse_no_heldout
    from offbook.stages.corpus import refuse_missing_sources
    from offbook.stages.pipeline import of_stage, run_stages
    from offbook.stages.sources import refuse_missing_data

    order = config.stages.order
    for number, name in enumerate(order):
        settings = of_stage(config, name, Path(config.out) / name, config.model)
        if name == "sft" and (settings.sft.data or "sample" not in order[:number]):
            refuse_missing_data(settings)
        elif name in ("pretrain", "long"):
            refuse_missing_sources(settings.pretrain)
        elif name in ("fit", "sample", "eval"):
            refuse_missing_tasks(settings, "" if name == "eval" else "train")
        if name == "eval" and not has_heldout(settings):
            refuse_no_heldout(settings.tasks.source)
        if dry_run:
            show_config(settings, as_json)
    if dry_run:
        return
    from offbook.evals.run import measure_heldout

    with progress_display(plain) as progress:

        def on_step(row: Row) -> None:
            numbers = {"loss": "ce/loss", "validation": "validation/loss", "solved": "solved"}
            shown = ", ".join(f"{name} {row[key]:.3g}" for name, key in numbers.items() if key in row)
            note(f"step {row['step']}: {shown}")

        rows = run_stages(config, on_step, progress, note, measure_heldout)
    if int(os.environ.get("RANK", "0")):  # another rank is the run
        return
    if as_json:
        print(json.dumps(rows))
        return
    cells = [["stage", "steps", "tokens", "seconds", "loss", "validation", "solved", "run"]]
    for row in rows:
        ends = [row.get(key) for key in ("ce/loss", "validation/loss", "solved")]
        shown = [f"{one[0]:.3f} -> {one[1]:.3f}" if one else "" for one in ends]
        counts = [str(row.get(key, "")) for key in ("steps", "train_tokens", "seconds")]
        cells.append([row["stage"], *counts, *shown, row["run"]])
    show_table(cells)
    for row in rows:
        if left := ", ".join(f"{count} {what}" for what, count in row.get("left_out", {}).items()):
            say(f"{row['stage']} left out: {left}")
    measured = [Path(row["run"]) for row in rows if row["stage"] == "eval"]
    if len(measured) > 1:
        cells, sentences, _, _ = compared(measured)
        show_table(cells)
        for sentence in sentences:
            say(sentence)
