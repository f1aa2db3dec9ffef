"""Whether a hint gives a task's answer away: a student trained on such hints fails without them.

Compared are the hint, the solution with the hidden tests, and what the agent may read: its instruction and its tree.
What only the solution has is a secret: runs of tokens, expressions, names, numbers. All texts are read as one line,
without quotes, commas and escapes (copies.py), so a copy is found in any formatting. Not found: an answer in plain
words, and code of fewer than forty tokens in which everything is renamed.
"""

from __future__ import annotations

import builtins
import json
import keyword
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from offbook.core.copies import Page, Wanted, normalise, texts_below, tokens_of, wanted_pieces, without_comments
from offbook.types import Task

CODE, NAME, WORDS, NUMBER, TEST = (
    "code of the solution",
    "a name that only the solution has",
    "words that only the solution has",
    "a number that only the solution has",
    "a hidden test",
)
Gram = tuple[str, ...]
SIGNED, ANY = 4, 6  # tokens in a row that are no accident: with a sign of code among them, and whatever they are
MANY_WORDS = 3  # ordinary words that only the solution has, in one hint
SPLIT_NAME = 8  # letters of a name that is also looked for with spaces and marks inside
EVERYWHERE = frozenset({0.0, 1.0, 2.0})  # numbers that say nothing
PYTHON = frozenset(word.casefold() for word in (*keyword.kwlist, *dir(builtins), "self", "cls", "args", "kwargs"))
_DOCSTRING = re.compile(r"^[ \t]*[rRuUbBfF]*(\"\"\"|''').*?\1", re.MULTILINE | re.DOTALL)
_ESCAPED_SPACE = re.compile(r"\\+[nrt]")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_TYPOGRAPHY = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2014\u2212\u00d7\u00f7\u2018\u2019\u201c\u201d", "------*/''\"\""
)
_OPERAND_OR_OPERATOR = re.compile(r"[^\W\d]\w*|\d[\w.]*|[-+*/%=<>!&|^@~]+")
_NUMBER = re.compile(r"(?<![\w.])(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![A-Za-z_])")
_QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|(?<!\w)'([^']+)'(?!\w)")
_IN_CODE = re.compile(r"(?<=\w\.)[^\W\d]\w+|[^\W\d]\w+(?=[(\[]|\.\w|\s?=)")


@dataclass(frozen=True)
class Said:
    """What a text says, all in lower case."""

    code: set[Gram]  # runs of tokens, and operand, operator, operand
    words: set[str]
    numbers: set[float]

    def without(self, other: Said) -> Said:
        return Said(self.code - other.code, self.words - other.words, self.numbers - other.numbers)


@dataclass(frozen=True)
class Secrets:
    """What the solution and the hidden tests of a task have and the agent cannot see."""

    solution: Said  # its words are no names
    names: set[str]  # that are no ordinary words
    tests: Said  # its words are names of tests
    visible: set[str]
    wanted: tuple[Wanted, ...]


def leak(hint_text: str, task: Task) -> str | None:
    """What the hint gives away, in a few words; None if it looks like a general rule."""
    return given_away(hint_text, secrets_of(task))


def given_away(hint_text: str, secrets: Secrets) -> str | None:
    text = _line(hint_text)
    said = said_in(text)
    page = Page(text, is_source=False)
    words = secrets.solution.words
    if secrets.solution.code & said.code or any(map(page.find, secrets.wanted)):
        return CODE
    if secrets.tests.code & said.code or _names_one_of(secrets.tests.words, text, said.words, secrets.visible):
        return TEST
    if words & _as_code(text) or _names_one_of(secrets.names, text, said.words, secrets.visible):
        return NAME
    if secrets.solution.numbers & said.numbers:
        return NUMBER
    return WORDS if sum(len(word) > 3 for word in words & said.words) >= MANY_WORDS else None


def said_in(line: str) -> Said:
    """Short runs of tokens have a sign and two words or numbers. A full stop, a colon and a dash are signs of prose
    too. Brackets, dots and commas are no operands: (amount) % 8 is amount % 8."""
    tokens = _tokens(line)
    operands = [token.casefold().rstrip(".") for token in _OPERAND_OR_OPERATOR.findall(line)]
    code = {gram for gram in _grams(operands, 3) if [*map(_is_word, gram)] == [True, False, True]}
    for gram in [*_grams(tokens, SIGNED), *_grams(tokens, ANY)]:
        words = [token for token in gram if _is_word(token)]
        is_signed = not {*gram} <= {*words, ".", ":", "-"}
        if (len(words) >= 4 and len(gram) == ANY) or (len(words) >= 2 and len(gram) == SIGNED and is_signed):
            code.add(gram)
    plain = [spelled.replace(",", "").replace("_", "") for spelled in _NUMBER.findall(line)]
    return Said(code, {*tokens}, {float.fromhex(one) if "x" in one.lower() else float(one) for one in plain})


@lru_cache(maxsize=256)
def secrets_of(task: Task) -> Secrets:
    pieces = dict(_solution(task.folder / "solution"))
    hidden_texts = dict(texts_below(task.hidden_tests))
    code = _code_in(pieces.values())
    test_code = _code_in(hidden_texts.values())
    solution = said_in(code)
    tests = said_in(test_code)
    visible = {name.casefold() for name in task.tools} | PYTHON
    for path, text in ((Path(), task.instruction), *texts_below(task.tree)):
        seen = said_in(_line(text))
        solution = solution.without(seen)
        tests = tests.without(seen)
        visible.update(seen.words, _tokens(_line(path.as_posix())))
    names = {name for name in re.findall(r"[^\W\d]\w+", code) if name.casefold() not in visible}
    odd = {name.casefold() for name in names if _is_odd(name)}
    # Names of test files, classes and functions; only those that cannot be ordinary words.
    test_texts = [test_code, *(path.stem for path in hidden_texts), *task.fail_to_pass, *task.pass_to_pass]
    test_names = re.findall(r"\w*test\w*", "\n".join(test_texts), re.IGNORECASE)
    return Secrets(
        solution=replace(solution, words={*map(str.casefold, names)} - odd, numbers=solution.numbers - EVERYWHERE),
        names=odd,
        tests=replace(tests, words={name.casefold() for name in test_names if _is_odd(name)} - visible),
        visible=visible,
        wanted=tuple(wanted for what, text in pieces.items() for wanted in wanted_pieces(what, text)),
    )


def _solution(folder: Path) -> Iterator[tuple[str, str]]:
    """The deleted code piece by piece and the lines that the gold patch adds; of a foreign task all that is there."""
    patch = folder / "gold.patch"
    removed = folder / "removed.json"
    if removed.is_file():
        yield from json.loads(removed.read_text()).items()
    if patch.is_file():
        added = re.findall(r"^\+(?!\+\+ )(.*)", patch.read_text(errors="replace"), re.MULTILINE)
        yield "gold.patch", "\n".join(added)
    else:
        yield from ((path.as_posix(), text) for path, text in texts_below(folder))


def _line(text: str) -> str:
    """In one line, since what stands in front of a line is no operator to `normalise`."""
    text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).translate(_TYPOGRAPHY)
    return normalise(" ".join(_ESCAPED_SPACE.sub(" ", text).split()))


def _code_in(texts: Iterable[str]) -> str:
    """The texts without docstrings and comments, in one line."""
    return _line("\n".join(without_comments(_DOCSTRING.sub("", text)) for text in texts))


def _tokens(line: str) -> list[str]:
    return [token.casefold().rstrip(".") or token for token in tokens_of(line)]


def _grams(tokens: list[str], length: int) -> Iterator[Gram]:
    return zip(*(tokens[start:] for start in range(length)), strict=False)


def _is_word(token: str) -> bool:
    return token[:1].isalnum() or token[:1] == "_"


def _is_odd(name: str) -> bool:
    """No word of a language: it has an underscore, a figure or a capital inside."""
    return bool(re.search(r"_|\d", name)) or (name[1:].lower() != name[1:] and not name.isupper())


def _names_one_of(names: set[str], text: str, tokens: set[str], visible: set[str]) -> bool:
    whole = text.casefold()
    for token in filter(_is_odd, tokens & visible):  # what is spelled out in the open is no disguise of a part of it
        whole = whole.replace(token, "\n")
    squeezed = re.sub(r"[ \\*`\"'+]+", "", whole)
    return bool(tokens & names) or any(name in squeezed for name in names if len(name) >= SPLIT_NAME)


def _as_code(text: str) -> set[str]:
    """Words that a hint shows as code: quoted, called, indexed, assigned, or with a dot before or behind."""
    found = {word.casefold() for word in _IN_CODE.findall(text)}
    for groups in _QUOTED.findall(text):
        words = [token for token in _tokens("".join(groups)) if _is_word(token)]
        if len(words) <= SIGNED:  # longer ones are quoted sentences
            found.update(words)
    return found
