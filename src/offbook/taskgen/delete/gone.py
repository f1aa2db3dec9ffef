"""What gives a deleted name away besides code: documents, and examples in docstrings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

DOCUMENTS = (".md", ".rst", ".txt")
QUOTES = r"""(?:\"{3}|'{3}|["'])"""
EXAMPLE = re.compile(rf"\s*(?:[rRuUbB]*{QUOTES})?(?:>>>|\.\.\.)")
NAMED = ("CHANGELOG", "CHANGES", "HISTORY", "NEWS", "README")


def scrub_documents(files: Mapping[str, str], names: Collection[str]) -> dict[str, str | None]:
    """The documents that change. `names` are qualified: a method is looked for as Class.method and as .method(."""
    mention = _mention(names)
    if mention is None:
        return {}
    changed: dict[str, str | None] = {}
    for path, text in files.items():
        name = path.rpartition("/")[2]
        if (path.endswith(DOCUMENTS) or name in NAMED) and (after := scrub(text, mention)) != text:
            changed[path] = after
    return changed


def _mention(names: Collection[str]) -> re.Pattern[str] | None:
    """A name in code marks, called, dotted, or alone on its line. One with an underscore is no English word."""
    ways = []
    for name in sorted(names):
        owner, _, simple = name.rpartition(".")
        word = re.escape(simple)
        if owner:
            ways += [rf"\b{re.escape(owner.rpartition('.')[2])}\.{word}\b"]
            continue
        ways += [
            rf"`[~.\w]*\b{word}\b(?:\(\))?`",
            rf"\b{word}\(",
            rf"\w\.{word}\b(?!\.\w)",
            rf"(?m:^[\s*+-]*{word}\s*$)",
        ]
        ways += [rf":: +(?:\w+\.)*{word}\b"]
        if "_" in simple.strip("_"):
            ways.append(rf"\b{word}\b")
    return re.compile("|".join(ways)) if ways else None


def scrub(text: str, mention: re.Pattern[str]) -> str:
    """The text without the blocks that name it: a list item or table row alone, else the whole paragraph."""
    lines = text.split("\n")
    gone: set[int] = set()
    for number, line in enumerate(lines):
        if number not in gone and mention.search(line):
            gone.update(_block(lines, number))
    if not gone:
        return text
    return "\n".join(line for number, line in enumerate(lines) if number not in gone)


ITEM = re.compile(r"\s*(?:[*+-]|\d+[.)])\s+")
SINGLE = re.compile(r"\s*(?:\||[.\w]+\s*$)")  # a table row, or a bare name in a list of names


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _block(lines: list[str], number: int) -> range:
    """The lines that go because this one names it."""
    line = lines[number]
    first = number
    while first > 0 and not ITEM.match(lines[first]) and lines[first - 1].strip() and not lines[first].startswith(".."):
        first -= 1
    if ITEM.match(lines[first]):
        return range(first, _end_of_indented(lines, first))
    if line.lstrip().startswith(".. "):
        return range(number, _end_of_indented(lines, number))
    if SINGLE.match(line):
        return range(number, number + 1)
    last = number
    while last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    if lines[first].lstrip().startswith("```") or any(_is_fence(lines[i]) for i in range(first, last + 1)):
        return range(number, number + 1)  # half a fence would swallow what follows
    return range(first, last + 1 + (last + 1 < len(lines) and not lines[last + 1].strip()))


def _is_fence(line: str) -> bool:
    return line.lstrip().startswith(("```", "~~~"))


def _end_of_indented(lines: list[str], first: int) -> int:
    end = first + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > _indent(lines[first]):
        end += 1
    if lines[first].lstrip().startswith(".. "):  # a directive's body may have empty lines in it
        while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > _indent(lines[first])):
            end += 1
        while end > first + 1 and not lines[end - 1].strip():
            end -= 1
    return end


def drop_examples(text: str, names: Collection[str]) -> str:
    """A docstring without the interactive examples that call one of the names; an example ends at an empty line."""
    called = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}\(|\.{re.escape(name)}\(" for name in sorted(names)))
    if ">>>" not in text or not called.search(text):
        return text
    groups = re.split(r"(\n[ \t]*\n)", text)
    kept: list[str] = []
    for number in range(0, len(groups), 2):
        group = groups[number]
        separator = groups[number + 1] if number + 1 < len(groups) else ""
        examples = [line for line in group.split("\n") if EXAMPLE.match(line)]
        if any(called.search(line) for line in examples):
            group = _without_examples(group, last=not separator)
            if not group.strip():
                continue
        kept += [group, separator]
    return "".join(kept)


def _without_examples(group: str, last: bool) -> str:
    """Lines before the first example stay, and so do the closing quotes of the docstring."""
    lines = group.split("\n")
    first = next(number for number, line in enumerate(lines) if EXAMPLE.match(line))
    opening = re.match(rf"\s*[rRuUbB]*{QUOTES}", lines[first])
    kept = lines[:first]
    if opening:
        kept.append(
            opening.group() + (re.findall(QUOTES, lines[first])[-1] if last and len(lines) == first + 1 else "")
        )
    elif last:
        closing = re.search(f"{QUOTES}$", group)
        kept.append((" " * _indent(lines[-1])) + (closing.group() if closing else ""))
    return "\n".join(kept)
