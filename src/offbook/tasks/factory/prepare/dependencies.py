"""The Python that a repository runs on, and what it imports, installed in a folder next to its tree.

The Python is offbook's own, one by path, or one by version where the PATH has it; none is downloaded. Only wheels are
installed: no code of any package runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offbook.tasks.factory.prepare.metadata import Project
from offbook.tasks.factory.prepare.source import pip_indexes, run_quietly
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.folder import write_files
from offbook.types import OffbookError

INSTALL_S = 600.0
ASK_S = 30.0
LIMIT_MB = 1500
RUNNER = ("pytest", "hypothesis", "pytest-timeout")
# Of the interpreter itself and not of the virtual environment it may be in.
ASK = """
import json, os, platform, sys
path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps([path, platform.python_version()]))
"""


@dataclass(frozen=True)
class Interpreter:
    path: Path  # with no link in it
    version: str  # 3.12.1


async def find_interpreter(wanted: str = "") -> Interpreter:
    """`wanted` is a path, a command, or a version such as 3.12; offbook's own where it is empty."""
    command = f"python{wanted}" if re.fullmatch(r"3\.\d+", wanted) else wanted or sys.executable
    try:
        _, output = await run_quietly([command, "-I", "-c", ASK], ASK_S)
        path, version = json.loads(output)
    except (OffbookError, OSError, ValueError):
        raise OffbookError(
            f"{command} is no Python interpreter: install it (apt install python3.12, or uv python install 3.12), or "
            "give its path with --python"
        ) from None
    return Interpreter(Path(path), version)


async def install(project: Project, deps: Path, base: Path) -> tuple[str, ...]:
    """Fill `deps` and return the requirements that have no wheel for this Python, or do not go with the others."""
    own = canonicalize_name(project.name)
    named = {line: canonicalize_name(Requirement(line).name) for line in (*project.needs, *project.test_needs)}
    wanted = [line for line, name in named.items() if name != own]
    wanted += [name for name in RUNNER if name not in named.values()]
    left_out: list[str] = []
    reason = await _install(wanted, deps, base)
    if reason:  # which one cannot be had, only a trial of each shows reliably
        for line in wanted:
            why = await _install([line], deps, base, "--dry-run")
            if why and line in RUNNER:
                raise Unprepared(f"the test runner cannot be installed ({why})")
            left_out += [line] if why else []
        reason = await _install([line for line in wanted if line not in left_out], deps, base)
    if reason:
        raise Unprepared(f"the dependencies of {project.name} cannot be installed ({reason})")
    settle(project, deps)
    return tuple(left_out)


def settle(project: Project, deps: Path) -> None:
    """Check the size of a folder of packages, and keep of the package itself only its metadata."""
    size = sum(path.lstat().st_size for path in deps.rglob("*")) >> 20
    if size > LIMIT_MB:
        raise Unprepared(f"the dependencies of {project.name} take {size} MB, more than {LIMIT_MB}")
    # A copy of the package that a dependency brought along would be found where the tree's was deleted.
    own = canonicalize_name(project.name)
    for distribution in metadata.distributions(path=[str(deps)]):
        if canonicalize_name(distribution.metadata["Name"]) == own:
            named = {Path(os.path.normpath(deps / file)) for file in distribution.files or []}
            inside = [path.relative_to(deps) for path in named if path.is_relative_to(deps) and os.path.lexists(path)]
            write_files(deps, dict.fromkeys(map(str, inside)))
    # So that `importlib.metadata.version` and entry points work although the package is not installed.
    folder = deps / f"{own.replace('-', '_')}-{project.version}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project.name}", f"Version: {project.version}"]
    lines += [f"Requires-Dist: {line}" for line in project.needs]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "entry_points.txt").write_text(project.entry_points)


async def _install(wanted: list[str], deps: Path, base: Path, *options: str) -> str:
    """Install with uv where it is on the PATH, else with pip. Returns nothing, or the reason why it cannot be done."""
    if not options:
        shutil.rmtree(deps, ignore_errors=True)
        deps.mkdir(parents=True)
    environment = {**os.environ}
    if uv := shutil.which("uv"):
        indexes = await pip_indexes()  # uv does not read pip's settings
        if indexes:
            environment.setdefault("UV_DEFAULT_INDEX", indexes[0])
        command = [uv, "pip", "install", "--python", str(base), "--link-mode", "copy", "--compile-bytecode"]
    else:
        python = [] if base == Path(os.path.realpath(sys.executable)) else ["--python", str(base)]
        command = [sys.executable, "-m", "pip", *python, "install", "--no-input", "--no-warn-conflicts"]
    command += ["--quiet", "--only-binary", ":all:", *options, "--target", str(deps), "--", *wanted]
    # In the package's own folder: pip leaves what it has in it when it is killed.
    with tempfile.TemporaryDirectory(prefix="install-", dir=deps.parent) as scratch:
        exit_code, output = await run_quietly(command, INSTALL_S, {**environment, "TMPDIR": scratch})
    if exit_code is None:
        raise Unprepared(f"installing the dependencies took longer than {INSTALL_S:.0f} s")
    reasons = re.findall(r"^(?:ERROR: |error: |\s*╰─▶ |(?=.*: No module named pip))(.*)", output, re.M)
    return "" if exit_code == 0 else [f"the installer ended with {exit_code}", *reasons][-1]
