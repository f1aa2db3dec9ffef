"""bubblewrap's arguments for a sandbox: the agent's own files, and a small read-only system around them, made once and
bound as its root."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offbook.sandbox.bwrap.isolation import OWN_NAMESPACES, RLIMITS, UID, in_user, isolation
from offbook.sandbox.bwrap.layers import PARTS, Layer, next_name, store
from offbook.sandbox.bwrap.seccomp import seccomp_program
from offbook.sandbox.sandbox import HISTORY
from offbook.types import MachineFault

TREE = "/app"
HOME = "/home/agent"
TEMPORARY = "/tmp"
SHARED_MEMORY_BYTES = 64 << 20
LOGS = "/logs"  # where a judge that came with a task leaves the reward; gone with the command
PYTHON = "/python"  # the environment of every sandbox, wherever it is on this machine
MOVED = f"{PYTHON}/host"  # prefix of folders whose path on this machine a sandbox has a folder of its own for
OWN = (TREE, HOME, TEMPORARY, "/var/tmp", "/dev", HISTORY, LOGS, PYTHON)

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # next to /usr, and mostly links into it
COPIED = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives"),
    *("localtime", "services", "protocols", "os-release"),
)
WRITTEN = {
    "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
}
HIDDEN = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*")  # of an interpreter
# Files about the whole machine, which root could read; `keys` names the keyrings of any user.
MASKED = ("kcore", "keys", "kpagecount", "kpageflags", "slabinfo", "timer_list", "vmallocinfo")
FLAGS = (
    "--die-with-parent --new-session --as-pid-1 --cap-drop ALL "
    f"--uid {UID} --gid {UID} --hostname sandbox --chdir {TREE}"
).split()
POINTS = dict(zip(PARTS, (TREE, HOME, TEMPORARY), strict=True))


@dataclass(frozen=True)
class View:
    """The host folders that a sandbox sees besides the system."""

    python: str = ""  # a folder with python/ and deps/, or offbook's own interpreter and packages
    mounts: tuple[tuple[str, str], ...] = ()  # read-only folders: path inside, path on this machine

    @property
    def prefix(self) -> str:
        """The environment on this machine whose packages and scripts the sandbox has."""
        return os.path.realpath(os.path.join(self.python, "python") if self.python else sys.prefix)

    @property
    def base(self) -> str:
        """The interpreter that the environment uses."""
        own = getattr(sys, "_base_executable", sys.executable)
        return os.path.realpath(os.path.join(self.python, "python", "bin", "python") if self.python else own)

    def seen(self, path: str) -> str:
        """The sandbox's path of a path on this machine."""
        return MOVED + path if _within(path, (*OWN, *(point for point, _ in self.mounts))) else path


def view_arguments(view: View) -> tuple[list[str], list[str]]:
    return _view_arguments(view, store())


@cache
def _view_arguments(view: View, folder: str) -> tuple[list[str], list[str]]:
    """bwrap's arguments for everything that is read-only: what comes before the agent's own folders, and after."""
    early: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    for point, path in (*((view.seen(path), path) for path in toolchain(view)), *view.mounts):
        if not os.path.isdir(path):
            raise MachineFault(f"{path} should be mounted in sandboxes, but is no folder")
        (late if _within(point, (TREE, HOME, TEMPORARY)) else early).append((point, path))
    if not os.path.isfile(view.base):
        raise MachineFault(
            f"the interpreter of a sandbox, {view.base}, is not there; install it, or make its tasks again"
        )
    root = os.path.join(folder, next_name())
    _make_root(root, [*(point for point, _ in early), *([LOGS] if view.mounts else [])])
    _make_environment(root + PYTHON, view)
    arguments = ["--ro-bind", root, "/", "--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    arguments += ["--proc", "/proc"]
    for name in MASKED:
        if os.path.exists(f"/proc/{name}"):
            arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    arguments += ["--remount-ro", "/proc", "--dev", "/dev"]
    arguments += ["--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for point, path in early:
        arguments += ["--ro-bind", path, point]
    for path in map(view.seen, hidden_folders(view)):
        arguments += ["--tmpfs", path, "--remount-ro", path]
    arguments += ["--size", str(SHARED_MEMORY_BYTES), "--tmpfs", LOGS] if view.mounts else []
    return arguments, [part for point, path in late for part in ("--ro-bind", path, point)]


def toolchain(view: View) -> list[str]:
    """The folders of this machine that `python` in the sandbox consists of: its packages, and the interpreter."""
    folders = {view.prefix, os.path.dirname(os.path.dirname(view.base))} - {"/"}
    folders |= {os.path.join(os.path.realpath(view.python), "deps")} if view.python else set()
    return [path for path in sorted(folders) if not _within(path, ("/usr", *(folders - {path})))]


def hidden_folders(view: View) -> list[str]:
    """Folders that are empty in a sandbox with a task's own interpreter: the packages of the machine's interpreters,
    because one may be the task's own package; and the parts of their libraries that no program runs, because everything
    readable has to be audited."""
    if not view.python:
        return []
    roots = [Path(view.base).parent.parent / "lib", Path("/usr/lib"), Path("/usr/local/lib")]
    found = {path for root in roots for name in HIDDEN for path in root.glob(f"python3*/{name}")}
    return sorted({os.path.realpath(path) for path in found if path.is_dir()})


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _make_root(root: str, readonly: list[str]) -> None:
    for path in (TREE, HOME, TEMPORARY, HISTORY, "/usr", "/proc", "/dev", "/etc", "/run", "/var", *readonly):
        os.makedirs(root + path, exist_ok=True)
    if not os.path.isdir(f"{root}/var/tmp"):  # a mount below it makes it a read-only folder
        os.symlink("../tmp", f"{root}/var/tmp")
    for name in SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
    for name in COPIED:
        if os.path.isdir(f"/etc/{name}"):
            shutil.copytree(f"/etc/{name}", f"{root}/etc/{name}", symlinks=True)
        elif os.path.isfile(f"/etc/{name}"):
            shutil.copyfile(f"/etc/{name}", f"{root}/etc/{name}")
    for name, text in WRITTEN.items():
        Path(root, "etc", name).write_text(text)


def _make_environment(folder: str, view: View) -> None:
    """A virtual environment with the same path in every sandbox: links to the packages and scripts of the view's own.

    Scripts name the interpreter by its path on this machine, so those are written again.
    """
    prefix = view.prefix
    interpreter = view.seen(view.base)
    is_whole = prefix == os.path.dirname(os.path.dirname(view.base))  # no virtual environment
    os.makedirs(f"{folder}/bin", exist_ok=True)
    settings = f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = {str(is_whole).lower()}\n"
    Path(folder, "pyvenv.cfg").write_text(settings)
    for name in {"lib", "lib64", "include", "share"} & {*os.listdir(prefix)}:
        os.symlink(view.seen(f"{prefix}/{name}"), f"{folder}/{name}")
    spellings = {prefix} if view.python else {prefix, sys.prefix, os.path.abspath(sys.prefix)}
    for name in {*os.listdir(f"{prefix}/bin"), "python", "python3"}:
        path = os.path.join(prefix, "bin", name)
        if name in ("python", "python3") or os.path.realpath(path) == view.base:
            os.symlink(interpreter, f"{folder}/bin/{name}")
            continue
        with suppress(OSError), open(path, "rb") as file:
            text = b"#!" + file.read() if file.read(2) == b"#!" else b""
            written = text
            for spelling in spellings:
                written = written.replace(os.fsencode(f"{spelling}/bin/python"), f"{PYTHON}/bin/python".encode())
            if written != text:
                Path(folder, "bin", name).write_bytes(written)
                os.chmod(f"{folder}/bin/{name}", 0o755)
                continue
        os.symlink(view.seen(path), f"{folder}/bin/{name}")


def sandbox_arguments(
    base: str, layers: Sequence[Layer], place: str, history: str, view: View, filter_end: int, user: int | None
) -> list[str]:
    """Layers top first. bwrap mounts them in a namespace of its own, so the mounts end with its processes."""
    before, after = view_arguments(view)
    if user is not None:
        arguments = [isolation().bwrap, *in_user(user)]
    else:  # with lower limits if util-linux is there
        prlimit = shutil.which("prlimit")
        arguments = [*([prlimit, *RLIMITS] if prlimit else []), isolation().bwrap, *OWN_NAMESPACES]
    arguments += [*FLAGS, "--seccomp", str(filter_end), *before, "--ro-bind", history, HISTORY]
    top, *frozen = layers
    for part, point in POINTS.items():
        sources = [f"{layer.path}/{part}" for layer in reversed(frozen)]
        if part == "tree":
            sources.insert(0, base)
        if not sources:
            arguments += ["--bind", f"{top.path}/{part}", point]
            continue
        for source in sources:
            arguments += ["--overlay-src", source]
        work = f"{place}/work-{part}"
        os.makedirs(work, exist_ok=True)
        arguments += ["--overlay", f"{top.path}/{part}", work, point]
    return [*arguments, *after]


@cache
def seccomp_file(folder: str, inotify: bool) -> str:
    path = f"{folder}/seccomp-{inotify}"
    Path(path).write_bytes(seccomp_program(inotify=inotify))
    return path
