"""Who still names a thing: global names, attributes and strings of a file, and how a loss spreads through imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from offbook.core import pycode
from offbook.core.pycode import Function as Definition
from offbook.core.pycode import arguments_of, local_names, plain_dotted, rooted
from offbook.tasks.factory.delete.symbols import Module, Symbols
from offbook.tasks.factory.types import FunctionKey

Origins = frozenset[FunctionKey]  # the functions that a lost name stands for
Lost = dict[str, dict[str, Origins]]  # path -> name that is bound there no longer -> what it stood for

REFLECTION = ("attr", "caller", "import", "resolve", "lookup", "patch")


@dataclass(frozen=True, slots=True)
class Uses:
    """What a file reads. Names that are local where they are read are left out."""

    names: frozenset[str]  # rooted, with all beginnings: a, a.b, a.b.c
    attributes: frozenset[tuple[str, str]]  # (class around it if on self, cls or super(), else empty; attribute)
    strings: frozenset[str]
    looked_up: frozenset[str]  # those among them that getattr and its like are given, or that are read at import


@lru_cache(maxsize=1024)
def uses(source: str) -> Uses:
    reader = _Reader()
    reader.visit(pycode.parse(source))
    return Uses(
        frozenset(reader.names), frozenset(reader.attributes), frozenset(reader.strings), frozenset(reader.looked_up)
    )


class _Reader(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.strings: set[str] = set()
        self.looked_up: set[str] = set()
        self._locals: list[frozenset[str]] = []
        self._classes: list[str] = []
        self._in_class_body = False

    def visit_FunctionDef(self, node: Definition) -> None:
        for part in [*node.decorator_list, *_defaults(node)]:
            self.visit(part)
        self._locals.append(frozenset(local_names(node)))
        before, self._in_class_body = self._in_class_body, False
        for statement in node.body:
            self.visit(statement)
        self._in_class_body = before
        self._locals.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._locals.append(frozenset(argument.arg for argument in arguments_of(node.args)))
        self.generic_visit(node)
        self._locals.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(part)
        self._classes.append(node.name)
        before, self._in_class_body = self._in_class_body, True
        for statement in node.body:
            self.visit(statement)
        self._in_class_body = before
        self._classes.pop()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            return
        if not any(node.id in names for names in self._locals):
            self.names.add(node.id)
        if self._in_class_body:
            self.names.add(".".join([*self._classes, node.id]))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = plain_dotted(node)
        if name and not any(name.partition(".")[0] in names for names in self._locals):
            self.names.add(name)
        self.attributes.add((self._receiver(node.value), node.attr))
        self.visit(node.value)

    def _receiver(self, value: ast.AST) -> str:
        own = rooted(value) in {"self", "cls", "super", "type"} and isinstance(value, ast.Name | ast.Call)
        return ".".join(self._classes) if own else ""

    def visit_Call(self, node: ast.Call) -> None:
        name = rooted(node.func).rpartition(".")[2].lower()
        if any(word in name for word in REFLECTION):
            self.looked_up |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring names things without needing them
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.add(node.value)
            if not self._locals:
                self.looked_up.add(node.value)


def _defaults(node: Definition) -> Iterator[ast.AST]:
    """What a definition reads in the scope around it: defaults and annotations."""
    yield from node.args.defaults
    yield from filter(None, node.args.kw_defaults)
    yield from (argument.annotation for argument in arguments_of(node.args) if argument.annotation)
    if node.returns:
        yield node.returns


def spread(symbols: Symbols, lost: Lost) -> Lost:
    """The losses and, for every module, the dotted names by which its imports reach them: chains of re-exports too."""
    reached = {path: dict(names) for path, names in lost.items()}
    changed = True
    while changed:
        changed = False
        for path, module in symbols.modules.items():
            for name, origins in lost_names(module, reached, symbols).items():
                known = reached.setdefault(path, {}).get(name, frozenset())
                if not origins <= known:
                    reached[path][name] = known | origins
                    changed = True
    return reached


def lost_names(module: Module, lost: Lost, symbols: Symbols) -> dict[str, Origins]:
    """The dotted names by which this module's imports reach what is lost."""
    gone = {symbols.modules[path].name: names for path, names in lost.items() if path in symbols.modules}
    found: dict[str, Origins] = {}
    for imported in module.imports:
        whole = f"{imported.module}.{imported.name}" if imported.name else imported.module
        if imported.name == "*":
            found |= {name: origins for name, origins in gone.get(imported.module, {}).items() if "." not in name}
            continue
        if imported.name and imported.name in gone.get(imported.module, {}):
            found[imported.bound] = gone[imported.module][imported.name]
        if not imported.name and "." in imported.module and imported.bound == imported.module.partition(".")[0]:
            whole = imported.bound  # import a.b binds a
        for name, names in gone.items():
            if name == whole or name.startswith(whole + "."):
                prefix = imported.bound + name[len(whole) :]
                found |= {f"{prefix}.{own}": origins for own, origins in names.items() if "." not in own}
    return found
