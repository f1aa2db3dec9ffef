"""Measures which lines of an edit are still there, later, in the user's own repository.

Lines are stored as digests without white space: a formatter changes nothing, and no code is kept. An added line is kept
while its file has it; a removed line while it stays away.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offbook.live.redact import secrets_in
from offbook.signals.trajectory.diff import read_diff
from offbook.types import Rollout


@dataclass(frozen=True, slots=True)
class Lines:
    """Digests of an edit's added and removed lines, by file."""

    added: dict[str, list[str]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(each) for side in (self.added, self.removed) for each in side.values())


def lines_of(rollout: Rollout) -> Lines:
    """The changed lines of a rollout. Lines without a letter or digit are left out; a moved line was not removed."""
    lines = Lines()
    for file in read_diff(rollout.diff):
        added = [digest for line in file.added.values() if (digest := _digest(line))]
        there = {_digest(line) for line in (rollout.changed.get(file.path) or "").splitlines()}
        removed = [digest for line in file.removed if (digest := _digest(line)) and digest not in there]
        if added:
            lines.added[file.path] = added
        if removed:
            lines.removed[file.path] = removed
    return lines


def _digest(line: str) -> str:
    if not any(one.isalnum() for one in line) or any(secrets_in(line)):
        return ""
    return hashlib.sha256("".join(line.split()).encode()).hexdigest()[:16]


def share_kept(lines: Lines, text_now: Callable[[str], str | None]) -> float:
    """`text_now` gives the text of a file today, None if it is gone."""
    kept = 0
    for path in {*lines.added, *lines.removed}:
        now = Counter(map(_digest, (text_now(path) or "").splitlines()))
        kept += (Counter(lines.added.get(path, [])) & now).total()
        kept += sum(digest not in now for digest in lines.removed.get(path, []))
    return kept / lines.count


def kept_in(repository: Path, lines: Lines) -> float | None:
    """The share in the working tree now; None if the repository is gone or nothing was changed."""
    if not repository.is_dir() or not lines.count:
        return None

    def text_now(path: str) -> str | None:
        try:
            return (repository / path).read_text(errors="replace")
        except OSError:
            return None

    return share_kept(lines, text_now)
