"""Recorders that stand in the place of expected values. In a blank round the tests do not hold those values, so code
under test finds nothing to look up; what it returned is reported as plain data and compared by the judge outside."""

from __future__ import annotations

import builtins
import collections.abc
import hashlib
import json
import math
import operator
from typing import Any

BLANK = "__blank__"  # the recorder's name in test files
MOST_REPORTS = 5000  # of a test
LONGEST = 4000  # characters of a report; a longer one is reported as a digest
MOST_ITEMS = 20_000
DEEPEST = 30
UNKNOWN = "?"


class Blanks:
    """`__blank__(n)` is an object that equals everything and reports what it is compared with, `__blank__(n, value)`
    reports a value and is True, `__blank__.raises(n)` is an exception type that reports what is raised."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Any]] = []
        setattr(builtins, BLANK, self)

    def __call__(self, number: int, *values: Any) -> Any:
        if not values:
            return Blank(self, number)
        self.report(number, values[0] if len(values) == 1 else values)
        return True

    def raises(self, number: int) -> type:
        return AnyError("Error", (Exception,), {"blanks": self, "number": number})

    def report(self, number: int, value: Any) -> None:
        if len(self.reports) < MOST_REPORTS:
            self.reports.append((number, data_of(value)))

    def taken(self) -> list[tuple[int, Any]]:
        reports, self.reports = self.reports, []
        return reports


class Blank:
    __slots__ = ("blanks", "number")

    def __init__(self, blanks: Blanks, number: int):
        self.blanks, self.number = blanks, number

    def __eq__(self, other: object) -> bool:
        self.blanks.report(self.number, other)
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__


class AnyError(type):
    """The type of an exception type that every exception is one of."""

    def __subclasscheck__(cls, other: type) -> bool:
        vars(cls)["blanks"].report(vars(cls)["number"], [base.__name__ for base in type.mro(other)])
        return True

    def __instancecheck__(cls, value: object) -> bool:
        return cls.__subclasscheck__(type(value))


def data_of(value: Any, longest: int = LONGEST) -> Any:
    """A value as JSON, the same for all that equal it. A subclass is what its base class holds, whatever it says that
    it equals. What has no plain form is ["?", its type, its truth, whether it equals just anything]."""
    try:
        data = plain(value, 0)
        text = json.dumps(data)
    except Exception:  # raised by the code under test, which may raise what it likes
        data, text = unknown(value), ""
    return data if len(text) <= longest else ["digest", hashlib.sha256(text.encode()).hexdigest()]


def unknown(value: Any) -> list[Any]:
    try:
        return [UNKNOWN, type(value).__name__, bool(value), bool(value == object())]
    except Exception:
        return [UNKNOWN, type(value).__name__, True, False]


def plain(value: Any, depth: int) -> Any:
    """Containers are lists that begin with their kind."""
    if value is None or value is True or value is False:
        return value
    if depth > DEEPEST:
        raise ValueError
    bases = type.mro(type(value))
    if str in bases:
        return str.__str__(value)
    if int in bases:
        return whole(int.__index__(value))
    if float in bases:
        number = float.__float__(value)
        if not math.isfinite(number):
            return ["float", repr(number)]
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    for base in (list, tuple, set, frozenset, dict, collections.deque):
        if base in bases:
            return container(base, value, depth)
    if bytes in bases or bytearray in bases:
        return ["bytes", bytes(memoryview(value)).decode("latin-1")]
    if isinstance(value, collections.abc.KeysView | collections.abc.ItemsView):
        return container(set, set(value), depth)
    if isinstance(value, collections.abc.Mapping):
        return container(dict, dict(value), depth)
    return other(value, bases, depth)


def container(base: Any, value: Any, depth: int) -> list[Any]:
    if base.__len__(value) > MOST_ITEMS:
        raise ValueError
    if base is dict:
        pairs = [[plain(key, depth + 1), plain(one, depth + 1)] for key, one in dict.items(value)]
        return ["dict", *sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
    items = [plain(one, depth + 1) for one in base.__iter__(value)]
    is_set = base in (set, frozenset)
    return ["set" if is_set else base.__name__, *(sorted(items, key=json.dumps) if is_set else items)]


def other(value: Any, bases: list[type], depth: int) -> Any:
    """Types of the standard library, by their names: one that is not imported is no value's type."""
    kind = type(value).__name__
    names = {base.__name__ for base in bases}
    if "Enum" in names:
        return ["enum", kind, str(value.name)]
    if "range" in names:
        return ["range", *container(list, list(value[:MOST_ITEMS]), depth)[1:]]
    if names & {"Decimal", "Fraction"}:
        if value == (rounded := int(value)):
            return whole(rounded)
        return ["number", str(value.normalize() if "Decimal" in names else value)]
    if names & {"complex", "timedelta", "Pattern", "date", "time", "PurePath", "UUID"}:
        return [bases[-2].__name__, str(value)]
    if "type" in names:
        return ["type", value.__qualname__]
    if "__index__" in dir(type(value)):
        return whole(operator.index(value))
    return unknown(value)


def whole(number: int) -> Any:
    return number if number.bit_length() < 1000 else ["int", hex(number)]
