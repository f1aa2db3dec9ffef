"""Surgery on one Python file with libcst: bodies out, definitions out, and what named them. Every other byte stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import libcst as cst

from offbook.tasks.factory.delete.symbols import absolute

Item = TypeVar("Item", cst.ImportAlias, cst.BaseElement, cst.BaseDictElement)
Importing = TypeVar("Importing", cst.Import, cst.ImportFrom)


@dataclass(frozen=True)
class Orders:
    """What is to be done to one file. Names are qualified as Python has them."""

    stub: Collection[str] = ()
    body: Callable[[cst.FunctionDef], str] | None = None  # what a stub does; it raises where none is given
    remove: Collection[str] = ()  # functions and classes
    lost: Collection[str] = ()  # dotted names that mean nothing any more: imports and exports of them go
    statements: bool = False  # also top-level statements, and elements of displays there, that name what is lost
    modules: Collection[str] = ()  # absolute names of modules that are gone
    package: str = ""  # of this file, for relative imports
    edit_docstring: Callable[[str], str] | None = None


@dataclass(slots=True)
class Operated:
    source: str
    removed: dict[str, str] = field(default_factory=dict)  # name -> text that is gone
    taken: dict[str, set[str]] = field(default_factory=dict)  # assigned name that went -> the lost names in its value


@lru_cache(maxsize=256)
def parse(source: str) -> cst.Module:
    return cst.parse_module(source)


def operate(source: str | cst.Module, orders: Orders) -> Operated:
    module = parse(source) if isinstance(source, str) else source
    surgeon = _Surgeon(module, orders)
    after = module.visit(surgeon)
    removed = {name: "\n".join(texts) for name, texts in surgeon.removed.items()}
    return Operated(after.code, removed, dict(surgeon.taken))


class Scoped(cst.CSTTransformer):
    """Knows the qualified name of the definition being visited.

    Function bodies are most of a file, and visiting them most of the time: only those are visited that `enters` wants.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scope: list[str] = []

    @property
    def in_function(self) -> bool:
        return "<locals>" in self.scope

    def qualified(self, name: str) -> str:
        return ".".join([*self.scope, name])

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.scope.append(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        entered = self.enters(node)
        self.scope += [node.name.value, "<locals>"]
        return entered

    def enters(self, node: cst.FunctionDef) -> bool:
        return False


class _Surgeon(Scoped):
    def __init__(self, module: cst.Module, orders: Orders):
        super().__init__()
        self.removed: dict[str, list[str]] = defaultdict(list)
        self.taken: dict[str, set[str]] = defaultdict(set)
        self._module = module
        self._orders = orders

    def enters(self, node: cst.FunctionDef) -> bool:
        inside = self.qualified(node.name.value) + ".<locals>."
        if any(name.startswith(inside) for name in self._orders.stub):
            return True
        docstring = node.get_docstring(clean=False) if self._orders.edit_docstring else None
        return docstring is not None and ">>>" in docstring

    # --- definitions

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        del self.scope[-2:]
        name = self.qualified(original_node.name.value)
        if name in self._orders.remove:
            return self._removed(name, original_node)
        if updated_node.decorators:
            updated_node = updated_node.with_changes(decorators=self._cleaned_decorators(updated_node.decorators))
        if name not in self._orders.stub or not (self._orders.body or is_stubbable(original_node)):
            return updated_node
        statements = [self._module.code_for_node(part) for part in body_without_docstring(original_node)]
        self.removed[name].append("".join(statements).strip("\n"))
        raising = f'raise NotImplementedError("{name.replace(".<locals>", "")}")'
        return stubbed(updated_node, self._orders.body(original_node) if self._orders.body else raising, self._module)

    def _cleaned_decorators(self, decorators: Sequence[cst.Decorator]) -> Sequence[cst.Decorator]:
        """Parametrized tests have functions in the arguments of their decorators."""
        lost = set(self._orders.lost)
        if not self._orders.statements or self.in_function or not any(names_in(d) & lost for d in decorators):
            return decorators
        cleaned = [decorator.visit(DropElements(lost)) for decorator in decorators]
        return [decorator for decorator in cleaned if isinstance(decorator, cst.Decorator)]

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef | cst.RemovalSentinel:
        self.scope.pop()
        name = self.qualified(original_node.name.value)
        return self._removed(name, original_node) if name in self._orders.remove else updated_node

    def _removed(self, name: str, node: cst.FunctionDef | cst.ClassDef) -> cst.RemovalSentinel:
        self.removed[name].append(self._module.code_for_node(node).strip("\n"))
        return cst.RemoveFromParent()

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        text = original_node.value
        if self._orders.edit_docstring is None or not isinstance(text, cst.SimpleString):
            return updated_node
        return updated_node.with_changes(value=text.with_changes(value=self._orders.edit_docstring(text.value)))

    # --- names: imports, exports, statements

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if self.in_function:
            return updated_node
        written = dotted(original_node.module) if original_node.module else ""
        module = absolute(written, len(original_node.relative), self._orders.package)
        if module in self._orders.modules:
            return cst.RemoveFromParent()
        if isinstance(original_node.names, cst.ImportStar):
            return updated_node

        def gone(alias: cst.ImportAlias) -> bool:
            return bound_by(alias) in self._orders.lost or f"{module}.{dotted(alias.name)}" in self._orders.modules

        return _fewer(updated_node, original_node.names, gone)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        if self.in_function:
            return updated_node
        lost = self._orders.lost
        modules = self._orders.modules
        return _fewer(
            updated_node, original_node.names, lambda alias: dotted(alias.name) in modules or bound_by(alias) in lost
        )

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        if not updated_node.body:
            return cst.RemoveFromParent()
        if self.in_function or not self._orders.lost:
            return updated_node
        kept = [self._cleaned(statement) for statement in updated_node.body]
        if all(new is old for new, old in zip(kept, updated_node.body, strict=True)):
            return updated_node
        body = [statement for statement in kept if statement is not None]
        if not body:
            return cst.RemoveFromParent()
        body[-1] = body[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=body)

    def _cleaned(self, statement: cst.BaseSmallStatement) -> cst.BaseSmallStatement | None:
        if is_export(statement):
            shorter = statement.visit(DropElements(self._orders.lost, strings=True))
            assert isinstance(shorter, cst.BaseSmallStatement)  # elements go, and no more
            return shorter
        if not self._orders.statements or isinstance(statement, cst.Import | cst.ImportFrom):
            return statement
        lost = set(self._orders.lost)
        if self.scope:  # in a class body its own names need no prefix
            prefix = ".".join(self.scope) + "."
            lost |= {name.removeprefix(prefix) for name in lost if name.startswith(prefix)}
        if not (names_in(statement) & lost):
            return statement
        shorter = statement.visit(DropElements(lost))
        assert isinstance(shorter, cst.BaseSmallStatement)
        left = names_in(shorter) & lost
        if not left:
            return shorter
        if isinstance(statement, cst.Assign):
            targets = [target.target for target in statement.targets]
        elif isinstance(statement, cst.AnnAssign | cst.AugAssign):
            targets = [statement.target]
        else:
            return None if isinstance(statement, cst.Expr | cst.Del) else statement
        if not all(isinstance(target, cst.Name | cst.Attribute) for target in targets):
            return statement
        for target in targets:
            self.taken[self.qualified(dotted(target))] |= {
                (name if name in self._orders.lost else self.qualified(name)) for name in left
            }
        return None


def _fewer(
    node: Importing, aliases: Sequence[cst.ImportAlias], gone: Callable[[cst.ImportAlias], bool]
) -> Importing | cst.RemovalSentinel:
    kept = without(aliases, gone)
    if len(kept) == len(aliases):
        return node
    return node.with_changes(names=kept) if kept else cst.RemoveFromParent()


def bound_by(alias: cst.ImportAlias) -> str:
    return dotted(alias.asname.name) if alias.asname else dotted(alias.name)


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


class DropElements(cst.CSTTransformer):
    """Elements of lists, tuples, sets and dictionaries that are what is lost; `strings`: that spell it, and else also
    a tuple or a call with it."""

    def __init__(self, names: Collection[str], strings: bool = False):
        super().__init__()
        self._names = names
        self._strings = strings

    def _gone(self, element: cst.BaseElement | cst.BaseDictElement) -> bool:
        value = element.value
        if self._strings:
            return isinstance(value, cst.SimpleString) and value.evaluated_value in self._names
        parts = [value]
        if isinstance(value, cst.Tuple):
            parts = [part.value for part in value.elements]
        elif isinstance(value, cst.Call):  # pytest.param(f, 1), partial(f)
            parts = [value.func, *(argument.value for argument in value.args)]
        return any(dotted(part) in self._names for part in parts)

    def leave_List(self, original_node: cst.List, updated_node: cst.List) -> cst.List:
        return updated_node.with_changes(elements=without(original_node.elements, self._gone))

    def leave_Tuple(self, original_node: cst.Tuple, updated_node: cst.Tuple) -> cst.Tuple:
        if not self._strings:
            return updated_node
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
