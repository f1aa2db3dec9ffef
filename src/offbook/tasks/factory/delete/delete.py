"""A feature taken out of a tree, at three levels; the rest still imports and keeps its bytes.

`stub`: bodies become a raise. `hybrid`: public names are stubs, private helpers are gone. `gone`: public names are gone
too, with their imports and exports. A function that something left over still uses is stubbed instead. So another level
may come of it than was asked for: `gone` is one of which a target is gone, `stub` one of which nothing is.

Imports that only deleted code used go as well. Documents stay.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from offbook.core import pycode
from offbook.tasks.factory.delete.surgery import Orders, operate
from offbook.tasks.factory.delete.symbols import Module, Symbols, read_in
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.types import COMMON, Deletion, Feature, FunctionKey, Level, is_test_code, last


def delete(files: Mapping[str, str], symbols: Symbols, feature: Feature, level: Level) -> Deletion:
    """`files` is the whole tree as text; the visible tests are left to `without_tests`."""
    doomed = _may_go(symbols, feature, level)
    outside = _named_outside(files, doomed, level)
    while needed := _needed(symbols, feature, doomed, outside):
        doomed -= needed
    changed: dict[str, str | None] = {}
    removed: dict[str, str] = {}
    for path, module in symbols.modules.items():
        top = {imported.bound for imported in module.imports if imported.top} | {*(module.exports or ())}
        remove = {key.name for key in doomed if key.path == path}
        lost = {name for name in top if symbols.definition(path, name) in doomed} if doomed else set()
        stub = {key.name for key in feature.functions if key.path == path} - remove
        if not (lost or remove or stub):
            continue
        after = operate(files[path], Orders(stub=stub, remove=remove, lost=lost | remove))
        removed |= {f"{path}::{name}": text for name, text in after.removed.items()}
        if after.source == files[path]:
            continue
        changed[path] = after.source
        if doomed and not path.endswith("__init__.py"):
            unused = _unused_imports(files, module, after.source)
            changed[path] = operate(after.source, Orders(lost=unused)).source
    deleted = {key for key in feature.functions if key in doomed or key.is_inside(doomed | {*feature.functions})}
    stubbed = {key for key in feature.functions if str(key) in removed} - deleted
    if not any(key in doomed or key.is_inside(doomed) for key in feature.targets):  # the level that came of it
        level = "hybrid" if doomed else "stub"
    return Deletion(feature, level, changed, removed, tuple(sorted(stubbed)), tuple(sorted(deleted)))


def delete_functions(
    files: Mapping[str, str], names: Iterable[tuple[str, str]], failing: Iterable[str]
) -> dict[str, str]:
    """The tree with some functions stubbed, each a path and a name, and without the tests that fail then; all else
    keeps its bytes, imports that nothing uses any more included."""
    by_file: dict[str, set[str]] = defaultdict(set)
    for path, name in names:
        by_file[path].add(name)
    changed = without_tests(files, tuple(failing))
    for path, stubbed in by_file.items():
        after = operate(files[path], Orders(stub=stubbed))
        if lacking := stubbed - after.removed.keys():
            raise ValueError(f"there is no function {min(lacking)} with a body in {path}")
        changed[path] = after.source
    return {path: text for path, text in {**files, **changed}.items() if text is not None}


def _may_go(symbols: Symbols, feature: Feature, level: Level) -> set[FunctionKey]:
    """The functions that may go altogether, and the classes of which no instance can be made without them.

    Dunder methods answer to syntax, not to a name, and go only with their class. Without an override calls would reach
    the method of the base class.
    """
    if level == "stub":
        return set()
    functions = [symbols.functions[key] for key in feature.functions]
    found = {
        function.key
        for function in functions
        if not (function.nested or function.dunder or (level == "hybrid" and function.public))
        and not symbols.is_override(function.key)
    }
    for owner in {FunctionKey(function.key.path, function.owner) for function in functions if function.owner}:
        hidden = any(part.startswith("_") for part in owner.name.split("."))
        if "<locals>" not in owner.name and (level == "gone" or hidden) and _is_whole_class(owner, symbols, feature):
            found.add(owner)
    return found


def _is_whole_class(owner: FunctionKey, symbols: Symbols, feature: Feature) -> bool:
    """All its methods are in the feature, or at least all by which an instance is made or none is needed."""
    methods = [f for f in symbols.functions.values() if f.key.path == owner.path and f.owner == owner.name]
    makers = {method.key for method in methods if method.simple in {"__init__", "__new__"}}
    free = {method.key for method in methods if {"classmethod", "staticmethod"} & {*method.decorators}}
    needed = makers | free if makers else {method.key for method in methods}
    return needed <= {*feature.functions}


def _named_outside(files: Mapping[str, str], doomed: set[FunctionKey], level: Level) -> set[FunctionKey]:
    """Those that test code names. At `gone` the visible tests are cleaned of the names, all but conftest files, which
    every test needs."""
    if not doomed:
        return set()
    kept = (p for p in files if is_test_code(p) and (level != "gone" or p.endswith("conftest.py")))
    words = {word for path in kept for word in re.findall(r"\w+", files[path])}
    return {key for key in doomed if key.simple in words}


def _needed(symbols: Symbols, feature: Feature, doomed: set[FunctionKey], found: set[FunctionKey]) -> set[FunctionKey]:
    """The doomed functions and classes that what is left needs, besides those already `found`."""
    gone = doomed | {*feature.functions}
    needed = {*found}
    left = [calls for key, calls in symbols.calls.items() if key not in gone and not key.is_inside(gone)]
    unknown = {name for calls in left for name in calls.unknown} - COMMON
    for calls in left:
        needed |= calls.functions | calls.classes
    methods = (key for key in doomed & symbols.functions.keys() if symbols.functions[key].owner)
    needed |= {key for key in methods if key.simple in unknown}
    needed |= {FunctionKey(key.path, key.name.rpartition(".")[0]) for key in needed}  # a method needs its class
    return needed & doomed


def _unused_imports(files: Mapping[str, str], module: Module, after: str) -> set[str]:
    """Imports that only deleted code used. One that others import from here, or that a test patches, stays."""
    tree = pycode.parse(after)
    left = {name.partition(".")[0] for name in read_in(tree)} | {*pycode.strings_in(tree)}
    before = {name.partition(".")[0] for name in read_in(pycode.parse(files[module.path]))}
    others = "\n".join(text for path, text in files.items() if path != module.path and path.endswith(".py"))
    own = last(module.name)
    return {  # those of __future__ are never read
        imported.bound
        for imported in module.imports
        if imported.top
        and imported.bound in before - left
        and not re.search(rf"\b{own}\b[^\n]*\b{imported.bound}\b", others)
    }
