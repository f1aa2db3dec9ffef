"""The verbs that train: train, sft, pretrain, distill, mtp, and several of them in order, stages."""

import json
import os
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.compare import compared
from offbook.cli.options import (
    DryRun,
    Json,
    Log,
    Model,
    ModelArgument,
    Out,
    Row,
    argument,
    config_from,
    config_to_train,
    follow_run,
    given_model,
    note,
    option,
    progress_display,
    say,
    show_config,
    show_table,
)
from offbook.core.config import Config, ConfigError
from offbook.types import OffbookError

RL_NUMBERS = ("solved", "invalid_per_100", "turns", "hinted_targets", "groups_with_gradient")


def train(
    ctx: typer.Context,
    out: Out = "",
    log: Log = None,
    dry_run: DryRun = False,
    no_fit_check: Annotated[
        bool, option("Train even if the model hardly writes a readable call.", "--no-fit-check")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train. Configuration: @ FILE.toml ... and --KEY VALUE, such as --model, --tasks.source, --train.steps.

    --model is `pocket`, `smollm2-135m`, a run or model folder, or a hub id; it gets the recipe that fits it, unless one
    is named: @ pocket, small or standard. The same command resumes a run (--out) at its last checkpoint.

    For example: offbook train --model pocket --out runs/train --train.steps 10
    """
    config = config_to_train(ctx, {"out": out})
    from offbook.rl.checks import refuse_missing_tasks, refuse_run, rewards_and_monitors_of

    if dry_run:
        refuse_missing_tasks(config, "train")
        rewards_and_monitors_of(config)
        show_config(config, as_json)
        return
    refuse_run(config, to_train=True)  # before torch is imported, which takes seconds
    from offbook.rl.train import train as run

    numbers = {key: key for key in RL_NUMBERS}
    follow_run(partial(run, fit_check=not no_fit_check), config, numbers, as_json, log, what_next(config))


def what_next(config: Config) -> str:
    """The commands that work now."""
    from offbook.rl.tasks import has_heldout

    out, source = quote(config.out), quote(config.tasks.source)
    if has_heldout(config):
        return f"offbook eval {out}, or offbook view {out}"
    return (
        f"offbook view {out}; there is no held-out task to measure on: make tasks of another repository (offbook tasks "
        f"make ANOTHER --out {source}), or train into another --out with --tasks.heldout_share 0.2"
    )


DATA_NUMBERS = {
    "loss": "ce/loss",
    "validation": "validation/loss",
    "learning rate": "learning_rate",
}


def sft(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        option("A run folder, a file of trajectories or chat, a dataset, `demos:TASKS`; repeatable."),
    ] = None,
    out: Out = "",
    log: Log = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Imitate. Configuration as in `offbook train`, and of its own: --sft.epochs, --sft.learning_rate, --sft.reminders.

    `offbook train --model RUN`, `eval`, `rollout` and `export` take the result. The same command resumes a run (--out)
    at its last checkpoint.

    For example: offbook sft --model pocket --data runs/train --out runs/sft
    """
    config = config_to_train(ctx, {"sft.data": json.dumps(data) if data else "", "out": out}, "runs/sft")
    from offbook.stages.sources import refuse_missing_data

    refuse_missing_data(config)
    if dry_run:
        show_config(config, as_json)
        return
    from offbook.stages.sft import sft as run

    follow_run(run, config, DATA_NUMBERS, as_json, log)


def pretrain(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        option("A repository: folder, archive, git URL, `pypi:NAME`, `pocket-code:200`; repeatable."),
    ] = None,
    out: Out = "",
    log: Log = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Pretrain further on code. Configuration as in `offbook train`, and of its own: --pretrain.context, .rope, .guard.

    `offbook sft --model RUN`, `eval --suite base` and `export` take the result. The same command resumes a run (--out)
    at its last checkpoint.

    For example: offbook pretrain --model pocket --data pocket-code:200
    """
    config = config_to_train(ctx, {"pretrain.data": json.dumps(data) if data else "", "out": out}, "runs/pretrain")
    from offbook.stages.corpus import refuse_missing_sources

    refuse_missing_sources(config.pretrain)
    if dry_run:
        show_config(config, as_json)
        return
    from offbook.stages.pretrain import pretrain as run

    follow_run(run, config, DATA_NUMBERS, as_json, log)


def distill(
    ctx: typer.Context,
    trajectories: Annotated[
        str, argument("A run folder, a file, or a folder of files: ATIF, OpenAI or Anthropic messages.")
    ],
    model: Model = "",
    epochs: Annotated[int, option("Passes over the faulty messages.", min=1)] = 1,
    out: Out = "",
    as_json: Json = False,
) -> None:
    """Train on hints alone, from logs and without an environment.

    Takes configuration as `train` does; --epochs, train.groups and train.group_size give the number of steps. Faults
    are found by the rules of docs/feedback.md and by what people said to `offbook serve`. First says how far the model
    is from the logged tokens. The same command resumes a run (--out).

    For example: offbook distill logs.jsonl --model pocket
    """
    own = {"model": model, "out": out, "sft.data": json.dumps([trajectories])}
    config = config_to_train(ctx, own, "runs/distill")
    if not config.feedback.weight:
        raise ConfigError("feedback.weight is 0, so no hint would teach anything; give a weight above 0")
    from offbook.stages.distill import distill as run

    numbers = {"hints": "hinted_targets", "divergence": "hint/loss"}
    follow_run(lambda config, *callbacks: run(config, epochs, *callbacks), config, numbers, as_json)


def mtp(
    ctx: typer.Context,
    model: ModelArgument = "",
    data: Annotated[
        list[str] | None,
        option("As in `offbook sft`; repeatable. A run's own rollouts if not given."),
    ] = None,
    out: Out = "",
    as_json: Json = False,
) -> None:
    """Train a draft head by self-distillation, for speculative decoding. The model stays as it is.

    Configuration as in `offbook train`, and of its own: --mtp.steps, --mtp.depth. --engine.draft takes the
    head's folder: vLLM drafts with it by the method `eagle`.

    For example: offbook mtp pocket --out runs/mtp
    """
    model = given_model(ctx, model)
    data = data or ([model] if (Path(model) / "rollouts").is_dir() else ["pocket:400"] if model == "pocket" else [])
    config = config_from(ctx, {"model": model, "sft.data": json.dumps(data), "out": out}, defaults={"out": "runs/mtp"})
    if not config.model:
        raise OffbookError("give one model, as in: offbook mtp pocket")
    from offbook.rl.checks import refuse_missing_model

    refuse_missing_model(config.model)
    from offbook.stages.mtp import mtp as run

    def kept(row: Row, prefix: str) -> str:
        return ", ".join(f"{row[key]:.3f}" for key in row if key.startswith(prefix))

    with progress_display() as progress:

        def on_step(row: Row) -> None:
            note(f"step {row['step']} of {config.mtp.steps}: kept by depth {kept(row, 'mtp/kept_')}")

        result = run(config, on_step, progress, note)
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['head']}: on held-out text sampling keeps {kept(result, 'validation/kept_')} by depth")
    head = quote(result["head"])
    note(f"next: offbook train --model {quote(config.model)} --engine.kind vllm --engine.draft {head}")


STAGE_NUMBERS = {"loss": "ce/loss", "validation": "validation/loss", "solved": "solved"}


def stages(
    ctx: typer.Context,
    out: Out = "",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run stages one after the other, each from the model of the one before: --stages.order says which.

    Every stage is a run folder. The same command resumes. `offbook stages @ full` tries it on pocket. Several stages
    `eval` are compared at the end.

    For example: offbook stages @ full --out runs/full
    """
    config = config_to_train(ctx, {"out": out}, "runs/stages")
    from offbook.rl.checks import refuse_missing_tasks
    from offbook.rl.tasks import has_heldout, refuse_no_heldout
    from offbook.stages.corpus import refuse_missing_sources
    from offbook.stages.pipeline import of_stage, run_stages
    from offbook.stages.sources import refuse_missing_data

    order = config.stages.order
    for number, name in enumerate(order):
        settings = of_stage(config, name, Path(config.out) / name, config.model)
        if name == "sft" and (settings.sft.data or "sample" not in order[:number]):
            refuse_missing_data(settings)
        elif name in ("pretrain", "long"):
            refuse_missing_sources(settings.pretrain)
        elif name in ("fit", "sample", "eval"):
            refuse_missing_tasks(settings, "" if name == "eval" else "train")
        if name == "eval" and not has_heldout(settings):
            refuse_no_heldout(settings.tasks.source)
        if dry_run:
            show_config(settings, as_json)
    if dry_run:
        return
    from offbook.evals.run import measure_heldout

    with progress_display() as progress:

        def on_step(row: Row) -> None:
            shown = ", ".join(f"{name} {row[key]:.3g}" for name, key in STAGE_NUMBERS.items() if key in row)
            note(f"step {row['step']}: {shown}")

        rows = run_stages(config, on_step, progress, note, measure_heldout)
    if int(os.environ.get("RANK", "0")):  # another rank is the run
        return
    if as_json:
        print(json.dumps(rows))
        return
    cells = [["stage", "steps", "tokens", "seconds", *STAGE_NUMBERS, "run"]]
    for row in rows:
        ends = [row.get(key) for key in STAGE_NUMBERS.values()]
        shown = [f"{one[0]:.3f} -> {one[1]:.3f}" if one else "" for one in ends]
        counts = [str(row.get(key, "")) for key in ("steps", "train_tokens", "seconds")]
        cells.append([row["stage"], *counts, *shown, row["run"]])
    show_table(cells)
    for row in rows:
        if left := ", ".join(f"{count} {what}" for what, count in row.get("left_out", {}).items()):
            say(f"{row['stage']} left out: {left}")
    measured = [Path(row["run"]) for row in rows if row["stage"] == "eval"]
    if len(measured) > 1:
        cells, sentences, *_ = compared(measured)
        show_table(cells)
        for sentence in sentences:
            say(sentence)
