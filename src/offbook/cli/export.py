"""offbook export: rollouts in the formats that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of an evaluation.")],
    to: Annotated[Literal["atif", "openai", "parquet"], typer.Option(help="The format.")],
    out: Annotated[Path, typer.Option(help="A .jsonl file; for parquet a folder of three files.")],
) -> None:
    """Write every rollout of a run: ATIF trajectories, OpenAI-format messages, or tables for data frames."""
    from offbook.evals.export import export as write
    from offbook.runfolder import RunFolder

    written = write(RunFolder.open(run), to, out)
    skipped = f"; {written.unreadable} unreadable lines were skipped" if written.unreadable else ""
    print(f"{out}: {written.rollouts} rollouts as {to}{skipped}")
