"""The run folder: the contract between training, resuming, judging and viewing. All of it is text or safetensors.

config.toml              the resolved configuration
metrics.jsonl            one line a step
tasks.jsonl              one line a task: the instruction, the tests, the deleted code
rollouts/step_00003.jsonl    every rollout of step 3, scored
feedback/step_00003.jsonl    every target of step 3 with its hint and what the hint did
feedback/coach.jsonl     what `offbook coach` found in the stored rollouts, in the same form
eval/NAME.json, eval/NAME.rollouts.jsonl    a measurement and the rollouts behind it
ckpt/step_00003/DONE     weights and optimizer after step 3; a folder without DONE is an unfinished write
aside/step_00003.samples.jsonl    what step 3 would have trained on, where that gave no number
.lock                    the process that writes here
logs/
"""

from __future__ import annotations

import _thread
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from offbook.types import Feedback, OffbookError, Rollout, Sample

T = TypeVar("T")
log = logging.getLogger(__name__)
BEAT_S, DEAD_S = 15.0, 60.0  # between a writer's signs of life, and how long without one it is taken for alive


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A place where no file can be is the user's to mend. A full disk is another matter and told as what it is."""
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
        if not _is_replaceable(path):
            with open(path, "ab") as file:
                file.write(raw)
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(target.name + ".part")
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)


def _is_replaceable(path: Path) -> bool:
    """/dev/stdout may lead to a plain file, and what is printed later would go to the one that was replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    outputs = []
    for number in (1, 2):
        with suppress(OSError):  # it may be closed
            outputs.append(os.fstat(number))
    return stat.S_ISREG(found.st_mode) and not any(os.path.samestat(found, output) for output in outputs)


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


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """While this process writes into a run folder, others that would are refused. Readers are not held up.

    The owner is in the file .lock and touches it all the time, in a thread: a step may take hours. It counts no longer
    when its process is gone from this machine, or when it has not touched the file for a minute.
    """
    path = folder / ".lock"
    is_new = not folder.exists()
    with writing(path):
        mine = _take(path)
    over = threading.Event()
    threading.Thread(target=_beat, args=(path, mine, over), daemon=True).start()

    def release() -> None:
        over.set()
        if mine["pid"] == os.getpid() and _owner(path) == mine:
            path.unlink()

    def die(number: int, frame: FrameType | None) -> None:
        release()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, die)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        release()
        if is_new:
            with suppress(OSError):  # it holds something by now
                folder.rmdir()


def _take(path: Path) -> dict[str, Any]:
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with _alone_with(path) as file:
        owner, silent_s = _owner(path), time.time() - os.fstat(file.fileno()).st_mtime
        if owner and silent_s < DEAD_S and not (owner["host"] == mine["host"] and _is_gone(owner["pid"])):
            whose = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
            raise OffbookError(
                f"{path.parent} is being written by {whose}; wait until it is done, or give another --out"
            )
        file.truncate(0)
        json.dump(mine, file)
    return mine


@contextmanager
def _alone_with(path: Path) -> Iterator[IO[str]]:
    """The file, for this process alone: of two that would take a lock over, one comes second and sees the first."""
    while True:
        with open(path, "a") as file:
            with suppress(OSError):  # some network file systems have no such locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # released meanwhile, and so not what the next one looks at
            yield file
            return


def _owner(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # or one that was killed before it had written who it is
        return None


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # of another user
        return False
    return False


def _beat(path: Path, mine: dict[str, Any], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        try:
            if _owner(path) == mine:
                os.utime(path)
                continue
        except OSError:  # a file system that is away for a moment
            continue
        log.error("%s was moved, removed, or taken over while this process slept, which ends here", path.parent)
        _thread.interrupt_main()
        return


_KINDS = (Rollout, Feedback, Sample)
_ADAPTERS: dict[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in _KINDS}
# NaN is written as NaN and not as nothing. That can be said of a list alone, so each is dumped as a list of one.
_LISTS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(list[kind], config=ConfigDict(ser_json_inf_nan="constants"))  # type: ignore[valid-type]
    for kind in _KINDS
}


def dump_lines(records: Iterable[Any]) -> bytes:
    return b"".join(_LISTS[type(record)].dump_json([record])[1:-1] + b"\n" for record in records)


def load_lines(path: Path, kind: type[T]) -> tuple[list[T], int]:
    """The records of a JSONL file and how many of its lines could not be read."""
    records, unreadable = [], 0
    for line in path.read_bytes().splitlines():
        try:
            records.append(_ADAPTERS[kind].validate_json(line))
        except ValidationError:
            unreadable += 1
    return records, unreadable


class RunFolder:
    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.metrics_file = self.path / "metrics.jsonl"
        self.config_file = self.path / "config.toml"

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run, or one sentence about why it cannot be read."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise OffbookError(f"{path} is not a folder; give the run folder that `offbook train` wrote")
        if not folder.config_file.is_file():
            raise OffbookError(f"{path} has no config.toml, so it is not a run folder")
        if not os.access(folder.config_file, os.R_OK | os.F_OK):
            raise OffbookError(f"{folder.config_file} cannot be read; check its permissions")
        return folder

    def refuse_file(self) -> None:
        """Before minutes go into a model: can a run be kept here?"""
        if self.path.exists() and not self.path.is_dir():
            raise OffbookError(f"{self.path} is a file; --out is the folder of a run")

    def append_metrics(self, row: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.metrics_file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> tuple[list[dict[str, Any]], int]:
        """The rows in order and the number of unreadable lines (a crash in the middle of a write leaves one)."""
        if not self.metrics_file.exists():
            return [], 0
        rows, unreadable = [], 0
        for line in self.metrics_file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                unreadable += 1
        return rows, unreadable

    def truncate_metrics(self, last_step: int) -> None:
        """Forget rows past `last_step`: those steps are about to be done again."""
        rows, _ = self.metrics()
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= last_step]
        write_atomic(self.metrics_file, "".join(kept))

    def _step_file(self, room: str, step: int) -> Path:
        return self.path / room / f"step_{step:05d}.jsonl"

    def write_rollouts(self, step: int, rollouts: list[Rollout]) -> None:
        write_atomic(self._step_file("rollouts", step), dump_lines(rollouts))

    def append_rollout(self, step: int, rollout: Rollout) -> None:
        path = self._step_file("rollouts", step)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(dump_lines([rollout]))

    def write_feedback(self, step: int, feedback: list[Feedback]) -> None:
        write_atomic(self._step_file("feedback", step), dump_lines(feedback))

    def write_samples(self, step: int, samples: list[Sample]) -> Path:
        path = self.path / "aside" / f"step_{step:05d}.samples.jsonl"
        write_atomic(path, dump_lines(samples))
        return path

    def rollouts(self, step: int) -> tuple[list[Rollout], int]:
        path = self._step_file("rollouts", step)
        return load_lines(path, Rollout) if path.exists() else ([], 0)

    def feedback(self, step: int) -> tuple[list[Feedback], int]:
        path = self._step_file("feedback", step)
        return load_lines(path, Feedback) if path.exists() else ([], 0)

    def steps(self) -> list[int]:
        """The steps whose rollouts are stored."""
        return sorted(int(path.stem.removeprefix("step_")) for path in (self.path / "rollouts").glob("step_*.jsonl"))

    def checkpoints(self) -> dict[int, Path]:
        """Those that are finished, by step."""
        finished = [done.parent for done in self.path.glob("ckpt/step_*/DONE")]
        return {int(path.name.removeprefix("step_")): path for path in finished}

    def write_eval(self, name: str, result: dict[str, Any], rollouts: list[Rollout]) -> None:
        write_atomic(self.path / "eval" / f"{name}.rollouts.jsonl", dump_lines(rollouts))
        write_atomic(self.path / "eval" / f"{name}.json", json.dumps(result, indent=2) + "\n")

    def read_eval(self, name: str) -> dict[str, Any] | None:
        path = self.path / "eval" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None


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
