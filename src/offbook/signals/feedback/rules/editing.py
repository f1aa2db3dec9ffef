"""Edits: that did not apply, that went into the tests, that think aloud in comments, or against the repository's style.

The style is read from the repository: its linter's settings, how its functions are named and documented. An edit is
blamed only where the file can be followed from the task's tree, edit by edit, to what the agent left.
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
from offbook.signals.trajectory.diff import COMMENT
from offbook.signals.trajectory.lint import findings
from offbook.signals.trajectory.tool_calls import ERROR_CHARS, NOT_APPLIED
from offbook.types import is_test_file

EVERYWHERE = re.compile(
    r"\brename\b|\beverywhere\b|\bthroughout\b"
    r"|\b(all|every) (its |the |of the )?(callers?|us(es?|ages?)|references?|files?)\b"
    r"|\b(whole|entire) (repository|repo|codebase|project)\b",
    re.IGNORECASE,
)
CASE = re.compile(r"\bassert|\bdef test|\.assert\w+\(|pytest\.raises")
SWITCHES_OFF = re.compile(r"skip|xfail|\breturn\b|exit\(|collect_ignore|patch|__eq__|sys\.modules|importlib")
CODE_SUFFIXES = (".py", ".pyi", ".js", ".ts", ".tsx", ".jsx", ".go", ".rs", ".java", ".c", ".h", ".cpp", ".rb", ".sh")
MADE = re.compile(
    r"__pycache__|\.pytest_cache|\.pyc\b|\.hypothesis|(^|/)(build|dist|htmlcov|node_modules|site-packages|\.\w+)/|\$"
)
SCRATCH = re.compile(r"^/(tmp|var/tmp|dev)(/|$)")
THINKING = re.compile(
    r"\b(let me|let's|wait|hmm+|maybe|perhaps|actually|not sure|I (think|need|should|will|could|can|am|guess|believe)|"
    r"I'll|I'm|we (could|should|need to|might)|what if|on second thought|alternatively)\b",
    re.IGNORECASE,
)
THINKING_LINES = 3  # of comments that think aloud, in one edit
COMMENT_SHARE = 0.5  # of the added lines


def edited_tests(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A test edited, rewritten, moved or deleted that the agent did not make itself, whether or not that worked.

    Further cases next to the existing ones are allowed.
    """
    if trajectory.asks_for_tests or EVERYWHERE.search(trajectory.instruction):
        return
    made: set[str] = set()
    read: set[str] = set()
    for use in _meant(trajectory):
        touched = [path for path in _touched(trajectory, use, read) if _is_repository_test(path) and path not in made]
        if touched:
            yield use.at, touched[0]
        if use.kind == "edit" and _is_creation(use) and use.path not in read:
            made.add(use.path)
        if use.command:
            made |= {path for path in use.command.written if not _is_there(trajectory, path, read)}
        if use.went_well and use.kind == "read":
            read.add(use.path)
        elif use.went_well and use.command:
            read |= set(use.command.shown)


def _meant(trajectory: Trajectory) -> Iterator[ToolUse]:
    """Of calls that could not be run, what was meant can be said of an edit with our own tool only."""
    return (one for one in trajectory.uses if one.ran or one.tool == "edit_file")


def _touched(trajectory: Trajectory, use: ToolUse, read: set[str]) -> list[str]:
    """Files that were there before the call and that it changes."""
    if use.kind == "edit":
        new = _is_creation(use) and not _is_there(trajectory, use.path, read)
        return [] if new or _only_adds_cases(use) else [use.path]
    if use.command is None:
        return []
    rewritten = [path for path in use.command.written if path not in use.command.appended]
    over = [path for path in rewritten if _is_there(trajectory, path, read)]
    return [*(path for path in use.command.touched if _could_be_there(trajectory, path)), *over]


def _is_repository_test(path: str) -> bool:
    """A test file or a folder of them that no program made and that is not in a scratch folder."""
    if MADE.search(path) or SCRATCH.match(path):
        return False
    return is_test_file(path) or path.rstrip("/").rpartition("/")[2] == "tests"


def _could_be_there(trajectory: Trajectory, path: str) -> bool:
    """Of what a command deletes: what test runs leave behind is no test."""
    if trajectory.task is None or re.search(r"[*?\[{]", path):
        return path.endswith((".py", "*", "tests", "tests/"))
    return trajectory.was_there(path)


def _only_adds_cases(use: ToolUse) -> bool:
    """Every line stays where it was, and what comes between them checks something and switches nothing off."""
    added: list[str] = []
    for old, new in use.replacements:
        lines = iter(new.splitlines())
        for line in old.splitlines():
            for other in lines:
                if other == line:
                    break
                added.append(other)
            else:
                return False
        added += lines
    text = "\n".join(added)
    return bool(CASE.search(text)) and not SWITCHES_OFF.search(text)


def _is_creation(use: ToolUse) -> bool:
    return not any(old for old, _ in use.replacements)


def _is_there(trajectory: Trajectory, path: str, read: set[str]) -> bool:
    """Whether a file was there before the agent came. Without the tree, one that the agent has read was."""
    return path in read or trajectory.was_there(path)


def edit_not_applied(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """The text to replace is not in the file, or there more than once."""
    for use in trajectory.uses:
        if use.kind != "edit" or use.answer is None or _is_creation(use):
            continue
        is_refused = trajectory.rollout.foreign or use.answer.status == "failed"
        if is_refused and NOT_APPLIED.search(use.output[:ERROR_CHARS]):
            yield use.at, use.output


def thinking_in_comments(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """An edit of code of which at least half is comments, several of them thinking aloud."""
    for use in _meant(trajectory):
        for path, lines in _added(use):
            if not path.endswith(CODE_SUFFIXES):
                continue
            comments = [line for line in lines if COMMENT.match(line)]
            aloud = [line for line in comments if THINKING.search(line)]
            if len(aloud) >= THINKING_LINES and len(comments) >= COMMENT_SHARE * len(lines):
                yield use.at, f"{len(comments)} of {len(lines)} new lines: {aloud[0].strip()}"
                break


def _added(use: ToolUse) -> Iterator[tuple[str, list[str]]]:
    """Files and the lines that a call puts there which were not in the text it took away."""
    if use.command:
        for path, text in use.command.written.items():
            yield path, [line for line in (text or "").splitlines() if line.strip()]
    for old, new in use.replacements:
        before = set(old.splitlines())
        yield use.path, [line for line in new.splitlines() if line.strip() and line not in before]


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
