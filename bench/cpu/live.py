"""The live cycle with the pocket model and simulated users: five cycles unattended, and two acts of sabotage.

    python bench/cpu/live.py --seeds 0 1 2 --json docs/results/live.json

Every session is a request of a simulated user (users.py, which knows nothing of src/offbook/live) to the version that
the cycle serves them. A cycle learns from --sessions of them, passes the gate or not, is tried on half of the users and
deployed. After the third cycle a spoilt checkpoint is put before the gate; after the last one it is deployed past the
gate, and the cycle has to notice by itself. A seed that is finished is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import time
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from users import Diff, Reply, reply

from offbook.core.config import Config, load_config
from offbook.core.runfolder import write_atomic
from offbook.live.cycle import Cycle
from offbook.live.reactions import follow_up, score
from offbook.live.sessions import Decision, Reaction, Session, kind_of, lines_of, share_kept, user_digest
from offbook.rl.collector import Collector, Job
from offbook.rl.models import model_folder
from offbook.rl.tasks import task_sets
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout, Task

MINUTE_S = 60.0
PIECE = 16  # sessions between two looks of the cycle during a trial
MEASURED = 3  # users of a held-out request
MOST = 25  # pieces of a trial, or of a watch, before the bench gives up
NOISE = 0.35  # of a spoilt weight, in standard deviations of its matrix


class World:
    """Users with requests, a clock, and one cycle that serves them."""

    def __init__(self, config: Config, tasks: list[Task], taste: str):
        self.now = 1_800_000_000.0
        self.tasks, self.taste = tasks, taste
        self.cycle = Cycle(config, tell=lambda line: print(f"    {line}", flush=True), clock=lambda: self.now)
        self.cycle.begin()
        self.rng = random.Random(f"users {config.seed} ")
        self.heard: list[tuple[bool, bool]] = []  # of what was said: is it a complaint, was it read as one
        self.count = 0

    def use(self, count: int) -> list[Session]:
        """So many sessions, of users that come once."""
        jobs: list[tuple[Job, str]] = []
        version = self.cycle.last.deployed
        for _ in range(count):
            self.count += 1
            user = user_digest(f" {self.count}")
            task = self.rng.choice(self.tasks)
            id = f"s{self.count:05d}"
            jobs.append((Job(task, id, id), user))
        found = []
        rollouts = rolled(self.cycle.config, self.cycle.folder.weights(version), [job for job, _ in jobs])
        for (job, user), rollout in zip(jobs, rollouts, strict=True):
            self.now += MINUTE_S
            session = Session(rollout, user, kind_of(job.task.instruction), version, self.now)
            said = self.answered(session, job.task, self.rng)
            self.cycle.folder.keep(score(said, self.cycle.settings), self.cycle.settings, self.chat)
            found.append(score(said, self.cycle.settings))
        self.now += MINUTE_S
        return found

    @cached_property
    def chat(self) -> Any:
        return Collector(self.cycle.config, self.cycle.folder.weights(0)).chat

    def answered(self, session: Session, task: Task, rng: random.Random) -> Session:
        """With what its user does and says. What is kept is measured on the files as the user leaves them."""
        rollout = session.rollout
        seen = Diff(rollout.changed, Trajectory(rollout).last_words, rollout.reward.parts.get("outcome", 0.0) >= 1.0)
        told: Reply = reply(self.taste, seen, rng)
        session.lines = lines_of(rollout)
        if rollout.changed and not told.takes:
            session.reactions.append(Reaction("declined", at=self.now))
        elif session.lines.count:

            def text_now(path: str) -> str | None:
                original = task.tree / path
                before = original.read_text() if original.is_file() else None
                return before if path in told.reverts else rollout.changed[path]

            session.reactions.append(Reaction("kept", share_kept(session.lines, text_now), at=self.now))
        if told.says:
            session.reactions.append(follow_up(told.says, self.now))
            self.heard.append((told.is_cross, session.reactions[-1].value < 0))
        if told.thumb:
            session.reactions.append(Reaction("thumbs", told.thumb, at=self.now))
        return session

    def measure(self, version: int, tasks: list[Task], taste: str = "") -> list[dict[str, float]]:
        """The same requests and the same users for every version; nothing of it is learned from."""
        every = enumerate(tasks * MEASURED)
        jobs = [Job(task, f"measure-{number}", f"measure-{number}") for number, task in every]
        rows, own = [], self.taste
        self.taste = taste or own
        for job, rollout in zip(jobs, rolled(self.cycle.config, self.cycle.folder.weights(version), jobs), strict=True):
            heard = len(self.heard)
            session = Session(rollout, "", "", version, at=self.now)
            solved = float(rollout.solved)
            session = score(self.answered(session, job.task, random.Random(job.id)), self.cycle.settings)
            del self.heard[heard:]
            rows.append({"reward": session.rollout.reward.total, **told_of(session), "solved": solved})
        self.taste = own
        return rows


def told_of(session: Session) -> dict[str, float]:
    parts = session.rollout.reward.parts
    return {
        "kept": parts["kept"],
        "reverted": -parts["reverted"],
        "dissatisfied": -parts["dissatisfied"],
        "edited": float(bool(session.rollout.changed)),
        "broken_calls": float(session.rollout.usage.invalid_calls),
    }


def rolled(config: Config, weights: Path, jobs: list[Job]) -> list[Rollout]:
    async def work() -> list[Rollout]:
        async with aclosing(Collector(config, weights)) as collector:
            return await collector.rollouts(jobs)

    found = asyncio.run(work())
    for rollout in found:
        rollout.reward.weights = {}
    return found


def spoilt(weights: Path, out: Path) -> Path:
    """The same model with noise in its matrices."""
    shutil.copytree(weights, out, dirs_exist_ok=True)
    torch.manual_seed(0)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor + NOISE * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def gated(cycle: Cycle, weights: Path) -> Decision:
    """Weights from elsewhere, through the gate."""
    version, deployed = 1 + max(one.version or 0 for one in cycle.folder.decisions()), cycle.last.deployed
    cycle.folder.decide(Decision("train", "made elsewhere", deployed, version=version, path=str(weights)))
    decision = cycle.turn()
    assert decision is not None
    return decision


def configured(seed: int, out: Path, sessions: int, **more: str) -> Config:
    settings = {
        "seed": str(seed),
        "out": str(out),
        "eval.samples": "1",
        "train.warmup_steps": "2",
        "checkpoint.keep": "1",
        "live.consent": "all",
        "live.settle_s": "0",
        "live.sessions": str(sessions),
        # The pocket model reads no English beyond its prompts; rules have hints that it knows.
        "feedback.rule_weights": '{"said": 0}',
        "live.suites": '["eager"]',
    }
    return load_config(["pocket"], {**settings, **more})


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}


def one_seed(seed: int, out: Path, cycles: int, sessions: int) -> dict[str, Any]:
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    config = configured(seed, out, sessions)
    sets = task_sets(config)
    world = World(config, sets.train, "plain")
    cycle, rows = world.cycle, []
    first = world.measure(0, sets.heldout)
    for number in range(1, cycles + 1):
        version = cycle.last.deployed
        missing = sessions - len(
            cycle.to_learn_from([score(one, cycle.settings) for one in cycle.folder.sessions()])[0]
        )
        if missing > 0:
            world.use(missing)
        decision = cycle.turn()
        trained = next(one for one in reversed(cycle.folder.decisions()) if one.kind == "train")
        rows.append({"cycle": number, "version": version, **trained.numbers, "gate": decision.kind})
        rows[-1] |= {"ended": cycle.last.kind, "why": cycle.last.why, "seconds": time.monotonic() - began}
        print(f"  seed {seed} cycle {number}: reward {trained.numbers['reward']:.3f} -> {cycle.last.kind}", flush=True)
        if number == min(3, cycles):
            bad = spoilt(cycle.folder.weights(cycle.last.deployed), out / "spoilt")
            refused = gated(cycle, bad)
    last, deployed = world.measure(cycle.last.deployed, sets.heldout), cycle.last.deployed
    path = spoilt(cycle.folder.weights(deployed), out / "spoilt_again")
    version = 1 + max(one.version or 0 for one in cycle.folder.decisions())
    by_hand = Decision("deploy", "put there by hand, past the gate", version, version=version, path=str(path))
    cycle.folder.decide(by_hand)
    noticed = 0
    while cycle.last.kind != "roll_back" and noticed < MOST:
        world.use(PIECE)
        noticed += 1
        cycle.turn()
    cross = [read for is_cross, read in world.heard if is_cross]
    kind = [read for is_cross, read in world.heard if not is_cross]
    return {
        "seed": seed,
        "cycles": rows,
        "before": means(first),
        "after": means(last),
        "difference": {name: paired(first, last, name) for name in first[0]},
        "sabotaged_gate": {"kind": refused.kind, "why": refused.why},
        "sabotaged_deployment": {"kind": cycle.last.kind, "why": cycle.last.why, "sessions": noticed * PIECE},
        "returned_to": cycle.last.deployed == deployed,
        "reader": {"complaints": len(cross), "read": sum(cross), "others": len(kind), "misread": sum(kind)},
        "decisions": [[one.kind, one.version] for one in cycle.folder.decisions()],
        "seconds": time.monotonic() - began,
    }


def paired(first: list[dict[str, float]], last: list[dict[str, float]], name: str) -> dict[str, float]:
    """The mean difference on the same requests, and half of its 95% interval."""
    each = [after[name] - before[name] for before, after in zip(first, last, strict=True)]
    count = len(each) // MEASURED
    gaps = [fmean(each[place::count]) for place in range(count)]
    return {"mean": fmean(gaps), "half": 1.96 * stdev(gaps) / len(gaps) ** 0.5}


def table(results: list[dict[str, Any]], sessions: int) -> str:
    lines = [
        "# The live cycle on simulated users",
        "",
        f"`python bench/cpu/live.py --seeds {' '.join(str(one['seed']) for one in results)}` with the pocket model: "
        f"{len(results[0]['cycles'])} cycles unattended, {sessions} sessions each, one request a user. Users "
        "(bench/cpu/users.py) revert what fails tests that the agent never sees, dislike edits of tests, and complain "
        "in six cases of ten. Somebody who had not seen the cycle wrote them.",
        "",
        "## Held-out requests, the first version and the last",
        "",
        "| seed | reward | edits kept | reverted | dissatisfied | edited anything | broken calls | solved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("reward", "kept", "reverted", "dissatisfied", "edited", "broken_calls", "solved")
    for one in results:
        cells = [
            f"{one['before'][name]:.2f} → {one['after'][name]:.2f} ({one['difference'][name]['mean']:+.2f} "
            f"± {one['difference'][name]['half']:.2f})"
            for name in names
        ]
        lines.append(f"| {one['seed']} | " + " | ".join(cells) + " |")
    lines += ["", "Paired by request, with 95% intervals over requests.", "", "## Cycle by cycle", ""]
    lines += ["| seed | cycle | served | reward | edits kept | dissatisfied | edit rate | gate | then |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for one in results:
        for row in one["cycles"]:
            parts = row["parts"]
            lines.append(
                f"| {one['seed']} | {row['cycle']} | {row['version']} | {row['reward']:.3f} | "
                f"{row['kept_of_edits'] or 0:.2f} | {-parts['dissatisfied']:.2f} | {row['edit_rate']:.2f} | "
                f"{row['gate']} | {row['ended'].replace('_', ' ')} |"
            )
    lines += ["", "Figures of a row are those of the sessions that the cycle learned from.", "", "## Sabotage", ""]
    lines += [f"Noise of {NOISE:g} standard deviations in every matrix of the deployed version.", ""]
    lines += ["| seed | before the gate | deployed past the gate | sessions until then | back at the version before |"]
    lines += ["|---|---|---|---|---|"]
    for one in results:
        gate, put = one["sabotaged_gate"], one["sabotaged_deployment"]
        lines.append(
            f"| {one['seed']} | {gate['kind']}: {gate['why']} | {put['kind'].replace('_', ' ')}: {put['why']} | "
            f"{put['sessions']} | {'yes' if one['returned_to'] else 'no'} |"
        )
    read = [one["reader"] for one in results]
    total = {name: sum(each[name] for each in read) for name in read[0]}
    lines += ["", "## What was read of what was said", ""]
    lines += [
        f"Of {total['complaints']} complaints {total['read']} were read as such "
        f"({total['read'] / max(1, total['complaints']):.0%}); of {total['others']} other follow-ups "
        f"{total['misread']} were taken for one. Whoever wrote the forms had seen a few of these sentences and had not "
        "mended them by these."
    ]
    seconds = ", ".join(f"{one['seconds']:.0f} s" for one in results)
    return "\n".join([*lines, "", f"Time: {seconds} a seed.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("/tmp/live-bench"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    results = []
    for seed in asked.seeds:
        done = asked.out / f"seed-{seed}.json"
        if not done.is_file():
            model_folder("pocket", seed)
            found = one_seed(seed, asked.out / f"seed-{seed}", asked.cycles, asked.sessions)
            write_atomic(done, json.dumps(found, indent=1) + "\n")
        results.append(json.loads(done.read_text()))
        if asked.json:
            write_atomic(asked.json, json.dumps({"seeds": results}, indent=1) + "\n")
        if asked.markdown:
            write_atomic(asked.markdown, table(results, asked.sessions))
    print(table(results, asked.sessions))


if __name__ == "__main__":
    main()
