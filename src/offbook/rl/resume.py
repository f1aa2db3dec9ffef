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


def refuse_another_run(folder: RunFolder, config: Config, imitates: bool = False) -> None:
    if not folder.checkpoints():
        return  # nothing to lose
    if folder.data_file.is_file() != imitates:
        verb = "train" if imitates else json.loads(folder.data_file.read_text()).get("verb", "sft")
        raise OffbookError(f"{folder.path} holds a run of `offbook {verb}`; give another --out")
    old = load_config([folder.config_file], {}).model_dump()
    differing = [
        f"{key} is {now!r} now and {then!r} there"
        for key, then, now in _differences(old, config.model_dump())
        if key not in FREE
    ]
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        shown = "; ".join(differing[:SHOWN])
        raise OffbookError(f"{folder.path} holds a run with another configuration ({shown}{more}); give another --out")


def computed_as_before(folder: RunFolder, config: Config) -> Config:
    """A resumed run keeps what the planner chose, unless the command sets it."""
    if not folder.checkpoints():
        return config
    before = load_config([folder.config_file], {}).train
    default = TrainConfig()
    unset = [name for name in COMPUTED if getattr(config.train, name) == getattr(default, name)]
    taken = {name: getattr(before, name) for name in unset}
    return config.model_copy(update={"train": config.train.model_copy(update=taken)})


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
    paths = Path(then), Path(now)
    if not all(path.is_dir() for path in paths):
        return False
    return paths[0].samefile(paths[1]) or (key != "tasks.source" and len(set(map(weights_digest, paths))) == 1)


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


@dataclass(frozen=True, slots=True)
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
    fingerprint: Path
    config: Path | None = None  # of a folder of its own
    replaceable: bool = False  # a run's evaluation follows its newest checkpoint

    @classmethod
    def folder(cls, out: Path) -> RolloutFiles:
        rollouts = out / "rollouts" / "step_00000.jsonl"
        return cls(out / "results.json", rollouts, out / "fingerprint.json", out / "config.toml")

    @classmethod
    def in_run(cls, run: Path, name: str) -> RolloutFiles:
        start = run / "eval" / name
        results, rollouts, fingerprint = (
            Path(f"{start}.{end}") for end in ("json", "rollouts.jsonl", "fingerprint.json")
        )
        return cls(results, rollouts, fingerprint, replaceable=True)

    @property
    def is_empty(self) -> bool:
        """Nothing would be lost."""
        return not self.results.is_file() and not (self.rollouts.is_file() and self.rollouts.stat().st_size)

    @contextmanager
    def writing(
        self, noun: str, collector: Collector, tasks: Sequence[Task], fresh: bool | None = None, **more: Any
    ) -> Iterator[RolloutFiles]:
        """Hold the folder's lock. Results of another fingerprint are refused unless they are made afresh; those of a
        run's older checkpoint give way. `fresh` is None if a verb does not offer it."""
        folder = self.config.parent if self.config else self.results.parent.parent
        with only_writer(folder):
            fingerprint = {**more, **rollouts_fingerprint(collector, tasks)}
            before = json.loads(self.fingerprint.read_text()) if self.fingerprint.is_file() else {}
            if not before and self.config and self.config.exists():
                raise OffbookError(f"{folder} holds a run and no {noun} of this command; give another --out")
            differs = list(dict.fromkeys(key.split(".")[0] for key, _, _ in _differences(before, fingerprint)))
            if fresh or (differs and not self.is_empty):
                if not fresh and not (self.replaceable and CHECKPOINT.issuperset(differs)):
                    held = self.results if self.replaceable else folder
                    way_out = "give another --out" if fresh is None else "give another --out, or --fresh"
                    another = f"another {', '.join(differs)}" if before else "of what, it does not say"
                    raise OffbookError(f"{held} holds another {noun} ({another}); {way_out}")
                self.results.unlink(missing_ok=True)
                self.rollouts.unlink(missing_ok=True)
            write_atomic(self.fingerprint, json.dumps(fingerprint, indent=1) + "\n")
            if self.config:
                write_atomic(self.config, collector.config.model_copy(update={"out": str(folder)}).to_toml())
            yield self

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
    for key in ("timeout_s", "kv_tokens"):  # a run with others may resume
        settings["engine"].pop(key)
    settings["engine"]["vllm"].pop("gpu_share")
    for section in ("rewards", "tools"):
        settings[section]["files"] = [_content(file) for file in settings[section]["files"]]
    described = [(task.folder / "task.toml").read_bytes() + task.instruction.encode() for task in tasks]
    digests = "".join(hashlib.sha256(one).hexdigest() for one in described)
    return {
        "model": f"{config.model} {collector.remote_name}" if model is None else "",
        "weights": "" if model is None else weights_digest(model),
        "tasks": hashlib.sha256(digests.encode()).hexdigest(),
        **settings,
    }


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
