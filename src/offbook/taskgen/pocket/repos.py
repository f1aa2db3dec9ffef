"""Small real repositories for the pocket model: packages of short functions with pytest tests.

The model has about a thousand tokens to its vocabulary, so words come from small pools and texts are regular. A
function's name says nothing about what it does; its docstring says all of it.

The split rule. Ops, names and modules are numbered. A pair (name, op) or (module, op) is held out if its two numbers
add up to a multiple of four. A train repository holds no held-out pair in any of its functions; a held-out repository
holds no other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from offbook.taskgen.pocket.functions import OPS, Example, Function, Kind, Op, Step, evaluate, is_constant

Split = Literal["train", "heldout"]

PACKAGES = ("badger", "falcon", "heron", "marten", "otter", "raven")
MODULES = ("attic", "barn", "cabin", "dock", "field", "garden", "hall", "porch")
# fmt: off
NAMES = (
    "agate", "amber", "apple", "basil", "birch", "cedar", "cherry", "clay", "cobalt", "copper", "coral", "daisy",
    "ebony", "ember", "fern", "flint", "ginger", "hazel", "holly", "indigo", "iris", "ivory", "jade", "lemon",
    "lilac", "maple", "mint", "moss", "olive", "opal", "pearl", "tulip",
)
# fmt: on
ARGUMENTS: dict[Kind, tuple[str, ...]] = {"number": ("value", "number", "amount"), "items": ("entries", "cells")}


@dataclass(frozen=True)
class Caller:
    """A function that has no op of its own and needs two others."""

    name: str
    argument: str
    outer: Function
    inner: Function

    def source(self) -> str:
        outer, inner = self.outer.name, self.inner.name
        doc = f"Return {outer} of {inner} of {self.argument}."
        return f'def {self.name}({self.argument}):\n    """{doc}"""\n    return {outer}({inner}({self.argument}))\n'

    @property
    def examples(self) -> tuple[Example, ...]:
        return tuple((given, evaluate(self.outer.steps, between)) for given, between in self.inner.examples)

    def needs(self, function: Function) -> bool:
        return function in (self.outer, self.inner)


@dataclass(frozen=True)
class Module:
    name: str
    functions: tuple[Function, ...]


@dataclass(frozen=True)
class Repository:
    """A package, its tests and a README. `name` tells repositories with the same package apart."""

    name: str
    package: str
    modules: tuple[Module, ...]
    callers_module: str
    callers: tuple[Caller, ...]

    @cached_property
    def files(self) -> dict[str, str]:
        files = {
            "README.md": self._readme(),
            f"{self.package}/__init__.py": f'"""The {self.package} package."""\n',
            self.path(self.callers_module): self._callers_source(),
            path_of_tests(self.callers_module): self._tests_source(self.callers_module, self.callers, self.callers),
        }
        for module in self.modules:
            files[self.path(module.name)] = self._module_source(module)
            files[path_of_tests(module.name)] = self._tests_source(module.name, module.functions, module.functions)
        return files

    @property
    def module_names(self) -> tuple[str, ...]:
        return (*(module.name for module in self.modules), self.callers_module)

    @property
    def test_files(self) -> tuple[str, ...]:
        return tuple(sorted(path_of_tests(name) for name in self.module_names))

    def path(self, module_name: str) -> str:
        return f"{self.package}/{module_name}.py"

    def tests_of(self, module: Module, function: Function) -> tuple[str, ...]:
        """The node ids of the tests that need the function, directly or through a caller."""
        tested = [(module.name, function.name)]
        tested += [(self.callers_module, caller.name) for caller in self.callers if caller.needs(function)]
        return tuple(
            f"{path_of_tests(module_name)}::test_{name}{suffix}"
            for module_name, name in tested
            for suffix in ("", "_more")
        )

    def without(self, module: Module, function: Function) -> dict[str, str]:
        """The same files that `delete_function` makes, rendered instead of parsed: demonstrations need thousands."""
        tree = dict(self.files)
        tree[self.path(module.name)] = self._module_source(module, stubbed=function)
        others = [other for other in module.functions if other != function]
        callers = [caller for caller in self.callers if not caller.needs(function)]
        for name, imported, tested in (
            (module.name, module.functions, others),
            (self.callers_module, self.callers, callers),
        ):
            if tested:
                tree[path_of_tests(name)] = self._tests_source(name, imported, tested)
            else:
                del tree[path_of_tests(name)]
        return tree

    def _readme(self) -> str:
        modules = "".join(f"- {name}\n" for name in self.module_names)
        return f"# {self.package}\n\nModules:\n\n{modules}\nRun the tests with python -m pytest.\n"

    def _module_source(self, module: Module, stubbed: Function | None = None) -> str:
        functions = (
            function.source(function.stub if function == stubbed else function.body) for function in module.functions
        )
        return "\n\n".join(functions)

    def _callers_source(self) -> str:
        imports = "".join(
            f"from {self.package}.{module.name} import {function.name}\n"
            for module in self.modules
            for function in module.functions
            if any(caller.needs(function) for caller in self.callers)
        )
        return imports + "".join(f"\n\n{caller.source()}" for caller in self.callers)

    def _tests_source(
        self, module_name: str, imported: Sequence[Function | Caller], tested: Sequence[Function | Caller]
    ) -> str:
        names = ", ".join(sorted(function.name for function in imported))
        header = f'"""Tests of {module_name}."""\n\nfrom {self.package}.{module_name} import {names}\n'
        return header + "".join(render_tests(function.name, function.examples) for function in tested)


def path_of_tests(module_name: str) -> str:
    return f"tests/test_{module_name}.py"


def render_tests(name: str, examples: Sequence[Example]) -> str:
    asserts = [
        f"    assert {name}({given!r}) {'is' if isinstance(expected, bool) else '=='} {expected!r}\n"
        for given, expected in examples
    ]
    half = (len(asserts) + 1) // 2
    return f"\n\ndef test_{name}():\n{''.join(asserts[:half])}\n\ndef test_{name}_more():\n{''.join(asserts[half:])}"


def make_repository(rng: random.Random, split: Split, number: int) -> Repository:
    """Three or four modules of one or two functions, and a module of callers."""
    package = rng.choice(PACKAGES)
    *names, callers_module = rng.sample(MODULES, rng.choice((4, 5)))
    taken: set[str] = set()
    modules = []
    for name in names:
        functions = []
        for _ in range(rng.choice((1, 2))):
            function = _draw_function(rng, split, name, taken)
            taken.add(function.name)
            functions.append(function)
        modules.append(Module(name, tuple(functions)))
    callers = _draw_callers(rng, modules, taken)
    if not callers:  # no function takes what another gives
        return make_repository(rng, split, number)
    return Repository(f"{package}-{split}-{number}", package, tuple(modules), callers_module, callers)


def _draw_function(rng: random.Random, split: Split, module: str, taken: Collection[str]) -> Function:
    steps = _draw_steps(rng, split, module)
    numbers = [OPS.index(step.op) for step in steps]
    names = [
        name
        for name_number, name in enumerate(NAMES)
        if name not in taken and all(on_side(split, name_number, number) for number in numbers)
    ]
    return Function(rng.choice(names), rng.choice(ARGUMENTS[steps[0].op.takes]), steps)


def _draw_steps(rng: random.Random, split: Split, module: str) -> tuple[Step, ...]:
    """Two steps in a fifth of the draws, where an op that fits is on the same side."""
    ops = [op for number, op in enumerate(OPS) if on_side(split, MODULES.index(module), number)]
    first = rng.choice(ops)
    seconds = [op for op in ops if op.takes == first.gives and op != first]
    if not seconds or rng.random() > 1 / 5:
        return (_draw_step(rng, first),)
    steps = (_draw_step(rng, first), _draw_step(rng, rng.choice(seconds)))
    return _draw_steps(rng, split, module) if is_constant(steps) else steps


def _draw_step(rng: random.Random, op: Op) -> Step:
    return Step(op, rng.choice(op.constants))


def _draw_callers(rng: random.Random, modules: Sequence[Module], taken: Collection[str]) -> tuple[Caller, ...]:
    functions = [function for module in modules for function in module.functions]
    pairs = [
        (outer, inner)
        for outer in functions
        for inner in functions
        if outer != inner and outer.steps[0].op.takes == inner.steps[-1].op.gives
    ]
    pairs = rng.sample(pairs, min(len(pairs), rng.choice((2, 3))))
    names = rng.sample([name for name in NAMES if name not in taken], len(pairs))
    return tuple(Caller(name, inner.argument, outer, inner) for name, (outer, inner) in zip(names, pairs, strict=True))


def on_side(split: Split, first: int, second: int) -> bool:
    """The split rule, for the two numbers of a pair."""
    return ((first + second) % 4 == 0) == (split == "heldout")
