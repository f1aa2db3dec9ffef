"""The page as one file: the same scripts, and the answers that they would ask the server for.

A long run does not fit into a mail. Its list is whole, and the rollouts that can be opened are those that the report
picks, then those with targets, then the others, spread over the run, until the file is full; the page says so.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from offbook.runfolder import write_atomic
from offbook.view import answers
from offbook.view.index import RunIndex, Unreadable
from offbook.view.load import load_run, pick_rollouts
from offbook.view.markup import tag
from offbook.view.server import SCRIPTS, STYLES, answer, asset

MAX_BYTES = 6_000_000
CHUNK = 40  # messages that data.js asks for at once
NUM_PICKS = 6  # those that `offbook audit` links to


def write_single(out: Path, runs: list[RunIndex], title: str, max_bytes: int = MAX_BYTES) -> None:
    for run in runs:
        run.refresh()
    held, picks = _held(runs, max_bytes)
    data = answers.to_json({"answers": held, "picks": picks}).decode().replace("<", "\\u003c")
    style = "".join(asset(name).decode() for name in STYLES)
    script = "\n".join(asset(name).decode() for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    body = asset("index.html").decode().split("<body>")[1].split("<script")[0]
    write_atomic(
        out,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tag('title', title)}\n<style>\n{style}</style>\n</head>\n<body>{body}"
        f'<script type="application/json" id="held">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n',
    )


def _held(runs: list[RunIndex], max_bytes: int) -> tuple[dict[str, Any], list[list[Any]]]:
    held = {"api/runs": answer(runs, "api/runs")}
    for number in range(len(runs)):
        for what in ("curves", "rollouts", "tasks"):
            held |= _ask(runs, number, what)
    picks = _picks(runs)
    rollouts = (partial(_of_rollout, runs, *place) for place in (*picks, *_others(runs, picks)))
    tasks = (
        partial(_ask, runs, number, "task", id=task["id"])
        for number in range(len(runs))
        for task in held[f"api/run/{number}/tasks"]["tasks"]
    )
    return held | _as_many_as_fit(tasks, max_bytes // 4) | _as_many_as_fit(rollouts, max_bytes, len(picks)), picks


def _as_many_as_fit(asked: Iterable[Callable[[], dict[str, Any]]], room: int, at_least: int = 0) -> dict[str, Any]:
    """Answers one after the other until the room is full. The page tells which it does not hold."""
    held: dict[str, Any] = {}
    for count, ask in enumerate(asked):
        try:
            new = ask()
        except Unreadable:
            continue
        room -= len(answers.to_json(new))
        if room < 0 and count >= at_least:
            break
        held |= new
    return held


def _ask(runs: list[RunIndex], run: int, what: str, /, **parameters: Any) -> dict[str, Any]:
    """The answer under the name by which data.js looks for it."""
    plain = "&".join(f"{name}={value}" for name, value in parameters.items())
    path = f"api/run/{run}/{what}"
    return {f"{path}?{plain}" if plain else path: answer(runs, f"{path}?{urlencode(parameters)}")}


def _of_rollout(runs: list[RunIndex], number: int, source: str, line: int) -> dict[str, Any]:
    """Everything that opening this rollout asks for."""
    found = _ask(runs, number, "rollout", source=source, number=line)
    [opened] = found.values()
    for first in range(0, len(opened["outline"]), CHUNK):
        found |= _ask(runs, number, "messages", source=source, number=line, first=first, count=CHUNK)
    return found | _ask(runs, number, "group", source=source, group=opened["group"])


def _picks(runs: list[RunIndex]) -> list[list[Any]]:
    """The rollouts of the report, in its order."""
    loaded = [load_run(str(number), run.root) for number, run in enumerate(runs)]
    found: list[list[Any]] = []
    for pick in pick_rollouts(loaded, NUM_PICKS):
        number, source = int(pick.run.name), f"step_{pick.step:05d}"
        places = runs[number].rollouts[source].places if source in runs[number].rollouts else []
        lines = [line for line, place in enumerate(places) if place.said["id"] == pick.rollout.id]
        found += [[number, source, line] for line in lines[:1]]
    return found


def _others(runs: list[RunIndex], picks: list[list[Any]]) -> Iterator[list[Any]]:
    """Those with targets first; within both kinds in an order that spreads over the run from the start on."""
    every = []
    for number, run in enumerate(runs):
        for source, lines in run.rollouts.items():
            hinted = (
                {place.said["rollout"] for place in run.feedback[source].places} if source in run.feedback else set()
            )
            every += [(place.said["id"] not in hinted, number, source, line) for line, place in enumerate(lines.places)]
    for plain in (False, True):
        kind = [list(one[1:]) for one in every if one[0] is plain]
        stride = max(1, len(kind) // 40)
        for start in range(stride):
            yield from (one for one in kind[start::stride] if one not in picks)
