"""From the name of a repository to a `Repository`: its source, its dependencies, its reliable tests.

folder/source.json      where it came from and what its metadata say; the tree is complete
folder/tree/            the source, scrubbed
folder/deps/            what it imports; python/ is the interpreter that sees it
folder/dependencies.json    which requirements could not be had; deps/ is complete
folder/repository.json  all is done
folder/set_up.json      what agents were asked and did, where it did not get ready without them (agents.py)
folder/modules/         what they wrote to stand in for modules; it is in deps/ too
folder/prepare.log      what went wrong, for people

A step whose file is there is not done again. The network is used to fetch and by pip, which installs wheels only. Code
of the repository and of its dependencies runs in sandboxes and nowhere else, and these have no network but for agents
that set a repository up.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from offbook.core.runfolder import write_atomic
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.audit.scrub import scrub
from offbook.tasks.factory.prepare.dependencies import COMES_WITH_RUNNER, Interpreter, find_interpreter, install
from offbook.tasks.factory.prepare.metadata import Project, find_layout, read_project
from offbook.tasks.factory.prepare.source import fetch, needs_another, runs_on
from offbook.tasks.factory.prepare.tests import BaselineLimits, find_baseline
from offbook.tasks.factory.types import Repository, Unprepared
from offbook.tasks.suite import StartFailed, make_interpreter
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
    marker = folder / "source.json"
    if marker.is_file() and (other := json.loads(marker.read_bytes())["spec"]) != spec:
        raise Unprepared(f"{folder} already holds {other}; give {spec} a folder of its own")
    if (folder / "repository.json").is_file():
        return load_repository(folder)
    python = await find_interpreter(settings.python)
    try:
        project = await fetch_project(spec, folder, settings, python, progress)
        if project.name.lower() in COMES_WITH_RUNNER:
            why = "comes with the test runner, so its tests would run on the very code that is deleted"
            raise Unprepared(f"{project.name} {why}")
        if not runs_on(project.requires_python, python.version):
            raise Unprepared(needs_another(project.name, project.requires_python, python.version))
        repository = await _make_ready(project, folder, sandbox, settings, python, progress)
    except (MachineFault, Unprepared) as error:
        if marker.is_file():  # there was a source
            _log(folder, str(error))
        clear(folder)
        raise Unprepared(str(error)) from error
    save_repository(repository)
    return repository


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
    project = read_project(fetched.tree, fetched.name, fetched.version, python.markers)
    removed = scrub(fetched.tree, frozenset({project.name, *project.top_level}))
    if removed:
        _log(folder, f"no source, taken out: {', '.join(removed)}")
    version_file = fetched.tree / (project.version_file or ".")
    if not version_file.exists() and version_file.parent.is_dir():
        # Building would write this file, from tags that are not here.
        numbers = tuple(int(part) for part in project.version.split(".") if part.isdigit())
        version_file.write_text(
            f"__version__ = version = {project.version!r}\n__version_tuple__ = version_tuple = {numbers}\n"
            "__commit_id__ = commit_id = None\n"
        )
    fetched.tree.rename(folder / "tree")
    (folder / "fetched").rmdir()
    about = {"spec": spec, "version": project.version, "message": fetched.message, "project": asdict(project)}
    write_atomic(marker, json.dumps(about))
    return project


async def _make_ready(
    project: Project,
    folder: Path,
    sandbox: SandboxSpec,
    settings: PrepareSettings,
    python: Interpreter,
    progress: Progress,
) -> Repository:
    layout = find_layout(folder / "tree", project)
    draft = Repository(
        name=project.name,
        version=project.version,
        folder=folder,
        import_roots=layout.import_roots,
        source_files=layout.source_files,
        test_files=layout.test_files,
        support_files=layout.support_files,
        tests=(),
        pytest_options=settings.pytest_options or layout.options,
        start=settings.start,
    )

    async def finished(draft: Repository) -> Repository:
        return await find_baseline(draft, sandbox, settings.baseline, progress)

    try:
        await _install(project, folder, python, progress)
        return await finished(draft)
    except (Unprepared, MachineFault) as error:
        if settings.set_up is None:
            raise
        reason = str(error)
        if isinstance(error, StartFailed):
            draft = replace(draft, start="")
    if not (folder / "dependencies.json").is_file():  # at least what runs tests
        await _install(replace(project, needs=[], extras={}), folder, python, progress)
    _log(folder, f"set up by agents, because: {reason}")
    return await settings.set_up(Stuck(draft, project, reason, finished), sandbox, progress)


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
        _log(folder, f"no wheels, left out: {', '.join(left_out)}")
    write_atomic(marker, json.dumps({"left_out": left_out}))


def save_repository(repository: Repository) -> None:
    write_atomic(repository.folder / "repository.json", _REPOSITORY.dump_json(repository, indent=1))


def load_repository(folder: Path) -> Repository:
    """What `prepare` made there. The folder may have been moved since."""
    path = folder / "repository.json"
    if not path.is_file():
        raise Unprepared(f"{folder} holds no prepared repository")
    data = json.loads(path.read_bytes())
    return _REPOSITORY.validate_python({**data, "folder": folder.resolve()})


def _log(folder: Path, text: str) -> None:
    with open(folder / "prepare.log", "a") as file:
        file.write(text.rstrip() + "\n")


def clear(folder: Path) -> None:
    """Remove what is half made. The log and the lock of the folder stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in ("prepare.log", ".lock"):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
