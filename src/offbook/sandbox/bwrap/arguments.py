"""How bubblewrap is told what a box is, and how the limits are set that hold for each process in it."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from offbook.sandbox.box import HISTORY, BoxSpec
from offbook.sandbox.bwrap.cgroups import Group
from offbook.sandbox.bwrap.isolation import isolation
from offbook.sandbox.bwrap.layers import PARTS, Layer
from offbook.sandbox.bwrap.root import HOME, TEMPORARY, TREE, UID, View, view_arguments
from offbook.sandbox.bwrap.seccomp import seccomp_program

OPEN_FILES = 1024
FLAGS = (
    "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --as-pid-1 --cap-drop ALL "
    f"--uid {UID} --gid {UID} --hostname box --chdir {TREE}"
).split()
POINTS = dict(zip(PARTS, (TREE, HOME, TEMPORARY), strict=True))


def box_arguments(
    base: str, layers: Sequence[Layer], place: str, history: str, view: View, filter_end: int
) -> list[str]:
    """Layers top first. bwrap mounts them in a namespace of its own, so they are gone with its processes."""
    before, after = view_arguments(view)
    arguments = [isolation().bwrap, *FLAGS, "--seccomp", str(filter_end), *before]
    if history:
        arguments += ["--ro-bind", history, HISTORY]
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
        if not os.path.isdir(work):
            os.mkdir(work)
        arguments += ["--overlay", f"{top.path}/{part}", work, point]
    return [*arguments, *after]


def limits(spec: BoxSpec, group: Group | None, is_full: bool) -> str:
    """In a box that is full, files can be removed and nothing can be written to one.

    Shell commands and not `preexec_fn`, which may deadlock in a process with threads. They come first inside, where
    the count of processes begins anew, and no one in there has the right to raise them.
    """
    steps = f"ulimit -c 0; ulimit -f {0 if is_full else spec.disk_mb * 2048}; ulimit -n {_open_files()}; "
    if group is None or "memory" not in group.folders:
        steps += f"ulimit -v {spec.memory_mb * 1024}; "
    return steps + f"ulimit -u {spec.pids} 2>/dev/null || ulimit -p {spec.pids}"  # as bash has it, and as dash has it


@cache
def seccomp_file(folder: str) -> str:
    path = f"{folder}/seccomp"
    Path(path).write_bytes(seccomp_program())
    return path


@cache
def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
