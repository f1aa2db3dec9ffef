"""offbook quickstart: the whole circle once, on a CPU, in minutes.

It makes the pocket model and its tasks, then calls the same `train` and `eval` that a user would, once with hints and
once without, side by side, and shows the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbook.cli.options import Json, Row, config_from, option, progress_display, show_table
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
LOG = "logs/train.log"
Running = dict[str, subprocess.Popen[bytes]]


def quickstart(
    ctx: typer.Context,
    seed: Annotated[int, option("Another seed: another pocket model, other tasks, other rollouts.")] = 0,
    out: Annotated[Path | None, option("The folder; runs/quickstart-SEED if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Train a small coding agent end to end: RL alone, and RL with targeted hints, from the same start.

    Takes configuration like `train` does, for both runs: --train.steps 10, @ FILE.toml.

    For example: offbook quickstart --out runs/quickstart
    """
    started = time.monotonic()
    out = out or Path(f"runs/quickstart-{seed}")
    RunFolder(out).refuse_file()
    config = config_from(ctx, {"seed": str(seed)}, defaults={"model": "pocket"})
    from offbook.rl.checks import refuse_missing_tasks, rewards_and_monitors_of
    from offbook.rl.tasks import task_sets

    rewards_and_monitors_of(config)
    refuse_missing_tasks(config, "train")
    with progress_display() as progress:
        from offbook.rl.models import model_folder

        model = model_folder(config.model, config.seed, progress)
        task_sets(config, progress)  # made, or refused if there is nothing to train on
        with only_writer(out):  # refused here, before the arms are started, if another process writes there
            pass
        with _arms(out, [*ctx.args, "--seed", str(seed), "--model", config.model]) as running:
            before = RunFolder(out).read_eval("before")
            if before is None:
                from offbook.evals.run import Subject, load_suites, run_eval
                from offbook.rl.resume import RolloutFiles

                progress("measuring before", 0.0)
                suites = load_suites([config.tasks.source], config)
                files = RolloutFiles.in_run(out, "before")
                subject = Subject(config.model, config, model)
                before = run_eval(subject, suites, files, train=task_sets(config).train)
                progress("measuring before", 1.0)
            with only_writer(out):  # the arms have locks of their own, and not all the time
                _wait_for(running, out, config.train.steps, progress)
    measured = {"before": before, **{arm: RunFolder(out / arm).read_eval("final") or {} for arm in ARMS}}
    summary: Row = {name: {key: one[key] for key in COLUMNS} for name, one in measured.items()}
    seconds = time.monotonic() - started
    (out / "summary.json").write_text(json.dumps({**summary, "seconds": seconds}, indent=2) + "\n")

    from offbook.cli.view import write_page
    from offbook.view.index import RunIndex

    report = out / "report.html"
    runs = [*(RunIndex(arm, out / arm) for arm in ARMS), RunIndex("before", out)]
    write_page(report, runs, "offbook quickstart", NEXT)
    if as_json:
        print(json.dumps({**summary, "seconds": seconds, "report": str(report)}))
        return
    rows = [[name, *(f"{row[key]:{COLUMNS[key]}}" for key in COLUMNS)] for name, row in summary.items()]
    show_table([["", *COLUMNS], *rows])
    print(f"{seconds:.0f} s. Look at {report}; the numbers are in {out / 'summary.json'}")


@contextmanager
def _arms(out: Path, arguments: list[str]) -> Iterator[Running]:
    """Both runs at once, each in a process with one thread: two cores are used without sharing a model."""
    running: Running = {}
    with ExitStack() as logs:
        try:
            for arm, extra in ARMS.items():
                folder = str(out / arm)
                (out / arm / "logs").mkdir(parents=True, exist_ok=True)
                log = logs.enter_context(open(out / arm / LOG, "ab"))
                verbs = ["train", *arguments, *extra, "--out", folder], ["eval", folder]
                command = [sys.executable, "-c", IN_TURN, *map(json.dumps, verbs)]
                running[arm] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            yield running
        finally:
            for process in running.values():
                process.terminate()
                process.wait()


def _wait_for(running: Running, out: Path, steps: int, progress: Progress) -> None:
    while running:
        time.sleep(0.2)
        for arm, process in list(running.items()):
            metrics = out / arm / "metrics.jsonl"
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            progress(f"training {arm}", done / steps)
            if done >= steps:
                progress(f"measuring {arm}", 0.0)
            if process.poll() is None:
                continue
            del running[arm]
            if process.returncode:
                raise OffbookError(f"{arm} failed; see {out / arm / LOG}")
            progress(f"measuring {arm}", 1.0)


def in_turn() -> None:
    """Run verbs one after the other, until one fails. In one process: their imports take longer than some of them."""
    from offbook.cli import main

    for verb in sys.argv[1:]:
        sys.argv = ["offbook", *json.loads(verb)]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
