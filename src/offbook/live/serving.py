"""The versions of a cycle behind an endpoint: every user speaks to theirs, and what was said goes to the cycle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from offbook.agent.recorder import Refused
from offbook.agent.recorder import Session as Recorder
from offbook.core.config import Config, load_config
from offbook.live.collect import named, recorded
from offbook.live.cycle import Cycle
from offbook.live.reactions import score
from offbook.live.sessions import SHADOW, Arm, Session, user_digest
from offbook.live.shadow import Shadow
from offbook.rl.collector import Collector
from offbook.types import OffbookError, Reward, Rollout

LAST_S = 10.0  # that shadows have to end in when the server does
log = logging.getLogger(__name__)


def cycle_in(folder: Path) -> Cycle:
    """Of everybody, or of one population, by its folder."""
    if not (folder / "decisions.jsonl").is_file() or not (folder / "config.toml").is_file():
        raise OffbookError(f"{folder} is no folder of `offbook live` that has begun; of populations, give one's folder")
    config = load_config([folder / "config.toml"], {})
    population = folder.resolve().name if config.live.populations else ""
    return Cycle(config.model_copy(update={"out": str(folder.parent if population else folder)}), population)


@dataclass(frozen=True, slots=True)
class Given:
    """What a session was given."""

    recorder: Recorder
    version: int
    arm: Arm
    shadow: Shadow | None


@dataclass(slots=True)
class Versions:
    """The group of a session is its user. A version is loaded for its first session, which waits for that, and let go
    when it is neither deployed nor on trial and its last session is over."""

    cycle: Cycle
    config: Config  # of the endpoint: its limits are not those of training
    lost: Counter[str] = field(default_factory=Counter)  # shadows, by why
    _loaded: dict[int, Collector] = field(default_factory=dict)
    _given: dict[str, Given] = field(default_factory=dict)  # by the name of an open session
    _ending: dict[asyncio.Task[None], int] = field(default_factory=dict)  # shadows whose session is over

    def make(self, rollout: Rollout) -> Recorder:
        version, arm, _ = self.cycle.serving(user_digest(rollout.group))
        self._let_go()
        name = named(rollout.id)
        if name in self._given or self.cycle.folder.has(name):  # of a server before this one, or by another spelling
            raise Refused(f"there is a session {rollout.id} already")
        if name.endswith(SHADOW):
            raise Refused(f"names that end with {SHADOW} are those of shadows")
        collector, candidate = self._collector(version), self.cycle.shadowing(name)
        way = rollout, collector.chat, collector.engine.open, collector.limits, collector.harness.prices
        shadow = None if candidate is None else self._shadow(name, candidate)
        recorder = Recorder(*way, shadow.hear) if shadow else Recorder(*way)
        self._given[name] = Given(recorder, version, arm, shadow)
        return recorder

    def keep(self, rollout: Rollout) -> None:
        given, settings = self._given[named(rollout.id)], self.cycle.settings
        session = score(recorded(rollout, given.version, given.arm, time.time()), settings)
        self.cycle.folder.keep(session, settings, self._loaded[given.version].chat)
        del self._given[named(rollout.id)]  # until then it can be tried again
        if given.shadow:
            task = asyncio.create_task(self._keep_shadow(given.shadow, session))
            self._ending[task] = given.shadow.version

    async def _keep_shadow(self, shadow: Shadow, session: Session) -> None:
        """Its numbers alone. One that is lost is nobody's loss but the trial's."""
        try:
            await shadow.finish()
            rollout = Rollout(shadow.key, "", "", (), foreign=True, reward=Reward(shadow.unseen.parts))
            unseen = Session(rollout, session.user, session.kind, shadow.version, "shadow", session.at, has_words=False)
            self.cycle.folder.write(replace(unseen, shown=shadow.shown.parts))
        except Exception as error:  # the border of a rollout: whoever is served goes on
            self.lost[str(error) or type(error).__name__] += 1
            log.warning(f"the shadow of session {session.id} is lost: {error}", exc_info=error)

    def _collector(self, version: int) -> Collector:
        if version not in self._loaded:
            self._loaded[version] = Collector(self.config, self.cycle.folder.weights(version))
        return self._loaded[version]

    def _shadow(self, name: str, candidate: int) -> Shadow:
        collector = self._collector(candidate)
        return Shadow(name + SHADOW, candidate, collector.chat, lambda: collector.engine)

    def _let_go(self) -> None:
        last = self.cycle.last
        self._given = {
            name: one
            for name, one in self._given.items()
            if not one.recorder.has_ended or one.recorder.rollout.segments
        }
        self._ending = {task: version for task, version in self._ending.items() if not task.done()}
        open_versions = {one.version for one in self._given.values()}
        shadows = {one.shadow.version for one in self._given.values() if one.shadow}
        needed = {last.deployed, last.candidate, *open_versions, *shadows, *self._ending.values()}
        self._loaded = {version: one for version, one in self._loaded.items() if version in needed}

    def told(self) -> str:
        """How much there is in the folder, and what was lost of shadows."""
        ids = self.cycle.folder.ids()
        shadows = sum(id.endswith(SHADOW) for id in ids)
        lost = "".join(f", {count} lost ({why})" for why, count in self.lost.items())
        return f"{len(ids) - shadows} sessions" + (f" and {shadows} shadows{lost}" if shadows or lost else "")

    async def aclose(self) -> None:
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=LAST_S)
            for task in late:
                self.lost["the server stopped"] += 1
                task.cancel()
            await asyncio.wait(self._ending)
        for collector in self._loaded.values():
            await collector.aclose()
