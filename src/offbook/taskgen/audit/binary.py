"""Deleted code in bytecode and in tables of symbols, where there is no text of it to read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import CodeType

from offbook.taskgen.audit.archives import Leaf
from offbook.taskgen.audit.bytecode import Code, parts_of
from offbook.taskgen.audit.text import KEPT_NAMES
from offbook.taskgen.audit.wanted import Wanted

WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{2,}")
NEAR = 1500  # bytes around a name in which all its parameters stand, if the two belong together
SAME_NAME_LIKENESS, OTHER_NAME_LIKENESS = 0.75, 0.9
FEWEST_PARTS, FEWEST_PARTS_OTHER_NAME = 5, 8


@dataclass(frozen=True, slots=True)
class Traces:
    """What deleted code leaves behind where its text is gone."""

    wanted: Wanted
    parts: frozenset[str]  # names and constants of its bytecode
    parameters: frozenset[str]
    stem: str  # of its module
    dotted: bytes  # module.name
    secret: bool  # whether its very name and signature are deleted
    known: frozenset[str]  # words that the agent may see

    @property
    def words(self) -> list[str]:
        """The name and the telling parts, as far as they show in the bytes of a file as single words."""
        parts = telling(self.parts) | {self.wanted.name, self.stem}
        return [part for part in parts if WORD.fullmatch(part.encode())]


def telling(parts: frozenset[str]) -> frozenset[str]:
    """Without what is in every class: `self`, built-ins, names with two underscores, strings of a letter or two."""
    return frozenset(part for part in parts if len(part) > 2 and part not in KEPT_NAMES and part[:2] != "__")


def words_in(data: bytes) -> list[str]:
    """Each word also without its last letter, which may be the mark of what comes next."""
    words = set(WORD.findall(data))
    return [word.decode() for word in words | {word[:-1] for word in words}]


def traces_of(wanted: Wanted, source: str, allowed: str) -> Traces:
    path, _, name = wanted.what.partition("::")
    module = PurePosixPath(path).with_suffix("")
    stem = module.parent.name if module.name == "__init__" else module.name
    known = frozenset(re.findall(r"\w+", allowed))
    code = _compiled(source, name)
    flat = parts_of(code) if code else frozenset()
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    return Traces(
        wanted,
        flat,
        frozenset(names) - {"self", "cls"},
        stem,
        f"{stem}.{name}".encode(),
        wanted.name not in known,
        known,
    )


def _compiled(source: str, name: str) -> CodeType | None:
    """The function's code; compiled within its class, since that changes names with two underscores."""
    *outer, own = name.replace(".<locals>", "").split(".")
    definition = textwrap.dedent(source)
    if not re.search(rf"(?:def|class)\s+{re.escape(own)}\b", source):
        definition = f"def {own}():\n" + textwrap.indent(definition, "    ")
    for class_name in reversed([part for part in outer if part[:1].isupper() or part[:2] == "_"]):
        definition = f"class {class_name}:\n" + textwrap.indent(definition, "    ")
    try:
        module = compile("from __future__ import annotations\n" + definition, "deleted", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return next((code for code in _nested(module) if code.co_name == own), None)


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def found_in_bytecode(module: Code, traces: Traces) -> str | None:
    """A code object made of the same names and constants.

    In the bytecode of its own module any are enough. Elsewhere they have to be telling ones and of its body, since
    methods of one name often share a signature; and under another name they have to be nearly all of many.
    """
    own_path = PurePosixPath(traces.wanted.what.partition("::")[0]).parts[-2:]
    at_home = PurePosixPath(module.file).parts[-len(own_path) :] == own_path
    kept = (lambda parts: parts) if at_home else telling
    parts = kept(traces.parts)
    hidden = parts - traces.known - (frozenset() if at_home else traces.parameters)
    for code in module.all():
        same_name = code.name == traces.wanted.name
        likeness = SAME_NAME_LIKENESS if same_name else OTHER_NAME_LIKENESS
        if not hidden or (not at_home and len(hidden) < (FEWEST_PARTS if same_name else FEWEST_PARTS_OTHER_NAME)):
            continue
        found = kept(code.parts)
        alike = len(found & parts) / len(found | parts)
        if alike >= likeness and len(hidden & found) >= likeness * len(hidden):
            return f"code object {code.name}: {', '.join(sorted(hidden & found)[:8])}"
    return None


def _whole_word(word: str) -> re.Pattern[bytes]:
    """Binary formats put a length in front of a word, which may read as a digit."""
    return re.compile(rb"(?<![A-Za-z_])" + re.escape(word.encode()) + rb"(?![A-Za-z0-9_])")


def found_in_symbols(data: bytes, traces: Traces) -> str | None:
    """The deleted name beside all of its parameters, in something that is about its module."""
    if not traces.secret:
        return None
    if traces.dotted in data:
        return traces.dotted.decode()
    if not traces.parameters or traces.stem.encode() not in data:
        return None
    parameters = [_whole_word(word) for word in traces.parameters]
    for match in _whole_word(traces.wanted.name).finditer(data):
        around = data[max(0, match.start() - NEAR) : match.end() + NEAR]
        if all(parameter.search(around) for parameter in parameters):
            return f"{traces.wanted.name}({', '.join(sorted(traces.parameters))})"
    return None


def is_symbol_table(leaf: Leaf) -> bool:
    """A text that lists what is defined where: mypy's cache as JSON, ctags."""
    head = leaf.data[:2048]
    if head.startswith(b"!_TAG_") or b".mypy_cache" in leaf.name.encode():
        return True
    return head.lstrip().startswith(b"{") and b'"SymbolTable"' in head
