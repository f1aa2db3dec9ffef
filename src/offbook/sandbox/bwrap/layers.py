"""The folders that a sandbox writes into, stacked: frozen ones below, which forks share, and one on top that is
written to. Also where this process keeps them, and the removal of those that a killed process left.

A layer has three parts, one for each place where the agent may write: `tree`, `home` and `tmp`. The kernel mounts the
stack as an overlay inside the sandbox (Documentation/filesystems/overlayfs.rst).
"""

from __future__ import annotations

import atexit
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from offbook.sandbox.bwrap.isolation import ControlGroup, control_groups
from offbook.sandbox.bwrap.launch import RUNNING
from offbook.sandbox.folders import bytes_in, remove_tree, walk
from offbook.types import OffbookError

_NAME = re.compile(r"offbook-(?P<space>[0-9a-f]+)-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)(-.*)?")
_numbers = count()
PARTS = ("tree", "home", "tmp")
MAX_OPTION_BYTES = 3000  # of the 4,096 that the kernel takes for all options of a mount


@dataclass(slots=True)
class Layer:
    path: str
    users: int = 1  # sandboxes that have it in their stack
    num_bytes: int | None = None  # once it is frozen and was counted

    @classmethod
    def make(cls, path: str, modes: Sequence[int] = (0o755, 0o755, 0o1777)) -> Layer:
        os.mkdir(path)
        for part, mode in zip(PARTS, modes, strict=True):
            os.mkdir(f"{path}/{part}")
            os.chmod(f"{path}/{part}", mode)
        return cls(path)

    def modes(self) -> list[int]:
        return [stat.S_IMODE(os.stat(f"{self.path}/{part}").st_mode) for part in PARTS]

    def is_empty(self) -> bool:
        return not any(os.listdir(f"{self.path}/{part}") for part in PARTS)

    def keep_open(self) -> None:
        """The agent may remove rights from its own folders, but the next command must be able to start."""
        for part, mode in zip(PARTS, self.modes(), strict=True):
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"{self.path}/{part}", mode | stat.S_IRWXU)

    def bytes_frozen(self) -> int:
        if self.num_bytes is None:
            self.num_bytes = bytes_in(self.path)
        return self.num_bytes

    def release(self) -> None:
        """One sandbox less uses it. The last one removes it, and the folder around it if that is empty."""
        self.users -= 1
        if self.users <= 0:
            remove_tree(self.path)
            with suppress(OSError):
                os.rmdir(os.path.dirname(self.path))


def refuse_more_layers(layers: Sequence[Layer]) -> None:
    # Inside, bwrap sees a path behind "/oldroot", and the part's name and a colon come on top.
    if sum(len(os.fsencode(layer.path)) + 14 for layer in layers) > MAX_OPTION_BYTES:
        raise OffbookError(f"a sandbox was changed and forked {len(layers)} times: the kernel mounts no more layers")


def is_owned(tree: str) -> bool:
    status = os.stat(tree)
    return _all_owned(tree, status.st_ino, status.st_mtime_ns, os.getuid(), os.getgid())


@cache
def _all_owned(tree: str, inode: int, changed_ns: int, uid: int, gid: int) -> bool:
    """An overlay in a user namespace cannot copy a file whose owner has no number there, and only ours has one."""
    found = [os.stat(tree)]
    found += [entry.stat(follow_symlinks=False) for _, entries in walk(tree) for entry in entries]
    return all((status.st_uid, status.st_gid) == (uid, gid) for status in found)


def next_name() -> str:
    """A number that no other sandbox or layer of this process has."""
    return f"{next(_numbers):x}"


def store(folder: str = "") -> str:
    """A folder of this process alone in `folder`, or among temporary files. The first call also removes what dead
    processes left there."""
    return _store(os.getpid(), os.path.realpath(folder or tempfile.gettempdir()))


@cache
def _store(pid: int, folder: str) -> str:
    _sweep(folder)
    path = os.path.join(folder, owner_name(pid))
    os.mkdir(path, 0o700)
    atexit.register(_remove_own, path, pid)
    return path


def _remove_own(path: str, pid: int) -> None:
    if os.getpid() != pid:  # a forked child also runs atexit callbacks
        return
    for launch in [*RUNNING]:
        launch.kill_and_wait()
    if groups := control_groups():
        for folder in groups.folder.glob(f"{owner_name(pid)}-*"):
            ControlGroup(folder).remove()
    remove_tree(path)


@cache
def owner_name(pid: int) -> str:
    """Identifies a process: its number alone is used again. Short, because a mount's options must be."""
    return f"offbook-{_pid_namespace():x}-{pid:x}-{_start_time(pid):x}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _is_dead(name: str) -> bool:
    """A process of another container, which we cannot see, does not count as dead."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["space"], 16) != _pid_namespace():
        return False
    try:
        return _start_time(int(match["pid"], 16)) != int(match["start"], 16)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _sweep(place: str) -> None:
    if groups := control_groups():
        for name in filter(_is_dead, os.listdir(groups.folder)):
            with suppress(OSError):  # another process may be doing the same
                ControlGroup(groups.folder / name).remove()
    for name in filter(_is_dead, os.listdir(place)):
        path = os.path.join(place, name)
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                remove_tree(path)
