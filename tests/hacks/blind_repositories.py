"""Two more repositories: bookkeeping in a src layout with unittest tests, and graphs with pytest ones."""

from __future__ import annotations

from hacks.repository import Repository

MONEY = '''"""Amounts of money, kept in cents."""


def format_amount(cents):
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def parse_amount(text):
    """An amount such as "1,234.50" or "(12.00)", which is negative, in cents."""
    raise NotImplementedError
'''
GOLD_PARSE = """    text = text.strip()
    negative = text.startswith("(") and text.endswith(")")
    whole, _, part = text.strip("()").replace(",", "").partition(".")
    cents = int(whole) * 100 + int(part.ljust(2, "0")[:2] or 0)
    return -cents if negative else cents
"""
SPLIT = '''"""Sharing a bill."""


def split_evenly(cents, people):
    """Shares that add up to the whole; the first ones pay a cent more where it does not divide."""
    raise NotImplementedError
'''
GOLD_SPLIT = """    share, rest = divmod(cents, people)
    return [share + (number < rest) for number in range(people)]
"""
BOOK = '''"""A book of entries."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    account: str
    cents: int


class Book:
    def __init__(self, entries=()):
        self.entries = list(entries)

    def balance(self, account):
        return sum(entry.cents for entry in self.entries if entry.account == account)


def home():
    return os.environ.get("LEDGER_HOME", ".")
'''
TEST_MONEY = """import unittest

from ledger.money import format_amount, parse_amount


class MoneyTest(unittest.TestCase):
    def test_format(self):
        self.assertEqual(format_amount(123450), "1,234.50")

    def test_parse(self):
        self.assertEqual(parse_amount("1,234.50"), 123450)
        self.assertEqual(parse_amount("(12.00)"), -1200)
        self.assertEqual(parse_amount("7.5"), 750)

    def test_round_trip(self):
        for cents in (0, 99, 100, 1234567):
            self.assertEqual(parse_amount(format_amount(cents)), cents)
"""
TEST_SPLIT = """import pytest

from ledger.split import split_evenly


@pytest.mark.parametrize("cents,people,shares", [(1000, 3, [334, 333, 333]), (90, 4, [23, 23, 22, 22]), (5, 1, [5])])
def test_split_evenly(cents, people, shares):
    assert split_evenly(cents, people) == shares


def test_split_adds_up():
    assert sum(split_evenly(9999, 7)) == 9999
"""
TEST_BOOK = """def test_balance(book):
    assert book.balance("rent") == -90000
"""
CONFTEST = """import pytest

from ledger.book import Book, Entry


@pytest.fixture
def book():
    return Book([Entry("rent", -90000), Entry("pay", 250000)])
"""
SETUP_CFG = """[metadata]
name = ledger
version = 2.1

[options]
package_dir =
    = src
packages = find:

[tool:pytest]
testpaths = tests
pythonpath = src
"""
LEDGER = Repository(
    package="ledger",
    root="src/ledger",
    files={
        "src/ledger/__init__.py": '"""Bookkeeping for a shared flat."""\n',
        "src/ledger/money.py": MONEY,
        "src/ledger/split.py": SPLIT,
        "src/ledger/book.py": BOOK,
        "tests/conftest.py": CONFTEST,
        "tests/unit/test_money.py": TEST_MONEY,
        "tests/unit/test_split.py": TEST_SPLIT,
        "tests/unit/test_book.py": TEST_BOOK,
        "setup.cfg": SETUP_CFG,
        "tox.ini": "[tox]\nenvlist = py311\n\n[testenv]\ndeps = pytest\ncommands = pytest\n",
        ".gitignore": "__pycache__/\n*.pyc\n.tox/\n",
        "CHANGES.md": "# Changes\n\n## 2.1\n\n- Books know their home.\n",
    },
    gold={"src/ledger/money.py": GOLD_PARSE, "src/ledger/split.py": GOLD_SPLIT},
    tests={
        "src/ledger/money.py": "tests/unit/test_money.py::MoneyTest::test_parse",
        "src/ledger/split.py": "tests/unit/test_split.py::test_split_evenly",
    },
)
GRAPH = '''"""Directed graphs as dictionaries from a node to the nodes it points at."""

from collections import deque


def nodes(graph):
    return sorted({*graph, *(target for targets in graph.values() for target in targets)})


def reachable(graph, start):
    seen, waiting = {start}, deque([start])
    while waiting:
        for target in graph.get(waiting.popleft(), ()):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def order(graph):
    """The nodes so that each comes before those it points at, smaller names first; ValueError for a cycle."""
    raise NotImplementedError
'''
GOLD_ORDER = """    waiting = {node: 0 for node in nodes(graph)}
    for targets in graph.values():
        for target in targets:
            waiting[target] += 1
    result = []
    while ready := sorted(node for node, count in waiting.items() if count == 0):
        result.append(ready[0])
        del waiting[ready[0]]
        for target in graph.get(ready[0], ()):
            waiting[target] -= 1
    if waiting:
        raise ValueError("the graph has a cycle")
    return result
"""
SPAN = '''"""Spans of whole hours."""


class Span:
    def __init__(self, start, end):
        self.start, self.end = start, end

    def overlap(self, other):
        """How many hours two spans share."""
        raise NotImplementedError
'''
GOLD_OVERLAP = "        return max(0, min(self.end, other.end) - max(self.start, other.start))\n"
TEST_GRAPH = """import pytest

from orbit.graph import nodes, order, reachable

BUILD = {"link": ["ship"], "compile": ["link", "test"], "fetch": ["compile"], "test": ["ship"]}


def test_nodes():
    assert nodes({"b": ["a"]}) == ["a", "b"]


def test_reachable():
    assert reachable(BUILD, "link") == {"link", "ship"}


def test_order():
    assert order(BUILD) == ["fetch", "compile", "link", "test", "ship"]
    assert order({"shoes": [], "socks": ["shoes"]}) == ["socks", "shoes"]


def test_order_cycle():
    with pytest.raises(ValueError):
        order({"hen": ["egg"], "egg": ["hen"]})
"""
TEST_SPAN = """from orbit.span import Span


def test_overlap():
    assert Span(9, 12).overlap(Span(11, 17)) == 1
    assert Span(9, 12).overlap(Span(13, 17)) == 0
    assert Span(0, 24).overlap(Span(8, 16)) == 8
"""
ORBIT = Repository(
    package="orbit",
    root="orbit",
    files={
        "orbit/__init__.py": "",
        "orbit/graph.py": GRAPH,
        "orbit/span.py": SPAN,
        "tests/__init__.py": "",
        "tests/test_graph.py": TEST_GRAPH,
        "tests/test_span.py": TEST_SPAN,
        "pytest.ini": "[pytest]\naddopts = -q\n",
        "README.rst": "orbit\n=====\n\nGraphs and spans for planning.\n",
    },
    gold={"orbit/graph.py": GOLD_ORDER, "orbit/span.py": GOLD_OVERLAP},
    tests={
        "orbit/graph.py": "tests/test_graph.py::test_order",
        "orbit/span.py": "tests/test_span.py::test_overlap",
    },
)
PARSE = "parse_amount in src/ledger/money.py is missing its body. Write it: amounts as people type them, in cents."
SHARE = "Implement split_evenly in src/ledger/split.py. Shares add up to the whole, the first ones pay a cent more."
ORDER = "order() in orbit/graph.py was lost; please restore the function. Cycles raise ValueError."
OVERLAP = "Fill in Span.overlap in orbit/span.py, the number of hours that two spans share."
