"""What a sandbox holds on the machine, and copies that it makes there."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from offbook.sandbox.bwrap.cgroups import ControlGroup
from offbook.sandbox.bwrap.launch import Launch
from offbook.sandbox.bwrap.layers import Layer
from offbook.sandbox.folders import remove_tree, walk


@dataclass(slots=True)
class Held:
    """Apart from the sandbox itself, so that it can be let go after the sandbox is forgotten."""

    place: str
    owner: int = field(default_factory=os.getpid)
    layers: list[Layer] = field(default_factory=list)  # top first; the first one is written to
    group: ControlGroup | None = None
    launch: Launch | None = None

    def let_go(self) -> None:
        if self.owner != os.getpid():  # a forked child also runs what is to run at exit
            return
        if self.launch is not None:
            self.launch.kill_at_exit()
        if self.group is not None:
            self.group.remove()
        for layer in self.layers:
            layer.release()
        self.layers.clear()
        if os.path.isdir(self.place):
            for name in os.listdir(self.place):
                if not name.startswith("layer-"):  # a fork may still have layers that began here
                    path = os.path.join(self.place, name)
                    remove_tree(path) if os.path.isdir(path) else os.unlink(path)
            with suppress(OSError):
                os.rmdir(self.place)


def is_owned(tree: str) -> bool:
    status = os.stat(tree)
    return _all_owned(tree, status.st_ino, status.st_mtime_ns, os.getuid(), os.getgid())


@cache
def _all_owned(tree: str, inode: int, changed_ns: int, uid: int, gid: int) -> bool:
    """An overlay in a user namespace cannot copy a file whose owner has no number there, and one has: ours."""
    own = os.stat(tree)
    if (own.st_uid, own.st_gid) != (uid, gid):
        return False
    for _, entries in walk(tree):
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if (status.st_uid, status.st_gid) != (uid, gid):
                return False
    return True


def owned_copy(tree: str, target: str) -> str:
    """Ours, with the modes and times of the original."""
    os.mkdir(target)
    for parts, entries in walk(tree):
        for entry in entries:
            source, place = os.path.join(tree, *parts, entry.name), os.path.join(target, *parts, entry.name)
            status = entry.stat(follow_symlinks=False)
            if entry.is_symlink():
                os.symlink(os.readlink(source), place)
            elif entry.is_dir(follow_symlinks=False):
                os.mkdir(place)
            elif stat.S_ISREG(status.st_mode):
                Path(place).write_bytes(Path(source).read_bytes())
                os.chmod(place, stat.S_IMODE(status.st_mode))
                os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
    return target
