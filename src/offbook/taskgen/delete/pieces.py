"""What surgery is done with: function bodies, and statements cleaned of names that mean nothing any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import libcst as cst

Item = TypeVar("Item", cst.ImportAlias, cst.BaseElement, cst.BaseDictElement)


def dotted(node: cst.CSTNode) -> str:
    """`a.b.c` of a name or an attribute of names, else empty."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def is_stubbable(function: cst.FunctionDef) -> bool:
    """Overloads and bodies of nothing but pass and ... have nothing to give away."""
    if any(dotted(d.decorator).rpartition(".")[2] == "overload" for d in function.decorators):
        return False
    return any(not _is_nothing(part) for part in body_without_docstring(function))


def _is_nothing(part: cst.CSTNode) -> bool:
    parts = part.body if isinstance(part, cst.SimpleStatementLine) else [part]
    return all(
        isinstance(p, cst.Pass) or (isinstance(p, cst.Expr) and isinstance(p.value, cst.Ellipsis)) for p in parts
    )


def body_without_docstring(function: cst.FunctionDef) -> list[cst.CSTNode]:
    parts: list[cst.CSTNode] = list(function.body.body)
    if function.get_docstring(clean=False) is None:
        return parts
    first = parts[0]
    if isinstance(first, cst.SimpleStatementLine) and len(first.body) > 1:  # "Doc."; x = 1
        return [first.with_changes(body=first.body[1:]), *parts[1:]]
    return parts[1:]


def stubbed(function: cst.FunctionDef, statement: str, module: cst.Module) -> cst.FunctionDef:
    """The function with `statement` for a body. Comments at the end of the body go too: they may give it away."""
    line = cst.ensure_type(cst.parse_statement(statement, module.config_for_parsing), cst.SimpleStatementLine)
    has_docstring = function.get_docstring(clean=False) is not None
    if isinstance(function.body, cst.SimpleStatementSuite):  # def f(x): return x
        docstring = function.body.body[:1] if has_docstring else ()
        return function.with_changes(body=cst.SimpleStatementSuite([*docstring, *line.body]))
    block = cst.ensure_type(function.body, cst.IndentedBlock)
    lines: list[cst.BaseStatement] = []
    if has_docstring:
        first = cst.ensure_type(block.body[0], cst.SimpleStatementLine)
        if len(first.body) > 1:
            alone = first.body[0].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            first = cst.SimpleStatementLine([alone], leading_lines=first.leading_lines)
        lines.append(first)
    return function.with_changes(body=block.with_changes(body=[*lines, line], footer=[]))


def without(items: Sequence[Item], gone: Callable[[Item], bool]) -> list[Item]:
    """The items that stay. The last one takes over the comma of the last one there was, so brackets keep their look."""
    kept = [item for item in items if not gone(item)]
    if kept and kept[-1] is not items[-1]:
        kept[-1] = kept[-1].with_changes(comma=items[-1].comma)
    return kept


def edited(statement: cst.BaseSmallStatement, editor: cst.CSTTransformer) -> cst.BaseSmallStatement:
    edited = statement.visit(editor)
    assert isinstance(edited, cst.BaseSmallStatement)  # the editors only shorten displays
    return edited


def names_in(node: cst.CSTNode) -> set[str]:
    """Every dotted name that is read, with its beginnings: a, a.b and a.b.c of a.b.c."""
    reader = _Names()
    node.visit(reader)
    return reader.found


class _Names(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self.found.add(dotted(node))
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)  # and not its keyword
        return False


class DropStrings(cst.CSTTransformer):
    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = names

    def _gone(self, element: cst.BaseElement) -> bool:
        return isinstance(element.value, cst.SimpleString) and element.value.evaluated_value in self._names

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=without(updated_node.elements, self._gone))

    def leave_Tuple(self, original_node: cst.Tuple, updated_node: cst.Tuple) -> cst.Tuple:
        return updated_node.with_changes(elements=without(updated_node.elements, self._gone))


class DropElements(cst.CSTTransformer):
    """Elements of lists, sets and dictionaries that are what is lost, or a tuple or a call with it."""

    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = names

    def _gone(self, element: cst.BaseElement | cst.BaseDictElement) -> bool:
        value = element.value
        parts = [value]
        if isinstance(value, cst.Tuple):
            parts = [part.value for part in value.elements]
        elif isinstance(value, cst.Call):  # pytest.param(f, 1), partial(f)
            parts = [value.func, *(argument.value for argument in value.args)]
        return any(dotted(part) in self._names for part in parts)

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=without(original_node.elements, self._gone))

    def leave_Set(self, original_node: cst.Set, updated_node: cst.Set) -> cst.Set:
        kept = without(original_node.elements, self._gone)
        return updated_node.with_changes(elements=kept) if kept else original_node

    def leave_Dict(self, original_node: cst.Dict, updated_node: cst.Dict) -> cst.Dict:
        return updated_node.with_changes(elements=without(original_node.elements, self._gone))


def is_export(statement: cst.BaseSmallStatement) -> bool:
    if isinstance(statement, cst.Assign):
        return any(dotted(target.target) == "__all__" for target in statement.targets)
    if isinstance(statement, cst.AnnAssign | cst.AugAssign):
        return dotted(statement.target) == "__all__"
    return (
        isinstance(statement, cst.Expr)
        and isinstance(statement.value, cst.Call)
        and dotted(statement.value.func).startswith("__all__.")
    )
