"""A unified diff in lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

COMMENT = re.compile(r"\s*(#(?!!)|//)")  # the line of a comment, in Python and in most other languages
DEFINED = re.compile(r"^\s*(?:async\s+)?(?:def|class|func|fn|function)\s+(\w+)", re.MULTILINE)
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(slots=True)
class FileDiff:
    """The lines of one file that a diff shows."""

    path: str
    added: dict[int, str] = field(default_factory=dict)  # by their numbers in the new file
    removed: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)  # that stayed


def read_diff(diff: str) -> Iterator[FileDiff]:
    """File by file. Within a hunk a line is what its first character says, whatever it looks like."""
    file, number, old_left, new_left = FileDiff(""), 0, 0, 0
    for line in diff.split("\n"):
        if old_left <= 0 and new_left <= 0:  # between two hunks
            if match := HUNK.match(line):
                old, start, new = (int(count if count is not None else 1) for count in match.groups())
                old_left, number, new_left = old, start, new
            elif line.startswith("+++ "):
                if file.path:
                    yield file
                file = FileDiff(line[4:].split("\t")[0].strip().removeprefix("b/"))
            continue
        old_left -= line[:1] != "+"
        new_left -= line[:1] != "-"
        if line[:1] == "+":
            file.added[number] = line[1:]
        elif line[:1] == "-":
            file.removed.append(line[1:])
        else:
            file.around.append(line[1:])
        number += line[:1] != "-"
    if file.path:
        yield file
