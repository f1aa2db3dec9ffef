"""A reader of bytecode that makes plain data of it: the real one is not safe on hostile files and knows one version."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

MOST_OBJECTS = 1_000_000  # of one file
MOST_DIGITS = 1000  # of one number in it, 15 bits each


def parts_of(code: CodeType) -> frozenset[str]:
    names = [*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars]
    inner = [part for constant in code.co_consts if isinstance(constant, CodeType) for part in parts_of(constant)]
    return frozenset(names) - _PLACEHOLDERS | _constant_parts(code.co_consts) | frozenset(inner)


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
    names: tuple[str, ...]
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
        self._bytes(4 * (6 if middle and not new else 5))  # counts and flags
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
        return Code(str(file), str(name), tuple(map(str, every)), tuple(constants))

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
