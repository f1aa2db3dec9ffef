"""offbook eval: measure a model, or a run's newest checkpoint, on suites of tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from offbook.cli.defaults import suited
from offbook.cli.options import (
    Json,
    Plain,
    config_from,
    console,
    is_plain,
    progress_display,
    refuse_mistyped,
    results,
    say,
)
from offbook.config import Config
from offbook.runfolder import RunFolder, latest_checkpoint
from offbook.types import OffbookError, Prices

if TYPE_CHECKING:
    from offbook.evals.place import Place
    from offbook.evals.run import Subject
    from offbook.evals.suites import Suites
    from offbook.loop.setup import Progress as OnProgress
    from offbook.types import Rollout, Task

COLUMNS = ("solved", "invalid_per_100", "turns", "tokens")
LINES = 10  # of progress, when plain


def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A run folder, `pocket`, a model folder, a hub id or a URL.")] = "",
    model_option: Annotated[str, typer.Option("--model", help="The same.")] = "",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="`pocket`, a side suite, `sides` for all of them, or a folder of tasks; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The evaluation's folder; of a run, its own eval/ folder.")] = None,
    samples: Annotated[int, typer.Option("-n", min=0, help="Rollouts a task; 0 is what the configuration says.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many tasks of each suite; 0 is all.")] = 0,
    name: Annotated[str, typer.Option(help="The model's name, where it is a URL.")] = "",
    train: Annotated[str, typer.Option(help="The tasks it was trained on, to look for the suite in them.")] = "",
    prices: Annotated[Path | None, typer.Option(help="TOML: \\[model] input, output, by the million tokens.")] = None,
    price_input: Annotated[float, typer.Option(min=0, help="Of a million prompt tokens.")] = 0.0,
    price_output: Annotated[float, typer.Option(min=0, help="Of a million sampled tokens.")] = 0.0,
    parallel: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 128,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again over an earlier evaluation.")] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Measure on tasks: solved, effort, cost and behaviour together, each with an interval.

    The same command goes on with an evaluation that was stopped. A run folder's own configuration is the base, its
    held-out tasks are the suite, and the result is kept in its eval/ folder.
    """
    refuse_mistyped(ctx)
    chosen = model or model_option
    if not chosen or (model and model_option):
        raise OffbookError("give one model: a run folder, `pocket`, a model folder, a hub id or a URL")
    arguments = [*ctx.args, *(["--eval.samples", str(samples)] if samples else [])]
    run = Path(chosen) if (Path(chosen) / "config.toml").is_file() else None
    base = [run / "config.toml"] if run else []
    config = config_from(arguments, base, {} if run else {**suited(chosen), "model": chosen})
    config = _priced(config, name or chosen, prices, Prices(price_input, price_output))

    from offbook.evals.run import without_rows
    from offbook.evals.tables import bucket_cells, result_cells, said_of

    with progress_display(plain) as progress:
        subject = _subject(chosen, config, run, name, progress)
        suites = _suites(suite, subject.config, limit, progress)
        trained = _trained_on(train, config, run)
    place = _place(out, run, chosen, suite)
    result = _measure(subject, suites, place, trained, fresh, parallel, plain)
    if as_json:
        print(json.dumps(without_rows(result)))
        return
    results.print(table_of(result_cells(result)))
    for key, label in (("by_difficulty", "difficulty"), ("by_suite", "suite")):
        if len(result[key]) > 1:
            results.print(table_of(bucket_cells(result[key], label)))
    say(said_of(result))
    print(place.results)


def _priced(config: Config, model: str, file: Path | None, prices: Prices) -> Config:
    from offbook.evals.prices import read_prices

    prices = read_prices(file, model) if file else prices
    if not (prices.input or prices.output):
        return config
    harness = config.harness.model_copy(update={"price_input": prices.input, "price_output": prices.output})
    return config.model_copy(update={"harness": harness})


def _subject(chosen: str, config: Config, run: Path | None, name: str, progress: OnProgress) -> Subject:
    from offbook.evals.run import Subject
    from offbook.loop.rollout import is_url, refuse_password
    from offbook.loop.setup import model_folder, refuse_missing_tasks

    refuse_missing_tasks(config)
    if is_url(chosen):
        refuse_password(chosen)
        if not name:
            raise OffbookError("a URL may serve several models; say which with --name")
        return Subject(name, config, None, name)
    folder = latest_checkpoint(RunFolder.open(run)) if run else model_folder(chosen, config.seed, progress)
    return Subject(chosen, config, folder)


def _suites(names: list[str] | None, config: Config, limit: int, progress: OnProgress) -> Suites:
    """Without a name: what the configuration holds out."""
    from offbook.evals.suites import load_suites

    return load_suites(names or [config.tasks.source], config, limit, progress)


def _trained_on(source: str, config: Config, run: Path | None) -> list[Task] | None:
    """A run knows its own training tasks; of other models somebody has to say."""
    from offbook.evals.suites import train_tasks

    if not source and not run:
        return None
    return train_tasks(source or config.tasks.source, config)


def _place(out: Path | None, run: Path | None, chosen: str, suite: list[str] | None) -> Place:
    from offbook.evals.place import Place

    label = "-".join(_slug(name) for name in suite or [])
    if run and not out:
        return Place.in_run(run, label or "final")
    return Place.folder(out or Path("runs") / "-".join(filter(None, ["eval", _slug(chosen), label])))


def _slug(name: str) -> str:
    """A name that a folder can have: of a path its last part, of a URL its host."""
    last = name.partition("://")[2].partition("/")[0] if "://" in name else Path(name).name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def _measure(
    subject: Subject,
    suites: Suites,
    place: Place,
    trained: list[Task] | None,
    fresh: bool,
    parallel: int,
    plain: bool,
) -> dict[str, Any]:
    from offbook.evals.run import run_eval

    total = len(suites.tasks) * subject.config.eval.samples
    with rollout_display(subject.label, total, plain) as seen:
        return run_eval(subject, suites, place, seen, trained, fresh, parallel)


@contextmanager
def rollout_display(label: str, total: int, plain: bool) -> Iterator[Callable[[Rollout], None]]:
    """A bar with the time that is left and the score so far; when plain, ten lines of it."""
    done = solved = 0
    bars = None
    if not is_plain(plain):
        score = TextColumn("solved {task.fields[score]}")
        numbers = (MofNCompleteColumn(), score, TimeElapsedColumn(), TimeRemainingColumn())
        bars = Progress(TextColumn("{task.description}"), BarColumn(), *numbers, console=console)
        bar = bars.add_task(f"measuring {label}", total=total, score="-")
        bars.start()

    def seen(rollout: Rollout) -> None:
        nonlocal done, solved
        done += 1
        solved += rollout.solved
        if bars:
            bars.update(bar, completed=done, score=f"{solved / done:.0%}")
        elif done == total or done * LINES // total > (done - 1) * LINES // total:
            console.print(f"measuring {label}: {done} of {total}, {solved / done:.0%} solved", highlight=False)

    try:
        yield seen
    finally:
        if bars:
            bars.stop()


def table_of(cells: list[list[str]]) -> Table:
    header, *rows = cells
    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def result_table(results: dict[str, dict[str, Any]]) -> Table:
    """Several results in a few numbers, for quickstart."""
    table = Table("", "solved", "invalid per 100 calls", "turns", "tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, result in results.items():
        solved, invalid, turns, tokens = (result[key] for key in COLUMNS)
        table.add_row(name, f"{solved:.1%}", f"{invalid:.1f}", f"{turns:.2f}", f"{tokens:.0f}")
    return table
