"""offbook mtp: a head that drafts what a model will write."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from offbook.cli.options import Json, Plain, config_from, console, progress_display, say
from offbook.types import OffbookError


def mtp(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run folder, `pocket`, `smollm2-135m`, a model folder, a hub id.")
    ] = "",
    model_option: Annotated[str, typer.Option("--model", help="The model, where the argument is left out.")] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(help="As in `offbook sft`; repeatable. A run's own rollouts if not given."),
    ] = None,
    out: Annotated[str, typer.Option(help="A new folder for the head; runs/mtp if not given.")] = "",
    plain: Plain = False,
    as_json: Json = False,
) -> None:
    """Train a draft head by self-distillation, for speculative decoding. The model stays as it is.

    Configuration as in `offbook train`, and of its own: --mtp.steps, --mtp.depth. --engine.draft takes the
    head's folder: vLLM drafts with it by the method `eagle`.
    """
    if bool(model) == bool(model_option):
        raise OffbookError("give one model, as in: offbook mtp --model pocket")
    model = model or model_option
    if not data and (Path(model) / "rollouts").is_dir():
        data = [model]
    if not data and model == "pocket":
        data = ["pocket:400"]
    given = {"model": model, "sft.data": json.dumps(data or []), "out": out}
    config = config_from(ctx, given, defaults={"out": "runs/mtp"})
    from offbook.rl.checks import refuse_missing_model

    refuse_missing_model(config.model)
    from offbook.stages.mtp import mtp as run

    with progress_display(plain) as progress:

        def on_step(row: dict[str, Any]) -> None:
            kept = ", ".join(f"{row[key]:.3f}" for key in row if key.startswith("mtp/kept_"))
            console.print(f"step {row['step']} of {config.mtp.steps}: kept by depth {kept}")

        result = run(config, on_step, progress, partial(say, to=console))
    if as_json:
        print(json.dumps(result))
        return
    kept = ", ".join(f"{result[key]:.3f}" for key in result if key.startswith("validation/kept_"))
    print(f"{result['head']}: on held-out text sampling keeps {kept} by depth")
    head = quote(result["head"])
    say(
        f"next: offbook train --model {quote(model)} --engine.kind vllm --engine.draft {head}",
        to=console,
    )
