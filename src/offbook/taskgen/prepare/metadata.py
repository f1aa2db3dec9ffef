"""What a repository says of itself: its name, its version and what it needs. setup.py is parsed, never run."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from offbook.taskgen.nouns import Unprepared

TEST_EXTRAS = frozenset({"test", "tests", "testing", "unittest", "unit", "pytest", "check"})
DEVELOPER_EXTRAS = frozenset({"dev", "develop", "development", "devel"})
# Tools that look at code or at test runs. No test imports them, and some would change how the tests run.
NOT_FOR_TESTS = re.compile(
    r"sphinx.*|furo|.*-sphinx|mypy|types-.*|black|ruff|flake8.*|pyflakes|pylint|isort|pyright|pre-commit|tox.*|nox|twine"
    r"|build|wheel|bump.*|codecov|coveralls|coverage|mkdocs.*|jaraco-packaging|rst-linker|safety|bandit|towncrier"
    r"|pytest-(cov|xdist|randomly|random-order|sugar|mypy.*|ruff|black.*|flake8|checkdocs|enabler|html|rerunfailures)"
)
REQUIREMENT_FILES = (
    *("requirements*test*.txt", "test*requirements*.txt", "tests/requirements*.txt", "test/requirements*.txt"),
    *("requirements/test*.txt", "requirements*dev*.txt", "dev*requirements*.txt", "requirements/dev*.txt"),
)


@dataclass(slots=True)
class Project:
    name: str
    version: str = ""
    requires_python: str = ""
    needs: list[str] = field(default_factory=list)  # what the package imports
    extras: dict[str, list[str]] = field(default_factory=dict)
    entry_points: str = ""  # the content of an entry_points.txt
    top_level: tuple[str, ...] = ()  # modules that it installs, where it says so
    version_file: str = ""  # a file with the version that building would write

    @property
    def test_needs(self) -> list[str]:
        """What its tests import besides: its test extras, or where it has none those for developers."""
        names = [name for name in self.extras if name in TEST_EXTRAS]
        names = names or [name for name in self.extras if name in DEVELOPER_EXTRAS]
        return list(dict.fromkeys(line for name in names for line in self._extra(name, frozenset())))

    def _extra(self, name: str, seen: frozenset[str]) -> Iterable[str]:
        for line in self.extras.get(name, []):
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) == canonicalize_name(self.name):
                for other in sorted({extra.lower() for extra in requirement.extras} - seen):
                    yield from self._extra(other, seen | {name})
            elif not NOT_FOR_TESTS.fullmatch(canonicalize_name(requirement.name)):
                yield line


def read_project(tree: Path, name: str, version: str) -> Project:
    """The metadata of a tree: what the index published first, then what the sources say. `name` and `version` stand
    in where nothing says better."""
    project = Project("", version)
    pyproject = _toml(tree / "pyproject.toml")
    published = [tree / "PKG-INFO", *tree.glob("*.egg-info/PKG-INFO"), *tree.glob("*/*.egg-info/PKG-INFO")]
    for file in (file for file in published if file.is_file()):
        _read_published(file.read_text(errors="replace"), project)
        break
    for folder in [*tree.glob("*.egg-info"), *tree.glob("*/*.egg-info")]:
        _read_egg_info(folder, project)
    _read_standard(pyproject, project)
    _read_poetry(_table(pyproject, "tool", "poetry"), project)
    _read_setup_cfg(tree / "setup.cfg", project)
    _read_setup_py(tree / "setup.py", project)
    for group, lines in _groups(_table(pyproject, "dependency-groups")).items():
        project.extras.setdefault(group, lines)
    project.name = project.name or name
    if not project.test_needs:
        project.extras["test"] = _requirement_files(tree) or _tox(tree / "tox.ini")
    project.version = project.version or "0"
    for keys, key in (
        (("tool", "setuptools_scm"), "write_to"),
        (("tool", "setuptools_scm"), "version_file"),
        (("tool", "hatch", "build", "hooks", "vcs"), "version-file"),
        (("tool", "pdm", "version"), "write_to"),
    ):
        project.version_file = project.version_file or str(_table(pyproject, *keys).get(key, ""))
    return project


def readable(lines: Iterable[Any]) -> list[str]:
    """The requirements among some lines that hold on this Python, without their markers."""
    kept = []
    for line in lines:
        try:
            requirement = Requirement(str(line).partition(" #")[0].strip())
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, UndefinedEnvironmentName):
            continue
        if applies and not requirement.url:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(errors="replace")) if path.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise Unprepared(f"its pyproject.toml cannot be read ({error})") from None


def _table(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    value: Any = data
    for key in keys:
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return value if isinstance(value, dict) else {}


def _read_published(text: str, project: Project) -> None:
    """PKG-INFO: requirements of extras are marked `extra == "name"`."""
    fields = HeaderParser().parsestr(text)
    project.name = fields.get("Name", "")
    project.version = fields.get("Version", "") or project.version
    project.requires_python = fields.get("Requires-Python", "")
    lines = fields.get_all("Requires-Dist", [])
    project.needs = readable(lines)
    for extra in fields.get_all("Provides-Extra", []):
        kept = []
        for line in lines:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            marker = requirement.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                requirement.marker = None
                kept.append(str(requirement))
        project.extras[extra.lower()] = kept


def _read_egg_info(folder: Path, project: Project) -> None:
    names = folder / "top_level.txt"
    if names.is_file() and not project.top_level:
        project.top_level = tuple(names.read_text(errors="replace").split())
    entry_points = folder / "entry_points.txt"
    if entry_points.is_file():
        project.entry_points = project.entry_points or entry_points.read_text(errors="replace")
    requires = folder / "requires.txt"
    if not requires.is_file() or project.needs or project.extras:
        return
    extra, marker = "", ""
    for line in requires.read_text(errors="replace").splitlines():
        if line.startswith("["):
            extra, _, marker = line.strip("[]").partition(":")
        elif line.strip():
            kept = readable([f"{line} ; {marker}" if marker else line])
            (project.extras.setdefault(extra.lower(), []) if extra else project.needs).extend(kept)


def _read_standard(pyproject: dict[str, Any], project: Project) -> None:
    table = _table(pyproject, "project")
    project.name = project.name or str(table.get("name", ""))
    project.version = project.version or str(table.get("version", ""))
    project.requires_python = project.requires_python or str(table.get("requires-python", ""))
    project.needs = project.needs or readable(table.get("dependencies", []))
    for extra, lines in _table(table, "optional-dependencies").items():
        project.extras.setdefault(extra.lower(), readable(lines))
    if not project.entry_points:
        groups = {"console_scripts": _table(table, "scripts"), **_table(table, "entry-points")}
        project.entry_points = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
            for group, lines in groups.items()
            if lines
        )


def _read_poetry(table: dict[str, Any], project: Project) -> None:
    project.name = project.name or str(table.get("name", ""))
    project.version = project.version or str(table.get("version", ""))
    # Poetry writes version ranges its own way; the newest versions are as good a guess as a translation.
    needs = [name for name, value in _table(table, "dependencies").items() if name != "python" and _is_plain(value)]
    project.needs = project.needs or readable(needs)
    groups = {name: _table(group, "dependencies") for name, group in _table(table, "group").items()}
    groups["dev"] = {**_table(table, "dev-dependencies"), **groups.get("dev", {})}
    for name, lines in groups.items():
        if lines:
            kept = [line for line, value in lines.items() if line != "python" and _is_plain(value)]
            project.extras.setdefault(name.lower(), readable(kept))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "version" in value and not value.get("optional"))


def _groups(table: dict[str, Any]) -> dict[str, list[str]]:
    """PEP 735. A group may include others."""

    def lines_of(name: str, seen: frozenset[str]) -> Iterable[str]:
        for line in table.get(name, []):
            if isinstance(line, str):
                yield line
            elif (other := _table({"": line}, "").get("include-group")) and other not in seen:
                yield from lines_of(other, seen | {other})

    return {name.lower(): readable(lines_of(name, frozenset({name}))) for name in table}


def _ini(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return configparser.ConfigParser(interpolation=None)
    return parser


def _read_setup_cfg(path: Path, project: Project) -> None:
    parser = _ini(path)
    project.name = project.name or parser.get("metadata", "name", fallback="")
    version = parser.get("metadata", "version", fallback="")
    if not version.startswith(("attr:", "file:")):
        project.version = project.version or version
    project.needs = project.needs or readable(parser.get("options", "install_requires", fallback="").splitlines())
    if parser.has_section("options.extras_require"):
        for extra, lines in parser.items("options.extras_require"):
            project.extras.setdefault(extra.lower(), readable(lines.splitlines()))
    if tests_require := parser.get("options", "tests_require", fallback=""):
        project.extras.setdefault("test", readable(tests_require.splitlines()))


def _read_setup_py(path: Path, project: Project) -> None:
    """The arguments of `setup(...)` that are plain literals."""
    try:
        module = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
    except (SyntaxError, ValueError):
        return
    values: dict[str, Any] = {}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        if (call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")) == "setup":
            for keyword in call.keywords:
                try:
                    values[keyword.arg or ""] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError):
                    continue
    project.name = project.name or str(values.get("name", ""))
    project.version = project.version or str(values.get("version", ""))
    project.needs = project.needs or readable(_lines(values.get("install_requires")))
    extras = values.get("extras_require")
    for extra, lines in {"test": values.get("tests_require"), **(extras if isinstance(extras, dict) else {})}.items():
        if lines:
            project.extras.setdefault(str(extra).lower(), readable(_lines(lines)))


def _lines(value: Any) -> list[str]:
    return value.splitlines() if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _requirement_files(tree: Path) -> list[str]:
    for pattern in REQUIREMENT_FILES:
        for path in sorted(tree.glob(pattern)):
            kept = readable(path.read_text(errors="replace").splitlines())
            kept = [line for line in kept if not NOT_FOR_TESTS.fullmatch(canonicalize_name(Requirement(line).name))]
            if kept:
                return kept
    return []


def _tox(path: Path) -> list[str]:
    return readable(_ini(path).get("testenv", "deps", fallback="").splitlines())
