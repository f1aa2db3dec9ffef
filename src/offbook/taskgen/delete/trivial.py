"""Deleted trees with trivial bodies for their stubs: what must not solve a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import libcst as cst

from offbook.taskgen.delete.bodies import stubbed
from offbook.taskgen.delete.surgery import Scoped, parse
from offbook.taskgen.nouns import Deletion

VALUES = {
    "none": "None", "true": "True", "false": "False", "text": '""', "list": "[]", "dictionary": "{}",
}  # fmt: skip  # False is 0 too


def trivial_bodies(files: Mapping[str, str], deletion: Deletion) -> Iterator[tuple[str, dict[str, str]]]:
    """(what every stub returns, the stubs' files with those bodies). `files` is the tree before the deletion.

    A deletion that left no stub has no variants.
    """
    if not deletion.stubbed:
        return
    tree = {**files, **deletion.files}
    stubs: dict[str, set[str]] = {}
    for key in deletion.stubbed:
        stubs.setdefault(key.path, set()).add(key.name)
    ways: dict[str, Callable[[cst.FunctionDef], str]] = {"first argument": _first_argument}
    ways |= {name: lambda _, value=value: value for name, value in VALUES.items()}  # type: ignore[misc]
    for name, value_of in ways.items():
        changed = {}
        for path, names in stubs.items():
            module = parse(str(tree[path]))
            changed[path] = module.visit(_Filler(module, names, value_of)).code
        yield name, changed


class _Filler(Scoped):
    def __init__(self, module: cst.Module, names: set[str], value_of: Callable[[cst.FunctionDef], str]):
        super().__init__()
        self._module = module
        self._names = names
        self._value_of = value_of

    def enters(self, node: cst.FunctionDef) -> bool:
        return any(name.startswith(self.qualified(node.name.value) + ".<locals>.") for name in self._names)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self.scope.pop()
        return updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        del self.scope[-2:]
        if self.qualified(original_node.name.value) not in self._names:
            return updated_node
        makes = original_node.name.value == "__init__"  # which may return nothing but None
        body = "pass" if makes else f"return {self._value_of(original_node)}"
        return stubbed(updated_node, body, self._module)


def _first_argument(function: cst.FunctionDef) -> str:
    parameters = function.params
    star = [parameters.star_arg] if isinstance(parameters.star_arg, cst.Param) else []
    names = [p.name.value for p in [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params, *star]]
    return next((name for name in names if name not in {"self", "cls"}), "None")
