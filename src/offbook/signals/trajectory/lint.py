"""Findings in Python source that need no dependency and no opinion: each is a mistake or dead code.

The same text gives the same findings on every machine, which a linter that may or may not be installed would not.
"""

from __future__ import annotations
import __future__

import ast
import re
from collections import Counter
from pathlib import PurePosixPath

from offbook.core.pycode import FUNCTIONS, Function, nodes, strings_in, try_parse


def findings(path: str, source: str) -> Counter[str]:
    """How often each kind of finding occurs. What does not parse has one, `syntax`, and is looked at no further."""
    tree = try_parse(source)
    if tree is None:
        return Counter(syntax=1)
    found: Counter[str] = Counter()
    found["bare_except"] = sum(node.type is None for node in nodes(tree, ast.ExceptHandler))
    for node in (node for node in ast.walk(tree) if isinstance(node, Function)):
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
    words = re.findall(r"\w+", " ".join(strings_in(tree)))
    return bound.difference(names, words, "*", __future__.all_feature_names)


def _unused_variables(function: Function) -> set[str]:
    """Names that a plain assignment of this function binds and that nothing in it reads."""
    body = ast.Module(function.body, [])
    scopes = nodes(body, *FUNCTIONS, ast.ClassDef)  # what those bind is theirs
    theirs = {id(node) for scope in scopes for node in ast.walk(scope)}
    targets = [target for node in nodes(body, ast.Assign) for target in node.targets]
    bound = {target.id for target in targets if isinstance(target, ast.Name) and id(target) not in theirs}
    read = {node.id for node in nodes(body, ast.Name) if not isinstance(node.ctx, ast.Store)}
    read.update(node.target.id for node in nodes(body, ast.AugAssign) if isinstance(node.target, ast.Name))
    outer = [node for node in ast.walk(body) if isinstance(node, ast.Global | ast.Nonlocal)]
    read.update(name for node in outer for name in node.names)
    unused = {name for name in bound - read if not name.startswith("_")}
    return unused if not read & {"locals", "exec", "eval"} else set()
