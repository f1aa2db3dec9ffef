"""From the name of a repository to a `Repository`: its source, its dependencies, its reliable tests.

folder/source.json      where it came from; the tree is complete
folder/tree/            the source, scrubbed
folder/project.json     what its metadata say
folder/deps/            what it imports; python/ is the interpreter that sees it
folder/dependencies.json    which requirements could not be had; deps/ is complete
folder/repository.json  all is done
folder/prepare.log      what went wrong, for people

A step whose file is there is not done again. The network is used to fetch and by pip, which installs wheels only. Code
of the repository and of its dependencies runs in boxes without a network and nowhere else.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from offbook.runfolder import write_atomic
from offbook.sandbox import BoxSpec
from offbook.taskgen.audit.scrub import scrub
from offbook.taskgen.nouns import Repository, Unprepared
from offbook.taskgen.prepare.dependencies import install, refuse_runner
from offbook.taskgen.prepare.layout import Layout, find_layout
from offbook.taskgen.prepare.metadata import Project, read_project
from offbook.taskgen.prepare.source import PYTHON_VERSION, fetch, runs_here
from offbook.taskgen.prepare.tests import BaselineLimits, find_baseline
from offbook.tasks.suite import make_interpreter, suite_box
from offbook.tasks.unpack import SourceLimits

COMPILED = (".c", ".cc", ".cpp", ".pyx", ".rs", ".f90")
IMPORT_S = 60.0
_REPOSITORY = TypeAdapter(Repository)
_PROJECT = TypeAdapter(Project)


Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    source: SourceLimits = field(default_factory=SourceLimits)
    baseline: BaselineLimits = field(default_factory=BaselineLimits)
    python: Path | None = None  # another interpreter for the repository than offbook's own
    pytest_options: tuple[str, ...] = ()  # in the place of those that its settings ask for
    start: str = ""  # a command that gets a box ready for its tests


async def prepare(
    spec: str,
    folder: Path,
    box: BoxSpec | None = None,
    progress: Told = lambda message: None,
    settings: PrepareSettings | None = None,
) -> Repository:
    """Make the repository that `spec` names (see source.fetch) ready in `folder`, or raise Unprepared.

    After Unprepared nothing is left but folder/prepare.log, and that only if the source could be had.
    """
    settings, box = settings or PrepareSettings(), box or BoxSpec()
    folder = folder.resolve()
    ready = folder / "repository.json"
    marker = folder / "source.json"
    if marker.is_file() and (other := json.loads(marker.read_bytes())["spec"]) != spec:
        raise Unprepared(f"{folder} already holds {other}; give {spec} a folder of its own")
    if ready.is_file():
        return load_repository(folder)
    try:
        project = await fetch_project(spec, folder, settings, progress)
        refuse_runner(project.name)
        if not runs_here(project.requires_python):
            raise Unprepared(f"{project.name} needs Python {project.requires_python} and this is {PYTHON_VERSION}")
        layout = find_layout(folder / "tree", project)
        await _install(project, folder, settings, progress)
        draft = Repository(
            project.name,
            project.version,
            folder,
            layout.import_roots,
            layout.source_files,
            layout.test_files,
            layout.support_files,
            tests=(),
            pytest_options=settings.pytest_options or layout.options,
            start=settings.start,
        )
        await _check_import(draft, layout, box)
        repository = await find_baseline(draft, box, settings.baseline, progress, layout.strict_warnings)
    except Unprepared as error:
        _clear(folder, str(error))
        raise
    save_repository(repository)
    return repository


def save_repository(repository: Repository) -> None:
    write_atomic(repository.folder / "repository.json", _REPOSITORY.dump_json(repository, indent=1))


def load_repository(folder: Path) -> Repository:
    """What `prepare` made there. The folder may have been moved since."""
    path = folder / "repository.json"
    if not path.is_file():
        raise Unprepared(f"{folder} holds no prepared repository")
    data = json.loads(path.read_bytes())
    return _REPOSITORY.validate_python({**data, "folder": folder.resolve()})


async def fetch_project(spec: str, folder: Path, settings: PrepareSettings, progress: Told) -> Project:
    """Its source in folder/tree, scrubbed, and what its metadata say."""
    tree, marker, saved = folder / "tree", folder / "source.json", folder / "project.json"
    if marker.is_file():
        return _PROJECT.validate_json(saved.read_bytes())
    progress(f"fetching {spec}")
    for leftover in (tree, folder / "fetched"):
        shutil.rmtree(leftover, ignore_errors=True)
    fetched = await fetch(spec, folder / "fetched", settings.source)
    project = read_project(fetched.tree, fetched.name, fetched.version)
    removed = scrub(fetched.tree, frozenset({project.name, *project.top_level}))
    if removed:
        _log(folder, f"no source, taken out: {', '.join(removed)}")
    if project.version_file:
        _write_version(fetched.tree / project.version_file, fetched.tree, project.version)
    fetched.tree.rename(tree)
    (folder / "fetched").rmdir()
    write_atomic(saved, _PROJECT.dump_json(project))
    write_atomic(marker, json.dumps({"spec": spec, "name": project.name, "version": project.version}))
    return project


def _write_version(path: Path, tree: Path, version: str) -> None:
    """Building would write this file, from tags that are not here."""
    if not path.exists() and path.parent.is_dir() and path.parent.resolve().is_relative_to(tree.resolve()):
        numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
        path.write_text(
            f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {numbers}\n"
            "__commit_id__ = commit_id = None\n"
        )


async def _install(project: Project, folder: Path, settings: PrepareSettings, progress: Told) -> None:
    marker = folder / "dependencies.json"
    if marker.is_file():
        return
    progress(f"{project.name}: installing what it needs")
    shutil.rmtree(folder / "python", ignore_errors=True)
    base = Path(os.path.realpath(settings.python or sys.executable))
    left_out = await install(project, folder / "deps", base)
    make_interpreter(folder, base)
    if left_out:
        progress(f"{project.name}: no wheels for {', '.join(left_out)}")
        _log(folder, f"no wheels, left out: {', '.join(left_out)}")
    write_atomic(marker, json.dumps({"left_out": left_out}))


async def _check_import(repository: Repository, layout: Layout, box: BoxSpec) -> None:
    """A package of which nothing can be imported would only show as hundreds of failing tests."""
    roots = os.pathsep.join(layout.import_roots)
    reasons = []
    async with await suite_box(repository.tree, repository.suite, box) as opened:
        for module in layout.modules:
            python = ["env", f"PYTHONPATH={roots}", "python", "-P", "-s", "-B"]
            result = await opened.exec(shlex.join([*python, "-c", f"import {module}"]), IMPORT_S)
            if result.exit_code == 0 and not result.timed_out:
                return
            _log(repository.folder, f"import {module}\n{result.output}")
            lines = result.output.strip().splitlines()
            reasons.append(f"it took longer than {IMPORT_S:.0f} s" if result.timed_out else lines[-1] if lines else "")
    compiled = any(path.suffix in COMPILED for path in repository.tree.rglob("*"))
    if compiled and reasons[0].startswith(("ModuleNotFoundError", "ImportError")):
        raise Unprepared(f"{repository.name} needs compiled extensions ({reasons[0]})")
    raise Unprepared(f"{repository.name} cannot be imported ({reasons[0]}); see {repository.folder / 'prepare.log'}")


def _log(folder: Path, text: str) -> None:
    with open(folder / "prepare.log", "a") as file:
        file.write(text.rstrip() + "\n")


def _clear(folder: Path, reason: str) -> None:
    """Nothing half-made stays. The log does, where there was a source."""
    had_source = (folder / "source.json").is_file()
    for name in ("tree", "deps", "python", "fetched"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("source.json", "project.json", "dependencies.json"):
        (folder / name).unlink(missing_ok=True)
    if had_source:
        _log(folder, reason)
    elif folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
