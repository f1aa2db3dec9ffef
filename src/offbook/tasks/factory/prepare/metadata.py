"""What a repository says of itself: its name, its version and what it needs; which of its files are the product, which
are its tests, and how its pytest is set up. Nothing of it is run.

Read are what the index or setuptools wrote (PKG-INFO, also in an egg-info folder) and pyproject.toml. setup.py and
setup.cfg are not read: a source distribution, and a tree that was installed with `pip install -e`, has their metadata.
"""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from offbook.tasks.factory.types import Repository, Unprepared, is_inside, is_test_code
from offbook.tasks.unpack import BadArchive, beneath

OF_EXTRA = re.compile(r"(?: and|;) *\(?extra == ['\"]([^'\"]+)['\"]\)?")
NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text())


@dataclass(frozen=True)
class Project:
    name: str
    version: str
    requires_python: str = ""
    needs: list[str] = field(default_factory=list)  # what the package imports
    extras: dict[str, list[str]] = field(default_factory=dict)
    entry_points: str = ""  # the content of an entry_points.txt
    version_file: str = ""  # a file with the version that building would write

    @property
    def test_needs(self) -> list[str]:
        """What its tests import besides: its test extras, or where it has none those for developers."""
        names = [name for name in self.extras if name in NAMES["test_extras"]]
        names = names or [name for name in self.extras if name in NAMES["developer_extras"]]
        return list(dict.fromkeys(line for name in names for line in self._extra(name)))

    def _extra(self, name: str) -> Iterable[str]:
        for line in self.extras.get(name, []):
            requirement = Requirement(line)
            needed = canonicalize_name(requirement.name)
            if needed == canonicalize_name(self.name):
                for other in sorted(requirement.extras):
                    yield from self._extra(other.lower())
            elif not any(fnmatch(needed, pattern) for pattern in NAMES["not_for_tests"]):
                yield line


def read_project(tree: Path, name: str, version: str) -> Project:
    """The metadata of a tree: what the index published first, then what the sources say. `name` and `version` stand
    in where nothing says better."""
    pyproject = read_toml(tree / "pyproject.toml")
    poetry = table_of(pyproject, "tool", "poetry")
    groups = table_of(poetry, "group")
    files = (tree / "PKG-INFO", *tree.glob("*.egg-info/PKG-INFO"), *tree.glob("*/*.egg-info/PKG-INFO"))
    sources = [_published(file.parent) for file in files if file.is_file()]
    sources += [{"version": version}, _standard(pyproject)]
    sources.append(
        {
            "name": poetry.get("name", name),
            "version": poetry.get("version", "0"),
            "needs": sorted(table_of(poetry, "dependencies").keys() - {"python"}),
            "extras": {"dev": [need for group in groups for need in table_of(groups, group, "dependencies")]},
        }
    )
    for *keys, key in NAMES["version_files"]:
        sources.append({"version_file": table_of(pyproject, "tool", *keys).get(key)})
    said: dict[str, Any] = {}
    extras: dict[str, list[str]] = {}
    for source in sources:
        for extra, lines in source.pop("extras", {}).items():
            extras[extra.lower()] = extras.get(extra.lower()) or _readable(lines)
        said = {key: value for key, value in source.items() if value} | said
    said["needs"] = _readable(said.get("needs", []))
    project = Project(**said, extras=extras)
    try:  # names that would lead out of the folders that are written by them
        canonicalize_name(project.name, validate=True)
        Version(project.version)
        beneath(tree, project.version_file or "none")
    except (InvalidName, InvalidVersion, BadArchive) as error:
        raise Unprepared(f"the project's name, version or version file cannot be used: {error}") from None
    return project


def _published(folder: Path) -> dict[str, Any]:
    distribution = metadata.PathDistribution(folder)  # also reads the older forms
    said: Any = distribution.metadata
    extras: dict[str, list[str]] = defaultdict(list)
    for line in distribution.requires or []:
        extra = OF_EXTRA.search(line)
        extras[extra[1] if extra else ""].append(OF_EXTRA.sub("", line))
    return {
        "name": said.get("Name"),
        "version": said.get("Version"),
        "requires_python": said.get("Requires-Python"),
        "needs": extras.pop("", []),
        "extras": extras,
        "entry_points": distribution.read_text("entry_points.txt"),
    }


def _standard(pyproject: dict[str, Any]) -> dict[str, Any]:
    """PEP 621 and PEP 735."""
    project = table_of(pyproject, "project")
    groups = table_of(pyproject, "dependency-groups")
    extras = {name: _group(groups, name) for name in groups}
    entry_points = {"console_scripts": table_of(project, "scripts"), **table_of(project, "entry-points")}
    lines = []
    for group, rows in entry_points.items():
        lines += [f"[{group}]\n", *(f"{name} = {value}\n" for name, value in rows.items())] if rows else []
    return {
        "name": project.get("name"),
        "version": project.get("version"),
        "requires_python": project.get("requires-python"),
        "needs": project.get("dependencies"),
        "extras": extras | table_of(project, "optional-dependencies"),
        "entry_points": "".join(lines),
    }


def _group(groups: dict[str, Any], name: str) -> list[Any]:
    """A dependency group with those that it includes."""
    found: list[Any] = []
    for line in groups.get(name, []):
        found += _group(groups, line.get("include-group", "")) if isinstance(line, dict) else [line]
    return found


def _readable(lines: Iterable[Any]) -> list[str]:
    """The requirements among some lines, but for those of a URL."""
    kept = []
    for line in lines:
        with suppress(InvalidRequirement):
            requirement = Requirement(str(line).partition(" #")[0].strip())
            kept += [] if requirement.url else [str(requirement)]
    return kept


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(errors="replace")) if path.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise Unprepared(f"its pyproject.toml cannot be read ({error})") from None


def table_of(data: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _ini(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}
    return {name: dict(section) for name, section in parser.items()}


def find_layout(tree: Path, project: Project) -> Repository:
    """A repository of which everything is known but its tests."""
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    root, modules = _find_product(tree, project)
    places = [str(PurePosixPath(root, module)) for module in modules]
    python_files = [path for path in files if path.endswith(".py")]
    sources = [path for path in python_files if is_inside(path.removesuffix(".py"), places) and not is_test_code(path)]
    settings_file, settings = _pytest_settings(tree)
    patterns = _words(settings, "python_files") or ["test_*.py", "*_test.py"]
    tests = []
    for path in python_files:
        is_excluded = path in sources or {*NAMES["not_tests"]} & {*path.split("/")[:-1]}
        if not is_excluded and any(PurePosixPath(path).match(pattern) for pattern in patterns):
            tests.append(path)
    if not tests:
        raise Unprepared(f"{project.name} has no test files")
    folders = {path.rpartition("/")[0] for path in tests} - {path.rpartition("/")[0] for path in sources} - {""}
    others = sorted({*files} - {*sources, *tests})
    support = [path for path in others if is_inside(path, folders) or path.rpartition("/")[2] == "conftest.py"]
    kept = tuple(NAMES["pytest_options"])
    options = ["-c", settings_file, *(word for word in _words(settings, "addopts") if word.startswith(kept))]
    loose = [path.rpartition("/")[2] for path in tests if f"{path.rpartition('/')[0]}/__init__.py" not in files]
    if len(loose) > len({*loose}):
        options.append("--import-mode=importlib")  # as modules they would all have one name
    if any(b"hypothesis" in (tree / path).read_bytes() for path in (*tests, *support) if path.endswith(".py")):
        options.append("--hypothesis-seed=0")  # not for all: the option alone imports hypothesis, which takes a second
    if "error" in str(settings.get("filterwarnings", "")):  # warnings of newer dependencies would fail the tests
        options += ["-o", "filterwarnings="]
    return Repository(
        name=project.name,
        version=project.version,
        folder=tree.parent,
        import_roots=(root,),
        source_files=tuple(sources),
        test_files=tuple(tests),
        support_files=tuple(support),
        tests=(),
        pytest_options=tuple(options),
    )


def _find_product(tree: Path, project: Project) -> tuple[str, tuple[str, ...]]:
    """The folder that goes on sys.path and the names in it that are the product.

    By the project's name, else every package that is not called like something else.
    """
    own = {_bare(project.name), _bare(project.name.split(".")[0])}
    importable = {root: _importable(tree / root) for root in NAMES["import_roots"] if (tree / root).is_dir()}

    def is_other(name: str) -> bool:
        return name not in NAMES["not_product"] and not is_test_code(f"{name}.py")

    ways: list[Callable[[str, str], bool]] = [
        lambda root, name: _bare(name) in own,
        lambda root, name: is_other(name) and (tree / root / name).is_dir(),
        lambda root, name: is_other(name) and root == ".",
    ]
    for is_product in ways:
        for root, names in importable.items():
            if found := tuple(name for name in names if is_product(root, name)):
                return root, found
    raise Unprepared(f"{project.name} has no Python package or module")


def _bare(name: str) -> str:
    """python-Thing2, py_thing and thing are one name."""
    return re.sub(r"^(python|py)[-_.]?|[-_.]?python$|[-_.]|\d+$", "", name.lower())


def _importable(folder: Path) -> list[str]:
    """Names of modules, packages, and folders that only hold packages (PEP 420)."""
    names = []
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".py")
        is_package = path.is_dir() and (any(path.glob("*.py")) or any(path.glob("*/__init__.py")))
        if name.isidentifier() and (is_package or path.suffix == ".py"):
            names.append(name)
    return names


def _pytest_settings(tree: Path) -> tuple[str, dict[str, Any]]:
    """The one file that pytest would take its settings from, and what it says."""
    for name, *keys in NAMES["pytest_settings"]:
        values = table_of(read_toml(tree / name) if name == "pyproject.toml" else _ini(tree / name), *keys)
        if values or (name.endswith("pytest.ini") and (tree / name).is_file()):
            return name, values
    return "/dev/null", {}


def _words(settings: Mapping[str, Any], name: str) -> list[str]:
    value = settings.get(name, ())
    return shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
