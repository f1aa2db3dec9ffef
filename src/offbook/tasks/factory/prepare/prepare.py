"""From the name of a repository to a `Repository`: its source, its dependencies, its reliable tests.

folder/source.json      where it came from and what its metadata say; the tree is complete
folder/tree/            the source, scrubbed
folder/deps/            what it imports; python/ is the interpreter that sees it
folder/dependencies.json    which requirements could not be had; deps/ is complete
folder/repository.json  all is done
folder/modules/         what agents wrote to stand in for modules (agents.py); it is in deps/ too
folder/prepare.log      what went wrong, for people

A step whose file is there is not done again. The network is used to fetch and by pip, which installs wheels only. Code
of the repository and of its dependencies runs in sandboxes and nowhere else, and these have no network but for agents
that set a repository up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import TypeAdapter

from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.audit.scrub import scrub
from offbook.tasks.factory.prepare.dependencies import Interpreter, find_interpreter, install
from offbook.tasks.factory.prepare.metadata import NAMES, Project, find_layout, read_project
from offbook.tasks.factory.prepare.source import fetch
from offbook.tasks.factory.prepare.tests import BaselineLimits, find_baseline
from offbook.tasks.factory.types import Repository, Unprepared
from offbook.tasks.suite import make_interpreter
from offbook.tasks.unpack import SourceLimits
from offbook.types import MachineFault

_REPOSITORY = TypeAdapter(Repository)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Stuck:
    """A repository that does not get ready by itself, for those who set it up."""

    draft: Repository  # its tests are not known yet; deps/ holds at least the test runner
    project: Project
    reason: str
    # Raises Unprepared with the reason. It may be asked again and again, with other packages and another start command.
    finished: Callable[[Repository], Awaitable[Repository]]


SetUp = Callable[[Stuck, SandboxSpec, Progress], Awaitable[Repository]]


@dataclass(frozen=True)
class PrepareSettings:
    source: SourceLimits = field(default_factory=SourceLimits)
    baseline: BaselineLimits = field(default_factory=BaselineLimits)
    python: str = ""  # another interpreter for the repository than offbook's own: a path or a version
    pytest_options: tuple[str, ...] = ()  # in the place of those that its settings ask for
    start: str = ""  # a command that gets a sandbox ready for its tests
    set_up: SetUp | None = None  # who is asked where a repository does not get ready by itself


async def prepare(
    spec: str,
    folder: Path,
    sandbox: SandboxSpec | None = None,
    progress: Progress = lambda message: None,
    settings: PrepareSettings | None = None,
) -> Repository:
    """Make the repository that `spec` names (see source.fetch) ready in `folder`, or raise Unprepared.

    After Unprepared nothing is left but folder/prepare.log, and that only if the source could be had.
    """
    settings = settings or PrepareSettings()
    sandbox = sandbox or SandboxSpec()
    folder = folder.resolve()
    if (folder / "repository.json").is_file():
        return load_repository(folder)
    python = await find_interpreter(settings.python)

    async def finished(draft: Repository) -> Repository:
        return await find_baseline(draft, sandbox, settings.baseline, progress)

    try:
        project = await fetch_project(spec, folder, settings, python, progress)
        _refuse(project, python.version)
        draft = replace(find_layout(folder / "tree", project), start=settings.start)
        if settings.pytest_options:
            draft = replace(draft, pytest_options=settings.pytest_options)
        try:
            await _install(project, folder, python, progress)
            repository = await finished(draft)
        except (Unprepared, MachineFault) as error:
            if settings.set_up is None:
                raise
            _log(folder, f"set up by agents, because: {error}")
            # At least what runs tests.
            await _install(replace(project, needs=[], extras={}), folder, python, progress)
            repository = await settings.set_up(Stuck(draft, project, str(error), finished), sandbox, progress)
    except (MachineFault, Unprepared) as error:
        if (folder / "source.json").is_file():
            _log(folder, str(error))
        clear(folder)
        raise Unprepared(str(error)) from error
    save_repository(repository)
    return repository


def _refuse(project: Project, python: str) -> None:
    if project.name.lower() in NAMES["comes_with_runner"]:
        raise Unprepared(f"{project.name} comes with the test runner, which would run on the code that is deleted")
    needed = project.requires_python
    with suppress(InvalidSpecifier):
        if not SpecifierSet(needed).contains(python, prereleases=True):
            raise Unprepared(f"{project.name} needs Python {needed} and this is {python}; give another with --python")


async def fetch_project(
    spec: str, folder: Path, settings: PrepareSettings, python: Interpreter, progress: Progress
) -> Project:
    """Its source in folder/tree, scrubbed, and what its metadata say."""
    marker = folder / "source.json"
    if marker.is_file():
        return Project(**json.loads(marker.read_bytes())["project"])
    progress(f"fetching {spec}")
    for leftover in ("tree", "fetched"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    fetched = await fetch(spec, folder / "fetched", settings.source, python.version)
    project = read_project(fetched.tree, fetched.name, fetched.version)
    scrub(fetched.tree, frozenset({project.name}))
    version_file = fetched.tree / (project.version_file or ".")
    if not version_file.exists() and version_file.parent.is_dir():
        # Building would write this file, from tags that are not here.
        numbers = Version(project.version).release
        version_file.write_text(
            f"__version__ = version = {project.version!r}\n__version_tuple__ = version_tuple = {numbers}\n"
            "__commit_id__ = commit_id = None\n"
        )
    fetched.tree.rename(folder / "tree")
    (folder / "fetched").rmdir()
    write_atomic(marker, json.dumps({"message": fetched.message, "project": asdict(project)}))
    return project


async def _install(project: Project, folder: Path, python: Interpreter, progress: Progress) -> None:
    marker = folder / "dependencies.json"
    before = folder / "deps.before"
    if before.is_dir():  # agents were at work when the last call was stopped
        shutil.rmtree(folder / "deps", ignore_errors=True)
        before.rename(folder / "deps")
    if marker.is_file():
        return
    progress(f"{project.name}: installing what it needs")
    shutil.rmtree(folder / "python", ignore_errors=True)
    left_out = await install(project, folder / "deps", python.path)
    make_interpreter(folder, python.path)
    if left_out:
        progress(f"{project.name}: no wheels for {', '.join(left_out)}")
    write_atomic(marker, json.dumps({"left_out": left_out}))


def save_repository(repository: Repository) -> None:
    write_atomic(repository.folder / "repository.json", _REPOSITORY.dump_json(repository, indent=1))


def load_repository(folder: Path) -> Repository:
    """What `prepare` made there. The folder may have been moved since."""
    data = json.loads((folder / "repository.json").read_bytes())
    return _REPOSITORY.validate_python({**data, "folder": folder.resolve()})


def _log(folder: Path, text: str) -> None:
    with open(folder / "prepare.log", "a") as file:
        file.write(text.rstrip() + "\n")


def clear(folder: Path) -> None:
    """Remove what is half made. The log and the lock of the folder stay."""
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in ("prepare.log", ".lock"):
            path.unlink()
    with suppress(OSError):  # unless something is left
        folder.rmdir()
