"""A box with a working tree: run commands in it, read and write its files, see what changed, fork it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offbook.sandbox.box import HISTORY, Box, BoxSpec, ExecResult, PathRefused
from offbook.sandbox.bwrap.arguments import View, hidden_folders
from offbook.sandbox.bwrap.bwrap_box import BwrapBox
from offbook.sandbox.bwrap.isolation import isolation, require_isolation
from offbook.sandbox.folders import remove_tree
from offbook.sandbox.process import ProcessBox


def hidden_in_boxes(python: Path) -> list[Path]:
    """What of the machine's interpreters a box does not show that has one of its own, as `open_box` takes it."""
    return [Path(path) for path in hidden_folders(View(python=str(python.resolve())))]


async def open_box(
    tree: Path,
    spec: BoxSpec | None = None,
    python: Path | None = None,
    mounts: Mapping[str, Path] | None = None,
    place: Path | None = None,
) -> Box:
    """A box of the kind that `spec` names, around a copy or an overlay of `tree`.

    `python` is a folder with an interpreter of the task's own: python/ and the packages it has, deps/; the box has it
    in the place of offbook's. `mounts` are folders that the box sees under the given paths and can only read. A
    container has its own files and takes none of them.

    `place` is for bwrap alone: the folder it lives in. What was left there goes on from its last snapshot.
    """
    spec = spec or BoxSpec()
    if spec.backend == "bwrap":
        if place is not None and (place / "box.json").is_file():
            return await BwrapBox.restore(place)
        if place is not None and place.exists():  # killed before its first snapshot
            remove_tree(str(place))
        return BwrapBox(tree, spec, place, python, mounts)
    if spec.backend == "process":
        return ProcessBox(tree, spec, python)
    from offbook.sandbox.container import ContainerBox

    return await ContainerBox.open(tree, spec)
