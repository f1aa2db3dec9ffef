"""Resuming: what a folder holds, and whether a command is the same work.

Work may resume in a folder only if it is the same: a run by its configuration, rollouts without training by their
fingerprint. Where a folder is and how paths are spelled does not matter; the content of the files does.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbook.core.config import Config, RanksConfig, TrainConfig, load_config
from offbook.core.runfolder import RunFolder, dump_lines, is_adapter, load_lines, only_writer, write_atomic
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.rl.collector import Collector

# Sections of a configuration that decide what a rollout is.
DECIDING = ("seed", "harness", "tools", "sandbox", "engine", "rewards", "monitors", "judge", "eval")
COMPUTED = ("recompute", "compile", "micro_tokens")  # of train: how a step is computed, not what it is
# Keys that may change on resume: where a run is, when it ends, when it is kept, and on what it runs.
FREE = (
    *("out", "train.steps", "train.on_nonfinite", "train.no_signal_steps", "checkpoint.every"),
    *("sft.data", "sft.epochs", "pretrain.data", "pretrain.epochs"),  # known by their content
    *(f"train.{name}" for name in COMPUTED),
    *(f"train.ranks.{name}" for name in RanksConfig.__dataclass_fields__),
    *("engine.vllm.url", "engine.vllm.copies", "engine.vllm.gpu_share", "engine.kv_tokens", "engine.timeout_s"),
    *("loop.deadline_s", "loop.ray.samplers", "loop.ray.address"),
)
OWN_FILES = ("rewards.files", "tools.files", "feedback.files")  # the user's; known by their content
CHECKPOINT = {"model", "weights"}  # of a fingerprint: what changes when a run is trained further
SHOWN = 3  # keys that differ
STATE = ("*optimizer.safetensors", "teacher.*safetensors", "state.json")  # files of a checkpoint for training only


def resumed(folder: RunFolder, config: Config, imitates: bool = False) -> Config:
    """The configuration of a run that begins or resumes in this folder: what the planner chose is kept unless the
    command sets it. Refuses a folder with another run."""
    if not folder.checkpoints():
        return config  # nothing to lose
    if folder.data_file.is_file() != imitates:
        verb = "train" if imitates else json.loads(folder.data_file.read_text()).get("verb", "sft")
        raise OffbookError(f"{folder.path} holds a run of `offbook {verb}`; give another --out")
    before = load_config([folder.config_file], {})
    differing = [
        f"{key} is {now!r} now and {then!r} there"
        for key, then, now in _differences(before.model_dump(), config.model_dump())
        if key not in FREE
    ]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        shown = "; ".join(differing[:SHOWN])
        raise OffbookError(f"{folder.path} holds a run with another configuration ({shown}{more}); give another --out")
    default = TrainConfig()
    unset = [name for name in COMPUTED if getattr(config.train, name) == getattr(default, name)]
    planned = {name: getattr(before.train, name) for name in unset}
    return config.model_copy(update={"train": config.train.model_copy(update=planned)})


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys that differ, with both values; None where there is none."""
    for name in {**old, **new}:
        key = prefix + name
        then = old.get(name)
        now = new.get(name)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, f"{key}.")
        elif then != now and not _is_same(key, then, now):
            yield key, then, now


def _is_same(key: str, then: Any, now: Any) -> bool:
    """Whether two paths in the configuration have the same content."""
    if key in OWN_FILES:
        return [_content(file) for file in then or ()] == [_content(file) for file in now or ()]
    if key not in ("model", "tasks.source", "judge.name") or not (then and now):
        return False
    one = Path(then)
    other = Path(now)
    if not (one.is_dir() and other.is_dir()):
        return False
    return one.samefile(other) or (key != "tasks.source" and weights_digest(one) == weights_digest(other))


def begin_run(folder: RunFolder, config: Config) -> int:
    """Write the configuration, remove what an unfinished step left, and return the last finished step."""
    write_atomic(folder.config_file, config.to_toml())
    done = max(folder.checkpoints(), default=0)
    if not done:
        folder.data_file.unlink(missing_ok=True)  # of an imitation that kept nothing
    folder.truncate_metrics(done)
    for path in (folder.path / "ckpt").glob("step_*"):
        if not (path / "DONE").exists():
            shutil.rmtree(path)
    return done


def work_fingerprint(config: Config, start: Path) -> str:
    """Names the work that rollouts in no checkpoint yet belong to: model, settings, the user's own files."""
    settings = config.model_dump()
    own = [_content(file) for key in OWN_FILES for file in reduce(getitem, key.split("."), settings)]
    for key in FREE:
        *sections, name = key.split(".")
        reduce(getitem, sections, settings).pop(name, None)  # ranks may be unset
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _model_files(start)]
    return hashlib.sha256(json.dumps([settings, own, files], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RolloutFiles:
    """The files of rollouts without training.

    OUT/config.toml                the resolved configuration
    OUT/fingerprint.json           which model does what: the same command resumes only on the same fingerprint
    OUT/rollouts/step_00000.jsonl  every rollout, scored
    OUT/results.json               of an evaluation: the numbers, and a row per rollout

    So it is a run folder that `view`, `audit` and `export` read too. The evaluation of a training run is kept in the
    run's eval/ folder, as NAME.json and NAME.rollouts.jsonl.
    """

    results: Path
    rollouts: Path
    config: Path | None = None  # of a folder of its own; a run's evaluation has none and follows its newest checkpoint

    @classmethod
    def folder(cls, out: Path) -> RolloutFiles:
        return cls(out / "results.json", out / "rollouts" / "step_00000.jsonl", out / "config.toml")

    @classmethod
    def in_run(cls, run: Path, name: str) -> RolloutFiles:
        results = run / "eval" / f"{name}.json"
        return cls(results, results.with_suffix(".rollouts.jsonl"))

    @contextmanager
    def writing(self, noun: str, collector: Collector, tasks: Sequence[Task], **more: Any) -> Iterator[None]:
        """Hold the folder's lock. Results of another fingerprint are refused; those of a run's older checkpoint give
        way."""
        folder = self.results.parent if self.config else self.results.parent.parent
        with only_writer(folder):
            file = folder / "fingerprint.json" if self.config else self.results.with_suffix(".fingerprint.json")
            fingerprint = {**more, **rollouts_fingerprint(collector, tasks)}
            before = json.loads(file.read_text()) if file.is_file() else {}
            if not before and self.config and self.config.exists():
                raise OffbookError(f"{folder} holds a run and no {noun} of this command; give another --out")
            differs = list(dict.fromkeys(key.split(".")[0] for key, _, _ in _differences(before, fingerprint)))
            has_some = self.results.is_file() or (self.rollouts.is_file() and self.rollouts.stat().st_size)
            if differs and has_some and (self.config or not CHECKPOINT.issuperset(differs)):
                held = folder if self.config else self.results
                another = f"another {', '.join(differs)}" if before else "of what, it does not say"
                raise OffbookError(f"{held} holds another {noun} ({another}); remove it, or give another --out")
            if differs:
                self.results.unlink(missing_ok=True)
                self.rollouts.unlink(missing_ok=True)
            write_atomic(file, json.dumps(fingerprint, indent=1) + "\n")
            if self.config:
                write_atomic(self.config, collector.config.model_copy(update={"out": str(folder)}).to_toml())
            yield

    def read(self, wanted: Collection[str]) -> tuple[list[Rollout], int]:
        """The stored rollouts, and how many lines of the file could not be read.

        Rollouts that a fault of the machine or the model's server ended are left out, so they are retried.
        """
        self.rollouts.parent.mkdir(parents=True, exist_ok=True)
        if not self.rollouts.is_file():
            return [], 0
        stored, unreadable = load_lines(self.rollouts, Rollout)
        kept = {rollout.id: rollout for rollout in stored if rollout.id in wanted and not rollout.fault}
        write_atomic(self.rollouts, dump_lines(kept.values()))  # the next line must not follow a torn one
        return list(kept.values()), unreadable

    def append(self, rollout: Rollout) -> None:
        with open(self.rollouts, "ab") as file:
            file.write(dump_lines([rollout]))


def rollouts_fingerprint(collector: Collector, tasks: Sequence[Task]) -> dict[str, Any]:
    """The model (its URL, or the digest of its weights), the tasks, and how they are worked on."""
    config = collector.config
    model = collector.model
    settings = config.model_dump(mode="json", include=set(DECIDING))
    engine = settings["engine"]
    del engine["timeout_s"], engine["kv_tokens"], engine["vllm"]["gpu_share"]  # a run with others may resume
    for section in ("rewards", "tools"):
        settings[section]["files"] = [_content(file) for file in settings[section]["files"]]
    digests = hashlib.sha256()
    for task in tasks:
        digests.update(hashlib.sha256((task.folder / "task.toml").read_bytes() + task.instruction.encode()).digest())
    known = {"model": f"{config.model} {collector.remote_name}", "weights": ""}
    if model is not None:
        known = {"model": "", "weights": weights_digest(model)}
    return {**known, "tasks": digests.hexdigest(), **settings}


def _model_files(model: Path) -> list[Path]:
    return sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".bin", ".jinja"))


def weights_digest(model: Path) -> str:
    """The digest of all that decides what a model says. All bytes are read: about a second for a gigabyte."""
    files = [path for path in _model_files(model) if not any(path.match(state) for state in STATE)]
    digests = "\n".join(f"{path.name} {_content(path)}" for path in files)
    if is_adapter(model):
        from offbook.rl.models import base_folder  # imports torch

        digests += f"\nbase {weights_digest(base_folder(model))}"
    return hashlib.sha256(digests.encode()).hexdigest()


def _content(file: Path | str) -> str:
    """The digest of a file; what does not exist stands for itself."""
    path = Path(file)
    if not path.is_file():
        return str(file)
    found = path.stat()
    return _digest(path.resolve(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
