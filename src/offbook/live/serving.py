"""The versions of a cycle behind an endpoint: every user speaks to theirs, and what was said goes to the cycle."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from offbook.config import Config, load_config
from offbook.live.collect import recorded
from offbook.live.cycle import Cycle
from offbook.live.reactions import score
from offbook.live.sessions import Arm, user_digest
from offbook.loop.collector import Collector
from offbook.recorder import Session as Recorder
from offbook.types import OffbookError, Rollout


def cycle_in(folder: Path) -> Cycle:
    """Of everybody, or of one population, by its folder."""
    if not (folder / "decisions.jsonl").is_file() or not (folder / "config.toml").is_file():
        raise OffbookError(f"{folder} is no folder of `offbook live` that has begun; of populations, give one's folder")
    config = load_config([folder / "config.toml"], {})
    population = folder.resolve().name if config.live.populations else ""
    return Cycle(config.model_copy(update={"out": str(folder.parent if population else folder)}), population)


@dataclass(slots=True)
class Versions:
    """The group of a session is its user. A version is loaded for its first session, which waits for that, and let go
    when it is neither deployed nor on trial and its last session is over."""

    cycle: Cycle
    config: Config  # of the endpoint: its limits are not those of training
    _loaded: dict[int, Collector] = field(default_factory=dict)
    _given: dict[str, tuple[int, Arm]] = field(default_factory=dict)  # by open session

    def make(self, rollout: Rollout) -> Recorder:
        version, arm, weights = self.cycle.serving(user_digest(rollout.group))
        self._let_go()
        if version not in self._loaded:
            self._loaded[version] = Collector(self.config, weights)
        collector = self._loaded[version]
        self._given[rollout.id] = version, arm
        return Recorder(rollout, collector.chat, collector.engine.open, collector.limits, collector.harness.prices)

    def keep(self, rollout: Rollout) -> None:
        version, arm = self._given[rollout.id]
        session = score(recorded(rollout, version, arm, time.time()), self.cycle.settings)
        self.cycle.folder.keep(session, self.cycle.settings, self._loaded[version].chat)
        del self._given[rollout.id]

    def _let_go(self) -> None:
        last = self.cycle.last
        needed = {last.deployed, last.candidate, *(version for version, _ in self._given.values())}
        self._loaded = {version: one for version, one in self._loaded.items() if version in needed}

    async def aclose(self) -> None:
        for collector in self._loaded.values():
            await collector.aclose()
