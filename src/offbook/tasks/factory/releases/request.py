"""What the agent is asked for: the changelog's own words. What tests need besides is stated by sufficient.py.

`terse` is the changelog alone. Without an entry it says what is to come and what it is to do, from names and
docstrings. `normal` has the interface besides: what is new, with its signature and where it is imported from, and what
takes other arguments. `detailed` has docstrings and the words of test names too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from offbook.core.copies import shared_code
from offbook.tasks.factory.delete.symbols import Function, read_symbols
from offbook.tasks.factory.instruction.instruct import TERSE_CHARACTERS, behaviours, first_sentence, listed, plain
from offbook.tasks.factory.instruction.testcode import split_name, words_of
from offbook.tasks.factory.releases.changelog import entries_for
from offbook.tasks.factory.releases.pieces import Change
from offbook.tasks.factory.types import FunctionKey

MOST_LINES, MOST_BEHAVIOURS = 8, 10


def requests(change: Change, tests: Sequence[str], entries: Sequence[str]) -> dict[str, str]:
    """Empty where nothing says what is to be done."""
    writer = _Writer(change, tests, entries)
    return writer.texts() if writer.is_told() else {}


class _Writer:
    def __init__(self, change: Change, tests: Sequence[str], entries: Sequence[str]):
        self._change = change
        self._symbols = change.workshop.symbols
        self._old = read_symbols(change.release.product, self._symbols.import_roots)
        self._tests = tests
        self._entries = entries_for(entries, self._names(), {*self._words()})

    def is_told(self) -> bool:
        """An entry of the changelog names it, or most of what is public has a docstring that says something new."""
        public = self._public((*self._change.came, *self._change.changed))
        return bool(self._entries) or 2 * len(self._docstrings()) >= max(1, len(public))

    def _is_in_lines(self) -> bool:
        """Whether the lines of the interface say it: something came, with a first sentence of its docstring."""
        return any(self._said_of(where) for where in self._public(self._change.came))

    def texts(self) -> dict[str, str]:
        said = " ".join(self._entries)
        terse = said if 0 < len(said) < TERSE_CHARACTERS else self._summary()
        if said and len(said) >= TERSE_CHARACTERS:
            terse = self._entries[0] if len(self._entries[0]) < TERSE_CHARACTERS else self._summary()
        documented = [] if said else self._docstrings()
        opening = said or "Please make these changes."
        normal = [opening, *self._interface(), *documented, self._covered(MOST_BEHAVIOURS)]
        detailed = [opening, *self._interface(), *self._docstrings(), self._covered(2 * MOST_BEHAVIOURS)]
        texts = {"terse": terse, "normal": _whole(normal), "detailed": _whole(detailed)}
        bare = _whole([opening, *self._interface(), self._covered(MOST_BEHAVIOURS)])
        for name in ("normal", "detailed"):  # an example in a docstring may be a line of the body
            if shared_code(texts[name], self._change.deletion.removed):
                texts[name] = bare
        if not said and texts["normal"] == bare and not self._is_in_lines():
            return {}  # what was to say it cannot be shown
        return texts

    def _public(self, names: Sequence[str]) -> list[str]:
        parts = {where: re.split(r"[/.]", where.replace(".py::", "/")) for where in names}
        return [where for where in names if not any(map(_hidden, parts[where]))]

    def _names(self) -> set[str]:
        """That the change brings or touches: functions, classes, new parameters."""
        found = {where.rpartition("::")[2] for where in (*self._change.came, *self._change.changed)}
        found |= {name.rpartition(".")[2] for name in found} | {name.partition(".")[0] for name in found}
        hunks = [self._change.release.hunks.hunks[number] for number in self._change.piece.hunks]
        found |= {word for hunk in hunks if not hunk.is_file for word in _parameters(hunk.new) - _parameters(hunk.old)}
        return {name for name in found if not (name.startswith("__") and name.endswith("__"))}

    def _words(self) -> list[str]:
        names = [*map(words_of, self._tests)]
        names += [where.rpartition("::")[2].replace(".", "_") for where in (*self._change.came, *self._change.changed)]
        return [word for name in names for word in split_name(name) if len(word) > 3 and word != "test"]

    def _summary(self) -> str:
        came, changed = self._public(self._change.came), self._public(self._change.changed)
        parts = []
        tops = [where for where in came if not self._is_part(where, came)]
        if tops:
            paths = sorted({where.partition("::")[0] for where in tops})
            names = listed([f"`{where.partition('::')[2]}`" for where in tops[:MOST_LINES]])
            parts.append(f"Please add {names} to {listed(paths[:3])}.")
            parts += [self._said_of(where) for where in tops[:1]]
        elif changed:
            names = listed([f"`{where.partition('::')[2]}`" for where in changed[:4]])
            parts.append(f"Please change {names} in {listed(sorted({one.partition('::')[0] for one in changed})[:3])}.")
        else:
            paths = sorted({self._change.release.hunks.hunks[one].path for one in self._change.piece.hunks})
            parts.append(f"Please change what {listed(paths[:3])} does.")
        if not tops:
            parts.append(self._covered(3))
        return " ".join(filter(None, parts))[: TERSE_CHARACTERS - 1]

    def _is_part(self, where: str, of: Sequence[str]) -> bool:
        path, _, name = where.partition("::")
        return "." in name and f"{path}::{name.rpartition('.')[0]}" in of

    def _interface(self) -> list[str]:
        """A line for each thing that tests may name."""
        lines = []
        came = self._public(self._change.came)
        for where in came:
            if not self._is_part(where, came) or where.endswith(".__init__"):
                lines.append(self._line(where))
        for where in self._public(self._change.changed):
            lines.append(self._changed_line(where))
        lines = [line for line in lines if line]
        return ["\n".join(f"- {line}" for line in lines[: MOST_LINES * 2])] if lines else []

    def _line(self, where: str) -> str:
        key = FunctionKey.of(where)
        function = self._symbols.functions.get(key)
        if function is None:
            bases = self._symbols.modules[key.path].bases.get(key.name.rpartition(".")[2], ())
            own = [f for f in self._symbols.functions.values() if f.key.path == key.path and f.owner == key.name]
            methods = [f"`{f.signature.removeprefix('def ')}`" for f in own if f.public and not f.key.dunder]
            has = f", with {listed(methods[:MOST_LINES])}" if methods else ""
            of = f"({', '.join(bases)})" if bases else ""
            return f"New class `{key.name}{of}` in `{key.path}`{has}.{self._homes(key)}"
        what = f"method of `{function.owner}`" if function.owner else "function"
        what = f"property of `{function.owner}`" if function.is_property else what
        said = first_sentence(function.docstring)
        return f"New {what} in `{key.path}`: `{_signature(function)}`.{self._homes(key)} {said}".strip()

    def _homes(self, key: FunctionKey) -> str:
        """Other modules that have the name now and had not before."""
        top = key.name.partition(".")[0]
        if "." in key.name:
            return ""
        homes = [
            module.name
            for path, module in sorted(self._symbols.modules.items())
            if path != key.path
            and any(top == imported.name and imported.top for imported in module.imports)
            and top not in (self._old.modules[path].names if path in self._old.modules else ())
        ]
        starred = [
            module.name
            for path, module in sorted(self._symbols.modules.items())
            if any(one.name == "*" and self._symbols.path_of(one.module) == key.path for one in module.imports)
        ]
        exports = self._symbols.modules[key.path].exports
        homes += [name for name in starred if exports is None or top in exports]
        return f" Importable from {listed([f'`{home}`' for home in homes[:3]])} as well." if homes else ""

    def _changed_line(self, where: str) -> str:
        key = FunctionKey.of(where)
        before, after = self._old.functions.get(key), self._symbols.functions[key]
        if before is None or before.signature == after.signature:
            is_told = bool(self._entries) and key.simple in " ".join(self._entries)
            return "" if is_told else f"`{key.name}` in `{key.path}` changes."
        return f"`{key.name}` in `{key.path}` becomes `{_signature(after)}`."

    def _said_of(self, where: str) -> str:
        function = self._symbols.functions.get(FunctionKey.of(where))
        return first_sentence(function.docstring) if function else ""

    def _covered(self, most: int) -> str:
        keys = [FunctionKey.of(where) for where in (*self._change.came, *self._change.changed)]
        functions = [self._symbols.functions[key] for key in keys if key in self._symbols.functions]
        found = behaviours(self._tests, functions)[:most]
        return f"It will be checked for: {'; '.join(found)}." if found else ""

    def _docstrings(self) -> list[str]:
        """Of what came whole, of what changed the lines that its docstring has more."""
        parts = []
        for where in self._public((*self._change.came, *self._change.changed)):
            key = FunctionKey.of(where)
            after, before = self._symbols.functions.get(key), self._old.functions.get(key)
            if after is None or not after.docstring:
                continue
            known = {line.strip() for line in before.docstring.split("\n")} if before else set[str]()
            fresh = "\n".join(
                line for line in after.docstring.split("\n") if not line.strip() or line.strip() not in known
            )
            prose = [line for line in fresh.split("\n") if ">>>" not in line and len(line.split()) > 2]
            if prose:
                parts.append(f"## `{key.name}`\n\n{plain(fresh).strip()}")
        return parts


def _whole(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts)).strip() + "\n"


def _hidden(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _signature(function: Function) -> str:
    own = function.signature
    return own if function.owner else own.replace(function.key.simple, function.key.name, 1)


def _parameters(text: str) -> set[str]:
    """Names in the parentheses of definitions."""
    found: set[str] = set()
    for inside in re.findall(r"^\s*(?:async )?def \w+\((.*?)\)\s*(?:->.*?)?:", text, re.M | re.S):
        found |= {*re.findall(r"(?:^|,)\s*\**(\w+)", inside)}
    return found - {"self", "cls"}
