"""A prepared repository, read once for all the tasks that are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from offbook.tasks.factory.audit.corpus import Corpus, Leak, given_away, standard_library
from offbook.tasks.factory.delete.symbols import Symbols, read_symbols
from offbook.tasks.factory.prepare.prepare import load_repository
from offbook.tasks.factory.prepare.tests import load_map
from offbook.tasks.factory.types import Deletion, Map, Repository


@dataclass(frozen=True)
class Workshop:
    repository: Repository
    map: Map
    files: dict[str, str]  # the tree, as far as it is text
    symbols: Symbols
    corpus: Corpus  # of the tree and the installed packages

    def leaks(self, deletion: Deletion, files: Mapping[str, str | None]) -> list[Leak]:
        """Where removed code can still be read: in the tree with these files, its packages, the standard library."""
        found = self.corpus.leaks(deletion.removed, files=files)
        found += standard_library(self.repository.folder).leaks(deletion.removed)
        return given_away(found, deletion.removed, deletion.targets, product_of(self.repository))


def open_workshop(folder: Path) -> Workshop:
    """Of what was prepared there."""
    repository = load_repository(folder)
    files = read_texts(repository.tree)
    symbols = read_symbols(
        {path: files[path] for path in repository.source_files if path in files}, repository.import_roots
    )
    standard_library(folder)  # now, or several candidates at a time would each read it
    corpus = Corpus({"tree": repository.tree, "deps": repository.deps})
    return Workshop(repository, load_map(folder / "map.json"), files, symbols, corpus)


def read_texts(tree: Path) -> dict[str, str]:
    """Path -> text of every file that is UTF-8. Bytes that are no text cannot be taken out of, and stay."""
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with suppress(UnicodeDecodeError):
                found[path.relative_to(tree).as_posix()] = path.read_bytes().decode()
    return found


def product_of(repository: Repository) -> tuple[str, ...]:
    """The packages and modules below the import roots."""
    (root,) = repository.import_roots
    inside = (PurePosixPath(path).relative_to(root).parts[0] for path in repository.source_files)
    return tuple(sorted({str(PurePosixPath(root, name)) for name in inside}))


def hidden_of(repository: Repository) -> dict[str, str | bytes]:
    """The tests and what they need, as the repository has them, with the file that `-c` names for pytest."""
    settings = {following for option, following in pairwise(repository.pytest_options) if option == "-c"}
    files = sorted({*repository.test_files, *repository.support_files, *settings})
    return {path: (repository.tree / path).read_bytes() for path in files if (repository.tree / path).is_file()}


def requirements_of(repository: Repository) -> tuple[str, ...]:
    """What is installed, with versions, for an image. Without the repository's own metadata."""
    own = canonicalize_name(repository.name)
    found = metadata.distributions(path=[str(repository.deps)])
    return tuple(sorted(f"{one.name}=={one.version}" for one in found if canonicalize_name(one.name) != own))
