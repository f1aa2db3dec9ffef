"""offbook export: rollouts in the formats that other tools read, or a checkpoint, merged or for the hub."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from offbook.types import OffbookError


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of an evaluation or of an adapter.")],
    to: Annotated[Literal["atif", "openai"] | None, typer.Option(help="The format.")] = None,
    out: Annotated[Path | None, typer.Option(help="A .jsonl file.")] = None,
    hub: Annotated[str, typer.Option(help="OWNER/NAME: push the newest checkpoint there instead.")] = "",
    merged: Annotated[
        bool, typer.Option("--merged", help="Instead: the newest adapter and its base, as one model.")
    ] = False,
) -> None:
    """Write every rollout of a run: ATIF trajectories or OpenAI-format messages.

    Or, with --hub, push the run's newest checkpoint with a model card; with --merged, write the run's newest adapter,
    added to the weights of its base, to the folder --out.
    """
    if merged:
        if hub or to or out is None:
            raise OffbookError(
                f"--merged takes --out alone, as in: offbook export {quote(str(run))} --merged --out merged-model"
            )
        from offbook.rl.models import model_folder, write_merged

        write_merged(model_folder(str(run), 0), out)
        print(f"{out}: the adapter of {run} and its base, as one model")
        return
    from offbook.core.runfolder import RunFolder

    if hub and not (to or out):
        from offbook.evals.hub import push

        print(push(RunFolder.open(run), hub))
        return
    if hub or not (to and out):
        example = f"offbook export {quote(str(run))} --to openai --out messages.jsonl"
        raise OffbookError(f"give --to and --out, or --hub OWNER/NAME alone, as in: {example}")
    from offbook.evals.export import export as write

    rollouts, unreadable = write(RunFolder.open(run), to, out)
    skipped = f"; {unreadable} unreadable lines were skipped" if unreadable else ""
    print(f"{out}: {rollouts} rollouts as {to}{skipped}")
