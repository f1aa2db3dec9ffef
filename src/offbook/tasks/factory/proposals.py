"""Deletions proposed by a person, or by a model that read the repository. Each is a patch that removes code.

A file of proposals has a JSON object a line: {"source": "pypi:toolz", "patch": "diff --git ...", "name": "groupby"}.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbook.core import pycode
from offbook.core.client import Client
from offbook.core.copies import parsed, statements, undocumented
from offbook.core.pycode import Function as Definition
from offbook.tasks.factory.delete.delete import level_used
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.instruction.instruct import PROMPTS
from offbook.tasks.factory.types import Deletion, Feature, identity_of, is_test_code
from offbook.tasks.factory.workshop import Workshop
from offbook.tasks.git import BadPatch, applied, touched_by
from offbook.types import STRICT, OffbookError


class Refused(OffbookError):
    """A proposed deletion that cannot be used, and why, in one sentence."""


@dataclass(frozen=True)
class Proposal:
    __pydantic_config__ = STRICT

    source: str
    patch: str
    name: str = ""


MAX_SOURCE = 60_000  # characters of a file that a model is shown
_PROPOSAL = TypeAdapter(Proposal)
Propose = Callable[[Workshop, str, int], Awaitable[list[Proposal]]]


def read_proposals(path: Path) -> list[Proposal]:
    if not path.is_file():
        raise OffbookError(f"there is no file {path} with proposals")
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            if line.strip():
                found.append(_PROPOSAL.validate_json(line))
        except ValidationError as error:
            why = error.errors()[0]
            said = " ".join([*map(str, why["loc"]), why["msg"]])
            raise OffbookError(f'{path}:{number} is no proposal ({{"source": ..., "patch": ...}}): {said}') from error
    return found


def apply_proposal(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """The files that a proposed deletion changes, None where one goes."""
    if not patch.strip():
        raise Refused("the proposed deletion is empty")
    try:
        touched = touched_by(patch)
        for path in touched:
            if path not in files:
                raise Refused(f"the proposed deletion touches {path}, which is not in the tree")
            if is_test_code(path):
                raise Refused(f"the proposed deletion touches the test file {path}")
        after = applied(files, patch)
    except BadPatch as error:
        raise Refused(f"the proposed deletion cannot be used: {error}") from error
    stray = sorted(after.keys() - touched.keys())
    if stray:
        raise Refused(f"the proposed deletion adds {stray[0]}")
    changed = {path: text for path, text in after.items() if text != files[path]}
    added, removed = (sum(counts) for counts in zip(*touched.values(), strict=True))
    if not changed or removed == 0:
        raise Refused("the proposed deletion removes nothing")
    if added >= removed:
        raise Refused(f"the proposed deletion adds {added} lines and removes {removed}: it is to remove code")
    for path, text in changed.items():
        if path.endswith(".py") and text is not None:
            try:
                compile(pycode.parse(text), path, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise Refused(f"after the proposed deletion {path} is no Python: {error}") from error
    return changed


def deletion_of(workshop: Workshop, proposal: Proposal, changed: Mapping[str, str | None]) -> Deletion:
    """The functions that a patch changes or takes away, with the tests that enter them, as a deletion like our own."""
    symbols = workshop.symbols
    files = workshop.files
    left = {path: text for path, text in changed.items() if text is not None and path in symbols.modules}
    after = read_symbols(left, symbols.import_roots).functions
    before = {key: function for key, function in symbols.functions.items() if key.path in changed}
    gone = before.keys() - after.keys()
    was = {key: function.source(files[key.path]) for key, function in before.items()}
    now = {key: function.source(left[key.path]) for key, function in after.items()}
    touched = {key for key in before.keys() - gone if was[key] != now[key]}
    functions = tuple(sorted(gone | touched))
    tests = {test for key in functions for test in workshop.map.tests_of.get(key, ())}
    if not functions:
        raise Refused("the proposed deletion changes no function of the product")
    if not tests:
        raise Refused(f"no test enters {functions[0].name} or what else the proposed deletion changes")
    at_import = [key.name for key in functions if key in workshop.map.at_import]
    if at_import:
        raise Refused(f"{at_import[0]} runs when the package is imported")
    targets = tuple(key for key in functions if before[key].public and not before[key].nested)
    digest = hashlib.sha256(proposal.patch.encode()).hexdigest()[:6]
    name = proposal.name or (targets or functions)[0].name
    identity = identity_of(workshop.repository.name, name, digest)
    feature = Feature(identity, "single", targets or functions[:1], functions, tuple(sorted(tests)))
    removed = {str(key): was[key] for key in functions}
    stubbed = tuple(key for key in sorted(touched) if _only_raises(now[key]))
    level = level_used(feature, "gone", gone)
    return Deletion(feature, level, dict(changed), removed, stubbed, tuple(sorted(gone)))


def _only_raises(source: str) -> bool:
    tree = parsed(source)[1] or ast.Module([], [])
    bodies = [undocumented(node.body) for node in statements(tree) if isinstance(node, Definition)]
    return bool(bodies) and all(len(body) == 1 and isinstance(body[0], ast.Raise) for body in bodies)


def proposer(url: str, model: str) -> Propose:
    client = Client(url, model)

    async def propose(workshop: Workshop, source: str, count: int) -> list[Proposal]:
        """One for each of the files with the most code that tests enter."""
        found = []
        for path in _richest(workshop)[:count]:
            question = (PROMPTS / "propose.md").read_text().format(path=path, source=workshop.files[path])
            found.append(Proposal(source, diff_in(await client.ask(question, max_tokens=8192))))
        return found

    return propose


def _richest(workshop: Workshop) -> list[str]:
    weight: Counter[str] = Counter()
    for key in (workshop.map.tests_of.keys() & workshop.symbols.functions.keys()) - workshop.map.at_import:
        weight[key.path] += workshop.symbols.functions[key].statements
    shown = [path for path in weight if len(workshop.files[path]) <= MAX_SOURCE]
    return sorted(shown, key=lambda path: (-weight[path], path))


def diff_in(reply: str) -> str:
    """The diff of a reply, out of the fence that models like to put around it."""
    fenced = re.search(r"```(?:diff|patch)?\n(.*?)```", reply, re.S)
    text = fenced[1] if fenced else reply
    start = re.search(r"^(diff --git |--- )", text, re.M)
    return text[start.start() :] if start else text
