"""A tree that holds source and nothing else: what tools leave behind remembers code that has been deleted since."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.utils import canonicalize_name

_NAMES = tomllib.loads(Path(__file__).with_name("leftovers.toml").read_text())
VERSION_CONTROL = frozenset(_NAMES["version_control"])
CACHES = frozenset(_NAMES["caches"])
ARCHIVE = re.compile(r"(?P<name>.+?)-\d[^/]*\.(whl|zip|tar|tar\.(gz|bz2|xz)|tgz)$")


def scrub(tree: Path, own_names: frozenset[str]) -> list[str]:
    """Remove what is not source and return what went, folders as one, relative to the tree.

    `own_names` are the names that the repository is imported and distributed by: a package of that name is never build
    output, and an archive of that name is a copy of the repository, while other archives may be test data.
    """
    plain = frozenset[str](map(canonicalize_name, own_names))
    removed = []
    for path in list(_not_source(tree, tree, plain)):
        removed.append(path.relative_to(tree).as_posix())
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return sorted(removed)


def _not_source(folder: Path, tree: Path, own_names: frozenset[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            # An absolute link leads back to this very folder from every copy of the tree, so it goes too.
            is_inside = Path(os.path.realpath(path)).is_relative_to(tree.resolve())
            if os.path.isabs(os.readlink(path)) or not is_inside:
                yield path
        elif _is_leftover(path, own_names):
            yield path
        elif path.is_dir():
            yield from _not_source(path, tree, own_names)


def _is_leftover(path: Path, own_names: frozenset[str]) -> bool:
    name = path.name
    if _matches(name, "version_control", "caches", "leftovers") or (path / "pyvenv.cfg").is_file():
        return True
    if not path.is_dir():
        archive = ARCHIVE.match(name)
        return archive is not None and canonicalize_name(archive["name"]) in own_names
    # Build folders show by their content: `build` and `dist` are also names of packages and of folders with scripts.
    if name not in ("build", "_build", "dist") or name in own_names or (path / "__init__.py").exists():
        return False
    return any(_matches(entry.name, "build_output") for entry in path.iterdir())


def _matches(name: str, *kinds: str) -> bool:
    return any(fnmatchcase(name, pattern) for kind in kinds for pattern in _NAMES[kind])
