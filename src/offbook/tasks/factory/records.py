"""What is kept in out/.factory next to the prepared repositories, so that later calls and other processes go on.

    splits.json             which repositories are held out, as a whole: decided once, for all calls
    NAME/asked.json         the options that a repository's tasks were begun with
    NAME/outcomes.jsonl     what became of its candidates, a line each

What is done is not done again, so a later call with other options does not change it; the call says which differ. A
higher limit goes on.
"""

from __future__ import annotations

import fcntl
import json
import re
import shlex
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbook.core.copies import SAME, Sketch, shared
from offbook.core.runfolder import write_atomic
from offbook.tasks.factory.make import MakeSettings, Outcome

MOST = 200  # tasks that are compared: those that have most in common
ORIGIN = re.compile(r'^origin = "(.*)==[^"=]*"$', re.M)
_OUTCOME = TypeAdapter(Outcome)


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
    """Which options the first call had otherwise, in one sentence; or nothing."""
    path = folder / "asked.json"
    now = options_of(settings)
    if not path.is_file():
        if not (folder / "outcomes.jsonl").is_file():  # or the first call did not write it down
            write_atomic(path, json.dumps(now))
        return ""
    before = json.loads(path.read_bytes())
    changed = [f"--{name} was {before[name] or 'not given'} and is {now[name] or 'not given'}" for name in now]
    changed = [text for name, text in zip(now, changed, strict=True) if before[name] != now[name]]
    if not changed:
        return ""
    kept = "what is prepared, its side and the tasks that are there stay as they are, only new tasks have other options"
    return f"{'; '.join(changed)}: {kept}; or give another --out"


def record(path: Path, outcome: Outcome) -> None:
    """In one write, so that lines of two processes do not run into each other."""
    with open(path, "ab", buffering=0) as file:
        file.write(_OUTCOME.dump_json(outcome) + b"\n")


def earlier_outcomes(path: Path) -> dict[tuple[str, str], Outcome]:
    """What became of candidates in earlier calls, by id and level asked for, so that none is tried twice."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValidationError):  # the last line of a call that was killed
            outcome = _OUTCOME.validate_json(line)
            found[outcome.id, outcome.asked or outcome.level] = outcome
    return found


def funnel(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many candidates were refused for which reason, the most frequent first."""
    return dict(Counter(outcome.refused for outcome in outcomes if outcome.refused).most_common())


def settle(out: Path, names: Iterable[str], heldout: float) -> dict[str, str]:
    """Which side prepared repositories are on. What has tasks in the folder, or was settled before, stays."""
    place = out / ".factory" / "splits.json"
    with open(place.with_suffix(".lock"), "a") as file:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(file, fcntl.LOCK_EX)
        known = json.loads(place.read_bytes()) if place.is_file() else {}
        splits = split_of(names, heldout, known | settled_splits(out))
        write_atomic(place, json.dumps(splits, indent=1, sort_keys=True) + "\n")
    return splits


def split_of(names: Iterable[str], heldout: float, settled: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which repositories are held out: of those that are not `settled`, the first by the checksums of their names, as
    many as are missing from the share of all. By name, so another source of the same code is on the same side."""
    splits = dict(settled or {})
    order = sorted({*names} - splits.keys(), key=lambda name: zlib.crc32(name.encode()))
    total = len(splits) + len(order)
    count = min(max(1, round(heldout * total)), total - 1) if heldout else 0
    count -= sum(split == "heldout" for split in splits.values())
    return splits | {name: "heldout" if place < count else "train" for place, name in enumerate(order)}


def settled_splits(out: Path) -> dict[str, str]:
    """Where the repositories are that have tasks in `out` already."""
    found: dict[str, str] = {}
    for split in ("train", "heldout"):
        for path in sorted((out / split).glob("[!.]*/task.toml")):
            if origin := ORIGIN.search(path.read_text()):  # there may be very many, so they are not loaded
                found.setdefault(origin[1], split)
    return found


def held_out(out: Path) -> list[str]:
    """Repositories that are to be, whether they have tasks or not."""
    place = out / ".factory" / "splits.json"
    splits = json.loads(place.read_bytes()) if place.is_file() else {}
    return sorted(name for name, split in splits.items() if split == "heldout")


class Taken:
    """The code that tasks of all repositories took away, as outcomes say, those of other processes too.

    The same code is in several repositories: vendored copies, forks, functions that everybody copies.
    """

    def __init__(self, factory: Path):
        self._factory = factory
        self._read: dict[Path, int] = {}  # path -> how far it was read
        self._known: list[tuple[str, str, Sketch]] = []  # repository, task, sketch
        self._having: dict[int, list[int]] = defaultdict(list)  # hash -> numbers in that list

    def repeats(self, repository: str, sketch: Sequence[int]) -> str:
        """The task of another repository that is nearly the same, or nothing."""
        for path in sorted(self._factory.glob("*/outcomes.jsonl")):
            for row in self._new_in(path):
                for number in row[2]:
                    self._having[number].append(len(self._known))
                self._known.append(row)
        near = Counter(place for number in sketch for place in self._having.get(number, ()))
        for place, _ in near.most_common(MOST):
            other, task, known = self._known[place]
            if other != repository and shared(tuple(sketch), known) >= SAME:
                return task
        return ""

    def _new_in(self, path: Path) -> Iterator[tuple[str, str, Sketch]]:
        start = self._read.get(path, 0)
        if path.stat().st_size == start:
            return
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = start + len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):  # of a call that was killed
                row = json.loads(line)
                if row.get("sketch") and not row["refused"]:
                    yield row["repository"], row["id"], tuple(row["sketch"])
