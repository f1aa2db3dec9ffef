"""The test files on a tree without a feature: those that the agent sees, and those that can be run there."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.core.pycode import nodes
from offbook.tasks.factory.delete.surgery import Orders, operate
from offbook.tasks.factory.delete.symbols import lost_in, lost_names, module_of, read_in
from offbook.tasks.factory.types import Deletion, is_test_code, last

WITHOUT_TESTS = {"object", "TestCase", "IsolatedAsyncioTestCase"}  # base classes that bring no tests
STAND_IN = "{0} = type({0!r}, (Exception,), {{'__class_getitem__': classmethod(lambda cls, _: cls)}})\n"


def without_tests(
    files: Mapping[str, str],
    failing: tuple[str, ...],
    deletion: Deletion | None = None,
    import_roots: tuple[str, ...] = (".", "src"),
) -> dict[str, str | None]:
    """What becomes of the test files: path -> new text, None where one goes. `files` is the tree before the deletion.

    A failing test goes as a whole function, whichever of its cases fails. With `deletion`, imports of names that it
    took away go from every test file; a file that still reads such a name while it is imported goes. With no failing
    tests the original tests are made runnable on the deleted tree (`runnable`). Doctests are in product code and
    documents, which this leaves alone.
    """
    by_file: dict[str, set[str]] = defaultdict(set)
    for node in failing:
        path, _, name = node.partition("[")[0].partition("::")
        if name and path.endswith(".py") and (is_test_code(path) or "." not in name):  # no doctest of the product
            by_file[path].add(name.replace("::", "."))
    tests = {path: text for path, text in files.items() if path in by_file or is_test_code(path)}
    lost: set[str] = set()
    if deletion is not None:
        product = {path: text for path, text in files.items() if path not in tests}
        after = {path: text for path, text in {**product, **deletion.files}.items() if text is not None}
        lost = lost_names(product, after, import_roots)
    if not failing:
        return {**runnable(tests, lost, import_roots)}
    changed: dict[str, str | None] = {}
    for path, text in tests.items():
        left, early = _cleaned(path, _without(text, by_file.get(path, ())), lost, import_roots)
        if left != text or early:
            has_use = not early and (_has_tests(left) or _is_imported(path, files))
            changed[path] = left if has_use or not _has_tests(text) else None
    return changed


def runnable(tests: Mapping[str, str], lost: set[str], import_roots: tuple[str, ...]) -> dict[str, str]:
    """The test files that change because they import lost names: one such name would keep the whole file from being
    collected.

    Tests that use the name fail with a NameError. What is read while the file is imported gets a stand-in that can be
    raised, subclassed, subscripted and listed, and does nothing right.
    """
    changed = {}
    for path, text in tests.items():
        cleaned, early = _cleaned(path, text, lost, import_roots)
        if cleaned == text:
            continue
        imports = nodes(pycode.parse(cleaned), ast.ImportFrom)
        after = max((node.end_lineno or 0 for node in imports if node.module == "__future__"), default=0)
        lines = cleaned.splitlines(keepends=True)
        stand_ins = [STAND_IN.format(name) for name in sorted(early) if "." not in name]
        changed[path] = "".join([*lines[:after], *stand_ins, *lines[after:]])
    return changed


def _cleaned(path: str, text: str, lost: set[str], import_roots: tuple[str, ...]) -> tuple[str, set[str]]:
    """The text without imports of what is lost, and the lost names that are still read while it is imported."""
    module = module_of(path, text, import_roots) if lost and path.endswith(".py") else None
    if module is None:
        return text, set()
    tree = pycode.parse(text)
    names = lost_in(module, read_in(tree), lost)
    if not names:
        return text, set()
    imported = {one.bound for one in module.imports if one.top and one.bound in names}
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            node.body = [ast.Pass()]  # does not run at import
    return operate(text, Orders(lost=imported)).source, names.keys() & read_in(tree)


def _without(source: str, names: Collection[str]) -> str:
    """A test file without some of its tests. What a class inherits, or may inherit in their place, is switched off."""
    if not names:
        return source
    after = operate(source, Orders(remove=names))
    text = after.source
    tree = pycode.parse(source)
    bases = {node.name: {last(ast.unparse(base)) for base in node.bases} for node in nodes(tree, ast.ClassDef)}
    for name in sorted(names):
        owner = last(name.rpartition(".")[0])
        is_inherited = owner in bases and (name not in after.removed or not bases[owner] <= WITHOUT_TESTS)
        if is_inherited or (name not in after.removed and name in pycode.binds(tree)):
            text = f"{text.rstrip()}\n{name} = None\n"
    return text


def _has_tests(source: str) -> bool:
    tree = pycode.parse(source)
    if any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body):
        return True
    return any(node.name.startswith("test") for node in ast.walk(tree) if isinstance(node, Definition))


def _is_imported(path: str, files: Mapping[str, str]) -> bool:
    """Whether another test file gets its helpers here."""
    stem = path.removesuffix(".py").rpartition("/")[2]
    imported = re.compile(rf"^\s*(?:from|import)\b.*\b{stem}\b", re.M)
    return any(other != path and is_test_code(other) and imported.search(text) for other, text in files.items())
