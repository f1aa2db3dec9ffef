"""Checkpoints: a folder that `AutoModelForCausalLM.from_pretrained` and vLLM load. Of a model with an adapter that
alone, in PEFT's format. What only training needs is in a folder in it: vLLM loads every .safetensors that lies beside
the weights. Of a model that lies over ranks each writes some of the tensors, whole, to files of its own, and a run goes
on from them on any number of ranks, each reading its own rows.

DONE is written last; a folder without it is an unfinished write and counts for nothing. No pickle anywhere.

During a run a snapshot is copied to the host, and a thread writes it while the next steps run. One is written at a
time; if the next is due before the last is on disk, training waits for it. An error in the thread is raised where
training next looks.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from offbook.core import processes
from offbook.core.adapters import adapter_tensors
from offbook.core.config import CheckpointConfig
from offbook.train.lora import adapter_of, save_adapter
from offbook.train.parallel.dense import put
from offbook.train.parallel.gather import assign_holders, gathered
from offbook.train.parallel.ranks import PATIENCE
from offbook.train.trainer import Trainer, first_names
from offbook.types import OffbookError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",  # which tokens end a message
)
TRAINING = "training"  # optimizer and slow teachers
ANOTHER = "remove its DONE, and the run goes on from the one before"
MASTER = "master"  # a float32 weight, beside the optimizer's state of it
CGROUPS = (  # of version 2 and of version 1: limit, use
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
KEPT_FILES = ("active_file", "inactive_file")  # counted as used, and given back when somebody needs it


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:05d}"


def finished_steps(root: Path) -> list[int]:
    return sorted(int(done.parent.name.removeprefix("step_")) for done in root.glob("step_*/DONE"))


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds. How the weights are spelled in files, and what goes beside them, the model says."""

    model: PreTrainedModel
    weights: dict[str, Tensor]
    tensors: dict[str, dict[str, Tensor]]  # by file
    texts: dict[str, str]  # by file
    tokenizer_from: Path
    base: str  # of an adapter
    part: str = ""  # of the weights, where ranks have some each: the end of its file's name

    @classmethod
    def of(cls, trainer: Trainer, step: int, tokenizer_from: Path) -> Contents:
        """The trainer's own tensors: they change with its next step, and a rank may have parts of them only."""
        model = trainer.model
        tensors = {f"{TRAINING}/optimizer": _optimizer_tensors(trainer)}
        for name, own in trainer.own_weights().items():
            if own.kind.moves:
                tensors[f"{TRAINING}/teacher.{name}"] = _trained(own.decoder.model, trainer)
        texts = {}
        state = {"step": step, "updates": trainer.steps, "policy_norm": trainer.policy_norm}
        weights = model.state_dict() if adapter_of(model) is None else adapter_tensors(model)
        texts["state.json"] = json.dumps(state) + "\n"
        return cls(model, weights, tensors, texts, tokenizer_from, trainer.base)

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()
        for file, tensors in self.tensors.items():
            yield from ((f"{file}/{name}", tensor) for name, tensor in tensors.items())

    def on_host(self, buffers: dict[str, Tensor]) -> Contents:
        """As they are now, in `buffers`, which are made where they are missing. Tied weights stay tied."""
        taken: dict[tuple[int, torch.Size], Tensor] = {}
        copies: dict[str, Tensor] = {}
        for name, tensor in self.all_tensors():
            place = tensor.data_ptr(), tensor.shape
            if place not in taken:
                taken[place] = _copied(tensor, name, buffers)
            copies[name] = taken[place]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        files = {file: {name: copies[f"{file}/{name}"] for name in tensors} for file, tensors in self.tensors.items()}
        return replace(self, weights={name: copies[name] for name in self.weights}, tensors=files)

    def gathered_share(self, buffers: dict[str, Tensor]) -> Contents:
        """Of tensors that lie over ranks those that this one writes, whole and in `buffers`. All have to call it.

        Tensors of one block stay together, since files may spell several of them as one; an adapter is one file. Of
        tied ones the first is written.
        """
        firsts = first_names(self.model, self.weights)
        blocks = {name: "" if self.base else firsts[name].rpartition(".")[0].rpartition(".")[0] for name in firsts}
        own = {name: tensor for name, tensor in self.weights.items() if firsts[name] == name}
        weights, part = _held(own, blocks, "", buffers)
        files = {}
        for file, tensors in self.tensors.items():
            held, end = _held(tensors, {name: name for name in tensors}, f"{file}/", buffers)
            if held or not (tensors or dist.get_rank()):
                files[file + end] = held
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return replace(self, weights=weights, tensors=files, part=part)

    def write(self, path: Path) -> dict[str, set[str]]:
        """The tensors. Returns their names by file; of weights that are not in parts it says nothing."""
        written: dict[str, set[str]] = {}
        try:
            if self.weights:
                written |= self._write_weights(path)
            for file, tensors in self.tensors.items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                save_file({name: one.contiguous() for name, one in tensors.items()}, path / f"{file}.safetensors")
                written[f"{file}.safetensors"] = {*tensors}
        except SafetensorError as error:  # how that library says that the disk is full
            kept = max(finished_steps(path.parent), default=0)
            last = f"the last finished one, of step {kept}, is kept" if kept else "there is no finished one"
            raise OffbookError(f"cannot write the checkpoint {path}: {error}; {last}") from None
        return written

    def _write_weights(self, path: Path) -> dict[str, set[str]]:
        if self.base:
            save_adapter(self.model, self.weights, path, self.base)
        elif not self.part:
            self.model.save_pretrained(path, state_dict=dict(self.weights))
        else:  # save_pretrained writes on rank 0 alone
            path.mkdir(parents=True, exist_ok=True)
            spelled = revert_weight_conversion(self.model, dict(self.weights))
            tensors = {name: tensor.contiguous() for name, tensor in spelled.items()}
            save_file(tensors, path / f"model{self.part}.safetensors", {"format": "pt"})
            return {f"model{self.part}.safetensors": {*tensors}}
        return {}

    def finish(self, path: Path) -> None:
        """When all tensors are written."""
        if parts := sorted(path.glob("model-*.safetensors")):
            with TemporaryDirectory(dir=path) as room:  # what goes beside them; here it would remove the parts
                self.model.save_pretrained(room, state_dict={})
                for beside in Path(room).glob("*.json"):
                    beside.rename(path / beside.name)
            index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
            for part in parts:
                with safe_open(part, "pt") as opened:
                    index["weight_map"] |= dict.fromkeys(opened.keys(), part.name)
                with part.open("rb") as raw:  # its header's length comes first
                    index["metadata"]["total_size"] += part.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        copy_tokenizer(self.tokenizer_from, path)
        for file, text in self.texts.items():
            (path / file).write_text(text)
        (path / "DONE").touch()


def _held(
    tensors: Mapping[str, Tensor], bundles: Mapping[str, str], prefix: str, buffers: dict[str, Tensor]
) -> tuple[dict[str, Tensor], str]:
    """Those that this rank holds, on the host, and the end of their file's name."""
    holders = assign_holders(tensors, bundles, dist.get_world_size())
    held = {}
    for name, whole in gathered(tensors, holders):
        held[name] = _copied(whole, prefix + name, buffers)
        del whole  # before the next is put together
    members = sorted({*holders.values()})
    if not held or len(members) == 1:
        return held, ""
    return held, f"-{members.index(dist.get_rank()) + 1:05d}-of-{len(members):05d}"


def _copied(tensor: Tensor, name: str, buffers: dict[str, Tensor]) -> Tensor:
    if name not in buffers:
        buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return buffers[name].copy_(tensor.detach(), non_blocking=True)


def remove_old(root: Path, keep: int) -> None:
    for old in finished_steps(root)[:-keep]:
        (checkpoint_path(root, old) / "DONE").unlink()  # first, so that a half-removed folder is not taken for whole
        shutil.rmtree(checkpoint_path(root, old))


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def load_training_state(trainer: Trainer, path: Path) -> None:
    """Optimizer and teacher; the weights came with the model, and a frozen teacher is the run's starting model."""
    kept = path / TRAINING
    _load_optimizer(trainer, kept, "optimizer")
    state = json.loads((path / "state.json").read_text())
    trainer.steps = state["updates"]  # fewer than steps where some were skipped
    trainer.policy_norm = state["policy_norm"]
    for name, weights in trainer.own_weights().items():
        weights.steps = trainer.steps
        if weights.kind.moves:
            own = dict(weights.decoder.model.named_parameters())
            missing = {*trainer.masters.named}
            for key, stored in _stored(kept, f"teacher.{name}"):
                put(own[key], stored)
                missing.discard(key)
            if missing:
                raise OffbookError(f"the checkpoint {path} lacks {min(missing)} of the teacher {name}; {ANOTHER}")


def _trained(teacher: PreTrainedModel, trainer: Trainer) -> dict[str, Tensor]:
    """The rest is the student's too."""
    own = dict(teacher.named_parameters())
    return {name: own[name] for name in trainer.masters.named}


def is_there(file: Path, names: set[str]) -> bool:
    """Whether it holds these tensors, whole."""
    try:
        with safe_open(file, "pt") as opened:
            return {*opened.keys()} == names
    except (OSError, SafetensorError):
        return False


def _stored(folder: Path, file: str) -> Iterator[tuple[str, Any]]:
    """What a file has, or the files that ranks wrote in its place: by name, slices that are read where they are cut."""
    parts = sorted(folder.glob(f"{file}-*-of-*.safetensors")) or [folder / f"{file}.safetensors"]
    of = int(parts[0].stem.rpartition("-of-")[2]) if parts[0].stem != file else 1
    if len(parts) != of or not parts[0].is_file():
        there = len(parts) if parts[0].is_file() else 0
        raise OffbookError(f"the checkpoint {folder} lacks some of {file}: {there} of {of} files are there; {ANOTHER}")
    for part in parts:
        with safe_open(part, "pt") as opened:
            yield from ((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118 - it is no dict


def _load_optimizer(trainer: Trainer, folder: Path, file: str) -> None:
    masters = trainer.masters.named
    for key, stored in _stored(folder, file):
        name, state = key.rsplit("/", 1)
        master = masters[name]
        if stored.get_shape() not in ([], list(master.shape)):
            raise OffbookError(f"the checkpoint {folder} has {key} in another shape; start anew from the model in it")
        if state == MASTER:
            put(master, stored)
        elif stored.get_shape():
            trainer.optimizer.state[master][state] = torch.zeros_like(master, dtype=stored[:0].dtype).detach()
            put(trainer.optimizer.state[master][state], stored)
        else:
            trainer.optimizer.state[master][state] = stored[...].to(master.device)


def _optimizer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    masters = trainer.masters
    tensors = {f"{name}/{MASTER}": masters.named[name].detach() for name in masters.copies}
    for name, master in masters.named.items():
        for key, value in trainer.optimizer.state.get(master, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


SMALL = 1e9  # bytes of a checkpoint that is written after every step
SPARSE_MINUTES = 30.0  # between larger ones
HOST_SHARE = 0.8  # of the free memory, that a snapshot may take
SEEN_S = 90.0  # until what another host wrote is seen here: NFS looks again after 60 s

DEFAULTS = CheckpointConfig()


class Checkpoints:
    """Writes checkpoints: every `settings.every` steps, or by their size. Small ones are written after every step, or
    every `small_minutes`. A write that makes no progress for `deadline_s` is a timeout."""

    def __init__(
        self,
        trainer: Trainer,
        root: Path,
        tokenizer_from: Path,
        settings: CheckpointConfig = DEFAULTS,
        deadline_s: float = math.inf,
        small_minutes: float = 0.0,
    ):
        self.trainer, self.root, self.tokenizer_from = trainer, root, tokenizer_from
        self.keep, self.every, self.minutes = settings.keep, settings.every, 0.0
        self.size, self.deadline_s = checkpoint_size(trainer), deadline_s
        if not self.every:
            self.minutes = small_minutes if self.size < SMALL else SPARSE_MINUTES
            self.every = 0 if self.minutes else 1
        self.last = 0  # step that was saved here
        self._since = time.monotonic()
        self._writing: Future[None] | None = None

    def __str__(self) -> str:
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        how_often = f"every {self.minutes:g} minutes" if self.minutes else steps
        size = f"{self.size / 1e9:.1f} GB" if self.size >= SMALL else f"{self.size / 1e6:.0f} MB"
        return f"checkpoints of {size}: {how_often}, and at the end"

    def is_due(self, step: int) -> bool:
        if self.minutes:
            return (time.monotonic() - self._since) / 60 >= self.minutes
        return step % self.every == 0

    def save(self, step: int) -> None:
        """What the trainer holds now, after `step`. It may go on at once, unless the host has no room for a copy."""
        self.wait()
        path = checkpoint_path(self.root, step)
        shutil.rmtree(path, ignore_errors=True)  # before any rank writes
        self._writing = self.trainer.together(begin, path, step, self.tokenizer_from, self.keep)
        self.last, self._since = step, time.monotonic()
        self.check()

    def check(self) -> None:
        """Raises what ended the thread's last write, if it has ended with an error."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> float:
        """For the write that is under way, with its error. Says how many seconds that took."""
        writing, self._writing = self._writing, None
        if writing is None or (writing.done() and not writing.exception()):
            return 0.0
        started = time.monotonic()
        what = f"the checkpoint of step {self.last} to be written"
        watchdog = processes.Watchdog(lambda: what, self.deadline_s, self.written, "checkpoint")
        while futures.wait([writing], processes.TELL_S).not_done:
            watchdog.look()
        writing.result()
        return time.monotonic() - started

    def written(self) -> int:
        """Bytes that are in files now: a sign of life."""
        size = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(OSError):  # old ones go
                    size += os.stat(os.path.join(folder, name)).st_size
        return size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """What is being written is finished, also when training has failed; then that is the error that is told."""
        try:
            self.wait()
        except Exception:
            if error is None:
                raise


def begin(trainer: Trainer, path: Path, step: int, tokenizer_from: Path, keep: int) -> Future[None]:
    """Writes a rank's share beside what follows. Rank 0's is done when all are and the checkpoint is finished."""
    contents = Contents.of(trainer, step, tokenizer_from)
    buffers, is_alone = trainer.snapshot, trainer.ranks.mesh is None
    new = sum(tensor.nbytes for name, tensor in contents.all_tensors() if name not in buffers) if is_alone else 0
    fits = new <= HOST_SHARE * free_host_memory()
    if fits:
        contents = contents.on_host(buffers) if is_alone else contents.gathered_share(buffers)
    thread = ThreadPoolExecutor(1, "checkpoint")
    writing = thread.submit(_write, contents, path, keep, None if is_alone else _group())
    thread.shutdown(wait=not fits)
    return writing


def _write(contents: Contents, path: Path, keep: int, group: Any) -> None:
    if group is None:
        contents.write(path)
    elif not _written_by_all(contents, path, group):
        return
    contents.finish(path)
    remove_old(path.parent, keep)


def _written_by_all(contents: Contents, path: Path, group: Any) -> bool:
    """Whether this is the rank that finishes it. A fault of any rank is raised there."""
    problem, rank = "", dist.get_rank()
    written: dict[str, set[str]] = {}
    try:
        written = contents.write(path)
    except Exception as error:  # whatever it is, the others have to know
        problem = str(error) if isinstance(error, OffbookError) else f"{type(error).__name__}: {error}"
    told: list[tuple[str, dict[str, set[str]]]] = [(problem, written)] * dist.get_world_size()
    dist.gather_object((problem, written), told if rank == 0 else None, group=group)
    if rank:
        return False
    for problem, _ in told:
        if problem:
            raise OffbookError(problem)
    _refuse_unseen(path, [files for _, files in told])
    return True


def _refuse_unseen(path: Path, told: list[dict[str, set[str]]]) -> None:
    """A rank that has a folder of its own by this name wrote there, and what is here is not all."""
    end = time.monotonic() + SEEN_S
    for rank, files in enumerate(told):
        for file, names in files.items():
            while not is_there(path / file, names):
                if time.monotonic() >= end:
                    raise OffbookError(
                        f"rank {rank} wrote {file} of the checkpoint {path}, which rank 0 does not see there: put the "
                        "run's folder where all ranks see it; checkpoints from before are kept"
                    )
                time.sleep(1.0)


@functools.cache
def _group() -> Any:
    """Of its own: what is said while a checkpoint is written must not meet what training says."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def checkpoint_size(trainer: Trainer) -> int:
    """Bytes, about: what is trained, its optimizer state (8 bytes; 4 more for a float32 copy of bfloat16 weights) and
    the teachers that move."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in trained)
    state = sum(parameter.numel() * (12 if parameter.element_size() == 2 else 8) for parameter in trained)
    moving = sum(own.kind.moves for own in trainer.own_weights().values())
    return weights * (1 + moving) + state


def free_host_memory() -> int:
    """Bytes that this process may still take, by the machine and by the control group that it is in."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * int(_table(meminfo)["MemAvailable:"].split()[0])
    for folder, limit, used in CGROUPS:
        if (path := Path(folder, limit)).is_file() and (most := path.read_text().strip()) != "max":
            kept = sum(int(value) for key, value in _table(Path(folder, "memory.stat")).items() if key in KEPT_FILES)
            free = min(free, int(most) - int(Path(folder, used).read_text()) + kept)
    return max(0, free)


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
