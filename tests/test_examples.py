"""Examples: checks of tests with what they need, run with the right code and chosen by what they reach of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.instruction.examples import Example, best_of, examples, reached, tried_in, trying_of
from offbook.tasks.factory.types import FunctionKey
from offbook.tasks.suite import run_rounds, suite_sandbox
from offbook.types import Suite

CODE = '''class Bag(dict):
    def take(self, key, default=None):
        """Take one thing out.

        >>> Bag(a=1).take("a")
        1
        """
        if isinstance(key, list):
            return [self.take(one, default) for one in key]
        if key in self:
            return self.pop(key)
        return default

    def other(self):
        return 1
'''
KEY = FunctionKey("bags.py", "Bag.take")


def found(body: str, head: str = "") -> list[Example]:
    """In a test of these lines."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    text = f"import pytest\nimport bags as b\nfrom bags import Bag\n{head}def test_take(self=0):\n{lines}"
    tests = {"test_bags.py": text}
    failing = ["test_bags.py::test_take"]
    return examples(reached(tests, (".",), failing), tests, (".",), failing, [KEY])


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("bag = Bag(a=1)\nassert bag.take('a') == 1", None),
        ("bag = Bag(a=1)\nbag.take('a')\nassert bag == {}", ["bag = Bag(a=1)\nbag.take('a')\nassert bag == {}"]),
        ("take = lambda key: Bag(a=1).take(key)\nassert take('a') == 1", None),
        ("self.assertEqual(Bag(a=1).take('a'), 1)", ["assert Bag(a=1).take('a') == 1"]),
        ("old = Bag()\nnew = Bag(old)\nassert old == {}", ["old = Bag()\nassert old == {}"]),  # the new one is not read
        ("for n in (1, 2):\n    assert Bag(a=n).take('a') == n", None),
        ("with pytest.raises(TypeError):\n    Bag().take({})", None),
        ("assert Bag(self.content).take('a') == unknown", []),
        (f"assert Bag(a=1).take('a', '{'x' * 400}') == 1", []),
    ],
)
def test_a_check_stands_after_what_it_needs(body: str, texts: list[str] | None) -> None:
    assert [example.text for example in found(body)] == ([body] if texts is None else texts)


def test_checks_that_name_the_function_come_first() -> None:
    checks = ["assert Bag()", "assert Bag().take('a') is None", "assert Bag(a=1).take('a') == 1"]
    assert [example.text for example in found("\n".join(checks))] == [checks[1], checks[2], checks[0]]


def run(tmp_path: Path, candidates: list[Example]) -> list[Example]:
    (tmp_path / "bags.py").write_text(CODE)

    async def go() -> list[Example]:
        suite = Suite(None, (".",))
        async with await suite_sandbox(tmp_path, suite, SandboxSpec()) as sandbox:
            order = trying_of(suite, read_symbols({"bags.py": CODE}, (".",)), [KEY], candidates, {})
            assert order is not None
            (result,) = await run_rounds(sandbox, suite, [order], 60.0)
            return [*tried_in(result, candidates)]

    return asyncio.run(go())


def test_what_is_false_or_about_something_else_is_not_shown(tmp_path: Path) -> None:
    candidates = found(
        "bag = Bag(a=1)\nassert bag.take('a') == 1\nassert bag == {}\nassert Bag().other() == 1\n"
        "assert Bag().take('b', 7) == 7\nassert Bag(a=1).take(['a', 'b']) == [1, None]\nassert Bag().take('c') == None"
    )
    result = run(tmp_path, candidates)
    false = "bag = Bag(a=1)\nassert bag == {}"  # without the check before, which takes it out
    assert {one.text for one in candidates} - {one.text for one in result} == {false}
    assert [one.lines for one in result if one.text == "assert Bag().other() == 1"] == [frozenset()]
    chosen = [example.text for example in best_of(result, fewest=0)]
    assert len(chosen) == 3  # each runs a line that no better one runs
    assert "assert Bag(a=1).take(['a', 'b']) == [1, None]" in chosen
    assert all(example.lines for example in best_of(result, fewest=20))


def test_of_two_examples_one_is_not_the_tail_of_the_other() -> None:
    short, long = (
        Example(text, "test_f", (False, 0), (), frozenset({number}))
        for number, text in enumerate(("assert f(x)", "x = 1\nassert f(x)"))
    )
    assert best_of([short, long], fewest=0) == [long]
