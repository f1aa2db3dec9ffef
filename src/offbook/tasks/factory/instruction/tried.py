"""Which examples are true of the right code, and which lines each runs of what is gone.

The lines say what an example is worth. One that runs none is about something else, and one that runs a line which the
docstrings' own examples do not run shows what nothing else says. But a line that looks things up in a table is run by
any of its rows: what the instruction states to the letter is shown in its place as well.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from offbook.core.pycode import nodes
from offbook.tasks.factory.delete.symbols import Symbols, module_name
from offbook.tasks.factory.instruction.examples import Example
from offbook.tasks.factory.types import FunctionKey
from offbook.tasks.suite import Round, SuiteRun
from offbook.types import Suite

MODULE = "offbook_tried"
MAX_TRIED = 60
MAX_BY_LINES = 8  # examples that are chosen by the lines they run
MAX_SHOWN = 16
MIN_EXAMPLES = 2
MIN_EXAMPLED_TESTS = 4  # or one in as many
TRIED_S = 30.0
LINES = 100_000  # a line is one number: that of its file times this, and its own
RUNNER = f"""
import doctest, functools, importlib, os, sys

PLACES = {{os.path.realpath(path): (number * {LINES}, spans) for number, (path, spans) in enumerate(SPANS.items())}}

@functools.cache
def place_of(code):
    number, spans = PLACES.get(os.path.realpath(code.co_filename), (0, ()))
    return number if any(first <= code.co_firstlineno <= last for first, last in spans) else None

def lines_of(do):
    lines = set()

    def trace(frame, event, _):
        place = place_of(frame.f_code)
        if place is not None and event == "line":
            lines.add(place + frame.f_lineno)
        return None if place is None else trace

    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(None)
    return sorted(lines)

def check(number):
    code = compile(CHECKS[number], "example", "exec")
    return lines_of(lambda: exec(code, {{"__name__": "example"}}))

def documented(number):
    module, text = DOCUMENTED[number]
    test = doctest.DocTestParser().get_doctest(text, dict(vars(importlib.import_module(module))), "example", None, 0)
    return lines_of(lambda: doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None))
"""


@dataclass(frozen=True, slots=True)
class Tried:
    lines: Mapping[str, frozenset[int]] = field(default_factory=dict)  # of what is gone, of each example that is true
    documented: frozenset[int] = frozenset()  # lines that the docstrings' examples run


def trying_of(
    suite: Suite,
    symbols: Symbols,
    functions: Iterable[FunctionKey],
    examples: Sequence[Example],
    right: Mapping[str, str | None],
) -> Round | None:
    """The round that runs the examples. `right` is what brings the right code into the tree."""
    asked = [symbols.functions[key] for key in functions if key in symbols.functions]
    if not asked or not examples:
        return None
    spans: dict[str, list[tuple[int, int]]] = {}
    for function in asked:
        spans.setdefault(function.key.path, []).extend(function.lines)
    checks = ["\n".join([*example.imports, example.text]) for example in examples[:MAX_TRIED]]
    documented = [(module_name(f.key.path, suite.import_roots), f.docstring) for f in asked if ">>>" in f.docstring]
    text = f"SPANS = {spans!r}\nCHECKS = {checks!r}\nDOCUMENTED = {documented!r}\n{RUNNER}"
    calls = [(MODULE, "check", repr(([number], {}))) for number in range(len(checks))]
    calls += [(MODULE, "documented", repr(([number], {}))) for number in range(len(documented))]
    path = str(PurePosixPath(suite.import_roots[0], f"{MODULE}.py"))
    return Round((), changes={**right, path: text}, timeout_s=TRIED_S, per_test_s=1.0, calls=calls)


def tried_in(run: SuiteRun, examples: Sequence[Example]) -> Tried:
    chosen = examples[:MAX_TRIED]
    returned = {number: json.loads(text)[0] for number, text in run.returned.items()}
    lines = {number: frozenset(data[1:]) for number, data in returned.items() if data[0] == "list"}
    documented = (one for number, one in lines.items() if number >= len(chosen))
    true = {example.text: lines[number] for number, example in enumerate(chosen) if number in lines}
    return Tried(true, frozenset().union(*documented))


def are_enough(given: Sequence[Example], failing: Iterable[str]) -> bool:
    """Two checks at least, out of a quarter of the failing tests or four of them."""
    tests = {test.partition("[")[0] for test in failing}
    named = {example.test for example in given}
    return len(given) >= MIN_EXAMPLES and len(named) >= min(MIN_EXAMPLED_TESTS, len(tests) / MIN_EXAMPLED_TESTS)


def best_of(
    examples: Sequence[Example], tried: Tried, fewest: int, stated: Set[str] = frozenset()
) -> tuple[list[Example], int]:
    """True ones, in the order of their ranks, and how many more there are of the kind.

    First those with a line that neither docstrings nor a better one runs; then those that say where a `stated` literal
    belongs, and what the same test says exactly next to it. With `fewest` at least so many, and one from every test.
    """
    lines = tried.lines
    seen = {*tried.documented}
    useful = [example for example in examples if lines.get(example.text)]
    chosen: list[Example] = []
    while len(chosen) < MAX_BY_LINES and (new := [example for example in useful if lines[example.text] - seen]):
        best = [example for example in new if example.rank[:2] == new[0].rank[:2]]
        chosen.append(max(best, key=lambda example: len(lines[example.text] - seen)))
        seen |= lines[chosen[-1].text]

    def add(is_wanted: Callable[[Example], bool]) -> None:
        for example in useful:
            if example not in chosen and is_wanted(example):
                chosen.append(example)

    literals = {
        one: {*stated} & {str(n.value).strip() for n in nodes(ast.parse(one.text), ast.Constant)} for one in useful
    }
    add(lambda example: bool(literals[example].difference(*(literals[one] for one in chosen))))
    if fewest:
        add(lambda example: len(chosen) < fewest or example.test not in {one.test for one in chosen})
    add(lambda example: bool(literals[example]))
    tables = {example.test for example in useful if literals[example]}
    add(lambda example: example.test in tables and not any(example.rank[:2]))
    texts = [one.text for one in chosen[:MAX_SHOWN]]
    tails = {text for text in texts if any(other.endswith(f"\n{text}") for other in texts)}  # said by the longer one
    shown = [example for example in useful if example.text in texts and example.text not in tails]
    return shown, max(0, len(chosen) - MAX_SHOWN)
