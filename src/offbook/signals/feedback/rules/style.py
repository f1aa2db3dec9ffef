"""Style that can be read from the repository: its linter's settings, how its functions are named and documented.

An edit is blamed only where the file can be followed from the task's tree, edit by edit, to what the agent left.
"""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from offbook.core.pycode import try_parse
from offbook.signals.trajectory import At, ToolUse, Trajectory
from offbook.signals.trajectory.lint import findings
from offbook.types import is_test_file

CODES = {
    "syntax": "E999",
    "bare_except": "E722",
    "compared_with_none": "E711",
    "empty_f_string": "F541",
    "assert_on_tuple": "F631",
    "repeated_key": "F601",
    "mutable_default": "B006",
    "unused_variable": "F841",
    "unused_import": "F401",
    "redefined": "F811",
    "unreachable": "PLW0101",
}
DEFAULT_CODES = ("F", "E9")
MIN_FUNCTIONS = 10  # fewer are no habit
DOCUMENTED_SHARE = 0.9
CAMEL = re.compile(r"_*[a-z][a-z0-9]*([A-Z][a-z0-9]*)+")
SKIPPED = frozenset({"node_modules", "build", "dist", "venv", "site-packages"})
MAX_BYTES = 300_000  # of a source file; larger ones are generated
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Habits:
    """What the functions of a repository have in common."""

    functions: int
    camel: int
    public: int
    documented: int


@dataclass(frozen=True)
class Linter:
    """Codes by their first letters: those that it reports, those that it does not, and those only in some files."""

    selected: tuple[str, ...]
    ignored: tuple[str, ...]
    per_file: dict[str, tuple[str, ...]]

    def reports(self, code: str, path: str) -> bool:
        """As ruff does it: of the beginnings that fit, the longest decides."""
        name = path.rpartition("/")[2]
        here = [codes for glob, codes in self.per_file.items() if fnmatch(path, glob) or fnmatch(name, glob)]
        ignored = [prefix for codes in (self.ignored, *here) for prefix in codes]
        against = max((len(prefix) for prefix in ignored if code.startswith(prefix)), default=-1)
        fits = [
            0 if prefix == "ALL" else len(prefix)
            for prefix in self.selected
            if code.startswith(prefix) or prefix == "ALL"
        ]
        return bool(code) and max(fits, default=-1) > against


def lint_introduced(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """An edit that brings a finding which stays to the end and which the repository's linter would report."""
    for path, start, steps in _followed(trajectory):
        counts = [findings(path, start), *(findings(path, text) for _, text in steps)]
        left = counts[-1] - counts[0]
        silenced = steps[-1][1].count("noqa") > start.count("noqa")
        linter = _linter(_tree(trajectory)) if left and not silenced else None
        kinds = [kind for kind in left if linter and linter.reports(CODES.get(kind, ""), path)]
        for place, (use, _) in enumerate(steps, 1):
            if new := [kind for kind in kinds if _brings(counts, place, kind)]:
                codes = ", ".join(f"{CODES[kind]} {kind.replace('_', ' ')}" for kind in new)
                yield use.at, f"{path}: {codes}"


def _brings(counts: list[Counter[str]], place: int, kind: str) -> bool:
    """Whether from this step on there is always more of a kind. Source that does not parse shows no other kind."""
    if kind != "syntax" and any(one["syntax"] for one in counts[place - 1 :]):
        return False
    return all(one[kind] > counts[place - 1][kind] for one in counts[place:])


def camel_case_name(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A new function in camel case where every function of the repository is in snake case."""
    for path, use, function in _new_functions(trajectory):
        if not CAMEL.fullmatch(function.name):
            continue
        habits = habits_of(_tree(trajectory))
        given = re.search(rf"\b{function.name}\b", trajectory.instruction) or _is_named(
            _tree(trajectory), function.name
        )
        if habits.functions >= MIN_FUNCTIONS and not habits.camel and not given:
            yield use.at, f"{path}: {function.name}; {habits.functions} functions are in snake case"


def missing_docstring(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A new public function without a docstring where at least nine in ten of the repository's have one."""
    for path, use, function in _new_functions(trajectory):
        if function.name.startswith("_") or ast.get_docstring(function) is not None or function.decorator_list:
            continue
        habits = habits_of(_tree(trajectory))
        if habits.public >= MIN_FUNCTIONS and habits.documented >= DOCUMENTED_SHARE * habits.public:
            counts = f"{habits.documented} of {habits.public}"
            yield use.at, f"{path}: {function.name}; {counts} public functions have one"


def _tree(trajectory: Trajectory) -> Path:
    assert trajectory.task is not None
    return trajectory.task.tree


def _followed(trajectory: Trajectory) -> Iterator[tuple[str, str, list[tuple[ToolUse, str]]]]:
    """Changed sources with the tree's text and the one after each edit, where that ends at what the agent left."""
    for path, final in trajectory.sources.items() if trajectory.task else ():
        start = text = trajectory.before(path) or ""
        steps = []
        for use in trajectory.uses:
            if use.kind == "edit" and use.path == path and use.went_well:
                for old, new in use.replacements:
                    text = text.replace(old, new, 1) if old else new
                steps.append((use, text))
        if steps and text == final:
            yield path, start, steps


def _new_functions(trajectory: Trajectory) -> Iterator[tuple[str, ToolUse, Function]]:
    """Functions that the agent added and left, each at the edit that first had it."""
    for path, start, steps in _followed(trajectory):
        known, left = _functions_in(start), _functions_in(steps[-1][1])
        for use, text in steps if left.keys() - known.keys() else ():
            for name in _functions_in(text):
                if name in left and name not in known:
                    known[name] = left[name]
                    yield path, use, left[name]


def _functions_in(source: str) -> dict[str, Function]:
    """By qualified name: functions of the module and methods of its classes, but not those that a base class named."""
    tree = try_parse(source)
    found: dict[str, Function] = {}
    for node in tree.body if tree else []:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and not node.bases:
            found |= {f"{node.name}.{method.name}": method for method in node.body if isinstance(method, Function)}
    return found


@lru_cache(maxsize=16)
def habits_of(tree: Path) -> Habits:
    """Of all sources that are no tests. A task's tree never changes, so it is read once."""
    functions = [function for source in _sources(tree) for function in _functions_in(source).values()]
    public = [function for function in functions if not function.name.startswith("_")]
    return Habits(
        functions=len(functions),
        camel=sum(bool(CAMEL.fullmatch(function.name)) for function in functions),
        public=len(public),
        documented=sum(ast.get_docstring(function) is not None for function in public),
    )


def _is_named(tree: Path, name: str) -> bool:
    """Whether the repository speaks of a function that it does not have: then the name was given."""
    return any(re.search(rf"\b{name}\b", source) for source in _sources(tree, tests=True))


def _sources(tree: Path, tests: bool = False) -> Iterator[str]:
    for path in sorted(tree.rglob("*.py")):
        parts = path.relative_to(tree).parts
        hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
        wanted = not hidden and (tests or not is_test_file("/".join(parts)))
        if wanted and path.is_file() and path.stat().st_size <= MAX_BYTES:
            yield path.read_text(errors="replace")


@lru_cache(maxsize=16)
def _linter(tree: Path) -> Linter:
    """As the repository sets it up. What cannot be read is as if it were not there."""
    for settings in _linter_settings(tree):
        per_file = settings.get("per-file-ignores")
        return Linter(
            (*(_codes(settings.get("select")) or DEFAULT_CODES), *_codes(settings.get("extend-select"))),
            (*_codes(settings.get("ignore")), *_codes(settings.get("extend-ignore"))),
            {glob: _codes(codes) for glob, codes in per_file.items()} if isinstance(per_file, dict) else {},
        )
    return Linter(DEFAULT_CODES, (), {})


def _linter_settings(tree: Path) -> Iterator[dict[str, Any]]:
    for name in (".ruff.toml", "ruff.toml", "pyproject.toml"):
        try:
            table: Any = tomllib.loads((tree / name).read_text(errors="replace"))
        except (OSError, tomllib.TOMLDecodeError):
            continue
        for key in ("tool", "ruff") if name == "pyproject.toml" else ():
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            lint = table.get("lint")
            yield {**table, **(lint if isinstance(lint, dict) else {})}
    for name in (".flake8", "setup.cfg", "tox.ini"):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string((tree / name).read_text(errors="replace"))
        except (OSError, configparser.Error):
            continue
        if parser.has_section("flake8"):
            yield {key: re.split(r"[,\s]+", value.strip()) for key, value in parser.items("flake8")}


def _codes(value: Any) -> tuple[str, ...]:
    return tuple(code for code in value if isinstance(code, str) and code) if isinstance(value, list) else ()
