"""A tree that holds source and nothing else: what tools leave behind remembers code that has been deleted since."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

VERSION_CONTROL = frozenset({".git", ".hg", ".svn", ".bzr", ".jj", "_darcs", ".fslckout", ".pijul"})
CACHES = frozenset(
    {
        *("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".nox", ".eggs", ".hypothesis"),
        *(".pytype", ".pyre", ".import_linter_cache", ".ropeproject", ".benchmarks", ".ipynb_checkpoints"),
        *("htmlcov", ".coverage", "coverage.xml", "coverage.json", "coverage.lcov", ".dmypy.json"),
        *(".idea", ".vscode", ".vs", ".fleet", ".DS_Store", "Thumbs.db", "GTAGS", "GRTAGS", "GPATH", "cscope.out"),
        *("pip-wheel-metadata", "__pypackages__", ".testmondata"),
    }
)
LEFTOVER = re.compile(
    r"""
    .*\.py[co]$ | .*\.py,cover$ | \.coverage\..* | .*\.(egg-info|dist-info|egg|egg-link)$
    | .*\.(orig|rej|bak|swp|swo|swn)$ | .*~$ | \#.*\#$ | \.\#.* | .*\.sublime-workspace$
    | .*\.(prof|pstats|lprof|profile)$ | core\.\d+$
    """,
    re.VERBOSE,
)
BUILD_OUTPUT = re.compile(r"(lib|lib\..*|bdist\..*|temp\..*|scripts-.*|html|doctrees|wheel)$")
ARCHIVE = re.compile(r"(?P<name>.+?)-\d[^/]*\.(whl|zip|tar|tar\.(gz|bz2|xz)|tgz)$")


def scrub(tree: Path, own_names: frozenset[str]) -> list[str]:
    """Remove what is not source and return what went, folders as one, relative to the tree.

    `own_names` are the names that the repository is imported and distributed by: a package of that name is never build
    output, and an archive of that name is a copy of the repository, while other archives may be test data.
    """
    plain = frozenset[str](map(canonicalize_name, own_names))
    removed = [path.relative_to(tree).as_posix() for path in _not_source(tree, tree, plain)]
    for name in removed:
        path = tree / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return sorted(removed)


def _not_source(folder: Path, tree: Path, own_names: frozenset[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            if _leaves(path, tree):
                yield path
        elif _is_leftover(path, own_names):
            yield path
        elif path.is_dir():
            yield from _not_source(path, tree, own_names)


def _leaves(link: Path, tree: Path) -> bool:
    """An absolute link leads back to this very folder from every copy of the tree, so it leaves too."""
    if os.path.isabs(os.readlink(link)):
        return True
    return not Path(os.path.realpath(link)).is_relative_to(tree.resolve())


def _is_leftover(path: Path, own_names: frozenset[str]) -> bool:
    name = path.name
    if name in VERSION_CONTROL or name in CACHES or LEFTOVER.match(name):
        return True
    if path.is_dir():
        return _is_build_folder(path, own_names) or (name == "CVS" and (path / "Entries").is_file())
    archive = ARCHIVE.match(name)
    if archive and canonicalize_name(archive["name"]) in own_names:
        return True
    return name.lower() in ("tags", ".tags") and path.read_bytes().startswith((b"!_TAG_", b"\x0c\n"))


def _is_build_folder(path: Path, own_names: frozenset[str]) -> bool:
    """By what is in it: `build` and `dist` are also names of packages and of folders with scripts."""
    if (path / "pyvenv.cfg").is_file():
        return True
    entries = list(path.iterdir())
    if path.name not in ("build", "_build", "dist") or path.name in own_names or (path / "__init__.py").exists():
        return False
    if path.name == "dist":
        return all(ARCHIVE.match(entry.name) or LEFTOVER.match(entry.name) for entry in entries)
    return any(entry.is_dir() and BUILD_OUTPUT.match(entry.name) for entry in entries)
