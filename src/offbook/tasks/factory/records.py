"""What is kept in out/.factory next to the prepared repositories, so that later calls and other processes go on.

    splits.json             which repositories are held out, as a whole: decided once, for all calls
    NAME/outcomes.jsonl     what became of its candidates, a line each

What is done is not done again, so a later call with other options does not change it. A higher limit goes on.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from offbook.core.copies import SAME, Sketch, shared
from offbook.core.runfolder import write_atomic
from offbook.tasks.factory.make import Outcome

_OUTCOME = TypeAdapter(Outcome)


def record(path: Path, outcome: Outcome) -> None:
    """In one write, so that lines of two processes do not run into each other."""
    with open(path, "ab", buffering=0) as file:
        file.write(_OUTCOME.dump_json(outcome) + b"\n")


def _outcomes_in(data: bytes) -> Iterator[Outcome]:
    for line in data.splitlines():
        with suppress(ValidationError):  # the last line of a call that was killed
            yield _OUTCOME.validate_json(line)


def earlier_outcomes(path: Path) -> dict[tuple[str, str], Outcome]:
    """What became of candidates in earlier calls, by id and level asked for, so that none is tried twice."""
    data = path.read_bytes() if path.is_file() else b""
    return {(outcome.id, outcome.level): outcome for outcome in _outcomes_in(data)}


def funnel(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many candidates were refused for which reason, the most frequent first."""
    return dict(Counter(outcome.refused for outcome in outcomes if outcome.refused).most_common())


def settle(out: Path, names: Iterable[str], heldout: float) -> dict[str, str]:
    """Which side prepared repositories are on. What was settled before stays."""
    place = out / ".factory" / "splits.json"
    with FileLock(place.with_suffix(".lock")):
        splits = split_of(names, heldout, json.loads(place.read_bytes()) if place.is_file() else {})
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


class Taken:
    """The code that tasks of all repositories took away, as outcomes say, those of other processes too.

    The same code is in several repositories: vendored copies, forks, functions that everybody copies.
    """

    def __init__(self, factory: Path):
        self._factory = factory
        self._read: dict[Path, int] = {}  # path -> how far it was read
        self._known: list[Outcome] = []

    def repeats(self, repository: str, sketch: Sketch) -> str:
        """The task of another repository that is nearly the same, or nothing."""
        for path in sorted(self._factory.glob("*/outcomes.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                self._known += [outcome for outcome in _outcomes_in(file.read()) if not outcome.refused]
                self._read[path] = file.tell()
        for outcome in self._known:
            if outcome.repository != repository and shared(sketch, outcome.sketch) >= SAME:
                return outcome.id
        return ""
