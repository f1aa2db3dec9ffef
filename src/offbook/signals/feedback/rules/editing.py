"""Edits: that did not apply, that went into the tests, that think aloud in comments, or against the repository's style.

How functions are named and documented is read from the repository. An edit is blamed only where the file can be
followed from the task's tree, edit by edit, to what the agent left.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from offbook.core.pycode import try_parse
from offbook.signals.trajectory import At, ToolUse, Trajectory
from offbook.signals.trajectory.diff import COMMENT
from offbook.signals.trajectory.lint import findings
from offbook.signals.trajectory.tool_calls import ERROR_CHARS, NOT_APPLIED
from offbook.types import is_test_file

EVERYWHERE = re.compile(
    r"\b(rename|everywhere|throughout)\b|\b(all|every|whole|entire) (its |the |of the )?"
    r"(callers?|us(es?|ages?)|references?|files?|repository|repo|codebase|project)\b",
    re.IGNORECASE,
)
CASE = re.compile(r"\bassert|\bdef test|\.assert\w+\(|pytest\.raises")
SWITCHES_OFF = re.compile(r"skip|xfail|\breturn\b|exit\(|collect_ignore|patch|__eq__|sys\.modules|importlib")
CODE_SUFFIXES = (".py", ".pyi", ".js", ".ts", ".tsx", ".jsx", ".go", ".rs", ".java", ".c", ".h", ".cpp", ".rb", ".sh")
NO_TEST = re.compile(  # made by a program, or in a scratch folder
    r"__pycache__|\.pytest_cache|\.pyc\b|\.hypothesis|(^|/)(build|dist|htmlcov|node_modules|site-packages|\.\w+)/|\$"
    r"|^/(tmp|var/tmp|dev)(/|$)"
)
THINKING = re.compile(
    r"\b(let me|let's|wait|hmm+|maybe|perhaps|actually|not sure|I (think|need|should|will|could|can|am|guess|believe)|"
    r"I'll|I'm|we (could|should|need to|might)|what if|on second thought|alternatively)\b",
    re.IGNORECASE,
)
THINKING_LINES = 3  # of comments that think aloud, in one edit
COMMENT_SHARE = 0.5  # of the added lines
MIN_FUNCTIONS = 10  # fewer are no habit
DOCUMENTED_SHARE = 0.9
CAMEL = re.compile(r"_*[a-z][a-z0-9]*([A-Z][a-z0-9]*)+")
SKIPPED = frozenset({"node_modules", "build", "dist", "venv", "site-packages"})
MAX_BYTES = 300_000  # of a source file; larger ones are generated
Function = ast.FunctionDef | ast.AsyncFunctionDef


def edited_tests(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A test edited, rewritten, moved or deleted that the agent did not make itself, whether or not that worked.

    Further cases next to the existing ones are allowed.
    """
    if trajectory.asks_for_tests or EVERYWHERE.search(trajectory.instruction):
        return
    made: set[str] = set()
    read: set[str] = set()
    for use in trajectory.uses:
        if not use.ran and use.tool != "edit_file":  # of other calls it is not clear what was meant
            continue
        for path in _touched(trajectory, use, read):
            is_test = is_test_file(path) or path.rstrip("/").rpartition("/")[2] == "tests"
            if is_test and path not in made and not NO_TEST.search(path):
                yield use.at, path
                break
        if use.kind == "edit" and _is_creation(use) and use.path not in read:
            made.add(use.path)
        made |= {path for path in use.command.written if not _is_there(trajectory, path, read)}
        if use.went_well:
            read |= {use.path} if use.kind == "read" else {*use.command.shown}


def _touched(trajectory: Trajectory, use: ToolUse, read: set[str]) -> list[str]:
    """Files that were there before the call and that it changes."""
    if use.kind == "edit":
        new = _is_creation(use) and not _is_there(trajectory, use.path, read)
        return [] if new or _only_adds_cases(use) else [use.path]
    rewritten = [path for path in use.command.written if path not in use.command.appended]
    over = [path for path in rewritten if _is_there(trajectory, path, read)]
    return [*(path for path in use.command.touched if _could_be_there(trajectory, path)), *over]


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
    """An edit of code half of which is comments that think aloud."""
    for use in trajectory.uses:
        for path, lines in _added(use) if use.ran else ():
            comments = [line for line in lines if COMMENT.match(line)] if path.endswith(CODE_SUFFIXES) else []
            aloud = [line for line in comments if THINKING.search(line)]
            if len(aloud) >= THINKING_LINES and len(comments) >= COMMENT_SHARE * len(lines):
                yield use.at, f"{len(comments)} of {len(lines)} new lines: {aloud[0].strip()}"
                break


def _added(use: ToolUse) -> Iterator[tuple[str, list[str]]]:
    """Files and the lines that a call puts there which were not in the text it took away."""
    for path, text in use.command.written.items():
        yield path, [line for line in (text or "").splitlines() if line.strip()]
    for old, new in use.replacements:
        before = set(old.splitlines())
        yield use.path, [line for line in new.splitlines() if line.strip() and line not in before]


# The repository's style.


def lint_introduced(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """An edit that brings a finding (trajectory/lint.py) which stays to the end and which nothing silences."""
    for path, start, steps in _followed(trajectory):
        counts = [findings(path, start), *(findings(path, text) for _, text in steps)]
        brought: dict[int, list[str]] = {}  # by the last edit after which there were more of a kind
        for kind in counts[-1] - counts[0] if steps[-1][1].count("noqa") <= start.count("noqa") else ():
            last = max(number for number in range(len(steps)) if counts[number + 1][kind] > counts[number][kind])
            brought.setdefault(last, []).append(kind.replace("_", " "))
        for number, kinds in sorted(brought.items()):
            yield steps[number][0].at, f"{path}: {', '.join(kinds)}"


def camel_case_name(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A new function in camel case where every function of the repository is in snake case."""
    for path, use, function, tree in _new_functions(trajectory):
        if not CAMEL.fullmatch(function.name):
            continue
        habits = functions_of(tree)
        known = (trajectory.instruction, *_sources(tree, tests=True))  # if these have the name, it was given
        given = any(re.search(rf"\b{function.name}\b", text) for text in known)
        if len(habits) >= MIN_FUNCTIONS and not given and not any(CAMEL.fullmatch(one.name) for one in habits):
            yield use.at, f"{path}: {function.name}; {len(habits)} functions are in snake case"


def missing_docstring(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """A new public function without a docstring where at least nine in ten of the repository's have one."""
    for path, use, function, tree in _new_functions(trajectory):
        if function.name.startswith("_") or ast.get_docstring(function) is not None or function.decorator_list:
            continue
        public = [one for one in functions_of(tree) if not one.name.startswith("_")]
        documented = sum(ast.get_docstring(one) is not None for one in public)
        if len(public) >= MIN_FUNCTIONS and documented >= DOCUMENTED_SHARE * len(public):
            yield use.at, f"{path}: {function.name}; {documented} of {len(public)} public functions have one"


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


def _new_functions(trajectory: Trajectory) -> Iterator[tuple[str, ToolUse, Function, Path]]:
    """Functions that the agent added and left, each at the edit that first had it, and the tree of the task."""
    for path, start, steps in _followed(trajectory):
        known, left = _functions_in(start), _functions_in(steps[-1][1])
        for use, text in steps if left.keys() - known.keys() else ():
            for name in _functions_in(text):
                if name in left and name not in known and trajectory.task:
                    known[name] = left[name]
                    yield path, use, left[name], trajectory.task.tree


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
def functions_of(tree: Path) -> tuple[Function, ...]:
    """Of all sources that are no tests. A task's tree never changes, so it is read once."""
    return tuple(function for source in _sources(tree) for function in _functions_in(source).values())


def _sources(tree: Path, tests: bool = False) -> Iterator[str]:
    for path in sorted(tree.rglob("*.py")):
        parts = path.relative_to(tree).parts
        hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
        wanted = not hidden and (tests or not is_test_file("/".join(parts)))
        if wanted and path.is_file() and path.stat().st_size <= MAX_BYTES:
            yield path.read_text(errors="replace")
