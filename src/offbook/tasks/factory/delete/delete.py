"""A feature taken out of a tree, at three levels; the rest still imports and keeps its bytes.

`stub`: bodies become a raise. `hybrid`: public names are stubs, private helpers are gone. `gone`: public names are gone
too, with everything that names them. A function that something left over still names is stubbed instead: the deletion
is made, looked over for names that lead nowhere, and made again without those, until none is left. So another level may
come of it than was asked for: `gone` is one of which a target is gone, `stub` one of which nothing is.

Left out: names built at run time, and module-level constants that only deleted code read (they stay).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offbook.tasks.factory.delete import leftovers
from offbook.tasks.factory.delete.leftovers import Attempt
from offbook.tasks.factory.delete.surgery import Operated, Orders, operate
from offbook.tasks.factory.delete.symbols import Function, Lost, Symbols, spread
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, Level


def delete(files: Mapping[str, str], symbols: Symbols, feature: Feature, level: Level) -> Deletion:
    """`files` is the whole tree as text; the visible tests are left to `without_tests`."""
    doomed = _may_go(symbols, feature, level)
    while True:
        attempt = _attempt(files, symbols, feature, level, doomed)
        needed = leftovers.still_named(files, symbols, attempt, level, doomed)
        if not needed:
            break
        doomed -= needed
    changed = {path: text for path, text in attempt.files.items() if text != files[path]}
    if level == "gone":
        changed |= leftovers.scrub_documents(files, {key.name: symbols.modules[key.path].name for key in doomed})
    deleted = {key for key in feature.functions if key in doomed or key.is_inside(doomed | {*feature.functions})}
    stubbed = {key for key in feature.functions if str(key) in attempt.removed} - deleted
    used = level_used(feature, level, doomed)
    return Deletion(feature, used, changed, attempt.removed, tuple(sorted(stubbed)), tuple(sorted(deleted)))


def delete_functions(
    files: Mapping[str, str], names: Iterable[tuple[str, str]], failing: Iterable[str]
) -> dict[str, str]:
    """The tree with some functions stubbed, each a path and a name, and without the tests that fail then; all else
    keeps its bytes, imports that nothing uses any more included."""
    by_file: dict[str, set[str]] = {}
    for path, name in names:
        by_file.setdefault(path, set()).add(name)
    changed: dict[str, str | None] = {**without_tests(files, tuple(failing))}
    for path, stubbed in by_file.items():
        after = operate(files[path], Orders(stub=stubbed))
        if lacking := stubbed - after.removed.keys():
            raise ValueError(f"there is no function {min(lacking)} with a body in {path}")
        changed[path] = after.source
    return {path: text for path in files if (text := changed.get(path, files[path])) is not None}


def _may_go(symbols: Symbols, feature: Feature, level: Level) -> set[FunctionKey]:
    """The functions that may go altogether, and the classes that nobody else can have an instance of.

    Dunder methods answer to syntax, not to a name, and go only with their class.
    """
    if level == "stub":
        return set()
    functions = [symbols.functions[key] for key in feature.functions]
    found = {
        function.key
        for function in functions
        if not (function.nested or function.dunder or (level == "hybrid" and function.public))
        and not _overrides(function, symbols)
    }
    for owner in {FunctionKey(function.key.path, function.owner) for function in functions if function.owner}:
        hidden = any(part.startswith("_") for part in owner.name.split("."))
        if "<locals>" not in owner.name and (level == "gone" or hidden) and _is_whole_class(owner, symbols, feature):
            found.add(owner)
    return found


def level_used(feature: Feature, level: Level, gone: set[FunctionKey]) -> Level:
    """The one that came of it: what is left may need all the names, or all of those that are asked for."""
    if not gone:
        return "stub"
    return level if any(key in gone or key.is_inside(gone) for key in feature.targets) else "hybrid"


def _is_whole_class(owner: FunctionKey, symbols: Symbols, feature: Feature) -> bool:
    """All its methods are in the feature, or at least all by which an instance is made or none is needed."""
    whole = set(feature.functions)
    methods = [f for f in symbols.functions.values() if f.key.path == owner.path and f.owner == owner.name]
    makers = {method.key for method in methods if method.simple in {"__init__", "__new__"}}
    free = {method.key for method in methods if {"classmethod", "staticmethod"} & {*method.decorators}}
    return (bool(makers) and makers | free <= whole) or all(method.key in whole for method in methods)


def _overrides(function: Function, symbols: Symbols) -> bool:
    """Whether a base class has the method too: without the override calls would reach the base's."""
    if not function.owner:
        return False
    known = {name: bases for module in symbols.modules.values() for name, bases in module.bases.items()}
    owners = {f.owner.rpartition(".")[2] for f in symbols.functions.values() if f.owner and f.simple == function.simple}
    waiting, seen = list(known.get(function.owner.rpartition(".")[2], ())), set()
    while waiting:
        base = waiting.pop()
        if base in owners:
            return True
        if base not in seen:
            seen.add(base)
            waiting += known.get(base, ())
    return False


def _attempt(
    files: Mapping[str, str], symbols: Symbols, feature: Feature, level: Level, doomed: set[FunctionKey]
) -> Attempt:
    lost: Lost = {}
    for key in doomed:
        lost.setdefault(key.path, {})[key.name] = frozenset({key})
    while True:
        lost = spread(symbols, lost)
        touched = sorted({*lost} | {key.path for key in feature.functions})
        outcomes = {path: _operate(files[path], path, symbols, feature, level, doomed, lost) for path in touched}
        grown = False
        for path, outcome in outcomes.items():  # a statement that goes takes the names with it that it assigned
            for name, values in outcome.taken.items():
                known = lost[path].get(name, frozenset())
                lost[path][name] = known.union(*(lost[path][value] for value in values))
                grown = grown or lost[path][name] != known
        if not grown:
            break
    attempt = Attempt({path: outcome.source for path, outcome in outcomes.items()}, lost=lost)
    for path, outcome in outcomes.items():
        attempt.removed |= {f"{path}::{name}": text for name, text in outcome.removed.items()}
    if doomed:
        leftovers.drop_unused_imports(files, symbols, attempt)
        leftovers.drop_empty_files(files, symbols, attempt, level)
    for path in {key.path for key in doomed}:
        if (declared := path + "i") in files:  # the same definitions in the .pyi file next to a module
            names = {key.name for key in doomed if key.path == path}
            attempt.files[declared] = operate(files[declared], Orders(remove=names, lost=names)).source
    return attempt


def _operate(
    source: str, path: str, symbols: Symbols, feature: Feature, level: Level, doomed: set[FunctionKey], lost: Lost
) -> Operated:
    names = {*lost.get(path, ())}
    orders = Orders(
        stub={key.name for key in feature.functions if key.path == path and key not in doomed},
        remove={key.name for key in doomed if key.path == path},
        lost=set(lost.get(path, {})),
        statements=level == "gone",
        package=symbols.modules[path].package,
        edit_docstring=(lambda text: leftovers.drop_examples(text, names)) if level == "gone" and names else None,
    )
    return operate(source, orders)
