"""The folders that a sandbox writes into, stacked: frozen ones below, which forks share, and one on top that is
written to.

A layer has three parts, one for each place where the agent may write: `tree`, `home` and `tmp`. The kernel mounts the
stack as an overlay inside the sandbox; what it writes down there is described in
Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from offbook.sandbox.bwrap.merged import Entry, Folder, Merged, make_folder, make_whiteout
from offbook.sandbox.folders import bytes_in, remove_tree

PARTS = ("tree", "home", "tmp")
MAX_LAYERS = 48
MAX_OPTION_BYTES = 3000  # of the 4,096 that the kernel takes for all options of a mount


@dataclass(slots=True)
class Layer:
    path: str
    users: int = 1  # sandboxes that have it in their stack
    _bytes: int | None = field(default=None)

    @classmethod
    def make(cls, path: str, modes: Sequence[int] = (0o755, 0o755, 0o1777)) -> Layer:
        os.mkdir(path)
        for part, mode in zip(PARTS, modes, strict=True):
            os.mkdir(f"{path}/{part}")
            if mode != 0o755:
                os.chmod(f"{path}/{part}", mode)
        return cls(path)

    def modes(self) -> list[int]:
        return [stat.S_IMODE(os.stat(f"{self.path}/{part}").st_mode) for part in PARTS]

    def is_empty(self) -> bool:
        return not any(os.listdir(f"{self.path}/{part}") for part in PARTS)

    def keep_open(self) -> None:
        """The agent may take rights away from its own folders, but the next command must be able to start."""
        for part in PARTS:
            mode = stat.S_IMODE(os.stat(f"{self.path}/{part}").st_mode)
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                os.chmod(f"{self.path}/{part}", mode | stat.S_IRWXU)

    def bytes_frozen(self) -> int:
        if self._bytes is None:
            self._bytes = bytes_in(self.path)
        return self._bytes

    def release(self) -> None:
        """One sandbox less uses it. The last one takes it away, and the folder around it if that is empty then."""
        self.users -= 1
        if self.users > 0:
            return
        remove_tree(self.path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def too_high(layers: Sequence[Layer]) -> bool:
    # Inside, bwrap sees a path behind "/oldroot", and the part's name and a colon come on top.
    return len(layers) > MAX_LAYERS or sum(len(os.fsencode(layer.path)) + 14 for layer in layers) > MAX_OPTION_BYTES


def merge(layers: Sequence[Layer], path: str) -> Layer:
    """One layer that means the same as `layers`, given top first, down to MAX_DEPTH. Files are linked and not copied:
    frozen ones do not change any more."""
    merged = Layer.make(path, layers[0].modes())
    for part in PARTS:
        target = Merged([f"{path}/{part}"])
        for parts, folder, entries in Merged([f"{layer.path}/{part}" for layer in layers]).walk(passing=()):
            with target.folder(parts) as into:
                _merge_folder(folder, entries, into.descriptors[0])
    return merged


def _merge_folder(folder: Folder, entries: dict[str, Entry], target: int) -> None:
    for name, entry in entries.items():
        if entry.kind == "whiteout":
            if not folder.cut:  # otherwise nothing below could be seen anyway
                make_whiteout(name, target)
        elif entry.kind == "folder":
            with folder.child(name) as child:
                mode = stat.S_IMODE(os.fstat(child.descriptors[0]).st_mode)
                make_folder(target, name, mode | stat.S_IRWXU, child.cut)
        else:
            os.link(name, name, src_dir_fd=entry.descriptor, dst_dir_fd=target, follow_symlinks=False)
