"""Findings in Python source that need no dependency and no opinion: each is a mistake or dead code.

The same text gives the same findings on every machine, which a linter that may or may not be installed would not.
"""

from __future__ import annotations
import __future__

import ast
import re
from collections import Counter
from pathlib import PurePosixPath

from offbook.core.pycode import FUNCTIONS, nodes, strings_in, try_parse


def findings(path: str, source: str) -> Counter[str]:
    """How often each kind of finding occurs. What does not parse has one, `syntax`, and is looked at no further."""
    tree = try_parse(source)
    if tree is None:
        return Counter({"syntax": 1})
    formats = {id(node.format_spec) for node in nodes(tree, ast.FormattedValue)}  # f-strings of their own
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            found["bare_except"] += node.type is None
        elif isinstance(node, ast.JoinedStr) and id(node) not in formats:
            found["empty_f_string"] += not any(isinstance(part, ast.FormattedValue) for part in node.values)
        elif isinstance(node, FUNCTIONS):
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            found["mutable_default"] += sum(isinstance(default, ast.List | ast.Dict | ast.Set) for default in defaults)
            found["unused_variable"] += len(_unused_variables(node))
    if PurePosixPath(path).name != "__init__.py":  # there an import is the package's face
        found["unused_import"] = len(_unused_imports(tree))
    return +found


def _unused_imports(tree: ast.Module) -> set[str]:
    aliases = [alias for alias in nodes(tree, ast.alias) if alias.asname != alias.name]
    bound = {alias.asname or alias.name.split(".")[0] for alias in aliases}
    names = {node.id for node in nodes(tree, ast.Name)}
    # A name in a string may be an annotation or an entry of __all__.
    words = {word for text in strings_in(tree) for word in re.findall(r"\w+", text)}
    return bound - names - words - {"*", *__future__.all_feature_names}


def _unused_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a plain assignment of this function binds and that nothing in it reads."""
    inside = [node for statement in function.body for node in ast.walk(statement)]
    scopes = [node for node in inside if isinstance(node, (*FUNCTIONS, ast.ClassDef))]  # what those bind is theirs
    theirs = {id(node) for scope in scopes for node in ast.walk(scope)}
    assigned = [target for node in inside if isinstance(node, ast.Assign) for target in node.targets]
    bound = {target.id for target in assigned if isinstance(target, ast.Name) and id(target) not in theirs}
    read = {node.id for node in inside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)}
    read |= {node.target.id for node in inside if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    read |= {name for node in inside if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    unused = {name for name in bound - read if not name.startswith("_")}
    return unused if not read & {"locals", "exec", "eval"} else set()
