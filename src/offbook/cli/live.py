"""offbook live: from what users thought of sessions to a better model."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Json, Plain, config_from, console, progress_display, results, say
from offbook.core.config import Config

if TYPE_CHECKING:
    from offbook.live.cycle import Cycle

LOOK_S = 60.0  # between two looks for what is due


def live(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="To begin with: `pocket`, a run or model folder, a hub id.")] = "",
    out: Annotated[str, typer.Option(help="The folder of the cycle; runs/live if not given.")] = "",
    sessions: Annotated[
        list[Path] | None, typer.Option(help="A run folder of `offbook serve` to take sessions from; may be repeated.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Do what is due and stop.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Compare versions by their users, and stop.")] = False,
    versions: Annotated[
        str, typer.Option(help="For --report: two versions, as in 3,4; the last two if not given.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be stored, learned from and deployed, and stop.")
    ] = False,
    hints: Annotated[
        bool, typer.Option("--hints", help="List the complaints that the next cycle hears and which of them teach.")
    ] = False,
    approve: Annotated[
        list[str] | None, typer.Option(help="The id of a complaint (--hints) that may teach; may be repeated.")
    ] = None,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Learn from use: train on settled sessions, gate, try on a share of the users, deploy, roll back. Until Ctrl-C.

    `offbook agent` and `offbook serve` make sessions. Every decision is in decisions.jsonl; `offbook view` shows them.
    Takes configuration as `train` does; a cycle that has begun has its own.
    """
    place = Path(out or "runs/live")
    base = [place / "config.toml"] if (place / "config.toml").is_file() else []
    config = config_from(ctx, {"out": str(place), "model": model}, base, {"model": "pocket"})
    from offbook.core.runfolder import RunFolder, only_writer, write_atomic
    from offbook.live.cycle import Cycle

    RunFolder(place).refuse_file()
    keys = config.live.populations or [""]
    with progress_display(plain) as progress:
        cycles = [Cycle(config, key, partial(say, to=console), progress) for key in keys]
        if report:
            _show([_report(cycle, versions) for cycle in cycles], as_json)
            return
        if approve:
            _approve(cycles, approve)
        if hints or approve:
            _show([{"folder": str(one.folder.path), "complaints": one.complaints()} for one in cycles], as_json)
            return
        if dry_run:
            _show([_planned(cycle, config, sessions or []) for cycle in cycles], as_json)
            return
        with ExitStack() as held:
            held.enter_context(only_writer(place))
            for cycle in cycles:
                cycle.begin()
            for folder in {place, *(cycle.folder.path for cycle in cycles)}:
                write_atomic(folder / "config.toml", config.to_toml())
            _run(cycles, sessions or [], once)
    if as_json:
        print(json.dumps([asdict(cycle.last) for cycle in cycles]))


def _run(cycles: list[Cycle], sources: list[Path], once: bool) -> None:
    from offbook.live.serving import collect

    said: dict[Path, str] = {}
    while True:
        for cycle in cycles:
            for source in sources:
                if count := collect(cycle, source):
                    say(f"{count} new sessions from {source}", to=console)
            while cycle.turn():
                pass
            line = f"nothing more is due: {cycle.waits_for()}"
            if said.get(cycle.folder.path) != line:
                say(line, to=console)
            said[cycle.folder.path] = line
        if once:
            return
        time.sleep(LOOK_S)


def _approve(cycles: list[Cycle], ids: list[str]) -> None:
    from offbook.live.user_hints import refusal
    from offbook.types import OffbookError

    for id in ids:
        found = [(cycle, row) for cycle in cycles for row in cycle.complaints() if row["id"] == id]
        if not found:
            raise OffbookError(f"no complaint has the id {id}; `offbook live --hints` lists them")
        if refused := refusal(found[0][1]["text"]):
            raise OffbookError(f"{id} cannot become a hint: {refused}")
        for cycle, _ in found:
            cycle.folder.approve([id])


def _planned(cycle: Cycle, config: Config, sources: list[Path]) -> dict[str, Any]:
    """Nothing is written."""
    from offbook.live.reactions import score
    from offbook.live.serving import found_in
    from offbook.rl.models import described
    from offbook.rl.tasks import refuse_missing_tasks

    has_begun = cycle.folder.decisions_file.is_file()
    if not has_begun:
        described(config.model)
    refuse_missing_tasks(config)
    stored = [score(one, cycle.settings) for one in cycle.folder.sessions()]
    chosen, left_out = cycle.to_learn_from(stored) if has_begun else ([], {})
    new = [one for source in sources for one in found_in(cycle, source)] if has_begun else []
    last = cycle.last if has_begun else None
    return {
        "folder": str(cycle.folder.path),
        "consent": cycle.settings.consent,
        "follow-ups are read by": (cycle.config.judge.live and cycle.config.judge.url) or "their form",
        "deployed": last.deployed if last else None,
        "on trial": last.candidate if last else None,
        "stored sessions": len(stored),
        "would be stored": [
            {"session": one.id, "kind": one.kind, "words": one.has_words, "messages": _messages(one)} for one in new
        ],
        "would be deleted": sum(map(cycle.is_expired, stored)),
        "to learn from": f"{len(chosen)} of {cycle.settings.sessions}",
        "left out": left_out,
        **({"numbers": cycle.numbers(chosen)} if chosen else {}),
        "would be trained": len(chosen) >= cycle.settings.sessions and (last is None or last.candidate is None),
        "would be deployed": f"after a gate on {config.tasks.source} {' '.join(cycle.settings.suites)}".strip()
        + f" and a trial of {cycle.settings.trial} users (a share of {cycle.settings.share:.0%})",
    }


def _messages(session: Any) -> list[str]:
    every = [message for segment in session.rollout.segments for message in segment.messages]
    return [f"{message.role}: {message.text[:200]}" for message in every if message.role in ("user", "assistant")]


def _report(cycle: Cycle, versions: str) -> dict[str, Any]:
    from offbook.live.compare import compare_versions, concurrent
    from offbook.live.cycle import ALPHA
    from offbook.live.reactions import score
    from offbook.types import OffbookError

    sessions = [score(one, cycle.settings) for one in cycle.folder.sessions()]
    seen = sorted({one.version for one in sessions})
    try:
        base, other = (int(one) for one in versions.split(",")) if versions else seen[-2:]
        if not {base, other} <= {*seen}:
            raise ValueError
    except ValueError:
        if not seen:
            way_out = f"`offbook agent` and `offbook serve --live {quote(str(cycle.folder.path))}` make them"
            raise OffbookError(f"{cycle.folder.path} has no sessions to report on; {way_out}") from None
        if len(seen) == 1:
            what = f"a report compares two versions, and all {len(sessions)} sessions are of version {seen[0]}"
            raise OffbookError(f"{what}; the next version comes with `offbook live`") from None
        there = ", ".join(map(str, seen))
        raise OffbookError(
            f"a report compares two versions, as in --versions 3,4; there are sessions of {there}"
        ) from None
    found = compare_versions(concurrent(sessions, base, other), base, other, cycle.settings.weights, ALPHA)
    rows = {str(one): cycle.numbers([s for s in sessions if s.version == one]) for one in (base, other)}
    return {"folder": str(cycle.folder.path), "base": base, "other": other, **asdict(found), "versions": rows}


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for one in found:
        results.print_json(json.dumps(one))
