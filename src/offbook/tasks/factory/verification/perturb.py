"""Changed inputs for a task: what its tests call its functions with, at boundaries and changed a little, and what the
right code returns.

Only functions of a module, only plain data and functions that have a name or a source, and only calls that the right
code answers the same way twice, under two hash seeds and two clocks. An exception counts only if a `raise` statement of
the function's module raised it and the tests ask for its type.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

from offbook.sandbox import Sandbox
from offbook.tasks.blanks import is_unknown
from offbook.tasks.factory.delete.symbols import module_name
from offbook.tasks.inside.apart import UNSTEADY
from offbook.tasks.inside.blank import data_of
from offbook.tasks.perturbed import CALLS_S, Apart, Case
from offbook.tasks.suite import run_rounds
from offbook.types import Suite

MAX_CASES = 24
MAX_STRICT = 200
MOST_WORDS = 3  # strings of one place that may be its keywords: those of more are text
MAX_LONG = 2  # calls with a long argument, of each kind
LONG = 1200  # items or letters
BEYOND = "beyond"  # a change to what the tests do not pass, which counts only if an error is asked for
KIND = "kind"  # a value of another type, where there are several: counts only for functions that say yes or no
CALLBACKS = {"true": "lambda *_: True", "false": "lambda *_: False", "error": "lambda *_: 1 / 0"}
OBJECTS = ("type('Sized', (), {'__len__': lambda self: 1})()", "type('Items', (), {'__getitem__': lambda *_: 1 / 0})()")
OTHERS = (b"ab", (1,), {1: 2}, {1}, None, 1.5, True, *("\0" + repr((source, {})) for source in OBJECTS))
QUICK_S = 0.1  # a call that takes longer is left out
TESTS_S = 0.1  # tests without pytest, all together
TRIES = 4  # changes of one call
CALLS = ".calls"  # beside the module, while calls are recorded
DOCUMENTED = "test_documented_examples.py"
EXAMPLES = """\
import doctest, importlib

def test_documented():
    for module, names in {}.items():
        found = vars(importlib.import_module(module))
        for name in names:
            if name in found:
                doctest.run_docstring_examples(found[name], {{**found}}, name=name)
"""
# Not more than some hundred different calls, and none that is long.
RECORDER = f"""

def __offbook_plain__(value):
    if type(value) in (list, tuple):
        return type(value)(map(__offbook_plain__, value))
    if type(value) is dict:
        return {{key: __offbook_plain__(one) for key, one in value.items()}}
    if type(value).__name__ == "module":
        return f"\\0{{value.__name__}}:"
    if not callable(value):
        return list(value) if type(value) is range and len(value) < 100 else value
    import sys
    module, name = value.__module__ or "builtins", value.__qualname__
    found = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value or "test" in module or any(part.startswith("_") for part in name.split(".")):
        return __offbook_source__(value)
    return f"\\0{{module}}:{{name}}"

def __offbook_source__(function, nodes={{}}):
    import ast, inspect
    code, kinds = function.__code__, (ast.Lambda, ast.FunctionDef)
    if code.co_filename not in nodes:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
        nodes[code.co_filename] = [one for one in ast.walk(tree) if isinstance(one, kinds)]
    there = [one for one in nodes[code.co_filename] if one.lineno == code.co_firstlineno]
    found = [one for one in there if getattr(one, "name", "<lambda>") == code.co_name]
    if len(found) > 1:
        compiled = [compile(ast.Expression(one), "", "eval").co_consts[0] for one in found]
        names = ("co_code", "co_consts", "co_names", "co_varnames", "co_freevars")
        same = [all(getattr(code, name) == getattr(other, name) for name in names) for other in compiled]
        found = [one for one, is_it in zip(found, same) if is_it]
    free = inspect.getclosurevars(function)
    return "\\0" + repr((ast.unparse(found[0]), __offbook_plain__({{**free.globals, **free.nonlocals}})))

def __offbook_record__(function, left=[20000], known=set()):
    import functools, inspect
    signature = inspect.signature(function)
    kinds = (bool, int, float, type(None))
    defaults = {{one.name: one.default for one in signature.parameters.values() if type(one.default) in kinds}}
    @functools.wraps(function)
    def recorder(*arguments, **named):
        left[0] -= 1
        try:
            if left[0] >= 0 and len(known) <= 400:
                given = signature.bind(*arguments, **named).arguments
                more = {{name: value for name, value in defaults.items() if name not in given}}
                for each in (named, {{**more, **named}}):
                    text = repr((function.__name__, *__offbook_plain__([list(arguments), each])))
                    if len(text) < 2000 and text not in known:
                        known.add(text)
                        with open(__file__ + "{CALLS}", "a") as file:
                            file.write(text + "\\n")
        except Exception:
            pass
        return function(*arguments, **named)
    return recorder

for __offbook_name__ in {{names}}:
    if callable(globals().get(__offbook_name__)):
        globals()[__offbook_name__] = __offbook_record__(globals()[__offbook_name__])
"""


def recording(source: str, names: Collection[str]) -> str:
    """A module that writes down what these functions of it are called with."""
    return source + RECORDER.replace("{names}", repr(sorted(names)))


def documented(targets: Mapping[str, Collection[str]], roots: tuple[str, ...]) -> str:
    """A test file that runs the examples in the documentation of these functions, whether they hold or not."""
    names = {module_name(path, roots): sorted(functions) for path, functions in targets.items()}
    return EXAMPLES.format(names)


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
    found: dict[tuple[str, str], Case] = {}
    for case in rng.sample(calls, len(calls)):
        for _ in range(TRIES):
            arguments, named = ast.literal_eval(case.arguments)
            if not arguments and not named:
                break
            place = rng.randrange(len(arguments) + len(named))
            if place < len(arguments):
                arguments[place] = _other(arguments[place], rng)
            else:
                name = [*named][place - len(arguments)]
                named[name] = _other(named[name], rng)
            text = repr((arguments, named))
            if (case.function, text) not in known:
                found.setdefault((case.function, text), replace(case, arguments=text))
    cases = list(found.values())
    return rng.sample(cases, min(2 * MAX_CASES, len(cases)))


def _other(value: Any, rng: random.Random) -> Any:
    """A neighbour of the same type, so that what is asked for stays what it was."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + rng.choice((-1, 1))
        case str() if value and not value.startswith("\0"):
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
                items[place] = _other(items[place], rng)
            return type(value)(items)
        case dict() if value:
            key = rng.choice(list(value))
            return {**value, key: _other(value[key], rng)}
    return value


def boundaries(calls: Sequence[Case], rng: random.Random) -> list[Case]:
    """The calls themselves, and with one argument at a boundary, within what the tests pass in that place. All kinds
    of change come up before one comes up again."""
    parsed = [(case, *ast.literal_eval(case.arguments)) for case in calls]
    seen: dict[tuple[str, int | str], list[Any]] = defaultdict(list)
    for case, arguments, named in parsed:
        for place, value in [*enumerate(arguments), *named.items()]:
            if value not in seen[case.function, place]:
                seen[case.function, place].append(value)
    kinds: dict[tuple[str, int | str, str], list[Case]] = defaultdict(list)
    known = set[tuple[str, str]]()

    def add(place: int | str, way: str, case: Case, values: Mapping[Any, Any]) -> None:
        positional = [value for name, value in values.items() if isinstance(name, int)]
        text = repr((positional, {name: value for name, value in values.items() if isinstance(name, str)}))
        if (case.function, text) not in known:
            known.add((case.function, text))
            kinds[case.function, place, way].append(replace(case, arguments=text, result=way, is_strict=True))

    for case, arguments, named in parsed:
        add(0, "", case, {**dict(enumerate(arguments)), **named})
    for case, arguments, named in rng.sample(parsed, len(parsed)):
        values = {**dict(enumerate(arguments)), **named}
        for place, value in values.items():
            for way, other in bounds(value, seen[case.function, place], rng):
                add(place, way, case, {**values, place: other})
            for way, changed in together(values, place, rng):
                add(place, way, case, changed)
    rows = zip_longest(*(cases[:MAX_LONG] if "long" in way else cases for (_, _, way), cases in kinds.items()))
    return [case for row in rows for case in row if case][: 3 * MAX_STRICT]


def together(values: Mapping[Any, Any], place: int | str, rng: random.Random) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Changes of two arguments: an item is None where a callback takes anything, and numbers grow with a long one."""
    value = values[place]
    if not isinstance(value, list | tuple | dict) or not value:
        return
    numbers = {name: 2 * one + 8 for name, one in values.items() if type(one) in (int, float)}
    if isinstance(value, list):
        yield "long and more", {**values, **numbers, place: longer(value)}
    any_item = "\0" + repr((CALLBACKS["true"], {}))
    callbacks = {name: any_item for name, one in values.items() if isinstance(one, str) and one.startswith("\0(")}
    if callbacks:
        item = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
        parts = {**value, item: None} if isinstance(value, dict) else [*value[:item], None, *value[item + 1 :]]
        yield "none", {**values, **callbacks, place: type(value)(parts)}


def longer(value: Any) -> Any:
    """With over a thousand items, or letters inside of a word."""
    match value:
        case list() | tuple() if value:
            return type(value)([*value, *[value[-1]] * LONG])
        case str() if found := re.search("[a-z]{2,}", value):
            return value.replace(found[0], found[0][:2] * (LONG // 2) + found[0], 1)
    return value


def bounds(value: Any, seen: Sequence[Any], rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Kinds of change of an argument, each with the new value. `seen` are all that tests pass in its place."""
    alike = [one for one in seen if type(one) is type(value)]
    if len(seen) > 1:
        yield "another", rng.choice(seen)
    if len({type(one) for one in seen}) > 2:
        yield from ((KIND, one) for one in OTHERS)
    match value:
        case bool():
            yield "not", not value
        case int() | float():
            low = min(alike)
            numbers = {"zero": 0, "one": 1, "less": value - 1, "more": value + 1, "minus": -value}
            for way, other in {**numbers, "twice": 2 * value + 8}.items():
                is_within = other >= low or (other >= 0 and low <= 1)
                yield way if is_within else BEYOND, type(value)(other)
        case str() if value.startswith("\0("):
            for way, source in CALLBACKS.items():
                yield way, "\0" + repr((source, {}))
        case str() if value.endswith(("operator:add", "operator:mul")):
            yield "operator", "\0operator:sub"
        case str() if value and not any(map(str.isalnum, value)):
            yield "mark", "."
        case str() if not value.startswith("\0") and len(alike) > MOST_WORDS:
            shapes = {_shape(one) for one in alike}
            yield "empty", ""
            texts = {"first": value[:1], "upper": value.upper(), "lower": value.lower(), "long": longer(value)}
            yield from ((way, text) for way, text in texts.items() if _shape(text) in shapes)
        case list() | tuple() if value:
            kind, lengths = type(value), {len(one) for one in alike}
            parts = {"empty": [], "first": value[:1], "last": value[-1:], "rest": value[1:], "reverse": value[::-1]}
            more = {"repeated": [*value, value[-1]], "twice": [*value, *value], "long": longer(value)}
            for way, part in {**parts, **more}.items():
                if kind is list or len(lengths) > 1 or len(part) in lengths:
                    yield way, kind(part)
            place = rng.randrange(len(value))
            for way, other in bounds(value[place], [item for one in alike for item in one], rng):
                yield f"item {way}", kind([*value[:place], other, *value[place + 1 :]])
        case dict() if value:
            (first, *_), key = value, rng.choice([*value])
            yield from {"empty": {}, "first": {first: value[first]}}.items()
            yield "rest", {one: value[one] for one in value if one != first}
            for way, other in bounds(value[key], [item for one in alike for item in one.values()], rng):
                yield f"item {way}", {**value, key: other}


def _shape(text: str) -> str:
    """Its runs of capitals, small letters and digits, with what is between them."""
    for kind, letter in (("[^\\W\\d_a-z]", "A"), ("[a-z]", "a"), ("[0-9]", "0")):
        text = re.sub(f"{kind}+", letter, text)
    return text


async def answered(
    sandbox: Sandbox, suite: Suite, calls: Sequence[Case], tests: Sequence[str], texts: Mapping[str, str], seed: str
) -> Apart:
    """The calls that the right code, which is in the sandbox, answers the same way whatever the hash seed, and the
    tests that it passes without pytest."""
    rng = random.Random(seed)
    loose = perturbed(calls, rng)
    asked = Apart((*boundaries(calls, rng), *loose), tuple(tests))
    if not asked.cases and not asked.tests:
        return asked
    rounds = [asked.round(texts, QUICK_S)]
    (first,), (again,) = [
        await run_rounds(sandbox, suite, rounds, 2 * CALLS_S, hash_seed=hash_seed) for hash_seed in (0, 1)
    ]
    every = "\n".join(texts.values())
    raised = {*re.findall(r"[rR]aises\w*\(\s*\(?(?:\w+\.)*(\w+)", every)}
    unsteady = {case.function for number, case in enumerate(asked.cases) if first.returned.get(number) == UNSTEADY}
    # An answer to another call that has a None of its own is padding: other right code has none.
    padded = {
        case.function
        for number, case in enumerate(asked.cases)
        if not case.result and "null" in first.returned.get(number, "") and not _has_none(case)
    }
    strict, others = list[Case](), list[Case]()
    for number, case in enumerate(asked.cases):
        text = first.returned.get(number)
        if text is None or text != again.returned.get(number) or case.function in unsteady:
            continue
        data, is_meant = json.loads(text)
        if isinstance(data, list) and data[:1] == ["raises"]:
            is_meant = data[1] == "ZeroDivisionError" if case.result == "error" else is_meant and data[1] in raised
            if not is_meant or not case.is_strict:
                continue
            text = json.dumps([data[:2], True])
        elif (
            case.result == BEYOND
            or is_unknown(data)
            or (isinstance(data, list) and data[:1] == ["digest"])
            or (case.result.endswith(KIND) and not isinstance(data, bool))
            or (case.result == "empty" and isinstance(data, list) and len(data) > 1)  # made of nothing
            or (isinstance(data, list) and "null" in text and case.function not in padded and not _has_none(case))
        ):
            continue
        compared = rf"\b(?:sorted|set|frozenset|Counter|assertCountEqual)\(\s*(?:\w+\.)*{case.function}\("
        case = replace(case, result=text, is_unordered=bool(re.search(compared, every)))
        (strict if case.is_strict else others).append(case)
    both = sorted(first.passed & again.passed, key=lambda test: first.seconds[test])
    spent = accumulate(first.seconds[test] for test in both)
    quick = [test for test, so_far_s in zip(both, spent, strict=True) if so_far_s <= TESTS_S]
    return Apart((*strict[:MAX_STRICT], *others[:MAX_CASES]), tuple(sorted(quick or both[:1])))


def _has_none(case: Case) -> bool:
    arguments, named = ast.literal_eval(case.arguments)
    items = [[*one.values()] if isinstance(one, dict) else one for one in (*arguments, *named.values())]
    return any(None in one for one in items if isinstance(one, list | tuple))


def computed(calls: Sequence[Case], right: Callable[[Any], Any], rng: random.Random) -> list[Case]:
    """The same where the right answer to a function of one argument is known without a sandbox."""
    found = []
    for case in perturbed(calls, rng)[:MAX_CASES]:
        (argument,), _ = ast.literal_eval(case.arguments)
        found.append(replace(case, result=json.dumps([data_of(right(argument)), False])))
    return found
