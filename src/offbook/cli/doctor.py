"""offbook doctor: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.table import Table

from offbook.cli.options import Json, results

MIN_FREE_GB = 2
LINE = 100  # columns of a file or a pipe


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    ok: bool
    detail: str


def doctor(as_json: Json = False) -> None:
    """Check the machine. Exit code 1 if something that offbook needs is missing."""
    findings = list(_examine())
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table("", "what", "found")
        for finding in findings:
            table.add_row("[green]ok[/]" if finding.ok else "[red]no[/]", finding.name, finding.detail)
        results.print(table, width=None if sys.stdout.isatty() else LINE)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _examine() -> Iterator[Finding]:
    yield Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)")
    for package in ("torch", "transformers", "tokenizers", "pytest", "libcst"):
        try:
            yield Finding(package, True, version(package))
        except PackageNotFoundError:
            yield Finding(package, False, "missing; run `make quickstart`, which installs it")
    yield Finding("cores", True, str(os.cpu_count()))
    yield _cache()
    yield from _sandbox()
    yield Finding("accelerator", True, _accelerator())
    yield Finding("vllm", True, _vllm())


def _cache() -> Finding:
    from offbook.core.config import cache_folder

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return Finding("cache", False, f"{folder} cannot be written ({error.strerror}); set OFFBOOK_CACHE to a folder")
    free = shutil.disk_usage(folder).free / 1e9
    detail = f"{folder}, {free:.0f} GB free"
    return Finding("cache", free >= MIN_FREE_GB, detail if free >= MIN_FREE_GB else f"{detail}; needs {MIN_FREE_GB}")


def _sandbox() -> Iterator[Finding]:
    """Which isolation this machine gives, and how each limit of a sandbox is held."""
    from offbook.sandbox import isolation

    found = isolation()
    if not found.works:
        advice = "`--sandbox.backend container` may work; `process` isolates nothing, at your own risk"
        yield Finding("sandbox", False, f"{'; '.join(found.missing)}. {advice}")
        return
    own = "own files, processes, network and users for every command; system calls filtered"
    yield Finding("sandbox", True, f"bwrap {found.version}{' as root' if found.is_root else ''}: {own}")
    group = "control group"
    held = {
        "memory": (group, "each process by itself: no control group for memory that this user may make"),
        "pids": (
            group,
            "counted ten times per second" if found.is_root else "the sandbox's user (RLIMIT_NPROC)",
        ),
        "cpu": (group, "not held: no control group for processor time that this user may make"),
    }
    for limit, (by_group, otherwise) in held.items():
        yield Finding(f"sandbox {limit}", True, by_group if limit in found.controllers else otherwise)
    place = f"in memory ({found.memory_folder})" if found.memory_folder else "on the disk"
    yield Finding("sandbox disk", True, f"looked at ten times per second while a command runs; sandboxes live {place}")


def _accelerator() -> str:
    try:
        import torch
    except ImportError:
        return "unknown: no torch"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none; the CPU is used"


def _vllm() -> str:
    """Wanted for `--engine.kind vllm` alone, so its absence is no fault."""
    from offbook.types import OffbookError

    try:
        from offbook.engine.vllm.find import find_vllm

        found = find_vllm()
    except ImportError:
        return "unknown: no torch"
    except OffbookError as reason:
        return f"none, which only --engine.kind vllm needs: {reason}"
    return f"{found.version} in {found.python}{', for the CPU' if found.on_cpu else ''}"
