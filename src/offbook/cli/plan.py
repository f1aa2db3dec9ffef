"""offbook plan: the GPU memory that a training run needs, by part, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from offbook.cli.options import Json, config_from, results, say, show_table
from offbook.core.config import Config, ConfigError, recipe_for

if TYPE_CHECKING:
    from offbook.rl.plan import Plan

GB = 1e9
MB = 1e6
LARGEST_GB = 1e6


def plan(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A hub id, a folder, a config.json, or `pocket`.")] = "",
    stage: Annotated[
        Literal["train", "sft", "pretrain"], typer.Option(help="RL, or a stage, in which nothing is sampled.")
    ] = "train",
    gpu_memory: Annotated[float, typer.Option(help="In GB, of a GPU that is not here.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Show the memory that training MODEL needs, by part, and the largest context that fits. Configuration as in
    `offbook train`.

    Only the model's config.json is read; those of common models ship with offbook. Without a recipe (`@ NAME`) the one
    of that model or of its size is taken. If the run does not fit, the exit code is 1 and the output says what would.
    """
    if model.startswith("@"):  # a recipe that names its model
        ctx.args.insert(0, model)
        model = ""
    config = config_from(ctx, {"model": model})
    recipe = "" if any(one.startswith("@") for one in ctx.args) else recipe_for(config.model)
    if not config.model:
        raise ConfigError("there is no model to plan for; give one, as in: offbook plan Qwen/Qwen3-0.6B")
    if not 0 <= gpu_memory <= LARGEST_GB:  # also refuses NaN
        raise ConfigError(f"--gpu-memory {gpu_memory:g} is no size of a GPU; give it in GB, as in: --gpu-memory 80")
    from offbook.rl.plan import advice, make_plan, this_device

    device = this_device(gpu_memory)
    if stage == "train":
        found = make_plan(config, device)
    else:
        from offbook.stages.run import plan_stage, without_teachers

        config = without_teachers(config)
        found = plan_stage(config, device, config.pretrain.context if stage == "pretrain" else 0)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        if recipe:
            say(f"recipe {recipe}, chosen by the model; for another: offbook plan @ RECIPE --model {config.model}")
        show_plan(found)
        asked = config.harness.context
        if stage == "train" and found.context < asked != Config().harness.context:
            say(f"a context of {asked} was asked for; the model has {found.context} positions, so it is that")
        if not found.fits:
            say(advice(config, found))
    if not found.fits:
        raise typer.Exit(1)


def show_plan(found: Plan, to: Console = results) -> None:
    size = f"{found.parameters / GB:.2f}B" if found.parameters >= GB else f"{found.parameters / MB:.1f}M"
    say(f"{found.model}: {size} parameters", to=to)
    unit, name = (GB, "GB") if found.need >= GB else (MB, "MB")
    rows = {part: size for part, size in found.parts.items() if size}
    rows["all of it"] = found.need
    rows[f"room in {found.device.name}"] = found.device.room
    show_table([["part", name], *([part, f"{size / unit:,.2f}"] for part, size in rows.items())], to=to)
    way = found.way
    lines = [f"recompute {way.recompute}, compile {str(way.compile).lower()}, micro_tokens {way.micro_tokens}"]
    if found.trained != found.parameters:
        lines.append(f"trained: {found.trained / MB:.1f}M parameters of adapters")
    if found.gpu_share is not None:
        lines.append(f"vLLM gets {found.gpu_share:g} of the GPU (engine.vllm.gpu_share)")
    if found.kv_tokens is not None:
        lines.append(f"the engine holds keys and values of {found.kv_tokens} tokens")
    largest = f"the largest that fits is {found.largest_context}" if found.largest_context else "none fits"
    lines.append(f"context {found.context}: {'fits' if found.fits else 'does not fit'}; {largest}")
    say("\n".join(lines), to=to)
