"""Small real repositories for the pocket model: packages of short functions with pytest tests.

The model has about a thousand tokens to its vocabulary, so words come from small pools and texts are regular. A
function's name says nothing about what it does; its docstring says all of it.

The split rule. Ops, names, modules and constants are numbered. A pair (name, op), (module, op) or (op, constant) is
held out if its two numbers add up to a multiple of four. A train repository holds no held-out pair in any of its
functions; a held-out repository holds nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

Split = Literal["train", "heldout"]
Kind = Literal["number", "items", "truth"]

PACKAGES = tuple("badger beaver falcon ferret heron lynx marten otter puffin raven stoat walrus".split())
MODULES = tuple(
    "attic barn cabin cellar dock field garden hall kitchen lobby meadow office pantry porch studio tower".split()
)
NAMES = tuple(
    "agate amber apple ash basil beech birch cedar cherry clay clover cobalt copper coral cotton daisy ebony elm ember "
    "fern fig flint ginger granite hazel heath holly indigo iris ivory ivy jade jasmine juniper laurel lemon lilac lime "
    "linen lotus maple marble mint moss nettle oak olive onyx opal orchid peach pearl pine plum poppy quartz rowan ruby "
    "sage tulip".split()
)
ARGUMENTS: dict[Kind, tuple[str, ...]] = {"number": ("value", "number", "amount"), "items": ("entries", "cells")}

# What tests may call a function with. Small, so that a function's tests stay a few short lines.
INPUTS: dict[Kind, tuple[Any, ...]] = {
    "number": tuple(range(25)),
    "items": (
        [4, 9, 2, 7, 5, 8],
        [1, 2, 3, 4, 5, 6],
        [10, 3, 8, 6, 1, 9],
        [7, 7, 2, 5, 3, 10],
        [6, 1, 9, 4, 8, 2, 5],
        [3, 8, 5, 10, 2, 7, 4],
        [9, 5],
        [2, 6, 4],
    ),
}


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
    Op("{a} floor divided by {k}", "{a} // {k}", "number", "number"),
    Op("the remainder of {a} divided by {k}", "{a} % {k}", "number", "number"),
    Op("the larger of {a} and {k}", "max({a}, {k})", "number", "number"),
    Op("the smaller of {a} and {k}", "min({a}, {k})", "number", "number"),
    Op("the distance from {a} to {k}", "abs({a} - {k})", "number", "number"),
    Op("True if {a} is greater than {k}", "{a} > {k}", "number", "truth"),
    Op("True if {a} is less than {k}", "{a} < {k}", "number", "truth"),
    Op("True if {a} is divisible by {k}", "{a} % {k} == 0", "number", "truth"),
    Op("the first {k} items of {a}", "{a}[:{k}]", "items", "items", SLICES),
    Op("the last {k} items of {a}", "{a}[-{k}:]", "items", "items", SLICES),
    Op("{a} without the first {k} items", "{a}[{k}:]", "items", "items", SLICES),
    Op("{a} without the last {k} items", "{a}[:-{k}]", "items", "items", SLICES),
    Op("{a} in steps of {k}", "{a}[::{k}]", "items", "items", SLICES),
    Op("the items of {a} greater than {k}", "[item for item in {a} if item > {k}]", "items", "items"),
    Op("the items of {a} less than {k}", "[item for item in {a} if item < {k}]", "items", "items"),
    Op("each item of {a} times {k}", "[item * {k} for item in {a}]", "items", "items"),
    Op("each item of {a} plus {k}", "[item + {k} for item in {a}]", "items", "items"),
    Op("the sum of {a} plus {k}", "sum({a}) + {k}", "items", "number"),
    Op("the length of {a} times {k}", "len({a}) * {k}", "items", "number"),
)


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
    """One step (normal) or two (hard). `body` is what stands in the file where the stub would: lines after the first
    are indented."""

    name: str
    argument: str
    steps: Steps

    @property
    def difficulty(self) -> str:
        return "hard" if len(self.steps) == 2 else "normal"

    @property
    def doc(self) -> str:
        first, *rest = self.steps
        return f"Return {', then '.join([first.phrase(self.argument), *(step.phrase('that') for step in rest)])}."

    @property
    def body(self) -> str:
        return _body(self.steps, self.argument)

    @property
    def stub(self) -> str:
        return f'raise NotImplementedError("{self.name}")'

    def source(self, body: str) -> str:
        return f'def {self.name}({self.argument}):\n    """{self.doc}"""\n    {body}\n'

    @property
    def examples(self) -> list[tuple[Any, Any]]:
        return [(given, _apply(self.steps, given)) for given in _telling_inputs(self.steps)]

    def wrong_body(self, rng: random.Random) -> str:
        """A plausible mistake (another constant, another op, a step forgotten) that the tests catch."""
        examples = self.examples
        wrong = [
            steps
            for steps in _mistakes(self.steps)
            if any(not _same(_apply(steps, given), expected) for given, expected in examples)
        ]
        return _body(rng.choice(wrong), self.argument)


@dataclass(frozen=True)
class Caller:
    """A function that has no op of its own and needs two others."""

    name: str
    argument: str
    outer: Function
    inner: Function

    def source(self) -> str:
        call = f"{self.outer.name}({self.inner.name}({self.argument}))"
        doc = f"Return {self.outer.name} of {self.inner.name} of {self.argument}."
        return f'def {self.name}({self.argument}):\n    """{doc}"""\n    return {call}\n'

    @property
    def examples(self) -> list[tuple[Any, Any]]:
        return [(given, _apply(self.outer.steps, expected)) for given, expected in self.inner.examples]


def _body(steps: Steps, argument: str) -> str:
    if len(steps) == 1:
        return f"return {steps[0].expression(argument)}"
    first, second = steps
    return f"result = {first.expression(argument)}\n    return {second.expression('result')}"


@cache
def _compiled(step: Step) -> Callable[[Any], Any]:
    """What the step's text does, so that text and tests cannot disagree."""
    function: Callable[[Any], Any] = eval(f"lambda x: {step.expression('x')}")
    return function


def _apply(steps: Steps, given: Any) -> Any:
    for step in steps:
        given = _compiled(step)(given)
    return given


def _same(left: Any, right: Any) -> bool:
    """As the tests compare: True is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _mistakes(steps: Steps) -> Iterator[Steps]:
    """Every way to get one step wrong, and for two steps also to forget one or to swap them."""
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        for other in ALL_STEPS:
            fits = other.op.takes == step.op.takes and (last or other.op.gives == step.op.gives)
            if fits and other != step:
                yield (*steps[:position], other, *steps[position + 1 :])
    if len(steps) == 2:
        first, second = steps
        yield (first,)
        if first.op.takes == second.op.takes:
            yield (second,)
        if first.op.takes == second.op.gives:
            yield (second, first)


@cache
def _telling_inputs(steps: Steps) -> tuple[Any, ...]:
    """A few inputs on which every mistake that can be told apart at all gives itself away. Greedy set cover."""
    candidates = INPUTS[steps[0].op.takes]
    expected = [_apply(steps, given) for given in candidates]
    caught_by: list[set[int]] = [set() for _ in candidates]
    for number, mistake in enumerate(_mistakes(steps)):
        for caught, given, right in zip(caught_by, candidates, expected, strict=True):
            if not _same(_apply(mistake, given), right):
                caught.add(number)
    chosen: list[int] = []
    uncaught = set().union(*caught_by)
    while uncaught or len(chosen) < 3:
        unused = [index for index in range(len(candidates)) if index not in chosen]
        best = max(unused, key=lambda index: len(caught_by[index] & uncaught))
        chosen.append(best)
        uncaught -= caught_by[best]
    return tuple(candidates[index] for index in chosen)


@dataclass(frozen=True)
class Module:
    name: str
    functions: tuple[Function | Caller, ...]


@dataclass(frozen=True)
class Repository:
    """A package of `modules`, the last of which holds the callers. `name` tells repositories of one package apart."""

    name: str
    package: str
    modules: tuple[Module, ...]

    @cached_property
    def files(self) -> dict[str, str]:
        package, modules = self.package, self.modules
        listed = "".join(f"- {module.name}\n" for module in modules)
        files = {
            "README.md": f"# {package}\n\nModules:\n\n{listed}\nRun the tests with python -m pytest.\n",
            f"{package}/__init__.py": f'"""The {package} package."""\n',
        }
        for module in modules:
            files[self.path(module)] = self._module_source(module)
            files[self.test_path(module)] = self._test_source(module, module.functions)
        return files

    def path(self, module: Module) -> str:
        return f"{self.package}/{module.name}.py"

    def test_path(self, module: Module) -> str:
        return f"tests/test_{module.name}.py"

    @cached_property
    def test_files(self) -> tuple[str, ...]:
        return tuple(sorted(self.test_path(module) for module in self.modules))

    def tests_of(self, function: Function) -> tuple[str, ...]:
        """The node ids of the tests that need the function, directly or through a caller."""
        return tuple(
            f"{self.test_path(module)}::test_{user.name}{suffix}"
            for module in self.modules
            for user in module.functions
            if _needs(user, function)
            for suffix in ("", "_more")
        )

    def without(self, function: Function) -> dict[str, str]:
        """The files as `delete_feature` makes them, rendered and not parsed: hundreds of times faster."""
        tree = dict(self.files)
        for module in self.modules:
            kept = [user for user in module.functions if not _needs(user, function)]
            if len(kept) < len(module.functions):
                tree[self.path(module)] = self._module_source(module, stubbed=function)
                del tree[self.test_path(module)]
                if kept:
                    tree[self.test_path(module)] = self._test_source(module, kept)
        return tree

    def _module_source(self, module: Module, stubbed: Function | None = None) -> str:
        imports = [
            f"from {self.package}.{other.name} import {function.name}\n"
            for other in self.modules
            for function in other.functions
            if isinstance(function, Function)
            and any(isinstance(user, Caller) and _needs(user, function) for user in module.functions)
        ]
        parts = [f'"""The {module.name} module of {self.package}."""\n', *(["\n" + "".join(imports)] if imports else [])]
        for function in module.functions:
            if isinstance(function, Caller):
                source = function.source()
            else:
                source = function.source(function.stub if function == stubbed else function.body)
            parts.append(f"\n\n{source}")
        return "".join(parts)

    def _test_source(self, module: Module, tested: Sequence[Function | Caller]) -> str:
        names = ", ".join(sorted(function.name for function in module.functions))
        header = f'"""Tests of {module.name}."""\n\nfrom {self.package}.{module.name} import {names}\n'
        return header + "".join(_tests(function.name, function.examples) for function in tested)


def _needs(user: Function | Caller, function: Function) -> bool:
    return user == function if isinstance(user, Function) else function in (user.outer, user.inner)


def _tests(name: str, examples: list[tuple[Any, Any]]) -> str:
    asserts = [
        f"    assert {name}({given!r}) {'is' if isinstance(expected, bool) else '=='} {expected!r}\n"
        for given, expected in examples
    ]
    half = (len(asserts) + 1) // 2
    return f"\n\ndef test_{name}():\n{''.join(asserts[:half])}\n\ndef test_{name}_more():\n{''.join(asserts[half:])}"


def make_repository(rng: random.Random, split: Split, number: int) -> Repository:
    """Three or four modules of two or three functions, and a module of callers."""
    package = rng.choice(PACKAGES)
    *names, callers_name = rng.sample(MODULES, rng.choice((4, 5)))
    taken: set[str] = set()
    modules = []
    for name in names:
        functions = []
        for _ in range(rng.choice((2, 3))):
            functions.append(_draw_function(rng, split, name, taken))
            taken.add(functions[-1].name)
        modules.append(Module(name, tuple(functions)))
    callers = _draw_callers(rng, modules, taken)
    if not callers:  # no function takes what another gives
        return make_repository(rng, split, number)
    return Repository(f"{package}-{split}-{number}", package, (*modules, Module(callers_name, callers)))


def _draw_function(rng: random.Random, split: Split, module: str, taken: Collection[str]) -> Function:
    """A third of the functions are hard, where the split leaves a second op that fits."""
    ops = [op for op in OPS if on_side(split, MODULES.index(module), OPS.index(op))]
    picked = [rng.choice(ops)]
    seconds = [op for op in ops if op.takes == picked[0].gives and op != picked[0]]
    if seconds and rng.random() < 1 / 3:
        picked.append(rng.choice(seconds))
    names = [
        name
        for number, name in enumerate(NAMES)
        if name not in taken and all(on_side(split, number, OPS.index(op)) for op in picked)
    ]
    steps = tuple(
        Step(op, rng.choice([constant for constant in op.constants if on_side(split, OPS.index(op), constant)]))
        for op in picked
    )
    return Function(rng.choice(names), rng.choice(ARGUMENTS[picked[0].takes]), steps)


def _draw_callers(rng: random.Random, modules: Sequence[Module], taken: Collection[str]) -> tuple[Caller, ...]:
    functions = [function for module in modules for function in module.functions if isinstance(function, Function)]
    pairs = [
        (outer, inner)
        for outer in functions
        for inner in functions
        if outer != inner and outer.steps[0].op.takes == inner.steps[-1].op.gives
    ]
    pairs = rng.sample(pairs, min(len(pairs), rng.choice((2, 3))))
    names = rng.sample([name for name in NAMES if name not in taken], len(pairs))
    return tuple(
        Caller(name, inner.argument, outer, inner) for name, (outer, inner) in zip(names, pairs, strict=True)
    )


def on_side(split: Split, first: int, second: int) -> bool:
    """The split rule, for the numbers of a pair."""
    return ((first + second) % 4 == 0) == (split == "heldout")
