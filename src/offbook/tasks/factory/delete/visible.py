"""The visible tests: what the agent may see and run once a feature is deleted."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

import libcst as cst

from offbook.core import pycode
from offbook.tasks.factory.delete.surgery import Orders, Scoped, dotted, operate, parse
from offbook.tasks.factory.delete.symbols import Lost, Symbols, lost_names, module_of, uses
from offbook.tasks.factory.types import Deletion, is_test_code

WITHOUT_TESTS = {"object", "TestCase", "IsolatedAsyncioTestCase"}  # classes that bring no tests


def without_tests(
    files: Mapping[str, str],
    failing: tuple[str, ...],
    deletion: Deletion | None = None,
    import_roots: tuple[str, ...] = (".", "src"),
) -> dict[str, str | None]:
    """What becomes of the test files: path -> new text, None where one goes. `files` is the tree before the deletion.

    A failing test goes as a whole function, whichever of its cases fails; one that a class inherits is switched off,
    and so is one that may stand in the place of an inherited one, which would come back.
    With `deletion`, imports of names that it took away are cleaned in every test file; a file that still reads such a
    name while it is imported goes. With no failing tests this is all that is done, which makes the original tests
    runnable on the deleted tree. Doctests are in product code and documents, which this leaves alone.
    """
    by_file: dict[str, set[str]] = defaultdict(set)
    for node in failing:
        path, _, name = node.partition("[")[0].partition("::")
        if name and path.endswith(".py") and (is_test_code(path) or "." not in name):  # no doctest of the product
            by_file[path].add(name.replace("::", "."))
    changed: dict[str, str | None] = {}
    trees: dict[str, cst.Module] = {}  # of changed files: to read a long one again takes seconds
    for path, names in sorted(by_file.items()):
        remover = _TestRemover(names, _inherited(files[path], names))
        trees[path] = parse(files[path]).visit(remover)
        text = trees[path].code
        changed[path] = text if _has_tests(text) or _is_imported(path, files) else None
    if deletion is not None:
        changed |= _cleaned(files, changed, trees, deletion, import_roots)
    return {path: text for path, text in changed.items() if text != files[path]}


class _TestRemover(Scoped):
    def __init__(self, names: set[str], inherited: set[str]):
        super().__init__()
        self._names = names
        self._inherited = inherited

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        del self.scope[-2:]
        return cst.RemoveFromParent() if self.qualified(original_node.name.value) in self._names else updated_node

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef | cst.RemovalSentinel:
        self.scope.pop()
        name = self.qualified(original_node.name.value)
        off = sorted(test.rpartition(".")[2] for test in self._inherited if test.rpartition(".")[0] == name)
        body = [*updated_node.body.body, *(cst.parse_statement(f"{test} = None") for test in off)]
        if not off:
            return updated_node if not _left_empty(original_node, updated_node) else cst.RemoveFromParent()
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        assigns = [part for part in updated_node.body if isinstance(part, cst.Assign)]
        if "<locals>" in self.scope or len(assigns) != len(updated_node.body):
            return updated_node
        names = {self.qualified(dotted(target.target)) for part in assigns for target in part.targets}
        return cst.RemoveFromParent() if names and names <= self._names else updated_node


def _left_empty(before: cst.ClassDef, after: cst.ClassDef) -> bool:
    """Nothing but a docstring is left of what had more."""
    has_docstring = after.get_docstring(clean=False) is not None
    return len(after.body.body) == has_docstring and len(after.body.body) < len(before.body.body)


def _inherited(source: str, names: set[str]) -> set[str]:
    """The failing tests that their class does not define itself, or may have from another one, too."""
    own = _of_their_own(source)
    return {name for name in names if "." in name and ".".join(name.split(".")[-2:]) not in own}


@lru_cache(maxsize=256)
def _of_their_own(source: str) -> frozenset[str]:
    """What is defined in classes that have no tests from another one."""
    classes = [node for node in ast.walk(pycode.parse(source)) if isinstance(node, ast.ClassDef)]
    alone = [node for node in classes if {ast.unparse(base).rpartition(".")[2] for base in node.bases} <= WITHOUT_TESTS]
    return frozenset(f"{node.name}.{part}" for node in alone for part in _defined(node))


def _defined(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif not isinstance(child, ast.expr):
            found |= _defined(child)
    return found


@lru_cache(maxsize=256)
def _has_tests(source: str) -> bool:
    tree = pycode.parse(source)
    inherits = any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return inherits or any(name.startswith("test") for node in [tree, *classes] for name in _defined(node))


def _is_imported(path: str, files: Mapping[str, str]) -> bool:
    """Whether another test file gets its helpers here."""
    stem = path.removesuffix(".py").rpartition("/")[2]
    return any(
        stem in {imported.module.rpartition(".")[2], imported.name}
        for other, text in files.items()
        if other != path and stem in text and is_test_code(other) and (module := module_of(other, text, (".",)))
        for imported in module.imports
    )


def _cleaned(
    files: Mapping[str, str],
    changed: Mapping[str, str | None],
    trees: Mapping[str, cst.Module],
    deletion: Deletion,
    import_roots: tuple[str, ...],
) -> dict[str, str | None]:
    product = {path: text for path, text in files.items() if path.endswith(".py") and not is_test_code(path)}
    symbols = modules_of(product, import_roots)
    after = {p: t for p in product if (t := deletion.files.get(p, product[p])) is not None}
    lost = vanished(product, after, import_roots)
    modules = {symbols.modules[path].name for path, text in deletion.files.items() if text is None and path in product}
    result: dict[str, str | None] = {}
    if not lost and not modules:
        return result
    for path in filter(is_test_code, files):
        text = changed.get(path, files[path])
        if text is None:
            continue
        module = module_of(path, text, import_roots)
        names = lost_names(module, lost, symbols) if module else {}
        if module is None or not (names or any(map(module.imports_module, modules))):
            continue
        orders = Orders(lost=names, statements=True, modules=modules, package=module.package)
        text = operate(trees.get(path, text), orders).source
        stays = _imports_well(text, set(names)) and (_has_tests(text) or _is_imported(path, files))
        result[path] = text if stays or not _has_tests(files[path]) else None
    return result


def modules_of(files: Mapping[str, str], import_roots: tuple[str, ...]) -> Symbols:
    """Modules without their functions. They are remembered by their text, so a tree is read once for all deletions."""
    modules = {path: module for path, text in files.items() if (module := module_of(path, text, import_roots))}
    return Symbols({}, modules, {}, import_roots)


def vanished(files_before: Mapping[str, str], files_after: Mapping[str, str], import_roots: tuple[str, ...]) -> Lost:
    """What each module binds no longer. Through a star import names come and go unseen: those are followed."""
    before = modules_of(files_before, import_roots)
    after = modules_of(files_after, import_roots)
    lost: Lost = {}
    for path in before.modules:
        now = _all_names(path, after, set()) if path in after.modules else set()
        gone = _all_names(path, before, set()) - now
        if gone:
            lost[path] = {name: frozenset() for name in gone}
    return lost


def _all_names(path: str, symbols: Symbols, seen: set[str]) -> set[str]:
    module = symbols.modules[path]
    names = set(module.names) - {"*"}
    for imported in module.imports:
        target = symbols.path_of(imported.module) if imported.name == "*" else None
        if target is not None and target not in seen:
            names |= _all_names(target, symbols, {*seen, path})
    return names


def _imports_well(source: str, lost: set[str]) -> bool:
    """Whether nothing that runs at import reads a lost name: function bodies do not run then."""
    tree = pycode.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return not uses(ast.unparse(tree)).names & lost
