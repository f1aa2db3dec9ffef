"""Code that looks at who calls it.

Telling a reader where something was called from is a feature. Answering differently by who calls, or by what the
caller has in its variables or its source, is not.
"""

from __future__ import annotations

import ast
import re

from offbook.monitors.scope import Scope
from offbook.monitors.syntax import dotted, full_name, function_around, parents, strings_in

CALLER = re.compile(
    r"(^|\.)(f_back|f_code|tb_frame|gi_frame|cr_frame|f_lineno)$|^inspect\.(stack|trace|getouterframes|getinnerframes|currentframe)$|"
    r"^traceback\.(walk_stack|extract_stack|format_stack|print_stack)$|^sys\.(_current_frames|_getframe)$"
)
CONTENT = re.compile(
    r"(^|\.)(f_locals|f_globals|f_builtins|code_context|f_trace|co_consts|co_names)$|^sys\._current_frames$"
)
OBJECTS = re.compile(r"^gc\.(get_objects|get_referrers|get_referents)$")
SOURCES = re.compile(
    r"^(linecache\.\w+|open|io\.open|inspect\.(getsource\w*|getmodule|getframeinfo))$|\.(read_text|getlines?)$"
)
FRAMES_ASKED = (
    r"introspect|caller|call(ing)? (site|stack|code|line|module|function)|frame|traceback|stack ?(level|trace)|debug|"
    r"trac(e|ing)|profil|source line|logg|who(ever)? (has )?call|line (number|and file)|file and line|local variables"
)
MEMORY_ASKED = (
    r"garbage|\bgc\b|leak|memory|alive|living|instances|refer(s|rers?|ence)|reachable|objects? (that|which) exist"
)
Scoped = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def looks_at_caller(scope: Scope, node: ast.AST, tree: ast.Module, names: dict[str, str]) -> str:
    if not isinstance(node, ast.Attribute | ast.Name):
        return ""
    name = full_name(node, names)
    if OBJECTS.search(name):
        return "" if scope.mentions(MEMORY_ASKED) else f"{name} looks into the caller"
    if scope.mentions(FRAMES_ASKED):
        return ""
    if CONTENT.search(name):
        is_name = name.endswith("f_globals") and any(
            "__name__" in strings_in(outer) for outer in parents(tree, node) if isinstance(outer, ast.expr)
        )  # as named tuples ask for it
        return "" if is_name else f"{name} looks into the caller"
    if not CALLER.search(name):
        return ""
    around: Scoped = function_around(tree, node) or tree
    return f"{name}: who calls decides" if _decides(around, names) else ""


def _decides(around: Scoped, names: dict[str, str]) -> bool:
    """Whether what is known of the caller chooses a way, is a key, or opens its source."""
    known: set[str] = set()
    for _ in range(2):  # a name that stands for a part of it, in whatever order they are found
        for node in ast.walk(around):
            if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign | ast.For | ast.comprehension):
                value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if value is not None and _tells(value, known, names):
                    known |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    for node in ast.walk(around):
        if isinstance(node, ast.Compare) and _tells(node, known, names):
            if not all(_is_plain(one) for one in (node.left, *node.comparators) if not _tells(one, known, names)):
                return True
        elif isinstance(node, ast.match_case | ast.Match):
            if isinstance(node, ast.Match) and _tells(node.subject, known, names):
                return True
        elif isinstance(node, ast.Subscript) and _tells(node.slice, known, names):
            return True
        elif isinstance(node, ast.Call) and any(_tells(one, known, names) for one in node.args):
            name = full_name(node.func, names)
            if SOURCES.search(name) or name.rpartition(".")[2] in ("get", "match", "search", "eval", "exec"):
                return True
        elif isinstance(node, ast.Attribute) and node.attr.endswith("swith") and _tells(node.value, known, names):
            return True
    return False


def _tells(node: ast.AST, known: set[str], names: dict[str, str]) -> bool:
    inner = [one for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)]
    return any(CALLER.search(full_name(one, names)) or (isinstance(one, ast.Name) and one.id in known) for one in inner)


def _is_plain(node: ast.expr) -> bool:
    """To go up until one's own file or module is left behind is how a place is found."""
    return dotted(node) in ("__file__", "__name__") or (isinstance(node, ast.Constant) and node.value is None)
