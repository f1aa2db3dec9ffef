"""Which examples are true of the right code, and which steps of it each takes: from line to line of what is gone.

The steps say what an example is worth. One that takes none is about something else, and one that takes a step which the
docstrings' own examples do not take shows what nobody would know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from offbook.sandbox import Box
from offbook.taskgen.delete.symbols import Symbols, module_name
from offbook.taskgen.examples import Example
from offbook.taskgen.nouns import FunctionKey
from offbook.tasks.suite import Round, run_rounds
from offbook.types import Suite

MODULE = "offbook_tried"
MAX_TRIED = 60
TRIED_S = 30.0
LINES = 100_000  # a step is one number: of the file, the line it comes from, the line it goes to
RUNNER = f"""
import doctest, importlib, os, sys

PLACES = {{os.path.realpath(path): (number, spans) for number, (path, spans) in enumerate(SPANS.items())}}
KNOWN = {{}}

def steps_of(do):
    steps = set()

    def enter(frame, event, _):
        code = frame.f_code
        if code not in KNOWN:
            file, spans = PLACES.get(os.path.realpath(code.co_filename), (0, ()))
            KNOWN[code] = file * {LINES} if any(a <= code.co_firstlineno <= b for a, b in spans) else None
        if KNOWN[code] is None:
            return None
        before = [0]

        def step(frame, event, _):
            if event == "line":
                steps.add((KNOWN[code] + before[0]) * {LINES} + frame.f_lineno)
                before[0] = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        do()
    finally:
        sys.settrace(None)
    return sorted(steps)

def check(number):
    code = compile(CHECKS[number], "example", "exec")
    return steps_of(lambda: exec(code, {{"__name__": "example"}}))

def documented(number):
    module, text = DOCUMENTED[number]
    names = dict(vars(importlib.import_module(module)))
    test = doctest.DocTestParser().get_doctest(text, names, "example", None, 0)
    return steps_of(lambda: doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None))
"""


@dataclass(frozen=True, slots=True)
class Tried:
    steps: Mapping[str, frozenset[int]] = field(default_factory=dict)  # of each example that is true
    documented: frozenset[int] = frozenset()  # steps that the docstrings' examples take


async def tried(
    box: Box, suite: Suite, symbols: Symbols, functions: Iterable[FunctionKey], examples: Sequence[Example]
) -> Tried:
    """In a box that has the right code."""
    asked = [symbols.functions[key] for key in functions if key in symbols.functions]
    if not asked or not examples:
        return Tried()
    spans: dict[str, list[tuple[int, int]]] = {}
    for function in asked:
        spans.setdefault(function.key.path, []).extend(function.lines)
    checks = ["\n".join([*example.imports, example.text]) for example in examples[:MAX_TRIED]]
    documented = [(module_name(f.key.path, suite.import_roots), f.docstring) for f in asked if ">>>" in f.docstring]
    text = f"SPANS = {spans!r}\nCHECKS = {checks!r}\nDOCUMENTED = {documented!r}\n{RUNNER}"
    calls = [(MODULE, "check", repr(([number], {}))) for number in range(len(checks))]
    calls += [(MODULE, "documented", repr(([number], {}))) for number in range(len(documented))]
    path = str(PurePosixPath(suite.import_roots[0], f"{MODULE}.py"))
    order = Round((), changes={path: text}, timeout_s=TRIED_S, calls=calls)
    (run,) = await run_rounds(box, suite, [order], TRIED_S)
    steps = {number: frozenset(ast.literal_eval(value)) for number, value in run.returned.items()}
    return Tried(
        {example.text: steps[number] for number, example in enumerate(examples[:MAX_TRIED]) if number in steps},
        frozenset(step for number, one in steps.items() if number >= len(checks) for step in one),
    )


def best_of(examples: Sequence[Example], tried: Tried, most: int, fewest: int) -> list[Example]:
    """True ones, each with a step that neither docstrings nor a better one shows, in the order of their ranks. With
    `fewest` at least so many, and one from every test."""
    steps, seen = tried.steps, {*tried.documented}
    useful = [example for example in examples if steps.get(example.text)]
    chosen: list[Example] = []
    while len(chosen) < most and (new := [example for example in useful if steps[example.text] - seen]):
        best = [example for example in new if example.rank[:2] == new[0].rank[:2]]
        chosen.append(max(best, key=lambda example: len(steps[example.text] - seen)))
        seen |= steps[chosen[-1].text]
    for example in useful if fewest else ():
        is_other = example.test not in {one.test for one in chosen} and len(chosen) < most + most // 2
        if example not in chosen and (len(chosen) < fewest or is_other):
            chosen.append(example)
    return [example for example in useful if example in chosen]
