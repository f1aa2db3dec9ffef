"""Function bodies: what counts as one, and putting a statement in its place."""

from __future__ import annotations

import libcst as cst


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
