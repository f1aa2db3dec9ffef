"""The functions of the pocket repositories: body, docstring and test inputs.

A function is one step ("Return value plus 3.") or two ("Return value plus 3, then that times 2."); a step is an op with
a constant. The docstring determines the body, and the tests catch every detectable mistake in `mistakes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

Kind = Literal["number", "items", "truth"]
Example = tuple[Any, Any]  # argument and result


@dataclass(frozen=True, slots=True)
class Op:
    """A template of one step. In both texts {a} is the argument and {k} the constant."""

    phrase: str
    expression: str
    takes: Kind
    gives: Kind
    constants: range = range(2, 10)


SLICES = range(2, 6)  # shorter than the lists that tests use
OPS = (
    Op("{a} plus {k}", "{a} + {k}", "number", "number"),
    Op("{a} minus {k}", "{a} - {k}", "number", "number"),
    Op("{a} times {k}", "{a} * {k}", "number", "number"),
    Op("the remainder of {a} divided by {k}", "{a} % {k}", "number", "number"),
    Op("the larger of {a} and {k}", "max({a}, {k})", "number", "number"),
    Op("the smaller of {a} and {k}", "min({a}, {k})", "number", "number"),
    Op("True if {a} is greater than {k}", "{a} > {k}", "number", "truth"),
    Op("the first {k} items of {a}", "{a}[:{k}]", "items", "items", SLICES),
    Op("the last {k} items of {a}", "{a}[-{k}:]", "items", "items", SLICES),
    Op("the items of {a} greater than {k}", "[item for item in {a} if item > {k}]", "items", "items"),
    Op("each item of {a} times {k}", "[item * {k} for item in {a}]", "items", "items"),
    Op("the sum of {a} plus {k}", "sum({a}) + {k}", "items", "number"),
)

# Test inputs: few and small, so that tests are short lines of frequent tokens.
INPUTS: dict[Kind, tuple[Any, ...]] = {
    "number": tuple(number * 7 % 25 for number in range(25)),  # 0 to 24, small and large by turns
    "items": (
        [4, 9, 2, 7, 5, 8],
        [9, 5],
        [6, 1, 9, 4, 8, 2, 5],
        [10, 3, 8, 6, 1],
        [1, 2, 3, 4, 5, 6],
        [7, 7, 2, 5, 3, 10],
        [3, 8, 5, 10, 2, 7, 4],
        [2, 6, 4],
    ),
}
MIN_INPUTS = 3


@dataclass(frozen=True, slots=True)
class Step:
    op: Op
    constant: int

    def phrase(self, argument: str) -> str:
        return self.op.phrase.format(a=argument, k=self.constant)

    def expression(self, argument: str) -> str:
        return self.op.expression.format(a=argument, k=self.constant)


Steps = tuple[Step, ...]
ALL_STEPS = tuple(Step(op, constant) for op in OPS for constant in op.constants)


@dataclass(frozen=True)
class Function:
    name: str
    argument: str
    steps: Steps

    @property
    def difficulty(self) -> str:
        return "normal" if len(self.steps) == 1 else "hard"

    @property
    def doc(self) -> str:
        first, *rest = self.steps
        return f"Return {', then '.join([first.phrase(self.argument), *(step.phrase('that') for step in rest)])}."

    @property
    def body(self) -> str:
        """The code that replaces the stub: the first line without indentation."""
        return body_of(self.steps, self.argument)

    @property
    def stub(self) -> str:
        return f'raise NotImplementedError("{self.name}")'

    def source(self, body: str) -> str:
        return f'def {self.name}({self.argument}):\n    """{self.doc}"""\n    {body}\n'

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """What the tests assert."""
        return tuple((given, evaluate(self.steps, given)) for given in _telling_inputs(self.steps))


def evaluate(steps: Steps, given: Any) -> Any:
    for step in steps:
        given = _compiled(step)(given)
    return given


def is_constant(steps: Steps) -> bool:
    """Whether the function returns the same for all inputs, so that tests cannot distinguish it from a constant."""
    results = [evaluate(steps, given) for given in INPUTS[steps[0].op.takes]]
    return all(result == results[0] for result in results)


def body_of(steps: Steps, argument: str) -> str:
    if len(steps) == 1:
        return f"return {steps[0].expression(argument)}"
    first, second = steps
    return f"result = {first.expression(argument)}\n    return {second.expression('result')}"


@cache
def _compiled(step: Step) -> Callable[[Any], Any]:
    """Compile the step's own text, so that source and tests cannot disagree."""
    function: Callable[[Any], Any] = eval(f"lambda x: {step.expression('x')}")
    return function


def passes(expected: Any, result: Any) -> bool:
    """Whether the tests accept the result. They reject 1 for True, but accept True for 1."""
    return result is expected if isinstance(expected, bool) else bool(result == expected)


def mistakes(steps: Steps) -> Iterator[Steps]:
    """Every wrong step; with two steps also a missing one and the swapped order."""
    for position, step in enumerate(steps):
        is_last = position == len(steps) - 1
        for other in ALL_STEPS:
            fits = other.op.takes == step.op.takes and (is_last or other.op.gives == step.op.gives)
            if fits and other != step:
                yield (*steps[:position], other, *steps[position + 1 :])
    if len(steps) == 2:
        first, second = steps
        yield (first,)
        if second.op.takes == first.op.takes:
            yield (second,)
        if second.op.gives == first.op.takes:
            yield (second, first)


@cache
def _telling_inputs(steps: Steps) -> tuple[Any, ...]:
    """A few inputs that expose every detectable mistake and constant results.

    The first input catches most mistakes; a greedy set cover finds inputs for the others.
    """
    candidates = INPUTS[steps[0].op.takes]
    expected = [evaluate(steps, given) for given in candidates]
    survivors = [mistake for mistake in mistakes(steps) if passes(expected[0], evaluate(mistake, candidates[0]))]
    caught_by = [
        {number for number, mistake in enumerate(survivors) if not passes(right, evaluate(mistake, given))}
        for given, right in zip(candidates, expected, strict=True)
    ]
    for caught, right in zip(caught_by, expected, strict=True):
        if right != expected[0]:
            caught.add(len(survivors))  # the mistake of always returning the first result
    chosen = [0]
    uncaught = set().union(*caught_by)
    while uncaught or len(chosen) < MIN_INPUTS:
        unused = [index for index in range(len(candidates)) if index not in chosen]
        best = max(unused, key=lambda index: len(caught_by[index] & uncaught))
        chosen.append(best)
        uncaught -= caught_by[best]
    return tuple(candidates[index] for index in chosen)
