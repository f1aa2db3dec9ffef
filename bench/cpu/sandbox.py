"""What an isolated sandbox costs: opening one and running `true`, forking it, many of them, and what is left
afterwards.

    python bench/cpu/sandbox.py --json figures.json

Rounds are interleaved, so that other work on the machine falls on all rows alike. Opening and running is compared with
bubblewrap itself under the same flags and the same view of the system, on the bare tree and on a copy of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from offbook.sandbox import BwrapSandbox, isolation, require_isolation
from offbook.sandbox.bwrap.arguments import FLAGS, HOME, PYTHON, TEMPORARY, TREE, View, seccomp_file, view_arguments
from offbook.sandbox.bwrap.isolation import OWN_NAMESPACES
from offbook.sandbox.bwrap.layers import owner_name, store
from offbook.sandbox.sandbox import environment

PODMAN_IMAGE = "docker.io/library/busybox"


def make_tree(folder: Path, num_files: int, bytes_each: int) -> Path:
    for number in range(num_files):
        path = folder / f"package_{number % 20}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * bytes_each)
    return folder


def plain_bwrap(tree: Path) -> list[str]:
    """In a shell, as a sandbox runs commands, and with the same filter, which is standard input here. The command is
    not process 1, which ignores signals: in a sandbox a shell is, here bubblewrap itself. Both return when the command
    ended
    and the kernel may still be taking the namespaces down."""
    before, after = view_arguments(View())
    flags = [*(flag for flag in FLAGS if flag != "--as-pid-1"), "--seccomp", "0"]
    own = ["--bind", str(tree), TREE]
    if (
        after
    ):  # the interpreter is in one of the folders that are a sandbox's own, and its place has to be made in there
        own += ["--tmpfs", HOME, "--tmpfs", TEMPORARY]
    return [isolation().bwrap, *OWN_NAMESPACES, *flags, *before, *own, *after, "--", "/bin/sh", "-c", "true"]


def run(command: list[str]) -> None:
    with open(seccomp_file(store(), inotify=True)) as program:
        subprocess.run(
            command,
            stdin=program,
            stdout=subprocess.DEVNULL,
            env=environment(PYTHON, HOME, TEMPORARY),
            check=True,
        )


async def subprocess_row(tree: Path) -> float:
    began = time.perf_counter()
    run(["/bin/sh", "-c", "true"])
    return time.perf_counter() - began


async def bwrap_row(tree: Path) -> float:
    command = plain_bwrap(tree)
    began = time.perf_counter()
    run(command)
    return time.perf_counter() - began


async def copy_row(tree: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        command = plain_bwrap(copy)
        began = time.perf_counter()
        shutil.copytree(tree, copy, symlinks=True)
        run(command)
        return time.perf_counter() - began


async def sandbox_row(tree: Path) -> float:
    began = time.perf_counter()
    async with BwrapSandbox(tree) as sandbox:
        result = await sandbox.exec("true", 60)
        seconds = time.perf_counter() - began
    assert result.exit_code == 0
    return seconds


async def podman_row(tree: Path) -> float:
    began = time.perf_counter()
    run(["podman", "run", "--rm", "--pull=never", "--network=none", "-v", f"{tree}:/app:O", PODMAN_IMAGE, "true"])
    return time.perf_counter() - began


async def create_times(tree: Path, rounds: int) -> dict[str, list[float]]:
    rows: dict[str, Callable[[Path], Awaitable[float]]] = {
        "subprocess": subprocess_row,
        "bwrap": bwrap_row,
        "copy + bwrap": copy_row,
        "BwrapSandbox": sandbox_row,
    }
    if shutil.which("podman"):
        try:
            await podman_row(tree)
            rows["podman"] = podman_row
        except subprocess.CalledProcessError:
            print("podman is here and cannot run a container: left out")
    for row in rows.values():  # what is made once a process
        await row(tree)
    times: dict[str, list[float]] = {name: [] for name in rows}
    order, rng = list(rows), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)  # a scheduler makes the one wait that follows a busy one
        for name in order:
            times[name].append(await rows[name](tree))
    return times


async def fork_times(trees: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    """Each fork is of a sandbox that was written to since the last one, so that there is something to freeze."""
    times: dict[str, list[float]] = {name: [] for name in trees}
    sandboxes = {name: BwrapSandbox(tree) for name, tree in trees.items()}
    for number in range(rounds):
        for name, sandbox in sandboxes.items():
            await sandbox.write("changed.py", str(number))
            began = time.perf_counter()
            fork = await sandbox.fork()
            times[name].append(time.perf_counter() - began)
            await fork.close()
    for sandbox in sandboxes.values():
        await sandbox.close()
    return times


async def many(tree: Path, num_sandboxes: int, at_once: int) -> float:
    """Sandboxes a second: opened, written in by a command, looked at and closed."""
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with free, BwrapSandbox(tree) as sandbox:
            result = await sandbox.exec(f"echo {number} > number", 300)
            assert result.exit_code == 0, result
            assert await sandbox.changes() == {"number": f"{number}\n"}

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(num_sandboxes):
            group.create_task(one(number))
    return num_sandboxes / (time.perf_counter() - began)


def left_behind() -> dict[str, int]:
    """By the name that everything of this process carries."""
    name = owner_name(os.getpid())
    mounts = sum(name in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    groups = sum(folder.startswith(name) for _, folders, _ in os.walk("/sys/fs/cgroup") for folder in folders)
    processes = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stores = {store(), store(isolation().memory_folder)}
    files = sum(1 for folder in stores for path in Path(folder).glob("*/layer-*"))
    descriptors = sum("offbook" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return {
        "mounts": mounts, "cgroups": groups, "processes": len(processes), "files": files, "descriptors": descriptors
    }  # fmt: skip


async def measure(quick: bool) -> dict:
    rounds, num_sandboxes = (30, 60) if quick else (200, 1000)
    with tempfile.TemporaryDirectory() as folder:
        small = make_tree(Path(folder) / "small", 20, 1_000)
        large = make_tree(Path(folder) / "large", 900, 10_000)
        created = await create_times(small, rounds)
        forked = await fork_times({"small": small, "9 MB": large}, rounds)
        one_by_one = await many(small, num_sandboxes, 1)
        together = await many(small, min(num_sandboxes, 640), 64)
        left = left_behind()
    percentile = {name: sorted(times)[int(len(times) * 0.95)] for name, times in created.items()}
    return {
        "create_ms_p50": {name: median(times) * 1e3 for name, times in created.items()},
        "create_ms_p95": {name: seconds * 1e3 for name, seconds in percentile.items()},
        "create_over_bwrap": median(created["BwrapSandbox"]) / median(created["bwrap"]),
        "fork_ms_p50": max(median(times) for times in forked.values()) * 1e3,
        "fork_ms_p50_by_tree": {name: median(times) * 1e3 for name, times in forked.items()},
        "sandboxes_per_s": together,
        "sandboxes_per_s_one_by_one": one_by_one,
        "num_sandboxes": num_sandboxes,
        "leaks": sum(left.values()),
        "left_behind": left,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    require_isolation()
    figures = asyncio.run(measure(arguments.quick))
    print(f"{'open + true, ms':24} {'p50':>8} {'p95':>8}")
    for name, value in figures["create_ms_p50"].items():
        print(f"{name:24} {value:8.2f} {figures['create_ms_p95'][name]:8.2f}")
    print(f"\nBwrapSandbox over bwrap      {figures['create_over_bwrap']:8.2f}   (bar: 1.5)")
    for name, value in figures["fork_ms_p50_by_tree"].items():
        print(f"{'fork, ' + name + ' tree':24} {value:8.2f}   ms (bar: 2)")
    print(f"sandboxes/s, one by one      {figures['sandboxes_per_s_one_by_one']:8.1f}   ({figures['num_sandboxes']})")
    print(f"sandboxes/s, 64 at once      {figures['sandboxes_per_s']:8.1f}")
    print(f"left behind              {figures['leaks']:8}   {figures['left_behind']}")
    print(f"load on {figures['cores']} cores          {figures['load']:8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
