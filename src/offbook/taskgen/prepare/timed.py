"""Tests that look at a clock: whether they pass depends on what runs beside them, so they cannot judge."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from offbook import syntax

CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "monotonic", "timeit"}


def timed_tests(tree: Path, files: Iterable[str], tests: Sequence[str]) -> set[str]:
    """Those of `tests` (node ids) that call a clock, or a helper in `files` (test code) that does, by its name. In one
    file a name is one function; a helper's name that functions of other files have too, which do not, says nothing."""
    calls = defaultdict[tuple[str, str], set[str]](set)
    for file in files:
        for name, called in _calls_in(tree / file):
            calls[file, name] |= called
    named = defaultdict[str, list[tuple[str, str]]](list)
    for place in calls:
        named[place[1]].append(place)
    timed = {place for place, called in calls.items() if called & CLOCKS}
    while True:
        helpers = {name for name, places in named.items() if timed.issuperset(places)}
        more = {place for place, called in calls.items() if called & helpers} - timed
        if not more:
            break
        timed |= more
    return {test for test in tests if _place(test) in timed}


def _place(test: str) -> tuple[str, str]:
    file, *names = test.partition("[")[0].split("::")
    return file, names[-1] if names else ""


def _calls_in(file: Path) -> Iterable[tuple[str, set[str]]]:
    try:
        parsed = syntax.parse(file.read_text())
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, {_name_of(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}


def _name_of(func: ast.expr) -> str:
    """The last word of what is called; `timeit.repeat` is a clock, `itertools.repeat` is none."""
    if isinstance(func, ast.Attribute):
        return "timeit" if isinstance(func.value, ast.Name) and func.value.id == "timeit" else func.attr
    return func.id if isinstance(func, ast.Name) else ""
