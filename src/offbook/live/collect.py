"""Sessions that `offbook serve` recorded: other agents' work, with what was said and earned through the endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbook.core.runfolder import RunFolder
from offbook.live.kept import lines_of
from offbook.live.reactions import FOLLOW_UP, follow_up, follow_ups, score
from offbook.live.sessions import Arm, Reaction, Session, kind_of, storable, user_digest
from offbook.rl.collector import chat_of
from offbook.types import Rollout

if TYPE_CHECKING:
    from offbook.live.cycle import Cycle


def collect(cycle: Cycle, source: Path) -> int:
    """Those that are not there yet. Returns how many there were."""
    found = [*found_in(cycle, source)]
    for session in found:
        cycle.folder.write(session)
    return len(found)


def found_in(cycle: Cycle, source: Path) -> Iterator[Session]:
    """As they would be stored. The group of a session is its user, as whoever opened it said; its version is the one
    that is deployed: whoever serves another one keeps it in another folder."""
    folder, settings = RunFolder.open(source), cycle.settings
    there = {one.id for one in cycle.folder.sessions()}
    version = cycle.last.deployed
    chat = chat_of(cycle.folder.weights(version), cycle.config)
    for step in folder.steps():
        rollouts = {named(one.id): one for one in folder.rollouts(step)[0]}
        at = folder.step_file("rollouts", step).stat().st_mtime  # when the last of them was written
        known = there | cycle.folder.forgotten(rollouts)
        for rollout in (one for id, one in rollouts.items() if id not in known):
            stored = storable(score(recorded(rollout, version, "deployed", at), settings), settings, chat)
            if stored is not None:
                yield stored


def recorded(rollout: Rollout, version: int, arm: Arm, at: float) -> Session:
    """Not scored yet."""
    rollout = replace(rollout, id=named(rollout.id))
    session = Session(rollout, user_digest(rollout.group), kind_of(_request(rollout)), version, arm, at)
    session.lines = lines_of(rollout)
    session.reactions = [*_earned(rollout, at), *(follow_up(said, at) for said in follow_ups(rollout))]
    told = [event.detail for event in rollout.events if event.kind == FOLLOW_UP]  # which has its place already
    session.reactions += [replace(follow_up(said, at), text="") for said in told]
    return session


def named(id: str) -> str:
    """As a file: an endpoint's sessions may have slashes in their names."""
    return id.replace("/", ".")


def _request(rollout: Rollout) -> str:
    users = (one.text for segment in rollout.segments for one in segment.messages if one.role == "user")
    return next(users, "")


def _earned(rollout: Rollout, at: float) -> Iterator[Reaction]:
    """Rewards by the names of reactions."""
    for name, value in rollout.reward.parts.items():
        if name in ("kept", "thumbs"):
            yield Reaction(name, max(-1.0, min(1.0, value)), at=at)  # type: ignore[arg-type]
        elif name in ("declined", "interrupted") and value:
            yield Reaction(name, at=at)  # type: ignore[arg-type]
