"""Two releases made ready: the older one's tree, with the packages and the reliable tests of the newer one.

folder/new/         the newer release, prepared like any repository, with its map
folder/old/         the older one's source, until it is folder/tree
folder/tree/        the older one's source: what agents see
folder/repository.json, map.json    written last; deps/, python/ and modules/ are the newer one's by then
"""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.prepare.interpreter import find_interpreter
from offbook.tasks.factory.prepare.prepare import (
    PrepareSettings,
    Told,
    clear,
    fetch_project,
    load_repository,
    prepare,
    save_repository,
)
from offbook.tasks.factory.prepare.tests import map_tests
from offbook.tasks.factory.releases.hunks import Hunks, hunks_between
from offbook.tasks.factory.releases.jumps import Jump, jump_of
from offbook.tasks.factory.releases.runnable import Product, TestImports
from offbook.tasks.factory.types import Map, Repository, Unprepared, is_inside, is_test_code
from offbook.tasks.factory.workshop import Workshop, hidden_of, product_of, read_texts


async def prepare_release(
    source: str, folder: Path, spec: SandboxSpec, progress: Told, settings: PrepareSettings
) -> Repository:
    """After Unprepared nothing is left but folder/prepare.log."""
    folder = folder.resolve()
    if (folder / "repository.json").is_file():
        return load_repository(folder)
    try:
        return await _prepared(jump_of(source), folder, spec, progress, settings)
    except Unprepared:
        if (folder / "new" / "prepare.log").is_file():
            (folder / "new" / "prepare.log").replace(folder / "prepare.log")
        clear(folder)
        raise


async def _prepared(
    jump: Jump, folder: Path, spec: SandboxSpec, progress: Told, settings: PrepareSettings
) -> Repository:
    new = await prepare(jump.new, folder / "new", spec, progress, settings)
    progress(f"{new.name}: finding out which test enters which function")
    await map_tests(new, spec)
    python = await find_interpreter(settings.python)
    old = await fetch_project(jump.old, folder / "old", settings, python, progress)
    if canonicalize_name(old.name) != canonicalize_name(new.name):
        raise Unprepared(f"{old.name} and {new.name} are not two releases of one package")
    if not any((folder / "old" / "tree" / place).exists() for place in product_of(new)):
        raise Unprepared(f"{new.name} {old.version} has its source in another place than {new.version}")
    if old.version == new.version:
        raise Unprepared(f"both releases of {new.name} are {new.version}")
    await asyncio.to_thread(_settle, folder, new, old.version)
    repository = replace(new, folder=folder, version=old.version)
    save_repository(repository)
    shutil.rmtree(folder / "old")
    return repository


def _settle(folder: Path, new: Repository, version: str) -> None:
    """The newer release stays in folder/new, which no sandbox sees."""
    for name in ("deps", "python", "modules"):
        if (new.folder / name).exists() and not (folder / name).exists():
            (new.folder / name).rename(folder / name)
    shutil.rmtree(folder / "tree", ignore_errors=True)
    shutil.copytree(folder / "old" / "tree", folder / "tree", symlinks=True)
    shutil.copyfile(new.folder / "map.json", folder / "map.json")
    own = canonicalize_name(new.name).replace("-", "_")
    for place in (folder / "deps").glob(f"{own}-*.dist-info"):  # its version is the older one's now
        text = (place / "METADATA").read_text()
        (place / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text))
        place.rename(place.with_name(f"{own}-{version}.dist-info"))


@dataclass(frozen=True)
class Release:
    """What lies between two releases."""

    workshop: Workshop  # of the older one, with the newer one's tests and map
    new_version: str
    new_files: dict[str, str]

    @property
    def repository(self) -> Repository:
        return self.workshop.repository

    @property
    def map(self) -> Map:
        return self.workshop.map

    @property
    def old_files(self) -> dict[str, str]:
        return self.workshop.files

    @cached_property
    def product(self) -> dict[str, str]:
        """The older one's source."""
        return {path: text for path, text in self.old_files.items() if self._is_source(path)}

    @cached_property
    def hunks(self) -> Hunks:
        return hunks_between(self.product, {path: self.new_files[path] for path in self.repository.source_files})

    @cached_property
    def tests(self) -> dict[str, str]:
        """The newer one's tests and what they need, as far as it is text."""
        new = replace(self.repository, folder=self.repository.folder / "new")
        found = {}
        for path, data in hidden_of(new).items():
            try:
                found[path] = data if isinstance(data, str) else data.decode()
            except UnicodeDecodeError:
                continue
        return found

    @cached_property
    def _imports(self) -> TestImports:
        return TestImports(self.tests, self.repository.import_roots)

    def tests_on(self, product: dict[str, str]) -> dict[str, str]:
        """Those test files that have to be changed to run where the product is this."""
        return self._imports.on(Product({**self.product, **product}, self.repository.import_roots))

    def _is_source(self, path: str) -> bool:
        return is_inside(path, product_of(self.repository)) and path.endswith(".py") and not is_test_code(path)


def open_release(workshop: Workshop) -> Release:
    new = load_repository(workshop.repository.folder / "new")
    return Release(workshop, new.version, read_texts(new.tree))
