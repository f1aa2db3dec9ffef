"""What a folder holds, and going on with it: a run's checkpoints, or rollouts that are kept as they come.

Other work may join what is there only if it is of the same: a run's configuration, the claim of rollouts. Where things
lie and how their paths are spelled is no part of that; what is in the files is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from offbook.agent.harness.pages import Pages
from offbook.core.config import Config, RanksConfig, TrainConfig, load_config, with_new_keys
from offbook.core.lock import only_writer
from offbook.core.runfolder import RunFolder, dump_lines, is_adapter, load_lines, write_atomic
from offbook.types import OffbookError, Rollout, Task

if TYPE_CHECKING:
    from offbook.rl.collector import Collector

log = logging.getLogger(__name__)
DECIDES = ("seed", "harness", "tools", "sandbox", "engine", "rewards", "monitors", "eval")  # of a configuration
COMPUTED = ("train.recompute", "train.compile", "train.micro_tokens")  # how a step is, not what it is
# Where a run lies, when it ends, when it is kept. What imitation reads is known by its content.
PLACED = ("out", "train.steps", "train.on_nonfinite", "tasks.repeat", "checkpoint.every", "checkpoint.minutes",
          "sft.data", "sft.epochs", "pretrain.data", "pretrain.epochs")  # fmt: skip
RANKS = tuple(f"train.ranks.{name}" for name in RanksConfig.model_fields)
SERVERS = ("engine.vllm.urls", "engine.vllm.copies", "engine.vllm.gpu_share", "engine.kv_tokens")
FREE = (*PLACED, *COMPUTED, *RANKS, *SERVERS, "engine.timeout_s", "loop.deadline_s", "loop.eval_every",
        "loop.ray.samplers", "loop.ray.cpus", "loop.ray.gpus", "loop.ray.address")  # fmt: skip
PAGES = "tools.pages"
OWN_FILES = ("rewards.files", "tools.files", "feedback.files", PAGES)  # of the user's; known by their content
CHECKPOINT = {"model", "weights"}  # of a claim: what a run that was trained further changes
BY_CONTENT = "sha256:"  # begins what a claim has of a file; claims from before have a model's sizes and times
SHOWN = 3  # keys that differ
STATE = ("*optimizer.safetensors", "teacher.*safetensors", "state.json")  # what a checkpoint has for training alone


def refuse_another_run(folder: RunFolder, config: Config, imitates: bool = False) -> None:
    if not folder.checkpoints():
        return  # nothing to lose
    if folder.data_file.is_file() != imitates:
        verb = "train" if imitates else json.loads(folder.data_file.read_text()).get("verb", "sft")
        raise OffbookError(f"{folder.path} holds a run of `offbook {verb}`; give another --out")
    old, new = load_config([folder.config_file], {}), config.model_dump()
    before, paths = old.model_dump(), _own_files(old)
    for key, contents in _recorded_contents(folder).items():
        section, _, name = key.partition(".")
        before[section][name] = contents
    differing = []
    for key, then, now in _differences(before, new):
        if key == PAGES and now == paths[key]:
            raise OffbookError(
                f"the pages in {', '.join(now)} are others than when this run last began, and they are pinned: bring "
                "those back, or give another --out"
            )
        if key in OWN_FILES and list(map(os.path.abspath, paths[key])) == list(map(os.path.abspath, now)):
            log.warning("%s changed since this run last began; it goes on with what is there now", ", ".join(now))
        elif key not in FREE:
            differing.append(f"{key} is {now!r} now and {paths.get(key, then)!r} there")
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        told = "; ".join(differing[:SHOWN])
        raise OffbookError(f"{folder.path} holds a run with another configuration ({told}{more}); give another --out")


def _own_files(config: Config) -> dict[str, list[str]]:
    files = config.rewards.files, config.tools.files, config.feedback.files, config.tools.pages
    return dict(zip(OWN_FILES, files, strict=True))


def record_own_files(folder: RunFolder, config: Config) -> None:
    contents = {key: list(map(_content, files)) for key, files in _own_files(config).items()}
    write_atomic(folder.path / "own_files.json", json.dumps(contents, indent=1) + "\n")


def _recorded_contents(folder: RunFolder) -> dict[str, list[str]]:
    """Of the user's own files when the run last began; empty for runs from before that was kept."""
    path = folder.path / "own_files.json"
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # or torn
        return {}
    return {key: found[key] for key in OWN_FILES if key in found} if isinstance(found, dict) else {}


def computed_as_before(folder: RunFolder, config: Config) -> Config:
    """What the command leaves to be chosen stays as a run that goes on had it."""
    if not folder.checkpoints():
        return config
    before, left = load_config([folder.config_file], {}).train, TrainConfig()
    names = [key.removeprefix("train.") for key in COMPUTED]
    taken = {name: getattr(before, name) for name in names if getattr(config.train, name) == getattr(left, name)}
    return config.model_copy(update={"train": config.train.model_copy(update=taken)})


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys that are not the same, with both values; None where there is none."""
    for name in {**old, **new}:
        key, then, now = prefix + name, old.get(name), new.get(name)
        if isinstance(then, dict) and isinstance(now, dict):
            yield from _differences(then, now, f"{key}.")
        elif then != now and not _is_same(key, then, now):
            yield key, then, now


def _is_same(key: str, then: Any, now: Any) -> bool:
    """Of settings that name a place: whether the same is there."""
    if key in OWN_FILES:
        return [_content(file) for file in then or ()] == [_content(file) for file in now or ()]
    if key not in ("model", "tasks.source", "feedback.judge.name") or not (then and now):
        return False
    places = Path(then), Path(now)
    if not all(place.is_dir() for place in places):
        return False
    return places[0].samefile(places[1]) or (key != "tasks.source" and len(set(map(weights_digest, places))) == 1)


def claim_run(folder: RunFolder, config: Config) -> int:
    """Write the configuration, clear what an unfinished step left, and say which step was the last finished one."""
    write_atomic(folder.config_file, config.to_toml())
    record_own_files(folder, config)
    done = max(folder.checkpoints(), default=0)
    if not done:
        folder.data_file.unlink(missing_ok=True)  # of an imitation that kept nothing
    folder.truncate_metrics(done)
    for path in (folder.path / "ckpt").glob("step_*"):
        if not (path / "DONE").exists():
            shutil.rmtree(path)
    return done


def claim_of_work(config: Config, start: Path) -> str:
    """Of what is not in a checkpoint yet: rollouts of another model, or of other settings, are no part of a run."""
    settings = config.model_dump()
    for key in FREE:
        *sections, name = key.split(".")
        reduce(getitem, sections, settings).pop(name)
    contents = {key: list(map(_content, files)) for key, files in _own_files(config).items()}
    told = json.dumps([settings, contents, _times(start)], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RolloutFiles:
    """Where rollouts without training are kept.

    OUT/config.toml                the resolved configuration
    OUT/claim.json                 which model does what: the same command goes on only with the same claim
    OUT/rollouts/step_00000.jsonl  every rollout, scored
    OUT/results.json               of an evaluation: the numbers, and a row per rollout
    OUT/.results.next/             the same of one that takes its place when it is complete

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

    @contextmanager
    def claimed(
        self, noun: str, collector: Collector, tasks: Sequence[Task], fresh: bool | None = None, **more: Any
    ) -> Iterator[RolloutFiles]:
        """Where to write: here or, where something is replaced, beside it until all of the new is there.

        Refuses what is there of another claim, unless all is made afresh; None where a verb does not offer that.
        """
        folder = self.config.parent if self.config else self.results.parent.parent
        with only_writer(folder):
            claim = {**more, **claim_of(collector, tasks)}
            place = self._place(noun, claim, collector.model, fresh)
            write_atomic(place.claim, json.dumps(claim, indent=1) + "\n")
            if place.config:
                write_atomic(place.config, collector.config.model_copy(update={"out": str(folder)}).to_toml())
            yield place
            if place is not self:
                place._move_to(self)

    def _place(self, noun: str, claim: dict[str, Any], model: Path | None, fresh: bool | None) -> RolloutFiles:
        beside = self._beside()
        if beside.results.is_file():  # complete, and killed while it was moved
            beside._move_to(self)
        before = _read_claim(self.claim, claim, model)
        if not before and self.config and self.config.exists():
            raise OffbookError(f"{self.config.parent} holds a run and no {noun} of this command; give another --out")
        differs = _differing(before, claim)
        if self.is_empty or not (differs or fresh):
            return self
        by_times = bool(before.get("weights")) and not before["weights"].startswith(BY_CONTENT)
        if fresh or (self.replaceable and not by_times and CHECKPOINT.issuperset(differs)):
            if _differing(_read_claim(beside.claim, claim, model), claim):
                shutil.rmtree(beside.claim.parent, ignore_errors=True)
            return beside
        held = self.results if self.replaceable else self.claim.parent
        way_out = "give another --out" if fresh is None else "give another --out, or --fresh"
        another = f"another {', '.join(differs)}" if before else "of what, it does not say"
        if by_times and CHECKPOINT.issuperset(differs):
            another = "it knows its model by the times of the files, and this one's are others"
        raise OffbookError(f"{held} holds another {noun} ({another}); {way_out}")

    def _beside(self) -> RolloutFiles:
        folder = self.results.with_name(f".{self.results.stem}.next")
        results, rollouts, claim = (folder / name for name in ("results.json", "rollouts.jsonl", "claim.json"))
        return RolloutFiles(results, rollouts, claim, folder / "config.toml" if self.config else None)

    def _move_to(self, other: RolloutFiles) -> None:
        """The results come last: as long as they are here, the move is not over."""
        other.rollouts.parent.mkdir(parents=True, exist_ok=True)
        pairs = ((self.config, other.config), (self.rollouts, other.rollouts), (self.claim, other.claim))
        for source, target in (*pairs, (self.results, other.results)):
            if source and target and source.exists():
                os.replace(source, target)
        shutil.rmtree(self.results.parent)

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
    """The model behind its URL or, in a folder, its weights; the tasks, and how they are worked on."""
    config, model = collector.config, collector.model
    settings = _deciding(config)
    for section in ("rewards", "tools"):
        settings[section]["files"] = [_content(file) for file in settings[section]["files"]]
    return {
        "model": f"{config.model} {collector.remote_name}" if model is None else "",
        "weights": "" if model is None else weights_digest(model),
        "tasks": hashlib.sha256("".join(map(_task_fingerprint, tasks)).encode()).hexdigest(),
        **settings,
    }


def _deciding(config: Config) -> dict[str, Any]:
    settings = config.model_dump(include=set(DECIDES))
    settings["engine"].pop("timeout_s")  # whoever waits longer may go on with what is there
    settings["engine"].pop("kv_tokens")
    settings["engine"]["vllm"].pop("gpu_share")
    return settings


def _read_claim(path: Path, claim: dict[str, Any], model: Path | None) -> dict[str, Any]:
    """One from before has no settings that came later, and knows its model by the times of the files."""
    before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if not before:
        return {}
    with suppress(ValidationError):  # of a later version, and so another
        settings = with_new_keys({key: before[key] for key in DECIDES if key in before})
        before |= _deciding(Config.model_validate(settings))
    if model is not None and before.get("weights") == _times(model):
        before |= {key: claim[key] for key in CHECKPOINT}
    return before


def _differing(before: dict[str, Any], claim: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.split(".")[0] for key, _, _ in _differences(before, claim)))


def _model_files(model: Path) -> list[Path]:
    return sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".bin", ".jinja"))


def weights_digest(model: Path) -> str:
    """Of all that decides what a model says, by content. All bytes are read: about a second for a gigabyte."""
    files = [path for path in _model_files(model) if not any(path.match(state) for state in STATE)]
    told = "\n".join(f"{path.name} {_content(path)}" for path in files)
    if is_adapter(model):
        from offbook.rl.models import base_folder  # torch comes with it

        told += f"\nbase {weights_digest(base_folder(model))}"
    return BY_CONTENT + hashlib.sha256(told.encode()).hexdigest()


def _times(model: Path) -> str:
    """What claims from before have of a model."""
    told = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in _model_files(model)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _content(file: Path | str) -> str:
    """What stands for a file; what is none stands for itself."""
    path = Path(file)
    if path.is_dir():
        return BY_CONTENT + Pages([str(path)]).version
    if not path.is_file():
        return str(file)
    found = path.stat()
    return _digest(path.resolve(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return BY_CONTENT + hashlib.file_digest(file, "sha256").hexdigest()


def _task_fingerprint(task: Task) -> str:
    settings = (task.folder / "task.toml").read_bytes()
    return hashlib.sha256(settings + task.instruction.encode()).hexdigest()
