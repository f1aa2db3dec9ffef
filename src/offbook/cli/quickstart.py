"""offbook quickstart: the whole circle once, on a CPU, in minutes.

Nothing here is special to it: it makes the pocket model and its tasks, then calls the same `train` and `eval` that a
user would, once with hints and once without, side by side, and shows what came out.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.evaluate import table_of
from offbook.cli.options import Json, Plain, config_from, progress_display, results
from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, only_writer
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.models import Progress

COLUMNS = {"solved": ".1%", "invalid_per_100": ".1f", "turns": ".2f", "tokens": ".0f"}
ARMS = {"rl": ["--feedback.weight", "0"], "rl_hints": []}
NEXT = {  # how the report ends
    "heading": "Next: train your own, in three commands",
    "commands": [
        ["offbook tasks make ../my-project --out my-tasks", "makes verified tasks of a repository with tests"],
        [
            "offbook train --model Qwen/Qwen3-0.6B --tasks.source my-tasks --out runs/mine",
            "trains a model on them; without a GPU: --model pocket; the same command resumes",
        ],
        ["offbook view runs/mine", "shows the run in the browser, also while it goes on"],
    ],
}
IN_TURN = "from offbook.cli.quickstart import in_turn; in_turn()"
Running = tuple[subprocess.Popen[bytes], IO[bytes]]  # and its log
MADE = (*ARMS, "summary.json", "report.html", ".lock", "eval")  # in a quickstart's folder; it is known by the last


def quickstart(
    ctx: typer.Context,
    seed: Annotated[int, typer.Option(help="Another seed: another pocket model, other tasks, other rollouts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Where all of it goes; runs/quickstart-SEED if not given.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again over an earlier quickstart's folder.")] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train a small coding agent end to end: RL alone, and RL with targeted hints, from the same start.

    Takes configuration like `train` does, for both runs: --train.steps 10, @ FILE.toml.
    """
    started = time.monotonic()
    out = out or Path(f"runs/quickstart-{seed}")
    RunFolder(out).refuse_file()
    config = config_from(ctx, {"seed": str(seed)}, defaults={"model": "pocket"})
    _refuse_faulty(config)
    if fresh:
        _remove_earlier(out)
    arguments = [*ctx.args, "--seed", str(seed), "--model", config.model]
    with progress_display(plain) as progress:
        measure = _prepared(out, config, progress)
        with only_writer(out):  # refused here, before the arms are started, if another process writes there
            pass
        with _arms(out, arguments) as running:
            before = measure()
            with only_writer(out):  # the arms have locks of their own, and not all the time
                _wait_for(running, out, config.train.steps, progress)
    measured = {"before": before, **{arm: RunFolder(out / arm).read_eval("final") or {} for arm in ARMS}}
    summary = {name: {key: result[key] for key in COLUMNS} for name, result in measured.items()}
    seconds = time.monotonic() - started
    (out / "summary.json").write_text(json.dumps({**summary, "seconds": seconds}, indent=2) + "\n")

    from offbook.cli.view import write_page
    from offbook.view.index import RunIndex

    report = out / "report.html"
    runs = [*(RunIndex(arm, out / arm) for arm in ARMS), RunIndex("before", out)]
    write_page(report, runs, "offbook quickstart", NEXT)
    if as_json:
        print(json.dumps({**summary, "seconds": seconds, "report": str(report)}))
    else:
        header = ["", *(key.replace("invalid_per_100", "invalid per 100 calls") for key in COLUMNS)]
        rows = [[name, *(f"{row[key]:{COLUMNS[key]}}" for key in COLUMNS)] for name, row in summary.items()]
        results.print(table_of([header, *rows]))
        print(f"{seconds:.0f} s. Look at {report}; the numbers are in {out / 'summary.json'}")


def _refuse_faulty(config: Config) -> None:
    """Check the options before anything is made or removed."""
    from offbook.rl.collector import judges_of
    from offbook.rl.tasks import refuse_missing_tasks

    judges_of(config)
    refuse_missing_tasks(config, "train")


def _remove_earlier(out: Path) -> None:
    """What an earlier quickstart made, if that is all there is in the folder and no process writes there."""
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if not found:
        return
    foreign = sorted(name for name in found if name not in MADE or (out / name).is_symlink())
    if foreign or not (out / "eval" / "before.fingerprint.json").is_file():
        why = f"a quickstart does not make {foreign[0]}" if foreign else "it has no eval/before.fingerprint.json"
        raise OffbookError(
            f"{out} is not the folder of a quickstart ({why}), so nothing is removed; give another --out"
        )
    with ExitStack() as alone:
        for folder in (out, *(out / arm for arm in ARMS if (out / arm).is_dir())):
            alone.enter_context(only_writer(folder))
        for name in MADE:
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)


def _prepared(out: Path, config: Config, progress: Progress) -> Callable[[], dict[str, Any]]:
    """Make the model and the tasks. What is returned measures the start."""
    from offbook.evals.run import Subject, run_eval
    from offbook.evals.suites import load_suites
    from offbook.rl.models import model_folder
    from offbook.rl.resume import RolloutFiles
    from offbook.rl.tasks import task_sets

    model = model_folder(config.model, config.seed, progress)
    train = task_sets(config, progress).train  # made, or refused where there is nothing to train on
    suites = load_suites([config.tasks.source], config)

    def measure() -> dict[str, Any]:
        if before := RunFolder(out).read_eval("before"):
            return before
        progress("measuring before", 0.0)
        files = RolloutFiles.in_run(out, "before")
        before = run_eval(Subject(config.model, config, model), suites, files, train=train)
        progress("measuring before", 1.0)
        return before

    return measure


@contextmanager
def _arms(out: Path, arguments: list[str]) -> Iterator[dict[str, Running]]:
    """Both runs at once, each a process of its own with one thread: two cores are used without sharing a model."""
    running: dict[str, Running] = {}
    try:
        for arm, extra in ARMS.items():
            folder = str(out / arm)
            running[arm] = _start(out / arm, ["train", *arguments, *extra, "--out", folder], ["eval", folder])
        yield running
    finally:
        for process, log in running.values():
            process.terminate()
            process.wait()
            log.close()


def _wait_for(running: dict[str, Running], out: Path, steps: int, progress: Progress) -> None:
    while running:
        time.sleep(0.2)
        for arm, (process, log) in list(running.items()):
            done = _steps_done(out / arm)
            progress(f"training {arm}", done / steps)
            if done >= steps:
                progress(f"measuring {arm}", 0.0)
            if process.poll() is None:
                continue
            log.close()
            del running[arm]
            if process.returncode:
                raise OffbookError(f"{arm} failed; see {log.name}")
            progress(f"measuring {arm}", 1.0)


def _start(folder: Path, *verbs: list[str]) -> Running:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log = open(folder / "logs" / "train.log", "ab")  # noqa: SIM115  (closed after the process)
    command = [sys.executable, "-c", IN_TURN, *(json.dumps([*verb, "--plain"]) for verb in verbs)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT), log


def in_turn() -> None:
    """Verbs of the command line, one after the other, until one fails. In one process: what they import takes longer
    than some of them do."""
    from offbook.cli import main

    for verb in sys.argv[1:]:
        sys.argv = ["offbook", *json.loads(verb)]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


def _steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
