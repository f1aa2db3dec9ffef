"""offbook compare and export: evaluations or runs side by side, rollouts and checkpoints for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from offbook.cli.options import Json, argument, option, say, show_table
from offbook.core.runfolder import write_atomic
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.evals.tables import Cells


def compare(
    folders: Annotated[list[Path] | None, argument("Evaluations or training runs; the first is the base.")] = None,
    metric: Annotated[list[str] | None, option("Only this metric; repeatable.")] = None,
    curve: Annotated[str, option("Of training runs: the metric of the figure.")] = "solved",
    markdown: Annotated[Path | None, option("Write the table to this file.")] = None,
    figure: Annotated[Path | None, option("Write a figure (SVG) to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluations are compared task by task: difference, interval and p. Training runs by arm: mean and deviation.

    Runs called ARM/seed-N or seed-N/ARM are seeds of that arm.

    For example: offbook compare runs/eval-a runs/eval-b
    """
    from offbook.evals.tables import markdown as as_markdown

    cells, sentences, numbers, svg = compared(folders or [], metric or [], curve)
    notes = "".join(f"\n{sentence}.\n" for sentence in sentences)
    for path, text in ((markdown, as_markdown(cells) + notes), (figure, svg)):
        if path:
            write_atomic(path, text)
    if as_json:
        print(json.dumps(numbers))
        return
    show_table(cells)
    for sentence in sentences:
        say(sentence)


def compared(
    folders: list[Path], keys: Sequence[str] = (), curve: str = "solved"
) -> tuple[Cells, list[str], dict[str, Any], str]:
    """The table, the sentences below it, the numbers and the figure."""
    from offbook.evals import arms, compare
    from offbook.evals.figure import effort_figure, training_figure
    from offbook.evals.metrics import metric_of

    for folder in folders:
        if not folder.exists():
            raise OffbookError(f"{folder} is not there; give folders of `offbook eval` or `offbook train`")
    if len(folders) < 2:
        example = "offbook compare runs/eval-a runs/eval-b"
        raise OffbookError(f"give at least two evaluations or training runs to compare, as in: {example}")
    # Runs that were not evaluated, and seeds of one arm, are compared arm by arm.
    places = [place for folder in folders if (place := compare.find_evaluation(folder))]
    trained = [arms.arm_and_seed(one.resolve())[0] for one in folders if (one / "metrics.jsonl").is_file()]
    if len(places) == len(folders) and len(set(trained)) == len(trained):
        evaluations = [compare.load_evaluation(name, one) for name, one in zip(_names(folders), places, strict=True)]
        found = compare.compare(evaluations, keys)
        svg = effort_figure({one.name: one.rows for one in evaluations})
        return compare.cells(found), compare.notes_of(found), compare.as_json(found), svg
    runs = arms.load_arms(folders, keys)
    metric = metric_of(curve)
    curves = {arm: [run.series(curve) for run in members] for arm, members in runs.members.items()}
    svg = training_figure(curves, f"{metric.label} in training", metric.percent)
    return arms.cells(runs), arms.notes_of(runs), arms.as_json(runs), svg


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, or the whole path where that is not distinct."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(folders) else [str(folder) for folder in folders]


def export(
    run: Annotated[Path, argument("A run folder, or the folder of an evaluation or of an adapter.")],
    to: Annotated[Literal["atif", "openai"] | None, option("The format.")] = None,
    out: Annotated[Path | None, option("A .jsonl file.")] = None,
    hub: Annotated[str, option("OWNER/NAME: push the newest checkpoint there instead.")] = "",
    merged: Annotated[bool, option("Instead: the newest adapter and its base, as one model.", "--merged")] = False,
) -> None:
    """Write every rollout of a run: ATIF trajectories or OpenAI-format messages.

    Or, with --hub, push the run's newest checkpoint with a model card; with --merged, write the run's newest adapter,
    added to the weights of its base, to the folder --out.

    For example: offbook export runs/train --to openai --out messages.jsonl
    """
    from offbook.core.runfolder import RunFolder
    from offbook.evals.export import export as write

    if merged and out and not (hub or to):
        from offbook.rl.models import model_folder, write_merged

        write_merged(model_folder(str(run), 0), out)
        print(f"{out}: the adapter of {run} and its base, as one model")
    elif hub and not (to or out or merged):
        from offbook.evals.hub import push

        print(push(RunFolder.open(run), hub))
    elif to and out and not (hub or merged):
        rollouts, unreadable = write(RunFolder.open(run), to, out)
        skipped = f"; {unreadable} unreadable lines were skipped" if unreadable else ""
        print(f"{out}: {rollouts} rollouts as {to}{skipped}")
    else:
        example = f"offbook export {quote(str(run))} --to openai --out messages.jsonl"
        raise OffbookError(f"give --to and --out, --merged and --out, or --hub OWNER/NAME, as in: {example}")
