"""offbook train: run or resume the training that a configuration describes."""

from __future__ import annotations

import json
from functools import partial
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import DryRun, Json, Log, Plain, config_to_train, follow_run, note, show_config
from offbook.core.config import Config

NUMBERS = ("solved", "invalid_per_100", "turns", "hinted_targets", "groups_with_gradient")


def train(
    ctx: typer.Context,
    out: Annotated[str, typer.Option(help="The run folder; runs/train if not given.")] = "",
    log: Log = None,
    dry_run: DryRun = False,
    no_fit_check: Annotated[
        bool, typer.Option("--no-fit-check", help="Train even if the model hardly writes a readable call.")
    ] = False,
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train. Configuration: @ FILE.toml ... and --KEY VALUE, such as --model, --tasks.source, --train.steps.

    --model is `pocket`, `smollm2-135m`, a run or model folder, or a hub id; it gets the recipe that fits it, unless one
    is named: @ pocket, small or standard. The same command resumes a run (--out) at its last checkpoint.
    """
    config = config_to_train(ctx, {"out": out})
    from offbook.rl.checks import refuse_run, rewards_and_monitors_of
    from offbook.rl.tasks import refuse_missing_tasks

    refuse_missing_tasks(config, "train")
    if dry_run:
        rewards_and_monitors_of(config)
        show_config(config, as_json)
        return
    refuse_run(config, to_train=True)  # before torch is imported, which takes seconds
    from offbook.rl.train import train as run

    done = follow_run(partial(run, fit_check=not no_fit_check), config, log, plain, {key: key for key in NUMBERS})
    if done is None:
        return
    _, last = done
    if as_json:
        print(json.dumps(last))
        return
    wanted = config.train.steps
    of = f" of {wanted}" if last["step"] < wanted else ""
    print(f"{config.out}: {last['step']}{of} steps done")
    note(f"next: {what_next(config)}")


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
