"""Features: the static picture is right, closures are exclusive, clusters span files, ids and order are stable."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.tasks.factory.delete.symbols import Function, Symbols, read_symbols
from offbook.tasks.factory.features import FeatureSettings, Finder, gold_lines
from offbook.tasks.factory.types import Feature, FunctionKey, Map

SHAPES = '''"""Shapes on a plane. More words."""
from functools import lru_cache
from typing import overload
from . import numbers as n
from .numbers import double as twice

__all__ = ["area", "Square"]
__all__ += ["late"]


@app.route("/area")
@lru_cache
def area(side: int, *, unit="m") -> int:
    """The area."""
    def inner():
        return side
    if side:
        return twice(inner()) * side
    return 0


def kept_back():
    return 1


if True:
    async def late(): return area(1)
else:
    async def late(): return 2


class Square:
    def __init__(self, side): self.side = side

    @property
    def width(self):
        """How wide."""
        return self.side

    @width.setter
    def width(self, value):
        self.side = value

    @overload
    def grow(self, by: int) -> int: ...
    @overload
    def grow(self, by: str) -> str: ...
    def grow(self, by):
        return self._add(by)

    def _add(self, by):
        import os
        return by
'''
FILES = {
    "src/pkg/__init__.py": "from .shapes import kept_back\n",
    "src/pkg/shapes.py": SHAPES,
    "src/pkg/numbers.py": "def double(x):\n    return 2 * x\n",
    "src/pkg/broken.py": "def f(:\n",
    "src/pkg/notes.md": "no code",
}


@pytest.fixture(scope="module")
def symbols() -> Symbols:
    return read_symbols(FILES, ("src",))


def shape(symbols: Symbols, name: str) -> Function:
    return symbols.functions[FunctionKey("src/pkg/shapes.py", name)]


def test_every_definition_is_read(symbols: Symbols) -> None:
    names = {key.name for key in symbols.functions if key.path == "src/pkg/shapes.py"}
    assert names == {
        "area", "area.<locals>.inner", "kept_back", "late",
        "Square.__init__", "Square.width", "Square.grow", "Square._add",
    }  # fmt: skip
    area = shape(symbols, "area")
    assert area.signature == "def area(side: int, *, unit='m') -> int"
    assert (area.docstring, area.lines, area.body_lines) == ("The area.", ((11, 19),), 5)
    assert area.statements == 5  # the inner function and its return count
    assert area.decorators == ("app.route", "lru_cache")


def test_several_definitions_of_a_name_are_one_function(symbols: Symbols) -> None:
    assert len(shape(symbols, "late").lines) == 2
    assert shape(symbols, "late").statements == 2
    width = shape(symbols, "Square.width")
    assert (width.is_property, width.docstring, width.signature) == (True, "How wide.", "def width(self)")
    grow = shape(symbols, "Square.grow")
    assert (grow.signature, grow.statements, grow.is_declaration) == ("def grow(self, by)", 1, False)


def test_a_body_of_nothing_is_a_declaration() -> None:
    text = 'def f():\n    """Doc."""\n    ...\ndef g():\n    pass\n@abstractmethod\ndef h():\n    return 1\n'
    functions = read_symbols({"m.py": text}, (".",)).functions.values()
    assert [function.statements for function in functions] == [0, 0, 1]
    assert all(function.is_declaration for function in functions)


def test_public_is_what_others_may_import(symbols: Symbols) -> None:
    public = {key.name for key, function in symbols.functions.items() if function.public}
    assert public == {
        "area", "late", "double", "Square.__init__", "Square.width", "Square.grow",
        "kept_back",  # __all__ keeps it back, but the package imports it for others
    }  # fmt: skip
    alone = read_symbols({"shapes.py": SHAPES}, (".",)).functions[FunctionKey("shapes.py", "kept_back")]
    assert not alone.public


def test_modules_know_their_imports_and_exports(symbols: Symbols) -> None:
    module = symbols.modules["src/pkg/shapes.py"]
    assert (module.name, module.exports) == ("pkg.shapes", ("area", "Square", "late"))
    found = {(i.module, i.name, i.bound, i.top) for i in module.imports}
    assert ("pkg", "numbers", "n", True) in found
    assert ("pkg.numbers", "double", "twice", True) in found
    assert ("os", "", "os", False) in found
    assert {"area", "twice", "Square", "late", "n"} <= module.names
    assert symbols.path_of("pkg") == "src/pkg/__init__.py"


CALLS = {
    "pkg/__init__.py": "from .store import Store\n",
    "pkg/store.py": """
class Base:
    def run(self): return self.step()
    def step(self): return 0
class Store(Base):
    def __init__(self): self.log = Log()
    def step(self): return super().step()
    def get(self, key): return self.log.get(key)
    def make(self):
        def inner(): return self.get(1)
        return inner
class Log:
    def get(self, key): return {}.get(key)
class Broken(ValueError):
    def __str__(self): return "broken"
""",
    "pkg/use.py": """
import pkg
from pkg import store as s
def through_package(): return pkg.Store().get(1)
def through_alias(x: s.Log): return x.get(2)
def of_something(x): return x.get(3)
def step(step): return step()
def outer():
    def inner():
        for made in []: return made()
def made() -> s.Log: raise s.Broken
def returned():
    from pkg.use import made
    log = made()
    return log.get(4)
""",
}


@pytest.mark.parametrize(
    ("name", "users"),
    [
        ("Store.get", ["Store.make.<locals>.inner"]),
        ("Base.step", ["Base.run", "Store.step"]),
        ("Store.__init__", ["through_package"]),
        ("Store.make.<locals>.inner", ["Store.make"]),
        ("Broken.__str__", []),
    ],
)
def test_callers_are_those_that_mean_this_one(name: str, users: list[str]) -> None:
    callers = read_symbols(CALLS, (".",)).callers[FunctionKey("pkg/store.py", name)]
    assert [caller.name for caller in callers] == users


def test_a_local_name_of_an_inner_function_calls_nobody() -> None:
    callers = read_symbols(CALLS, (".",)).callers[FunctionKey("pkg/use.py", "made")]
    assert [caller.name for caller in callers] == ["returned"]


def test_what_uses_a_function_is_no_part_of_it() -> None:
    tree = {"m.py": function("low") + function("high", "    low()\n" + BODY)}
    traced = Map({FunctionKey("m.py", "low"): some(1, 2), FunctionKey("m.py", "high"): some(1)}, frozenset())
    found = Finder(read_symbols(tree, (".",)), traced, TESTS, SETTINGS).features()
    assert [[k.name for k in feature.functions] for feature in found] == [["high"], ["low"]]


def test_the_words_of_an_error_are_no_part_of_what_raises_it() -> None:
    tree = {
        "m.py": "class BadError(ValueError):\n    def __str__(self):\n"
        + "".join(f"        a{n} = 1\n" for n in range(9))
    }
    tree["m.py"] += function("save", BODY + "    Codec().write()\n    raise BadError")
    tree["m.py"] += "class Codec:\n    def write(self):\n        y = 1\n    def __len__(self):\n        return 1\n"
    names = ("BadError.__str__", "save", "Codec.write", "Codec.__len__")
    traced = Map({FunctionKey("m.py", name): some(1) for name in names}, frozenset())
    (feature,) = Finder(read_symbols(tree, (".",)), traced, TESTS, SETTINGS).features()
    assert {k.name for k in feature.functions} == {"save", "Codec.write", "Codec.__len__"}


# --- features

BODY = "".join(f"    x{number} = {number}\n" for number in range(12))


def function(name: str, body: str = BODY) -> str:
    return f"def {name}():\n{body}\n\n"


TREE = {
    "pkg/a.py": "from .b import friend\n"
    + function("top", "    helper()\n" + BODY)
    + function("helper")
    + function("other", "    friend()\n" + BODY)
    + function("wide")
    + function("stranger")
    + function("at_import"),
    "pkg/b.py": function("friend") + function("tiny", "    return 1\n") + function("lonely"),
    "pkg/c.py": "class C:\n    def __len__(self):\n" + "".join(f"        y{n} = 1\n" for n in range(9)),
}
TESTS = tuple(f"t.py::test_{number}" for number in range(24))


def key(name: str) -> FunctionKey:
    return next(FunctionKey(path, name) for path, text in TREE.items() if f"def {name.split('.')[-1]}(" in text)


def some(*numbers: int) -> frozenset[str]:
    return frozenset(TESTS[number] for number in numbers)


ENTERED = {
    "top": some(0, 1, 2),
    "helper": some(1, 2),  # only top's tests enter it
    "stranger": some(1),  # and this one too, but nothing leads there
    "other": some(2, 3),
    "wide": some(*range(7)),  # more than a quarter
    "at_import": some(4),
    "friend": some(5, 6),
    "tiny": some(7),
    "lonely": frozenset(["t.py::test_flaky"]),
    "C.__len__": some(8),
}
SETTINGS = FeatureSettings(repo="Re.po", clusters=0.0)


def find(settings: FeatureSettings = SETTINGS, order: list[str] | None = None) -> list[Feature]:
    names = order or list(ENTERED)
    traced = Map({key(name): ENTERED[name] for name in names}, frozenset({key("at_import")}))
    return Finder(read_symbols(TREE, (".",)), traced, TESTS, settings).features()


def test_a_feature_is_a_target_and_what_only_its_tests_enter() -> None:
    found = {feature.targets[0].name: feature for feature in find()}
    assert set(found) == {"top", "helper", "other", "friend", "stranger"}
    assert {k.name for k in found["top"].functions} == {"top", "helper"}
    assert found["top"].tests == tuple(sorted(some(0, 1, 2)))
    assert found["top"].id.startswith("re-po-a-top-")
    assert len(found["top"].id.rpartition("-")[2]) == 6
    assert found["top"].kind == "single"


def test_functions_with_the_same_tests_are_one_feature_and_the_caller_is_its_target() -> None:
    tree = {
        "m.py": "def _deep():\n"
        + BODY
        + "def called():\n    _deep()\n"
        + BODY * 2
        + "def calling():\n    called()\n"
        + BODY
    }
    traced = Map({FunctionKey("m.py", n): some(1) for n in ("_deep", "called", "calling")}, frozenset())
    (feature,) = Finder(read_symbols(tree, (".",)), traced, TESTS, SETTINGS).features()
    assert feature.targets == (FunctionKey("m.py", "calling"),)
    assert len(feature.functions) == 3


@given(st.randoms(use_true_random=False))
def test_order_and_ids_do_not_depend_on_the_order_of_the_map(rng: random.Random) -> None:
    names = list(ENTERED)
    rng.shuffle(names)
    assert find(order=names) == find()


def test_of_two_that_mostly_share_their_lines_the_larger_stays() -> None:
    found = find(FeatureSettings(repo="r", clusters=0.0, max_overlap=0.4))
    assert {feature.targets[0].name for feature in found} == {"top", "other", "friend", "stranger"}


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ({"max_functions": 1}, {"helper", "other", "friend", "stranger"}),
        ({"max_lines": 20}, {"helper", "other", "friend", "stranger"}),
        ({"min_statements": 14}, {"top"}),
        ({"max_share": 0.1}, {"helper", "other", "friend", "stranger"}),
        ({"max_share": 0.3}, {"top", "helper", "wide", "friend", "other", "stranger"}),
    ],
)
def test_limits(limit: dict[str, float], left: set[str]) -> None:
    found = find(FeatureSettings(repo="r", clusters=0.0, max_overlap=1.0, **limit))  # type: ignore[arg-type]
    assert {feature.targets[0].name for feature in found} == left


def test_a_cluster_spans_files_and_stays_within_its_limits() -> None:
    settings = FeatureSettings(repo="r", min_cluster_lines=25)
    symbols = read_symbols(TREE, (".",))
    clusters = [feature for feature in find(settings) if feature.kind == "cluster"]
    assert clusters
    singles = {feature.targets[0]: feature for feature in find()}
    for cluster in clusters:
        assert len({k.path for k in cluster.functions}) > 1
        assert gold_lines(cluster.functions, symbols) >= 25
        assert len(cluster.tests) <= len(TESTS) / 3
        members = [singles[target] for target in cluster.targets]
        assert set(cluster.functions) == {k for member in members for k in member.functions}
        assert set(cluster.tests) == {t for member in members for t in member.tests}
    used = [target for cluster in clusters for target in cluster.targets]
    assert len(used) == len(set(used))
