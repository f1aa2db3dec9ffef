"""What a repository says of itself: its name, its version and what it needs. setup.py is parsed, never run."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, is_normalized_name
from packaging.version import InvalidVersion, Version

from offbook.tasks.factory.types import Unprepared
from offbook.tasks.unpack import BadArchive, beneath

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
# Every form of metadata comes down to `readable`, and only that asks which interpreter it is for.
_MARKERS: ContextVar[Mapping[str, str]] = ContextVar("markers")
VERSION_FILES = (
    (("tool", "setuptools_scm"), "write_to"),
    (("tool", "setuptools_scm"), "version_file"),
    (("tool", "hatch", "build", "hooks", "vcs"), "version-file"),
    (("tool", "pdm", "version"), "write_to"),
)


@dataclass(slots=True)
class Project:
    name: str = ""
    version: str = ""
    requires_python: str = ""
    needs: list[str] = field(default_factory=list)  # what the package imports
    extras: dict[str, list[str]] = field(default_factory=dict)
    entry_points: str = ""  # the content of an entry_points.txt
    top_level: tuple[str, ...] = ()  # modules that it installs, where it says so
    version_file: str = ""  # a file with the version that building would write

    def fill(self, other: Project) -> None:
        """What `other` says counts where nothing was said before."""
        extras = other.extras | self.extras
        for said in fields(self):
            setattr(self, said.name, getattr(self, said.name) or getattr(other, said.name))
        self.extras = extras

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


def read_project(tree: Path, name: str, version: str, markers: Mapping[str, str] | None = None) -> Project:
    """The metadata of a tree: what the index published first, then what the sources say. `name` and `version` stand
    in where nothing says better. `markers` is the environment of another interpreter than ours."""
    token = _MARKERS.set(markers or {})
    try:
        return _read_project(tree, name, version)
    finally:
        _MARKERS.reset(token)


def _read_project(tree: Path, name: str, version: str) -> Project:
    pyproject = read_toml(tree / "pyproject.toml")
    project = Project()
    for other in (
        *map(_published, (tree, *tree.glob("*.egg-info"), *tree.glob("*/*.egg-info"))),
        Project(version=version),
        _standard(table_of(pyproject, "project")),
        _poetry(table_of(pyproject, "tool", "poetry")),
        _setup_cfg(_ini(tree / "setup.cfg")),
        _setup_py(tree / "setup.py"),
        Project(name, "0", extras=_groups(table_of(pyproject, "dependency-groups"))),
    ):
        project.fill(other)
    if not project.test_needs:
        in_tox = _ini(tree / "tox.ini").get("testenv", "deps", fallback="")
        project.extras["test"] = _requirement_files(tree) or readable(in_tox.splitlines())
    files = (str(table_of(pyproject, *keys).get(key, "")) for keys, key in VERSION_FILES)
    project.version_file = next(filter(None, files), "")
    _refuse_odd(project, tree)
    return project


def _refuse_odd(project: Project, tree: Path) -> None:
    """Refuse names that would lead out of the folders that are written by them."""
    if not is_normalized_name(canonicalize_name(project.name)):
        raise Unprepared(f"the project's name {project.name!r} is not a name by PEP 508")
    try:
        Version(project.version)
    except InvalidVersion:
        raise Unprepared(f"the project's version {project.version!r} is not a version by PEP 440") from None
    try:
        beneath(tree, project.version_file or "none")
    except BadArchive as error:
        raise Unprepared(f"the project's version file: {error}") from None


def readable(lines: Iterable[Any], extra: str = "") -> list[str]:
    """The requirements among some lines that hold for the interpreter, without their markers; or only an extra's."""
    kept, environment = [], dict(_MARKERS.get({}))
    for line in lines:
        try:
            requirement = Requirement(str(line).partition(" #")[0].strip())
            marker, requirement.marker = requirement.marker, None
            applies = marker is None or marker.evaluate({**environment, "extra": ""})
            if extra:
                applies = not applies and marker is not None and marker.evaluate({**environment, "extra": extra})
        except (InvalidRequirement, UndefinedEnvironmentName):
            continue
        if applies and not requirement.url:
            kept.append(str(requirement))
    return kept


def lines_of(value: Any) -> list[str]:
    return value.splitlines() if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _extras(groups: Mapping[Any, Any]) -> dict[str, list[str]]:
    return {str(name).lower(): readable(lines_of(lines)) for name, lines in groups.items() if lines}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(errors="replace")) if path.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise Unprepared(f"its pyproject.toml cannot be read ({error})") from None


def table_of(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    value: Any = data
    for key in keys:
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return value if isinstance(value, dict) else {}


def _ini(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return configparser.ConfigParser(interpolation=None)
    return parser


class _Published(metadata.Distribution):
    """A folder with what setuptools or the index wrote down. Importlib knows the older forms of it too."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read_text(self, filename: str) -> str:
        path = self._folder / filename
        return path.read_text(errors="replace") if path.is_file() else ""

    def locate_file(self, path: Any) -> Path:
        return self._folder / path


def _published(folder: Path) -> Project:
    """Requirements of extras are marked `extra == "name"`."""
    said = _Published(folder)
    lines = said.requires or []
    name, version, python = (said.metadata.get_all(key, [""])[0] for key in ("Name", "Version", "Requires-Python"))
    extras = [*said.metadata.get_all("Provides-Extra", []), *re.findall(r"extra == ['\"]([^'\"]+)", "\n".join(lines))]
    return Project(
        name,
        version,
        python,
        readable(lines),
        {extra.lower(): readable(lines, extra) for extra in extras},
        said.read_text("entry_points.txt"),
        tuple(said.read_text("top_level.txt").split()),
    )


def _standard(table: dict[str, Any]) -> Project:
    groups = {"console_scripts": table_of(table, "scripts"), **table_of(table, "entry-points")}
    return Project(
        str(table.get("name", "")),
        str(table.get("version", "")),
        str(table.get("requires-python", "")),
        readable(table.get("dependencies", [])),
        _extras(table_of(table, "optional-dependencies")),
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
            for group, lines in groups.items()
            if lines
        ),
    )


def _poetry(table: dict[str, Any]) -> Project:
    """Poetry writes version ranges its own way; the newest versions are as good a guess as a translation."""

    def plain(lines: dict[str, Any]) -> list[str]:
        asked = {name: {"version": value} if isinstance(value, str) else value for name, value in lines.items()}
        asked = {name: value for name, value in asked.items() if name != "python" and isinstance(value, dict)}
        return [name for name, value in asked.items() if "version" in value and not value.get("optional")]

    groups = {name: table_of(group, "dependencies") for name, group in table_of(table, "group").items()}
    groups["dev"] = {**table_of(table, "dev-dependencies"), **groups.get("dev", {})}
    return Project(
        str(table.get("name", "")),
        str(table.get("version", "")),
        needs=readable(plain(table_of(table, "dependencies"))),
        extras={name.lower(): readable(plain(lines)) for name, lines in groups.items() if lines},
    )


def _groups(table: dict[str, Any]) -> dict[str, list[str]]:
    """PEP 735. A group may include others."""

    def all_lines(name: str, seen: frozenset[str]) -> Iterable[str]:
        for line in table.get(name, []):
            if isinstance(line, str):
                yield line
            elif (other := table_of({"": line}, "").get("include-group")) and other not in seen:
                yield from all_lines(other, seen | {other})

    return {name.lower(): readable(all_lines(name, frozenset({name}))) for name in table}


def _setup_cfg(parser: configparser.ConfigParser) -> Project:
    def said(section: str, key: str) -> str:
        return parser.get(section, key, fallback="")

    computed = said("metadata", "version").startswith(("attr:", "file:"))
    extras = parser["options.extras_require"] if parser.has_section("options.extras_require") else {}
    return Project(
        said("metadata", "name"),
        "" if computed else said("metadata", "version"),
        needs=readable(said("options", "install_requires").splitlines()),
        extras=_extras({"test": said("options", "tests_require"), **extras}),
    )


def _setup_py(path: Path) -> Project:
    """The arguments of `setup(...)` that are plain literals."""
    try:
        module = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
    except (SyntaxError, ValueError):
        return Project()
    values: dict[str, Any] = {}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        if (call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")) == "setup":
            for keyword in call.keywords:
                try:
                    values[keyword.arg or ""] = ast.literal_eval(keyword.value)
                except (ValueError, TypeError):
                    continue
    extras = values.get("extras_require")
    return Project(
        str(values.get("name", "")),
        str(values.get("version", "")),
        needs=readable(lines_of(values.get("install_requires"))),
        extras=_extras({"test": values.get("tests_require"), **(extras if isinstance(extras, dict) else {})}),
    )


def _requirement_files(tree: Path) -> list[str]:
    for pattern in REQUIREMENT_FILES:
        for path in sorted(tree.glob(pattern)):
            kept = readable(path.read_text(errors="replace").splitlines())
            kept = [line for line in kept if not NOT_FOR_TESTS.fullmatch(canonicalize_name(Requirement(line).name))]
            if kept:
                return kept
    return []
