"""A piece of a release as a deletion: the tree with its hunks is what was there, the older release is what is left."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath

from offbook.tasks.factory.delete.symbols import Symbols, read_symbols
from offbook.tasks.factory.instruction.testcode import words_of
from offbook.tasks.factory.releases.cut import Piece
from offbook.tasks.factory.releases.release import Release
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, identity_of
from offbook.tasks.factory.workshop import Workshop

FEWEST_LINES = 2  # of a block that came inside of a function, to be looked for elsewhere


@dataclass(frozen=True, slots=True)
class Change:
    """A piece with all that is made of it."""

    release: Release
    piece: Piece
    workshop: Workshop  # the tree with its hunks, with the tests that go with it
    deletion: Deletion
    came: tuple[str, ...]  # "path::name" of functions and classes that are new
    changed: tuple[str, ...]  # and of functions that were there


def identity(release: Release, piece: Piece) -> str:
    """The same for the same hunks of the same two releases, or without any for the same tests."""
    hunks = [release.hunks.hunks[number] for number in piece.hunks]
    named = next((hunk for hunk in sorted(hunks, key=lambda hunk: -hunk.changed_lines) if hunk.name), None)
    stem = PurePosixPath(hunks[0].path).stem if hunks else words_of("".join(piece.tests[:1]))
    texts = [f"{hunk.path}\0{hunk.new}" for hunk in hunks] or piece.tests
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]
    return identity_of(release.repository.name, release.new_version, named.name if named else stem, digest)


def change_of(release: Release, piece: Piece, stable: Collection[str]) -> Change:
    hunks = release.hunks
    after = hunks.applied(piece.hunks)
    before = hunks.before(after, release.product)
    roots = release.repository.import_roots
    old = read_symbols({path: text for path, text in before.items() if text is not None}, roots)
    new = read_symbols(after, roots)
    came, changed = _came(old, new), _changed(old, new, before, after)
    tests = {**release.tests, **release.tests_on(after)}
    there = {path: text for path, text in before.items() if text is not None}
    runnable = {**release.tests, **release.tests_on(there)}
    runnable = {path: text for path, text in runnable.items() if release.old_files.get(path) != text}
    keys = [FunctionKey.of(where) for where in (*came, *changed)]
    functions = tuple(sorted(key for key in keys if key in new.functions))
    public = [key for key in functions if new.functions[key].public and not new.functions[key].nested]
    feature = Feature(
        identity(release, piece), "release", tuple(public) or functions[:1], functions, tuple(sorted(piece.tests))
    )
    removed = _removed(before, after, new, came, changed)
    deletion = Deletion(
        feature,
        "release",
        before,
        removed or {f"{path}::": text for path, text in _added(before, after).items() if text.strip()},
        tuple(key for key in functions if not new.functions[key].nested and new.functions[key].statements),
        (),
        runnable,
    )
    repository = replace(release.repository, tests=tuple(sorted({*stable, *piece.tests})))
    product = {**release.product, **after}
    workshop = replace(
        release.workshop,
        repository=repository,
        files={**release.old_files, **tests, **after},
        symbols=read_symbols(product, roots),
    )
    return Change(release, piece, workshop, deletion, came, changed)


def _came(old: Symbols, new: Symbols) -> tuple[str, ...]:
    classes = {f"{path}::{name}" for path, module in new.modules.items() for name in module.bases}
    classes -= {f"{path}::{name}" for path, module in old.modules.items() for name in module.bases}
    functions = {
        str(key) for key, function in new.functions.items() if key not in old.functions and not function.nested
    }
    return tuple(sorted(classes | functions))


def _changed(old: Symbols, new: Symbols, before: Mapping[str, str | None], after: Mapping[str, str]) -> tuple[str, ...]:
    found = []
    for key in new.functions.keys() & old.functions.keys():
        text = before[key.path]
        if new.functions[key].nested or text is None:
            continue
        if old.functions[key].source(text) != new.functions[key].source(after[key.path]):
            found.append(str(key))
    return tuple(sorted(found))


def _removed(
    before: Mapping[str, str | None],
    after: Mapping[str, str],
    new: Symbols,
    came: Collection[str],
    changed: Collection[str],
) -> dict[str, str]:
    """What must not be found elsewhere: functions that came, and blocks that came inside of others."""
    found = {}
    for key in map(FunctionKey.of, came):
        if key in new.functions:
            found[str(key)] = new.functions[key].source(after[key.path])
    for key in map(FunctionKey.of, changed):
        first, last = new.functions[key].lines[-1]
        block = _blocks(before[key.path] or "", after[key.path], range(first - 1, last))
        if block:
            found[str(key)] = block
    return found


def _blocks(old: str, new: str, lines: range) -> str:
    """Stretches of new lines in that range of the new text."""
    texts = new.split("\n")
    inside = [range(max(first, lines.start), min(last, lines.stop)) for first, last in _new_lines(old, new)]
    return "\n".join("\n".join(texts[one.start : one.stop]) for one in inside if len(one) >= FEWEST_LINES)


@lru_cache(maxsize=64)
def _new_lines(old: str, new: str) -> tuple[tuple[int, int], ...]:
    matcher = difflib.SequenceMatcher(None, old.split("\n"), new.split("\n"), autojunk=False)
    return tuple((first, last) for how, _, _, first, last in matcher.get_opcodes() if how != "equal")


def _added(before: Mapping[str, str | None], after: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for path, text in after.items():
        stretches = _new_lines(before[path] or "", text)
        found[path] = "\n".join(line for first, last in stretches for line in text.split("\n")[first:last])
    return found
