"""Text search: functions for small searches, and a program that a subprocess runs for the others.

A regular expression can take forever and nothing interrupts Python while it matches: only a process can be killed. The
program imports only small parts of the standard library, so it starts in 20 ms.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections import Counter

Hit = tuple[str, int, str]  # path, line number, what is shown of the line

STEPS_IN_PLACE = 2_000_000  # some 30 ms at worst
MAX_HITS = 50
MAX_FILES = 10  # of a ranked search
LINES_SHOWN = 3  # of a file in a ranked search
LINE_CHARS = 240
CHUNK_LINES = 40
BM25_K, BM25_B = 1.2, 0.75

# The parts of identifiers: HTTPServer_v2 is HTTP, Server, v, 2.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")


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


def words_of(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def rank(query: str, texts: dict[str, str]) -> tuple[list[Hit], int]:
    """The telling lines of the files that say most of what was asked, best first, and how many more files say any."""
    best, rarity = score(query, texts)
    ordered = sorted(best, key=lambda path: (-best[path][0], path))
    hits = [hit for path in ordered[:MAX_FILES] for hit in _telling(path, texts[path], best[path][1], rarity)]
    return hits, len(ordered) - len(ordered[:MAX_FILES])


def score(query: str, texts: dict[str, str]) -> tuple[dict[str, tuple[float, int]], dict[str, float]]:
    """The score of each file and the line before its best chunk; and how rare each word of the query is.

    BM25 (Robertson and Zaragoza 2009) over chunks of a file, with Lucene's rarity, which is never negative; the words
    of a file's path count for each of its chunks. Left out: stemming. The length of a chunk is taken in characters and
    not in words, so that only files which hold a word of the query somewhere are ever split into words.
    """
    terms = set(words_of(query))
    chunks, frequency, num_chunks, num_chars = list[tuple[str, int, int, Counter[str]]](), Counter[str](), 0, 0
    for path, text in texts.items():
        lowered, of_path = text.lower(), Counter(word for word in words_of(path) if word in terms)
        lines = lines_of(text)
        num_chunks += -(-len(lines) // CHUNK_LINES)
        num_chars += len(text)
        if not of_path and not any(term in lowered for term in terms):
            continue
        for first in range(0, len(lines), CHUNK_LINES):
            part = "\n".join(lines[first : first + CHUNK_LINES])
            counts = Counter(word for word in words_of(part) if word in terms) + of_path
            if counts:
                chunks.append((path, first, len(part), counts))
                frequency.update(counts.keys())
    rarity = {term: math.log(1 + (num_chunks - n + 0.5) / (n + 0.5)) for term, n in frequency.items()}
    best: dict[str, tuple[float, int]] = {}
    for path, first, size, counts in chunks:
        scale = BM25_K * (1 - BM25_B + BM25_B * size * num_chunks / max(1, num_chars))
        value = sum(rarity[term] * n * (BM25_K + 1) / (n + scale) for term, n in counts.items())
        if value > best.get(path, (0.0, 0))[0]:
            best[path] = (value, first)
    return best, rarity


def _telling(path: str, text: str, first: int, rarity: dict[str, float]) -> list[Hit]:
    """The lines of a chunk that hold the rarest words of the query, in their order; the first one where none does."""
    scored = []
    for number, line in enumerate(lines_of(text)[first : first + CHUNK_LINES], first + 1):
        score = sum(rarity.get(word, 0.0) for word in set(words_of(line)))
        scored.append((-score, number, line))
    chosen = [entry for entry in sorted(scored)[:LINES_SHOWN] if entry[0] < 0] or scored[:1]
    return [(path, number, _shown(line, 0)) for _, number, line in sorted(chosen, key=lambda entry: entry[1])]


if __name__ == "__main__":
    request = json.load(sys.stdin)
    work = rank if request["ranked"] else match_lines
    json.dump(work(request["pattern"], request["texts"]), sys.stdout)
