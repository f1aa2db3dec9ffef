"""offbook plan: what a training run takes of GPUs, by part, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from offbook.cli.options import Json, config_from, results, say
from offbook.core.config import Config, ConfigError, recipe_for

if TYPE_CHECKING:
    from offbook.rl.layout import Layout
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
    gpus: Annotated[int, typer.Option(min=1, help="From two on: how the run is laid out on them.")] = 1,
    gpu_memory: Annotated[float, typer.Option(help="In GB, of a GPU that is not here.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Say what training MODEL takes, by part, and the largest context that fits. Configuration as in `offbook train`.

    Only the model's config.json is read; those of common models ship with offbook. Without a recipe (`@ NAME`) the one
    of that model or of its size is taken. Exit code 1, and what would fit, if it does not fit.
    """
    if model.startswith("@"):  # a recipe that names its model
        ctx.args.insert(0, model)
        model = ""
    config = config_from(ctx, {"model": model})
    recipe = "" if any(one.startswith("@") for one in ctx.args) else recipe_for(config.model)
    if not config.model:
        raise ConfigError("there is no model to plan for; give one, as in: offbook plan Qwen/Qwen3-0.6B")
    if not 0 <= gpu_memory <= LARGEST_GB:  # which is not so of `nan` either
        raise ConfigError(f"--gpu-memory {gpu_memory:g} is no size of a GPU; give it in GB, as in: --gpu-memory 80")
    from offbook.rl.layout import Layout, make_layout
    from offbook.rl.plan import advice, make_plan, this_device

    device = this_device(gpu_memory)
    if gpus > 1 and not device.is_gpu:
        raise ConfigError("there is no GPU here to go by; say how large they are, as in: --gpu-memory 80")
    found: Plan | Layout
    if stage != "train":
        if gpus > 1:
            raise ConfigError("a stage is planned for one GPU; leave --gpus out")
        from offbook.stages.run import alone, plan_stage

        config = alone(config)
        found = plan_stage(config, device, config.pretrain.context if stage == "pretrain" else 0)
    else:
        found = make_plan(config, device) if gpus == 1 else make_layout(config, device, gpus)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        if recipe:
            say(f"recipe {recipe}, chosen by the model; for another: offbook plan @ RECIPE --model {config.model}")
        show_layout(found) if isinstance(found, Layout) else show_plan(found)
        asked = config.harness.context
        if stage == "train" and found.context < asked != Config().harness.context:
            say(f"a context of {asked} was asked for; the model has {found.context} positions, so it is that")
    if not found.fits:
        if not isinstance(found, Layout) and not as_json:
            say(advice(config, found))
        if isinstance(found, Layout) and not as_json:
            sizes = (gpus * 2**power for power in range(1, 8))
            enough = next((size for size in sizes if make_layout(config, device, size).fits), None)
            more = f"{enough} would do" if enough else "nor on many more"
            say(f"it does not fit on {gpus}: {more}; adapters (--train.lora.rank 16) take far less")
        raise typer.Exit(1)


def show_layout(found: Layout) -> None:
    table = Table("", "", show_header=False, title=_title(found.model, found.parameters), title_justify="left")
    replicate, shard = found.dense
    table.add_row("GPUs that train", str(found.training_gpus))
    table.add_row("  dense weights", f"{replicate} x {shard} (replicas x shards)")
    if found.experts:
        table.add_row("  experts", " x ".join(map(str, found.experts)) + " (replicas x shards x expert parallel)")
    table.add_row("  ranks that share a row", str(found.rows))
    table.add_row("  a rank takes", f"{found.need / GB:.1f} of {found.room / GB:.1f} GB")
    way = found.way
    table.add_row("  a step", f"recompute {way.recompute}, micro_tokens {way.micro_tokens}, context {found.context}")
    table.add_row("  comes to a rank", "a step, with rollouts of full length; by collective")
    for collective, moved in found.traffic.items():
        for what, size in moved.items():
            if size:
                table.add_row(f"    {collective}", f"{_size(size)} of {what}")
    table.add_row("GPUs that sample", str(found.replicas * found.replica_gpus))
    table.add_row("  copies of the model", f"{found.replicas}, each on {found.replica_gpus}")
    table.add_row("  a copy holds", f"keys and values of {found.kv_tokens:,} tokens")
    table.add_row("rollouts at once", f"{found.slots:,} asked for, {found.slots_held:,} of full length fit")
    table.add_row(
        "sandboxes a node", f"{found.sandboxes_a_node:,}, with up to {found.sandbox_bytes / GB:.0f} GB of memory"
    )
    every = found.patch_bytes + found.anchor_bytes
    table.add_row("bytes a sync", f"about {_size(found.patch_bytes)} of {_size(found.version_bytes)} to each copy")
    table.add_row("  written", f"about {_size(every)} a step, anchors included")
    results.print(table)


def _size(count: float) -> str:
    return f"{count / GB:,.2f} GB" if count >= GB else f"{count / MB:.1f} MB"


def _title(model: str, parameters: int) -> str:
    told = f"{parameters / GB:.2f}B" if parameters >= GB else f"{parameters / MB:.1f}M"
    return f"{model}: {told} parameters"


def show_plan(found: Plan, to: Console = results) -> None:
    say(_title(found.model, found.parameters), to=to)
    unit, name = (GB, "GB") if found.need >= GB else (MB, "MB")
    table = Table("part", name)
    table.columns[1].justify = "right"
    for part, size in found.parts.items():
        if size:
            table.add_row(part, f"{size / unit:,.2f}")
    table.add_section()
    most = "the most at a time: vLLM sleeps in a step" if found.sleeps else "all of it"
    table.add_row(most, f"{found.need / unit:,.2f}")
    table.add_row(f"room in {found.device.name}", f"{found.device.room / unit:,.2f}")
    to.print(table)
    if found.trained != found.parameters:
        say(f"trained: {found.trained / MB:.1f}M parameters of adapters", to=to)
    way = found.way
    say(f"recompute {way.recompute}, compile {str(way.compile).lower()}, micro_tokens {way.micro_tokens}", to=to)
    if found.linear != "plain":
        say(f"linear layers in {found.linear}{', emulated' if found.linear == 'nvfp4' else ''}", to=to)
    if found.gpu_share is not None:
        say(f"vLLM gets {found.gpu_share:g} of the GPU (engine.vllm.gpu_share)", to=to)
    if found.kv_tokens is not None:
        say(f"the engine holds keys and values of {found.kv_tokens} tokens", to=to)
    largest = f"the largest that fits is {found.largest_context}" if found.largest_context else "none fits"
    say(f"context {found.context}: {'fits' if found.fits else 'does not fit'}; {largest}", to=to)
