"""Changed inputs for a task: what its tests call its functions with, changed a little, and what the right code returns.

Only functions of a module, only plain data and public functions that have a name, and only calls for which the right
code returns the same value twice.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import libcst as cst

from offbook.sandbox import Sandbox
from offbook.tasks.factory.delete.symbols import module_name
from offbook.tasks.perturbed import CALLS_S, Case, round_of
from offbook.tasks.suite import run_rounds
from offbook.types import Suite

MAX_CASES = 24
TRIES = 4  # changes of one call
CALLS = ".calls"  # beside the module, while calls are recorded
# Not more than some hundred calls, and none that is long.
RECORDER = f"""

def __offbook_plain__(value):
    if type(value) in (list, tuple):
        return type(value)(map(__offbook_plain__, value))
    if type(value) is dict:
        return {{key: __offbook_plain__(one) for key, one in value.items()}}
    if not callable(value):
        return list(value) if type(value) is range and len(value) < 100 else value
    import sys
    module, name = value.__module__ or "builtins", value.__qualname__
    found = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if found is not value or "test" in module or any(part.startswith("_") for part in name.split(".")):
        raise ValueError(name)
    return f"\\0{{module}}:{{name}}"

def __offbook_record__(name, arguments, named, left=[400]):
    left[0] -= 1
    if left[0] < 0:
        return
    try:
        text = repr((name, *__offbook_plain__([arguments, named])))
        if len(text) < 2000:
            with open(__file__ + "{CALLS}", "a") as file:
                file.write(text + "\\n")
    except Exception:
        pass
"""


def recording(source: str, names: Collection[str]) -> str:
    """A module that writes down what these functions of it are called with."""
    return cst.parse_module(source).visit(_Recording(names)).code + RECORDER


class _Recording(cst.CSTTransformer):
    def __init__(self, names: Collection[str]):
        super().__init__()
        self._names = names

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if original_node.name.value not in self._names or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        parameters = original_node.params
        plain = [parameter.name.value for parameter in (*parameters.posonly_params, *parameters.params)]
        star = f"*{parameters.star_arg.name.value}" if isinstance(parameters.star_arg, cst.Param) else ""
        named = [f"{p.name.value!r}: {p.name.value}" for p in parameters.kwonly_params]
        named += [f"**{parameters.star_kwarg.name.value}"] if parameters.star_kwarg else []
        arguments = ", ".join([*plain, *([star] if star else [])])
        line = f"__offbook_record__({original_node.name.value!r}, [{arguments}], {{{', '.join(named)}}})"
        at = 1 if original_node.get_docstring(clean=False) is not None else 0
        body = [*updated_node.body.body]
        body.insert(at, cst.parse_statement(line))
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))


def functions_of(targets: Iterable[str]) -> dict[str, set[str]]:
    """Path -> the functions of that module, of what a task asks for."""
    found: dict[str, set[str]] = {}
    for target in targets:
        path, _, name = target.partition("::")
        if name.isidentifier() and path.endswith(".py"):
            found.setdefault(path, set()).add(name)
    return found


async def recorded(sandbox: Sandbox, targets: Mapping[str, Collection[str]], roots: tuple[str, ...]) -> list[Case]:
    """The calls that were written down in a sandbox, each once, without results yet."""
    found: dict[str, Case] = {}
    for path in targets:
        try:
            lines = (await sandbox.read(path + CALLS)).splitlines()
        except OSError:  # no test calls them
            continue
        for line in lines:
            try:
                name, arguments, named = ast.literal_eval(line)
            except (ValueError, SyntaxError):
                continue
            case = Case(module_name(path, roots), name, repr((arguments, named)), "")
            found.setdefault(line, case)
    return list(found.values())


def perturbed(calls: Sequence[Case], rng: random.Random) -> list[Case]:
    """Calls that are not among these."""
    known = {(case.function, case.arguments) for case in calls}
    functions = sorted({text for case in calls for text in _functions(ast.literal_eval(case.arguments))})
    found: dict[tuple[str, str], Case] = {}
    for case in rng.sample(calls, len(calls)):
        for _ in range(TRIES):
            arguments, named = ast.literal_eval(case.arguments)
            if not arguments and not named:
                break
            place = rng.randrange(len(arguments) + len(named))
            if place < len(arguments):
                arguments[place] = _other(arguments[place], functions, rng)
            else:
                name = [*named][place - len(arguments)]
                named[name] = _other(named[name], functions, rng)
            text = repr((arguments, named))
            if (case.function, text) not in known:
                found.setdefault((case.function, text), replace(case, arguments=text))
    cases = list(found.values())
    return rng.sample(cases, min(2 * MAX_CASES, len(cases)))


def _functions(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith("\0"):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _functions(one)


def _other(value: Any, functions: Sequence[str], rng: random.Random) -> Any:
    """A neighbour of the same type, so that what is asked for stays what it was."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + rng.choice((-1, 1))
        case str() if value.startswith("\0"):
            return rng.choice(functions)
        case str() if value:
            place = rng.randrange(len(value))
            return rng.choice(
                (value[:place] + value[place:][:1] * 2 + value[place + 1 :], value[::-1], value + value[:1])
            )
        case list() | tuple() if value:
            items = list(value)
            way = rng.randrange(3)
            if way == 0:
                rng.shuffle(items)
            elif way == 1:
                items.append(rng.choice(items))
            else:
                place = rng.randrange(len(items))
                items[place] = _other(items[place], functions, rng)
            return type(value)(items)
        case dict() if value:
            key = rng.choice(list(value))
            return {**value, key: _other(value[key], functions, rng)}
    return value


async def answered(sandbox: Sandbox, suite: Suite, cases: Sequence[Case]) -> list[Case]:
    """Those for which the right code, which is in the sandbox, returns a value, and the same one whatever the hash
    seed."""
    if not cases:
        return []
    limit_s = 2 * CALLS_S
    (first,), (again,) = [
        await run_rounds(sandbox, suite, [round_of(cases)], limit_s, hash_seed=hash_seed) for hash_seed in (0, 1)
    ]
    both = [number for number, text in first.returned.items() if again.returned.get(number) == text]
    return [replace(cases[number], result=first.returned[number]) for number in both][:MAX_CASES]


def computed(calls: Sequence[Case], right: Callable[[Any], Any], rng: random.Random) -> list[Case]:
    """The same where the right answer to a function of one argument is known without a sandbox."""
    found = []
    for case in perturbed(calls, rng)[:MAX_CASES]:
        (argument,), _ = ast.literal_eval(case.arguments)
        found.append(replace(case, result=repr(right(argument))))
    return found
