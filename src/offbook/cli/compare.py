"""offbook compare: evaluations, or training runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.evaluate import table_of
from offbook.cli.options import results, say
from offbook.core.runfolder import writing
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.evals.compare import Evaluation
    from offbook.evals.tables import Cells


def compare(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Evaluations or training runs; the first is the base.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; may be repeated.")] = None,
    curve: Annotated[str, typer.Option(help="Of training runs: the metric of the figure.")] = "solved",
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
    json_file: Annotated[str, typer.Option("--json", help="Write the numbers to this file; - prints them.")] = "",
    figure: Annotated[Path | None, typer.Option(help="Write a figure (SVG) to this file.")] = None,
) -> None:
    """Evaluations are compared task by task: difference, interval and p. Training runs by arm: mean and deviation.

    Runs called ARM/seed-N or seed-N/ARM are seeds of that arm.
    """
    cells, sentences, numbers, svg = compared(folders or [], metric or [], curve)
    if markdown:
        from offbook.evals.tables import markdown as as_markdown

        _write(markdown, as_markdown(cells) + "".join(f"\n{sentence}.\n" for sentence in sentences))
    if figure:
        _write(figure, svg)
    if json_file == "-":
        print(json.dumps(numbers))
        return
    if json_file:
        _write(Path(json_file), json.dumps(numbers, indent=1) + "\n")
    results.print(table_of(cells))
    for sentence in sentences:
        say(sentence)


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text)


def compared(
    folders: list[Path], keys: Sequence[str] = (), curve: str = "solved"
) -> tuple[Cells, list[str], dict[str, Any], str]:
    """The table, what is said below it, the numbers and the figure."""
    from offbook.evals import arms, compare
    from offbook.evals.figure import effort_figure, training_figure
    from offbook.evals.metrics import metric_of

    for folder in folders:
        if not folder.exists():
            raise OffbookError(f"{folder} is not there; give folders of `offbook eval` or `offbook train`")
    if len(folders) < 2:
        example = "offbook compare runs/eval-a runs/eval-b"
        raise OffbookError(f"give at least two evaluations or training runs to compare, as in: {example}")
    evaluations = _evaluations(folders)
    if evaluations:
        found = compare.compare(evaluations, keys)
        svg = effort_figure({one.name: one.rows for one in evaluations})
        return compare.cells(found), compare.notes_of(found), compare.as_json(found), svg
    runs = arms.load_arms(folders, keys)
    metric = metric_of(curve)
    curves = {arm: [run.series(curve) for run in members] for arm, members in runs.members.items()}
    svg = training_figure(curves, f"{metric.label} in training", metric.percent)
    return arms.cells(runs), arms.notes_of(runs), arms.as_json(runs), svg


def _evaluations(folders: list[Path]) -> list[Evaluation]:
    """None where one of them was not evaluated, or some are seeds of one arm: those are compared arm by arm."""
    from offbook.evals.arms import arm_and_seed
    from offbook.evals.compare import find_evaluation, load_evaluation

    places = [place for folder in folders if (place := find_evaluation(folder))]
    trained = [arm_and_seed(folder.resolve())[0] for folder in folders if (folder / "metrics.jsonl").is_file()]
    if len(places) < len(folders) or len(set(trained)) < len(trained):
        return []
    return [load_evaluation(name, place) for name, place in zip(_names(folders), places, strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, or as many parts as make them distinct."""
    for depth in range(1, 8):
        names = ["/".join(folder.resolve().parts[-depth:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]
