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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offbook.tasks.factory.prepare.metadata import Project
from offbook.tasks.factory.prepare.source import pip_settings, run_quietly
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.folder import write_files
from offbook.types import OffbookError

INSTALL_S = 600.0
ASK_S = 30.0
LIMIT_MB = 1500
RUNNER = ("pytest", "hypothesis", "pytest-timeout")
# What every run of a test suite imports: without one of its features nothing would run at all, or a task could be
# solved by looking at the copy that runs the tests.
COMES_WITH_RUNNER = frozenset(
    {"pytest", "pluggy", "packaging", "iniconfig", "pygments", "exceptiongroup", "tomli", "colorama"}
    | {"hypothesis", "sortedcontainers", "attrs", "pytest-timeout"}
)
# What requirements are chosen by, of the interpreter itself and not of the virtual environment it may be in.
ASK = """
import json, os, platform, sys
print(json.dumps({
    "path": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "implementation_name": sys.implementation.name,
    "implementation_version": "%d.%d.%d" % sys.implementation.version[:3],
    "platform_python_implementation": platform.python_implementation(),
    "python_full_version": platform.python_version(),
    "python_version": "%d.%d" % sys.version_info[:2],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    path: Path  # with no link in it
    version: str  # 3.12.1
    markers: dict[str, str]  # the environment that markers of requirements are held against


async def find_interpreter(wanted: str = "") -> Interpreter:
    """`wanted` is a path, a command, or a version such as 3.12; offbook's own where it is empty."""
    markers = {key: str(value) for key, value in default_environment().items()}
    if not wanted:
        return Interpreter(Path(os.path.realpath(sys.executable)), markers["python_full_version"], markers)
    is_version = bool(re.fullmatch(r"3\.\d+", wanted))
    command = f"python{wanted}" if is_version else wanted
    try:
        exit_code, output = await run_quietly([command, "-I", "-c", ASK], ASK_S)
        said = json.loads(output) if exit_code == 0 else {}
        path = Path(said.pop("path"))
    except (OffbookError, OSError, ValueError, KeyError):
        if is_version:
            raise OffbookError(
                f"there is no Python {wanted} on the PATH: install it (apt install python{wanted}, or uv python "
                f"install {wanted}), or give its path with --python"
            ) from None
        raise OffbookError(f"--python {wanted} is no Python interpreter and no version such as 3.12") from None
    markers |= said
    return Interpreter(path, markers["python_full_version"], markers)


async def install(project: Project, deps: Path, base: Path) -> tuple[str, ...]:
    """Fill `deps` and return the requirements that have no wheel for this Python, or do not go with the others."""
    own = canonicalize_name(project.name)
    needs = [line for line in project.needs if canonicalize_name(Requirement(line).name) != own]
    test_needs = [line for line in project.test_needs if canonicalize_name(Requirement(line).name) != own]
    named = {canonicalize_name(Requirement(line).name) for line in (*needs, *test_needs)}
    runner = [name for name in RUNNER if name not in named]
    wanted = list(dict.fromkeys([*needs, *test_needs, *runner]))
    left_out: list[str] = []
    if await _install(wanted, deps, base):
        # One of them cannot be had. Which one, only a trial of each shows reliably.
        for line in wanted:
            reason = await _install([line], deps, base, "--dry-run")
            if reason and line in RUNNER:
                raise Unprepared(f"the test runner cannot be installed ({reason})")
            left_out += [line] if reason else []
        reason = await _install([line for line in wanted if line not in left_out], deps, base)
        if reason:  # each can be had, but not together: what the tests need goes first
            left_out += [line for line in test_needs if line not in left_out]
            reason = await _install([*(line for line in needs if line not in left_out), *RUNNER], deps, base)
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
    if project.entry_points:
        (folder / "entry_points.txt").write_text(project.entry_points)


async def _install(wanted: list[str], deps: Path, base: Path, *options: str) -> str:
    """Install with uv where it is on the PATH, else with pip. Returns nothing, or the reason why it cannot be done."""
    if not options:
        shutil.rmtree(deps, ignore_errors=True)
        deps.mkdir(parents=True)
    scratch = deps.with_name("pip")  # in the package's own folder: pip leaves what it has there when it is killed
    environment = {**os.environ, "TMPDIR": str(scratch)}
    uv = shutil.which("uv")
    if uv:
        settings = await pip_settings()  # uv does not read them
        if settings.indexes:
            environment.setdefault("UV_DEFAULT_INDEX", settings.indexes[0])
        command = [uv, "pip", "install", "--python", str(base), "--link-mode", "copy", "--compile-bytecode"]
    else:
        python = [] if base == Path(os.path.realpath(sys.executable)) else ["--python", str(base)]
        command = [sys.executable, "-m", "pip", *python, "install", "--no-input", "--no-warn-conflicts"]
    command += ["--quiet", "--only-binary", ":all:", *options, "--target", str(deps), "--", *wanted]
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        exit_code, output = await run_quietly(command, INSTALL_S, environment)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if exit_code is None:
        raise Unprepared(f"installing the dependencies took longer than {INSTALL_S:.0f} s")
    if "No module named pip" in output:
        raise Unprepared(f"pip is not installed for {sys.executable}")
    reasons = re.findall(r"^(?:ERROR: |error: |\s*╰─▶ )(.*)", output, re.M)
    return "" if exit_code == 0 else reasons[-1] if reasons else f"the installer ended with {exit_code}"
