"""The page as one file: the same scripts, and the answers that they would ask the server for.

A long run does not fit into a mail. Its list is whole, and the rollouts that can be opened are those of the examples,
then those with targets or flags, then the others, until the file is full; the page says so.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from offbook.core.runfolder import write_atomic
from offbook.view import answers
from offbook.view.index import RunIndex, Unreadable
from offbook.view.server import SCRIPTS, STYLES, Outcome, answer, asset, no_outcome

MAX_BYTES = 6_000_000
CHUNK = 40  # messages that data.js asks for at once


def write_single(
    out: Path,
    runs: list[RunIndex],
    title: str,
    outcome: Outcome = no_outcome,
    max_bytes: int = MAX_BYTES,
    next_steps: dict[str, Any] | None = None,
) -> None:
    """`next_steps`, a heading and commands with what they do, end the page's first screen."""
    held = _held(runs, outcome, max_bytes)
    data = answers.to_json({"answers": held, "title": title, "next": next_steps}).decode().replace("<", "\\u003c")
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
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>{body}"
        f'<script type="application/json" id="held">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n',
    )


def _held(runs: list[RunIndex], outcome: Outcome, max_bytes: int) -> dict[str, Any]:
    held = {"api/runs": answer(runs, "api/runs", outcome)}
    for number in range(len(runs)):
        for what in ("curves", "rollouts", "tasks", "example", "decisions"):
            held |= _ask(runs, number, what)
    examples = [(number, held[f"api/run/{number}/example"]) for number in range(len(runs))]
    first = [(number, found["source"], found["number"]) for number, found in examples if found]
    rollouts = (partial(_of_rollout, runs, *place) for place in dict.fromkeys([*first, *_in_order(runs)]))
    tasks = (
        partial(_ask, runs, number, "task", id=task["id"])
        for number in range(len(runs))
        for task in held[f"api/run/{number}/tasks"]["tasks"]
    )
    return held | _as_many_as_fit(tasks, max_bytes // 4) | _as_many_as_fit(rollouts, max_bytes, len(first))


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


def _in_order(runs: list[RunIndex]) -> list[tuple[int, str, int]]:
    """Those with targets or flags first."""
    noted: list[tuple[int, str, int]] = []
    plain: list[tuple[int, str, int]] = []
    for number, run in enumerate(runs):
        for source, lines in run.rollouts.items():
            rules, _ = answers.targets_of(run, source)
            for line, place in enumerate(lines.places):
                is_noted = place.said["id"] in rules or place.said["flags"]
                (noted if is_noted else plain).append((number, source, line))
    return noted + plain
