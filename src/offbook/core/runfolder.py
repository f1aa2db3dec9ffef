"""The run folder: the contract between training, resuming, judging and viewing. All of it is text or safetensors.

config.toml              the resolved configuration
metrics.jsonl            one line per step
tasks.jsonl              one line per task: the instruction, the tests, the deleted code
rollouts/step_00003.jsonl    every rollout of step 3, scored
feedback/step_00003.jsonl    every target of step 3 with its hint and what the hint did
look.jsonl               what each hint did in the hint probe
feedback/coach.jsonl     what `offbook coach` found in the stored rollouts, in the same form
eval/NAME.json, eval/NAME.rollouts.jsonl    a measurement and the rollouts behind it
ckpt/step_00003/DONE     weights and optimizer after step 3; a folder without DONE is an unfinished write
aside/step_00003.samples.jsonl    what step 3 would have trained on, where its gradient was NaN or infinite
data.json                of runs that learn from data: the verb, what it is trained on, by content, how many steps
                         that takes, and what was left out of it, by its reason
mismatch.json            of distillation: how far the model was from what it learned on
.lock                    the process that writes here
slots/                   rollouts that are in no step yet, and the journal: rl/scheduler.py
harder/ID                tasks that were made during the run
trackers.json            how far each tracker of --log has followed metrics.jsonl
logs/
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError

from offbook.types import Feedback, Json, OffbookError, Rollout, Sample

T = TypeVar("T")
LOCK_S = 2.0  # for the children of a killed writer to end: they have its lock's file open
ADAPTER = "adapter_config.json"  # the settings of one


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a path that cannot be written into an error for the user. A full disk keeps its own error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise OffbookError(f"cannot write {path}: {error.filename}: {str(error.strerror).lower()}") from None


def write_atomic(path: Path, data: bytes | str) -> None:
    """A reader sees the old file or the new one, never half of it, also after a power cut.

    A link stays one: what it leads to is written. A pipe, a device or this process's own output is just written to.
    """
    raw = data.encode() if isinstance(data, str) else data
    with writing(path):
        if str(path).startswith("/dev/") or (path.exists() and not path.is_file()):
            with open(path, "ab") as file:
                file.write(raw)
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f"{target.name}.{os.getpid()}.part")  # others may write the same file
        try:
            with open(temporary, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that takes its name when all of it is there. If another process was faster, its folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield part
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


# NaN is written as NaN and not as nothing. That can be said of a list alone, so records are dumped as lists of one.
_LISTS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(list[kind], config=ConfigDict(ser_json_inf_nan="constants"))  # type: ignore[valid-type]
    for kind in (Rollout, Feedback, Sample, dict)
}


def dump_lines(records: Iterable[Any]) -> bytes:
    return b"".join(_LISTS[type(record)].dump_json([record])[1:-1] + b"\n" for record in records)


def read_lines(path: Path, kind: type[T]) -> tuple[list[T], list[int]]:
    """The records of a JSONL file, if there is one, and the numbers of the lines that could not be read."""
    records, unreadable = [], []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            records += _LISTS[kind].validate_json(b"[" + line + b"]")
        except ValidationError:
            unreadable.append(number)
    return records, unreadable


def load_lines(path: Path, kind: type[T]) -> tuple[list[T], int]:
    """The same, and how many could not be read."""
    records, unreadable = read_lines(path, kind)
    return records, len(unreadable)


class RunFolder:
    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.metrics_file = self.path / "metrics.jsonl"
        self.config_file = self.path / "config.toml"
        self.data_file = self.path / "data.json"  # a run that learns from data has one

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run, or one sentence about why it cannot be read."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise OffbookError(f"{path} is not a folder; give the run folder that `offbook train` wrote")
        if not folder.config_file.is_file():
            raise OffbookError(f"{path} has no config.toml, so it is not a run folder")
        return folder

    def refuse_file(self) -> None:
        """Before minutes go into a model: can a run be kept here?"""
        if self.path.exists() and not self.path.is_dir():
            raise OffbookError(f"{self.path} is a file; --out is the folder of a run")

    def append_metrics(self, row: Json) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> tuple[list[Json], int]:
        """The rows in order and the number of unreadable lines (a crash in the middle of a write leaves one)."""
        return load_lines(self.metrics_file, dict)

    def truncate_metrics(self, last_step: int) -> None:
        """Forget rows past `last_step`: those steps are about to be done again."""
        rows, _ = self.metrics()
        write_atomic(self.metrics_file, dump_lines(row for row in rows if row["step"] <= last_step))

    def step_file(self, room: str, step: int) -> Path:
        return self.path / room / f"step_{step:05d}.jsonl"

    def write_rollouts(self, step: int, rollouts: list[Rollout]) -> None:
        write_atomic(self.step_file("rollouts", step), dump_lines(rollouts))

    def append_rollout(self, step: int, rollout: Rollout) -> None:
        """It is on the disk when this returns. What a crash left of a line before it stays a line of its own."""
        path = self.step_file("rollouts", step)
        with writing(path), open(path, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read() == b"\n" else b"\n")
            file.write(dump_lines([rollout]))
            file.flush()
            os.fsync(file.fileno())

    def write_feedback(self, step: int, feedback: list[Feedback]) -> None:
        write_atomic(self.step_file("feedback", step), dump_lines(feedback))

    def write_look(self, step: int, rows: Iterable[Json]) -> None:
        """A line per rule on what its hint does, found before a step. Lines of later steps are dropped."""
        lines = [*self.looks(step - 1), *({"step": step, **row} for row in rows)]
        write_atomic(self.path / "look.jsonl", dump_lines(lines))

    def looks(self, last_step: int) -> list[Json]:
        rows, _ = load_lines(self.path / "look.jsonl", dict)
        return [row for row in rows if row["step"] <= last_step]

    def write_samples(self, step: int, samples: list[Sample]) -> Path:
        path = self.path / "aside" / f"step_{step:05d}.samples.jsonl"
        write_atomic(path, dump_lines(samples))
        return path

    def rollouts(self, step: int) -> tuple[list[Rollout], int]:
        return load_lines(self.step_file("rollouts", step), Rollout)

    def feedback(self, step: int) -> tuple[list[Feedback], int]:
        return load_lines(self.step_file("feedback", step), Feedback)

    def steps(self) -> list[int]:
        """The steps whose rollouts are stored."""
        return sorted(int(path.stem.removeprefix("step_")) for path in (self.path / "rollouts").glob("step_*.jsonl"))

    def checkpoints(self) -> dict[int, Path]:
        """Those that are finished, by step."""
        finished = [done.parent for done in self.path.glob("ckpt/step_*/DONE")]
        return {int(path.name.removeprefix("step_")): path for path in finished}

    def write_eval(self, name: str, result: Json, rollouts: list[Rollout]) -> None:
        write_atomic(self.path / "eval" / f"{name}.rollouts.jsonl", dump_lines(rollouts))
        write_atomic(self.path / "eval" / f"{name}.json", json.dumps(result, indent=2) + "\n")

    def read_eval(self, name: str) -> Json | None:
        path = self.path / "eval" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None


def is_adapter(model: Path) -> bool:
    """Whether a model's folder holds an adapter alone, in PEFT's format."""
    return (model / ADAPTER).is_file()


def base_named(adapter: Path) -> str:
    """The hub id or folder of its base, which is no adapter."""
    try:
        base = str(json.loads((adapter / ADAPTER).read_text()).get("base_model_name_or_path") or "")
    except ValueError as error:
        raise OffbookError(f"{adapter / ADAPTER} cannot be read: {error}") from None
    if base and Path(base).is_dir() and is_adapter(Path(checkpoint_named(base))):
        fix = f"write where its base is into base_model_name_or_path of {adapter / ADAPTER}"
        raise OffbookError(f"the adapter {adapter} is one of {base}, which is an adapter itself; {fix}")
    return base


def latest_checkpoint(folder: RunFolder) -> Path:
    finished = folder.checkpoints()
    if not finished:
        raise OffbookError(f"{folder.path} has no finished checkpoint yet")
    return finished[max(finished)]


def checkpoint_named(model: str) -> str:
    """A run folder stands for its newest checkpoint; any other name of a model is what it is."""
    folder = Path(model)
    is_run = (folder / "config.toml").is_file() and not (folder / "config.json").is_file()
    return str(latest_checkpoint(RunFolder(folder))) if is_run else model


class Held(OffbookError):
    """Another process writes into the folder."""

    def __init__(self, folder: Path, whose: str):
        super().__init__(f"{folder} is being written by {whose}; wait until it is done, or give another --out")
        self.whose = whose


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Refuse other writers of a run folder meanwhile; readers are free. The kernel drops the lock of a process that
    ends, however it ends. The file .lock says who holds it."""
    path = folder / ".lock"
    is_new = not folder.exists()
    if path.is_symlink():
        raise OffbookError(f"{path} is a link, and a lock is never one; remove it")
    with writing(path):
        lock = FileLock(path, timeout=LOCK_S, is_singleton=False, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise Held(folder, _owner(path)) from None
    pid = os.getpid()
    try:
        path.write_text(json.dumps([pid, socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S")]))
        yield
    finally:
        if os.getpid() == pid:  # a forked child shares the lock and must not release it
            path.unlink(missing_ok=True)
            lock.release()
        if is_new:
            with suppress(OSError):  # not empty by now
                folder.rmdir()


def _owner(path: Path) -> str:
    try:
        pid, host, since = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return "another process"
    return f"process {pid} on {host} since {since}"
