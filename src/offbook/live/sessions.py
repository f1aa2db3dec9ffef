"""Stores users' sessions and reactions, as files that can be deleted one by one.

sessions/ID.json         a session: the rollout, whose it is, and every reaction so far
cycles/00003/            the run folder of the training that made version 3
gate/00003/              the evaluation of version 3
decisions.jsonl          everything that was decided, with its numbers; the last line says what is deployed
config.toml              the configuration that the cycle last began with

Version 0 is the model that the cycle began with. Lines of edits are stored as digests without white space: a formatter
changes nothing, and no code is kept. An added line is kept while its file has it; a removed line while it stays away.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from offbook.agent.chat import Chat
from offbook.core.config import LiveConfig
from offbook.core.runfolder import RunFolder, read_lines, write_atomic
from offbook.live.redact import scrub, scrubbed, secrets_in
from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.diff import read_diff
from offbook.types import OffbookError, Rollout

ReactionKind = Literal["kept", "declined", "follow_up", "thumbs", "interrupted"]
NAME = re.compile(r"[\w.-]{1,100}")
KINDS = {  # of requests, by their words; the first that fits
    "explain": r"^\W*(please |can you |could you )?(explain|why|what|how|describe|review|where)\b",
    "test": r"\btests?\b",
    "fix": r"\b(fix|bug|fail\w*|broken|error|crash\w*|wrong|repair)\b",
    "refactor": r"\b(refactor|rename|move|clean|split|simplify|extract)\b",
    "add": r"\b(add|implement|write|create|support|bring|restore|make)\b",
}


@dataclass(frozen=True)
class Reaction:
    """Something that a user did or said afterwards. `value` is the share of lines kept, or a thumb: 1 or -1."""

    kind: ReactionKind
    value: float = 0.0
    text: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Lines:
    """Digests of an edit's added and removed lines, by file."""

    added: dict[str, list[str]] = field(default_factory=dict)
    removed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(len(each) for side in (self.added, self.removed) for each in side.values())


@dataclass
class Session:
    rollout: Rollout
    user: str  # a digest
    kind: str  # of what was asked for: sessions are compared with others of their kind
    version: int
    at: float = 0.0  # when it ended
    lines: Lines = field(default_factory=Lines)
    place: str = ""  # the repository
    reactions: list[Reaction] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.rollout.id

    @property
    def has_edited(self) -> bool:
        """Of another agent, whose sandbox was not seen, by its calls."""
        if not self.rollout.foreign or self.rollout.changed:
            return bool(self.rollout.changed)
        return not Trajectory(self.rollout).changed_nothing


@dataclass(frozen=True)
class Decision:
    """A decision, its reason, and what is deployed from then on."""

    kind: Literal["start", "train", "refuse", "deploy", "roll_back", "forget"]
    why: str
    deployed: int
    version: int | None = None  # that it is about
    path: str = ""  # of a new version's weights
    at: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)


_SESSION, _DECISION = TypeAdapter(Session), TypeAdapter(Decision)


def kind_of(request: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, request, re.IGNORECASE)), "other")


def user_digest(name: str) -> str:
    return hashlib.sha256(f"offbook user {name}".encode()).hexdigest()[:16]


class LiveFolder:
    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.decisions_file = self.path / "decisions.jsonl"
        self.config_file = self.path / "config.toml"

    # Sessions

    def _file(self, id: str) -> Path:
        if not NAME.fullmatch(id):
            raise OffbookError(f"{id!r} is no name of a session: give up to 100 letters, digits and ._-")
        return self.path / "sessions" / f"{id}.json"

    def keep(self, session: Session, settings: LiveConfig, chat: Chat) -> Session | None:
        """Store a session without secrets; None without consent."""
        if settings.consent == "none":
            return None
        clean = scrub(replace(session.rollout, group=session.user), chat)
        reactions = [replace(one, text=scrubbed(one.text)) for one in session.reactions]
        stored = replace(session, rollout=clean, reactions=reactions, at=session.at or time.time())
        self.write(stored)
        return stored

    def write(self, session: Session) -> None:
        write_atomic(self._file(session.id), _SESSION.dump_json(session))

    def react(self, id: str, reaction: Reaction) -> Session:
        session = self.session(id)
        session.reactions.append(replace(reaction, text=scrubbed(reaction.text), at=reaction.at or time.time()))
        self.write(session)
        return session

    def session(self, id: str) -> Session:
        path = self._file(id)
        if not path.is_file():
            raise OffbookError(f"{self.path} has no session {id}; it may have been deleted (live.retention_days)")
        try:
            return _SESSION.validate_json(path.read_bytes())
        except ValidationError as error:
            raise OffbookError(f"{path} cannot be read: {error.errors()[0]['msg']}; delete it") from None

    def has(self, id: str) -> bool:
        return self._file(id).exists()

    def ids(self) -> list[str]:
        return [path.stem for path in (self.path / "sessions").glob("*.json")]

    def sessions(self) -> list[Session]:
        """All sessions in the order in which they ended."""
        return sorted(map(self.session, self.ids()), key=lambda one: (one.at, one.id))

    def forget(self, ids: Iterable[str]) -> int:
        """Delete sessions everywhere, also from cycles' training data. What a model learned stays in it."""
        files = {id: self._file(id) for id in ids}  # a bad name fails before anything is deleted
        for cycle in self.path.glob("cycles/*"):
            _forget_in(cycle, {*files})
        count = sum(map(self.has, files))
        for id, file in files.items():  # last: after a kill they are still found and can be deleted again
            for left in (file, *file.parent.glob(f"{id}.json.*.part")):  # of a killed writer
                left.unlink(missing_ok=True)
        return count

    # Complaints that a maintainer approved as hints, one id a line

    def approved(self) -> set[str]:
        file = self.path / "approved_hints"
        return set(file.read_text().split()) if file.is_file() else set()

    def approve(self, ids: Iterable[str]) -> None:
        write_atomic(self.path / "approved_hints", "".join(f"{id}\n" for id in sorted(self.approved() | {*ids})))

    # Decisions

    def decisions(self) -> list[Decision]:
        return [_DECISION.validate_python(row) for row in read_lines(self.decisions_file, dict)[0]]

    def decide(self, decision: Decision) -> Decision:
        decision = replace(decision, at=decision.at or time.time())
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.decisions_file, "ab") as file:
            file.write(_DECISION.dump_json(decision) + b"\n")
        return decision

    def cycle(self, version: int) -> RunFolder:
        return RunFolder(self.path / "cycles" / f"{version:05d}")

    def gate(self, version: int) -> Path:
        return self.path / "gate" / f"{version:05d}"

    def weights(self, version: int) -> Path:
        for decision in self.decisions():
            if decision.version == version and decision.path:
                return Path(decision.path)
        raise OffbookError(
            f"{self.path} has no version {version}; `offbook view {quote(str(self.path))}` shows those there are"
        )


def _forget_in(cycle: Path, gone: set[str]) -> None:
    """Delete the training data of a cycle that learned from one of the sessions, or does not say from which."""
    file = RunFolder(cycle).data_file
    if file.is_file() and gone.isdisjoint(json.loads(file.read_text())["content"]):
        return
    for data in ("rollouts", "feedback", "aside"):
        for left in cycle.glob(f"{data}/*"):
            left.unlink()
    for left in (*cycle.glob("*.part"), *cycle.glob("*/*.part"), file):
        left.unlink(missing_ok=True)


def refuse_no_folder(path: Path) -> None:
    if not path.is_dir():
        raise OffbookError(f"{path} is not a folder; give the one that the agent is to work in")


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

    def text_now(path: str) -> str | None:
        try:
            return (repository / path).read_text(errors="replace")
        except OSError:
            return None

    return share_kept(lines, text_now) if repository.is_dir() and lines.count else None
