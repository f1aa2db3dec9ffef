"""Deletions that somebody proposes: a person, or a model that read the repository. Each is a patch that removes code.

A file of proposals has a JSON object a line: {"source": "pypi:toolz", "patch": "diff --git ...", "name": "groupby"}.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbook.taskgen.delete.delete import Refused
from offbook.taskgen.delete.symbols import Function, read_symbols
from offbook.taskgen.nouns import Deletion, Feature, FunctionKey
from offbook.taskgen.workshop import Workshop
from offbook.types import OffbookError


@dataclass(frozen=True, slots=True)
class Proposal:
    source: str
    patch: str
    name: str = ""


def read_proposals(path: Path) -> list[Proposal]:
    if not path.is_file():
        raise OffbookError(f"there is no file {path} with proposals")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not all(isinstance(value, str) for value in fields.values()):
                raise TypeError("all of it is text")
            found.append(Proposal(**fields))
        except (ValueError, TypeError, AttributeError) as error:
            raise OffbookError(f'{path}:{number} is no proposal ({{"source": ..., "patch": ...}}): {error}') from error
    return found


def deletion_of(workshop: Workshop, proposal: Proposal, changed: Mapping[str, str | None]) -> Deletion:
    """The functions that a patch changes or takes away, with the tests that enter them, as a deletion like our own."""
    before = workshop.symbols
    after = read_symbols(
        {p: t for p in before.modules if (t := changed.get(p, workshop.files[p])) is not None}, before.import_roots
    )
    gone = [key for key in before.functions if key.path in changed and key not in after.functions]
    touched = [
        key
        for key, function in before.functions.items()
        if key.path in changed
        and key in after.functions
        and _differs(workshop, changed, function, after.functions[key])
    ]
    functions = tuple(sorted({*gone, *touched}))
    tests = {test for key in functions for test in workshop.map.tests_of.get(key, ())}
    if not functions:
        raise Refused("the proposed deletion changes no function of the product")
    if not tests:
        raise Refused(f"no test enters {functions[0].name} or what else the proposed deletion changes")
    at_import = [key.name for key in functions if key in workshop.map.at_import]
    if at_import:
        raise Refused(f"{at_import[0]} runs when the package is imported")
    targets = tuple(key for key in functions if before.functions[key].public and "<locals>" not in key.name)
    digest = hashlib.sha256(proposal.patch.encode()).hexdigest()[:6]
    name = proposal.name or (targets or functions)[0].name
    identity = re.sub(r"[^a-z0-9]+", "-", f"{workshop.repository.name}-{name}-{digest}".lower())
    feature = Feature(identity, "single", targets or functions[:1], functions, tuple(sorted(tests)))
    removed = {f"{key.path}::{key.name}": _source(workshop.files[key.path], key) for key in functions}
    stubbed = tuple(key for key in touched if _only_raises(str(changed[key.path]), key))
    return Deletion(feature, "gone" if gone else "stub", dict(changed), removed, stubbed, tuple(sorted(gone)))


def _differs(workshop: Workshop, changed: Mapping[str, str | None], before: Function, after: Function) -> bool:
    old, new = workshop.files[before.key.path], str(changed[before.key.path])
    return _source(old, before.key) != _source(new, after.key)


def _source(text: str, key: FunctionKey) -> str:
    """All definitions of that name."""
    lines = text.split("\n")
    found = [lines[node.lineno - 1 : node.end_lineno] for node in _definitions(text, key)]
    return "\n".join(line for part in found for line in part)


def _definitions(text: str, key: FunctionKey) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in key.name.replace(".<locals>", "").split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.walk(node)
            if child is not node and getattr(child, "name", None) == part
            and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]  # fmt: skip
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _only_raises(text: str, key: FunctionKey) -> bool:
    bodies = [node.body[ast.get_docstring(node, clean=False) is not None :] for node in _definitions(text, key)]
    return bool(bodies) and all(len(body) == 1 and isinstance(body[0], ast.Raise) for body in bodies)
