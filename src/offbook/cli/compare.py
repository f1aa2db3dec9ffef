"""offbook compare: evaluations, or training runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Json, say, show_table
from offbook.core.runfolder import writing
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.evals.tables import Cells


def compare(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Evaluations or training runs; the first is the base.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; repeatable.")] = None,
    curve: Annotated[str, typer.Option(help="Of training runs: the metric of the figure.")] = "solved",
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a figure (SVG) to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluations are compared task by task: difference, interval and p. Training runs by arm: mean and deviation.

    Runs called ARM/seed-N or seed-N/ARM are seeds of that arm.
    """
    from offbook.evals.tables import markdown as as_markdown

    cells, sentences, numbers, svg = compared(folders or [], metric or [], curve)
    notes = "".join(f"\n{sentence}.\n" for sentence in sentences)
    for path, text in ((markdown, as_markdown(cells) + notes), (figure, svg)):
        if path:
            with writing(path):
                path.write_text(text)
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
    """The last part of each path, or as many parts as make them distinct."""
    for depth in range(1, 8):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]
