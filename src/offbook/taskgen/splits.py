"""Which repositories are held out, whole: once and for all calls and processes, in out/.factory/splits.json."""

from __future__ import annotations

import fcntl
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from offbook.runfolder import write_atomic

ORIGIN = re.compile(r'^origin = "(.*)==[^"=]*"$', re.M)


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
