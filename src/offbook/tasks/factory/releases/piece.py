"""A piece of a change becomes a task folder, or is refused with the reason.

The tree with the piece's hunks is what a deletion starts from, the older tree is what it leaves. The request is the
changelog's or commit's own words: `terse` is that alone, `normal` adds the interface, `detailed` docstrings.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from offbook.core.copies import shared_code
from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.delete.symbols import Symbols, read_symbols
from offbook.tasks.factory.instruction.examples import split_name, words_of
from offbook.tasks.factory.instruction.instruct import TERSE_CHARACTERS, behaviours, first_sentence, listed, plain
from offbook.tasks.factory.instruction.needs import Needs
from offbook.tasks.factory.make import MakeSettings, Outcome, Shown, task_from
from offbook.tasks.factory.records import Taken
from offbook.tasks.factory.releases.cut import Hunk, Hunks, Piece
from offbook.tasks.factory.releases.release import Release, entries_for
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, identity_of
from offbook.tasks.factory.verification.verify import Verdict
from offbook.tasks.factory.workshop import Workshop

MAX_LINES = 1200
MOST_LINES, MOST_BEHAVIOURS = 16, 10
FEWEST_LINES = 2  # of a block that was added inside of a function, to be looked for elsewhere


async def make_piece(
    release: Release,
    hunks: Hunks,
    piece: Piece,
    stable: Collection[str],
    folder: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    taken: Taken | None = None,
) -> Outcome:
    """`stable` are the tests that pass on both trees."""
    lines = sum(hunks.hunks[number].changed_lines for number in piece.hunks)
    refused, evidence = piece.refused, piece.evidence
    if not refused and lines > MAX_LINES:
        refused, evidence = f"it takes over {MAX_LINES} lines", f"{lines} lines"
    if refused:
        return Outcome(
            identity(release, hunks, piece), release.repository.name, "release", "release", refused, evidence
        )
    change = await asyncio.to_thread(change_of, release, hunks, piece, stable)

    def show(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Shown:
        """The older tree as it is, and the newer tests."""
        tree = {path: text for path, text in deletion.files.items() if text is not None}
        hidden: dict[str, str | bytes] = {path: workshop.files[path] for path in release.tests}
        needs = Needs(
            before=workshop.files,
            shown=release.old_files,
            failing=verdict.fail_to_pass,
            removed=deletion.removed,
            functions=deletion.feature.functions,
            targets=deletion.feature.targets,
            symbols=workshop.symbols,
            is_told=True,  # or `requests` has nothing
        )
        return Shown(tree, requests(release, change, verdict.fail_to_pass), hidden, needs)

    return await task_from(change.workshop, change.deletion, folder, spec, settings, taken, show)


def identity(release: Release, hunks: Hunks, piece: Piece) -> str:
    """The same for the same hunks of the same two trees, or without any for the same tests."""
    mine = [hunks.hunks[number] for number in piece.hunks]
    named = next((hunk for hunk in sorted(mine, key=lambda hunk: -hunk.changed_lines) if hunk.name), None)
    stem = PurePosixPath(mine[0].path).stem if mine else words_of("".join(piece.tests[:1]))
    texts = [f"{hunk.path}\0{hunk.new}" for hunk in mine] or piece.tests
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6]
    return identity_of(release.repository.name, release.new_version, named.name if named else stem, digest)


@dataclass(frozen=True, slots=True)
class Change:
    """A piece as a deletion: `old` and `new` are the product without and with it."""

    hunks: tuple[Hunk, ...]
    workshop: Workshop  # the tree with its hunks, with the tests that go with it
    deletion: Deletion
    old: Symbols
    came: tuple[FunctionKey, ...]  # functions and classes that are new
    changed: tuple[FunctionKey, ...]  # functions that were there

    @property
    def new(self) -> Symbols:
        return self.workshop.symbols

    def public(self, keys: Sequence[FunctionKey]) -> list[FunctionKey]:
        return [key for key in keys if not re.search(r"(^|[/.])_(?!_)", f"{key.path.removesuffix('.py')}.{key.name}")]


def change_of(release: Release, hunks: Hunks, piece: Piece, stable: Collection[str]) -> Change:
    after = hunks.applied(piece.hunks)
    before = {path: release.product.get(path) for path in after}
    roots = release.repository.import_roots
    old, new = read_symbols(release.product, roots), read_symbols({**release.product, **after}, roots)
    own = {key for key, function in new.functions.items() if key.path in after and not function.nested}
    sources = {key: new.functions[key].source(after[key.path]) for key in own}
    known = {key: old.functions[key].source(before[key.path] or "") for key in own & old.functions.keys()}
    classes = {FunctionKey(path, name) for path in after if path in new.modules for name in new.modules[path].bases}
    classes -= {FunctionKey(path, name) for path, module in old.modules.items() for name in module.bases}
    came = tuple(sorted(classes | (own - known.keys())))
    changed = tuple(sorted(key for key in known if known[key] != sources[key]))
    functions = tuple(sorted(key for key in (*came, *changed) if key in own))
    removed = {str(key): sources[key] for key in came if key in own}
    removed |= {str(key): added_lines(known[key], sources[key], FEWEST_LINES) for key in changed}
    removed = {what: text for what, text in removed.items() if text.strip()}
    if not removed:
        removed = {f"{path}::": added_lines(before[path] or "", text, 1) for path, text in after.items()}
        removed = {what: text for what, text in removed.items() if text.strip()}
    there = {path: text for path, text in before.items() if text is not None}
    without = {**release.tests, **release.tests_on(there)}
    feature = Feature(
        identity(release, hunks, piece),
        "release",
        tuple(key for key in functions if new.functions[key].public) or functions[:1],
        functions,
        tuple(sorted(piece.tests)),
    )
    deletion = Deletion(
        feature,
        "release",
        dict(before),
        removed,
        stubbed=tuple(key for key in functions if new.functions[key].statements),
        deleted=(),
        tests={path: text for path, text in without.items() if release.old_files.get(path) != text},
    )
    workshop = replace(
        release.workshop,
        repository=replace(release.repository, tests=tuple(sorted({*stable, *piece.tests}))),
        files={**release.old_files, **release.tests, **release.tests_on(after), **after},
        symbols=new,
    )
    return Change(tuple(hunks.hunks[number] for number in piece.hunks), workshop, deletion, old, came, changed)


def added_lines(old: str, new: str, fewest: int) -> str:
    """The stretches of at least so many lines that the new text has more."""
    lines = new.split("\n")
    codes = difflib.SequenceMatcher(None, old.split("\n"), lines, autojunk=False).get_opcodes()
    stretches = [lines[j1:j2] for how, _, _, j1, j2 in codes if how != "equal" and j2 - j1 >= fewest]
    return "\n".join(line for stretch in stretches for line in stretch)


def requests(release: Release, change: Change, tests: Sequence[str]) -> dict[str, str]:
    """In three lengths; empty where neither an entry nor the docstrings of most public functions say what is asked.

    What is new is declared by `Needs.stated`; here stands what else changes.
    """
    keys = change.public((*change.came, *change.changed))
    names = {part for key in (*change.came, *change.changed) for part in (key.name, key.simple, *key.name.split("."))}
    for hunk in change.hunks:
        names |= set() if hunk.is_file else _parameters(hunk.new) - _parameters(hunk.old)
    names = {name for name in names if not name.startswith("__")}
    spoken = [*map(words_of, tests), *(key.name.replace(".", "_") for key in (*change.came, *change.changed))]
    words = {word for name in spoken for word in split_name(name) if len(word) > 3 and word != "test"}
    entries = entries_for(release.entries, names, words)
    if release.message and not entries:
        entries = release.entries[:1]
    documented = {key: text for key in keys if (text := _said_now(change, key))}
    is_copied = any(shared_code(text, change.deletion.removed) for text in documented.values())
    if not entries and (is_copied or not documented or 2 * len(documented) < len(keys)):
        return {}
    said = " ".join(entries)
    functions = [change.new.functions[key] for key in (*change.came, *change.changed) if key in change.new.functions]
    found = behaviours(tests, functions)
    lines = [f"- {line}" for key in change.public(change.changed) if (line := _changed(change, key, said))]
    docstrings = [f"## `{key.name}`\n\n{text}" for key, text in documented.items() if key in change.changed]

    def whole(docstrings: Sequence[str], most: int) -> str:
        covered = f"It will be checked for: {'; '.join(found[:most])}." if found else ""
        parts = [said or _summary(change, keys), "\n".join(lines[:MOST_LINES]), *docstrings, covered]
        return "\n\n".join(filter(None, parts)).strip() + "\n"

    short = next((text for text in (said, *entries[:1]) if 0 < len(text) < TERSE_CHARACTERS), "")
    return {
        "terse": short or _summary(change, keys),
        "normal": whole([] if said or is_copied else docstrings, MOST_BEHAVIOURS),
        "detailed": whole([] if is_copied else docstrings, 2 * MOST_BEHAVIOURS),
    }


def _summary(change: Change, keys: Sequence[FunctionKey]) -> str:
    came = [key for key in keys if key in change.came and not key.is_inside(change.came)]
    names = listed([f"`{key.name}`" for key in (came or keys)[:8]])
    paths = listed(sorted({key.path for key in came or keys} or {hunk.path for hunk in change.hunks})[:3])
    if came:
        first = change.new.functions.get(came[0])
        text = f"Please add {names} to {paths}. {first_sentence(first.docstring) if first else ''}"
    else:
        text = f"Please change {names} in {paths}." if keys else f"Please change what {paths} does."
    return text.strip()[: TERSE_CHARACTERS - 1]


def _changed(change: Change, key: FunctionKey, said: str) -> str:
    after = change.new.functions[key].signature
    if change.old.functions[key].signature != after:
        return f"`{key.name}` in `{key.path}` becomes `{after}`."
    return "" if key.simple in said else f"`{key.name}` in `{key.path}` changes."


def _said_now(change: Change, key: FunctionKey) -> str:
    """What a docstring says that it did not say before."""
    before = change.old.functions.get(key)
    after = change.new.functions.get(key)
    known = {line.strip() for line in before.docstring.split("\n") if line.strip()} if before else set[str]()
    fresh = [line for line in (after.docstring if after else "").split("\n") if line.strip() not in known]
    tells = any(">>>" not in line and len(line.split()) > 2 for line in fresh)
    return plain("\n".join(fresh)).strip() if tells else ""


def _parameters(text: str) -> set[str]:
    """Names in the parentheses of definitions."""
    heads = re.findall(r"^\s*(?:async )?def \w+\((.*?)\)\s*(?:->.*?)?:", text, re.M | re.S)
    return {name for inside in heads for name in re.findall(r"(?:^|,)\s*\**(\w+)", inside)} - {"self", "cls"}
