"""What a repository says of itself: its name, its version and what it needs; which of its files are the product, which
are its tests, and how its pytest is set up. Nothing of it is run.

Read are what the index or setuptools published (PKG-INFO, egg-info), pyproject.toml and setup.cfg. A setup.py is not
read: a source distribution of it has the published metadata.
"""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, is_normalized_name
from packaging.version import InvalidVersion, Version

from offbook.tasks.factory.types import Unprepared, is_inside, is_test_code
from offbook.tasks.unpack import BadArchive, beneath

NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text())


@dataclass
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
        """Take from `other` what is not known yet."""
        extras = {name.lower(): lines for name, lines in other.extras.items() if lines} | self.extras
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) or getattr(other, each.name))
        self.extras = extras

    @property
    def test_needs(self) -> list[str]:
        """What its tests import besides: its test extras, or where it has none those for developers."""
        names = [name for name in self.extras if name in NAMES["test_extras"]]
        names = names or [name for name in self.extras if name in NAMES["developer_extras"]]
        return list(dict.fromkeys(line for name in names for line in self._extra(name, frozenset())))

    def _extra(self, name: str, seen: frozenset[str]) -> Iterable[str]:
        for line in self.extras.get(name, []):
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) == canonicalize_name(self.name):
                for other in sorted({extra.lower() for extra in requirement.extras} - seen):
                    yield from self._extra(other, seen | {name})
            elif _is_for_tests(requirement):
                yield line


def _is_for_tests(requirement: Requirement) -> bool:
    name = canonicalize_name(requirement.name)
    return not any(fnmatch(name, pattern) for pattern in NAMES["not_for_tests"])


def read_project(tree: Path, name: str, version: str, markers: Mapping[str, str] | None = None) -> Project:
    """The metadata of a tree: what the index published first, then what the sources say. `name` and `version` stand
    in where nothing says better. `markers` is the environment of another interpreter than ours."""
    markers = markers or {}
    pyproject = read_toml(tree / "pyproject.toml")
    project = Project()
    for file in (tree / "PKG-INFO", *tree.glob("*.egg-info/PKG-INFO"), *tree.glob("*/*.egg-info/PKG-INFO")):
        if file.is_file():
            project.fill(_published(file.parent, markers))
    project.fill(Project(version=version))
    project.fill(_standard(pyproject, markers))
    project.fill(_poetry(table_of(pyproject, "tool", "poetry")))
    project.fill(_setup_cfg(tree / "setup.cfg", markers))
    project.fill(Project(name, "0"))
    if not project.test_needs:
        project.extras["test"] = _requirement_files(tree, markers)
    for *keys, key in NAMES["version_files"]:
        project.version_file = project.version_file or str(table_of(pyproject, "tool", *keys).get(key, ""))
    # Refuse names that would lead out of the folders that are written by them.
    if not is_normalized_name(canonicalize_name(project.name)):
        raise Unprepared(f"the project's name {project.name!r} is not a name by PEP 508")
    try:
        Version(project.version)
        beneath(tree, project.version_file or "none")
    except InvalidVersion:
        raise Unprepared(f"the project's version {project.version!r} is not a version by PEP 440") from None
    except BadArchive as error:
        raise Unprepared(f"the project's version file: {error}") from None
    return project


def _published(folder: Path, markers: Mapping[str, str]) -> Project:
    distribution = metadata.PathDistribution(folder)  # also reads the older forms
    requires = distribution.requires or []
    said: Any = distribution.metadata
    extras = {*re.findall(r"extra == ['\"]([^'\"]+)", "\n".join(requires))}
    return Project(
        said.get("Name", ""),
        said.get("Version", ""),
        said.get("Requires-Python", ""),
        readable(requires, markers),
        {extra: readable(requires, markers, extra) for extra in sorted(extras)},
        distribution.read_text("entry_points.txt") or "",
        tuple((distribution.read_text("top_level.txt") or "").split()),
    )


def _standard(pyproject: dict[str, Any], markers: Mapping[str, str]) -> Project:
    """PEP 621 and PEP 735."""
    project = table_of(pyproject, "project")
    groups = table_of(pyproject, "dependency-groups")
    extras = {name: _group(groups, name, frozenset()) for name in groups}
    extras |= table_of(project, "optional-dependencies")
    entry_points = {"console_scripts": table_of(project, "scripts"), **table_of(project, "entry-points")}
    lines = []
    for group, rows in entry_points.items():
        lines += [f"[{group}]\n", *(f"{name} = {value}\n" for name, value in rows.items())]
    return Project(
        str(project.get("name", "")),
        str(project.get("version", "")),
        str(project.get("requires-python", "")),
        readable(project.get("dependencies", []), markers),
        {name: readable(lines, markers) for name, lines in extras.items()},
        "".join(lines),
    )


def _group(groups: dict[str, Any], name: str, seen: frozenset[str]) -> list[str]:
    """A dependency group with those that it includes."""
    found = []
    for line in groups.get(name, []) if name not in seen else []:
        if isinstance(line, str):
            found.append(line)
        elif isinstance(line, dict):
            found += _group(groups, str(line.get("include-group")), seen | {name})
    return found


def _poetry(poetry: dict[str, Any]) -> Project:
    """Poetry writes version ranges its own way; the newest versions are as good a guess as a translation."""
    dependencies = table_of(poetry, "dependencies")
    optional = {name for name, value in dependencies.items() if isinstance(value, dict) and value.get("optional")}
    tables = [table_of(poetry, "dev-dependencies")]
    tables += [table_of(group, "dependencies") for group in table_of(poetry, "group").values()]
    return Project(
        str(poetry.get("name", "")),
        str(poetry.get("version", "")),
        needs=[name for name in dependencies if name != "python" and name not in optional],
        extras={"dev": [name for table in tables for name in table]},
    )


def _setup_cfg(path: Path, markers: Mapping[str, str]) -> Project:
    setup = _ini(path)
    version = setup.get("metadata", "version", fallback="")
    extras = setup["options.extras_require"] if setup.has_section("options.extras_require") else {}
    return Project(
        setup.get("metadata", "name", fallback=""),
        "" if version.startswith(("attr:", "file:")) else version,
        needs=readable(setup.get("options", "install_requires", fallback="").splitlines(), markers),
        extras={name: readable(lines.splitlines(), markers) for name, lines in extras.items()},
    )


def _requirement_files(tree: Path, markers: Mapping[str, str]) -> list[str]:
    for pattern in NAMES["requirement_files"]:
        for path in sorted(tree.glob(pattern)):
            kept = readable(path.read_text(errors="replace").splitlines(), markers)
            kept = [line for line in kept if _is_for_tests(Requirement(line))]
            if kept:
                return kept
    return []


def readable(lines: Iterable[Any], markers: Mapping[str, str], extra: str = "") -> list[str]:
    """The requirements among some lines that hold for the interpreter, without their markers; or only an extra's."""
    kept = []
    for line in lines:
        try:
            requirement = Requirement(str(line).partition(" #")[0].strip())
            marker = requirement.marker
            requirement.marker = None
            applies = marker is None or marker.evaluate({**markers, "extra": ""})
            if extra:
                applies = not applies and marker is not None and marker.evaluate({**markers, "extra": extra})
        except (InvalidRequirement, UndefinedEnvironmentName):
            continue
        if applies and not requirement.url:
            kept.append(str(requirement))
    return kept


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


@dataclass(frozen=True)
class Layout:
    import_roots: tuple[str, ...]
    source_files: tuple[str, ...]
    test_files: tuple[str, ...]
    support_files: tuple[str, ...]
    options: tuple[str, ...]  # for pytest


def find_layout(tree: Path, project: Project) -> Layout:
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    python_files = [path for path in files if path.endswith(".py")]
    root, modules = _find_product(tree, project)
    places = [str(PurePosixPath(root, module)) for module in modules]
    product = {path for path in python_files if is_inside(path.removesuffix(".py"), places)}
    sources = tuple(path for path in python_files if path in product and not is_test_code(path))
    if not sources:
        raise Unprepared(f"{project.name} has no Python package or module")
    settings_file, settings = _pytest_settings(tree)
    tests = _find_tests(tree, [path for path in python_files if path not in sources], settings)
    if not tests:
        raise Unprepared(f"{project.name} has no test files")
    taken = {*sources, *tests}
    folders = {str(PurePosixPath(path).parent) for path in tests} - {"."}
    folders -= {str(PurePosixPath(path).parent) for path in sources}
    support = [path for path in files if is_inside(path, folders) or path.rpartition("/")[2] == "conftest.py"]
    support = [path for path in support if path not in taken]
    options = ("-c", settings_file, *_options(_words(settings, "addopts")))
    if any(b"hypothesis" in (tree / path).read_bytes() for path in (*tests, *support) if path.endswith(".py")):
        options += ("--hypothesis-seed=0",)  # not for all: the option alone imports hypothesis, which takes a second
    if "error" in str(settings.get("filterwarnings", "")):  # warnings of newer dependencies would fail the tests
        options += ("-o", "filterwarnings=")
    return Layout((root,), sources, tests, tuple(support), options)


def _find_product(tree: Path, project: Project) -> tuple[str, tuple[str, ...]]:
    """The folder that goes on sys.path and the names in it that are the product.

    By what the metadata say, else by the project's name, else every package that is not called like something else.
    """
    own = {_bare(project.name), _bare(project.name.split(".")[0])}
    importable = {root: _importable(tree / root) for root in NAMES["import_roots"] if (tree / root).is_dir()}
    for root, names in importable.items():
        declared = tuple(name for name in names if name in project.top_level and name not in NAMES["not_product"])
        if declared:
            return root, declared
    for root, names in importable.items():
        called = tuple(name for name in names if _bare(name) in own)
        if called:
            return root, called
    for root, names in importable.items():
        others = [name for name in names if name not in NAMES["not_product"] and not is_test_code(f"{name}.py")]
        packages = tuple(name for name in others if (tree / root / name).is_dir())
        if packages or (others and root == "."):
            return root, packages or tuple(others)
    raise Unprepared(f"{project.name} has no Python package or module")


def _bare(name: str) -> str:
    """python-Thing2, py_thing and thing are one name."""
    return re.sub(r"^(python|py)[-_.]?|[-_.]?python$|[-_.]|\d+$", "", name.lower())


def _importable(folder: Path) -> list[str]:
    """Names of modules, packages, and folders that only hold packages (PEP 420)."""
    names = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file() and path.stem.isidentifier():
            names.append(path.stem)
        elif path.is_dir() and path.name.isidentifier():
            is_package = (path / "__init__.py").is_file() or any(path.glob("*/__init__.py"))
            if is_package or (folder.name == "src" and any(path.glob("*.py"))):
                names.append(path.name)
    return names


def _find_tests(tree: Path, python_files: Iterable[str], settings: Mapping[str, Any]) -> tuple[str, ...]:
    patterns = _words(settings, "python_files") or ["test_*.py", "*_test.py"]
    places = []
    for pattern in _words(settings, "testpaths"):
        if not PurePosixPath(pattern).is_absolute() and ".." not in PurePosixPath(pattern).parts and pattern != ".":
            places += [path.relative_to(tree).as_posix() for path in tree.glob(pattern)]
    found = [path for path in python_files if not {*NAMES["not_tests"]} & {*PurePosixPath(path).parent.parts}]
    chosen = [path for path in found if any(PurePosixPath(path).match(pattern) for pattern in patterns)]
    return tuple([path for path in chosen if is_inside(path, places)] or chosen)


def _pytest_settings(tree: Path) -> tuple[str, dict[str, Any]]:
    """The one file that pytest would take its settings from, and what it says."""
    for name in ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        if name == "pyproject.toml":
            values = table_of(read_toml(tree / name), "tool", "pytest")
            values = values.get("ini_options") or values
        else:
            parser = _ini(tree / name)
            section = "tool:pytest" if name == "setup.cfg" else "pytest"
            values = dict(parser.items(section)) if parser.has_section(section) else {}
        if values or (name.endswith("pytest.ini") and (tree / name).is_file()):
            return name, values
    return "/dev/null", {}


def _words(settings: Mapping[str, Any], name: str) -> list[str]:
    value = settings.get(name, ())
    return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]


def _options(words: list[str]) -> Iterable[str]:
    """Of `addopts` what decides which tests run, how they are imported and with which plugins."""
    for word, following in pairwise((*words, "")):
        if word.startswith(tuple(f"{name}=" for name in NAMES["pytest_options"])):
            yield word
        elif word in (*NAMES["pytest_options"], "-m", "-k") or (word == "-p" and not following.startswith("no:")):
            yield from (word, following)
