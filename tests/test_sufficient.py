"""Sufficiency: what failing tests check is shown, stated, or refuses the task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from offbook.core.copies import shared_code
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.instruction.examples import examples
from offbook.tasks.factory.instruction.instruct import complete, instructions
from offbook.tasks.factory.instruction.needs import NAMES, PRIVATE, SILENT, TEXTS, Needs
from offbook.tasks.factory.types import Feature, FunctionKey, Level, is_test_code

FILES = {
    "pkg/__init__.py": "from .text import wrap\nfrom .shop import Basket\n",
    "pkg/text.py": '''
def wrap(text, width=80):
    """Cut a text into lines of that width.

    Words stay whole.
    """
    if width < 1:
        raise ValueError(f"a width of {width} is too narrow")
    return _cut(text.split(), width, mode="gentle")


def _cut(words, width, mode):
    return [" ".join(words[start : start + width]) for start in range(0, len(words), width)]


def bare(number):
    doubled = number * 2
    halved = doubled / 4
    return [doubled, halved]
''',
    "pkg/shop.py": '''
class Basket(dict):
    """Things to buy."""

    size: int = 40

    def __init__(self, owner):
        """For whom it is."""
        self.owner_name = owner
        self._sums = {}

    def total(self, *, tax=0):
        """The sum of all prices."""
        amount = sum(self.values())
        return {"gross_amount": amount * (1 + tax), "kind": "full"}

    def __repr__(self):
        return f"<Basket of {self.owner_name}>"


def kept():
    return {"kind": "full"}
''',
}
WRAP = ("pkg/text.py::wrap", "pkg/text.py::_cut")
BARE = FunctionKey.of("pkg/text.py::bare")
BASKET = tuple(f"pkg/shop.py::Basket.{name}" for name in ("total", "__init__", "__repr__"))


def needs(test: str, level: Level, *names: str, files: Mapping[str, str] = FILES) -> tuple[Needs, dict[str, str]]:
    """Of a feature whose tests are all of one test file; and its instructions."""
    tree = {**files, "tests/test_it.py": test}
    nodes = [line.split("(")[0].removeprefix("def ") for line in test.splitlines() if line.startswith("def test_")]
    failing = tuple(f"tests/test_it.py::{name}" for name in nodes)
    symbols = read_symbols({path: text for path, text in tree.items() if not is_test_code(path)}, (".",))
    keys = tuple(map(FunctionKey.of, names))
    feature = Feature("f", "single", keys[:1], tuple(sorted(keys)), failing)
    deletion = delete(tree, symbols, feature, level)
    visible = without_tests(tree, failing, deletion)
    shown = {path: text for path, text in {**tree, **visible, **deletion.files}.items() if text is not None}
    touched = (*deletion.stubbed, *deletion.deleted)
    found = Needs(tree, shown, failing, deletion.removed, touched, feature.targets, symbols)
    words = complete(instructions(symbols, deletion, failing), found)
    assert all(shared_code(text, deletion.removed) is None for text in words.values())
    return found, words


@pytest.mark.parametrize(
    ("imports", "stated"),
    [
        ("from pkg import wrap\n", {("pkg", "wrap")}),
        ("from pkg.text import wrap as w\n", {("pkg.text", "wrap")}),
        ("import pkg.text as t\nwrap = t.wrap\n", {("pkg.text", "wrap")}),
        ("import pkg\nwrap = lambda x: pkg.wrap(x)\n", {("pkg", "wrap")}),
    ],
)
def test_names_are_stated_with_the_place_that_tests_import_them_from(
    imports: str, stated: set[tuple[str, str]]
) -> None:
    found, words = needs(f"{imports}def test_wrap():\n    assert wrap('a b') == ['a b']\n", "gone", *WRAP)
    assert found.names.keys() == stated
    for text in words.values():  # the short one too
        for module, name in stated:
            assert f"from {module} import {name}" in text
        assert "def wrap(text, width=80):" in text
        assert "Words stay whole." in text
    assert not found.missing()


def test_another_name_for_what_is_gone_is_refused() -> None:
    files = {**FILES, "pkg/__init__.py": "from .text import wrap as fold\n"}
    test = "from pkg import fold\ndef test_wrap():\n    assert fold('a b') == ['a b']\n"
    found, _ = needs(test, "gone", *WRAP, files=files)
    assert found.missing() == [(NAMES, "tests/test_it.py imports fold from pkg, and what it stands for is not said")]
    test = "from pkg.text import bare as b\ndef test_b():\n    assert b(2) == [4, 1]\n    assert b(4) == [8, 2]\n"
    found, _ = needs(test, "stub", "pkg/text.py::bare")
    assert "from pkg.text import bare as b\nassert b(2) == [4, 1]\n" in ran(found).stated()


def test_what_the_tree_shows_is_not_said_again() -> None:
    found, words = needs("from pkg import wrap\ndef test_wrap():\n    assert wrap('a b') == ['a b']\n", "stub", *WRAP)
    assert found.stated() == ""
    assert len(words["terse"]) < 400
    assert not found.missing()


def test_a_class_that_is_gone_is_declared_with_its_fields_and_methods() -> None:
    test = "from pkg import Basket\ndef test_total():\n    assert Basket('me').total()['kind'] == 'full'\n"
    found, words = needs(test, "gone", *BASKET)
    for line in ("class Basket(dict):", "size: int = ...", "def __init__(self, owner):", "def total(self, *, tax=0):"):
        assert line in words["terse"]
    assert "sum(self" not in words["detailed"]
    assert not found.missing()  # "full" stands in the tree


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        ("assert Basket('me').total()['gross_amount'] == 0", ["gross_amount"]),
        ("assert Basket('me').total() == {'gross_amount': 0, 'kind': 'full'}", ["gross_amount"]),
        ("assert repr(Basket('me')) == '<Basket of me>'", ["<Basket of me>"]),
        ("assert Basket('me').total()['kind'] == 'full'", []),  # shown
        ("assert Basket('other words').total(tax=1)", []),  # of the test's own
    ],
)
def test_a_literal_of_the_gone_code_that_tests_check_is_stated(check: str, texts: list[str]) -> None:
    found, words = needs(f"from pkg import Basket\ndef test_total():\n    {check}\n", "stub", *BASKET)
    assert [*found.texts] == texts
    assert not found.missing()
    if texts:
        assert f"`{texts[0]}` (total)" in words["normal"]


def test_messages_and_errors_are_found_behind_fixtures_helpers_and_tables() -> None:
    test = """import pytest
from pkg import wrap
CASES = [(0, "a width of 0 is too narrow")]
@pytest.fixture
def narrow():
    return CASES
def fails(case):
    with pytest.raises(ValueError, match=case[1]):
        wrap("a", case[0])
def test_narrow(narrow):
    fails(narrow[0])
"""
    found, words = needs(test, "stub", *WRAP)
    assert [*found.texts] == ["a width of 0 is too narrow"]
    assert found.errors == {"ValueError": "tests/test_it.py::fails"}
    assert "- `ValueError` (fails)" in words["normal"]
    assert not found.missing()


PRICE = '''
def price(count):
    """What so many of them cost: the number of things, times the factor of the house."""
    return count * 37


def other():
    return {}
'''


@pytest.mark.parametrize(
    ("check", "shown", "said"),
    [
        ("assert price(count) == 37", "0", ["- `37` (price)"]),
        ("assert price(count) == 37", "37", []),  # beside it
        ("assert price(2) == 74 == 2 * 37", "0", ["- `37` (price)"]),
    ],
)
def test_a_number_that_docstrings_only_hint_at(check: str, shown: str, said: list[str]) -> None:
    files = {"pkg/__init__.py": "", "pkg/shop.py": PRICE.format(shown), "notes.txt": "37 pages\n"}
    test = f"from pkg.shop import price\n\ndef test_price({'' if '(2)' in check else 'count'}):\n    {check}\n"
    found, words = needs(test, "stub", "pkg/shop.py::price", files=files)
    assert all(words["normal"].count(text) == 1 for text in said)
    assert bool(found.stated()) == bool(said)
    assert not found.missing()


def test_a_word_of_a_docstring_does_not_show_an_attribute() -> None:
    shop = FILES["pkg/shop.py"].replace("Things to buy.", "Things to buy; see owner_name.")
    check = "from pkg import Basket\ndef test_it():\n    assert Basket('me').owner_name == 'me'\n"
    _, words = needs(check, "stub", *BASKET, files={**FILES, "pkg/shop.py": shop})
    assert "Attributes that the tests read: `owner_name`." in words["normal"]


def test_too_many_texts_make_a_refusal() -> None:
    cases = "\n".join(f"    assert wrap('a', {-n}) == 'a width of {-n} is too narrow'" for n in range(14))
    found, _ = needs(f"from pkg import wrap\ndef test_wrap():\n{cases}\n", "stub", *WRAP)
    assert found.missing()[0][0] == TEXTS


@pytest.mark.parametrize(
    ("check", "private"),
    [
        ("assert Basket('me')._sums == {}", ["_sums"]),
        ("assert getattr(Basket('me'), '_sums') == {}", ["_sums"]),
        ("assert vars(Basket('me'))['_sums'] == {}", ["_sums"]),
        ("assert Basket('me').__dict__ == {'_sums': {}}", ["_sums"]),
        ("assert Basket('me').owner_name == 'me'", []),
    ],
)
def test_private_state_refuses_and_public_attributes_are_stated(check: str, private: list[str]) -> None:
    found, words = needs(f"from pkg import Basket\ndef test_it():\n    {check}\n", "stub", *BASKET)
    assert [name for name in found.attributes if name.startswith("_")] == private
    assert [reason for reason, _ in found.missing()] == [PRIVATE] * len(private)
    assert ("Attributes that the tests read: `owner_name`." in words["normal"]) == (not private)
    shown = {**FILES, "pkg/shop.py": FILES["pkg/shop.py"] + "\ndef look(basket):\n    return basket._sums\n"}
    found, words = needs(f"from pkg import Basket\ndef test_it():\n    {check}\n", "stub", *BASKET, files=shown)
    assert not found.missing()


def test_a_private_name_that_the_gone_code_spells_is_no_text_to_state() -> None:
    shop = FILES["pkg/shop.py"].replace("self._sums = {}", 'self._sums = dict(kind="_sums")')
    check = "from pkg import Basket\ndef test_it():\n    assert '_sums' in vars(Basket('me'))\n"
    found, words = needs(check, "stub", *BASKET, files={**FILES, "pkg/shop.py": shop})
    assert "_sums" not in words["normal"]
    assert [reason for reason, _ in found.missing()] == [PRIVATE]


def test_what_no_docstring_describes_has_examples_or_is_refused() -> None:
    test = """import pytest
from pkg.text import bare
@pytest.mark.parametrize("number, result", [(2, [4, 1]), (4, [8, 2])])
def test_bare(number, result):
    got = bare(number)
    assert got == result
"""
    found, _ = needs(test, "stub", "pkg/text.py::bare")
    shown = ["got = bare(2)\nassert got == [4, 1]", "got = bare(4)\nassert got == [8, 2]"]
    for num_lines, is_refused in ((1, True), (3, False)):
        tried = ran(found, range(num_lines))
        assert [one.text for one in tried.chosen] == shown
        assert shown[0] in tried.stated()
        assert bool(tried.missing()) == is_refused
    assert found.stated() == ""  # none of them is true
    counted = f"has 0 words of docstring for {found.symbols.functions[BARE].statements} statements"
    assert found.missing() == [(SILENT, f"{BARE} {counted}, and few tests are simple calls")]


@pytest.mark.parametrize(
    ("docstring", "words"),
    [("Twice it.", 2), ("Twice it, and one more.", None), ("See the manual in the other room.", None)],
)
def test_of_documentation_the_words_are_counted(docstring: str, words: int | None) -> None:
    code = f"def double(n):\n    '{docstring}'\n    n = help(n)\n    n += n\n    return n + 1\n"
    found, _ = needs("def test_it():\n    pass\n", "stub", "m.py::double", files={"m.py": code})
    assert [*found.brief.values()] == ([] if words is None else [words])


def ran(found: Needs, lines: Iterable[int] = (1,)) -> Needs:
    """As if all of its checks were true, and ran the same lines."""
    tests = {path: text for path, text in found.before.items() if is_test_code(path)}
    candidates = examples(found.code, tests, (".",), found.failing, found.functions)
    return replace(found, examples=tuple(replace(one, lines=frozenset(lines)) for one in candidates))


TABLE = '''
def surcharge(zone):
    """The surcharge for a zone in cents, which is added to what a parcel costs.

    >>> surcharge(1)
    0
    """
    return {numbers}.get(zone, 615)
'''
TABLE_TEST = """import pytest
from pkg import surcharge
@pytest.mark.parametrize("zone, amount", {rows})
def test_surcharge(zone, amount):
    assert surcharge(zone) == amount
"""


def test_rows_with_what_is_stated_to_the_letter_are_shown() -> None:
    files = {"pkg/__init__.py": TABLE.replace("{numbers}", str({1: 0, 2: 85, 3: 240}))}
    test = TABLE_TEST.format(rows=[(1, 0), (5, 0), (2, 85), (3, 240), (9, 615), (10, 615)])
    found = ran(needs(test, "stub", "pkg/__init__.py::surcharge", files=files)[0])
    checks = ["(1) == 0", "(2) == 85", "(3) == 240", "(9) == 615"]
    assert [one.text for one in found.chosen] == [f"assert surcharge{check}" for check in checks]


@pytest.mark.parametrize(("doctest", "num_shown"), [("", 2), (">>> volume(1, 1, 1)\n    1\n    ", 1)])
def test_without_a_doctest_every_test_has_an_example(doctest: str, num_shown: int) -> None:
    code = f"""def volume(length, width, height):
    '''The weight that counts for a bulky parcel, in kilograms.

    {doctest}'''
    return round(length * width * height / 5000, 2)
"""
    test = """from pkg import volume
def test_small():
    assert volume(1, 1, 1) == 1
def test_large():
    assert volume(100, 50, 50) == 48.67
"""
    found = ran(needs(test, "stub", "pkg/__init__.py::volume", files={"pkg/__init__.py": code})[0])
    assert len(found.chosen) == num_shown
