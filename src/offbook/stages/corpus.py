"""The pretraining corpus: which repositories and files are taken, and in what order they are read.

What is left out is counted by reason: licences, near-duplicates, held-out repositories, files with the solution of an
evaluation task, unreadable files.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from offbook.core import pycode
from offbook.core.config import ConfigError, PretrainConfig
from offbook.core.copies import SAME, Sketch, shared, sketch_of, sketch_of_words, tokens_of
from offbook.pocket.tasks import draft_tasks
from offbook.rl.models import Progress
from offbook.tasks.contamination import Sought, repository_of
from offbook.tasks.factory.prepare.source import SKIPPED, fetch
from offbook.tasks.factory.types import Unprepared
from offbook.types import OffbookError, is_test_file

POCKET_CODE = re.compile(r"pocket-code:([1-9]\d*)(?:x([1-9]\d*))?")
WAYS = "a repository's folder, an archive, a git URL, pypi:NAME, or pocket-code:200"
MAX_FILE_BYTES = 256 * 1024
PYTHON = (".py", ".pyi")
LICENCE_FILES = re.compile(  # by name; code, pictures and pages may be called so, too
    r"(?!.*\.(py|pyi|js|ts|json|svg|png|html)$)(licen[cs]e|copying|unlicense)([.\-_].*)?", re.IGNORECASE
)
PSF_CLAUSE = "previously distributed under the gnu general public license"  # in the PSF's licence, which is no GPL
DATA = tomllib.loads((Path(__file__).parent / "corpus.toml").read_text())
LANGUAGES: dict[str, str] = DATA["languages"]
LICENCES: list[tuple[str, str]] = DATA["licences"]
RESTRICTED = LICENCES[0][0]
UNKNOWN = "an unknown licence"
LICENCE_ENTRY = re.compile(
    r'^license(?:-expression)?\s*[:=]\s*["{]?(?:text\s*=\s*")?([^"\n}]+)', re.IGNORECASE | re.MULTILINE
)
SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+() -]+)")
HEADER_CHARS = 2000  # the SPDX line is looked for in these
MAX_LINE_CHARS = 2000  # longer lines are generated or minified
MAX_COMPARED = 20  # candidates per file for near-duplicates: those with most shingles in common
METADATA_FILES = ("PKG-INFO", "METADATA", "pyproject.toml", "setup.cfg", "setup.py")
NAME_ENTRY = re.compile(r"""\bname["']?\s*[:=]\s*["']?([\w.-]+)""", re.IGNORECASE)


@dataclass
class File:
    path: str
    text: str
    domain: str  # its language, or docs, settings, tests


@dataclass
class Repository:
    name: str
    licence: str
    files: list[File]  # in the order that they are read in


@dataclass
class Corpus:
    """Selects repositories and files, and counts what was left out by reason."""

    settings: PretrainConfig
    sought: Sought | None = None  # of the tasks that are measured on
    origins: frozenset[str] = frozenset()  # of these tasks
    left_out: Counter[str] = field(default_factory=Counter)
    held_out: list[str] = field(default_factory=list)  # repositories, and by which of their files
    _matched: set[str] = field(default_factory=set)  # held-out names that a repository had
    _sketches: list[Sketch] = field(default_factory=list)
    _index: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # hash -> numbers of sketches

    def repositories(self, seed: int, progress: Progress) -> Iterator[Repository]:
        sources = self.settings.data
        for number, source in enumerate(sources):
            progress(f"reading {source}", number / len(sources))
            if made := POCKET_CODE.fullmatch(source):
                trees = list(_pocket(int(made[1]), int(made[2] or 1), seed))
            elif Path(source).is_dir():
                trees = [(Path(source).resolve().name, self._in_folder(Path(source)))]
            else:
                with tempfile.TemporaryDirectory(prefix="offbook-corpus-") as place:
                    try:
                        fetched = asyncio.run(fetch(source, Path(place)))
                    except Unprepared as error:
                        raise OffbookError(f"pretrain.data: {error}") from None
                    trees = [(fetched.name, self._in_folder(fetched.tree))]
            for name, files in trees:
                if repository := self.select(name, files):
                    yield repository
        progress("reading", 1.0)

    def _in_folder(self, folder: Path) -> dict[str, bytes]:
        """Read a folder's files without following links; huge files only up to the limit."""
        found: dict[str, bytes] = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if SKIPPED & {*name.parts} or (path.is_dir() and not path.is_symlink()):
                continue
            if path.is_symlink() or not path.is_file():
                self.left_out["links and devices"] += 1
                continue
            try:
                with path.open("rb") as file:
                    found[name.as_posix()] = file.read(MAX_FILE_BYTES + 1)
            except OSError:
                self.left_out["files that cannot be opened"] += 1
        return found

    def select(self, name: str, files: Mapping[str, bytes]) -> Repository | None:
        if not files:
            self.left_out["empty repositories"] += 1
            return None
        names = names_of(name, files)
        kept_out = {repository_of(each) for each in (*self.settings.hold_out, *self.origins)} & names.keys()
        if kept_out:
            self._matched |= kept_out
            where = names[min(kept_out)]
            self.held_out.append(f"{name} ({where})" if where else name)
            self.left_out["repositories that are held out"] += 1
            return None
        licences = licences_in(files)
        licence = licences.get(".", "")
        if not self._is_free(licence):
            self.left_out[f"repositories under {licence or 'no licence'}"] += 1
            return None
        kept = list[File]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns about other people's code
            for path, content in sorted(files.items()):
                file = File(path, content.decode("utf-8-sig", errors="replace"), domain_of(path))
                if reason := self._rejected(file, content, licences):
                    self.left_out[reason] += 1
                else:
                    kept.append(file)
        if not kept:
            self.left_out["repositories without a file that is taken"] += 1
            return None
        return Repository(name, licence, in_order(kept))

    def _rejected(self, file: File, content: bytes, licences: Mapping[str, str]) -> str:
        """Why a file is left out; empty if it is taken."""
        if not file.domain:
            return "files of other kinds"
        if len(content) > MAX_FILE_BYTES:
            return "huge files"
        if b"\0" in content or "\ufffd" in file.text:
            return "binary files"
        if not file.text.strip():
            return "empty files"
        if max(map(len, file.text.splitlines())) > MAX_LINE_CHARS:
            return "generated or minified files"
        folders = map(str, PurePosixPath(file.path).parents)
        licence = next((licences[folder] for folder in folders if folder in licences), "")
        if own := SPDX.search(file.text, 0, HEADER_CHARS):
            licence = named_licence(own[1].strip(" ()"))
        if licence and not self._is_free(licence):
            return f"files under {licence}"
        if file.path.endswith(PYTHON):
            try:
                pycode.parse(file.text)
            except pycode.NO_PYTHON:
                return "Python files that do not parse"
        if self.sought is not None and self.sought.in_text(file.text):
            return "files with a solution that is measured on"
        return "near-duplicates" if self._is_duplicate(file) else ""

    def _is_free(self, licence: str) -> bool:
        return "any" in self.settings.licences or licence in self.settings.licences

    def _is_duplicate(self, file: File) -> bool:
        """Compare with the sketches of earlier files, and index this one if it is new."""
        is_python = PurePosixPath(file.path).suffix in PYTHON
        sketch = sketch_of([file.text]) if is_python else sketch_of_words([tokens_of(file.text)])
        near = Counter(place for number in sketch for place in self._index.get(number, ()))
        if any(shared(sketch, self._sketches[place]) >= SAME for place, _ in near.most_common(MAX_COMPARED)):
            return True
        for number in sketch:
            self._index[number].append(len(self._sketches))
        self._sketches.append(sketch)
        return False

    def about_held_out(self) -> Iterator[str]:
        """Lines for the log after reading: which repositories were held out, and which names matched none."""
        if self.held_out:
            yield f"held out: {', '.join(self.held_out)}"
        if unmet := [each for each in self.settings.hold_out if repository_of(each) not in self._matched]:
            yield f"pretrain.hold_out: nothing that was read is {' or '.join(unmet)}"


def refuse_missing_sources(settings: PretrainConfig) -> None:
    if not settings.data:
        raise ConfigError(f"there is nothing to pretrain on; give --data: {WAYS}")
    for source in settings.data:
        is_far = "://" in source or source.startswith(("pypi:", "git@")) or POCKET_CODE.fullmatch(source)
        if not is_far and not Path(source).exists():
            raise ConfigError(f"there is no {source}; --data is {WAYS}")


def domain_of(path: str) -> str:
    """Empty for files that are not trained on."""
    domain = LANGUAGES.get(PurePosixPath(path).suffix, "")
    return "tests" if domain not in ("", "docs", "settings") and is_test_file(path) else domain


def licences_in(files: Mapping[str, bytes]) -> dict[str, str]:
    """By folder, of the first licence file in it; of the whole repository also by its metadata."""
    found = {}
    for path, content in sorted(files.items(), reverse=True):
        if LICENCE_FILES.fullmatch(PurePosixPath(path).name):
            words = " ".join(content.decode(errors="replace").lower().split()).replace(PSF_CLAUSE, "")
            named = (name for name, phrase in LICENCES if re.search(phrase, words))
            found[str(PurePosixPath(path).parent)] = next(named, UNKNOWN)
    for path in ("PKG-INFO", "pyproject.toml", "setup.cfg"):
        if said := LICENCE_ENTRY.search(files.get(path, b"").decode(errors="replace")):
            found.setdefault(".", named_licence(said[1].strip()))
    return found


def named_licence(expression: str) -> str:
    """The strictest licence that an SPDX expression or a common name mentions; the expression if none is known."""
    said = expression.lower()
    for name, phrase in LICENCES:
        stem = name.lower().partition("-")[0]
        if re.search(phrase if name == RESTRICTED else rf"\b{stem}(?![a-uw-z])", said):
            return name
    return expression


def names_of(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """A repository's names, as the package index spells them, and the path where each was found first.

    By its folder, by metadata anywhere in it, and by its folders of Python files: so a clone under another name is
    recognized, and a repository that contains a copy. Too many names only hold out more.
    """
    found = {repository_of(folder): ""}
    for path, content in sorted(files.items()):
        if PurePosixPath(path).name in METADATA_FILES:
            for name in NAME_ENTRY.findall(content.decode(errors="replace")):
                found.setdefault(repository_of(name), path)
        if path.endswith(".py"):
            for name in PurePosixPath(path).parts[:-1]:
                found.setdefault(repository_of(name), path)
    return found


def in_order(files: Iterable[File]) -> list[File]:
    """Docs first, then settings, then code; tests last."""
    rank = {"docs": 0, "settings": 1, "tests": 3}
    return sorted(files, key=lambda file: (rank.get(file.domain, 2), file.path))


def _pocket(count: int, packages: int, seed: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Repositories that pocket tasks are made of, complete. They are ours, and under our licence.

    Each is about 1,000 tokens of pocket's; several of them in folders of one repository make longer windows.
    """
    drafts = draft_tasks(seed=seed + 7_000_003, count=10 * count * packages, split="train")
    made = (next(same).gold for _, same in groupby(drafts, key=lambda draft: draft.gold.name))
    for number in range(1, count + 1):
        several = list(islice(made, packages))
        files = {
            path if packages == 1 else f"{one.name}/{path}": text.encode()
            for one in several
            for path, text in one.files.items()
        }
        yield f"{several[0].name}-{number}", {"LICENSE": b"Apache License", **files}
