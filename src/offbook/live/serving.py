"""Other agents' sessions in a cycle: an endpoint that serves the deployed version."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.agent.recorder import Recorder, Refused
from offbook.core.config import Config, load_config
from offbook.live.cycle import Cycle
from offbook.live.reactions import FOLLOW_UP, follow_up, follow_ups, score
from offbook.live.sessions import Reaction, Session, kind_of, lines_of, user_digest
from offbook.rl.collector import Collector
from offbook.types import OffbookError, Rollout


def cycle_in(folder: Path) -> Cycle:
    """The cycle of a folder that has begun."""
    if not (folder / "decisions.jsonl").is_file() or not (folder / "config.toml").is_file():
        raise OffbookError(f"{folder} is no folder of `offbook live` that has begun")
    config = load_config([folder / "config.toml"], {})
    return Cycle(config.model_copy(update={"out": str(folder)}))


@dataclass
class Versions:
    """The versions behind an endpoint. The group of a session is its user. A version is loaded for its first session,
    and unloaded when it is no longer deployed and its last session is over."""

    cycle: Cycle
    config: Config  # of the endpoint: its limits are not those of training
    _loaded: dict[int, Collector] = field(default_factory=dict)
    _given: dict[str, tuple[Recorder, int]] = field(default_factory=dict)  # open sessions by name

    def make(self, rollout: Rollout) -> Recorder:
        version = self.cycle.last.deployed
        for name, (recorder, _) in [*self._given.items()]:
            if recorder.has_ended and not recorder.rollout.segments:
                del self._given[name]
        needed = {version, *(used for _, used in self._given.values())}
        self._loaded = {number: one for number, one in self._loaded.items() if number in needed}
        name = named(rollout.id)
        if name in self._given or self.cycle.folder.has(name):  # of an earlier server, or by another spelling
            raise Refused(f"there is a session {rollout.id} already")
        if version not in self._loaded:
            self._loaded[version] = Collector(self.config, self.cycle.folder.weights(version))
        collector = self._loaded[version]
        recorder = Recorder(rollout, collector.chat, collector.engine.open, collector.limits, collector.harness.prices)
        self._given[name] = recorder, version
        return recorder

    def keep(self, rollout: Rollout) -> None:
        _, version = self._given[named(rollout.id)]
        settings = self.cycle.settings
        session = score(recorded(rollout, version, time.time()), settings)
        self.cycle.folder.keep(session, settings, self._loaded[version].chat)
        del self._given[named(rollout.id)]  # only now: until then it can be tried again

    async def aclose(self) -> None:
        for collector in self._loaded.values():
            await collector.aclose()


def recorded(rollout: Rollout, version: int, at: float) -> Session:
    """A recorded rollout as a session, not scored yet. Rewards with the names of reactions are reactions."""
    rollout = replace(rollout, id=named(rollout.id))
    users = (one.text for segment in rollout.segments for one in segment.messages if one.role == "user")
    session = Session(rollout, user_digest(rollout.group), kind_of(next(users, "")), version, at)
    session.lines = lines_of(rollout)
    for name, value in rollout.reward.parts.items():
        if name in ("kept", "thumbs"):
            session.reactions.append(Reaction(name, max(-1.0, min(1.0, value)), at=at))  # type: ignore[arg-type]
        elif name in ("declined", "interrupted") and value:
            session.reactions.append(Reaction(name, at=at))  # type: ignore[arg-type]
    session.reactions += [follow_up(said, at) for said in follow_ups(rollout)]
    events = [event.detail for event in rollout.events if event.kind == FOLLOW_UP]  # they name their message already
    session.reactions += [replace(follow_up(said, at), text="") for said in events]
    return session


def named(id: str) -> str:
    """As a file: an endpoint's sessions may have slashes in their names."""
    return id.replace("/", ".")
