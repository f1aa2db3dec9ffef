"""Instructions: three lengths that say what and where, vary with the feature, and never give the code away."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.core.copies import shared_code
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.instruction.instruct import instructions, summary
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, Level

FILES = {
    "pkg/__init__.py": "from .text import wrap\n",
    "pkg/text.py": '''"""Working with text.

More about it.
"""


def wrap(text: str, width: int = 80) -> list[str]:
    """Wrap :func:`text` at ``width``. Lines are stripped.

    >>> wrap("a b", 1)
    ['a', 'b']
    """
    words = _words(text)
    return [" ".join(words[start : start + width]) for start in range(0, len(words), width)]


def _words(text):
    return [word.strip() for word in text.split(",") if word]


def justify(text):
    pieces = wrap(text, 40)
    return sorted(pieces, key=len, reverse=True)


class Page:
    @property
    def title(self):
        """The title, in capitals."""
        return self.name.upper() + "!"

    def print(self, other=None):
        return "\\n".join([self.title, *(other or ())])

    def show(self):
        return self.print()
''',
    "pkg/more.py": '"""More."""\n\n\ndef count(text):\n    """Count words"""\n'
    "    total = sum(1 for _ in text.split())\n    return total\n",
}
SYMBOLS = read_symbols(FILES, (".",))
TESTS = (
    "tests/test_text.py::TestWrap::test_wrap_at_width[1-a]",
    "tests/test_text.py::TestWrap::test_wrap_at_width[2-b]",
    "tests/test_text.py::test_wrap",
    "tests/test_text.py::testEmptyInput",
    "tests/test_text.py::test_1",
)


def take(level: Level, *names: str, targets: int = 1, id: str = "pkg-text-x-000000") -> Deletion:
    keys = tuple(FunctionKey(*name.split("::")) for name in names)
    feature = Feature(id, "single" if targets == 1 else "cluster", keys[:targets], tuple(sorted(keys)), TESTS)
    return delete(FILES, SYMBOLS, feature, level)


def write(level: Level, *names: str, targets: int = 1, id: str = "pkg-text-x-000000") -> dict[str, str]:
    return instructions(SYMBOLS, take(level, *names, targets=targets, id=id), TESTS)


WRAP = ("pkg/text.py::wrap", "pkg/text.py::_words")
CLUSTER = ("pkg/text.py::Page.print", "pkg/more.py::count")


def test_a_stub_is_named_with_its_place_and_what_it_does() -> None:
    texts = write("hybrid", *WRAP)
    for text in texts.values():
        assert "`wrap`" in text
        assert "pkg/text.py" in text
        assert "Wrap `text` at `width`." in text
    assert "`def wrap(text: str, width: int=80) -> list[str]`" in texts["normal"]
    assert "Used by `justify` in `pkg/text.py`." in texts["normal"]
    assert "wrap at width; empty input" in texts["normal"]
    assert "helper" in texts["normal"]
    assert ">>> wrap(" in texts["detailed"]
    assert len(texts["terse"]) < len(texts["normal"]) < len(texts["detailed"])


def test_what_is_gone_is_asked_for_by_its_name() -> None:
    texts = write("gone", "pkg/more.py::count")
    for text in texts.values():
        assert "NotImplementedError" not in text
        assert "Count words" in text
    deletion = take("gone", *WRAP, "pkg/text.py::justify")
    assert not deletion.stubbed
    assert "`justify`" in instructions(SYMBOLS, deletion, TESTS)["terse"]


def test_methods_and_properties_are_called_so() -> None:
    assert "It is a property of `Page`. The title, in capitals." in write("stub", "pkg/text.py::Page.title")["normal"]
    text = write("stub", "pkg/text.py::Page.print")["normal"]
    assert "It is a method of `Page`: `def print(self, other=None)`." in text
    assert "`Page.show`" in text


@pytest.mark.parametrize(
    ("docstring", "told"),
    [
        ("One. Two.\n\nthree\n\n:param x: a number", "One. Two. Three."),
        ("Get it\n\nOne of:\n\n- a\n- b", "Get it. One of."),
        (":param number:\n:return: tuple", ""),
        ("Does it\n:param x: a number\n\nMore.", "Does it."),
        ("Does it:\n\n>>> it()\n1\n\nMore.", "Does it."),
        ("Does it.\n\nArgs:\n    x: a number", "Does it."),
        ("First.\n\nParameters\n----------\nx", "First."),
        (f"A {'long ' * 90}one.\n\nMore.", f"A {'long ' * 90}one."),
    ],
)
def test_a_summary_is_sentences_and_no_fields(docstring: str, told: str) -> None:
    assert summary(docstring) == told


def test_what_is_there_and_what_is_gone_are_told_apart() -> None:
    text = write("stub", *WRAP)["normal"]
    assert "Stubs to be written as well: `_words` in `pkg/text.py`." in text  # private, and anyone finds it
    text = write("hybrid", "pkg/text.py::_words", "pkg/text.py::wrap")["normal"]
    assert "`wrap` in `pkg/text.py`" in text.partition("\n")[0]  # and not the helper
    assert "removed" not in text
    assert "Private helpers are gone as well" in text


def test_a_cluster_names_all_its_targets_and_files() -> None:
    for text in write("hybrid", *CLUSTER, targets=2).values():
        for word in ("`Page.print`", "`count`", "pkg/text.py", "pkg/more.py"):
            assert word in text


@given(st.text("abcdef0123456789", min_size=6, max_size=6), st.sampled_from(["stub", "hybrid", "gone"]))
def test_no_wording_leaks_code_or_test_ids_and_terse_is_short(digits: str, level: Level) -> None:
    for names, targets in ((WRAP, 1), (CLUSTER, 2), (("pkg/text.py::justify",), 1)):
        deletion = take(level, *names, targets=targets, id=f"pkg-text-x-{digits}")
        texts = instructions(SYMBOLS, deletion, TESTS)
        assert set(texts) == {"terse", "normal", "detailed"}
        assert len(texts["terse"]) < 400
        assert texts == instructions(SYMBOLS, deletion, TESTS)
        for text in texts.values():
            assert shared_code(text, deletion.removed) is None
            assert not re.search(r"test_\w+|testEmpty|::", text)
            assert "  " not in text.partition("```")[0]


def test_wording_varies_with_the_feature() -> None:
    for level in ("stub", "gone"):
        texts = [write(level, "pkg/more.py::count", id=f"pkg-{n}") for n in range(40)]  # type: ignore[arg-type]
        assert len({text["terse"] for text in texts}) == 4
        assert len({text["normal"] for text in texts}) > 6


def test_a_very_long_list_of_targets_still_gives_a_terse_text() -> None:
    names = [f"{'long_' * 12}{number}" for number in range(9)]
    files = {"m.py": "".join(f"def {name}():\n    x = 1\n    return x\n" for name in names)}
    symbols = read_symbols(files, (".",))
    keys = tuple(FunctionKey("m.py", name) for name in names)
    feature = Feature("f", "cluster", keys, keys, ())
    text = instructions(symbols, delete(files, symbols, feature, "stub"), ())["terse"]
    assert text == "Please implement what is missing in `m.py`."


BODY = "words = text.split(',')\nresult = [word.strip() for word in words if word]\nreturn result"
WHOLE = (
    '@cached(1)\ndef f(text: str, width: int = 80) -> list[str]:\n    """Doc with some words in it."""\n    '
    + BODY.replace("\n", "\n    ")
)


@pytest.mark.parametrize("source", [BODY, WHOLE])
@pytest.mark.parametrize(
    ("text", "leaks"),
    [
        ("Split the text and strip each word.", False),
        ("Write `def f(text: str, width: int = 80) -> list[str]`. Doc with some words in it.", False),
        ("Start with words = text.split(',') please", True),
        ("Then\n\n    result = [word.strip()   for word in words if word]\n", True),
        ("result=[word.strip()for word in words if word]", True),  # other spaces, same tokens
        ("return result", False),  # says nothing
    ],
)
def test_shared_code_is_found_and_words_are_not(source: str, text: str, leaks: bool) -> None:
    reason = shared_code(text, {"m.py::f": source})
    assert (reason is not None) == leaks
    assert reason is None or "m.py::f" in reason


def test_a_signature_is_no_leak_where_the_body_passes_all_on() -> None:
    passing = {"m.py::f": "return other.merge_with(func, first, *dicts, **kwargs)"}
    assert shared_code("Write `def merge_with(func, first, *dicts, **kwargs)`.", passing) is None
    assert shared_code("Call merge_with(func, first, *dicts, **kwargs).", passing) is not None


def test_a_docstring_that_has_a_line_of_the_body_is_left_out() -> None:
    line = "total = sum(number * number for number in values)"
    files = {"m.py": f'def f(values):\n    """Sum up.\n\n    As in {line}\n    """\n    {line}\n    return total\n'}
    symbols = read_symbols(files, (".",))
    feature = Feature("f", "single", (FunctionKey("m.py", "f"),), (FunctionKey("m.py", "f"),), ())
    deletion = delete(files, symbols, feature, "stub")
    texts = instructions(symbols, deletion, ())
    assert all(shared_code(text, deletion.removed) is None for text in texts.values())
    assert "Sum up." in texts["detailed"]
