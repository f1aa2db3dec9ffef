"""Deleted trees with trivial bodies for their stubs: what must not solve a task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import libcst as cst

from offbook.taskgen.delete.surgery import Orders, operate
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
    stubs: dict[str, set[str]] = defaultdict(set)
    for key in deletion.stubbed:
        stubs[key.path].add(key.name)
    ways: dict[str, Callable[[cst.FunctionDef], str]] = {"first argument": _first_argument}
    ways |= {name: lambda _, value=value: value for name, value in VALUES.items()}  # type: ignore[misc]
    for way, value_of in ways.items():
        orders = {path: Orders(stub=names, body=_returning(value_of)) for path, names in stubs.items()}
        yield way, {path: operate(str(tree[path]), order).source for path, order in orders.items()}


def _returning(value_of: Callable[[cst.FunctionDef], str]) -> Callable[[cst.FunctionDef], str]:
    """__init__ may return nothing but None."""
    return lambda function: "pass" if function.name.value == "__init__" else f"return {value_of(function)}"


def _first_argument(function: cst.FunctionDef) -> str:
    parameters = function.params
    star = [parameters.star_arg] if isinstance(parameters.star_arg, cst.Param) else []
    names = [p.name.value for p in [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params, *star]]
    return next((name for name in names if name not in {"self", "cls"}), "None")
