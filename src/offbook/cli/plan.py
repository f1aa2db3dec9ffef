"""offbook plan: what a training run takes of a GPU's memory, by part, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from offbook.cli.options import Json, config_from, results, say
from offbook.config import ConfigError

if TYPE_CHECKING:
    from offbook.loop.plan import Plan

GB = 1e9
LARGEST_GB = 1e6


def plan(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a config.json, or `pocket`.")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="With two or more the engine has its own.")] = 1,
    gpu_memory: Annotated[float, typer.Option(help="In GB, of a GPU that is not here.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Say what training MODEL takes, by part, and the largest context that fits. Configuration as in `offbook train`.

    Only the model's config.json is read. Exit code 1 if it does not fit.
    """
    if model.startswith("@"):  # a recipe that names its model
        ctx.args.insert(0, model)
        model = ""
    config = config_from(ctx, {"model": model} if model else {})
    if not config.model:
        raise ConfigError("there is no model to plan for; give one, as in: offbook plan Qwen/Qwen3-0.6B")
    if not 0 <= gpu_memory <= LARGEST_GB:  # which is not so of `nan` either
        raise ConfigError(f"--gpu-memory {gpu_memory:g} is no size of a GPU; give it in GB, as in: --gpu-memory 80")
    from offbook.loop.plan import make_plan, this_device

    found = make_plan(config, this_device(gpu_memory), engine_apart=gpus > 1)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show_plan(found)
    if not found.fits:
        raise typer.Exit(1)


def show_plan(found: Plan, to: Console = results) -> None:
    table = Table("part", "GB", title=f"{found.model}: {found.parameters / GB:.2f}B parameters", title_justify="left")
    table.columns[1].justify = "right"
    for part, size in found.parts.items():
        if size:
            table.add_row(part, f"{size / GB:.2f}")
    table.add_section()
    most = "the most at a time: vLLM sleeps in a step" if found.sleeps else "all of it"
    table.add_row(most, f"{found.need / GB:.2f}")
    table.add_row(f"room in {found.device.name}", f"{found.device.room / GB:.2f}")
    to.print(table)
    if found.trained != found.parameters:
        say(f"trained: {found.trained / 1e6:.1f}M parameters of adapters", to=to)
    way = found.way
    say(f"recompute {way.recompute}, compile {str(way.compile).lower()}, micro_tokens {way.micro_tokens}", to=to)
    if found.gpu_share is not None:
        say(f"vLLM gets {found.gpu_share:g} of the GPU (engine.vllm.gpu_share)", to=to)
    if found.kv_tokens is not None:
        say(f"the engine holds keys and values of {found.kv_tokens} tokens", to=to)
    say(f"context {found.context}: {'fits' if found.fits else 'does not fit'}; " + _largest(found), to=to)


def _largest(found: Plan) -> str:
    return f"the largest that fits is {found.largest_context}" if found.largest_context else "none fits"
