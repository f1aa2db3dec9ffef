"""The cycle: each turn does the next thing that is due and records the decision with its numbers.

    enough settled sessions of the deployed version ──> train ──> gate ──> refuse
                                                                    └────> deploy ──> (drift) roll back

The last decision alone says what is deployed, so a killed process resumes from it.

A version is trained by RL on reactions with a baseline per kind of request, and by hints from follow-ups. Every step of
a cycle learns from other sessions, all sampled by one version. From the second step on they are slightly off-policy;
the pi / mu weights of train/head.py correct for it, and their mean is in the metrics.

Gate. Both versions work on the same held-out tasks and side suites. Every metric that has a direction is compared task
by task (evals/statistics.py). With Bonferroni's correction the chance to refuse a version that is worse in nothing is
at most alpha, for all metrics together. The record has the intervals, so it shows what so few tasks cannot tell.

Watch. The drift watch of monitors/drift.py over batches of sessions since a deployment: what agents do and what users
think of it. Only changes for the worse raise an alarm, and one alarm rolls the version back.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.evals.metrics import Row, ratios
from offbook.evals.run import Subject, load_suites, run_eval
from offbook.evals.statistics import compare_paired
from offbook.live.reactions import hint_id, may_teach, said_against, score, with_hints
from offbook.live.sessions import Decision, LiveFolder, Reaction, Session, kept_in
from offbook.rl.models import Progress, chat_folder, chat_of, model_folder, model_to_train, quiet
from offbook.rl.plan import make_plan, this_device
from offbook.rl.resume import RolloutFiles, begin_run
from offbook.rl.train_step import TrainContext, teachers_of
from offbook.signals.feedback import rules_of
from offbook.signals.monitors.drift import SERIES, Alarm, Point, find_shift
from offbook.signals.trajectory import Trajectory
from offbook.stages.distill import teach
from offbook.train.algorithms import baselines
from offbook.train.checkpoint import load_training_state
from offbook.train.trainer import Trainer

DAY_S = 86_400.0
ALPHA = 0.05  # chance that the gate refuses a version that is no worse
# 1: more is better. What a model does less of to dodge bad reactions counts, too.
DIRECTIONS = {
    "solved": 1,
    "invalid_per_100": -1,
    "test_edits": -1,
    "question_rate": -1,
    "terminal_only": -1,
    "flagged": -1,
    "crashed": -1,
    "edit_rate": 1,  # of the held-out tasks alone: side suites have requests that call for no edit
}
BATCH = 16  # sessions per point of the watch
MAX_POINTS_BEFORE = 12  # of earlier versions that it is compared with
FALLING = ("reward", "kept", "edit_rate")  # what the watch takes to be worse when it falls; the others when they rise


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
        oldest = self._clock() - self.settings.retention_days * DAY_S
        if gone := [one.id for one in every if one.at < oldest]:
            count = self.folder.forget(gone)
            why = f"{count} sessions are older than {self.settings.retention_days:g} days"
            return self._decide("forget", why, numbers={"sessions": count})
        last = self.last
        if last.kind == "train" and last.version is not None:  # killed before the gate
            return self._gate(last.version, Path(last.path))
        sessions = [score(self._with_kept_lines(one), self.settings) for one in every]
        return self._roll_back(sessions) or self._train(sessions)

    def waits_for(self) -> str:
        """What is stored, and what has to happen before the next thing is due."""
        chosen, left_out = self.to_learn_from(self._scored())
        count = len(self.folder.ids())
        words = f"{self.folder.path}: version {self.last.deployed} is deployed, {count} sessions are stored"
        if not count:
            return f"{words}; `offbook agent` and `offbook serve --live {quote(str(self.folder.path))}` make some"
        wanted = f"{self.settings.sessions} sessions to learn from (live.sessions)"
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        words += f"; training waits for {wanted} and has {len(chosen)}"
        return f"{words}; left out: {reasons}" if reasons else words

    def to_learn_from(self, sessions: Sequence[Session]) -> tuple[list[Session], dict[str, int]]:
        """New settled sessions of the deployed version, and how many were left out, by reason.

        No user has more than `live.user_share` of a cycle: the newest of theirs are taken."""
        decisions = self.folder.decisions()
        upto = max((one.numbers["upto"] for one in decisions if "upto" in one.numbers), default=0.0)
        most = max(1, int(self.settings.user_share * self.settings.sessions))
        by_user = Counter[str]()
        left_out = Counter[str]()
        chosen: list[Session] = []
        for one in reversed([one for one in sessions if one.at > upto]):
            if not self._is_settled(one):
                left_out["not settled"] += 1
            elif one.version != decisions[-1].deployed:
                left_out["another version"] += 1
            elif one.rollout.fault:
                left_out["the machine's fault"] += 1
            elif by_user[one.user] == most:
                left_out["beyond one user's share (live.user_share)"] += 1
            else:
                by_user[one.user] += 1
                chosen.append(one)
        return chosen[::-1], dict(left_out)

    def complaints(self) -> list[dict[str, Any]]:
        """The follow-ups that the next cycle hears, which of them teach, and why the others do not."""
        if not self.folder.decisions_file.is_file():
            return []
        said = said_against(self.to_learn_from(self._scored())[0])
        reasons = may_teach(said, self.folder.approved())
        rows = [
            {"id": hint_id(text), "text": text, "users": len(said[text]), "why not": reasons[text]} for text in said
        ]
        return sorted(rows, key=lambda row: (bool(row["why not"]), row["text"]))

    def _scored(self) -> list[Session]:
        return [score(one, self.settings) for one in self.folder.sessions()]

    def _is_settled(self, session: Session) -> bool:
        return session.at + self.settings.settle_s <= self._clock()

    def _with_kept_lines(self, session: Session) -> Session:
        """Measure which lines are still there, once, when the session settles."""
        settles = session.at + self.settings.settle_s
        is_done = any(one.kind == "declined" or (one.kind == "kept" and one.at >= settles) for one in session.reactions)
        if session.place and not is_done and self._is_settled(session):
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
        trusted = [one for one in sessions if self._is_settled(one) and one.version not in bad]
        since = [one for one in trusted if one.version == deployed]
        before = [one for one in trusted if one.version != deployed and since and one.at <= since[0].at]
        found = alarms(before, since) if good else []
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
        deployed = self.last.deployed
        version = 1 + max(one.version or 0 for one in self.folder.decisions())
        self._tell(f"cycle {version}: learning from {len(chosen)} sessions of version {deployed}")
        reasons = may_teach(said_against(chosen), self.folder.approved())
        start = self.folder.weights(deployed)
        path, row = train_version(self.config, chosen, start, self.folder.cycle(version), reasons)
        rewards = [one.rollout.reward for one in chosen]
        kept = [one.rollout.reward.parts.get("kept", 0.0) for one in chosen if one.has_edited]
        numbers = {
            "sessions": len(chosen),
            "reward": fmean(reward.total for reward in rewards),
            "parts": {name: fmean(reward.parts.get(name, 0.0) for reward in rewards) for name in self.settings.weights},
            "edit_rate": len(kept) / len(chosen),
            "kept_of_edits": fmean(kept) if kept else None,
            "left_out": left_out,
            "upto": chosen[-1].at,
            "complaints": {"taught": sum(not why for why in reasons.values()), "heard": len(reasons)},
            "last_step": {key: row[key] for key in sorted(row) if "/" not in key},
        }
        why = f"{len(chosen)} sessions of version {deployed} came to {numbers['reward']:.3f} each"
        self._decide("train", why, version=version, path=str(path.resolve()), numbers=numbers)
        return self._gate(version, path)

    def _gate(self, version: int, weights: Path) -> Decision:
        deployed = self.last.deployed
        main = self.config.tasks.source
        suites = load_suites([main, *self.settings.suites], self.config, progress=self._progress)
        self._tell(f"the gate: {len(suites.tasks)} tasks")
        rows = []
        for number, path in ((deployed, self.folder.weights(deployed)), (version, weights)):
            files = RolloutFiles.folder(self.folder.gate(number))
            result = run_eval(Subject(f"version {number}", self.config, path), suites, files)
            rows.append([Row(**row) for row in result["rows"]])
        compared = compare_rows(rows[0], rows[1], ALPHA, main)
        numbers = {"gate": compared, "tasks": len(suites.tasks)}
        for name, one in compared.items():
            if one["worse"]:
                why = f"{name} went from {one['deployed']:.3g} to {one['candidate']:.3g} (p {one['p']:.3g})"
                return self._decide("refuse", why, version=version, numbers=numbers)
        why = f"of {len(compared)} metrics none is significantly worse than version {deployed}'s"
        return self._decide("deploy", why, deployed=version, version=version, numbers=numbers)

    def _decide(self, kind: Any, why: str, deployed: int | None = None, **more: Any) -> Decision:
        if deployed is None:
            deployed = self.last.deployed
        decision = self.folder.decide(Decision(kind, why, deployed, at=self._clock(), **more))
        self._tell(f"{kind.replace('_', ' ')}: {why}")
        return decision


def train_version(
    config: Config, sessions: Sequence[Session], start: Path, folder: RunFolder, reasons: Mapping[str, str]
) -> tuple[Path, dict[str, Any]]:
    """Train a new version. Returns its weights and the last step's metrics.

    `reasons` say which follow-ups teach no hint. A folder that a killed attempt left is deleted and done again."""
    shutil.rmtree(folder.path, ignore_errors=True)
    torch.set_num_threads(config.threads)
    means = baselines([one.rollout.reward.total for one in sessions], [one.kind for one in sessions])
    hinted = [with_hints(one, lambda text: not reasons[text]) for one in sessions]
    rollouts = [replace(rollout, group=rollout.id) for rollout in hinted]
    order = random.Random(f"{config.seed} live {folder.path.name}").sample(rollouts, len(rollouts))
    size = config.train.groups * config.train.group_size
    steps = [order[place : place + size] for place in range(0, len(order) - size + 1, size)] or [order]
    train = config.train.settled(*astuple(make_plan(config, this_device()).way))
    train = train.model_copy(update={"steps": len(steps)})
    config = config.model_copy(update={"out": str(folder.path), "model": str(start), "train": train})
    begin_run(folder, config)
    sources = {"verb": "live", "sources": [f"{len(rollouts)} sessions"], "content": [one.id for one in sessions]}
    write_atomic(folder.data_file, json.dumps(sources, indent=1) + "\n")
    trainer = Trainer(model_to_train(config, start), config.train, teachers_of(config.feedback))
    if start.is_relative_to(folder.path.parent.resolve()):  # a cycle is too short for a fresh optimizer
        load_training_state(trainer, start)
    rules = rules_of(config.feedback.files)
    by_group = {one.id: mean for one, mean in zip(sessions, means, strict=True)}
    context = TrainContext(config, folder, {}, rules, chat_of(start, config), trainer, baselines=by_group)
    teach(context, steps, chat_folder(start))
    return latest_checkpoint(folder), folder.metrics()[0][-1]


def compare_rows(deployed: Sequence[Row], candidate: Sequence[Row], alpha: float, main: str) -> dict[str, Any]:
    """Each metric of each suite (`suite/metric`), the significantly worse first. `main` is the suite of held-out tasks.

    By Bonferroni's correction; p is halved, since one direction is tested."""
    found: dict[str, dict[str, Any]] = {}
    for suite in dict.fromkeys(row.suite for row in deployed):
        base, other = (ratios(row for row in rows if row.suite == suite) for rows in (deployed, candidate))
        for metric in DIRECTIONS:
            if metric in base and metric in other and (metric != "edit_rate" or suite == main):
                before, after = base[metric][1], other[metric][1]
                difference = compare_paired(before, after)
                found[f"{suite}/{metric}"] = {
                    "deployed": before.value,
                    "candidate": after.value,
                    "difference": difference.value,
                    "interval": difference.interval,
                    "p": difference.p,
                }
    for name, row in found.items():
        fell = DIRECTIONS[name.rpartition("/")[2]] * (row["difference"] or 0.0) < 0
        row["worse"] = fell and row["p"] is not None and row["p"] / 2 <= alpha / len(found)
    return dict(sorted(found.items(), key=lambda item: not item[1]["worse"]))


def alarms(before: Sequence[Session], since: Sequence[Session]) -> list[Alarm]:
    """What became worse, the first to be noticed first. All sessions are scored; only whole batches count."""
    old = _batches(before)[-MAX_POINTS_BEFORE:]
    points: dict[str, list[Point]] = {}
    for step, batch in enumerate([*old, *_batches(since)]):
        values = [watched(session) for session in batch]
        for name in values[0]:
            known = [value for one in values if (value := one[name]) is not None]
            if known:
                points.setdefault(name, []).append(Point(step, sum(known) / len(known), len(known)))
    examples = tuple(session.id for session in since[-3:])
    found = []
    for name, series in points.items():
        earlier = [one for one in series if one.step < len(old)]
        later = [one for one in series if one.step >= len(old)]
        if alarm := find_shift(earlier, later, -1 if name in FALLING else 1):
            found.append(replace(alarm, series=name, examples=examples))
    return sorted(found, key=lambda alarm: alarm.step)


def watched(session: Session) -> dict[str, float | None]:
    """None: the session says nothing about it."""
    parts = session.rollout.reward.parts
    trajectory = Trajectory(session.rollout)
    return {
        "reward": session.rollout.reward.total,
        "kept": parts.get("kept", 0.0) if session.has_edited else None,
        "dissatisfied": -parts.get("dissatisfied", 0.0),
        "edit_rate": float(session.has_edited),
        **{name: SERIES[name][0](trajectory) for name in ("invalid_calls", "question_rate", "terminal_only")},
    }


def _batches(sessions: Sequence[Session]) -> list[Sequence[Session]]:
    return [sessions[start : start + BATCH] for start in range(0, len(sessions) - BATCH + 1, BATCH)]
