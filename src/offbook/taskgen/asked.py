"""The options that a repository's tasks were begun with, in .factory/NAME/asked.json.

What is done is not done again, so a later call with other options does not change it. Which these are is said, and what
holds. A limit is none of them: a higher one just goes on.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from offbook.runfolder import write_atomic
from offbook.taskgen.make import MakeSettings

TASKS = "tasks that are there stay as they are, only new ones have it"
SIDE = "it stays on the side where it is"
PREPARED = "it is prepared already, and stays so"
HOLDS = {
    "level": TASKS, "wording": TASKS, "context": TASKS, "rewrite": TASKS, "heldout": SIDE,
    "python": PREPARED, "pytest-options": PREPARED, "start": PREPARED,
}  # fmt: skip


def options_of(settings: MakeSettings) -> dict[str, str]:
    """By their names on the command line; empty where one is not given."""
    prepare = settings.prepare
    return {
        "level": settings.level,
        "wording": settings.wording,
        "context": "given" if settings.context else "",
        "rewrite": "given" if settings.rewrite else "",
        "heldout": f"{settings.heldout:g}",
        "python": prepare.python,
        "pytest-options": shlex.join(prepare.pytest_options),
        "start": prepare.start,
    }


def differing(folder: Path, settings: MakeSettings) -> str:
    """Which options the first call had otherwise and what holds, in one sentence; or nothing."""
    place, now = folder / "asked.json", options_of(settings)
    if not place.is_file():
        if not (folder / "outcomes.jsonl").is_file():  # or the first call was one that did not write it down
            write_atomic(place, json.dumps(now))
        return ""
    before = json.loads(place.read_bytes())
    told: dict[str, list[str]] = {}
    for option, holds in HOLDS.items():
        if before[option] != now[option]:
            was, is_now = (f"`{value}`" if value else "not given" for value in (before[option], now[option]))
            told.setdefault(holds, []).append(f"--{option} was {was} and is {is_now}")
    if not told:
        return ""
    return "; ".join(f"{' and '.join(options)}: {holds}" for holds, options in told.items()) + "; or give another --out"
