"""A prepared repository, read once for all the tasks that are made from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

from offbook.sandbox import hidden_in_boxes
from offbook.taskgen.audit import Corpus, Leak
from offbook.taskgen.delete.symbols import Symbols, read_symbols
from offbook.taskgen.nouns import Map, Repository

TOOLS = (
    *("read_file", "edit_file", "list_dir", "search_codebase", "run_command", "run_tests", "todo", "finish"),
)  # fmt: skip
TEST_COMMAND = "python -m pytest -q -p no:cacheprovider -o addopts="
LIBRARY = "python"  # how the standard library is called in a leak's path
REPEATED = 0.25  # of the removed lines, that the product may have elsewhere


@dataclass(frozen=True, slots=True)
class Workshop:
    repository: Repository
    map: Map
    files: dict[str, str]  # the tree, as far as it is text
    symbols: Symbols
    corpus: Corpus  # of the tree and the packages beside it

    def leaks(self, removed: Mapping[str, str], targets: Iterable[str], files: Mapping[str, str | None]) -> list[Leak]:
        """Where the removed code can still be read, in the tree with these files, its packages, or the library."""
        library = standard_library(self.repository.folder).leaks(removed)
        found = [*self.corpus.leaks(removed, files=files), *library]
        return given_away(found, removed, targets, product_of(self.repository))


def given_away(
    leaks: Sequence[Leak], removed: Mapping[str, str], targets: Iterable[str], product: Sequence[str]
) -> list[Leak]:
    """All leaks, unless they are no more than the product repeating itself: small parts of what was removed, no target
    among them, that other code of the product has as well. Whoever reads that code does what the task asks for."""
    wanted = {*targets}
    repeated_in_product = {leak.what for leak in leaks if _is_in(leak.path, product)}
    for leak in leaks:
        committed = leak.path.startswith("tree/.git!") and leak.what in repeated_in_product  # the same file once more
        if leak.what in wanted or not (committed or _is_in(leak.path, product)):
            return list(leaks)
    repeated = sum(len(removed[what].split("\n")) for what in {leak.what for leak in leaks})
    return [] if repeated <= REPEATED * sum(len(source.split("\n")) for source in removed.values()) else list(leaks)


def _is_in(path: str, product: Sequence[str]) -> bool:
    inside = path.removeprefix("tree/")
    return any(inside == place or inside.startswith(f"{place}/") for place in product)


def open_workshop(repository: Repository, map: Map) -> Workshop:
    files = read_texts(repository.tree)
    symbols = read_symbols(
        {path: files[path] for path in repository.source_files if path in files}, repository.import_roots
    )
    standard_library(repository.folder)  # now, or several candidates at a time would each read it
    return Workshop(repository, map, files, symbols, Corpus({"tree": repository.tree, "deps": repository.deps}))


def read_texts(tree: Path) -> dict[str, str]:
    """Path -> text of every file that is UTF-8. Bytes that are no text cannot be taken out of, and stay."""
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            try:
                found[path.relative_to(tree).as_posix()] = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
    return found


def standard_library(environment: Path) -> Corpus:
    base = os.path.realpath(environment / "python" / "bin" / "python")
    (library,) = (environment / "python" / "lib").iterdir()
    return _library_corpus(Path(base).parent.parent / "lib" / library.name, tuple(hidden_in_boxes(environment)))


@cache
def _library_corpus(folder: Path, hidden: tuple[Path, ...]) -> Corpus:
    return Corpus({LIBRARY: folder}, leave_out=hidden)


def product_of(repository: Repository) -> tuple[str, ...]:
    """The packages and modules below the import roots."""
    found = set()
    for path in repository.source_files:
        root = next((root for root in repository.import_roots if root != "." and path.startswith(f"{root}/")), "")
        inside = PurePosixPath(path).relative_to(root) if root else PurePosixPath(path)
        found.add(str(PurePosixPath(root, inside.parts[0])))
    return tuple(sorted(found))


def settings_file(repository: Repository) -> tuple[str, ...]:
    """The file that pytest takes its settings from, as `-c` names it."""
    options = repository.pytest_options
    named = [following for option, following in pairwise(options) if option == "-c"]
    return tuple(path for path in named if (repository.tree / path).is_file())


def hidden_of(repository: Repository) -> dict[str, str | bytes]:
    """The tests and what they need, as the repository has them."""
    paths = {*repository.test_files, *repository.support_files, *settings_file(repository)}
    return {path: (repository.tree / path).read_bytes() for path in sorted(paths)}


def requirements_of(repository: Repository) -> tuple[str, ...]:
    """What is installed, with versions, for an image. Without the repository's own metadata."""
    found = []
    for folder in sorted(repository.deps.glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if name.lower().replace("_", "-") != repository.name.lower().replace("_", "-"):
            found.append(f"{name}=={version}")
    return tuple(found)
