"""What keeps one sandbox from using up the machine: a control group, a user of its own, rlimits.

Where no control group can be made (an ordinary user without delegation, most containers), memory is limited for each
process, and root's processes are counted from outside.
"""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offbook.sandbox.sandbox import SandboxSpec

CONTROLLERS = ("memory", "pids", "cpu")
GONE_S = 5.0
PERIOD_US = 100_000
OPEN_FILES = 1024
UID = 1000  # inside; outside it is the user who runs offbook
QUEUED_SIGNALS, INOTIFY_INSTANCES = 1024, 128
UIDS = range(1_900_000_000, 2_100_000_000)  # no distribution gives these to users or containers
# bwrap for an ordinary user. Its sandboxes share the user's per-user limits, so they get less: seccomp.py refuses
# inotify, and `prlimit` comes first.
OWN_NAMESPACES = ["--unshare-all", "--unshare-user", "--disable-userns"]
RLIMITS = [f"--sigpending={QUEUED_SIGNALS}", "--msgqueue=0"]
NEW_USER = f"""read go
exec prlimit {" ".join(RLIMITS)} unshare --user -- sh -c '
echo unshared; read go
exec sh -c "cd /proc/sys/user && echo 0 >max_user_namespaces && echo {INOTIFY_INSTANCES} >max_inotify_instances &&
echo ready && read go"'
"""
_free_users: list[int] = []


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this process may make control groups, and which controllers they have."""

    folder: Path
    controllers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The group of one sandbox, which bounds all of it together."""

    folder: Path

    @property
    def entrance(self) -> str:
        """A process that writes 0 here belongs to the group, and so does what it starts."""
        return f"{self.folder}/cgroup.procs"

    def num_memory_kills(self) -> int:
        lines = (self.folder / "memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))

    def remove(self) -> None:
        """Kill what is left and wait until the kernel has let go of it."""
        deadline = time.monotonic() + GONE_S
        while True:
            try:
                os.rmdir(self.folder)
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            time.sleep(0.002)


def make_group(groups: Groups, name: str, spec: SandboxSpec) -> ControlGroup:
    group = ControlGroup(groups.folder / name)
    settings = {"pids.max": f"{spec.pids}", "memory.max": f"{spec.memory_mb << 20}", "memory.swap.max": "0"}
    if spec.cpus and "cpu" in groups.controllers:
        settings["cpu.max"] = f"{round(spec.cpus * PERIOD_US)} {PERIOD_US}"
    with suppress(FileExistsError):
        os.mkdir(group.folder)
    try:
        for file, value in settings.items():
            if file == "memory.swap.max" and not (group.folder / file).exists():  # a kernel without swap accounting
                continue
            with open(os.open(group.folder / file, os.O_WRONLY | os.O_CLOEXEC), "w") as opened:  # never creates one
                opened.write(value)
    except BaseException:
        group.remove()
        raise
    return group


@cache
def control_groups() -> Groups | None:
    return find_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())


def find_groups(mountinfo: str, membership: str) -> Groups | None:
    """A folder where groups of version 2 can be made with limits on memory and processes: our own group, where the
    kernel hands its controllers down, else the one around it, which is ours under `systemd-run --user` and in many
    containers."""
    own = next((line.removeprefix("0::") for line in membership.splitlines() if line.startswith("0::")), "")
    for line in mountinfo.splitlines() if own else ():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        if after.startswith("cgroup2 "):
            inside = os.path.relpath(own, root) if own.startswith(root) else "."
            group = Path(os.path.normpath(os.path.join(mount_point, inside)))
            for folder in (group, group.parent):
                with suppress(OSError):
                    if found := _handed_down(folder):
                        return Groups(folder, found)
    return None


def _handed_down(folder: Path) -> tuple[str, ...]:
    """The controllers that groups made in this folder have; none where that is not enough or not allowed."""
    control = folder / "cgroup.subtree_control"
    if not {"memory", "pids"} <= {*(folder / "cgroup.controllers").read_text().split()}:
        return ()
    before = control.read_text().split()
    if not {"memory", "pids"} <= {*before}:
        for name in CONTROLLERS:  # refused while the group has processes of its own
            if name not in before:
                control.write_text(f"+{name}")
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return ()
    return tuple(name for name in CONTROLLERS if name in control.read_text().split())


def take_user() -> int:
    """A user namespace that no other sandbox is using, as an open file. Only for root.

    The kernel counts inotify instances, queued signals and message queues for the user who made a namespace, and holds
    them to the limits that this user had. That is a user without processes or files, so nothing is taken from anybody
    on the host. Files stay those of root: inside, they belong to the sandbox's user.
    """
    if _free_users:
        return _free_users.pop()
    uid = UIDS[secrets.randbelow(len(UIDS))]
    with subprocess.Popen(
        ["/bin/sh", "-c", NEW_USER],
        user=uid,
        group=uid,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        bufsize=0,
    ) as maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        maker.stdin.write(b"\n")
        if maker.stdout.readline() == b"unshared\n":
            for name in ("uid_map", "gid_map"):  # 0: bwrap needs it, to mount terminals
                Path(f"/proc/{maker.pid}/{name}").write_text(f"0 {uid} 1\n{UID} 0 1\n")
            maker.stdin.write(b"\n")
            if maker.stdout.readline() == b"ready\n":
                return os.open(f"/proc/{maker.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    raise OSError("no user namespace can be made for a sandbox")


def give_back_user(namespace: int) -> None:
    """When the processes of a launch are gone, nothing is counted there any more."""
    _free_users.append(namespace)


def in_user(namespace: int) -> list[str]:
    """bwrap's arguments for namespaces like OWN_NAMESPACES, in a user namespace from `take_user`."""
    return [
        *("--userns", str(namespace), "--unshare-ipc", "--unshare-pid"),
        *("--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    ]


def rlimits(spec: SandboxSpec, is_full: bool) -> str:
    """In a sandbox that is full, files can be removed and nothing can be written to one.

    Shell commands and not `preexec_fn`, which may deadlock in a process with threads. They come first inside, where
    the count of processes begins anew, and no one in there has the right to raise them.
    """
    steps = f"ulimit -c 0; ulimit -f {0 if is_full else spec.disk_mb * 2048}; ulimit -n {_open_files()}; "
    if control_groups() is None:
        steps += f"ulimit -v {spec.memory_mb * 1024}; "
    return steps + f"ulimit -u {spec.pids} 2>/dev/null || ulimit -p {spec.pids}"  # as bash has it, and as dash has it


@cache
def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
