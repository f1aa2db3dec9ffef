"""Repositories to pretrain on: which of them and which of their files are taken, and in what order they are read.

What is not taken is counted by its reason and said. Files that nearly repeat another one are left out, and so are those
that hold the solution of a task that is measured on.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from offbook.core import pycode
from offbook.core.config import ConfigError, PretrainConfig
from offbook.core.copies import SAME, Sketch, shared, sketch_of, sketch_of_words, tokens_of
from offbook.pocket.tasks import draft_tasks
from offbook.rl.models import Progress
from offbook.stages.names import names_of
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
POINTING = re.compile(r"include::|\{include\}")  # a page of documentation, which shows the licence and is none
OLD_PYTHON = "previously distributed under the gnu general public license"  # a clause of the PSF's own, and no GPL
BOTH = re.compile(r"commercial (or|and) non-?commercial|non-?commercial (or|and) commercial")  # who may do either
CLOSED = (  # whatever else their texts mention
    ("BUSL", r"business source licen[cs]e|\bbusl\b|functional source licen[cs]e"),
    ("Commons Clause", r"commons[ -]clause"),
    ("CC-BY-NC", r"attribution[ -]non-?commercial|\bcc[ -]by[ -]nc"),
    ("CC-BY-ND", r"attribution[ -]no-?deriv|\bcc[ -]by[ -]nd"),
)
LIMITED = (  # words that copyleft licences have as well
    (
        "a non-commercial licence",
        r"non[ -]?commercial|not for commercial|commercial use (is|are) (prohibited|forbidden|not )"
        r"|(research|academic|evaluation) (use|purposes) only",
    ),
    ("a licence for some uses", r"\bhippocratic\b|used for good, not evil|responsible ai licen[cs]e|\bopenrail"),
    ("a proprietary licence", r"\bproprietary\b|\bconfidential\b|\bno copying\b|may not (be )?(copied|copy)\b"),
)
LICENCES = (  # by words that each of them has; the first that fits, so that stricter ones come first
    *CLOSED,
    ("AGPL", "affero general public license"),
    ("LGPL", "lesser general public license"),
    ("GPL", "gnu general public license"),
    ("MPL-2.0", "mozilla public license"),
    *LIMITED,
    (
        "Apache-2.0",
        r"^\W*apache license|terms and conditions for use, reproduction|(licensed|released) under (the )?apache",
    ),
    ("MIT", "permission is hereby granted, free of charge"),
    ("BSD", "redistribution and use in source and binary forms"),
    ("ISC", "permission to use, copy, modify, and/or distribute"),
    ("Unlicense", "this is free and unencumbered software"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("PSF-2.0", "python software foundation license"),
    ("Zlib", "this software is provided 'as-is', without any express or implied warranty"),
)
UNKNOWN = "an unknown licence"
SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+() -]+)")
HEADER = 2000  # characters of a file, in which that stands
LONGEST_LINE = 2000  # characters: nobody wrote that by hand
MOST_TOLD = 20  # repositories by name
MOST_NEAR = 20  # files that are compared with one: those that have most in common


@dataclass(frozen=True)
class File:
    path: str
    text: str
    domain: str  # its language, or tests

    @cached_property
    def imports(self) -> frozenset[str] | None:
        """Names of all modules that it may import; None where it is Python that does not parse."""
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
    """What is taken of sources, and how much was not, by reason."""

    settings: PretrainConfig
    sought: Sought | None = None  # of the tasks that are measured on
    origins: frozenset[str] = frozenset()  # of these tasks
    left_out: Counter[str] = field(default_factory=Counter)
    held_out: list[str] = field(default_factory=list)  # repositories, and by which of their files
    _met: set[str] = field(default_factory=set)  # names that held something out
    _sketches: list[Sketch] = field(default_factory=list)
    _having: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # hash -> sketches

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
                if repository := self.taken(name, files):
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
        """Read where it lies, whatever else lies there: no link is followed, and of a huge file the start will do."""
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

    def taken(self, name: str, files: Mapping[str, bytes]) -> Repository | None:
        if not files:
            self.left_out["empty repositories"] += 1
            return None
        licence = licence_of(files)
        if self._is_held_out(name, files):
            self.left_out["repositories that are held out"] += 1
            return None
        if not self._is_free(licence):
            self.left_out[f"repositories under {licence or 'no licence'}"] += 1
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of others' code
            kept = in_order(list(self._files(files)))
        if not kept:
            self.left_out["repositories without a file that is taken"] += 1
            return None
        return Repository(name, licence, kept)

    def _files(self, files: Mapping[str, bytes]) -> Iterator[File]:
        below = licences_below(files)
        for path, content in sorted(files.items()):
            text, why = self._readable(content)
            file = File(path, text, domain_of(path))
            why = why if file.domain else "files of other kinds"
            why = why or self._bound(path, text, below)
            why = why or ("Python files that do not parse" if file.imports is None else self._known(file))
            if why:
                self.left_out[why] += 1
            else:
                yield file

    def _is_held_out(self, name: str, files: Mapping[str, bytes]) -> bool:
        names = names_of(name, files)
        known = {repository_of(each) for each in (*self.settings.hold_out, *self.origins)} & set(names)
        self._met |= known
        self.held_out += [f"{name} ({names[one]})" if names[one] else name for one in sorted(known)[:1]]
        return bool(known)

    def about_held_out(self) -> Iterator[str]:
        """For people, when all is read: which repositories were held out, and which names were of none."""
        if found := self.held_out:
            more = f" and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
            yield f"held out: {', '.join(found[:MOST_TOLD])}{more}"
        if unmet := [each for each in self.settings.hold_out if repository_of(each) not in self._met]:
            yield f"pretrain.hold_out: nothing that was read is {' or '.join(unmet)}"

    def _is_free(self, licence: str) -> bool:
        return ANY in self.settings.licences or licence in self.settings.licences

    def _bound(self, path: str, text: str, below: Mapping[str, str]) -> str:
        """Why a file is not taken though its repository is: what it says of itself, or the licence of its folder."""
        folders = map(str, PurePosixPath(path).parents)
        licences = [below[folder] for folder in folders if folder in below][:1]
        if said := SPDX.search(text, 0, HEADER):
            licences = [_named_licence(one) for one in said[1].strip(" ()").split(" OR ")]
        if not licences or any(map(self._is_free, licences)):
            return ""
        return f"files under {licences[0]}"

    def _readable(self, content: bytes) -> tuple[str, str]:
        """The text, or why it is not taken."""
        if len(content) > MAX_FILE_BYTES:
            return "", "huge files"
        if b"\0" in content:
            return "", "binary files"
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return "", "files that are no UTF-8"
        if not text.strip():
            return "", "empty files"
        if max(map(len, text.splitlines())) > LONGEST_LINE:
            return "", "files that nobody wrote"
        return text, ""

    def _known(self, file: File) -> str:
        if self.sought is not None and self.sought.in_text(file.text):
            return "files with a solution that is measured on"
        is_python = PurePosixPath(file.path).suffix in PYTHON
        sketch = sketch_of([file.text]) if is_python else sketch_of_words([tokens_of(file.text)])
        near = Counter(place for number in sketch for place in self._having.get(number, ()))
        if any(shared(sketch, self._sketches[place]) >= SAME for place, _ in near.most_common(MOST_NEAR)):
            return "near-duplicates"
        for number in sketch:
            self._having[number].append(len(self._sketches))
        self._sketches.append(sketch)
        return ""


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
    """Empty where files of this kind are not learned from."""
    domain = LANGUAGES.get(PurePosixPath(path).suffix, "")
    return "tests" if domain not in ("", "docs", "settings") and is_test_file(path) else domain


def licence_of(files: Mapping[str, bytes]) -> str:
    """By the words of its licence file or, without one, by what its metadata say; empty where neither says anything."""
    texts = [content for path, content in sorted(files.items()) if "/" not in path and _is_licence(path)]
    if not texts:
        return _named_licence(_said(files, "license(?:-expression)?"))
    found = list(map(_licence_in, texts))
    if found[0] == UNKNOWN and b"either" in texts[0]:  # of the files beside it, so the one that asks for least
        return next((name for name, _ in reversed(LICENCES) if name in found), UNKNOWN)
    return found[0]


def licences_below(files: Mapping[str, bytes]) -> dict[str, str]:
    """Of folders that have a licence of their own, such as copies of others' code."""
    found = {PurePosixPath(path): content for path, content in sorted(files.items(), reverse=True) if "/" in path}
    texts = {path: content.decode(errors="replace") for path, content in found.items() if _is_licence(path.name)}
    return {str(path.parent): _licence_in(found[path]) for path, text in texts.items() if not POINTING.search(text)}


def _is_licence(name: str) -> bool:
    return bool(LICENCE_FILES.fullmatch(name)) and not name.lower().endswith(NO_LICENCES)


def _licence_in(content: bytes) -> str:
    words = BOTH.sub("", " ".join(content.decode(errors="replace").lower().split()).replace(OLD_PYTHON, ""))
    return next((name for name, phrase in LICENCES if re.search(phrase, words)), UNKNOWN)


def _named_licence(told: str) -> str:
    """Of `A AND B` the stricter one, and what is not known is stricter than all."""
    names = [one[0] for one in LICENCES if one not in (*CLOSED, *LIMITED)]
    if closed := [name for name, phrase in (*CLOSED, *LIMITED) if re.search(phrase, told.lower())]:
        return closed[0]

    def named(part: str) -> str:
        """By its first word, behind which a version may stand."""
        words = ((name, name.lower().partition("-")[0]) for name in names)
        return next((name for name, word in words if re.match(rf"{word}(?![a-uw-z])", part.lower())), part)

    parts = [named(part.strip(" ()'")) for part in told.split(" AND ")]
    return min(parts, key=lambda name: names.index(name) if name in names else -1)


def _said(files: Mapping[str, bytes], key: str) -> str:
    """By a repository's metadata."""
    for path in ("PKG-INFO", "pyproject.toml", "setup.cfg"):
        said = re.search(rf'^{key}\s*[:=]\s*["{{]?(?:text\s*=\s*")?([^"\n}}]+)',
                         files.get(path, b"").decode(errors="replace"), re.IGNORECASE | re.MULTILINE)  # fmt: skip
        if said:
            return said[1].strip()
    return ""


def in_order(files: Sequence[File]) -> list[File]:
    """Words first, then settings, then code: of Python a file after those that it imports; tests come last."""
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
    """Which files of the same repository each imports; of what cannot be parsed none."""
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
    made = (next(same).gold for _, same in groupby(drafts, key=lambda draft: draft.repository))
    for number in range(1, count + 1):
        several = list(islice(made, packages))
        files = {
            path if packages == 1 else f"{one.name}/{path}": text.encode()
            for one in several
            for path, text in one.files.items()
        }
        yield f"{several[0].name}-{number}", {"LICENSE": b"Apache License", **files}
