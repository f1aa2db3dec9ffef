"""Computes what pytest would print for a long task's repository: a real run takes half a second, and demonstrations
need thousands. A test compares this with real pytest output."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

WIDTH = 80  # of pytest's lines where there is no terminal
TOOK = "0.02s"


def report(files: Mapping[str, str], selection: str = "") -> tuple[int, str]:
    """The exit code and the text of `python -m pytest`, of one test file or of all."""
    paths = sorted(path for path in files if path.startswith("tests/") and (not selection or path == selection))
    letters, failures = "", list[str]()
    for path in paths:
        for name, outcome in _outcomes(files, path):
            letters += "s" if outcome is None else "F" if outcome else "."
            if outcome:
                failures.append(_line(f"FAILED {path}::{name}", outcome))
    counts = {"failed": letters.count("F"), "passed": letters.count("."), "skipped": letters.count("s")}
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    heading = " short test summary info ".center(WIDTH, "=")
    lines = [letters, *([heading, *failures] if failures else []), f"{summary} in {TOOK}"]
    return (1 if failures else 0), "\n".join(lines) + "\n"


def _outcomes(files: Mapping[str, str], path: str) -> list[tuple[str, str | None]]:
    """Each test of a file with its failure, an empty text, or None if it is skipped."""
    tree = ast.parse(files[path])
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "pytestmark" in files[path]:
        return [(test.name, None) for test in tests]
    namespace: dict[str, Any] = {"__builtins__": vars(builtins) | {"__import__": _importer(files)}}
    imports = ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], [])
    exec(compile(imports, path, "exec"), namespace)
    return [(test.name, _failure(test, namespace)) for test in tests]


def _failure(test: ast.FunctionDef, namespace: dict[str, Any]) -> str:
    for check in test.body:
        assert isinstance(check, ast.Assert)
        assert isinstance(check.test, ast.Compare)
        sides = check.test.left, check.test.comparators[0]
        try:
            left, right = (eval(compile(ast.Expression(side), test.name, "eval"), namespace) for side in sides)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        by_identity = isinstance(check.test.ops[0], ast.Is)
        if not (left is right if by_identity else left == right):
            return f"assert {left!r} {'is' if by_identity else '=='} {right!r}"
    return ""


def _importer(files: Mapping[str, str]) -> Callable[..., ModuleType]:
    """An __import__ for `from package.module import name` limited to these files."""
    loaded: dict[str, ModuleType] = {}

    def load(name: str, *_: object) -> ModuleType:
        if name not in loaded:
            loaded[name] = ModuleType(name)
            vars(loaded[name])["__builtins__"] = vars(builtins) | {"__import__": load}
            exec(compile(files[name.replace(".", "/") + ".py"], name, "exec"), vars(loaded[name]))
        return loaded[name]

    return load


def _line(head: str, outcome: str) -> str:
    """Cut as pytest cuts it."""
    line = f"{head} - {outcome}"
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
