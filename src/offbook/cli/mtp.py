"""offbook mtp: train a draft head for speculative decoding."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from offbook.cli.options import Json, Plain, Row, config_from, given_model, note, progress_display
from offbook.types import OffbookError


def mtp(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run folder, `pocket`, `smollm2-135m`, a model folder, a hub id.")
    ] = "",
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

    with progress_display(plain) as progress:

        def on_step(row: Row) -> None:
            note(f"step {row['step']} of {config.mtp.steps}: kept by depth {kept(row, 'mtp/kept_')}")

        result = run(config, on_step, progress, note)
    if as_json:
        print(json.dumps(result))
        return
    print(f"{result['head']}: on held-out text sampling keeps {kept(result, 'validation/kept_')} by depth")
    head = quote(result["head"])
    note(f"next: offbook train --model {quote(config.model)} --engine.kind vllm --engine.draft {head}")
