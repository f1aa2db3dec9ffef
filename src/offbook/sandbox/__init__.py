"""A box with a working tree: run commands in it, read and write its files, see what changed, fork it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offbook.sandbox.box import HISTORY, Box, BoxSpec, BoxUsage, ExecResult, PathRefused
from offbook.sandbox.bwrap import BwrapBox, Isolation, isolation, require_isolation
from offbook.sandbox.process import ProcessBox

__all__ = [
    "HISTORY",
    "Box",
    "BoxSpec",
    "BoxUsage",
    "BwrapBox",
    "ExecResult",
    "Isolation",
    "PathRefused",
    "ProcessBox",
    "isolation",
    "open_box",
    "require_isolation",
]


async def open_box(tree: Path, spec: BoxSpec | None = None, readonly: Sequence[Path] = ()) -> Box:
    """A box of the kind that `spec` names, around a copy or an overlay of `tree`.

    `readonly` folders are seen in it under their own paths; a container has its own files and takes none.
    """
    spec = spec or BoxSpec()
    if spec.backend == "bwrap":
        return BwrapBox(tree, spec, readonly=readonly)
    if spec.backend == "process":
        return ProcessBox(tree, spec)
    from offbook.sandbox.container import ContainerBox

    return await ContainerBox.open(tree, spec)
