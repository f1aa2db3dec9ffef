"""Deleted code in bytecode and in tables of symbols, where there is no text of it to read.

Bytecode is read as plain data: Python's own reader is not safe on hostile files and knows one version.
"""

from __future__ import annotations

import importlib.util
import marshal
import re
import struct
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from offbook.core.copies import KEPT_NAMES, Wanted
from offbook.tasks.factory.audit.reading import Leaf

WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{2,}")
NEAR = 1500  # bytes around a name in which all its parameters stand, if the two belong together
SAME_NAME_LIKENESS, OTHER_NAME_LIKENESS = 0.75, 0.9
FEWEST_PARTS, FEWEST_PARTS_OTHER_NAME = 5, 8
MOST_OBJECTS = 1_000_000  # of one file
MOST_DIGITS = 1000  # of one number in it, 15 bits each


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
    return Traces(
        wanted,
        code.parts if code else frozenset(),
        frozenset(code.parameters if code else ()) - {"self", "cls"},
        stem,
        f"{stem}.{name}".encode(),
        wanted.name not in known,
        known,
    )


def _compiled(source: str, name: str) -> Code | None:
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
    read = read_bytecode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(module))
    return next((code for code in read.all() if code.name == own), None) if read else None


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


_PLACEHOLDERS = frozenset({".0", "__class__"})


def _constant_parts(constants: tuple[Any, ...]) -> frozenset[str]:
    """Strings and telling numbers. None, True, 0 and 1 are everywhere; where a docstring stands differs by version."""
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            found |= _constant_parts(tuple(constant))
        elif isinstance(constant, str) and len(constant) < 200 and not constant.endswith(">"):
            found.add(constant)
        elif isinstance(constant, int | float | complex) and constant not in (0, 1, -1):
            found.add(repr(constant))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Code:
    """A code object as the reader sees it: enough of it to be recognised."""

    file: str  # the source it was made of, as the compiler was told
    name: str
    parameters: tuple[str, ...]
    names: tuple[str, ...]  # parameters too
    constants: tuple[Any, ...]

    @property
    def parts(self) -> frozenset[str]:
        inner = [part for constant in self.constants if isinstance(constant, Code) for part in constant.parts]
        return frozenset(self.names) - _PLACEHOLDERS | _constant_parts(self.constants) | frozenset(inner)

    def all(self) -> Iterator[Code]:
        yield self
        for constant in self.constants:
            if isinstance(constant, Code):
                yield from constant.all()


def is_bytecode(data: bytes) -> bool:
    return data[2:4] == b"\r\n" and 3000 <= int.from_bytes(data[:2], "little") < 4000


def read_bytecode(data: bytes) -> Code | None:
    """The module in a .pyc of Python 3.3 to 3.14, None where the file is not to be understood."""
    magic = int.from_bytes(data[:2], "little")
    try:
        module = _Marshal(data, 16 if magic >= 3390 else 12, magic).read()
    except (IndexError, KeyError, ValueError, struct.error, RecursionError, UnicodeDecodeError):
        return None
    return module if isinstance(module, Code) else None


class _Marshal:
    """Reads CPython's marshal format as plain data; Python/marshal.c is where the letters come from."""

    def __init__(self, data: bytes, start: int, magic: int):
        self._data, self._at, self._magic = data, start, magic
        self._seen: list[Any] = []
        self._objects = 0

    def read(self) -> Any:
        self._objects += 1
        if self._objects > MOST_OBJECTS:
            raise ValueError("more objects than are read")
        letter = self._bytes(1)[0]
        kind, kept = chr(letter & 0x7F), letter & 0x80
        if kept:
            place = len(self._seen)
            self._seen.append(None)
        value = self._value(kind)
        if kept:
            self._seen[place] = value
        return value

    def _value(self, kind: str) -> Any:
        if kind in "0NTFS.":
            return {"T": True, "F": False}.get(kind)
        if kind == "i":
            return self._number(4, signed=True)
        if kind == "l":
            return self._long()
        if kind in "gy":
            values = struct.unpack("<" + "d" * (1 + (kind == "y")), self._bytes(8 * (1 + (kind == "y"))))
            return values[0] if kind == "g" else complex(*values)
        if kind in "uaAt":
            return self._bytes(self._number(4)).decode("utf-8", "surrogatepass")
        if kind in "zZ":
            return self._bytes(self._number(1)).decode("latin-1")
        if kind == "s":
            return self._bytes(self._number(4))
        if kind in "()[<>":
            count = self._number(1 if kind == ")" else 4)
            return tuple(self.read() for _ in range(count))
        if kind == ":":
            return tuple(self.read() for _ in range(3))  # a slice
        if kind == "r":
            return self._again(self._seen[self._number(4)])
        if kind == "c":
            return self._code()
        raise ValueError(f"marshal type {kind!r}")

    def _again(self, value: Any) -> Any:
        """A few references to references can stand for more than there is memory, so only flat things are repeated."""
        if isinstance(value, Code):
            return None
        if not isinstance(value, tuple):
            return value
        self._objects += len(value)
        return tuple(item for item in value if not isinstance(item, tuple | Code))

    def _code(self) -> Code:
        """The order of the fields, as it was from 3.11, from 3.8 and before."""
        new, middle = self._magic >= 3450, self._magic >= 3411
        counts = [self._number(4) for _ in range(6 if middle and not new else 5)]  # and flags
        self.read()  # the instructions, which differ with every version
        constants, names = self.read(), self.read()
        local_names = self.read()
        more = (self.read(),) if new else (self.read(), self.read())
        file, name = self.read(), self.read()
        if new:
            self.read()  # the qualified name
        self._bytes(4)
        self.read()  # line numbers
        if new:
            self.read()  # the table of exceptions
        groups = [constants, names, local_names, *(() if new else more)]
        if not all(isinstance(group, tuple) for group in groups):
            raise ValueError("not a code object")
        every = [word for group in groups[1:] for word in group]
        parameters = local_names[: counts[0] + counts[2 if middle else 1]]
        return Code(str(file), str(name), tuple(map(str, parameters)), tuple(map(str, every)), tuple(constants))

    def _bytes(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise ValueError("the file ends early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._bytes(size), "little", signed=signed)

    def _long(self) -> int:
        count = self._number(4, signed=True)
        if abs(count) > MOST_DIGITS:
            raise ValueError("a longer number than is read")
        digits = [self._number(2) for _ in range(abs(count))]
        value = sum(digit << (15 * place) for place, digit in enumerate(digits))
        return -value if count < 0 else value
