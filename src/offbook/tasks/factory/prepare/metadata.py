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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, is_normalized_name
from packaging.version import InvalidVersion, Version

from offbook.tasks.factory.types import Unprepared, is_test_code
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
VERSION_FILES = (
    (("tool", "setuptools_scm"), "write_to"),
    (("tool", "setuptools_scm"), "version_file"),
    (("tool", "hatch", "build", "hooks", "vcs"), "version-file"),
    (("tool", "pdm", "version"), "write_to"),
)
Lines = Callable[..., list[str]]  # the requirements among some lines, or only those of an extra


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
        extras = {name.lower(): lines for name, lines in other.extras.items() if lines} | self.extras
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

    def lines(value: Any, extra: str = "") -> list[str]:
        return readable(lines_of(value), extra, markers or {})

    pyproject = read_toml(tree / "pyproject.toml")
    standard = table_of(pyproject, "project")
    poetry = table_of(pyproject, "tool", "poetry")
    setup = _ini(tree / "setup.cfg")
    dependency_groups = table_of(pyproject, "dependency-groups")
    groups = {name: lines(_group(dependency_groups, name, frozenset())) for name in dependency_groups}
    poetry_groups = {"dev": table_of(poetry, "dev-dependencies")}
    for group, table in table_of(poetry, "group").items():
        poetry_groups[group] = poetry_groups.get(group, {}) | table_of(table, "dependencies")
    said_version = setup.get("metadata", "version", fallback="")
    setup_extras = setup["options.extras_require"] if setup.has_section("options.extras_require") else {}
    project = Project()
    for other in (
        *(_published(folder, lines) for folder in (tree, *tree.glob("*.egg-info"), *tree.glob("*/*.egg-info"))),
        Project(version=version),
        Project(
            str(standard.get("name", "")),
            str(standard.get("version", "")),
            str(standard.get("requires-python", "")),
            lines(standard.get("dependencies")),
            {name: lines(value) for name, value in table_of(standard, "optional-dependencies").items()},
            _entry_points({"console_scripts": table_of(standard, "scripts"), **table_of(standard, "entry-points")}),
        ),
        Project(
            str(poetry.get("name", "")),
            str(poetry.get("version", "")),
            needs=lines(_of_poetry(table_of(poetry, "dependencies"))),
            extras={name: lines(_of_poetry(table)) for name, table in poetry_groups.items()},
        ),
        Project(
            setup.get("metadata", "name", fallback=""),
            "" if said_version.startswith(("attr:", "file:")) else said_version,
            needs=lines(setup.get("options", "install_requires", fallback="")),
            extras={name: lines(value) for name, value in setup_extras.items()},
        ),
        Project(name, "0", extras=groups),
    ):
        project.fill(other)
    if not project.test_needs:
        project.extras["test"] = _requirement_files(tree, lines)
    files = (str(table_of(pyproject, *keys).get(key, "")) for keys, key in VERSION_FILES)
    project.version_file = next(filter(None, files), "")
    # Refuse names that would lead out of the folders that are written by them.
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
    return project


def readable(lines: Iterable[Any], extra: str, markers: Mapping[str, str]) -> list[str]:
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


def lines_of(value: Any) -> list[str]:
    return value.splitlines() if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


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


def _published(folder: Path, lines: Lines) -> Project:
    """Requirements of extras are marked `extra == "name"`."""
    said = _Published(folder)
    requires = said.requires or []
    name, version, python = (said.metadata.get_all(key, [""])[0] for key in ("Name", "Version", "Requires-Python"))
    marked = re.findall(r"extra == ['\"]([^'\"]+)", "\n".join(requires))
    return Project(
        name,
        version,
        python,
        lines(requires),
        {extra: lines(requires, extra) for extra in (*said.metadata.get_all("Provides-Extra", []), *marked)},
        said.read_text("entry_points.txt"),
        tuple(said.read_text("top_level.txt").split()),
    )


def _entry_points(groups: Mapping[str, dict[str, Any]]) -> str:
    listed = {group: "".join(f"{name} = {value}\n" for name, value in rows.items()) for group, rows in groups.items()}
    return "".join(f"[{group}]\n{rows}" for group, rows in listed.items() if rows)


def _of_poetry(table: dict[str, Any]) -> list[str]:
    """Poetry writes version ranges its own way; the newest versions are as good a guess as a translation."""
    asked = {name: {"version": value} if isinstance(value, str) else value for name, value in table.items()}
    asked = {name: value for name, value in asked.items() if name != "python" and isinstance(value, dict)}
    return [name for name, value in asked.items() if "version" in value and not value.get("optional")]


def _group(groups: dict[str, Any], name: str, seen: frozenset[str]) -> list[str]:
    """A dependency group with those that it includes (PEP 735)."""
    found = []
    for line in groups.get(name, []) if name not in seen else []:
        if isinstance(line, str):
            found.append(line)
        elif isinstance(line, dict):
            found += _group(groups, str(line.get("include-group")), seen | {name})
    return found


def _requirement_files(tree: Path, lines: Lines) -> list[str]:
    for pattern in REQUIREMENT_FILES:
        for path in sorted(tree.glob(pattern)):
            kept = lines(path.read_text(errors="replace"))
            kept = [line for line in kept if not NOT_FOR_TESTS.fullmatch(canonicalize_name(Requirement(line).name))]
            if kept:
                return kept
    return []


ROOTS = ("src", "lib", "python", ".")  # the tree itself last: it holds folders that are no packages
NOT_PRODUCT = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "scripts"}
    | {"script", "tools", "tool", "setup", "conftest", "noxfile", "tasks", "build", "dist", "fuzz", "perf", "demo"}
    | {"utils", "util", "bin", "ci", "_build", "vendor", "requirements", "fabfile", "docs_src", "samples"}
)
NOT_TESTS = frozenset(
    {"doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench", "build", "node_modules"}
)
HONOURED = ("--import-mode", "--asyncio-mode", "--ignore", "--ignore-glob", "--deselect")
LOOKS_LIKE_TESTS = re.compile(rb"^\s*(async )?def test|unittest|import pytest", re.M)


@dataclass(frozen=True)
class Layout:
    import_roots: tuple[str, ...]
    modules: tuple[str, ...]  # what an import of the product names
    source_files: tuple[str, ...]
    test_files: tuple[str, ...]
    support_files: tuple[str, ...]
    options: tuple[str, ...]  # for pytest
    strict_warnings: bool  # its settings turn warnings into errors


@dataclass(frozen=True)
class _Settings:
    """The pytest settings of a repository, from the one file that pytest would take."""

    file: str
    values: dict[str, Any]

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        value = self.values.get(name, default)
        return tuple(shlex.split(value)) if isinstance(value, str) else tuple(map(str, value))


def find_layout(tree: Path, project: Project) -> Layout:
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    python_files = [path for path in files if path.endswith(".py")]
    settings = _pytest_settings(tree)
    root, modules = _find_product(tree, project)
    prefix = "" if root == "." else f"{root}/"
    mine = tuple(f"{prefix}{module}" for module in modules)
    product = [path for path in python_files if path.startswith(tuple(f"{one}/" for one in mine)) or path[:-3] in mine]
    sources = tuple(path for path in product if not is_test_code(path))
    if not sources:
        raise Unprepared(f"{project.name} has no Python package or module")
    tests = _find_tests(tree, [path for path in python_files if path not in set(sources)], settings)
    if not tests:
        raise Unprepared(f"{project.name} has no test files")
    taken = {*sources, *tests}
    folders = {str(PurePosixPath(path).parent) for path in tests} - {"."}
    folders -= {str(PurePosixPath(path).parent) for path in sources}
    support = tuple(
        path
        for path in files
        if path not in taken
        and (path.startswith(tuple(f"{folder}/" for folder in folders)) or path.rpartition("/")[2] == "conftest.py")
    )
    options = _options(settings)
    if any(b"hypothesis" in (tree / path).read_bytes() for path in (*tests, *support) if path.endswith(".py")):
        options += ("--hypothesis-seed=0",)  # not for all: the option alone imports hypothesis, which takes a second
    strict = any("error" in line for line in lines_of(settings.values.get("filterwarnings", ())))
    return Layout((root,), modules, sources, tests, support, options, strict)


def _find_product(tree: Path, project: Project) -> tuple[str, tuple[str, ...]]:
    """The folder that goes on sys.path and the names in it that are the product.

    By what the metadata say, else by the project's name, else every package that is not called like something else.
    """
    plain = re.sub(r"[-_.]+", "_", project.name).lower()
    own = {plain, plain.removeprefix("python_"), plain.removesuffix("_python"), plain.removeprefix("py"), f"py{plain}"}
    own |= {project.name.lower().split(".")[0], re.sub(r"\d+$", "", plain), plain.replace("_", "")}
    # Folders of other names count if they hold a package with the project's name: pysrc/, packages/.
    others = {path.parts[-3] for path in sorted(tree.glob("*/*/__init__.py")) if path.parts[-2].lower() in own}
    roots = (*ROOTS, *sorted(others - {*ROOTS} - NOT_PRODUCT))
    importable = {root: _importable(tree / root) for root in roots if (tree / root).is_dir()}
    for root, names in importable.items():
        declared = tuple(name for name in names if name in project.top_level and name not in NOT_PRODUCT)
        if declared:
            return root, declared
    for root, names in importable.items():
        called = tuple(name for name in names if name.lower() in own)
        if called:
            return root, called
    for root, names in importable.items():
        packages = tuple(name for name in names if name not in NOT_PRODUCT and (tree / root / name).is_dir())
        modules = tuple(name for name in names if name not in NOT_PRODUCT and not is_test_code(f"{name}.py"))
        if packages or (modules and root == "."):
            return root, packages or modules
    raise Unprepared(f"{project.name} has no Python package or module")


def _importable(folder: Path) -> list[str]:
    """Names of modules, packages, and folders that only hold packages (PEP 420)."""
    names = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file() and path.stem.isidentifier():
            names.append(path.stem)
        elif path.is_dir() and path.name.isidentifier():
            inside = path / "__init__.py"
            if inside.is_file() or any(path.glob("*/__init__.py")) or (folder.name == "src" and any(path.glob("*.py"))):
                names.append(path.name)
    return names


def _find_tests(tree: Path, python_files: Iterable[str], settings: _Settings) -> tuple[str, ...]:
    patterns = settings.words("python_files", ("test_*.py", "*_test.py"))
    places = [
        path.relative_to(tree).as_posix()
        for pattern in settings.words("testpaths")
        if not PurePosixPath(pattern).is_absolute() and ".." not in PurePosixPath(pattern).parts
        for path in ([tree] if pattern.strip("./") == "" else tree.glob(pattern))
    ]
    found = [path for path in python_files if not NOT_TESTS.intersection(PurePosixPath(path).parts[:-1])]
    chosen = [path for path in found if any(PurePosixPath(path).match(pattern) for pattern in patterns)]
    if places and "." not in places:
        inside = [path for path in chosen if path in places or path.startswith(tuple(f"{one}/" for one in places))]
        chosen = inside or chosen
    if not chosen:  # suites that are older than these names
        chosen = [path for path in found if is_test_code(path) or path in ("test.py", "tests.py")]
        chosen = [path for path in chosen if LOOKS_LIKE_TESTS.search((tree / path).read_bytes())]
        chosen = [path for path in chosen if path.rpartition("/")[2] not in ("conftest.py", "__init__.py")]
    return tuple(chosen)


def _pytest_settings(tree: Path) -> _Settings:
    for name in ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        path = tree / name
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if name == "pyproject.toml":
            table = table_of(read_toml(path), "tool", "pytest")
            values = table.get("ini_options", {}) or {key: table[key] for key in table if key != "ini_options"}
            if values:
                return _Settings(name, values)
            continue
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        section = "tool:pytest" if name == "setup.cfg" else "pytest"
        if parser.has_section(section) or name in ("pytest.ini", ".pytest.ini"):
            return _Settings(name, dict(parser.items(section)) if parser.has_section(section) else {})
    return _Settings("/dev/null", {})


def _options(settings: _Settings) -> tuple[str, ...]:
    """Where the settings are, and of `addopts` what decides which tests run, how they are imported and with which
    plugins."""
    options = ["-c", settings.file]
    words = settings.words("addopts")
    for word, following in pairwise((*words, "")):
        if word.startswith(tuple(f"{name}=" for name in HONOURED)):
            options.append(word)
        elif word in (*HONOURED, "-m", "-k") or (word == "-p" and not following.startswith("no:")):
            options += [word, following]
    return tuple(options)
