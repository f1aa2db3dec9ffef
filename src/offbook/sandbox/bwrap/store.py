"""Where this process keeps its sandboxes, and how the ones of a process that was killed are found and taken away."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

from offbook.sandbox.bwrap.cgroups import ControlGroup, this_hierarchy
from offbook.sandbox.folders import remove_tree

_NAME = re.compile(r"offbook-(?P<space>[0-9a-f]+)-(?P<pid>[0-9a-f]+)-(?P<start>[0-9a-f]+)(-.*)?")
_numbers = count()


def next_name() -> str:
    """A number that no other sandbox or layer of this process has."""
    return f"{next(_numbers):x}"


def store(folder: str = "") -> str:
    """A folder of this process alone in `folder`, or among temporary files. The first call also takes away what dead
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
    if os.getpid() == pid:  # a forked child also runs what is to run at exit
        remove_tree(path)


@cache
def owner_name(pid: int) -> str:
    """Names the process beyond doubt: its number alone is used again. Short, because a mount's options must be."""
    return f"offbook-{_pid_namespace():x}-{pid:x}-{_start_time(pid):x}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _is_dead(name: str) -> bool:
    """Processes of another container, which we could not see, are not taken for dead."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["space"], 16) != _pid_namespace():
        return False
    try:
        return _start_time(int(match["pid"], 16)) != int(match["start"], 16)
    except (FileNotFoundError, ProcessLookupError):
        return True


def _sweep(place: str) -> None:
    hierarchy = this_hierarchy()
    for folder in dict.fromkeys(hierarchy.folders.values() if hierarchy else ()):
        with os.scandir(folder) as scan:
            names = [entry.name for entry in scan if _is_dead(entry.name)]
        for name in names:
            with suppress(OSError):  # another process may be doing the same
                ControlGroup(hierarchy.version if hierarchy else 1, {"": folder / name}).remove()
    with os.scandir(place) as scan:
        dead = [entry.path for entry in scan if _is_dead(entry.name) and _is_ours(entry)]
    for path in dead:
        with suppress(OSError):
            remove_tree(path)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except FileNotFoundError:
        return False
