"""What an editor would show beside a request: open files, places that were edited lately, lines of a linter.

Some of it has to do with the task and most has not, and nothing of it comes from the solution: it is read off the tree
that the agent gets. The same task always gets the same.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.symbols import module_of
from offbook.tasks.factory.types import Deletion
from offbook.tasks.factory.workshop import Workshop
from offbook.types import Context

OPEN = 5  # at most
EDITS = 3
LINT = 4
FRONT = 0.7  # how often a file of the change is the one in front


def context_of(workshop: Workshop, deletion: Deletion, tree: Mapping[str, str | None]) -> Context:
    rng = random.Random(f"context/{deletion.feature.id}")
    before = {path: text for path, text in workshop.files.items() if path not in deletion.tests}
    files = {path: text for path, text in {**before, **deletion.files, **tree}.items() if text is not None}
    python = [path for path in sorted(files) if path.endswith(".py") and files[path].strip()]
    touched = [path for path in sorted(deletion.files) if path in python]
    # Files that import what is touched, or are their tests.
    names = {
        module.name for path in touched if (module := module_of(path, files[path], workshop.repository.import_roots))
    }
    near = [
        path
        for path in python
        if path not in touched
        and (module := module_of(path, files[path], workshop.repository.import_roots))
        and any(map(module.imports_module, names))
    ]
    others = [path for path in python if path not in touched]
    mine = rng.sample(touched, min(len(touched), rng.randint(1, 2)))
    wide = rng.sample(near, min(len(near), 1)) + rng.sample(others, min(len(others), rng.randint(2, 3)))
    chosen = list(dict.fromkeys([*mine, *wide]))[:OPEN]
    rng.shuffle(chosen)
    if mine and rng.random() < FRONT:
        chosen = [mine[0], *(path for path in chosen if path != mine[0])]
    opened = tuple(f"{path}:{_line(path, files, rng)}" for path in chosen)
    edited = rng.sample(chosen, min(len(chosen), rng.randint(1, EDITS)))
    edits = tuple(f"{path}:{first}-{last}" for path in edited for first, last in [_range(files[path], rng)])
    looked = [*chosen, *rng.sample(others, min(len(others), 10))]
    findings = [f"{path}:{line}" for path in dict.fromkeys(looked) for line in lint(files[path])]
    few = rng.sample(findings, min(len(findings), rng.randint(1, LINT)))
    return Context(opened, edits, tuple(sorted(few)))


def _line(path: str, files: Mapping[str, str], rng: random.Random) -> int:
    return rng.randint(1, max(1, files[path].count("\n")))


def _range(text: str, rng: random.Random) -> tuple[int, int]:
    """The lines of a function or, where there is none, some lines."""
    try:
        spans = [
            (node.lineno, node.end_lineno or node.lineno)
            for node in ast.walk(pycode.parse(text))
            if isinstance(node, Definition)
        ]
    except (SyntaxError, ValueError):
        spans = []
    if spans:
        first, last = rng.choice(sorted(spans))
        start = rng.randint(first, last)
        return start, min(last, start + rng.randint(0, 6))
    start = rng.randint(1, max(1, text.count("\n")))
    return start, start


def lint(source: str) -> Iterator[str]:
    """What linters say of almost any code base: "line: message", in order."""
    try:
        tree = pycode.parse(source)
    except (SyntaxError, ValueError):
        return
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    exported = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    if bound not in used | exported and bound not in ("*", "annotations"):
                        yield f"{node.lineno}: F401 `{alias.name}` imported but unused"
            case ast.ExceptHandler(type=None):
                yield f"{node.lineno}: E722 Do not use bare `except`"
            case ast.Compare(ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=None)]):
                yield f"{node.lineno}: E711 Comparison to `None`"
            case ast.FunctionDef() if any(isinstance(one, ast.List | ast.Dict | ast.Set) for one in node.args.defaults):
                yield f"{node.lineno}: B006 Do not use mutable data structures for argument defaults"
            case ast.Assign(value=ast.Lambda()):
                yield f"{node.lineno}: E731 Do not assign a `lambda` expression, use a `def`"
    for number, line in enumerate(source.split("\n"), 1):
        if len(line) > 120:
            yield f"{number}: E501 Line too long ({len(line)} > 120)"
