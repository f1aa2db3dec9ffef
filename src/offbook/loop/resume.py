"""What a folder holds, and going on with it: a run's checkpoints, or rollouts that are kept as they come.

Other work may join what is there only if it is of the same: a run's configuration, the claim of rollouts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbook.config import Config, load_config
from offbook.runfolder import RunFolder, dump_lines, load_lines, write_atomic
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.loop.collector import Collector

DECIDES = ("seed", "harness", "sandbox", "engine", "rewards", "monitors", "eval")  # of a configuration
CHECKPOINT = {"model", "weights"}  # of a claim: what a run that was trained further changes


def refuse_another_run(folder: RunFolder, config: Config) -> None:
    folder.refuse_file()
    if not folder.checkpoints():
        return  # nothing to lose
    old, new = load_config([folder.config_file], {}).model_dump(), config.model_dump()
    for tree in (old, new):
        tree["train"].pop("steps")  # a finished run may be trained further
    if old != new:
        told = "; ".join(f"{key} is {now!r} now and {then!r} there" for key, then, now in _differences(old, new))
        raise OffbookError(f"{folder.path} holds a run with another configuration ({told}); give another --out")


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys that are not the same, with both values; None where there is none."""
    for key in {**old, **new}:
        then, now = old.get(key), new.get(key)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, f"{prefix}{key}.")
        elif then != now:
            yield f"{prefix}{key}", then, now


def claim_run(folder: RunFolder, config: Config) -> int:
    """Write the configuration, clear what an unfinished step left, and say which step was the last finished one."""
    write_atomic(folder.config_file, config.to_toml())
    done = max(folder.checkpoints(), default=0)
    folder.truncate_metrics(done)
    for path in (folder.path / "ckpt").glob("step_*"):
        if not (path / "DONE").exists():
            shutil.rmtree(path)
    return done


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Where rollouts without training are kept.

    OUT/config.toml                the resolved configuration
    OUT/claim.json                 which model does what: the same command goes on only with the same claim
    OUT/rollouts/step_00000.jsonl  every rollout, scored
    OUT/results.json               of an evaluation: the numbers, and a row a rollout

    So it is a run folder that `view`, `audit` and `export` read too. The evaluation of a training run is kept in the
    run's eval/ folder, as NAME.json and NAME.rollouts.jsonl.
    """

    results: Path
    rollouts: Path
    claim: Path
    config: Path | None = None  # of a folder of its own
    replaceable: bool = False  # a run's evaluation follows its newest checkpoint

    @classmethod
    def folder(cls, out: Path) -> RolloutFiles:
        rollouts = out / "rollouts" / "step_00000.jsonl"
        return cls(out / "results.json", rollouts, out / "claim.json", out / "config.toml")

    @classmethod
    def in_run(cls, run: Path, name: str) -> RolloutFiles:
        results, rollouts, claim = (run / "eval" / f"{name}.{end}" for end in ("json", "rollouts.jsonl", "claim.json"))
        return cls(results, rollouts, claim, replaceable=True)

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost."""
        return not self.results.is_file() and not (self.rollouts.is_file() and self.rollouts.stat().st_size)

    def begin(self, noun: str, claim: dict[str, Any], config: Config, fresh: bool | None = None) -> None:
        """Refuse what is there of another claim, unless all is made afresh; None where a verb does not offer that."""
        before = json.loads(self.claim.read_text()) if self.claim.is_file() else {}
        if not before and self.config and self.config.exists():
            raise OffbookError(f"{self.config.parent} holds a run and no {noun} of this command; give another --out")
        differs = [key for key in {**claim, **before} if before.get(key) != claim.get(key)]
        if fresh or self.is_empty or (self.replaceable and differs and CHECKPOINT.issuperset(differs)):
            self.rollouts.unlink(missing_ok=True)
            self.results.unlink(missing_ok=True)
        elif differs:
            held = self.results if self.replaceable else self.claim.parent
            another = f"another {', '.join(differs)}" if before else "of what, it does not say"
            way_out = "give another --out" if fresh is None else "give another --out, or --fresh"
            raise OffbookError(f"{held} holds another {noun} ({another}); {way_out}")
        write_atomic(self.claim, json.dumps(claim, indent=1) + "\n")
        if self.config:
            write_atomic(self.config, config.model_copy(update={"out": str(self.config.parent)}).to_toml())

    def read(self, wanted: Collection[str]) -> tuple[list[Rollout], int]:
        """The rollouts that are there from before, and how many lines of the file could not be read.

        Those that the machine or the model's server ended are not: they are tried again.
        """
        self.rollouts.parent.mkdir(parents=True, exist_ok=True)
        if not self.rollouts.is_file():
            return [], 0
        stored, unreadable = load_lines(self.rollouts, Rollout)
        kept = {rollout.id: rollout for rollout in stored if rollout.id in wanted and not rollout.fault}
        write_atomic(self.rollouts, dump_lines(kept.values()))  # the next line must not come behind half of one
        return list(kept.values()), unreadable

    def append(self, rollout: Rollout) -> None:
        with open(self.rollouts, "ab") as file:
            file.write(dump_lines([rollout]))


def claim_of(collector: Collector, tasks: Sequence[Task]) -> dict[str, Any]:
    """The model in its folder or, without one, behind its URL; its weights, the tasks, and how they are worked on."""
    config, model = collector.config, collector.model
    settings = config.model_dump()
    settings["engine"].pop("timeout_s")  # whoever waits longer may go on with what is there
    return {
        "model": f"{config.model} {collector.remote_name}" if model is None else str(model),
        "weights": "" if model is None else _fingerprint(model),
        "tasks": hashlib.sha256("".join(map(_task_fingerprint, tasks)).encode()).hexdigest(),
        **{key: settings[key] for key in DECIDES},
        **({"tools": settings["tools"]} if config.tools.add or config.tools.files else {}),
    }


def _fingerprint(model: Path) -> str:
    """Of the files by size and time: weights are too large to be read for this."""
    files = sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".bin", ".jinja"))
    told = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _task_fingerprint(task: Task) -> str:
    settings = (task.folder / "task.toml").read_bytes()
    return hashlib.sha256(settings + task.instruction.encode()).hexdigest()
