"""Two trees and a message, made ready: two releases of a package with its changelog, or a commit with its parent.

    release:NAME==OLD..NEW      two source distributions
    release:OLD..NEW            two archives or folders
    commit:URL@REF              a commit of a git repository and its first parent

folder/new/         the newer tree, prepared like any repository, with its map
folder/old/         the older source, until it is folder/tree
folder/tree/        the older source: what agents see
folder/repository.json, map.json    written last; deps/, python/ and modules/ are the newer one's by then
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.symbols import lost_names
from offbook.tasks.factory.delete.visible import runnable
from offbook.tasks.factory.prepare.dependencies import find_interpreter
from offbook.tasks.factory.prepare.prepare import (
    PrepareSettings,
    Progress,
    clear,
    fetch_project,
    load_repository,
    prepare,
    save_repository,
)
from offbook.tasks.factory.prepare.tests import map_tests
from offbook.tasks.factory.types import Repository, Unprepared, is_inside, is_test_code
from offbook.tasks.factory.workshop import Workshop, hidden_of, product_of, read_texts

MOST_ENTRIES = 3  # that a request names
CHANGELOG = re.compile(r"(changes|changelog|history|news|release[-_]?notes|releases|whats[-_ ]?new)", re.I)
ITEM = re.compile(r"^\s*(?:[*+•-]|\d+[.)]|#\d+:)\s+")
HEADING = re.compile(r"^\s*(#+ |={3,}|-{3,}|~{3,}|\^{3,}|\.\. |v?\d+\.\d+[\w.]*\b.{0,40}$)")
# Where it was discussed and who did it: nothing that the agent could look up.
IN_BRACKETS = re.compile(
    r"\s*[(\[][^()\[\]]*(?:#\d|\bgh-\d|@\w|https?:|\bthanks\b|\b(?:issue|PR|by)\b)[^()\[\]]*[)\]]", re.I
)
CREDITS = re.compile(
    r":(?:issue|pr|pull|user|gh|bug):`[^`]*`|https?://\S+|(?:\bgh-|#)\d+|(?<![`\w])@[\w-]+|\b\S+-by:.*", re.I
)


def is_release(source: str) -> bool:
    return source.startswith(("release:", "commit:"))


def pair_of(source: str) -> tuple[str, str]:
    """The older and the newer source, as `prepare.source.fetch` takes them."""
    kind, _, rest = source.partition(":")
    if kind == "commit":
        newer = rest if "@" in rest.rpartition("/")[2] else f"{rest}@HEAD"
        return f"{newer}^", newer
    if match := re.fullmatch(r"([A-Za-z0-9][\w.-]*)==(\d[\w.!+]*?)\.\.(\d[\w.!+]*)", rest):
        name = canonicalize_name(match[1])
        return f"pypi:{name}=={match[2]}", f"pypi:{name}=={match[3]}"
    for dots in re.finditer(r"(?=\.\.)", rest):  # paths may have dots of their own
        old = rest[: dots.start()]
        new = rest[dots.start() + 2 :]
        if os.path.exists(old) and os.path.exists(new):
            return os.path.realpath(old), os.path.realpath(new)
    raise Unprepared(f"{source} is neither release:NAME==OLD..NEW nor two files as release:OLD..NEW")


async def prepare_release(
    source: str, folder: Path, spec: SandboxSpec, progress: Progress, settings: PrepareSettings
) -> Repository:
    """After Unprepared nothing is left but folder/prepare.log."""
    folder = folder.resolve()
    if (folder / "repository.json").is_file():
        return load_repository(folder)
    try:
        older, newer = pair_of(source)
        new = await prepare(newer, folder / "new", spec, progress, settings)
        progress(f"{new.name}: finding out which test enters which function")
        await map_tests(new, spec)
        python = await find_interpreter(settings.python)
        old = await fetch_project(older, folder / "old", settings, python, progress)
        if canonicalize_name(old.name) != canonicalize_name(new.name):
            raise Unprepared(f"{old.name} and {new.name} are not two releases of one package")
        if not any((folder / "old" / "tree" / path).exists() for path in product_of(new)):
            raise Unprepared(f"{new.name} {old.version} has its source in another folder than {new.version}")
        if old.version == new.version and source.startswith("release:"):
            raise Unprepared(f"both releases of {new.name} are {new.version}")
    except Unprepared:
        if (folder / "new" / "prepare.log").is_file():
            (folder / "new" / "prepare.log").replace(folder / "prepare.log")
        clear(folder)
        raise
    await asyncio.to_thread(_put_together, folder, new, old.version)
    repository = replace(new, folder=folder, version=old.version)
    save_repository(repository)
    shutil.rmtree(folder / "old")
    return repository


def _put_together(folder: Path, new: Repository, version: str) -> None:
    """The newer tree stays in folder/new, which no sandbox sees."""
    for name in ("deps", "python", "modules"):
        if (new.folder / name).exists() and not (folder / name).exists():
            (new.folder / name).rename(folder / name)
    shutil.rmtree(folder / "tree", ignore_errors=True)
    shutil.copytree(folder / "old" / "tree", folder / "tree", symlinks=True)
    shutil.copyfile(new.folder / "map.json", folder / "map.json")
    own = canonicalize_name(new.name).replace("-", "_")
    for metadata in (folder / "deps").glob(f"{own}-*.dist-info"):  # its version is the older one's now
        text = (metadata / "METADATA").read_text()
        (metadata / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", text))
        metadata.rename(metadata.with_name(f"{own}-{version}.dist-info"))


@dataclass(frozen=True)
class Release:
    """Two trees and the message that goes with the step from one to the other."""

    workshop: Workshop  # of the older one, with the newer one's tests and map
    new_version: str
    new_files: dict[str, str]
    message: str = ""  # of a commit

    @property
    def repository(self) -> Repository:
        return self.workshop.repository

    @property
    def old_files(self) -> dict[str, str]:
        return self.workshop.files

    @cached_property
    def product(self) -> dict[str, str]:
        """The older source."""
        inside = product_of(self.repository)
        sources = (path for path in self.old_files if path.endswith(".py") and is_inside(path, inside))
        return {path: self.old_files[path] for path in sources if not is_test_code(path)}

    @cached_property
    def newer(self) -> dict[str, str]:
        """The newer source."""
        return {path: self.new_files[path] for path in self.repository.source_files}

    @cached_property
    def tests(self) -> dict[str, str]:
        """The newer tests and what they need, as far as it is text."""
        hidden = hidden_of(replace(self.repository, folder=self.repository.folder / "new"))
        return {path: self.new_files[path] for path in hidden if path in self.new_files}

    @cached_property
    def entries(self) -> list[str]:
        """What the changelog has more, or the commit's message says; one text an item."""
        if self.message:
            return list(filter(None, map(_plain, _items(self.message))))
        return entries_between(self.old_files, self.new_files, self.repository.version)

    def tests_on(self, product: Mapping[str, str]) -> dict[str, str]:
        """The test files that import names which this product lacks, as they can be collected all the same."""
        roots = self.repository.import_roots
        return runnable(self.tests, lost_names(self.newer, {**self.product, **product}, roots), roots)


def open_release(workshop: Workshop) -> Release:
    new = load_repository(workshop.repository.folder / "new")
    message = json.loads((new.folder / "source.json").read_bytes()).get("message", "")
    return Release(workshop, new.version, read_texts(new.tree), message)


def entries_between(old: Mapping[str, str], new: Mapping[str, str], version: str = "") -> list[str]:
    """The entries that the newer changelog has more, as sentences without credits and links. `version` is the older."""
    found: list[str] = []
    for path in sorted(new, key=lambda path: (path.count("/"), path)):
        name = PurePosixPath(path)
        if name.suffix not in ("", ".md", ".rst", ".txt") or not CHANGELOG.fullmatch(name.name.partition(".")[0]):
            continue
        text = new[path]
        known = {*_items(old.get(path, ""))}
        heading = re.compile(rf"^[^\w\n]*(?:version |release |v)?{re.escape(version)}(?![\w.]*\d)", re.I | re.M)
        if version and not known and (match := heading.search(text)):  # the older one brings no changelog
            text = text[: match.start()]
        entries = (_plain(item) for item in _items(text) if item not in known)
        found += [entry for entry in dict.fromkeys(entries) if len(entry) > 15 and entry not in found]
    return found


def _items(text: str) -> list[str]:
    """List items with the lines that go on under them, and paragraphs; no headings and no examples."""
    found: list[list[str]] = []
    going = code = False
    for line in text.split("\n"):
        code ^= line.lstrip().startswith("```")
        if code or not line.strip() or HEADING.match(line) or line.lstrip().startswith((">>>", "...", "```")):
            going = False
            continue
        if ITEM.match(line) or not going:
            found.append([])
        found[-1].append(ITEM.sub("", line).strip())
        going = True
    return [" ".join(item) for item in found]


def _plain(item: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", item)  # Markdown's links, then reStructuredText's
    text = re.sub(r"`([^`]*?)\s*<[^>]*>`_+", r"\1", text)
    text = CREDITS.sub("", IN_BRACKETS.sub("", text))
    text = re.sub(r":\w+(?::\w+)?:`~?([^`<]*?)(?:\s*<[^`]*>)?`", r"`\1`", text).replace("``", "`").replace("**", "")
    text = re.sub(r"\(\s*\)|\[\s*\]", "", text)
    text = re.sub(r"\s+([.,;:)])", r"\1", " ".join(text.split())).strip(" -:,|*")
    return text if not text or text.endswith((".", "!", "?", ")")) else f"{text}."


def entries_for(entries: Sequence[str], names: Set[str], words: Collection[str]) -> list[str]:
    """The entries that belong to a change: those that name what it touches; else the one with most of its words.

    `names` are functions, classes and parameters that it adds or changes; `words` those of its tests.
    """
    scored = []
    for number, entry in enumerate(entries):
        found = {*re.findall(r"\w+", entry)}
        marked = {*re.findall(r"[`.](\w+)", entry)}
        named = [name for name in names & found if name in marked or not (name.isalpha() and name.islower())]
        shared = {word.lower() for word in found} & {*words}
        if named or len(shared) >= 2:
            scored.append((-4 * len(named) - len(shared), number))
    best = sorted(scored)[:MOST_ENTRIES]
    return [entries[number] for score, number in sorted(best, key=lambda one: one[1]) if 2 * score <= best[0][0]]
