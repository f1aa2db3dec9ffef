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
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
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
HEADING = re.compile(r"(?m)^\s*(#+ |={3,}|-{3,}|~{3,}|\^{3,}|\.\. |>>>|v?\d+\.\d+[\w.]*\b.{0,40}$)")
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

    workshop: Workshop  # of the older tree, with the newer one's tests and map
    new_version: str
    product: Mapping[str, str]  # the older source
    newer: Mapping[str, str]  # the newer source
    tests: Mapping[str, str]  # the newer tests and what they need, as far as it is text
    entries: Sequence[str]  # what the changelog has more, or the commit's message says; one text an item
    fallback: Sequence[str]  # what is asked where no entry fits: the first line of a commit's message

    @property
    def repository(self) -> Repository:
        return self.workshop.repository

    def tests_on(self, changed: Mapping[str, str]) -> dict[str, str]:
        """The newer tests that differ from the older tree's, as they can be collected with these files of the product:
        some import names that are not there yet."""
        roots = self.repository.import_roots
        lost = lost_names(self.newer, {**self.product, **changed}, roots)
        tests = {**self.tests, **runnable(self.tests, lost, roots)}
        return {path: text for path, text in tests.items() if text != self.workshop.files.get(path)}


def open_release(workshop: Workshop) -> Release:
    old = workshop.files
    new = load_repository(workshop.repository.folder / "new")
    new_files = read_texts(new.tree)
    message = json.loads((new.folder / "source.json").read_bytes()).get("message", "")
    entries = entries_of(message or message_between(old, new_files))
    inside = product_of(new)
    product = [path for path in old if path.endswith(".py") and is_inside(path, inside) and not is_test_code(path)]
    return Release(
        workshop,
        new.version,
        product={path: old[path] for path in product},
        newer={path: new_files[path] for path in new.source_files},
        tests={path: new_files[path] for path in hidden_of(new) if path in new_files},
        entries=entries,
        fallback=entries[:1] if message else [],
    )


def message_between(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The lines that the newer changelog has more."""
    known = {line for text in old.values() for line in text.split("\n") if line.strip()}
    found = []
    for path, text in sorted(new.items()):
        name = PurePosixPath(path)
        if name.suffix in ("", ".md", ".rst", ".txt") and CHANGELOG.fullmatch(name.name.partition(".")[0]):
            found += ["", *(line for line in text.split("\n") if line not in known)]
    return "\n".join(found)


def entries_of(message: str) -> list[str]:
    """Its items as sentences, without credits and links."""
    return [entry for entry in dict.fromkeys(map(_plain, _items(message))) if entry]


def _items(message: str) -> list[str]:
    """List items with the lines that go on under them, and paragraphs; no headings and no examples."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```", "", message)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*+•-]|\d+[.)]|#\d+:)\s)", text)
    return [" ".join(ITEM.sub("", part).split()) for part in parts if not HEADING.search(part)]


def _plain(item: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", item)  # Markdown's links, then reStructuredText's
    text = re.sub(r"`([^`]*?)\s*<[^>]*>`_+", r"\1", text)
    text = CREDITS.sub("", IN_BRACKETS.sub("", text))
    text = re.sub(r":\w+(?::\w+)?:`~?([^`<]*?)(?:\s*<[^`]*>)?`", r"`\1`", text).replace("``", "`").replace("**", "")
    text = re.sub(r"\(\s*\)|\[\s*\]", "", text)
    text = re.sub(r"\s+([.,;:)])", r"\1", " ".join(text.split())).strip(" -:,|*")
    return text if not text or text.endswith((".", "!", "?", ")")) else f"{text}."


def entries_for(entries: Sequence[str], names: Set[str], words: Set[str]) -> list[str]:
    """The entries that belong to a change: those that name what it touches; else those with most of its words.

    `names` are functions and classes that it adds or changes; `words` those of its tests.
    """
    scores: dict[str, int] = {}
    for entry in entries:
        marked = {*re.findall(r"[`.](\w+)", entry)}
        found = {*re.findall(r"\w+", entry)}
        named = [name for name in names & found if name in marked or not (name.isalpha() and name.islower())]
        score = 4 * len(named) + len(words & {word.lower() for word in found})
        if score >= 2:
            scores[entry] = score
    best = sorted(scores, key=lambda entry: -scores[entry])[:MOST_ENTRIES]
    return [entry for entry in scores if entry in best and 2 * scores[entry] >= scores[best[0]]]
