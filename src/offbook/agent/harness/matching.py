"""Text search: a program that runs in a subprocess.

A regular expression can take forever and nothing interrupts Python while it matches: only a process can be killed. The
program imports only small parts of the standard library, so it starts in 20 ms.
"""

import json
import re
import sys
import warnings

Hit = tuple[str, int, str]  # path, line number, what is shown of the line

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


def lines_of(text: str) -> list[str]:
    """Lines as an editor counts them: what follows the last line break is none."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def match_lines(pattern: str, texts: dict[str, str]) -> tuple[list[Hit], int]:
    """The first hits, and how many more there are."""
    search = compile_pattern(pattern).search
    hits: list[Hit] = []
    count = 0
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
