"""Control groups, both versions: one group per sandbox, which bounds the memory, processes and processor time of all
of it.

Where no group can be made (an ordinary user without delegation), sandboxes fall back to limits on each single process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from offbook.sandbox.sandbox import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
GONE_S = 5.0
PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where this process may make groups: controller -> folder."""

    version: int
    folders: Mapping[str, Path]


@dataclass(slots=True)
class ControlGroup:
    """The group of one sandbox: one folder in version 2, one a controller in version 1."""

    version: int
    folders: dict[str, Path] = field(default_factory=dict)

    @property
    def entrances(self) -> list[str]:
        """A process that writes 0 into each of these belongs to the group, and so does what it starts."""
        name = "cgroup.procs" if self.version == 2 else "tasks"  # tasks: the one thread that a shell has
        return [f"{folder}/{name}" for folder in dict.fromkeys(self.folders.values())]

    def num_memory_kills(self) -> int:
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        lines = (folder / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self) -> None:
        """Kill what is left and wait until the kernel has let go of it."""
        deadline = time.monotonic() + GONE_S
        for folder in dict.fromkeys(self.folders.values()):
            while True:
                try:
                    os.rmdir(folder)
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), 9)
                    time.sleep(0.002)
                else:
                    break


def make_group(hierarchy: Hierarchy, name: str, spec: SandboxSpec) -> ControlGroup:
    group = ControlGroup(hierarchy.version)
    settings = (_settings_v2 if hierarchy.version == 2 else _settings_v1)(spec)
    try:
        for controller, files in settings.items():
            if controller not in hierarchy.folders or not files:
                continue
            folder = hierarchy.folders[controller] / name
            with suppress(FileExistsError):  # version 2 has one folder for all
                os.mkdir(folder)
            group.folders[controller] = folder
            for file, value in files.items():
                _set(folder / file, value)
    except BaseException:
        group.remove()
        raise
    return group


def _settings_v2(spec: SandboxSpec) -> dict[str, dict[str, str]]:
    return {
        "memory": {"memory.max": str(spec.memory_mb << 20), "memory.swap.max": "0"},
        "pids": {"pids.max": str(spec.pids)},
        "cpu": {"cpu.max": f"{round(spec.cpus * PERIOD_US)} {PERIOD_US}"} if spec.cpus else {},
    }


def _settings_v1(spec: SandboxSpec) -> dict[str, dict[str, str]]:
    memory = str(spec.memory_mb << 20)
    return {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
        "pids": {"pids.max": str(spec.pids)},
        "cpu": {"cpu.cfs_quota_us": str(round(spec.cpus * PERIOD_US))} if spec.cpus else {},
    }


def _set(file: Path, value: str) -> None:
    """Opened without creating: a kernel without swap accounting has no file for it."""
    if "sw" in file.name and not file.exists():
        return
    with open(os.open(file, os.O_WRONLY | os.O_CLOEXEC), "w") as opened:
        opened.write(value)


@cache
def this_hierarchy() -> Hierarchy | None:
    return find_hierarchy(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def find_hierarchy(mountinfo: str, membership: str) -> Hierarchy | None:
    """Version 2 where it has the controllers and lets us, else version 1, else nothing. By trying."""
    own: dict[str, str] = {}  # controller -> our own group; "" is version 2
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    mounts: dict[str, Path] = {}  # controller -> the folder of our own group
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount_point = before.split()[3:5]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            if name in own:
                inside = os.path.relpath(own[name], root) if own[name].startswith(root) else "."
                mounts[name] = Path(os.path.normpath(os.path.join(mount_point, inside)))
    if "" in mounts and (folder := _delegated(mounts[""])):
        available = (folder / "cgroup.subtree_control").read_text().split()
        return Hierarchy(2, {name: folder for name in CONTROLLERS if name in available})
    version_1 = {name: mounts[name] for name in CONTROLLERS if name in mounts and os.access(mounts[name], os.W_OK)}
    return Hierarchy(1, version_1) if version_1 else None


def _delegated(own: Path) -> Path | None:
    """A folder where groups can be made with limits on memory and processes: our own group, where the kernel hands its
    controllers down, else the one around it, which is ours under `systemd-run --user` and in many containers."""
    for folder in (own, own.parent):
        try:
            if not {"memory", "pids"} <= set((folder / "cgroup.controllers").read_text().split()):
                continue
            handed_down = set((folder / "cgroup.subtree_control").read_text().split())
            for name in CONTROLLERS[: 2 if {"memory", "pids"} <= handed_down else 3]:
                if name not in handed_down:  # refused while the group has processes of its own
                    (folder / "cgroup.subtree_control").write_text(f"+{name}")
            if os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
                return folder
        except OSError:
            continue
    return None
