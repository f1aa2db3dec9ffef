"""Kill -9 the parts of a run in turn, damage its store, let it resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offbook.core.config import Config
from offbook.core.processes import end_with
from offbook.core.runfolder import RunFolder, latest_checkpoint
from offbook.engine.sync import Reader, open_store
from offbook.rl.models import weights_in
from offbook.rl.scheduler import read_journal
from offbook.types import OffbookError

POLL_S = 0.02
DEADLINE_S = 900.0  # for a run to come to where a fault is due, or to its end
MONITORS = b"offbook.signals.monitors.worker"  # in the command line of a process

Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Blow:
    """One fault. `is_due` judges by the journal since the last start. Without a `process` the whole run is killed:
    trainer and scheduler are threads of it. `act` damages the run's store instead."""

    name: str
    is_due: Callable[[Lines, RunFolder], bool]
    process: bytes = b""
    act: Callable[[Path], None] | None = None


def _writing(lines: Lines, folder: RunFolder) -> bool:
    return any(line["state"] == "scored" for line in lines)


def _training(lines: Lines, folder: RunFolder) -> bool:
    given = {line["step"] for line in lines if line["state"] == "trained"}
    return bool(given - {row["step"] for row in folder.metrics()[0]})


def _saving(lines: Lines, folder: RunFolder) -> bool:
    begun = [path for path in folder.path.glob("ckpt/step_*") if not (path / "DONE").exists()]
    return bool(begun) and any(line["state"] == "trained" for line in lines)


def _published(lines: Lines, folder: RunFolder) -> bool:
    return any((store_of(folder.path) / "manifests").glob("*"))


def damage(store: Path) -> None:
    """Of the newest version half of the manifest is left."""
    newest = max(store.glob("manifests/*"))
    newest.write_bytes(newest.read_bytes()[:40])


BLOWS = (
    Blow("all while sampling", _writing),
    Blow("store", _published, act=damage),
    Blow("trainer", _training),
    Blow("worker", _writing, MONITORS),
    Blow("checkpoint", _saving),
)


def inject_faults(config: Config, out: Path, env: dict[str, str]) -> list[str]:
    """Run to the end under every blow. Returns those that the run ended before."""
    missed, folder = list[str](), RunFolder(out)
    process, before = start(config, out, env), 0
    for blow in BLOWS:
        until = time.monotonic() + DEADLINE_S
        while process.poll() is None and not (
            blow.is_due(list(read_journal(out))[before:], folder) and _victims(process, blow)
        ):
            assert time.monotonic() < until, f"the run did not come to where {blow.name} is due"
            time.sleep(POLL_S)
        victims = _victims(process, blow)
        if process.poll() is not None or not victims:
            missed.append(blow.name)
        elif blow.act:
            blow.act(store_of(out))
        else:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            if not blow.process:
                process.wait()
                before = len(list(read_journal(out)))
                process = start(config, out, env)
    finish(process, out)
    return missed


def start(config: Config, out: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    file = out.with_suffix(".toml")
    file.write_text(config.model_copy(update={"out": str(out)}).to_toml())
    command = [sys.executable, "-m", "offbook", "train", "@", str(file)]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, preexec_fn=partial(end_with, os.getpid()))


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    assert process.wait(DEADLINE_S) == 0, out.with_suffix(".log").read_text()[-2000:]


def store_of(out: Path) -> Path:
    return out.with_suffix(".store")


def children(pid: int, called: bytes) -> Iterator[int]:
    """Child processes whose command line contains `called`."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and called in (path / "cmdline").read_bytes():
                yield int(path.name)
        except (OSError, ValueError):  # it has ended meanwhile
            continue


def _victims(process: subprocess.Popen[bytes], blow: Blow) -> list[int]:
    return list(children(process.pid, blow.process)) if blow.process else [process.pid]


def is_store_whole(out: Path) -> bool:
    """Whether a new reader gets the bits of the last checkpoint."""
    reader = Reader(open_store(str(store_of(out))))
    try:
        found = reader.poll()
    except OffbookError:
        return False
    finally:
        reader.close()
    kept = weights_in(latest_checkpoint(RunFolder(out)), 0).tensors
    return found is not None and all(
        torch.equal(tensor, kept[name].to(tensor.dtype)) for name, tensor in found.tensors.items()
    )
