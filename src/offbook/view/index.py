"""A run folder as the viewer knows it: an index that grows with the run; single records are read when asked for.

Paths are never taken from a request: what can be served is what the index found, and it looks only inside the folder.
"""

from __future__ import annotations

import json
import re
import threading
import time
import tomllib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from offbook.core.runfolder import RunFolder
from offbook.types import Feedback, OffbookError, Rollout
from offbook.view.lines import (
    Lines,
    Place,
    Said,
    is_inside,
    parse_decision,
    parse_feedback,
    parse_look,
    parse_metrics,
    parse_object,
    parse_rollout,
    parse_task,
    read_at,
)

PARSERS: dict[str, Any] = {
    "metrics": parse_metrics,
    "task": parse_task,
    "look": parse_look,
    "decision": parse_decision,  # of a live cycle
    "rollout": parse_rollout,
    "feedback": parse_feedback,
}
SINGLE = {"metrics": "metrics.jsonl", "task": "tasks.jsonl", "look": "look.jsonl", "decision": "decisions.jsonl"}
CACHED_ROLLOUTS = 4
REFRESH_S = 0.5  # requests that come closer together see the same state
_ROLLOUT = TypeAdapter(Rollout)
_FEEDBACK = TypeAdapter(Feedback)

Files = dict[str, Lines]  # by source


class Unreadable(OffbookError):
    """A rollout whose line has a head and a tail, and something wrong between them."""


class RunIndex:
    """One run, or a folder that has measurements only. `version` changes whenever something in the folder did."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self.root = path.resolve()
        self.folder = RunFolder(self.root)
        self.version = 0
        self.changed_at = 0.0  # when the folder last changed, by the clock of its files
        self.config: dict[str, Any] = {}
        self.data: dict[str, Any] = {}  # of a run that learns from data: which verb it is, and its sources
        self.evals: dict[str, dict[str, Any]] = {}
        self.now: dict[str, Any] = {}  # slots of a run that samples, as they were a moment ago
        self.files: dict[str, Files] = {kind: {} for kind in PARSERS}
        self.rollouts = self.files["rollout"]  # by source: step_00003, eval-final
        self.feedback = self.files["feedback"]
        self.outside: set[str] = set()  # links that lead out of the folder, and what is no file
        self._small: dict[Path, Said | None] = {}  # settings and results, None where unreadable
        self.lock = threading.RLock()  # held while a request is answered: the index does not change meanwhile
        self._looked = 0.0

    def refresh(self) -> None:
        """Read what is new. Hold the lock."""
        if time.monotonic() - self._looked < REFRESH_S:
            return
        self.outside = set()
        changed = self._refresh_small()
        evals = {f"eval-{path.name.split('.')[0]}": path for path in self.root.glob("eval/*.rollouts.jsonl")}
        found = {kind: {"": self.root / name} for kind, name in SINGLE.items()}
        found |= {"rollout": self._steps("rollouts") | evals, "feedback": self._steps("feedback")}
        for kind, paths in found.items():
            changed |= self._refresh_files(self.files[kind], paths, PARSERS[kind])
        self.version += changed
        self._looked = time.monotonic()

    def _steps(self, room: str) -> dict[str, Path]:
        found = sorted((self.root / room).glob("step_*.jsonl"))
        return {path.stem: path for path in found if re.fullmatch(r"step_\d+", path.stem)}

    def _refresh_files(self, known: Files, found: dict[str, Path], parse: Any) -> bool:
        """Read what is new of each file, and forget those that are gone."""
        ours = {source: path for source, path in found.items() if self._is_ours(path)}
        gone = known.keys() - ours.keys()
        for source in gone:
            del known[source]
        changed = bool(gone)
        for source, path in ours.items():
            lines = known.setdefault(source, Lines(path, parse))
            try:
                new = lines.refresh()
            except FileNotFoundError:  # removed between the look and the read
                del known[source]
                new = True
            if new:
                changed = True
                self.changed_at = max(self.changed_at, lines.mark[2] / 1e9)
        return changed

    def _is_ours(self, path: Path) -> bool:
        if is_inside(path, self.root):
            return True
        if path.is_symlink() or path.exists():
            self.outside.add(str(path.relative_to(self.root)))
        return False

    def _refresh_small(self) -> bool:
        results = [path for path in self.root.glob("eval/*.json") if "." not in path.stem]  # not *.fingerprint.json
        now = self.root / "slots" / "now.json"
        own = (self.folder.config_file, self.folder.data_file, now)
        small = {
            path: _read_small(path) for path in (*own, self.root / "results.json", *results) if self._is_ours(path)
        }
        if now in small:  # a long step is no standstill
            self.changed_at = max(self.changed_at, now.stat().st_mtime)
        self.config, self.data, self.now = (small.get(path) or {} for path in own)
        self.evals = {}
        for path, found in small.items():
            if path not in own and found is not None:
                self.evals["final" if path.parent == self.root else path.stem] = found
        changed = small != self._small
        self._small = small
        return changed

    @property
    def unreadable(self) -> Counter[str]:
        """What was left out, by what it is."""
        count = Counter({"file outside the run folder": len(self.outside)})
        for kind, files in self.files.items():
            count[f"{kind} line"] = sum(lines.unreadable for lines in files.values())
        count["settings or result file"] = sum(value is None for value in self._small.values())
        return +count

    @property
    def trains(self) -> bool:
        """`rollout` and `eval` leave a fingerprint; their settings name steps too."""
        is_other = (self.root / "fingerprint.json").exists() or self.files["decision"]
        return not is_other and self.folder.config_file.exists()

    @property
    def verb(self) -> str:
        """What trained it: `train` or, from data, `distill`, `sft`, `pretrain`, `mtp`, `live`; "data" where the folder
        does not say which."""
        return str(self.data.get("verb", "data")) if self.data else "train"

    def rows(self) -> list[Said]:
        """The metrics, one dictionary per step."""
        return said_in(self.files["metrics"])

    def recorded(self) -> dict[str, Said]:
        """The tasks that the folder tells of, by id."""
        return {task["id"]: task for task in said_in(self.files["task"])}

    def place(self, source: str, number: int) -> Place:
        lines = self.rollouts.get(source)
        if lines is None or not 0 <= number < len(lines.places):
            raise OffbookError(f"{self.name} has no rollout {number} in {source}")
        return lines.places[number]

    def rollout(self, source: str, number: int) -> Rollout:
        """The whole rollout, from its place in the file; the last few are kept."""
        place = self.place(source, number)
        lines = self.rollouts[source]
        try:
            return _read_rollout(lines.path, lines.mark, place.offset, place.length)
        except (ValidationError, OSError):
            raise Unreadable(f"rollout {number} of {source} cannot be read") from None

    def hints(self, source: str, rollout: str) -> tuple[list[Said], int]:
        """Every target of a rollout as it was recorded, in order, and how many of its lines could not be read."""
        lines = self.feedback.get(source)
        found = []
        broken = 0
        for place in lines.places if lines else []:
            if place.said["rollout"] != rollout:
                continue
            record = parse_object(read_at(lines.path, place.offset, place.length)) if lines else None
            try:
                _FEEDBACK.validate_python(record)
            except ValidationError:
                broken += 1
            else:
                found.append(record or {})
        return sorted(found, key=lambda one: (one["target"]["segment"], one["target"]["message"])), broken


@lru_cache(maxsize=CACHED_ROLLOUTS)
def _read_rollout(path: Path, mark: tuple[int, int, int], offset: int, length: int) -> Rollout:
    """`mark` changes when the file does, and what was read before is out of date."""
    return _ROLLOUT.validate_json(read_at(path, offset, length))


def said_in(files: Files, source: str = "") -> list[Said]:
    """What a list says of the lines of one file; nothing where there is none."""
    return [place.said for place in files[source].places] if source in files else []


def _read_small(path: Path) -> dict[str, Any] | None:
    """None where it cannot be read; the index counts it."""
    try:
        text = path.read_text()
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
