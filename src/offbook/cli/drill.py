"""offbook drill: kill the parts of a run in turn, let it go on, and say what was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from offbook.cli.options import Json, Plain, config_from, console, results, say
from offbook.core.config import Config
from offbook.core.orphans import end_with
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder

LOOK_S = 0.02
DEADLINE_S = 1800.0  # for a run to come to where it is struck, or to its end
ENGINE, MONITORS = (
    b"offbook.engine.subprocess_engine",
    b"offbook.signals.monitors.worker",
)  # in the command lines of a run's processes
SMALL = {
    "model": "pocket", "out": "runs/drill", "tasks.num_train": "12", "tasks.num_heldout": "2", "train.steps": "6",
    "train.groups": "2", "train.group_size": "4", "feedback.look": "false", "checkpoint.keep": "9",
}  # fmt: skip
SCHEDULES = {
    "lockstep": {"mode": "lockstep", "max_staleness": 1},  # all of it follows from the seed
    "continuous": {"mode": "continuous", "max_staleness": 2},
}

Lines = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Blow:
    """`is_due` by what a run has noted since it was last started. Without a `process` all of the run is killed: trainer
    and reconciler are threads of one. `act` is done to the run's store in the place of that."""

    name: str
    is_due: Callable[[Lines, RunFolder], bool]
    process: bytes = b""
    act: Callable[[Path], None] | None = None


def _writing(lines: Lines, folder: RunFolder) -> bool:
    return any(line["state"] in ("turn", "scored") for line in lines)


def _training(lines: Lines, folder: RunFolder) -> bool:
    given = {line["step"] for line in lines if line["state"] == "trained"}
    return bool(given - {row["step"] for row in folder.metrics()[0]})


def _saving(lines: Lines, folder: RunFolder) -> bool:
    begun = [path for path in folder.path.glob("ckpt/step_*") if not (path / "DONE").exists()]
    return bool(begun) and any(line["state"] == "trained" for line in lines)


def _published(lines: Lines, folder: RunFolder) -> bool:
    return any((_store(folder.path) / "versions").glob("*/manifest"))


def _damage(store: Path) -> None:
    """HEAD says nothing, and of the newest version half of the manifest is left."""
    newest = max(store.glob("versions/*/manifest"))
    newest.write_bytes(newest.read_bytes()[:40])
    (store / "HEAD").write_bytes(b"\0\0junk")


BLOWS = (
    Blow("all while sampling", _writing),
    Blow("engine", _writing, ENGINE),
    Blow("store", _published, act=_damage),
    Blow("trainer", _training),
    Blow("worker", _writing, MONITORS),
    Blow("checkpoint", _saving),
)


@dataclass(frozen=True, slots=True)
class Report:
    schedule: str
    struck: list[str]  # what was killed, in order
    missed: list[str]  # what the run had ended before
    rollouts: int
    rollouts_again: int  # that were over, and were done again
    turns: int  # that were kept
    turns_again: int
    counted_twice: int  # groups that two steps were given, or one twice
    steps: int
    same_weights: bool | None  # as those of a run that nobody struck; None where the schedule follows no seed
    store_whole: bool  # whoever reads it has the weights of the last checkpoint


def drill(
    ctx: typer.Context,
    out: Annotated[str, typer.Option(help="The folder of its runs; runs/drill if not given.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Kill -9 engine, trainer and worker in turn during small runs, damage their store, and print what was lost.

    Takes configuration as `train` does; without any it is a few steps of the pocket model. In lockstep a batch that
    was not over is sampled again, and the weights at the end are those of a run that was never struck; in the
    continuous mode no rollout and no turn that was over is done again. Exit code 1 where that is not so.
    """
    config = config_from(ctx, {"out": out}, defaults=SMALL)
    root = Path(config.out)
    if root.exists() and not root.is_dir():
        raise OffbookError(f"{root} is a file, and the runs need a folder; give another --out")
    if root.exists() and any(root.iterdir()):
        raise OffbookError(f"{root} is not empty; give another --out")
    reports = [_drilled(config, name, root) for name in SCHEDULES]
    if as_json:
        print(json.dumps([asdict(report) for report in reports]))
    else:
        _show(reports)
    if not all(map(_is_well, reports)):
        raise typer.Exit(1)


def _drilled(config: Config, schedule: str, root: Path) -> Report:
    struck, missed = _struck(config, schedule, root / schedule)
    same = None
    if schedule == "lockstep":
        straight = root / "undisturbed"
        process = _start(config, schedule, straight)
        _wait(process, straight)
        same = _last_weights(straight) == _last_weights(root / schedule)
    return _report(schedule, root / schedule, struck, missed, same)


def _struck(config: Config, schedule: str, out: Path) -> tuple[list[str], list[str]]:
    from offbook.core.runfolder import RunFolder

    struck, missed, folder = list[str](), list[str](), RunFolder(out)
    process, before = _start(config, schedule, out), 0
    for blow in BLOWS:
        until = time.monotonic() + DEADLINE_S
        while process.poll() is None and not (blow.is_due(_journal(folder)[before:], folder) and _found(process, blow)):
            if time.monotonic() > until:
                process.kill()
                raise OffbookError(f"the run in {out} did not come to where the {blow.name} is struck; see its log")
            time.sleep(LOOK_S)
        if blow.act and process.poll() is None:
            blow.act(_store(out))
            struck.append(blow.name)
            console.print(f"{schedule}: {blow.name} damaged", highlight=False)
            continue
        whom = _found(process, blow)
        if process.poll() is not None or not whom:
            missed.append(blow.name)
            continue
        for pid in whom:
            os.kill(pid, signal.SIGKILL)
        struck.append(blow.name)
        console.print(f"{schedule}: {blow.name} killed", highlight=False)
        if not blow.process:
            process.wait()
            before = len(_journal(folder))
            process = _start(config, schedule, out)
    _wait(process, out)
    return struck, missed


def _found(process: subprocess.Popen[bytes], blow: Blow) -> list[int]:
    """Whom it would strike: none where a run that goes on has written down what it found, and started nobody yet."""
    return list(_children(process.pid, blow.process)) if blow.process else [process.pid]


def _start(config: Config, schedule: str, out: Path) -> subprocess.Popen[bytes]:
    tree = config.model_dump()
    tree["out"] = str(out)
    tree["engine"]["mode"] = SCHEDULES[schedule]["mode"]
    tree["loop"] |= {"max_staleness": SCHEDULES[schedule]["max_staleness"], "store": str(_store(out))}
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".toml")
    file.write_text(Config.model_validate(tree).to_toml())
    command = [sys.executable, "-m", "offbook", "train", "@", str(file), "--plain"]
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=partial(end_with, os.getpid()))


def _store(out: Path) -> Path:
    return out.with_suffix(".store")


def _wait(process: subprocess.Popen[bytes], out: Path) -> None:
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise OffbookError(f"the run in {out} did not end within {DEADLINE_S:.0f} s") from None
    if code:
        words = out.with_suffix(".log").read_text().strip().splitlines()[-3:]
        raise OffbookError(f"the run in {out} ended with code {code}: {' | '.join(words)}")


def _children(pid: int, called: bytes) -> Iterator[int]:
    """Processes of a run."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and called in (path / "cmdline").read_bytes():
                yield int(path.name)
        except (OSError, ValueError):  # it has ended meanwhile
            continue


def _journal(folder: RunFolder) -> Lines:
    from offbook.rl.rollout_buffer import read_journal

    return list(read_journal(folder.path))


def _last_weights(out: Path) -> str:
    from offbook.core.runfolder import RunFolder, latest_checkpoint
    from offbook.rl.resume import weights_digest

    return weights_digest(latest_checkpoint(RunFolder(out)))


def _is_store_whole(out: Path) -> bool:
    """A reader that has nothing yet comes to the bits of the last checkpoint."""
    import torch

    from offbook.core.runfolder import RunFolder, latest_checkpoint
    from offbook.engine.sync import Reader, open_store
    from offbook.rl.models import weights_in

    reader = Reader(open_store(str(_store(out))), "drill")
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


def _report(schedule: str, out: Path, struck: list[str], missed: list[str], same: bool | None) -> Report:
    from offbook.core.runfolder import RunFolder

    folder = RunFolder(out)
    lines = _journal(folder)
    scored = Counter(line["slot"] for line in lines if line["state"] == "scored")
    turns = Counter((line["slot"], line["turn"]) for line in lines if line["state"] == "turn")
    ids = Counter(rollout.id for step in folder.steps() for rollout in folder.rollouts(step)[0])
    return Report(
        schedule=schedule,
        struck=struck,
        missed=missed,
        rollouts=len(scored),
        rollouts_again=sum(scored.values()) - len(scored),
        turns=len(turns),
        turns_again=sum(turns.values()) - len(turns),
        counted_twice=sum(ids.values()) - len(ids),
        steps=len(folder.metrics()[0]),
        same_weights=same,
        store_whole=_is_store_whole(out),
    )


def _is_well(report: Report) -> bool:
    lost = report.rollouts_again + report.turns_again if report.same_weights is None else not report.same_weights
    return not lost and not report.counted_twice and not report.missed and report.store_whole


def _show(reports: list[Report]) -> None:
    table = Table("schedule", "killed", "rollouts lost", "turns lost", "counted twice", "weights", "store", box=None)
    for one in reports:
        again = f"{one.rollouts_again} of {one.rollouts}"
        if one.same_weights is not None:
            again += " sampled again"
        turns = f"{one.turns_again} of {one.turns}" if one.turns else "-"
        weights = {None: "-", True: "the same bits", False: "DIFFERENT"}[one.same_weights]
        store = "whole" if one.store_whole else "BROKEN"
        table.add_row(one.schedule, ", ".join(one.struck), again, turns, str(one.counted_twice), weights, store)
    results.print(table)
    for one in reports:
        if one.missed:
            say(f"{one.schedule}: the run ended before these were struck: {', '.join(one.missed)}; give more steps")
