"""offbook doctor: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.table import Table

from offbook.cli.options import Json, results
from offbook.types import OffbookError

MIN_FREE_GB = 2
LINE = 100  # columns of a file or a pipe
Finding = tuple[str, bool, str]  # name, whether it is good enough, detail


def doctor(as_json: Json = False) -> None:
    """Check the machine. Exit code 1 if something that offbook needs is missing."""
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
    without = {  # a control group that this user may make
        "memory": "each process by itself",
        "pids": "counted ten times per second" if found.is_root else "the sandbox's user (RLIMIT_NPROC)",
        "cpu": "not held",
    }
    for limit, otherwise in without.items():
        how = "control group" if limit in found.controllers else f"{otherwise}: no control group"
        yield f"sandbox {limit}", True, how
    place = f"in memory ({found.memory_folder})" if found.memory_folder else "on the disk"
    yield "sandbox disk", True, f"looked at ten times per second while a command runs; sandboxes live {place}"
