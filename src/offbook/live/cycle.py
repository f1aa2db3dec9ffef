"""The cycle: each turn does the next thing that is due and records the decision with its numbers.

    enough settled sessions of the deployed version ──> train ──> gate ──> refuse
                                                                    └────> deploy ──> (drift) roll back

The last decision alone says what is deployed, so a killed process resumes from it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import write_atomic
from offbook.evals.suites import load_suites
from offbook.live.compare import alarms, compare_rows, measured
from offbook.live.kept import kept_in
from offbook.live.learning import train_on
from offbook.live.reactions import score
from offbook.live.sessions import Decision, LiveFolder, Reaction, Session
from offbook.live.user_hints import hint_id, may_teach, said_against
from offbook.rl.models import Progress, model_folder, quiet

DAY_S = 86_400.0
ALPHA = 0.05  # chance that the gate refuses a version that is no worse


class Cycle:
    def __init__(
        self,
        config: Config,
        tell: Callable[[str], None] = lambda line: None,
        progress: Progress = quiet,
        clock: Callable[[], float] = time.time,
    ):
        self.config = config
        self.settings = config.live
        self.folder = LiveFolder(config.out)
        self._tell = tell
        self._progress = progress
        self._clock = clock

    def begin(self) -> None:
        """Version 0 is the model of the configuration. A cycle that has begun keeps its own configuration: one user's
        consent is not another's."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        if not self.folder.config_file.is_file():
            write_atomic(self.folder.config_file, self.config.to_toml())
        if not self.folder.decisions():
            start = model_folder(self.config.model, self.config.seed, self._progress).resolve()
            self._decide("start", f"{self.config.model} is served", deployed=0, version=0, path=str(start))

    @property
    def last(self) -> Decision:
        return self.folder.decisions()[-1]

    def turn(self) -> Decision | None:
        """Do the next thing that is due; None if nothing is."""
        every = self.folder.sessions()
        if gone := [one.id for one in every if self.is_expired(one)]:
            count = self.folder.forget(gone)
            days = f"{self.settings.retention_days:g} days"
            return self._decide("forget", f"{count} sessions are older than {days}", numbers={"sessions": count})
        last = self.last
        if last.kind == "train" and last.version is not None:  # killed before the gate
            return self._gate(last.version, Path(last.path))
        sessions = [score(self._measured(one), self.settings) for one in every]
        return self._roll_back(sessions) or self._train(sessions)

    def waits_for(self) -> str:
        """What is stored, and what has to happen before the next thing is due."""
        sessions = [score(one, self.settings) for one in self.folder.sessions()]
        words = f"{self.folder.path}: version {self.last.deployed} is deployed, {len(sessions)} sessions are stored"
        if not sessions:
            return f"{words}; `offbook agent` and `offbook serve --live {quote(str(self.folder.path))}` make some"
        chosen, left_out = self.to_learn_from(sessions)
        wanted = f"{self.settings.sessions} sessions to learn from (live.sessions)"
        words += f"; training waits for {wanted} and has {len(chosen)}"
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        return f"{words}; left out: {reasons}" if reasons else words

    def to_learn_from(self, sessions: Sequence[Session]) -> tuple[list[Session], dict[str, int]]:
        """New settled sessions of the deployed version, and how many were left out, by reason.

        No user has more than `live.user_share` of a cycle: the newest of theirs are taken."""
        decisions = self.folder.decisions()
        upto = max((one.numbers["upto"] for one in decisions if "upto" in one.numbers), default=0.0)
        new = [one for one in sessions if one.at > upto]
        settled = self._settled(new)
        own = [one for one in settled if one.version == decisions[-1].deployed]
        usable = [one for one in own if not one.rollout.fault]
        most, count = max(1, int(self.settings.user_share * self.settings.sessions)), Counter[str]()
        chosen: list[Session] = []
        for one in reversed(usable):
            count[one.user] += 1
            if count[one.user] <= most:
                chosen.insert(0, one)
        return chosen, {
            "not settled": len(new) - len(settled),
            "another version": len(settled) - len(own),
            "the machine's fault": len(own) - len(usable),
            "beyond one user's share (live.user_share)": len(usable) - len(chosen),
        }

    def complaints(self) -> list[dict[str, Any]]:
        """The follow-ups that the next cycle hears, which of them teach, and why the others do not."""
        if not self.folder.decisions_file.is_file():
            return []
        said = said_against(self.to_learn_from([score(one, self.settings) for one in self.folder.sessions()])[0])
        reasons = may_teach(said, self.folder.approved())
        rows = [
            {"id": hint_id(text), "text": text, "users": len(said[text]), "why not": reasons[text]} for text in said
        ]
        return sorted(rows, key=lambda row: (bool(row["why not"]), row["text"]))

    def numbers(self, sessions: Sequence[Session]) -> dict[str, Any]:
        """Means of scored sessions."""
        rewards = [one.rollout.reward for one in sessions]
        kept = [one.rollout.reward.parts.get("kept", 0.0) for one in sessions if one.has_edited]
        return {
            "sessions": len(sessions),
            "reward": fmean(reward.total for reward in rewards),
            "parts": {name: fmean(reward.parts.get(name, 0.0) for reward in rewards) for name in self.settings.weights},
            "edit_rate": len(kept) / len(sessions),
            "kept_of_edits": fmean(kept) if kept else None,
        }

    def is_expired(self, session: Session) -> bool:
        return session.at < self._clock() - self.settings.retention_days * DAY_S

    def _measured(self, session: Session) -> Session:
        """Measure which lines are still there, once, when the session settles."""
        settles = session.at + self.settings.settle_s
        is_done = any(one.kind == "declined" or (one.kind == "kept" and one.at >= settles) for one in session.reactions)
        if session.place and not is_done and settles <= self._clock():
            share = kept_in(Path(session.place), session.lines)
            if share is not None:
                return self.folder.react(session.id, Reaction("kept", share, at=self._clock()))
        return session

    def _roll_back(self, sessions: Sequence[Session]) -> Decision | None:
        """Go back to the last good version if use has become worse since the deployment."""
        decisions = self.folder.decisions()
        deployed = decisions[-1].deployed
        bad = {one.version for one in decisions if one.kind == "roll_back"}
        first = next(number for number, one in enumerate(decisions) if one.deployed == deployed)
        good = [one.deployed for one in decisions[:first] if one.deployed not in bad]
        if not good:
            return None
        trusted = [one for one in self._settled(sessions) if one.version not in bad]
        since = [one for one in trusted if one.version == deployed]
        before = [one for one in trusted if one.version != deployed and one.at <= (since[0].at if since else 0.0)]
        found = alarms(before, since)
        if not found:
            return None
        worst = found[0]
        why = f"{worst.series} went from {worst.before:.3g} to {worst.after:.3g} with version {deployed}"
        numbers = {"alarms": [asdict(one) for one in found], "sessions": len(since), "before": len(before)}
        return self._decide("roll_back", why, deployed=good[-1], version=deployed, numbers=numbers)

    def _train(self, sessions: Sequence[Session]) -> Decision | None:
        """Train a new version and put it through the gate."""
        chosen, left_out = self.to_learn_from(sessions)
        if len(chosen) < self.settings.sessions:
            return None
        version, deployed = 1 + max(one.version or 0 for one in self.folder.decisions()), self.last.deployed
        start = self.folder.weights(deployed)
        self._tell(f"cycle {version}: learning from {len(chosen)} sessions of version {deployed}")
        approved = self.folder.approved()
        path, row = train_on(self.config, chosen, start, self.folder.cycle(version), approved)
        reasons = may_teach(said_against(chosen), approved)
        numbers = {**self.numbers(chosen), "left_out": left_out, "upto": chosen[-1].at}
        numbers["complaints"] = {"taught": sum(not why for why in reasons.values()), "heard": len(reasons)}
        numbers["last_step"] = {key: row[key] for key in sorted(row) if "/" not in key}
        why = f"{len(chosen)} sessions of version {deployed} came to {numbers['reward']:.3f} each"
        self._decide("train", why, version=version, path=str(path.resolve()), numbers=numbers)
        return self._gate(version, path)

    def _gate(self, version: int, weights: Path) -> Decision:
        deployed, main = self.last.deployed, self.config.tasks.source
        suites = load_suites([main, *self.settings.suites], self.config, progress=self._progress)
        self._tell(f"the gate: {len(suites.tasks)} tasks")
        base, other = (
            measured(self.config, number, path, suites, self.folder.gate(number))
            for number, path in ((deployed, self.folder.weights(deployed)), (version, weights))
        )
        compared = compare_rows(base, other, ALPHA, main)
        numbers = {"gate": compared, "tasks": len(suites.tasks)}
        for name, one in compared.items():
            if one["worse"]:
                why = f"{name} went from {one['deployed']:.3g} to {one['candidate']:.3g} (p {one['p']:.3g})"
                return self._decide("refuse", why, version=version, numbers=numbers)
        why = f"of {len(compared)} metrics none is significantly worse than version {deployed}'s"
        return self._decide("deploy", why, deployed=version, version=version, numbers=numbers)

    def _settled(self, sessions: Sequence[Session]) -> list[Session]:
        return [one for one in sessions if one.at + self.settings.settle_s <= self._clock()]

    def _decide(self, kind: Any, why: str, deployed: int | None = None, **more: Any) -> Decision:
        if deployed is None:
            deployed = self.last.deployed
        decision = self.folder.decide(Decision(kind, why, deployed, at=self._clock(), **more))
        self._tell(f"{kind.replace('_', ' ')}: {why}")
        return decision
