"""Small generated repositories for the pocket model: packages of short functions with pytest tests.

The model's vocabulary has about a thousand tokens, so words come from small pools and texts are regular. A function's
name is unrelated to its behaviour; the docstring specifies it.

The split rule. Ops, names and modules are numbered. A pair (name, op) or (module, op) is held out if its two numbers
add up to a multiple of four. A train repository holds no held-out pair in any of its functions; a held-out repository
holds no other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from offbook.pocket.functions import OPS, Example, Function, Kind, Op, Step, evaluate, is_constant

T = TypeVar("T")
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

OUTDATED = 2  # modules
MORE = "_more"  # the second test of a function
# Short reports: what a test run prints stays in the agent's window. Plugins that happen to be installed would take half
# of a run's time.
OPTIONS = "-q --tb=no -p no:cacheprovider --disable-plugin-autoload"
SETTINGS = {"pytest.ini": f"[pytest]\naddopts = {OPTIONS}\nconsole_output_style = classic\n"}


@dataclass(frozen=True)
class Caller:
    """A function that composes two others."""

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


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of repositories, including the module of callers."""

    modules: tuple[int, ...]
    functions: tuple[int, ...]  # of a module
    is_long: bool = False


SHORT = Shape((4, 5), (1, 2))
LONG = Shape((6, 7), (2, 3), is_long=True)


@dataclass(frozen=True)
class Repository:
    """A package, its tests and a README. `name` is unique, the package's name is not.

    A long one has settings for its test runs, and outdated copies of some modules in old/, where everything has another
    constant.
    """

    name: str
    package: str
    modules: tuple[Module, ...]
    callers_module: str
    callers: tuple[Caller, ...]
    outdated: tuple[Module, ...] = ()

    @cached_property
    def files(self) -> dict[str, str]:
        files = {
            "README.md": self._readme(),
            f"{self.package}/__init__.py": f'"""The {self.package} package."""\n',
            self.path(self.callers_module): self._callers_source(),
            path_of_tests(self.callers_module): self._tests_source(self.callers_module, self.callers),
        }
        for module in self.modules:
            files[self.path(module.name)] = self._module_source(module)
            files[path_of_tests(module.name)] = self._tests_source(module.name, module.functions)
        if self.outdated:
            files |= {f"old/{module.name}.py": self._module_source(module) for module in self.outdated} | SETTINGS
        return files

    @property
    def spots(self) -> list[Spot]:
        return [Spot(self, module, function) for module in self.modules for function in module.functions]

    @property
    def module_names(self) -> tuple[str, ...]:
        return (*(module.name for module in self.modules), self.callers_module)

    @property
    def test_files(self) -> tuple[str, ...]:
        return tuple(sorted(path_of_tests(name) for name in self.module_names))

    def path(self, module_name: str) -> str:
        return f"{self.package}/{module_name}.py"

    def without(self, functions: Collection[Function], unseen: Collection[str]) -> dict[str, str]:
        """The same files that `delete_functions` makes, rendered instead of parsed: demonstrations need thousands.

        `unseen` are the tests that go.
        """
        sources = {self.path(module.name): self._module_source(module, functions) for module in self.modules}
        tested: dict[str, Sequence[Function | Caller]] = {module.name: module.functions for module in self.modules}
        tested[self.callers_module] = self.callers
        tests = {path_of_tests(name): self._tests_source(name, of_module, unseen) for name, of_module in tested.items()}
        tree = self.files | sources | tests
        return {path: text for path, text in tree.items() if path not in tests or "\ndef " in text}

    def _readme(self) -> str:
        modules = "".join(f"- {name}\n" for name in self.module_names)
        return f"# {self.package}\n\nModules:\n\n{modules}\nRun the tests with python -m pytest.\n"

    def _module_source(self, module: Module, stubbed: Collection[Function] = ()) -> str:
        functions = (
            function.source(function.stub if function in stubbed else function.body) for function in module.functions
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

    def _tests_source(self, module_name: str, tested: Sequence[Function | Caller], unseen: Collection[str] = ()) -> str:
        """All names are imported, also those of removed tests."""
        names = ", ".join(sorted(function.name for function in tested))
        header = f'"""Tests of {module_name}."""\n\nfrom {self.package}.{module_name} import {names}\n'
        path = path_of_tests(module_name)
        tests = (test for function in tested for test in render_tests(function.name, function.examples).items())
        return header + "".join(text for name, text in tests if f"{path}::{name}" not in unseen)


@dataclass(frozen=True, slots=True)
class Spot:
    """A function of a repository, and where it is."""

    repository: Repository
    module: Module
    function: Function

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def path(self) -> str:
        return self.repository.path(self.module.name)

    @property
    def callers(self) -> list[str]:
        return [caller.name for caller in self.repository.callers if caller.needs(self.function)]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The tests that need it, directly or through a caller."""
        tested = [(self.module.name, self.name), *((self.repository.callers_module, name) for name in self.callers)]
        return tuple(
            f"{path_of_tests(module)}::test_{name}{suffix}" for module, name in tested for suffix in ("", MORE)
        )

    @property
    def old(self) -> str:
        """What an edit of `path` has to replace ..."""
        return self.function.stub

    @property
    def new(self) -> str:
        """... and what it should put there."""
        return self.function.body

    def with_body(self, body: str, files: Mapping[str, str]) -> str:
        """Its file with another body in the place of the stub."""
        return files[self.path].replace(self.old, body)


def path_of_tests(module_name: str) -> str:
    return f"tests/test_{module_name}.py"


def render_tests(name: str, examples: Sequence[Example]) -> dict[str, str]:
    """The two tests of a function, by name."""
    asserts = [
        f"    assert {name}({given!r}) {'is' if isinstance(expected, bool) else '=='} {expected!r}\n"
        for given, expected in examples
    ]
    halves = {f"test_{name}": seen_by_first(asserts), f"test_{name}{MORE}": asserts[len(seen_by_first(asserts)) :]}
    return {test: f"\n\ndef {test}():\n{''.join(lines)}" for test, lines in halves.items()}


def seen_by_first(examples: Sequence[T]) -> Sequence[T]:
    """The part of a function's examples that its first test has."""
    return examples[: (len(examples) + 1) // 2]


def make_repository(rng: random.Random, split: Split, number: int, shape: Shape = SHORT) -> Repository:
    """Modules of a few functions, and a module of callers."""
    package = rng.choice(PACKAGES)
    *names, callers_module = rng.sample(MODULES, rng.choice(shape.modules))
    taken: set[str] = set()
    modules = []
    for name in names:
        functions = []
        for _ in range(rng.choice(shape.functions)):
            function = _draw_function(rng, split, name, taken)
            taken.add(function.name)
            functions.append(function)
        modules.append(Module(name, tuple(functions)))
    callers = _draw_callers(rng, modules, taken)
    if not callers:  # no function takes what another gives
        return make_repository(rng, split, number, shape)
    name = f"{package}-{split}-{number}"
    if not shape.is_long:
        return Repository(name, package, tuple(modules), callers_module, callers)
    outdated = tuple(_outdated(rng, module) for module in rng.sample(modules, OUTDATED))
    return Repository(f"{name}-long", package, tuple(modules), callers_module, callers, outdated)


def _outdated(rng: random.Random, module: Module) -> Module:
    """The same functions with other constants; ops, and so the split, are the same."""
    return Module(module.name, tuple(with_other_constant(rng, function) for function in module.functions))


def with_other_constant(rng: random.Random, function: Function) -> Function:
    """A plausible careless mistake: another constant in the last step."""
    *before, last = function.steps
    constant = rng.choice([constant for constant in last.op.constants if constant != last.constant])
    return replace(function, steps=(*before, Step(last.op, constant)))


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
    """Apply the split rule to the two numbers of a pair."""
    return ((first + second) % 4 == 0) == (split == "heldout")
