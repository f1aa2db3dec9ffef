"""Sufficiency: whether what the failing tests check can be known from what is shown, the instruction and the tree.

What they need and the tree does not show (needs.py) is stated in the instruction; what that then still lacks makes the
task one that nobody can solve.

Left out: which of two documented behaviours holds in a case that the documentation does not mention.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.instruction.examples import FOLDER, MAX_ROWS
from offbook.tasks.factory.instruction.literals import has_word
from offbook.tasks.factory.instruction.needs import Evidence, Needs
from offbook.tasks.factory.instruction.testcode import words_of
from offbook.tasks.factory.types import FunctionKey, is_inside, is_test_code
from offbook.tasks.factory.workshop import read_texts
from offbook.types import Task

NAMES = "tests use names that nothing describes"
TEXTS = "tests look for texts that stand nowhere"
PRIVATE = "tests look into private state"
ERRORS = "tests expect errors that are stated nowhere"
SILENT = "nothing says what it does"

MAX_TEXTS = 12  # that an instruction states; more is a listing of the tests
MAX_TEXT = 160  # characters


@dataclass(frozen=True, slots=True)
class Missing:
    """What the tests check and nobody can know. `reason` is one of those above."""

    reason: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}"


def missing_in(task: Task) -> list[Missing]:
    """What cannot be known of a task from its folder. Nothing is said of one that is no deletion from a repository."""
    record = task.folder / "solution/removed.json"
    if task.deleted is None or not record.is_file():
        return []
    shown, hidden = read_texts(task.tree), read_texts(task.hidden_tests)
    before = {path: text for path, text in {**shown, **gold_changes(task), **hidden}.items() if text is not None}
    product = {path: text for path, text in before.items() if is_inside(path, task.sources) and not is_test_code(path)}
    functions, targets = (tuple(map(FunctionKey.of, names)) for names in (task.deleted.functions, task.deleted.targets))
    symbols = read_symbols(product, task.suite.import_roots)
    removed = json.loads(record.read_text())
    is_told = task.deleted.kind == "release"
    evidence = Evidence(before, shown, task.fail_to_pass, removed, functions, targets, symbols, is_told)
    return missing(Needs(evidence), task.instruction)


def stated(needs: Needs, with_values: bool = True) -> str:
    """What an instruction has to say besides the request. Empty where the tree shows all of it.

    Without values the skeleton of a class leaves out what its attributes are set to.
    """
    parts = []
    if needs.names:
        lines = []
        for module, name in sorted(needs.names):
            origin = needs.origin(module, name)
            meant = "" if origin[1] == name else f"  # {'.'.join(origin)} by another name"
            lines.append(f"from {module} import {name}{meant}")
        parts.append(f"The tests find these names in these places:\n\n{_fenced(lines)}")
    if needs.places and len(needs.places) <= MAX_TEXTS:
        parts.append(f"These are gone too and have to come back: {', '.join(needs.places)}.")
    if outline := needs.outline(with_values):
        parts.append(f"What is missing, as it is documented:\n\n{_fenced([outline])}")
    if needs.attributes:
        parts.append(f"Attributes that the tests read: {', '.join(f'`{name}`' for name in sorted(needs.attributes))}.")
    if needs.errors:
        lines = [f"- `{kind}`: {example}" for kind, example in sorted(needs.errors.items())]
        parts.append("Errors that the tests expect:\n\n" + "\n".join(lines))
    if needs.texts and len(needs.texts) <= MAX_TEXTS:
        short = [text for text in needs.texts if len(text.value) <= MAX_TEXT]
        lines = [f"- `{_quoted(text.value)}` ({words_of(text.test)})" for text in short]
        parts.append("Texts and numbers that the tests look for, to the letter:\n\n" + "\n".join(lines))
    if needs.examples:
        texts = [example.text for example in needs.examples]
        apart = "\n\n" if any("\n" in text for text in texts) else "\n"
        imports = sorted({line for one in needs.examples for line in one.imports if " as " in line})
        if any(has_word(text, FOLDER) for text in texts):
            imports.append(f"# {FOLDER}: an empty folder, a pathlib.Path, a new one for each check")
        count = needs.num_more_examples
        more = f", and the tests have at least {count} more checks of this kind" if count else ""
        parts.append(f"For example{more}:\n\n{_fenced([*imports, apart.join(texts)])}")
    return "\n\n".join(parts)


def missing(needs: Needs, instruction: str) -> list[Missing]:
    """What cannot be known from the tree and this instruction."""
    found = []
    for (module, name), path in sorted(needs.names.items()):
        if not re.search(rf"from {re.escape(module)} import [^\n]*\b{re.escape(name)}\b", instruction):
            found.append(Missing(NAMES, f"{path} imports {name} from {module}"))
        elif not needs.is_described(module, name, instruction):
            found.append(Missing(NAMES, f"{path} imports {name} from {module}, and what it stands for is not said"))
    found += [
        Missing(NAMES, f"{key.name} of {key.path} is gone, and how it is called is not said")
        for key in needs.gone
        if not re.search(rf"\b(?:def|class) {re.escape(key.simple)}\b", instruction)
    ]
    found += [
        Missing(reason, f"{test} reads {name}")
        for reason, names in ((PRIVATE, needs.private), (NAMES, needs.attributes))
        for name, test in sorted(names.items())
        if not has_word(instruction, name)
    ]
    found += [Missing(ERRORS, f"{kind}: {why}") for kind, why in needs.errors.items() if kind not in instruction]
    found += [
        Missing(TEXTS, f"{text.test} has {text.value[:80]!r}")
        for text in needs.texts
        if text.value not in instruction and _quoted(text.value) not in instruction
    ]
    found += [
        Missing(TEXTS, f"{text.test} has {text.value[:80]!r} in a row that is not shown, past the {MAX_ROWS}th")
        for text in needs.unplaced(instruction)
    ]
    if needs.unworded and not needs.examples and needs.unworded.value not in instruction:
        where, value = needs.unworded.test, needs.unworded.value[:80]
        found.append(Missing(TEXTS, f"{where} has {value!r}, and no example is given"))
    if needs.brief and not needs.is_exampled(instruction):
        key, counted = next(iter(needs.brief.items()))
        found.append(Missing(SILENT, f"{key} {counted}, and few tests are simple calls"))
    return found


def _fenced(lines: Iterable[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """On one line, as Python would write it between quotes."""
    return text if "\n" not in text and "`" not in text else repr(text)[1:-1].replace("`", "'")
