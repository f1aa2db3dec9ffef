"""Checkpoints: a folder that `AutoModelForCausalLM.from_pretrained` and vLLM load. Of a model with an adapter that
alone, in PEFT's format. What only training needs is in a folder in it: vLLM loads every .safetensors next to
the weights. Each rank writes some of the tensors, whole, to files of its own, and a run goes on from them on any number
of ranks, each reading its own rows.

DONE is written last; a folder without it is an unfinished write and counts for nothing. No pickle anywhere.

During a run a snapshot is copied to the host, and a thread writes it while the next steps run. One is written at a
time; if the next is due before the last is on disk, training waits for it. An error in the thread is raised where
training next looks.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from offbook.train.parallel.sharding import put
from offbook.train.trainer import PATIENCE, Trainer, first_names, gathered
from offbook.types import OffbookError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",  # which tokens end a message
)
TRAINING = "training"  # folder of optimizer and slow teachers
MASTER = "master"  # a float32 weight, next to the optimizer's state of it
SMALL = 1e9  # bytes of a checkpoint that is written after every step
SPARSE_MINUTES = 30.0  # between larger ones
SEEN_S = 90.0  # timeout of a file that another host wrote: NFS looks again after 60 s
DEFAULTS = CheckpointConfig()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:05d}"


def finished_steps(root: Path) -> list[int]:
    return sorted(int(done.parent.name.removeprefix("step_")) for done in root.glob("step_*/DONE"))


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


@dataclass
class Contents:
    """This rank's share of a checkpoint, on the host."""

    model: PreTrainedModel
    tensors: dict[str, dict[str, Tensor]]  # by file, without the ending; weights are `model`
    state: dict[str, Any]
    tokenizer_from: Path
    base: str  # fingerprint of the model under an adapter

    @classmethod
    def of(cls, trainer: Trainer, step: int, tokenizer_from: Path) -> Contents:
        """All ranks have to call it. Weights of one block stay in one file, since files may spell several of them as
        one; an adapter is one file. Of tied weights the first is written."""
        model, masters = trainer.model, trainer.masters
        weights = model.state_dict() if adapter_of(model) is None else adapter_tensors(model)
        firsts = first_names(model, weights)
        weights = {name: tensor for name, tensor in weights.items() if firsts[name] == name}
        optimizer = {f"{name}/{MASTER}": masters.named[name].detach() for name in masters.copies}
        for name, master in masters.named.items():
            for key, value in trainer.optimizer.state.get(master, {}).items():
                optimizer[f"{name}/{key}"] = value
        files = _held(trainer, "model", weights, lambda name: "" if trainer.base else name.rsplit(".", 2)[0])
        files |= _held(trainer, f"{TRAINING}/optimizer", optimizer)
        for own in trainer.own_weights:
            if own.share:
                named = dict(own.decoder.model.named_parameters())
                trained = {name: named[name] for name in masters.named}  # the rest is the student's too
                files |= _held(trainer, f"{TRAINING}/teacher.{own.name}", trained)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        state = {"step": step, "updates": trainer.steps, "policy_norm": trainer.policy_norm}
        return cls(model, files, state, tokenizer_from, trainer.base)

    def write(self, path: Path) -> list[str]:
        """The tensors. Returns the names of the files, without that of an adapter."""
        (path / TRAINING).mkdir(parents=True, exist_ok=True)
        written = []
        try:
            for stem, tensors in self.tensors.items():
                if stem == "model" and self.base:
                    save_adapter(self.model, tensors, path, self.base)
                    continue
                if stem.startswith("model"):
                    tensors = revert_weight_conversion(self.model, dict(tensors))
                written.append(f"{stem}.safetensors")
                whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
                save_file(whole, path / written[-1], {"format": "pt"})
        except SafetensorError as error:  # how that library says that the disk is full
            kept = max(finished_steps(path.parent), default=0)
            last = f"the last finished one, of step {kept}, is kept" if kept else "there is no finished one"
            raise OffbookError(f"cannot write the checkpoint {path}: {error}; {last}") from None
        return written

    def finish(self, path: Path) -> None:
        """When all tensors are written."""
        if not self.base:
            with TemporaryDirectory(dir=path) as room:  # for its config.json: in the folder it would remove the tensors
                self.model.save_pretrained(room, state_dict={})
                for file in Path(room).glob("*.json"):
                    file.rename(path / file.name)
        if parts := sorted(path.glob("model-*.safetensors")):
            names: dict[str, str] = {}
            for part in parts:
                with safe_open(part, "pt") as opened:
                    names |= dict.fromkeys(opened.keys(), part.name)
            index = {"metadata": {"total_size": sum(part.stat().st_size for part in parts)}, "weight_map": names}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        copy_tokenizer(self.tokenizer_from, path)
        (path / "state.json").write_text(json.dumps(self.state) + "\n")
        (path / "DONE").touch()


def _held(
    trainer: Trainer, stem: str, tensors: Mapping[str, Tensor], bundle: Callable[[str], str] = str
) -> dict[str, dict[str, Tensor]]:
    """Those that this rank writes, in host buffers that are kept for the next time, by the name of their file. Tensors
    of one `bundle` are in one file."""
    world = 1 if trainer.ranks.mesh is None else dist.get_world_size()
    holders = assign_holders(tensors, {name: bundle(name) for name in tensors}, world)
    held = {}
    for name, whole in gathered(tensors, holders):
        key = f"{stem}/{name}"
        if key not in trainer.snapshot:
            trainer.snapshot[key] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
        held[name] = trainer.snapshot[key].copy_(whole.detach(), non_blocking=True)
        del whole  # before the next is put together
    members = sorted({*holders.values()}) or [0]
    rank = dist.get_rank() if world > 1 else 0
    if rank not in members:
        return {}
    return {stem + (f"-{members.index(rank) + 1:05d}-of-{len(members):05d}" if len(members) > 1 else ""): held}


def assign_holders(tensors: Mapping[str, Tensor], bundles: Mapping[str, str], ranks: int) -> dict[str, int]:
    """The rank that gets each tensor whole, balanced by bytes; a bundle has one holder. All ranks compute the same."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        sizes[bundles[name]] = sizes.get(bundles[name], 0) + tensor.nbytes
    load = [0] * ranks
    holder = {}
    for bundle in sorted(sizes, key=lambda bundle: -sizes[bundle]):
        holder[bundle] = load.index(min(load))
        load[holder[bundle]] += sizes[bundle]
    return {name: holder[bundles[name]] for name in tensors}


def load_training_state(trainer: Trainer, path: Path) -> None:
    """Optimizer and teacher; the weights came with the model, and a frozen teacher is the run's starting model."""
    for key, stored in _stored(path, "optimizer"):
        name, _, kind = key.rpartition("/")
        master = trainer.masters.named[name]
        shape = stored.get_shape()
        if shape not in ([], list(master.shape)):
            raise OffbookError(
                f"the checkpoint {path} has {key} in another shape; start a new run from the model in it"
            )
        if kind == MASTER:
            put(master, stored)
        elif shape:
            state = torch.zeros_like(master, dtype=stored[:0].dtype).detach()
            put(state, stored)
            trainer.optimizer.state[master][kind] = state
        else:
            trainer.optimizer.state[master][kind] = stored[...].to(master.device)
    counts = json.loads((path / "state.json").read_text())
    trainer.steps = counts["updates"]  # fewer than steps where some were skipped
    trainer.policy_norm = counts["policy_norm"]
    for weights in trainer.own_weights:
        weights.steps = trainer.steps
        if weights.share:
            own = dict(weights.decoder.model.named_parameters())
            for key, stored in _stored(path, f"teacher.{weights.name}"):
                put(own[key], stored)


def _stored(path: Path, file: str) -> Iterator[tuple[str, Any]]:
    """What a file has, or the files that ranks wrote in its place: by name, slices that are read where they are cut."""
    folder = path / TRAINING
    parts = sorted(folder.glob(f"{file}-*-of-*.safetensors")) or [folder / f"{file}.safetensors"]
    wanted = int(parts[0].stem.rpartition("-of-")[2]) if parts[0].stem != file else 1
    there = sum(part.is_file() for part in parts)
    if there != wanted:
        raise OffbookError(
            f"the checkpoint {path} lacks some of {file}: {there} of {wanted} files are there; remove its DONE, and "
            "the run goes on from the one before"
        )
    for part in parts:
        with safe_open(part, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_slice(name)


class Checkpoints:
    """Writes checkpoints: every `settings.every` steps, or by their size. Small ones are written after every step, or
    every `small_minutes`. A write of more than `deadline_s` is a timeout."""

    def __init__(
        self,
        trainer: Trainer,
        root: Path,
        tokenizer_from: Path,
        settings: CheckpointConfig = DEFAULTS,
        deadline_s: float = math.inf,
        small_minutes: float = 0.0,
    ):
        self.trainer = trainer
        self.root = root
        self.tokenizer_from = tokenizer_from
        self.keep = settings.keep
        self.deadline_s = deadline_s
        self.size = checkpoint_size(trainer)
        self.minutes = 0.0 if settings.every else small_minutes if self.size < SMALL else SPARSE_MINUTES
        self.every = settings.every or (0 if self.minutes else 1)
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

    def ready(self, step: int, is_last: bool) -> float | None:
        """The seconds waited until a checkpoint can be saved after `step`; None if none is due. Raises the error of the
        last write, if it has ended with one."""
        self.check()
        return self.wait() if is_last or self.is_due(step) else None

    def save(self, step: int) -> None:
        """What the trainer holds now, after `step`. It may go on at once."""
        self.wait()
        path = checkpoint_path(self.root, step)
        shutil.rmtree(path, ignore_errors=True)  # before any rank writes
        self._writing = self.trainer.together(begin, path, step, self.tokenizer_from, self.keep)
        self.last = step
        self._since = time.monotonic()

    def check(self) -> None:
        """Raise the error of the last write, if it has ended with one."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> float:
        """Wait for the current write, and raise its error. Returns the seconds that it took."""
        writing, self._writing = self._writing, None
        if writing is None or (writing.done() and not writing.exception()):
            return 0.0
        started = time.monotonic()
        what = f"the checkpoint of step {self.last} to be written"
        watchdog = processes.Watchdog(lambda: what, self.deadline_s, lambda: None, "checkpoint")
        while futures.wait([writing], processes.TELL_S).not_done:
            watchdog.look()
        writing.result()
        return time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Finish the current write. If training has failed, that is the error that counts."""
        try:
            self.wait()
        except Exception:
            if error is None:
                raise


def begin(trainer: Trainer, path: Path, step: int, tokenizer_from: Path, keep: int) -> Future[None]:
    """Write this rank's share in a thread. Rank 0's future is done when all have written and the checkpoint is
    finished."""
    contents = Contents.of(trainer, step, tokenizer_from)
    thread = ThreadPoolExecutor(1, "checkpoint")
    writing = thread.submit(_write, contents, path, keep, None if trainer.ranks.mesh is None else _group())
    thread.shutdown(wait=False)
    return writing


def _write(contents: Contents, path: Path, keep: int, group: Any) -> None:
    """An error of any rank is raised on rank 0."""
    if group is None:
        contents.write(path)
    else:
        try:
            own = "", contents.write(path)
        except Exception as error:  # whatever it is, rank 0 has to know
            own = str(error) if isinstance(error, OffbookError) else f"{type(error).__name__}: {error}", list[str]()
        rank = dist.get_rank()
        found = [own] * dist.get_world_size()
        dist.gather_object(own, None if rank else found, group=group)
        if rank:
            return
        for other, (problem, files) in enumerate(found):
            if problem:
                raise OffbookError(problem)
            _refuse_unseen(path, other, files)
    contents.finish(path)
    for old in finished_steps(path.parent)[:-keep]:
        (checkpoint_path(path.parent, old) / "DONE").unlink()  # first, so that a half-removed folder does not count
        shutil.rmtree(checkpoint_path(path.parent, old))


def _refuse_unseen(path: Path, rank: int, files: list[str]) -> None:
    """Fail if rank 0 cannot see another rank's files: their folders are not on a shared filesystem."""
    end = time.monotonic() + SEEN_S
    while unseen := [file for file in files if not (path / file).is_file()]:
        if time.monotonic() >= end:
            raise OffbookError(
                f"rank {rank} wrote {unseen[0]} of the checkpoint {path}, which rank 0 does not see there: put the "
                "run's folder where all ranks see it; checkpoints from before are kept"
            )
        time.sleep(1.0)


@functools.cache
def _group() -> Any:
    """A separate group, so that messages of a checkpoint cannot collide with those of training."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def checkpoint_size(trainer: Trainer) -> int:
    """Bytes, about: what is trained, its optimizer state (8 bytes; 4 more for a float32 copy of bfloat16 weights) and
    the teachers that move."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    weights = sum(parameter.nbytes for parameter in trained)
    state = sum(parameter.numel() * (12 if parameter.element_size() == 2 else 8) for parameter in trained)
    return weights * (1 + sum(own.share > 0 for own in trainer.own_weights)) + state
