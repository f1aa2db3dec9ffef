"""offbook live: from what users thought of sessions to a better model."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbook.cli.options import Json, Plain, config_from, note, progress_display, results
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.live.cycle import Cycle

LOOK_S = 60.0  # between two looks for what is due


def live(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="To begin with: `pocket`, a run or model folder, a hub id.")] = "",
    out: Annotated[str, typer.Option(help="The folder of the cycle; runs/live if not given.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Do what is due and stop.")] = False,
    hints: Annotated[
        bool, typer.Option("--hints", help="List the complaints for the next cycle and which of them teach.")
    ] = False,
    approve: Annotated[
        list[str] | None, typer.Option(help="The id of a complaint (--hints) that may teach; repeatable.")
    ] = None,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Learn from use: train on settled sessions, gate, deploy, roll back. Until Ctrl-C.

    `offbook agent` and `offbook serve` make sessions. Every decision is in decisions.jsonl; `offbook view` shows them.
    Takes configuration as `train` does; a cycle that has begun has its own.
    """
    place = Path(out or "runs/live")
    base = [place / "config.toml"] if (place / "config.toml").is_file() else []
    config = config_from(ctx, {"out": str(place), "model": model}, base, {"model": "pocket"})
    from offbook.core.runfolder import RunFolder, only_writer, write_atomic
    from offbook.live.cycle import Cycle

    RunFolder(place).refuse_file()
    with progress_display(plain) as progress:
        cycle = Cycle(config, note, progress)
        if approve:
            _approve(cycle, approve)
        if hints or approve:
            found = json.dumps({"folder": str(cycle.folder.path), "complaints": cycle.complaints()})
            print(found) if as_json else results.print_json(found)
            return
        with only_writer(place):
            cycle.begin()
            write_atomic(place / "config.toml", config.to_toml())
            _run(cycle, once)
    if as_json:
        print(json.dumps(asdict(cycle.last)))


def _run(cycle: Cycle, once: bool) -> None:
    said = ""
    while True:
        while cycle.turn():
            pass
        line = f"nothing more is due: {cycle.waits_for()}"
        if said != line:
            note(line)
        said = line
        if once:
            return
        time.sleep(LOOK_S)


def _approve(cycle: Cycle, ids: list[str]) -> None:
    from offbook.live.user_hints import refusal

    texts = {row["id"]: row["text"] for row in cycle.complaints()}
    for id in ids:
        if id not in texts:
            raise OffbookError(f"no complaint has the id {id}; `offbook live --hints` lists them")
        if refused := refusal(texts[id]):
            raise OffbookError(f"{id} cannot become a hint: {refused}")
        cycle.folder.approve([id])
