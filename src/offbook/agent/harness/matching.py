"""Text search: functions for small searches, and a program that a subprocess runs for the others.

A regular expression can take forever and nothing interrupts Python while it matches: only a process can be killed. The
program imports only small parts of the standard library, so it starts in 20 ms.
"""

from __future__ import annotations

import json
import re
import sys
import warnings

Hit = tuple[str, int, str]  # path, line number, what is shown of the line

STEPS_IN_PLACE = 2_000_000  # some 30 ms at worst
MAX_HITS = 50
LINE_CHARS = 240


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """ValueError where it is no regular expression."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_quick(pattern: str, texts: dict[str, str]) -> bool:
    """Whether matching every line is sure to be little work.

    Where no group is repeated, a match that starts at a given place can go on in at most (length of the line) ways for
    each repeated character and two for each `?` and `|`. Escapes are taken out; in classes too much is counted.
    """
    plain = re.sub(r"\\.", "", pattern)
    if re.search(r"\)[*+{]|\(\?(?!:|i\))", plain):  # a repeated group; or flags and comments, which could hide one
        return False
    size = sum(map(len, texts.values()))
    if size > STEPS_IN_PLACE:
        return False
    longest = max((len(line) for text in texts.values() for line in text.split("\n")), default=0)
    repeats, choices = len(re.findall(r"[*+{]", plain)), len(re.findall(r"[?|]", plain))
    return size * longest**repeats * 2**choices <= STEPS_IN_PLACE


def lines_of(text: str) -> list[str]:
    """Lines as an editor counts them: what follows the last line break is none."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def match_lines(pattern: str, texts: dict[str, str]) -> tuple[list[Hit], int]:
    """The first hits, and how many more there are."""
    search = compile_pattern(pattern).search
    hits, count = list[Hit](), 0
    for path, text in texts.items():
        for number, line in enumerate(lines_of(text), 1):
            line = line.removesuffix("\r")
            found = search(line)
            if found:
                count += 1
                if len(hits) < MAX_HITS:
                    hits.append((path, number, _shown(line, found.start())))
    return hits, count - len(hits)


def _shown(line: str, start: int) -> str:
    """A long line is cut to what surrounds the match."""
    if len(line) <= LINE_CHARS:
        return line
    first = max(0, min(start - LINE_CHARS // 2, len(line) - LINE_CHARS))
    before = f"[{first} characters] " if first else ""
    after = len(line) - first - LINE_CHARS
    return f"{before}{line[first : first + LINE_CHARS]}{f' [{after} characters]' if after else ''}"


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(match_lines(request["pattern"], request["texts"]), sys.stdout)
