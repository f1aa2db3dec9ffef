"""What a repository is called: by its folder, by metadata anywhere in it, and by the packages that lie in it.

So a clone under any name is known, and so is what holds a copy: a repository of several packages, or one that carries
the code of others along. Left out: packages whose folder is called otherwise than they are, without metadata.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from offbook.tasks.contamination import repository_of
from offbook.types import is_test_file

CARRIED = {"vendor", "_vendor", "vendored", "_vendored", "third_party", "thirdparty", "extern", "externals", "packages"}
NAMED = re.compile(r"""\bname["']?\s*[:=]\s*["']?([\w.-]+)""", re.IGNORECASE)


def names_of(folder: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """Names as the package index spells them, and where each was found first."""
    found = {repository_of(folder): ""}
    for path, content in sorted(files.items()):
        if read := METADATA.get(PurePosixPath(path).name):
            for name in read(content.decode(errors="replace")):
                found.setdefault(repository_of(name), path)
    for path in sorted(_packages(files)):
        found.setdefault(repository_of(PurePosixPath(path).stem if path.endswith(".py") else path), path)
    return found


def _packages(files: Mapping[str, bytes]) -> Iterator[str]:
    """Those that are in no other one, but for tests, and whatever lies in a folder for the code of others."""
    marked = {str(PurePosixPath(path).parent) for path in files if PurePosixPath(path).name == "__init__.py"}
    for package in marked:
        if str(PurePosixPath(package).parent) not in marked and not is_test_file(f"{package}/__init__.py"):
            yield package
    for path in (PurePosixPath(path) for path in files if path.endswith(".py")):
        for depth, folder in enumerate(path.parts[:-1], start=1):
            if folder in CARRIED:
                yield str(PurePosixPath(*path.parts[: depth + 1]))


def _in_toml(text: str) -> list[str]:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return _in_any(text)
    tool = read.get("tool")
    sections: list[Any] = [read.get("project"), tool.get("poetry") if isinstance(tool, dict) else None]
    names = [section.get("name") for section in sections if isinstance(section, dict)]
    return [name for name in names if isinstance(name, str)]


def _in_settings(text: str) -> list[str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return _in_any(text)
    return [name for name in [parser.get("metadata", "name", fallback="")] if name]


def _in_header(text: str) -> list[str]:
    return re.findall(r"^Name:\s*(\S+)", re.split(r"\r?\n\r?\n", text, maxsplit=1)[0], re.IGNORECASE | re.MULTILINE)


def _in_any(text: str) -> list[str]:
    """Of a program, and of what cannot be read: rather one name too many."""
    return NAMED.findall(text)


METADATA: dict[str, Callable[[str], list[str]]] = {
    "PKG-INFO": _in_header,
    "METADATA": _in_header,
    "pyproject.toml": _in_toml,
    "setup.cfg": _in_settings,
    "setup.py": _in_any,
}
