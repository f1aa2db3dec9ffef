"""Things that a request may ask for besides the behaviour, each with a test that sees whether it was done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from string import Template

from offbook.evals.sides.draft import REQUEST_NODE, SideDraft, Spot, draw_spots, without

HEADER = '''"""What the request asked for."""

import ast
import inspect
import textwrap

import pytest

import $package.$module as module


def code():
    """The function, without its docstring."""
    function = ast.parse(textwrap.dedent(inspect.getsource(module.$name))).body[0]
    return function.body[1:] if ast.get_docstring(function) else function.body


def names():
    return {node.id for part in code() for node in ast.walk(part) if isinstance(node, ast.Name)}


def test_request():
$test
'''


@dataclass(frozen=True, slots=True)
class Constraint:
    """A sentence, the test of it, and two solutions that the repository's own tests accept: one does what it says."""

    name: str
    ask: str
    test: tuple[str, ...]
    right: Callable[[Spot, str], str]  # from the spot and its stubbed file to the file
    wrong: Callable[[Spot, str], str]  # solves the task and ignores the sentence
    red: bool = True  # whether the test fails on the untouched tree


def _expression(spot: Spot) -> str:
    return spot.function.body.removeprefix("return ")


def _plain(spot: Spot, file: str) -> str:
    return file.replace(spot.function.stub, spot.function.body)


def _by_way_of(name: str) -> Callable[[Spot, str], str]:
    return lambda spot, file: file.replace(spot.function.stub, f"{name} = {_expression(spot)}\n    return {name}")


def _annotated(spot: Spot, file: str) -> str:
    head = f"def {spot.name}({spot.function.argument}):"
    return _plain(spot, file).replace(head, f"def {spot.name}({spot.function.argument}: object) -> object:")


def _other_words(spot: Spot, file: str) -> str:
    return _plain(spot, file).replace(f'"""{spot.function.doc}"""', f'"""{spot.function.doc} Restored."""')


def _refusing_none(spot: Spot, file: str) -> str:
    check = f'if {spot.function.argument} is None:\n        raise ValueError("{spot.function.argument} is missing")'
    return file.replace(spot.function.stub, f"{check}\n    {spot.function.body}")


def _with_constant(spot: Spot, file: str) -> str:
    (step,) = spot.function.steps
    body = step.op.expression.format(a=spot.function.argument, k="LIMIT")
    return f"LIMIT = {step.constant}\n\n\n" + file.replace(spot.function.stub, f"return {body}")


def _with_helper(spot: Spot, file: str) -> str:
    helper = f"def _helper({spot.function.argument}):\n    return {_expression(spot)}\n\n\n"
    return helper + file.replace(spot.function.stub, f"return _helper({spot.function.argument})")


CONSTRAINTS = (
    Constraint(
        "single",
        "Its body, after the docstring, must be a single return statement.",
        ("    assert [type(statement) for statement in code()] == [ast.Return]",),
        _plain,
        _by_way_of("result"),
    ),
    Constraint(
        "named",
        "Put what it returns into a variable called `answer` first, and return that.",
        (
            '    assert "answer" in names()',
            '    assert getattr(code()[-1].value, "id", "") == "answer"',
        ),
        _by_way_of("answer"),
        _plain,
    ),
    Constraint(
        "annotated",
        "Annotate its parameter and what it returns.",
        (
            "    signature = inspect.signature(module.$name)",
            "    assert signature.return_annotation is not inspect.Signature.empty",
            "    assert all(one.annotation is not one.empty for one in signature.parameters.values())",
        ),
        _annotated,
        _plain,
    ),
    Constraint(
        "docstring",
        "Do not change a word of its docstring.",
        ("    assert module.$name.__doc__ == $doc",),
        _plain,
        _other_words,
        red=False,
    ),
    Constraint(
        "refuses",
        "When it is given None it must raise a ValueError.",
        ("    with pytest.raises(ValueError):", "        module.$name(None)"),
        _refusing_none,
        _plain,
    ),
    Constraint(
        "constant",
        "The number in it must be a constant of the module called LIMIT, and be used by that name.",
        (
            "    assert module.LIMIT == $constant",
            '    assert "LIMIT" in names()',
        ),
        _with_constant,
        _plain,
    ),
    Constraint(
        "helper",
        "The work must be done in a private function called `_helper`, which it calls.",
        (
            "    calls = [node for part in code() for node in ast.walk(part) if isinstance(node, ast.Call)]",
            '    assert "_helper" in [getattr(call.func, "id", "") for call in calls]',
            "    assert callable(module._helper)",
        ),
        _with_helper,
        _plain,
    ),
)


def drafts(rng: random.Random) -> Iterator[SideDraft]:
    for number, constraint in enumerate(cycle(CONSTRAINTS)):
        (spot,) = draw_spots(rng, number, 1, one_step=True)
        yield _draft(spot, constraint, number)


def _draft(spot: Spot, constraint: Constraint, number: int) -> SideDraft:
    scene = without(spot.repository, spot)
    values = {
        "name": spot.name,
        "doc": repr(spot.function.doc),
        "constant": str(spot.function.steps[0].constant),
        "package": spot.repository.package,
        "module": spot.module.name,
    }
    tests = Template(Template(HEADER).safe_substitute(test="\n".join(constraint.test))).substitute(values)
    red, green = ((REQUEST_NODE,), ()) if constraint.red else ((), (REQUEST_NODE,))
    file = scene.tree[spot.path]
    return SideDraft(
        id=f"instructions-{number}-{constraint.name}",
        scene=scene,
        instruction=f"Bring back {spot.name} in {spot.path}. {constraint.ask}",
        gold={spot.path: constraint.right(spot, file)},
        wrong={f"ignores the constraint {constraint.name}": {spot.path: constraint.wrong(spot, file)}},
        fail_to_pass=(*spot.nodes, *red),
        request_tests=tests,
        stays_green=green,
    )
