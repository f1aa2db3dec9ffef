"""A feature taken out of a tree, at three levels; the rest still imports and keeps its bytes.

`stub`: bodies become a raise. `hybrid`: public names are stubs, private helpers are gone. `gone`: public names are gone
too, with everything that names them. A function that something left over still names is stubbed instead: the deletion
is made, looked over for names that lead nowhere, and made again without those, until none is left. So another level may
come of it than was asked for: `gone` is one of which a target is gone, `stub` one of which nothing is.

Left out: names built at run time, and module-level constants that only deleted code read (they stay).

What is left then is cleaned: imports nobody uses, files with nothing in them, documents and examples in docstrings that
give a name away.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from offbook.core import pycode
from offbook.tasks.factory.delete.surgery import Operated, Orders, operate
from offbook.tasks.factory.delete.symbols import (
    Function,
    Lost,
    Module,
    Origins,
    Symbols,
    Uses,
    lost_names,
    module_of,
    spread,
    uses,
)
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.types import COMMON, Deletion, Feature, FunctionKey, Level, is_test_code


def delete(files: Mapping[str, str], symbols: Symbols, feature: Feature, level: Level) -> Deletion:
    """`files` is the whole tree as text; the visible tests are left to `without_tests`."""
    doomed = _may_go(symbols, feature, level)
    while True:
        attempt = _attempt(files, symbols, feature, level, doomed)
        needed = still_named(files, symbols, attempt, level, doomed)
        if not needed:
            break
        doomed -= needed
    changed = {path: text for path, text in attempt.files.items() if text != files[path]}
    if level == "gone":
        changed |= scrub_documents(files, {key.name: symbols.modules[key.path].name for key in doomed})
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
    waiting = list(known.get(function.owner.rpartition(".")[2], ()))
    seen = set()
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
        drop_unused_imports(files, symbols, attempt)
        drop_empty_files(files, symbols, attempt, level)
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
        edit_docstring=(lambda text: drop_examples(text, names)) if level == "gone" and names else None,
    )
    return operate(source, orders)


DOCUMENTS = (".md", ".rst", ".txt")
QUOTES = r"""(?:\"{3}|'{3}|["'])"""
EXAMPLE = re.compile(rf"\s*(?:[rRuUbB]*{QUOTES})?(?:>>>|\.\.\.)")
NAMED = ("CHANGELOG", "CHANGES", "HISTORY", "NEWS", "README")


@dataclass(slots=True)
class Attempt:
    """A deletion that has yet to be looked over."""

    files: dict[str, str | None]
    removed: dict[str, str] = field(default_factory=dict)
    lost: Lost = field(default_factory=dict)


def drop_unused_imports(files: Mapping[str, str], symbols: Symbols, attempt: Attempt) -> None:
    """Imports that only deleted code used. One that others import from here, or that a test patches, stays."""
    elsewhere = {
        (imported.module, imported.name)
        for path, text in files.items()
        if path.endswith(".py") and (module := module_of(path, text, symbols.import_roots))
        for imported in module.imports
    }
    tests = "\n".join(text for path, text in files.items() if is_test_code(path))
    for path, text in attempt.files.items():
        module = symbols.modules[path]
        if text is None or text == files[path] or path.endswith("__init__.py"):
            continue
        before = uses(files[path])
        after = uses(text)
        unused = {
            imported.bound
            for imported in module.imports
            if imported.top
            and imported.module != "__future__"
            and imported.bound in before.names
            and imported.bound not in after.names | after.strings
            and (module.name, imported.bound) not in elsewhere
            and f"{module.name.rpartition('.')[2]}.{imported.bound}" not in tests
        }
        if unused:
            attempt.files[path] = operate(text, Orders(lost=unused, package=module.package)).source


def drop_empty_files(files: Mapping[str, str], symbols: Symbols, attempt: Attempt, level: Level) -> None:
    """Files that defined what is gone and have nothing but imports left, unless somebody needs to import them."""
    defining = {where.partition("::")[0] for where in attempt.removed}
    for path, text in sorted(attempt.files.items()):
        if text is None or path not in defining or path.endswith(("__init__.py", "__main__.py")) or not _is_empty(text):
            continue
        name = symbols.modules[path].name
        cleaned: dict[str, str | None] = {path: None}

        def importing(other: str, source: str | None) -> Module | None:
            module = module_of(other, source, symbols.import_roots) if source is not None else None
            return module if module and module.imports_module(name) else None  # noqa: B023  # of this file

        for other, source in {**files, **attempt.files}.items():
            if other == path or not other.endswith(".py") or (level == "gone" and is_test_code(other)):
                continue
            if source is not None and (module := importing(other, source)):
                cleaned[other] = operate(source, Orders(modules={name}, package=module.package)).source
        still = any(importing(other, source) for other, source in cleaned.items())
        if not still and all(other in symbols.modules for other in cleaned):
            attempt.files |= cleaned


def _is_empty(source: str) -> bool:
    def is_nothing(node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            exports = all(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
            return exports and isinstance(node.value, ast.List | ast.Tuple) and not node.value.elts
        if isinstance(node, ast.Expr):
            return isinstance(node.value, ast.Constant)
        return isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)

    return all(map(is_nothing, pycode.parse(source).body))


def still_named(
    files: Mapping[str, str], symbols: Symbols, attempt: Attempt, level: Level, doomed: set[FunctionKey]
) -> set[FunctionKey]:
    """The doomed functions and classes that something left over needs: code, test set-up, or an entry point.

    At `gone` the visible tests are cleaned of the names, all but conftest files, which every test needs.
    """
    found: set[FunctionKey] = set()
    looked_for = {key: frozenset({key}) for key in doomed} | _taken_from_classes(symbols, attempt)
    for path in files:
        text = attempt.files.get(path, files[path])
        kept_test = is_test_code(path) and (level != "gone" or path.endswith("conftest.py"))
        if text is None or not doomed or (path not in symbols.modules and not kept_test):
            continue
        module = module_of(path, text, symbols.import_roots)
        if module is None:
            continue
        read = uses(text)
        inside_functions = {imported.bound for imported in module.imports if not imported.top}
        for name, origins in {**attempt.lost.get(path, {}), **lost_names(module, attempt.lost, symbols)}.items():
            if name in read.names or name in inside_functions or (kept_test and "." not in name):
                found |= origins
        for key, origins in looked_for.items():
            if not origins <= found and _is_reached(key, path, read, symbols, level):
                found |= origins
    entries = "\n".join(text for path, text in files.items() if path.endswith((".toml", ".cfg", "setup.py")))
    found |= {key for key in doomed if f":{key.name}" in entries}
    found |= {FunctionKey(key.path, key.name.rpartition(".")[0]) for key in found}  # a method needs its class
    return found & doomed


def _taken_from_classes(symbols: Symbols, attempt: Attempt) -> dict[FunctionKey, Origins]:
    """What a class body assigned from what is lost, such as a property, is reached as a method is."""
    return {
        FunctionKey(path, name): origins
        for path, names in attempt.lost.items()
        for name, origins in names.items()
        if "." in name and name.partition(".")[0] in symbols.modules[path].bases
    }


def _begins(text: str, name: str) -> bool:
    """Whether a name may be put together from it: "visit_" + kind, f"visit_{kind}", "visit_%s" % kind."""
    start = re.split(r"[{%]", text, maxsplit=1)[0]
    return len(start) > 3 and start.endswith("_") and name.startswith(start) and name != start


def _is_reached(key: FunctionKey, path: str, read: Uses, symbols: Symbols, level: Level) -> bool:
    """By a string, or as an attribute. Private names are rare enough for every match to count."""
    owner, _, simple = key.name.rpartition(".")
    hidden = simple.startswith("_")
    if simple in (read.strings if hidden or level == "hybrid" else read.looked_up):
        return True
    if any(text.endswith(f".{key.name}") or _begins(text, simple) for text in read.strings):
        return True
    receivers = {receiver for receiver, attribute in read.attributes if attribute == simple}
    if not owner or not receivers:
        return False
    others = {f.owner for f in symbols.functions.values() if f.simple == simple and f.owner and f.key != key}
    on_itself = path == key.path and owner in receivers
    on_unknown = bool(receivers - {""} - others)  # self of a class that has no such method: it inherits
    return hidden or on_itself or on_unknown or ("" in receivers and not others and simple not in COMMON)


def scrub_documents(files: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str | None]:
    """The documents that change. `names` are qualified names and the modules they are in: a method is looked for as
    Class.method, a function alone or after parts of its module's name, so that `", ".join(` is no `pkg.text.join(`."""
    mention = _mention(names)
    if mention is None:
        return {}
    changed: dict[str, str | None] = {}
    for path, text in files.items():
        name = path.rpartition("/")[2]
        if (path.endswith(DOCUMENTS) or name in NAMED) and (after := scrub(text, mention)) != text:
            changed[path] = after
    return changed


def _mention(names: Mapping[str, str]) -> re.Pattern[str] | None:
    """A name in code marks, called, dotted, or alone on its line. One with an underscore is no English word."""
    ways = []
    for name, module in sorted(names.items()):
        owner, _, simple = name.rpartition(".")
        word = re.escape(simple)
        if owner:
            ways += [rf"\b{re.escape(owner.rpartition('.')[2])}\.{word}\b"]
            continue
        inside = "|".join(map(re.escape, filter(None, module.split("."))))
        prefix = rf"(?<![\w.])(?:(?:{inside})\.)*" if inside else r"(?<![\w.])"
        ways += [
            rf"`~?{prefix}{word}(?:\(\))?`",
            rf"{prefix}{word}\(",
            rf"(?m:^[\s*+-]*{word}\s*$)",
            rf":: +{prefix}{word}\b",
        ]
        if inside:
            ways.append(rf"(?<![\w.])(?:(?:{inside})\.)+{word}\b(?!\.\w)")
        if "_" in simple.strip("_"):
            ways.append(rf"{prefix}{word}\b")
    return re.compile("|".join(ways)) if ways else None


def scrub(text: str, mention: re.Pattern[str]) -> str:
    """The text without the blocks that name it: a list item or table row alone, else the whole paragraph."""
    lines = text.split("\n")
    gone: set[int] = set()
    for number, line in enumerate(lines):
        if number not in gone and mention.search(line):
            gone.update(_block(lines, number))
    if not gone:
        return text
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


ITEM = re.compile(r"\s*(?:[*+-]|\d+[.)])\s+")
SINGLE = re.compile(r"\s*(?:\||[.\w]+\s*$)")  # a table row, or a bare name in a list of names


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(lines: list[str], number: int) -> range:
    """The lines that go because this one names it."""
    line = lines[number]
    first = number
    while first > 0 and not ITEM.match(lines[first]) and lines[first - 1].strip() and not lines[first].startswith(".."):
        first -= 1
    if ITEM.match(lines[first]):
        return range(first, _end_of_indented(lines, first))
    if line.lstrip().startswith(".. "):
        return range(number, _end_of_indented(lines, number))
    if SINGLE.match(line):
        return range(number, number + 1)
    last = number
    while last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    if any(line.lstrip().startswith(("```", "~~~")) for line in lines[first : last + 1]):
        return range(number, number + 1)  # half a fence would swallow what follows
    return range(first, last + 1 + (last + 1 < len(lines) and not lines[last + 1].strip()))


def _end_of_indented(lines: list[str], first: int) -> int:
    end = first + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > _indent(lines[first]):
        end += 1
    if lines[first].lstrip().startswith(".. ") or ITEM.match(lines[first]):  # both may have further paragraphs
        while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > _indent(lines[first])):
            end += 1
        while end > first + 1 and not lines[end - 1].strip():
            end -= 1
    return end


def drop_examples(text: str, names: Collection[str]) -> str:
    """A docstring without the interactive examples that call one of the names; an example ends at an empty line.

    A method is called on something: only where the docstring names its class is it taken for this one.
    """
    ways = [rf"(?<![\w.]){re.escape(name)}\(" for name in names if "." not in name]
    ways += [
        rf"\.{re.escape(method)}\("
        for owner, _, method in (name.rpartition(".") for name in sorted(names))
        if owner and re.search(rf"\b{re.escape(owner.rpartition('.')[2])}\b", text)
    ]
    if not ways:
        return text
    called = re.compile("|".join(ways))
    if ">>>" not in text or not called.search(text):
        return text
    groups = re.split(r"(\n[ \t]*\n)", text)
    kept: list[str] = []
    for number in range(0, len(groups), 2):
        group = groups[number]
        separator = groups[number + 1] if number + 1 < len(groups) else ""
        examples = [line for line in group.split("\n") if EXAMPLE.match(line)]
        if any(called.search(line) for line in examples):
            group = _without_examples(group, last=not separator)
            if not group.strip():
                continue
        kept += [group, separator]
    return "".join(kept)


def _without_examples(group: str, last: bool) -> str:
    """Lines before the first example stay, and so do the closing quotes of the docstring."""
    lines = group.split("\n")
    first = next(number for number, line in enumerate(lines) if EXAMPLE.match(line))
    opening = re.match(rf"\s*[rRuUbB]*{QUOTES}", lines[first])
    kept = lines[:first]
    if opening:
        kept.append(
            opening.group() + (re.findall(QUOTES, lines[first])[-1] if last and len(lines) == first + 1 else "")
        )
    elif last:
        closing = re.search(f"{QUOTES}$", group)
        kept.append((" " * _indent(lines[-1])) + (closing.group() if closing else ""))
    return "\n".join(kept)
