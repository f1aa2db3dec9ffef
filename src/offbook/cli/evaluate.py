"""offbook eval: measure a model, or a run's newest checkpoint, on suites of tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from offbook.cli.options import Json, Plain, config_from, progress_display, results, rollout_display, say
from offbook.core.config import Config, ConfigError, is_url, load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.types import OffbookError

BASE = "base"  # the suite that no rollout is sampled for

if TYPE_CHECKING:
    from offbook.rl.resume import RolloutFiles


def evaluate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A run folder, `pocket`, a model folder, a hub id or a URL.")] = "",
    model_option: Annotated[str, typer.Option("--model", help="The model, where the argument is left out.")] = "",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="`pocket`, a side suite, `sides` for all, a folder of tasks; repeatable. Or `base`, alone."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The evaluation's folder; of a run, its own eval/ folder.")] = None,
    samples: Annotated[int, typer.Option("-n", min=0, help="Rollouts a task; 0 is what the configuration says.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first so many tasks of each suite; 0 is all.")] = 0,
    name: Annotated[str, typer.Option(help="The model's name, where it is a URL.")] = "",
    train: Annotated[str, typer.Option(help="The tasks it was trained on, to look for the suite in them.")] = "",
    price_input: Annotated[float, typer.Option(min=0, help="Of a million prompt tokens.")] = 0.0,
    price_output: Annotated[float, typer.Option(min=0, help="Of a million sampled tokens.")] = 0.0,
    parallel: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 128,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again over an earlier evaluation.")] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Measure on tasks: solved, effort, cost and behaviour together, each with an interval.

    The same command goes on with an evaluation that was stopped. A run folder's own configuration is the base, its
    held-out tasks are the suite, and the result is kept in its eval/ folder, as `final`; with --limit 2 as `first-2`.
    """
    chosen = model or model_option
    if not chosen or (model and model_option):
        kinds = "a run folder, `pocket`, a model folder, a hub id or a URL"
        raise OffbookError(f"give one model: {kinds}, as in: offbook eval runs/train")
    if out:
        RunFolder(out).refuse_file()
    own = {"eval.samples": str(samples or "")}
    if price_input or price_output:
        own |= {"harness.prices.input": str(price_input), "harness.prices.output": str(price_output)}
    run = Path(chosen) if (Path(chosen) / "config.toml").is_file() else None
    config = config_from(ctx, own, [run / "config.toml"]) if run else config_from(ctx, {**own, "model": chosen})
    if run:
        _refuse_other_run(run, config)

    from offbook.rl.checks import refuse_missing_model
    from offbook.rl.tasks import refuse_missing_tasks

    if not run:
        refuse_missing_model(chosen)
    if suite and BASE in suite:
        if len(suite) > 1:
            raise OffbookError("`--suite base` reads code, the others sample rollouts: give it alone")
        _base(chosen, run, config, out, limit, plain, as_json)
        return
    refuse_missing_tasks(config)
    from offbook.evals.run import Subject, run_eval
    from offbook.evals.suites import load_suites, train_tasks
    from offbook.evals.tables import bucket_cells, notes_of, result_cells
    from offbook.rl.models import local_or_remote

    with progress_display(plain) as progress:
        folder = latest_checkpoint(RunFolder.open(run)) if run else local_or_remote(chosen, name, config.seed, progress)
        # Without a name: what the configuration holds out.
        suites = load_suites(suite or [config.tasks.source], config, limit, progress)
    # What other models, and runs from data, were trained on is what --train says.
    has_tasks = run and not RunFolder(run).data_file.is_file()
    source = train or (config.tasks.source if has_tasks else "")
    trained = train_tasks(source, config) if source else None
    subject, files = (
        Subject(name if folder is None else chosen, config, folder, name),
        _files(out, run, chosen, suite, limit),
    )
    total = len(suites.tasks) * config.eval.samples
    with rollout_display(f"measuring {subject.label}", total, plain) as watch:
        result = run_eval(subject, suites, files, watch, trained, fresh, parallel)
    if as_json:
        print(json.dumps({key: value for key, value in result.items() if key != "rows"}))  # those are for the file
        return
    results.print(table_of(result_cells(result)))
    for key, label in (("by_difficulty", "difficulty"), ("by_suite", "suite")):
        if len(result[key]) > 1:
            results.print(table_of(bucket_cells(result[key], label)))
    for sentence in notes_of(result):
        say(sentence)
    print(files.results)


def _base(
    chosen: str, run: Path | None, config: Config, out: Path | None, limit: int, plain: bool, as_json: bool
) -> None:
    from offbook.evals.base import run_base
    from offbook.rl.models import described, local_or_remote
    from offbook.rl.tasks import task_sets

    with progress_display(plain) as progress:
        if is_url(chosen):
            raise OffbookError(
                "`--suite base` needs a model that is here, not behind a URL: it reads log-probabilities"
            )
        folder = latest_checkpoint(RunFolder.open(run)) if run else local_or_remote(chosen, "", config.seed, progress)
        assert folder is not None
        described(str(folder))  # what is no model is refused before tasks are made
        tasks = task_sets(config, progress).heldout
        result = run_base(folder, tasks, limit, progress, config.engine.precision)
    label = "-".join([BASE, *([f"first-{limit}"] if limit else [])])
    path = out / f"{BASE}.json" if out else None
    path = path or (run / "eval" / f"{label}.json" if run else Path("runs") / f"eval-{_slug(chosen)}-{label}.json")
    write_atomic(path, json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
        return
    code = result["code"]
    results.print(f"{code['bits_per_byte']:.3f} bits per byte on {code['bytes']} bytes of {code['files']} files")
    print(path)


def _refuse_other_run(run: Path, config: Config) -> None:
    """A run is measured as it was trained, and not on tasks that it was trained on."""
    trained = load_config([run / "config.toml"], {})
    share = trained.tasks.heldout_share
    if config.tasks.heldout_share != share:
        raise ConfigError(f"{run} held out a share of {share:g} of its tasks; leave tasks.heldout_share out")
    own, asked = trained.train.lora.model_dump(), config.train.lora.model_dump()
    differing = [name for name in own if asked[name] != own[name]]
    problems = [f"train.lora.{name} is {asked[name]!r} and the run's {own[name]!r}" for name in differing]
    if problems:
        raise ConfigError(f"{run} is measured as it was trained ({'; '.join(problems)}); leave train.lora out")


def _files(out: Path | None, run: Path | None, chosen: str, suite: list[str] | None, limit: int) -> RolloutFiles:
    """A limited evaluation has its own folder, so that it does not replace a full one."""
    from offbook.rl.resume import RolloutFiles

    first = [f"first-{limit}"] if limit else []
    label = "-".join([*(_slug(name) for name in suite or []), *first])
    if run and not out:
        return RolloutFiles.in_run(run, label or "final")
    return RolloutFiles.folder(out or Path("runs") / "-".join(filter(None, ["eval", _slug(chosen), label])))


def _slug(name: str) -> str:
    """A name that a folder can have: of a path its last part, of a URL its host."""
    last = name.partition("://")[2].partition("/")[0] if "://" in name else Path(name).name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def table_of(cells: list[list[str]]) -> Table:
    header, *rows = cells
    table = Table(*header)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table
