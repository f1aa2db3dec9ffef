"""Small generated repositories for the pocket model: packages of short functions with pytest tests.

The model's vocabulary has about a thousand tokens, so words come from small pools (words.toml) and texts are regular. A
function's name is unrelated to its behaviour; the docstring specifies it.

The split rule. Ops, names and modules are numbered. A pair (name, op) or (module, op) is held out if its two numbers
add up to a multiple of four. A train repository holds no held-out pair in any of its functions; a held-out repository
holds no other.

A function is one step ("Return value plus 3.") or two ("Return value plus 3, then that times 2."); a step is an op with
a constant. The docstring determines the body, and the tests catch every detectable mistake in `mistakes`.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Split = Literal["train", "heldout"]
Example = tuple[Any, Any]  # argument and result

WORDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
PACKAGES: list[str] = WORDS["packages"]
MODULES: list[str] = WORDS["modules"]
NAMES: list[str] = WORDS["names"]
INPUTS: dict[str, list[Any]] = WORDS["inputs"]
MIN_INPUTS = 3
OUTDATED = 2  # modules
MORE = "_more"  # the second test of a function
# Short reports: what a test run prints stays in the agent's window. Plugins that happen to be installed would take half
# of a run's time.
OPTIONS = "-q --tb=no -p no:cacheprovider --disable-plugin-autoload"
SETTINGS = {"pytest.ini": f"[pytest]\naddopts = {OPTIONS}\nconsole_output_style = classic\n"}


@dataclass(frozen=True)
class Op:
    phrase: str
    expression: str
    takes: str  # number or items
    gives: str  # number, items or truth
    below: int = 10

    @property
    def constants(self) -> range:
        return range(2, self.below)


@dataclass(frozen=True)
class Step:
    op: Op
    constant: int

    def phrase(self, argument: str) -> str:
        return self.op.phrase.format(a=argument, k=self.constant)

    def expression(self, argument: str) -> str:
        return self.op.expression.format(a=argument, k=self.constant)


Steps = tuple[Step, ...]
OPS = [Op(**row) for row in WORDS["op"]]
ALL_STEPS = [Step(op, constant) for op in OPS for constant in op.constants]


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
        first = self.steps[0].expression(self.argument)
        if len(self.steps) == 1:
            return f"return {first}"
        return f"result = {first}\n    return {self.steps[1].expression('result')}"

    @property
    def stub(self) -> str:
        return f'raise NotImplementedError("{self.name}")'

    def source(self, body: str) -> str:
        return f'def {self.name}({self.argument}):\n    """{self.doc}"""\n    {body}\n'

    @cached_property
    def examples(self) -> tuple[Example, ...]:
        """What the tests assert."""
        return tuple((given, evaluate(self.steps, given)) for given in _telling_inputs(self.steps))


@dataclass(frozen=True)
class Caller:
    """A function that composes two others."""

    name: str
    argument: str
    outer: Function
    inner: Function

    def source(self) -> str:
        outer = self.outer.name
        inner = self.inner.name
        given = self.argument
        return (
            f'def {self.name}({given}):\n    """Return {outer} of {inner} of {given}."""\n'
            f"    return {outer}({inner}({given}))\n"
        )

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
        listed = "".join(f"- {name}\n" for name in self.module_names)
        callers = "".join(f"\n\n{caller.source()}" for caller in self.callers)
        for spot in reversed(self.spots):
            if spot.callers:
                callers = f"from {self.package}.{spot.module.name} import {spot.name}\n{callers}"
        files = {
            "README.md": f"# {self.package}\n\nModules:\n\n{listed}\nRun the tests with python -m pytest.\n",
            f"{self.package}/__init__.py": f'"""The {self.package} package."""\n',
            self.path(self.callers_module): callers,
            path_of_tests(self.callers_module): self._tests_source(self.callers_module, self.callers),
        }
        for module in self.modules:
            files[self.path(module.name)] = _module_source(module)
            files[path_of_tests(module.name)] = self._tests_source(module.name, module.functions)
        if self.outdated:
            files |= {f"old/{module.name}.py": _module_source(module) for module in self.outdated} | SETTINGS
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
        tree = dict(self.files)
        for module in self.modules:
            tree[self.path(module.name)] = _module_source(module, functions)
            tree[path_of_tests(module.name)] = self._tests_source(module.name, module.functions, unseen)
        tree[path_of_tests(self.callers_module)] = self._tests_source(self.callers_module, self.callers, unseen)
        return {path: text for path, text in tree.items() if path not in self.test_files or "\ndef " in text}

    def _tests_source(self, module_name: str, tested: Sequence[Function | Caller], unseen: Collection[str] = ()) -> str:
        """All names are imported, also those of removed tests."""
        names = ", ".join(sorted(function.name for function in tested))
        text = f'"""Tests of {module_name}."""\n\nfrom {self.package}.{module_name} import {names}\n'
        for function in tested:
            for name, test in render_tests(function.name, function.examples).items():
                text += "" if f"{path_of_tests(module_name)}::{name}" in unseen else test
        return text


def _module_source(module: Module, stubbed: Collection[Function] = ()) -> str:
    return "\n\n".join(each.source(each.stub if each in stubbed else each.body) for each in module.functions)


@dataclass(frozen=True)
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

    def with_body(self, body: str, files: Mapping[str, str]) -> str:
        """Its file with another body in the place of the stub."""
        return files[self.path].replace(self.function.stub, body)


def path_of_tests(module_name: str) -> str:
    return f"tests/test_{module_name}.py"


def render_tests(name: str, examples: Sequence[Example]) -> dict[str, str]:
    """The two tests of a function, by name."""
    asserts = [
        f"    assert {name}({given!r}) {'is' if isinstance(expected, bool) else '=='} {expected!r}\n"
        for given, expected in examples
    ]
    first = seen_by_first(asserts)
    halves = {f"test_{name}": first, f"test_{name}{MORE}": asserts[len(first) :]}
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
    outdated = []
    for module in rng.sample(modules, OUTDATED):  # with other constants; ops, and so the split, are the same
        functions = [with_other_constant(rng, function) for function in module.functions]
        outdated.append(Module(module.name, tuple(functions)))
    return Repository(f"{name}-long", package, tuple(modules), callers_module, callers, tuple(outdated))


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
    return Function(rng.choice(names), rng.choice(WORDS["arguments"][steps[0].op.takes]), steps)


def _draw_steps(rng: random.Random, split: Split, module: str) -> Steps:
    """Two steps in a fifth of the draws, where an op that fits is on the same side."""
    ops = [op for number, op in enumerate(OPS) if on_side(split, MODULES.index(module), number)]
    first = rng.choice(ops)
    seconds = [op for op in ops if op.takes == first.gives and op != first]
    if not seconds or rng.random() > 1 / 5:
        return (Step(first, rng.choice(first.constants)),)
    first_step = Step(first, rng.choice(first.constants))
    second = rng.choice(seconds)
    steps = (first_step, Step(second, rng.choice(second.constants)))
    results = [evaluate(steps, given) for given in INPUTS[first.takes]]
    is_constant = all(result == results[0] for result in results)  # tests cannot distinguish it from a constant
    return _draw_steps(rng, split, module) if is_constant else steps


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


def evaluate(steps: Steps, given: Any) -> Any:
    for step in steps:
        given = _compiled(step)(given)
    return given


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
