"""What a release says of itself: the entries that its changelog has and the older release's has not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

FILES = re.compile(r"(changes|changelog|history|news|release[-_]?notes|releases|whats[-_ ]?new|versions?)", re.I)
README = re.compile(r"readme", re.I)
HISTORY = re.compile(
    r"^[#=*\s]*(?:version |release )?(?:history|changes|changelog|release notes|what's new)\b", re.I | re.M
)
DOCUMENTS = ("", ".md", ".rst", ".txt")
ITEM = re.compile(r"^(\s*)(?:[*+•-]|\d+[.)]|#\d+:)\s+")
HEADING = re.compile(r"^\s*(#+ |={3,}|-{3,}|~{3,}|\^{3,}|\.\. |v?\d+\.\d+[\w.]*\b.{0,40}$)")
# Where it was discussed and who did it: nothing that the agent could look up.
CREDITS = re.compile(
    r"""
    \[?\(?:?(?:gh|issue|pr|pull|bug|user|github)?:?`?~?(?:gh-|\#)\d+`?\)?\]?(?:\([^)\s]*\))?
    | \(?(?:\b(?:thanks|patch|contributed|reported|pr|by|from)\b[^.()]{0,12})@[\w-]+\)?
    | \(?\bthanks\b[^).]*[).]? | https?://\S+ | :(?:issue|pr|pull|user|gh|ghpull|ghissue|bug):`[^`]*`
    | \[?(?<![`\w])@[\w-]+\]?
    | \(?\b(?:issue|pr|bug|gh)s?[-\ ]?\#?\d+(?:,?\ by\ [^).]*)?\)?
    | \((?:by|patch\ by|contributed\ by|issue|issues|pr|bug|closes|fixes|see)\s[^()]*\)
    """,
    re.I | re.X,
)
EMPTY = re.compile(r"\(\s*(?:,|and|see|closes|fixes|fix|issue|issues|by|pr|in|via|-)*\s*\)|\[\s*\](?:\(\s*\))?")
LONG = 250  # characters
MOST = 3  # entries that a request names
COMMON = 4  # entries that share a word from which on it says nothing


def entries_between(old: Mapping[str, str], new: Mapping[str, str], version: str = "") -> list[str]:
    """One text an item, as sentences on one line, without credits and links. Without a changelog what the README has
    more under such a heading: some packages keep theirs in it. `version` is the older one."""
    histories = {path: text[match.end() :] for path, text in new.items() if (match := HISTORY.search(text))}
    return _entries(FILES, old, new, version) or _entries(README, old, histories, version)


def _entries(files: re.Pattern[str], old: Mapping[str, str], new: Mapping[str, str], version: str) -> list[str]:
    found: list[str] = []
    for path in sorted(new, key=lambda path: (path.count("/"), path)):
        name = PurePosixPath(path)
        if name.suffix not in DOCUMENTS or not files.fullmatch(name.name.partition(".")[0]):
            continue
        known = {*_items(old.get(path, "").split("\n"))}
        text = new[path] if known else _newer(new[path], version)
        for item in _items(text.split("\n")):
            if item not in known:
                found += [entry for entry in _sentences(_plain(item)) if len(entry) > 15 and entry not in found]
    return found


def _newer(text: str, version: str) -> str:
    """What stands above the version that is there already, where the older release brings no changelog."""
    heading = re.compile(rf"^[^\w\n]*(?:version |release |v)?{re.escape(version)}(?![\w.]*\d)", re.I | re.M)
    match = heading.search(text)
    return text[: match.start()] if match and version else text


def _sentences(entry: str) -> list[str]:
    """A whole release in one item is many entries."""
    return [entry] if len(entry) < LONG else re.split(r"(?<=[.!?])\s+(?=[A-Z`])", entry)


def _items(lines: Iterable[str]) -> list[str]:
    """List items with the lines that go on under them, and paragraphs; no examples."""
    found: list[list[str]] = []
    going = code = False
    for line in lines:
        code ^= line.lstrip().startswith("```")
        if code or line.lstrip().startswith((">>>", "...", "```")):
            going = False
            continue
        if not line.strip() or HEADING.match(line):
            going = False
        elif ITEM.match(line):
            found.append([ITEM.sub("", line)])
            going = True
        elif going:
            found[-1].append(line.strip())
        else:
            found.append([line.strip()])
            going = True
    return [" ".join(item) for item in found]


def _plain(item: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", item)
    text = CREDITS.sub("", re.sub(r"`([^`]*?)\s*<[^>]*>`_+", r"\1", text))
    text = re.sub(r":\w+(?::\w+)?:`~?([^`<]*?)(?:\s*<[^`]*>)?`", r"`\1`", text).replace("``", "`").replace("**", "")
    for _ in range(2):
        text = EMPTY.sub("", text)
    text = re.sub(r"\(?\s\]\)?", "", " ".join(text.split()))
    text = re.sub(r"\s+([.,;:)])", r"\1", text)
    text = re.sub(r"[\s,;:(\[-]+(\.?)$", r"\1", text)
    text = re.sub(r"\s(?:in|by|from|via|see)(\.?)$", r"\1", text)
    text = re.sub(r"^(?:v?\d+\.\d+[\w.]*[\s:])?(?:\#?\d+[\s:])?[\s\-\u2013:,.|*]*", "", text)
    return text if not text or text.endswith((".", "!", "?", ")", ":")) else text + "."


def entries_for(entries: Sequence[str], names: Collection[str], words: Collection[str]) -> list[str]:
    """The entries that belong to a change: those that name what it touches; else the one with most of its words.

    `names` are functions, classes and parameters that it brings or changes; `words` those of its tests.
    """
    parts = [frozenset(re.findall(r"[A-Za-z_]\w+", entry)) for entry in entries]
    common = Counter(word.lower() for part in parts for word in part)
    telling = {name for name in names if len(name) > 2 and common[name.lower()] < max(COMMON, len(entries) // 4)}
    said = {*map(_stem, (*words, *telling))}
    scored = []
    for number, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        marked = {*re.findall(r"[`.](\w+)(?:\(\))?`?", entry)}
        named = [name for name in telling & part if name in marked or not name.isalpha() or not name.islower()]
        shared = {_stem(word) for word in part if common[word.lower()] < COMMON} & said
        if named or len(shared) >= 2:
            scored.append((-4 * len(named) - len(shared), number))
    best = sorted(scored)[:MOST]
    return [entries[number] for score, number in sorted(best, key=lambda one: one[1]) if 2 * score <= best[0][0]]


def _stem(word: str) -> str:
    return word.lower().removesuffix("s")
