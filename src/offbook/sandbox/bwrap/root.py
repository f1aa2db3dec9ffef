"""What a box sees besides the agent's own files: a small read-only system, made once and bound as its root."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from offbook.sandbox.box import HISTORY
from offbook.sandbox.bwrap.store import next_name, store
from offbook.types import OffbookError

TREE, HOME, TEMPORARY = "/app", "/home/agent", "/tmp"
UID = 1000  # inside; outside it is the user who runs offbook
SHARED_MEMORY_BYTES = 64 << 20

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # beside /usr, and mostly links into it
COPIED = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "services",
    "protocols",
    "os-release",
)
WRITTEN = {
    "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{UID}:{UID}::{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "hostname": "box\n",
    "resolv.conf": "",
}
# The owner of these is root, which we are outside where offbook runs as root: they tell about the whole machine.
MASKED = ("kcore", "keys", "kpagecount", "kpageflags", "slabinfo", "timer_list", "vmallocinfo")


def environment() -> dict[str, str]:
    return {
        "PATH": os.pathsep.join([os.path.join(sys.prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": HOME,
        "TMPDIR": TEMPORARY,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def view_arguments(readonly: tuple[str, ...]) -> tuple[list[str], list[str]]:
    return _view_arguments(readonly, store())


@cache
def _view_arguments(readonly: tuple[str, ...], folder: str) -> tuple[list[str], list[str]]:
    """bwrap's arguments for everything that is read-only: what comes before the agent's own folders, and after."""
    early: list[str] = []
    late: list[str] = []
    for path in _outermost((*toolchain(), *readonly)):
        if not os.path.isdir(path):
            raise OffbookError(f"{path} is to be seen in boxes, but is no folder")
        (late if _within(path, (TREE, HOME, TEMPORARY)) else early).append(path)
    root = os.path.join(folder, next_name())
    _make_root(root, early)
    arguments = ["--ro-bind", root, "/", "--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    arguments += ["--proc", "/proc"]
    if os.getuid() == 0:
        for name in MASKED:
            if os.path.exists(f"/proc/{name}"):
                arguments += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    arguments += ["--remount-ro", "/proc", "--dev", "/dev"]
    arguments += ["--perms", "1777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    for path in early:
        arguments += ["--ro-bind", path, path]
    return arguments, [part for path in late for part in ("--ro-bind", path, path)]


def toolchain() -> tuple[str, ...]:
    """The running interpreter and its packages, so that `python` in a box is the one that runs offbook."""
    prefixes = (sys.prefix, sys.base_prefix)
    return tuple(path for prefix in prefixes for path in (prefix, os.path.realpath(prefix)) if path != "/")


def _outermost(paths: tuple[str, ...]) -> list[str]:
    """Absolute, each once, and none that is seen already because a folder around it is."""
    absolute = sorted({os.path.abspath(path) for path in paths})
    return [path for path in absolute if not _within(path, ("/usr", *(other for other in absolute if other != path)))]


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _make_root(root: str, readonly: list[str]) -> None:
    for path in (TREE, HOME, TEMPORARY, HISTORY, "/usr", "/proc", "/dev", "/etc", "/run", "/var", *readonly):
        os.makedirs(root + path, exist_ok=True)
    os.symlink("../tmp", f"{root}/var/tmp")
    for name in SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
    for name in COPIED:
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(f"/etc/{name}").st_mode):
                shutil.copytree(f"/etc/{name}", f"{root}/etc/{name}", symlinks=True)
            else:
                shutil.copyfile(f"/etc/{name}", f"{root}/etc/{name}")
    for name, text in WRITTEN.items():
        Path(root, "etc", name).write_text(text)
