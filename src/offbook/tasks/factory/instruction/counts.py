"""What is counted where nobody can judge: words of docstrings, and examples.

Whether the words say what the tests check is not asked. What tests compare with, raise and import is looked for by
itself (needs.py), and examples are run (tried.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from offbook.tasks.factory.delete.symbols import Function, Symbols
from offbook.tasks.factory.instruction.examples import Example
from offbook.tasks.factory.types import FunctionKey

MIN_WORDS = 4  # of a docstring that says something
MIN_EXAMPLES = 2
MIN_EXAMPLED_TESTS = 4  # or one in as many


def num_words(*functions: Function) -> int:
    """Of their docstrings."""
    return sum(len(re.findall(r"[A-Za-z]{2,}", function.docstring)) for function in functions)


def briefly_documented(
    asked: Iterable[FunctionKey], functions: Sequence[FunctionKey], symbols: Symbols
) -> dict[FunctionKey, str]:
    """Those that have fewer words of docstring than statements (or than 4), alone or with all `functions` that went
    with them -> how many. What a base class says of the method it overrides is too general to count."""
    whole = [symbols.functions[key] for key in functions if not symbols.functions[key].nested]
    is_brief, found = num_words(*whole) < _num_statements(*whole), dict[FunctionKey, str]()
    for key in asked:
        function = symbols.functions[key]
        if num_words(function) < max(MIN_WORDS, function.statements):
            found[key] = f"has {_counted(function)}"
        elif is_brief:
            found[key] = f"with what went with it has {_counted(*whole)}"
    return found


def _counted(*functions: Function) -> str:
    return f"{num_words(*functions)} words of docstring for {_num_statements(*functions)} statements"


def _num_statements(*functions: Function) -> int:
    return sum(function.statements for function in functions)


def are_enough(given: Sequence[Example], failing: Iterable[str]) -> bool:
    """Two checks at least, out of a quarter of the failing tests or four of them."""
    tests = {test.partition("[")[0] for test in failing}
    named = {example.test for example in given}
    return len(given) >= MIN_EXAMPLES and len(named) >= min(MIN_EXAMPLED_TESTS, len(tests) / MIN_EXAMPLED_TESTS)
