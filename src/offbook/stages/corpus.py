"""The pretraining corpus: which repositories and files are taken, and in what order they are read.

What is left out is counted by reason: licences, near-duplicates, held-out repositories, files with the solution of an
evaluation task, unreadable files.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import tempfile
import tomllib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any

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
ANY = "any"
MAX_FILE_BYTES = 256 * 1024
LANGUAGES = {
    ".py": "python", ".pyi": "python", ".js": "javascript", ".ts": "typescript", ".go": "go", ".rs": "rust",
    ".java": "java", ".c": "c", ".h": "c", ".cpp": "cpp", ".hpp": "cpp", ".rb": "ruby", ".sh": "shell",
    ".md": "docs", ".rst": "docs", ".toml": "settings", ".cfg": "settings", ".yaml": "settings", ".yml": "settings",
}  # fmt: skip
PYTHON = (".py", ".pyi")
LICENCE_FILES = re.compile(r"(licen[cs]e|copying|unlicense)([.\-_].*)?", re.IGNORECASE)
NO_LICENCES = (".py", ".pyi", ".js", ".ts", ".json", ".svg", ".png", ".html")  # of that name: code, pictures, pages
POINTING = re.compile(rb"include::|\{include\}")  # a documentation page that includes the licence
PSF_CLAUSE = "previously distributed under the gnu general public license"  # in the PSF's licence, which is no GPL
RESTRICTED = "a restricted licence"
CLOSED = (  # restricted whatever else the text mentions
    r"business source licen[cs]e|\bbusl\b|functional source licen[cs]e|commons[ -]clause"
    r"|attribution[ -]non-?commercial|attribution[ -]no-?deriv|\bcc[ -]by[ -]n[cd]"
)
LIMITED = (  # copyleft licences contain such words, too
    r"non[ -]?commercial|not for commercial|commercial use (is|are) (prohibited|forbidden|not )"
    r"|(research|academic|evaluation) (use|purposes) only|\bhippocratic\b|used for good, not evil"
    r"|responsible ai licen[cs]e|\bopenrail|\bproprietary\b|\bconfidential\b|\bno copying\b"
    r"|may not (be )?(copied|copy)\b"
)
LICENCES = (  # by phrases that each contains; the first match counts, so stricter ones come first
    (RESTRICTED, CLOSED),
    ("AGPL", "affero general public license"),
    ("LGPL", "lesser general public license"),
    ("GPL", "gnu general public license"),
    ("MPL-2.0", "mozilla public license"),
    ("Unlicense", "this is free and unencumbered software"),
    (RESTRICTED, LIMITED),
    (
        "Apache-2.0",
        r"^\W*apache license|terms and conditions for use, reproduction|(licensed|released) under (the )?apache",
    ),
    ("MIT", "permission is hereby granted, free of charge"),
    ("BSD", "redistribution and use in source and binary forms"),
    ("ISC", "permission to use, copy, modify, and/or distribute"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("PSF-2.0", "python software foundation license"),
    ("Zlib", "this software is provided 'as-is', without any express or implied warranty"),
)
UNKNOWN = "an unknown licence"
LICENCE_ENTRY = re.compile(
    r'^license(?:-expression)?\s*[:=]\s*["{]?(?:text\s*=\s*")?([^"\n}]+)', re.IGNORECASE | re.MULTILINE
)
SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+() -]+)")
HEADER_CHARS = 2000  # the SPDX line is looked for in these
MAX_LINE_CHARS = 2000  # longer lines are generated or minified
MAX_NAMED = 20  # held-out repositories listed by name
MAX_COMPARED = 20  # candidates per file for near-duplicates: those with most shingles in common
VENDORED = {
    "vendor",
    "_vendor",
    "vendored",
    "_vendored",
    "third_party",
    "thirdparty",
    "extern",
    "externals",
    "packages",
}
METADATA_FILES = ("PKG-INFO", "METADATA", "pyproject.toml", "setup.cfg", "setup.py")
NAME_ENTRY = re.compile(r"""\bname["']?\s*[:=]\s*["']?([\w.-]+)""", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    path: str
    text: str
    domain: str  # its language, or tests

    @cached_property
    def imports(self) -> frozenset[str] | None:
        """Names of modules it may import; None for Python that does not parse."""
        if PurePosixPath(self.path).suffix not in PYTHON:
            return frozenset()
        try:
            tree = pycode.parse(self.text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        package = PurePosixPath(self.path).parent.parts
        return frozenset(name for node in ast.walk(tree) for name in _named(node, package))


@dataclass(frozen=True, slots=True)
class Repository:
    name: str
    licence: str
    files: list[File]  # in the order that they are read in


@dataclass(slots=True)
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
                trees: Iterable[tuple[str, dict[str, bytes]]] = _pocket(int(made[1]), int(made[2] or 1), seed)
            elif Path(source).is_dir():
                trees = [(Path(source).resolve().name, self._in_folder(Path(source)))]
            else:
                trees = [self._fetched(source)]
            for name, files in trees:
                if repository := self.select(name, files):
                    yield repository
        progress("reading", 1.0)

    def _fetched(self, source: str) -> tuple[str, dict[str, bytes]]:
        with tempfile.TemporaryDirectory(prefix="offbook-corpus-") as place:
            try:
                fetched = asyncio.run(fetch(source, Path(place)))
            except Unprepared as error:
                raise OffbookError(f"pretrain.data: {error}") from None
            return fetched.name, self._in_folder(fetched.tree)

    def _in_folder(self, folder: Path) -> dict[str, bytes]:
        """Read a folder's files without following links; huge files only up to the limit."""
        found: dict[str, bytes] = {}
        for place, folders, names in os.walk(folder):
            folders[:] = sorted(set(folders) - SKIPPED)
            links = [name for name in folders if (Path(place) / name).is_symlink()]
            for path in (Path(place) / name for name in sorted([*names, *links])):
                if path.is_symlink() or not path.is_file():
                    self.left_out["links and devices"] += 1
                    continue
                try:
                    with path.open("rb") as file:
                        found[path.relative_to(folder).as_posix()] = file.read(MAX_FILE_BYTES + 1)
                except OSError:
                    self.left_out["files that cannot be opened"] += 1
        return found

    def select(self, name: str, files: Mapping[str, bytes]) -> Repository | None:
        if not files:
            self.left_out["empty repositories"] += 1
            return None
        names = names_of(name, files)
        held_out = {repository_of(each) for each in (*self.settings.hold_out, *self.origins)} & set(names)
        if held_out:
            self._matched |= held_out
            where = names[min(held_out)]
            self.held_out.append(f"{name} ({where})" if where else name)
            self.left_out["repositories that are held out"] += 1
            return None
        licence = licence_of(files)
        if not self._is_free(licence):
            self.left_out[f"repositories under {licence or 'no licence'}"] += 1
            return None
        below, kept = licences_below(files), list[File]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns about other people's code
            for path, content in sorted(files.items()):
                file = File(path, content.decode("utf-8-sig", errors="replace"), domain_of(path))
                if reason := self._rejected(file, content, below):
                    self.left_out[reason] += 1
                else:
                    kept.append(file)
        if not kept:
            self.left_out["repositories without a file that is taken"] += 1
            return None
        return Repository(name, licence, in_order(kept))

    def _rejected(self, file: File, content: bytes, below: Mapping[str, str]) -> str:
        """Why a file is left out; empty if it is taken."""
        if not file.domain:
            return "files of other kinds"
        if len(content) > MAX_FILE_BYTES:
            return "huge files"
        if b"\0" in content:
            return "binary files"
        try:
            content.decode()
        except UnicodeDecodeError:
            return "files that are no UTF-8"
        if not file.text.strip():
            return "empty files"
        if max(map(len, file.text.splitlines())) > MAX_LINE_CHARS:
            return "generated or minified files"
        folders = map(str, PurePosixPath(file.path).parents)
        licences = [below[folder] for folder in folders if folder in below][:1]
        if own := SPDX.search(file.text, 0, HEADER_CHARS):
            licences = [_named_licence(one) for one in own[1].strip(" ()").split(" OR ")]
        if licences and not any(map(self._is_free, licences)):
            return f"files under {licences[0]}"
        if file.imports is None:
            return "Python files that do not parse"
        if self.sought is not None and self.sought.in_text(file.text):
            return "files with a solution that is measured on"
        return "near-duplicates" if self._is_duplicate(file) else ""

    def _is_free(self, licence: str) -> bool:
        return ANY in self.settings.licences or licence in self.settings.licences

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
        if found := self.held_out:
            more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
            yield f"held out: {', '.join(found[:MAX_NAMED])}{more}"
        if unmet := [each for each in self.settings.hold_out if repository_of(each) not in self._matched]:
            yield f"pretrain.hold_out: nothing that was read is {' or '.join(unmet)}"


def refuse_missing_sources(settings: PretrainConfig) -> None:
    if not settings.data:
        raise ConfigError(
            "there is nothing to pretrain on; give --data: a repository's folder, an archive, a git URL, pypi:NAME, or "
            "pocket-code:200"
        )
    for source in settings.data:
        is_far = "://" in source or source.startswith(("pypi:", "git@")) or POCKET_CODE.fullmatch(source)
        if not is_far and not Path(source).exists():
            raise ConfigError(
                f"there is no {source}; --data is a folder, an archive, a git URL, pypi:NAME or pocket-code:N[xM]"
            )


def domain_of(path: str) -> str:
    """Empty for files that are not trained on."""
    domain = LANGUAGES.get(PurePosixPath(path).suffix, "")
    return "tests" if domain not in ("", "docs", "settings") and is_test_file(path) else domain


def licence_of(files: Mapping[str, bytes]) -> str:
    """Name the licence by the text of its file, else by the metadata; empty where neither says anything."""
    texts = [content for path, content in sorted(files.items()) if "/" not in path and _is_licence(path)]
    if not texts:
        for path in ("PKG-INFO", "pyproject.toml", "setup.cfg"):
            metadata = files.get(path, b"").decode(errors="replace")
            if said := LICENCE_ENTRY.search(metadata):
                return _named_licence(said[1].strip())
        return ""
    found = list(map(_licence_in, texts))
    if found[0] == UNKNOWN and b"either" in texts[0]:  # a choice between the other files: the most permissive one
        return next((name for name, _ in reversed(LICENCES) if name in found), UNKNOWN)
    return found[0]


def licences_below(files: Mapping[str, bytes]) -> dict[str, str]:
    """Licences of folders with a licence file of their own, such as vendored code."""
    return {
        str(PurePosixPath(path).parent): _licence_in(content)
        for path, content in sorted(files.items(), reverse=True)
        if "/" in path and _is_licence(PurePosixPath(path).name) and not POINTING.search(content)
    }


def _is_licence(name: str) -> bool:
    return bool(LICENCE_FILES.fullmatch(name)) and not name.lower().endswith(NO_LICENCES)


def _licence_in(content: bytes) -> str:
    words = " ".join(content.decode(errors="replace").lower().split()).replace(PSF_CLAUSE, "")
    return next((name for name, phrase in LICENCES if re.search(phrase, words)), UNKNOWN)


def _named_licence(expression: str) -> str:
    """The licence of an SPDX expression or a common name: of `A AND B` the stricter; unknown ones are strictest."""
    if re.search(f"{CLOSED}|{LIMITED}", expression.lower()):
        return RESTRICTED
    names = [name for name, _ in LICENCES]
    strictest = len(names), ""
    for part in (part.strip(" ()'") for part in expression.split(" AND ")):
        matches = (
            (rank, name)
            for rank, name in enumerate(names)
            if re.match(rf"{name.lower().partition('-')[0]}(?![a-uw-z])", part.lower())  # a version may follow
        )
        strictest = min(strictest, next(matches, (-1, part)))
    return strictest[1]


def names_of(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """A repository's names, as the package index spells them, and the path where each was found first.

    By its folder, by metadata anywhere in it, and by its packages: so a clone under another name is recognized, and a
    repository that contains a copy. Left out: packages whose folder has another name, without metadata.
    """
    found = {repository_of(folder): ""}
    for path, content in sorted(files.items()):
        if PurePosixPath(path).name in METADATA_FILES:
            for name in _names_in(PurePosixPath(path).name, content.decode(errors="replace")):
                found.setdefault(repository_of(name), path)
    marked = {PurePosixPath(path).parent for path in files if PurePosixPath(path).name == "__init__.py"}
    packages = {
        str(one) for one in marked if one.parent not in marked and not is_test_file(f"{one}/__init__.py")
    }  # outermost packages, and whatever is vendored
    for parts in (PurePosixPath(path).parts for path in files if path.endswith(".py")):
        for depth, part in enumerate(parts[:-1], start=1):
            if part in VENDORED:
                packages.add(str(PurePosixPath(*parts[: depth + 1])))
    for package in sorted(packages):
        found.setdefault(repository_of(PurePosixPath(package).stem if package.endswith(".py") else package), package)
    return found


def _names_in(file: str, text: str) -> list[str]:
    """Names in a metadata file. Other formats than TOML may give too many, which only holds out more."""
    if file in ("PKG-INFO", "METADATA"):
        text = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    if file == "pyproject.toml":
        with contextlib.suppress(tomllib.TOMLDecodeError):
            read = tomllib.loads(text)
            tool = read.get("tool")
            sections: list[Any] = [read.get("project"), tool.get("poetry") if isinstance(tool, dict) else None]
            names = [section.get("name") for section in sections if isinstance(section, dict)]
            return [name for name in names if isinstance(name, str)]
    return NAME_ENTRY.findall(text)


def in_order(files: Sequence[File]) -> list[File]:
    """Docs first, then settings, then code with imported Python files first; tests last."""
    rank = {"docs": 0, "settings": 1, "tests": 3}
    ranked = sorted(files, key=lambda file: (rank.get(file.domain, 2), file.path))
    needs = _imports([file for file in ranked if file.path.endswith(".py")])
    by_path = {file.path: file for file in ranked}
    imported = {path: iter(sorted(needs.get(path, ()))) for path in by_path}
    placed: list[str] = []
    begun: set[str] = set()
    for path in by_path:
        above = [] if path in begun else [path]  # each is imported by the one before it; chains of any length
        begun.update(above)
        while above:
            needed = next((one for one in imported[above[-1]] if one not in begun), None)
            if needed is None:
                placed.append(above.pop())
            else:  # and of a circle the first comes first
                begun.add(needed)
                above.append(needed)
    return [by_path[path] for path in placed]


def _imports(files: Sequence[File]) -> dict[str, set[str]]:
    """Files of the same repository that each file imports."""
    modules: dict[str, str] = {}
    for file in files:
        parts = list(PurePosixPath(file.path).with_suffix("").parts)
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for start in range(min(2, len(parts))):  # `src/` and the like are not part of the name
            modules.setdefault(".".join(parts[start:]), file.path)
    return {
        file.path: {modules[name] for name in file.imports or () if name in modules} - {file.path} for file in files
    }


def _named(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


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
