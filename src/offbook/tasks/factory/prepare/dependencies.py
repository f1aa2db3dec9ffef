"""The Python that a repository runs on, and what it imports, installed in a folder next to its tree.

The Python is offbook's own, one by path, or one by version where this machine has it: it is looked for on the PATH,
then among pyenv's and uv's; none is downloaded. Only wheels are installed: no code of any package runs.
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
LIMIT_MB = 1500
RUNNER = ("pytest", "hypothesis", "pytest-timeout")
# What every run of a test suite imports: without one of its features nothing would run at all, or a task could be
# solved by looking at the copy that runs the tests.
COMES_WITH_RUNNER = frozenset(
    {"pytest", "pluggy", "packaging", "iniconfig", "pygments", "exceptiongroup", "tomli", "colorama"}
    | {"hypothesis", "sortedcontainers", "attrs", "pytest-timeout"}
)


def refuse_runner(name: str) -> None:
    if canonicalize_name(name) in COMES_WITH_RUNNER:
        raise Unprepared(f"{name} comes with the test runner, so its tests would run on the very code that is deleted")


async def install(project: Project, deps: Path, base: Path) -> tuple[str, ...]:
    """Fill `deps` and return the requirements that have no wheel for this Python, or do not go with the others."""
    needs = [*project.needs, *project.test_needs]
    needs = [line for line in needs if canonicalize_name(Requirement(line).name) != canonicalize_name(project.name)]
    named = {canonicalize_name(Requirement(line).name) for line in needs}
    wanted = list(dict.fromkeys([*needs, *(name for name in RUNNER if name not in named)]))
    left_out: list[str] = []
    output = await _install(wanted, deps, base)
    if output:
        # One of them cannot be had. Which one, only trying each of them tells reliably.
        kept: list[str] = []
        for line in wanted:
            reason = await _install([line], deps, base, "--dry-run")
            if reason and line in RUNNER:
                raise Unprepared(f"the test runner cannot be installed ({reason})")
            (left_out if reason else kept).append(line)
        output = await _install(kept, deps, base)
    if output:  # each can be had, but not together: what the tests need goes first
        mine = [line for line in project.needs if line not in left_out]
        left_out += [line for line in project.test_needs if line not in left_out]
        output = await _install([*mine, *RUNNER], deps, base)
    if output:
        raise Unprepared(f"the dependencies of {project.name} cannot be installed ({output})")
    settle(project, deps)
    return tuple(left_out)


def settle(project: Project, deps: Path) -> None:
    """What holds for a folder of packages, however it was filled: not too large, and the package itself is known by its
    metadata and not there."""
    size = sum(path.lstat().st_size for path in deps.rglob("*")) >> 20
    if size > LIMIT_MB:
        raise Unprepared(f"the dependencies of {project.name} take {size} MB, more than {LIMIT_MB}")
    # A copy of the package that a dependency brought along would be found where the tree's was deleted.
    for distribution in metadata.distributions(path=[str(deps)]):
        if canonicalize_name(distribution.metadata["Name"]) == canonicalize_name(project.name):
            named = {Path(os.path.normpath(deps / file)) for file in distribution.files or []}
            there = [path.relative_to(deps) for path in named if path.is_relative_to(deps) and os.path.lexists(path)]
            write_files(deps, dict.fromkeys(map(str, there)))
    # So that `importlib.metadata.version` and entry points work although the package is not installed.
    name = canonicalize_name(project.name).replace("-", "_")
    folder = deps / f"{name}-{project.version}.dist-info"
    folder.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project.name}", f"Version: {project.version}"]
    lines += [f"Requires-Dist: {line}" for line in project.needs]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    if project.entry_points:
        (folder / "entry_points.txt").write_text(project.entry_points)


async def _install(wanted: list[str], deps: Path, base: Path, *more: str) -> str:
    """Install with uv where it is on the PATH, else with pip. Returns nothing, or the reason why it cannot be done."""
    if not more:
        shutil.rmtree(deps, ignore_errors=True)
        deps.mkdir(parents=True)
    environment = dict(os.environ)
    if uv := shutil.which("uv"):
        settings = await pip_settings()  # uv does not read them; not as arguments, which others on the machine can see
        given = {
            "UV_DEFAULT_INDEX": "".join(settings.indexes[:1]),
            "UV_INDEX": " ".join(settings.indexes[1:]),
            "UV_NO_INDEX": "" if settings.indexes else "1",
            "UV_FIND_LINKS": ",".join(settings.find_links),
            "SSL_CERT_FILE": settings.certificates,
        }
        environment = {name: value for name, value in given.items() if value} | environment
        command = [uv, "pip", "install", "--python", str(base), "--link-mode", "copy", "--compile-bytecode"]
    else:
        python = [] if base == Path(os.path.realpath(sys.executable)) else ["--python", str(base)]
        command = [sys.executable, "-m", "pip", *python, "install", "--no-input", "--no-warn-conflicts"]
        command += ["--disable-pip-version-check"]
    command += ["--quiet", "--only-binary", ":all:", *more, "--target", str(deps), "--", *wanted]
    scratch = deps.with_name("pip")  # in the package's own folder: pip leaves what it has there when it is killed
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        exit_code, output = await run_quietly(command, INSTALL_S, environment | {"TMPDIR": str(scratch)})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if exit_code is None:
        raise Unprepared(f"installing the dependencies took longer than {INSTALL_S:.0f} s")
    if "No module named pip" in output:
        raise Unprepared(f"pip is not installed for {sys.executable}")
    reasons = re.findall(r"^(?:ERROR: |error: |\s*╰─▶ )(.*)", output, re.M)
    return "" if exit_code == 0 else reasons[-1] if reasons else f"the installer ended with {exit_code}"


ASK_S = 30.0
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
    if not wanted:
        markers = {key: str(value) for key, value in default_environment().items()}
        return Interpreter(Path(os.path.realpath(sys.executable)), markers["python_full_version"], markers)
    version = re.fullmatch(r"3\.\d+(\.\d+)?", wanted)
    places = _places(wanted) if version else [shutil.which(wanted) or wanted]
    for place in places:
        found = await _asked(place)
        if found and (not version or f"{found.version}.".startswith(f"{wanted}.")):
            return found
    if version:
        raise OffbookError(
            f"there is no Python {wanted} on this machine: install it (apt install python{wanted}, uv python install "
            f"{wanted} or pyenv install {wanted}), or give its path with --python"
        )
    raise OffbookError(f"--python {wanted} is no Python interpreter and no version such as 3.12")


def _places(version: str) -> list[str]:
    short = ".".join(version.split(".")[:2])
    homes = [Path(os.environ.get("PYENV_ROOT") or "~/.pyenv", "versions")]
    homes += [Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or "~/.local/share/uv/python")]
    installed = [path for home in homes for path in home.expanduser().glob(f"*/bin/python{short}")]
    newest = sorted(installed, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])])
    on_path = shutil.which(f"python{short}")
    return [*([on_path] if on_path else []), *map(str, reversed(newest))]


async def _asked(place: str) -> Interpreter | None:
    """A command that is no Python, or one of pyenv's that stands for a version which is not chosen, is none."""
    try:
        exit_code, output = await run_quietly([place, "-I", "-c", ASK], ASK_S)
        said = json.loads(output.splitlines()[-1]) if exit_code == 0 else {}
    except (OffbookError, OSError, ValueError, IndexError):
        return None
    if not isinstance(said, dict) or "path" not in said:
        return None
    path = Path(said.pop("path"))
    markers = {key: str(value) for key, value in default_environment().items()} | said
    return Interpreter(path, markers["python_full_version"], markers)
