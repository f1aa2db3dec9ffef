"""offbook eval and offbook rollout: measure a model on tasks, or watch it work on them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbook.cli.options import (
    Json,
    Model,
    ModelArgument,
    Name,
    Out,
    argument,
    config_from,
    given_model,
    note,
    option,
    progress_display,
    rollout_display,
    say,
    show_table,
)
from offbook.core.config import Config, ConfigError, is_url, load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.resume import RolloutFiles


BASE = "base"  # the suite that no rollout is sampled for


def evaluate(
    ctx: typer.Context,
    model: ModelArgument = "",
    suite: Annotated[
        list[str] | None,
        option("`pocket`, a side suite, `sides` for all, a folder of tasks; repeatable. Or `base`, alone."),
    ] = None,
    out: Annotated[Path | None, option("The evaluation's folder; of a run, its own eval/ folder.")] = None,
    samples: Annotated[int, option("Rollouts per task; 0 is eval.samples.", "-n", min=0)] = 0,
    limit: Annotated[int, option("Only the first so many tasks of each suite; 0 is all.", min=0)] = 0,
    name: Name = "",
    train: Annotated[str, option("The tasks it was trained on, to look for the suite in them.")] = "",
    parallel: Annotated[int, option("Concurrent rollouts.", min=1)] = 128,
    as_json: Json = False,
) -> None:
    """Measure on tasks: solved, effort, cost and behaviour together, each with an interval.

    The same command resumes. A run folder's own configuration is the base, its held-out tasks are the suite, and the
    result goes to its eval/ folder, as `final`; with --limit 2 as `first-2`.

    For example: offbook eval runs/train
    """
    chosen = given_model(ctx, model)
    own = {"eval.samples": str(samples or "")}
    run = Path(chosen) if (Path(chosen) / "config.toml").is_file() else None
    config = config_from(ctx, own if run else {**own, "model": chosen}, [Path(chosen) / "config.toml"])
    if not chosen:
        raise OffbookError("give one model: a run folder, `pocket`, a hub id or a URL, as in: offbook eval runs/train")
    if out:
        RunFolder(out).refuse_file()
    from offbook.rl.checks import refuse_missing_model, refuse_missing_tasks

    if run:
        _refuse_other_run(run, config)
    else:
        refuse_missing_model(chosen)
    if suite and BASE in suite:
        if len(suite) > 1 or is_url(chosen):
            raise OffbookError("`--suite base` reads log-probabilities of code: give it alone, and no URL as the model")
        _base(chosen, run, config, out, limit, as_json)
        return
    refuse_missing_tasks(config)
    from offbook.evals.run import Subject, load_suites, run_eval, train_tasks
    from offbook.evals.tables import bucket_cells, notes_of, result_cells
    from offbook.rl.models import local_or_remote

    with progress_display() as progress:
        folder = latest_checkpoint(RunFolder.open(run)) if run else local_or_remote(chosen, name, config.seed, progress)
        suites = load_suites(suite or [config.tasks.source], config, limit, progress)
    # --train says what other models, and runs from data, were trained on.
    has_tasks = run and not RunFolder(run).data_file.is_file()
    source = train or (config.tasks.source if has_tasks else "")
    trained = train_tasks(source, config) if source else None
    subject = Subject(name if folder is None else chosen, config, folder, name)
    files = _files(out, run, chosen, suite, limit)
    total = len(suites.tasks) * config.eval.samples
    with rollout_display(f"measuring {subject.label}", total) as watch:
        result = run_eval(subject, suites, files, watch, trained, parallel)
    if as_json:
        print(json.dumps({key: value for key, value in result.items() if key != "rows"}))  # those are for the file
        return
    show_table(result_cells(result))
    for key, label in (("by_difficulty", "difficulty"), ("by_suite", "suite")):
        if len(result[key]) > 1:
            show_table(bucket_cells(result[key], label))
    for sentence in notes_of(result):
        say(sentence)
    print(files.results)


def _base(chosen: str, run: Path | None, config: Config, out: Path | None, limit: int, as_json: bool) -> None:
    from offbook.evals.base import run_base
    from offbook.rl.models import described, model_folder
    from offbook.rl.tasks import task_sets

    with progress_display() as progress:
        folder = latest_checkpoint(RunFolder.open(run)) if run else model_folder(chosen, config.seed, progress)
        described(str(folder))  # what is no model is refused before tasks are made
        tasks = task_sets(config, progress).heldout
        result = run_base(folder, tasks, limit, progress, config.engine.precision)
    label = f"{BASE}-first-{limit}" if limit else BASE
    path = run / "eval" / f"{label}.json" if run else Path("runs") / f"eval-{_slug(chosen)}-{label}.json"
    path = out / f"{BASE}.json" if out else path
    write_atomic(path, json.dumps(result, indent=2) + "\n")
    code = result["code"]
    words = f"{code['bits_per_byte']:.3f} bits per byte on {code['bytes']} bytes of {code['files']} files\n{path}"
    print(json.dumps(result) if as_json else words)


def _refuse_other_run(run: Path, config: Config) -> None:
    """A run is measured as it was trained, and not on tasks that it was trained on."""
    trained = load_config([run / "config.toml"], {})
    if config.tasks.heldout_share != trained.tasks.heldout_share:
        share = f"{trained.tasks.heldout_share:g}"
        raise ConfigError(f"{run} held out a share of {share} of its tasks; leave tasks.heldout_share out")
    if config.train.lora != trained.train.lora:
        raise ConfigError(f"{run} is measured as it was trained ({trained.train.lora}); leave train.lora out")


def _files(out: Path | None, run: Path | None, chosen: str, suite: list[str] | None, limit: int) -> RolloutFiles:
    """A limited evaluation has its own folder, so that it does not replace a full one."""
    from offbook.rl.resume import RolloutFiles

    label = "-".join([*map(_slug, suite or []), *([f"first-{limit}"] if limit else [])])
    if run and not out:
        return RolloutFiles.in_run(run, label or "final")
    return RolloutFiles.folder(out or Path("runs") / "-".join(filter(None, ["eval", _slug(chosen), label])))


def _slug(name: str) -> str:
    """A name that a folder can have: of a path its last part, of a URL its host."""
    last = name.partition("://")[2].partition("/")[0] if "://" in name else Path(name).name
    return re.sub(r"[^\w.-]+", "-", last).strip("-.") or "model"


def rollout(
    ctx: typer.Context,
    tasks: Annotated[str, argument("`pocket`, a task folder, or a folder of task folders.")],
    model: Model = "",
    samples: Annotated[int, option("Rollouts per task.", "-n", min=1)] = 1,
    limit: Annotated[int, option("Only the first so many tasks; 0 is all.", min=0)] = 0,
    name: Name = "",
    out: Out = "",
    as_json: Json = False,
) -> None:
    """Roll out and score, without training. `offbook view` shows the run folder.

    Takes configuration as `train` does. Without a model it is `pocket`. The same command resumes.

    For example: offbook rollout pocket --limit 2
    """
    config = config_from(ctx, {"model": model, "out": out}, defaults={"model": "pocket", "out": "runs/rollout"})
    from offbook.rl.checks import refuse_run
    from offbook.rl.tasks import tasks_at

    refuse_run(config)  # before torch is imported, which takes seconds
    with progress_display() as progress:
        chosen = tasks_at(tasks, config, progress)
        chosen = chosen[:limit] if limit else chosen
        from offbook.evals.tables import crashes_sentence
        from offbook.rl.evaluate import roll_out
        from offbook.rl.models import local_or_remote

        local_or_remote(config.model, name, config.seed, progress)  # making one shows its own progress
    with rollout_display("rollouts", len(chosen) * samples, each=True) as watch:
        result = roll_out(config, chosen, samples, watch, name)
    before = f" ({result['resumed']} from before)" if result["resumed"] else ""
    sentence = f"{config.out}: {result['rollouts']} rollouts{before}, {result['solved']:.0%} solved"
    print(json.dumps(result) if as_json else sentence)
    if result["crashes"]:
        note(crashes_sentence(result["crashes"]))
