"""Before a run: doctor checks the machine, plan its GPU memory, fit how a model writes calls."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from offbook.cli.options import (
    CHOICES,
    Json,
    ModelArgument,
    config_from,
    note,
    option,
    progress_display,
    results,
    say,
    show_table,
)
from offbook.core.config import Config, ConfigError, is_url, recipe_for
from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.rl.plan import MemoryPlan


GB = 1e9
MB = 1e6


def plan(
    ctx: typer.Context,
    model: ModelArgument = "",
    stage: Annotated[
        Literal["train", "sft", "pretrain"], option("RL, or a stage, in which nothing is sampled.")
    ] = "train",
    gpu_memory: Annotated[float, option("In GB, of a GPU that is not here.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Show the memory that training MODEL needs, by part, and the largest context that fits. Configuration as in
    `offbook train`.

    Only the model's config.json is read; those of common models ship with offbook. Without a recipe (`@ NAME`) the one
    of that model or of its size is taken. If the run does not fit, the exit code is 1 and the output says what would.

    For example: offbook plan Qwen/Qwen3-0.6B --gpu-memory 80
    """
    if model.startswith("@"):  # a recipe that names its model
        ctx.args.insert(0, model)
        model = ""
    config = config_from(ctx, {"model": model})
    recipe = "" if any(one.startswith("@") for one in ctx.args) else recipe_for(config.model)
    if not config.model:
        raise ConfigError("there is no model to plan for; give one, as in: offbook plan Qwen/Qwen3-0.6B")
    if not 0 <= gpu_memory <= 1e6:  # also refuses NaN
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


def show_plan(found: MemoryPlan) -> None:
    size = f"{found.parameters / GB:.2f}B" if found.parameters >= GB else f"{found.parameters / MB:.1f}M"
    say(f"{found.model}: {size} parameters")
    unit, name = (GB, "GB") if found.need >= GB else (MB, "MB")
    rows = {part: size for part, size in found.parts.items() if size}
    rows["all of it"] = found.need
    rows[f"room in {found.device.name}"] = found.device.room
    show_table([["part", name], *([part, f"{size / unit:,.2f}"] for part, size in rows.items())])
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
    say("\n".join(lines))


def fit(
    ctx: typer.Context,
    model: ModelArgument = "",
    out: Annotated[Path, option("The recipe to write, for `offbook train @ FILE`.")] = Path("fit.toml"),
    limit: Annotated[int, option("Training tasks to try.", min=1)] = 8,
    samples: Annotated[int, option("First messages a task.", "-n", min=1)] = 4,
    rollouts: Annotated[int, option("Whole rollouts of each that writes readable calls.", min=0)] = 8,
    as_json: Json = False,
) -> None:
    """Try MODEL with every profile and call dialect on training tasks, and write what fits as a recipe.

    Takes configuration as `train` does: --tasks.source, --harness.context, --engine.kind.

    For example: offbook fit Qwen/Qwen3-0.6B --tasks.source my-tasks
    """
    config = config_from(ctx, {"model": model})
    if not config.model or is_url(config.model):
        given = "give one" if not config.model else f"not one behind a URL, as {config.model} is"
        raise ConfigError(f"fit needs a model: {given}; for example {CHOICES}".replace("`--model ", "`"))
    from offbook.rl.checks import refuse_missing_tasks, refuse_run

    refuse_run(config)
    refuse_missing_tasks(config, "train")
    from offbook.core.runfolder import write_atomic
    from offbook.rl.fit import best, next_step, recipe_of
    from offbook.rl.fit import fit as tried

    with progress_display() as progress:
        found = tried(config, limit, samples, rollouts, progress)
    write_atomic(out, recipe_of(found, config))
    sentence, command = next_step(found, config, str(out))
    if as_json:
        chosen = best(found)
        told = {"profile": chosen.profile, "dialect": chosen.dialect, "fits": chosen.fits, "next": command}
        print(json.dumps({**told, "candidates": [asdict(one) for one in found]}))
        return
    rows = [one.row() for one in found]
    show_table([list(rows[0]), *(list(row.values()) for row in rows)])
    for one in found:
        if not one.fits:
            say(f"{one.profile}, {one.dialect}: {one.first.problem}")
    say(sentence)
    print(out)
    note(f"next: {command}")


MIN_FREE_GB = 2
LINE = 100  # columns of a file or a pipe
Finding = tuple[str, bool, str]  # name, whether it is good enough, detail


def doctor(as_json: Json = False) -> None:
    """Check the machine. Exit code 1 if something that offbook needs is missing.

    For example: offbook doctor
    """
    findings = [*_software(), *_sandbox()]
    if as_json:
        print(json.dumps([{"name": name, "ok": ok, "detail": detail} for name, ok, detail in findings]))
    else:
        table = Table("", "what", "found")
        for name, ok, detail in findings:
            table.add_row("[green]ok[/]" if ok else "[red]no[/]", name, detail)
        results.print(table, width=None if sys.stdout.isatty() else LINE)
    if not all(ok for _, ok, _ in findings):
        raise typer.Exit(1)


def _software() -> Iterator[Finding]:
    from offbook.core.config import cache_folder

    yield "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)"
    for package in ("torch", "transformers", "tokenizers", "pytest", "libcst"):
        try:
            yield package, True, version(package)
        except PackageNotFoundError:
            yield package, False, "missing; run `make quickstart`, which installs it"
    yield "cores", True, str(os.cpu_count())
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(folder).free / 1e9
        yield "cache", free >= MIN_FREE_GB, f"{folder}, {free:.0f} GB free; {MIN_FREE_GB} are needed"
    except OSError as error:
        yield "cache", False, f"{folder} cannot be written ({error.strerror}); set OFFBOOK_CACHE to a folder"
    try:
        import torch

        from offbook.engine.vllm.find import find_vllm
    except ImportError:
        return
    yield "accelerator", True, torch.cuda.get_device_name() if torch.cuda.is_available() else "none; the CPU is used"
    try:
        found = find_vllm()
        yield "vllm", True, f"{found.version} in {found.python}{', for the CPU' if found.on_cpu else ''}"
    except OffbookError as reason:
        yield "vllm", True, f"none, which only --engine.kind vllm needs: {reason}"


def _sandbox() -> Iterator[Finding]:
    """Which isolation this machine gives, and how each limit of a sandbox is held."""
    from offbook.sandbox import isolation

    found = isolation()
    if not found.works:
        advice = "`--sandbox.backend container` may work; `process` isolates nothing, at your own risk"
        yield "sandbox", False, f"{found.missing}. {advice}"
        return
    own = "own files, processes, network and users for every command; system calls filtered"
    yield "sandbox", True, f"bwrap {found.version}{' as root' if found.is_root else ''}: {own}"
    for limit in ("memory", "pids", "cpu"):
        is_held = limit in found.controllers
        yield f"sandbox {limit}", True, "control group" if is_held else "no control group: held less exactly, or not"
    place = f"in memory ({found.memory_folder})" if found.memory_folder else "on the disk"
    yield "sandbox disk", True, f"sandboxes live {place}"
