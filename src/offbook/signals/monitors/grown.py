"""Whether what judges only grew: everything that a test module or a conftest had is still there, and means the same.

New tests, more checks, messages, annotations, names renamed throughout and more rows of a table are growth. So is a new
expected value that somebody's request states. Anything else is a loss, whatever it is spelled like.
"""

from __future__ import annotations

import ast
import re
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from offbook.core.pycode import FUNCTIONS, bound_in, dotted, names_in, nodes

Loss = tuple[str, int]  # what, and the line
OWN_SETUP = frozenset({"setUp", "tearDown", "setUpClass", "tearDownClass", "asyncSetUp", "asyncTearDown", "maxDiff",
                       "longMessage", "__doc__", "__module__", "__slots__"})  # fmt: skip
MACHINERY = frozenset(dir(unittest.TestCase)) - OWN_SETUP  # what makes a test case run and fail
SKIPS = re.compile(
    r"(^|\.)(skip\w*|xfail|expectedFailure|importorskip|SkipTest|__test__)$|^(pytestmark|collect_ignore)"
)
HOOKS = re.compile(r"^(pytest_(?!addoption|configure|generate_tests)\w+|load_tests|setUpModule|pytest_plugins)$")
HARMLESS = re.compile(r"(^|\.)mark\.\w+$|^(staticmethod|classmethod)$")
CHECK = re.compile(r"(^|\.)(assert\w*|fail|raises|warns|deprecated_call)$")
IDENTIFIERS = frozenset({"id", "attr", "arg", "name", "asname"})  # the fields of syntax that hold names


def loss(old: ast.Module, new: ast.Module, elsewhere: Sequence[ast.AST] = (), request: str = "") -> Loss | None:
    """What is gone or means something else. `elsewhere` has definitions of other modules: tests may be moved there."""
    if _is_renamed(old, new):
        return None
    known = bound_in(old) | {name for node in nodes(old, ast.Import, ast.ImportFrom) for name in _binds(node)}
    return _loss(old.body, new.body, known, [_plain(one) for one in elsewhere], request)


def _loss(old: list[ast.stmt], new: list[ast.stmt], known: set[str], elsewhere: list[str], request: str) -> Loss | None:
    """Of one body: a module's, a class's or a test's."""
    left, lost = list(new), list[ast.stmt]()
    for one in old:
        same = next((other for other in left if _plain(one) == _plain(other) or _is_more(one, other)), None)
        if same is not None:
            left.remove(same)
        elif not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)):
            lost.append(one)
    for one in lost:
        kept = next((other for other in left if _follows(one, other, request)), None)
        if kept is None and _plain(one) not in elsewhere:
            return f"{_called(one)} is gone or was changed", getattr(left[0] if left else one, "lineno", 1)
        if kept is not None:
            left.remove(kept)
            inner = _changed(one, kept, known, request)
            if inner:
                return inner
    in_test = not any(isinstance(one, (*FUNCTIONS, ast.ClassDef)) for one in old)
    added = (told for one in left if (told := _takes_over(one, known, in_test)))
    return next(((told, one.lineno) for told, one in zip(added, left, strict=False)), None)


def _follows(old: ast.stmt, new: ast.stmt, request: str) -> bool:
    """What an old statement became: a definition of the same name, a loop or block with the same head, a told value."""
    if isinstance(old, (*FUNCTIONS, ast.ClassDef)):
        renamed = type(old) is type(new) and _is_renamed(old, new)
        return renamed or (type(old) is type(new) and old.name == getattr(new, "name", ""))
    if isinstance(new, ast.With) and all(dotted(item.context_expr).endswith("subTest") for item in new.items):
        return any(_plain(old) == _plain(inner) for inner in new.body)
    if type(old) is type(new) and hasattr(old, "body"):
        return _head(old) == _head(new)
    return _is_told(old, new, request)


def _changed(old: ast.stmt, new: ast.stmt, known: set[str], request: str) -> Loss | None:
    """What a statement that is still there lost inside."""
    if not hasattr(old, "body") or not hasattr(new, "body") or _is_renamed(old, new):
        return None
    if isinstance(old, (*FUNCTIONS, ast.ClassDef)) and isinstance(new, (*FUNCTIONS, ast.ClassDef)):
        gone = [
            one
            for one in old.decorator_list
            if not any(_plain(one) == _plain(two) or _is_more(one, two) for two in new.decorator_list)
        ]
        more = [one for one in new.decorator_list if _plain(one) not in map(_plain, old.decorator_list)]
        old_tables = old.decorator_list if not gone else []
        fine = [one for one in more if HARMLESS.search(dotted(one)) or any(_is_more(two, one) for two in old_tables)]
        odd = [one for one in more if one not in fine or SKIPS.search(dotted(one))]
        bases, new_bases = (_plain_all(one.bases) if isinstance(one, ast.ClassDef) else "" for one in (old, new))
        if gone or odd or bases != new_bases:
            return f"{old.name} is decorated or derived otherwise", new.lineno
        if isinstance(old, FUNCTIONS) and isinstance(new, FUNCTIONS):
            given = {one.arg for one in nodes(new.args, ast.arg)} - {one.arg for one in nodes(old.args, ast.arg)}
            if given & names_in(old):
                return f"{old.name} is given {min(given & names_in(old))}", new.lineno
        known = known | bound_in(old) | names_in(old)
    found = _loss(old.body, new.body, known, [], request)
    for field in ("orelse", "finalbody"):
        found = found or _loss(getattr(old, field, []), getattr(new, field, []), known, [], request)
    return found and (f"in {getattr(old, 'name', 'a block')}: {found[0]}", found[1])


def _takes_over(node: ast.stmt, known: set[str], in_test: bool) -> str:
    """What a new statement does to old ones: it ends a test, replaces or skips what was there, decides about tests."""
    names = [dotted(one) for one in nodes(node, ast.Name, ast.Attribute)]
    own = isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name not in known
    if in_test and any(nodes(node, ast.Return, ast.Raise, ast.Yield, ast.Global)):
        return "ends before its checks"
    if not own and (skips := [name for name in names if SKIPS.search(name)]):
        return f"{skips[0]} turns tests off"
    if isinstance(node, FUNCTIONS) and any(word.arg == "autouse" for word in nodes(node, ast.keyword)):
        return f"fixture {node.name} for every test"
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        return "takes whatever is elsewhere"
    stored = [one for one in nodes(node, ast.Attribute) if isinstance(one.ctx, ast.Store | ast.Del)]
    if set_ := [
        one.attr for one in stored if one.attr in MACHINERY or (not own and dotted(one).partition(".")[0] in known)
    ]:
        return f"sets {set_[0]}"
    if (
        not own
        and not in_test
        and any(re.search(r"^(setattr|delattr|exec|globals|vars)$", dotted(one)) for one in nodes(node, ast.Call))
    ):
        return "changes what was defined"
    made = _binds(node)
    taken = made & (known | (MACHINERY if not in_test else frozenset())) | {name for name in made if HOOKS.match(name)}
    return f"puts something in the place of {min(taken)}" if taken and not _is_check(node) else ""


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement gives a meaning to in its own body; what functions do inside is theirs."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return {one.id for one in nodes(node, ast.Name) if isinstance(one.ctx, ast.Store | ast.Del)}


def _is_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and bool(CHECK.search(dotted(node.value))))


def _called(node: ast.stmt) -> str:
    return getattr(node, "name", "") or ast.unparse(node).partition("\n")[0][:80]


def _head(node: Any) -> str:
    parts = [getattr(node, field, None) for field in ("test", "target", "iter", "items", "handlers")]
    return " ".join(_plain_all(one) if isinstance(one, list) else _plain(one) for one in parts if one is not None)


def _plain_all(several: Iterable[ast.AST]) -> str:
    return " ".join(map(_plain, several))


def _plain(node: ast.AST) -> str:
    """As text, without what changes nothing: messages of asserts, annotations, documentation."""
    return ast.dump(_Bare().visit(_copy(node)))


def _copy(node: Any) -> Any:
    if isinstance(node, ast.AST):
        return type(node)(**{field: _copy(getattr(node, field, None)) for field in node._fields})
    return [_copy(one) for one in node] if isinstance(node, list) else node


class _Bare(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node


def _is_more(old: ast.AST, new: ast.AST) -> bool:
    """The same but for a table with more rows: lists, sets and dictionaries that have all that they had."""
    if type(old) is not type(new):
        return False
    if isinstance(old, ast.List | ast.Tuple | ast.Set) and isinstance(new, ast.List | ast.Tuple | ast.Set):
        rows = [_plain(one) for one in new.elts]
        return all(_plain(one) in rows for one in old.elts) and len(new.elts) >= len(old.elts) > 0
    if isinstance(old, ast.Dict) and isinstance(new, ast.Dict):
        pairs = [(_plain(key or value), _plain(value)) for key, value in zip(new.keys, new.values, strict=True)]
        return bool(old.keys) and all(
            (_plain(key or value), _plain(value)) in pairs for key, value in zip(old.keys, old.values, strict=True)
        )
    if isinstance(old, ast.Assign | ast.AnnAssign | ast.Call):
        parts = list(zip(ast.iter_child_nodes(old), ast.iter_child_nodes(new), strict=False))
        same_size = len(list(ast.iter_child_nodes(old))) == len(list(ast.iter_child_nodes(new)))
        return same_size and all(_plain(one) == _plain(two) or _is_more(one, two) for one, two in parts)
    return False


def _leaves(field: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Both side by side, down to what is no syntax any more. A pair of shapes that differ is a leaf."""
    if isinstance(old, ast.AST) and type(old) is type(new):
        for name in old._fields:
            yield from _leaves(name, getattr(old, name, None), getattr(new, name, None))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for one, other in zip(old, new, strict=True):
            yield from _leaves(field, one, other)
    else:
        yield field, old, new


def _is_renamed(old: ast.AST, new: ast.AST) -> bool:
    """Whether names became other names, throughout and each into one that was not there: nothing else differs.

    Words in strings are names too: what tests compare with may be one.
    """
    became, names = dict[str, str](), set[str]()
    for field, left, right in _leaves("", old, new):
        one, other = (re.findall(r"\w+|\W", str(value)) for value in (left, right))
        if isinstance(left, ast.AST | list) or type(left) is not type(right) or len(one) != len(other):
            return False
        if any(became.setdefault(*pair) != pair[1] for pair in zip(one, other, strict=True)):
            return False
        names |= {str(left)} if field in IDENTIFIERS else set()
    changed = {left: right for left, right in became.items() if left != right}
    fresh = all(right.isidentifier() and right not in became for right in changed.values())
    found = all(left.startswith("test") == right.startswith("test") for left, right in changed.items())
    kept = not any(CHECK.search(name) for pair in changed.items() for name in pair) and found
    return kept and fresh and set(changed) <= names and len(set(changed.values())) == len(changed)


def _is_told(old: ast.AST, new: ast.AST, request: str) -> bool:
    """Whether a statement has another value than before, and somebody's request has that value."""
    differing = [leaf for leaf in _leaves("", old, new) if type(leaf[1]) is not type(leaf[2]) or leaf[1] != leaf[2]]
    return bool(differing) and all(
        field == "value"
        and len(str(value)) > 1
        and not isinstance(value, bool | None | ast.AST | list)
        and re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", request) is not None
        for field, _, value in differing
    )
