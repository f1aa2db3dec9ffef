"""offbook compare and export: evaluations side by side, rollouts and adapters for other tools."""

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
    folders: Annotated[list[Path] | None, argument("Evaluations, or evaluated runs; the first is the base.")] = None,
    metric: Annotated[list[str] | None, option("Only this metric; repeatable.")] = None,
    markdown: Annotated[Path | None, option("Write the table to this file.")] = None,
    figure: Annotated[Path | None, option("Write a figure (SVG) to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare evaluations task by task: difference, interval and p.

    For example: offbook compare runs/eval-a runs/eval-b
    """
    from offbook.evals.tables import markdown as as_markdown

    cells, sentences, numbers, svg = compared(folders or [], metric or [])
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


def compared(folders: list[Path], keys: Sequence[str] = ()) -> tuple[Cells, list[str], dict[str, Any], str]:
    """The table, the sentences below it, the numbers and the figure."""
    from offbook.evals.compare import as_json, cells, compare, find_evaluation, load_evaluation, notes_of
    from offbook.evals.figure import effort_figure

    if len(folders) < 2:
        example = "offbook compare runs/eval-a runs/eval-b"
        raise OffbookError(f"give at least two evaluations to compare, as in: {example}")
    evaluations = []
    for name, folder in zip(_names(folders), folders, strict=True):
        if not folder.exists():
            raise OffbookError(f"{folder} is not there; give folders of `offbook eval` or `offbook train`")
        file = find_evaluation(folder)
        if file is None:
            raise OffbookError(f"{folder} has no evaluation to compare; `offbook eval {folder}` makes one of a run")
        evaluations.append(load_evaluation(name, file))
    found = compare(evaluations, keys)
    svg = effort_figure({one.name: one.rows for one in evaluations})
    return cells(found), notes_of(found), as_json(found), svg


def _names(folders: list[Path]) -> list[str]:
    """The last part of each path, or the whole path where that is not distinct."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(folders) else [str(folder) for folder in folders]


def export(
    run: Annotated[Path, argument("A run folder, or the folder of an evaluation or of an adapter.")],
    to: Annotated[Literal["atif", "openai"] | None, option("The format.")] = None,
    out: Annotated[Path | None, option("A .jsonl file.")] = None,
    merged: Annotated[bool, option("Instead: the newest adapter and its base, as one model.", "--merged")] = False,
) -> None:
    """Write every rollout of a run: ATIF trajectories or OpenAI-format messages.

    Or, with --merged, write the run's newest adapter, added to the weights of its base, to the folder --out.
    `hf upload` takes a checkpoint (RUN/ckpt/step_N) or that folder.

    For example: offbook export runs/train --to openai --out messages.jsonl
    """
    from offbook.core.runfolder import RunFolder
    from offbook.evals.export import export as write

    if merged and out and not to:
        from offbook.rl.models import model_folder, write_merged

        write_merged(model_folder(str(run), 0), out)
        print(f"{out}: the adapter of {run} and its base, as one model")
    elif to and out and not merged:
        rollouts, unreadable = write(RunFolder.open(run), to, out)
        skipped = f"; {unreadable} unreadable lines were skipped" if unreadable else ""
        print(f"{out}: {rollouts} rollouts as {to}{skipped}")
    else:
        example = f"offbook export {quote(str(run))} --to openai --out messages.jsonl"
        raise OffbookError(f"give --to and --out, or --merged and --out, as in: {example}")
