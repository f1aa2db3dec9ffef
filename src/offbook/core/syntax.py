"""Python source as a tree, also where its syntax is newer than the Python that runs offbook.

What `ast` does not know yet is read by libcst, whose grammar is newer, and said in older words on the same lines: type
parameters go, `type X = Y` is an assignment, an f-string with its own quotes inside becomes a call with its parts. So
names, strings and lines are right. Columns on such lines are those of the older words.
"""

from __future__ import annotations

import ast
import re
from itertools import accumulate
from typing import Any

import libcst as cst

Template = cst.FormattedString | cst.TemplatedString | cst.ConcatenatedString
Hole = cst.FormattedStringExpression | cst.TemplatedStringExpression
WITHOUT_PARAMETERS: dict[str, Any] = {
    "type_parameters": None,
    "whitespace_after_type_parameters": cst.SimpleWhitespace(""),  # libcst refuses any where there are none
}
DEEPEST = 200  # brackets in one another, for any Python; libcst may crash at more
Words = cst.FormattedStringText | cst.TemplatedStringText | cst.SimpleString


def parse(source: str | bytes) -> ast.Module:
    """As `ast.parse`, and with its SyntaxError where that is no Python of any version."""
    try:
        return ast.parse(source)
    except SyntaxError:
        older = lowered(source)
        if older is None:
            raise
    return ast.parse(older)


def lowered(source: str | bytes) -> str | None:
    """The same in older words; None where libcst cannot read it either, or there is nothing to say otherwise."""
    if _depth(source) > DEEPEST:
        return None
    try:
        module = cst.parse_module(source)
        older = module.visit(_Lower()).code
    except (cst.ParserSyntaxError, UnicodeDecodeError, RecursionError):
        return None
    return None if older == module.code else older


def _depth(source: str | bytes) -> int:
    """Of brackets, and those in strings and comments are counted with them."""
    text = source if isinstance(source, str) else source.decode("latin-1")
    return max(accumulate(1 if one in "([{" else -1 for one in re.findall(r"[()\[\]{}]", text)), default=0)


class _Lower(cst.CSTTransformer):
    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if updated_node.type_parameters is None:
            return updated_node
        taken = _code(updated_node.type_parameters) + _code(updated_node.whitespace_after_type_parameters)
        lines = taken.count("\n")
        room = _lines(lines) if lines else updated_node.whitespace_before_params
        return updated_node.with_changes(**WITHOUT_PARAMETERS, whitespace_before_params=room)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        return updated_node.with_changes(**WITHOUT_PARAMETERS)

    def leave_TypeAlias(self, original_node: cst.TypeAlias, updated_node: cst.TypeAlias) -> cst.Assign:
        return cst.Assign([cst.AssignTarget(updated_node.name)], updated_node.value, updated_node.semicolon)

    def leave_ExceptHandler(
        self, original_node: cst.ExceptHandler, updated_node: cst.ExceptHandler
    ) -> cst.ExceptHandler:
        caught = updated_node.type
        if not isinstance(caught, cst.Tuple) or caught.lpar:
            return updated_node
        return updated_node.with_changes(type=caught.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))

    # Strings are taken whole: what is inside of one that has to change is lowered with it.
    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        return False

    def visit_TemplatedString(self, node: cst.TemplatedString) -> bool:
        return False

    def visit_ConcatenatedString(self, node: cst.ConcatenatedString) -> bool:
        return False

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.BaseExpression:
        return _spelled(updated_node)

    def leave_TemplatedString(
        self, original_node: cst.TemplatedString, updated_node: cst.TemplatedString
    ) -> cst.BaseExpression:
        return _spelled(updated_node)

    def leave_ConcatenatedString(
        self, original_node: cst.ConcatenatedString, updated_node: cst.ConcatenatedString
    ) -> cst.BaseExpression:
        return _spelled(updated_node)


class _Parts(cst.CSTVisitor):
    """The words of a string and the expressions in it, in order; those of format specifications too."""

    def __init__(self) -> None:
        self.found: list[cst.BaseExpression] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, Hole):
            inner = node.expression.visit(_Lower())
            assert isinstance(inner, cst.BaseExpression)
            self.found.append(inner)
            for part in node.format_spec or ():
                part.visit(self)
            return False
        if isinstance(node, Words):
            self.found.append(cst.SimpleString(node.value if isinstance(node, cst.SimpleString) else repr(node.value)))
            return False
        return True


def _spelled(node: Template) -> cst.BaseExpression:
    """The string, or where older Pythons cannot read it `str(...)` of its parts, over as many lines."""
    before = _code(node)
    try:
        ast.parse(before.strip() if node.lpar else f"({before})")
        return node
    except SyntaxError:
        parts = _Parts()
        node.visit(parts)
        call = cst.Call(cst.Name("str"), [cst.Arg(part) for part in parts.found], lpar=node.lpar, rpar=node.rpar)
        missing = before.count("\n") - _code(call).count("\n")
        return call.with_changes(whitespace_before_args=_lines(missing)) if missing > 0 else call


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _lines(number: int) -> cst.ParenthesizedWhitespace:
    """So many line breaks, inside of brackets."""
    return cst.ParenthesizedWhitespace(empty_lines=[cst.EmptyLine(indent=False)] * (number - 1))
