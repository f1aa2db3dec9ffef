"""A sandbox with a working tree: run commands in it, read and write its files, see what changed, fork it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from offbook.sandbox.bwrap.arguments import View, hidden_folders
from offbook.sandbox.bwrap.bwrap_sandbox import BwrapSandbox
from offbook.sandbox.bwrap.isolation import isolation, require_isolation
from offbook.sandbox.process import ProcessSandbox
from offbook.sandbox.sandbox import HISTORY, ExecResult, PathRefused, Sandbox, SandboxSpec


def hidden_in_sandboxes(python: Path) -> list[Path]:
    """Folders of the machine's interpreters that a sandbox with this `python` hides."""
    return [Path(path) for path in hidden_folders(View(python=str(python.resolve())))]


async def open_sandbox(
    tree: Path, spec: SandboxSpec | None = None, python: Path | None = None, mounts: Mapping[str, Path] | None = None
) -> Sandbox:
    """A sandbox of the kind that `spec` names, around a copy or an overlay of `tree`.

    `python` is a folder with an interpreter of the task's own: python/ and the packages it has, deps/; the sandbox has
    it in the place of offbook's. `mounts` are folders that the sandbox sees under the given paths and can only read. A
    container has its own files and takes none of them.
    """
    spec = spec or SandboxSpec()
    if spec.backend == "bwrap":
        return BwrapSandbox(tree, spec, python, mounts)
    if spec.backend == "process":
        return ProcessSandbox(tree, spec, python)
    from offbook.sandbox.container import ContainerSandbox

    return await ContainerSandbox.open(tree, spec)
