"""Whether a text gives deleted code away."""

from __future__ import annotations

import ast
import re
import textwrap

from offbook.taskgen.nouns import Deletion

SHARED_TOKENS = 12  # so many in a row are no accident


def leaks_in_instruction(text: str, deletion: Deletion) -> str | None:
    """Why the text gives deleted code away, or None. Signatures and docstrings are no code."""
    text = re.sub(r"\bdef \w+\([^`\n]*", "", text)  # a call that passes everything on looks like the signature
    told = _tokens(text)
    shown = {tuple(told[start : start + SHARED_TOKENS]) for start in range(len(told) - SHARED_TOKENS + 1)}
    flat = " ".join(text.split())
    for where, source in deletion.removed.items():
        for line in _code_lines(source):
            if _is_telling(line) and line in flat:
                return f"it has a line of {where}: {line}"
        code = _tokens("\n".join(_code_lines(source)))
        for start in range(len(code) - SHARED_TOKENS + 1):
            if tuple(code[start : start + SHARED_TOKENS]) in shown:
                return f"it shares code with {where}: {' '.join(code[start : start + SHARED_TOKENS])}"
    return None


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _is_telling(line: str) -> bool:
    return len(line) >= 16 and not re.fullmatch(r"[\w\s.\"']+:?|return \w+|raise .*", line)


def _code_lines(source: str) -> list[str]:
    """The lines of a removed text that are code: no signatures, docstrings, comments."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # a return outside of a function is none for ast, but odd indentation may be
        return [" ".join(line.split()) for line in source.split("\n") if line.strip()]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            has_docstring = ast.get_docstring(node, clean=False) is not None
            node.body = (node.body[1:] if has_docstring else node.body) or [ast.Pass()]
    lines = [" ".join(line.split()) for line in ast.unparse(tree).split("\n")]
    return [line for line in lines if not line.startswith(("def ", "async def ", "class ", "@"))]
