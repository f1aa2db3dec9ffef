"""What the agent is asked: three lengths of one request, written from docstrings, signatures, callers and test names.

Never code of the deleted bodies and never a test's id. The wording varies with the feature's id and nothing else,
unless a model says it in its words, which are held to the same rules.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import resources

from offbook.client import Client, json_part
from offbook.copies import shared_code
from offbook.taskgen.delete.symbols import Function, Symbols
from offbook.taskgen.nouns import Deletion, Feature, FunctionKey
from offbook.taskgen.sufficient import Needs

PROMPTS = resources.files("offbook.taskgen") / "prompts"
TERSE_CHARACTERS = 400
Rewrite = Callable[[Mapping[str, str], Deletion], Awaitable[dict[str, str]]]


def instructions(feature: Feature, symbols: Symbols, deletion: Deletion, tests: Sequence[str]) -> dict[str, str]:
    """`terse`, `normal` and `detailed`. `tests` are those that need the feature; only their words are used.

    What stands nowhere in the tree any more is not said here, but by `sufficient.Needs.stated`.
    """
    writer = _Writer(feature, symbols, deletion, tests)
    texts = {"terse": writer.terse(), "normal": writer.normal(), "detailed": writer.detailed(documented=True)}
    if shared_code(texts["detailed"], deletion.removed):  # an example in the docstring may be a line of the body
        texts["detailed"] = writer.detailed(documented=False)
    return texts


def complete(texts: Mapping[str, str], needs: Needs, removed: Mapping[str, str]) -> dict[str, str]:
    """Every length with what has to be stated besides the request."""
    stated = needs.stated()
    if shared_code(stated, removed):
        stated = needs.stated(with_values=False)
    return {name: f"{text.rstrip()}\n\n{stated}\n" if stated else text for name, text in texts.items()}


class _Writer:
    def __init__(self, feature: Feature, symbols: Symbols, deletion: Deletion, tests: Sequence[str]):
        self._feature = feature
        self._symbols = symbols
        self._deletion = deletion
        self._targets = [symbols.functions[key] for key in feature.targets]
        self._gone = [f for f in self._targets if f.key in deletion.deleted]
        self._behaviours = behaviours(tests, self._targets)
        self._many = len(self._targets) > 1
        self._names = listed([f"`{f.key.name}`" for f in self._targets])
        self._paths = _unique(f.key.path for f in self._targets)

    def _pick(self, what: str, choices: Sequence[str]) -> str:
        return choices[zlib.crc32(f"{self._feature.id}/{what}".encode()) % len(choices)]

    def terse(self) -> str:
        names, many, where = self._names, self._many, listed(self._paths)
        it, them = _n(many, "it", "them"), _n(many, "its body", "their bodies")
        if self._gone:
            choices = [
                f"We need {names} back in {where}: the code was removed.",
                f"{names} {_n(many, 'is', 'are')} missing from {where}. Can you write {it} again?",
                f"Please add {names} to {where} again; the code went missing.",
                f"Someone dropped {names} from {where}. Please bring {it} back.",
            ]
        else:
            choices = [
                f"{names} in {where} only {_n(many, 'raises', 'raise')} NotImplementedError. Can you implement {it}?",
                f"Please implement {names} in {where}; right now there is only a stub.",
                f"Can you fill in {names} in {where}? Only the {_n(many, 'signature is', 'signatures are')} left.",
                f"{names} in {where} lost {them}. Please write {it} again.",
            ]
        text = self._pick("terse", choices)
        if len(text) >= TERSE_CHARACTERS:
            text = f"Please implement what is missing in {where}."
        summary = "" if many else _summary(self._targets[0]) or self._used_by(limit=2) or self._covered(limit=2)
        for more in (summary, self._also_missing()):
            if more and len(text) + 1 + len(more) < TERSE_CHARACTERS:
                text = f"{text} {more}"
        return text

    def normal(self) -> str:
        parts = [self._opening()]
        if not self._many:
            parts.append(f"{_kind(self._targets[0])} {_summary(self._targets[0])}".strip())
        else:
            parts.append("\n".join(f"- `{f.key.name}`: {_kind(f)} {_summary(f)}".strip() for f in self._targets))
        parts += [self._also_missing(), self._used_by(limit=3), self._covered(limit=4)]
        return self._whole(parts)

    def detailed(self, documented: bool) -> str:
        parts = [self._opening(), self._about_modules()]
        for function in self._targets:
            parts.append(f"## `{function.key.name}` in `{function.key.path}`")
            if function in self._gone:  # declared in full at the end
                parts.append(_summary(function))
                continue
            parts.append(f"```python\n{function.signature}\n```")
            parts.append((documented and plain(function.docstring).strip()) or _summary(function))
            if function.decorators:
                parts.append(f"Decorated with {listed([f'`{name}`' for name in _unique(function.decorators)])}.")
        if others := self._public_others():
            lines = "\n".join(f"- `{f.key.name}` in `{f.key.path}`. {_kind(f)} {_summary(f)}".strip() for f in others)
            parts.append(f"## Also missing\n\n{lines}")
        parts += [self._used_by(limit=8), self._covered(limit=12)]
        return self._whole(parts)

    def _whole(self, parts: list[str]) -> str:
        return "\n\n".join(filter(None, [*parts, self._helpers(), self._closing()])) + "\n"

    def _opening(self) -> str:
        names, many, files = self._names, self._many, listed([f"`{path}`" for path in self._paths])
        it = _n(many, "it", "them")
        if self._gone:
            choices = [
                f"{names} {_n(many, 'has', 'have')} been removed from {files}. Write {it} again.",
                f"This code base used to have {names}, in {files}. Bring {it} back.",
                f"Add {names} to {files}. The name existed before, and the behaviour should be the same as then.",
            ]
            return self._pick("opening", choices if not many else choices[:2])
        stubs = _n(many, "is a stub that raises", "are stubs that raise")
        choices = [
            f"{names} in {files} {stubs} NotImplementedError. Implement {it}.",
            f"Implement {names} in {files}. At the moment {_n(many, 'it raises', 'they raise')} NotImplementedError.",
            f"The {_n(many, 'body of', 'bodies of')} {names} in {files} {_n(many, 'is', 'are')} missing. Write {it}.",
        ]
        return self._pick("opening", choices)

    def _others(self) -> list[Function]:
        return [f for key in self._feature.functions if (f := self._symbols.functions[key]) not in self._targets]

    def _public_others(self) -> list[Function]:
        touched = {*self._deletion.stubbed, *self._deletion.deleted}
        return [f for f in self._others() if f.public and f.key in touched]

    def _also_missing(self) -> str:
        by_file: dict[str, list[str]] = {}
        for function in self._public_others():
            by_file.setdefault(function.key.path, []).append(f"`{function.key.name}`")
        if not by_file:
            return ""
        opening = self._pick("also", ["Also missing", "The same goes for", "Missing as well"])
        return f"{opening}: {'; '.join(f'{listed(names)} in `{path}`' for path, names in by_file.items())}."

    def _used_by(self, limit: int) -> str:
        users = _unique(
            f"`{caller.name.replace('.<locals>', '')}`"
            for function in self._targets
            for caller in self._users(function)
        )
        if not users:
            return ""
        many = len(users) > 1
        choices = [_n(many, "uses", "use"), _n(many, "relies on", "rely on"), _n(many, "depends on", "depend on")]
        return f"{listed(users[:limit])} {self._pick('users', choices)} {_n(self._many, 'it', 'them')}."

    def _users(self, function: Function) -> list[FunctionKey]:
        """Callers outside of the feature."""
        return [caller for caller in self._symbols.callers[function.key] if caller not in self._feature.functions]

    def _covered(self, limit: int) -> str:
        if not self._behaviours:
            return ""
        opening = self._pick(
            "tests", ["The tests look at", "It will be checked for", "Among other things the tests cover"]
        )
        return f"{opening}: {'; '.join(self._behaviours[:limit])}."

    def _helpers(self) -> str:
        hidden = [f for f in self._others() if f.key in self._deletion.deleted and not f.nested and not f.public]
        if not hidden:
            return ""
        return self._pick("helpers", [
            "Private helpers are gone as well; how you divide the work is up to you.",
            "The helper functions behind this were deleted too. You need not write the same ones again.",
            "Internal helpers went with it, so choose your own structure.",
        ])  # fmt: skip

    def _about_modules(self) -> str:
        lines = []
        for path in self._paths:
            if about := first_sentence(self._symbols.modules[path].docstring):
                lines.append(f"About `{path}`: {about}")
        return "\n".join(lines)

    def _closing(self) -> str:
        return self._pick("closing", [
            "Everything else should keep working as it does now.",
            "Please leave the rest of the behaviour as it is.",
            "The remaining tests must still pass.",
            "Do not change what other functions do.",
        ])  # fmt: skip


def _n(many: bool, one: str, more: str) -> str:
    return more if many else one


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _kind(function: Function) -> str:
    """What it is, with its signature."""
    if not function.owner:
        return f"Its signature is `{function.signature}`."
    if function.is_property:
        return f"It is a property of `{function.owner}`."
    return f"It is a method of `{function.owner}`: `{function.signature}`."


def _summary(function: Function) -> str:
    return first_sentence(function.docstring)


def plain(text: str) -> str:
    """Without reStructuredText roles and doubled code marks."""
    return re.sub(r":\w+(?::\w+)?:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(plain(docstring).strip().split("\n\n")[0].split())
    if not paragraph or ">>>" in paragraph:
        paragraph = paragraph.partition(">>>")[0].strip()
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0].rstrip(":;, ")
    if not sentence:
        return ""
    sentence = sentence[0].upper() + sentence[1:]
    return sentence if sentence.endswith((".", "!", "?")) else sentence + "."


def behaviours(tests: Sequence[str], targets: Sequence[Function]) -> list[str]:
    """The words of test names, those with words of the target first. A name that only repeats it says nothing."""
    told = [split_name(function.simple) for function in targets]
    found = []
    for test in tests:
        words = split_name(test.partition("[")[0].split("::")[-1])
        words = words[1:] if words[:1] == ["test"] else words
        if words not in told and len(" ".join(words)) > 3 and not "".join(words).isdigit():
            found.append((-len({*words} & {word for name in told for word in name}), " ".join(words)))
    return _unique(phrase for _, phrase in sorted(found, key=lambda pair: pair[0]))


def split_name(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower().split()


def rewriter(url: str, model: str) -> Rewrite:
    client = Client(url, model)

    async def rewrite(words: Mapping[str, str], deletion: Deletion) -> dict[str, str]:
        """The versions that the model wrote and that can be used; those it spoiled are left out."""
        reply = await client.ask((PROMPTS / "rewrite.md").read_text().format(**words), max_tokens=4096)
        return {name: text for name, text in _versions(reply).items() if usable(name, text, deletion)}

    return rewrite


def _versions(reply: str) -> dict[str, str]:
    try:
        versions = json.loads(json_part(reply))
    except ValueError:
        return {}
    known = ("terse", "normal", "detailed")
    return {name: text.strip() for name, text in versions.items() if name in known and isinstance(text, str)}


def usable(name: str, text: str, deletion: Deletion) -> bool:
    """It names all that is asked for, is as short as it must be, and gives nothing away."""
    names = [key.simple for key in deletion.feature.targets]
    return (
        bool(text)
        and (name != "terse" or len(text) < TERSE_CHARACTERS)
        and all(target in text for target in names)
        and shared_code(text, deletion.removed) is None
    )
