"""Feature deletion: a function's body is taken out, and with it the visible tests that need it.

Everything else stays byte for byte as it was, imports that nothing uses any more included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import libcst as cst


def stub_function(source: str, name: str) -> str:
    """The source with the body of `name` (a function, or Class.method) replaced by its docstring and a raise."""
    module = cst.parse_module(source)
    stubber = _Stubber(name, cst.parse_statement(f'raise NotImplementedError("{name}")', module.config_for_parsing))
    stubbed = module.visit(stubber)
    if not stubber.found:
        raise ValueError(f"there is no function {name} to stub")
    return stubbed.code


def remove_functions(source: str, names: Collection[str]) -> str:
    """The source without the functions `names`, each a function or Class.method. A class left empty goes too."""
    remover = _Remover(names)
    shorter = cst.parse_module(source).visit(remover)
    if missing := set(names) - remover.found:
        raise ValueError(f"there is no function {', '.join(sorted(missing))} to remove")
    return shorter.code


def delete_feature(files: Mapping[str, str], path: str, name: str, failing: Iterable[str]) -> dict[str, str]:
    """What the agent gets to see: `name` in `path` stubbed, the failing tests (node ids) gone.

    A test file that loses all its tests disappears.
    """
    tree = {**files, path: stub_function(files[path], name)}
    failing_in: dict[str, set[str]] = defaultdict(set)
    for node in failing:
        test_file, *names = node.partition("[")[0].split("::")  # without the parameters
        failing_in[test_file].add(".".join(names))
    for test_file, failing_names in failing_in.items():
        tree[test_file] = remove_functions(tree[test_file], failing_names)
        if not _has_tests(tree[test_file]):
            del tree[test_file]
    return tree


class _QualifiedNames(cst.CSTTransformer):
    """Knows the dotted name of the function being left. Functions inside of functions are bodies, not features."""

    def __init__(self) -> None:
        super().__init__()
        self._classes: list[str] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._classes.append(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def _qualified(self, node: cst.FunctionDef) -> str:
        return ".".join([*self._classes, node.name.value])


class _Stubber(_QualifiedNames):
    def __init__(self, name: str, stub: cst.SimpleStatementLine | cst.BaseCompoundStatement):
        super().__init__()
        self.found = False
        self._name = name
        self._stub = cst.ensure_type(stub, cst.SimpleStatementLine)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self._classes.pop()
        return updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if self._qualified(original_node) != self._name:
            return updated_node
        self.found = True
        return updated_node.with_changes(body=self._stubbed(updated_node))

    def _stubbed(self, function: cst.FunctionDef) -> cst.BaseSuite:
        """The footer, comments at the end of the body, goes with the body: it may give the body away."""
        has_docstring = function.get_docstring() is not None
        if isinstance(function.body, cst.SimpleStatementSuite):  # def f(x): return x
            docstring = function.body.body[:1] if has_docstring else ()
            return cst.SimpleStatementSuite([*docstring, *self._stub.body])
        block = cst.ensure_type(function.body, cst.IndentedBlock)
        docstring_lines = [_first_of(block.body[0])] if has_docstring else []
        return block.with_changes(body=[*docstring_lines, self._stub], footer=[])


def _first_of(line: cst.BaseStatement) -> cst.SimpleStatementLine:
    """A docstring's line, without what may follow it on that line after a semicolon."""
    line = cst.ensure_type(line, cst.SimpleStatementLine)
    if len(line.body) == 1:
        return line
    docstring = line.body[0].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
    return cst.SimpleStatementLine([docstring], leading_lines=line.leading_lines)


class _Remover(_QualifiedNames):
    def __init__(self, names: Collection[str]):
        super().__init__()
        self.found: set[str] = set()
        self._names = names

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef | cst.RemovalSentinel:
        self._classes.pop()
        return updated_node if updated_node.body.body else cst.RemoveFromParent()

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        name = self._qualified(original_node)
        if name not in self._names:
            return updated_node
        self.found.add(name)
        return cst.RemoveFromParent()


class _TestFinder(cst.CSTVisitor):
    found = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        self.found = self.found or node.name.value.startswith("test")
        return False


def _has_tests(source: str) -> bool:
    finder = _TestFinder()
    cst.parse_module(source).visit(finder)
    return finder.found
