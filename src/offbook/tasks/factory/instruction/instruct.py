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
from itertools import accumulate

from offbook.core.client import Client, json_part
from offbook.core.copies import shared_code
from offbook.tasks.factory.delete.symbols import Function, Symbols
from offbook.tasks.factory.instruction.examples import split_name, words_of
from offbook.tasks.factory.instruction.needs import Needs
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey

PROMPTS = resources.files("offbook.tasks.factory") / "prompts"
TERSE_CHARACTERS = SUMMARY_CHARACTERS = 400
MAX_HELPERS = 3  # that are named
# Where words end in a docstring: a field, a section, a list, an example.
FIELDS = re.compile(
    r"\n\s*(?:[:@](?:param|arg|key|return|rtype|raise|type|yield)\w*\b|>>>|\.\. |[-*] |"
    r"(?:Args?|Arguments|Parameters|Inputs|Returns?|Raises|Yields|Examples?|See Also|Notes?|Usage)(?::|\n\s*-{3,}))",
    re.IGNORECASE,
)
Rewrite = Callable[[Mapping[str, str], Deletion], Awaitable[dict[str, str]]]


def instructions(feature: Feature, symbols: Symbols, deletion: Deletion, tests: Sequence[str]) -> dict[str, str]:
    """`terse`, `normal` and `detailed`. `tests` are those that need the feature; only their words are used.

    What stands nowhere in the tree any more is not said here, but by `Needs.stated`.
    """
    writer = _Writer(feature, symbols, deletion, tests)
    texts = {"terse": writer.terse(), "normal": writer.normal(), "detailed": writer.detailed(documented=True)}
    if shared_code(texts["detailed"], deletion.removed):  # an example in the docstring may be a line of the body
        texts["detailed"] = writer.detailed(documented=False)
    return texts


def complete(texts: Mapping[str, str], needs: Needs, removed: Mapping[str, str]) -> dict[str, str]:
    """Every length with what has to be stated besides the request."""
    more = needs.stated()
    if shared_code(more, removed):
        more = needs.stated(with_values=False)
    return {name: f"{text.rstrip()}\n\n{more}\n" if more else text for name, text in texts.items()}


def asked_for(deletion: Deletion) -> Sequence[FunctionKey]:
    """What a request names: the targets, or where all of these are private the public functions that went with them."""
    public = [key for key in (*deletion.stubbed, *deletion.deleted) if _is_public(key)]
    if deletion.level == "release" or not public or any(map(_is_public, deletion.feature.targets)):
        return deletion.feature.targets
    return public


def _is_public(key: FunctionKey) -> bool:
    parts = key.name.split(".")
    return "<locals>" not in parts and (key.dunder or not any(part.startswith("_") for part in parts))


class _Writer:
    def __init__(self, feature: Feature, symbols: Symbols, deletion: Deletion, tests: Sequence[str]):
        self._feature = feature
        self._symbols = symbols
        self._deletion = deletion
        self._targets = [symbols.functions[key] for key in asked_for(deletion)]
        self._gone = [f for f in self._targets if f.key in deletion.deleted]
        self._behaviours = behaviours(tests, self._targets)
        self._many = len(self._targets) > 1
        self._names = listed([f"`{f.key.name}`" for f in self._targets])
        self._paths = _unique(f.key.path for f in self._targets)

    def _pick(self, what: str, choices: Sequence[str]) -> str:
        return choices[zlib.crc32(f"{self._feature.id}/{what}".encode()) % len(choices)]

    def terse(self) -> str:
        names = self._names
        many = self._many
        where = listed(self._paths)
        it = _n(many, "it", "them")
        them = _n(many, "its body", "their bodies")
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
        about = "" if many else first_sentence(self._targets[0].docstring)
        summary = "" if many else about or self._used_by(limit=2) or self._covered(limit=80)
        for more in (summary, self._also_missing()):
            if more and len(text) + 1 + len(more) < TERSE_CHARACTERS:
                text = f"{text} {more}"
        return text

    def normal(self) -> str:
        parts = [self._opening()]
        if not self._many:
            parts.append(f"{_kind(self._targets[0])} {self._summary(self._targets[0])}".strip())
        else:
            parts.append("\n".join(f"- `{f.key.name}`: {_kind(f)} {self._summary(f)}".strip() for f in self._targets))
        parts += [self._also_missing(), self._used_by(limit=3), self._covered(limit=400)]
        return self._whole(parts)

    def detailed(self, documented: bool) -> str:
        parts = [self._opening(), self._about_modules()]
        for function in self._targets:
            parts.append(f"## `{function.key.name}` in `{function.key.path}`")
            if function in self._gone:  # declared in full at the end
                parts.append(self._summary(function))
                continue
            parts.append(f"```python\n{function.signature}\n```")
            parts.append((documented and plain(function.docstring).strip()) or self._summary(function))
            if function.decorators:
                parts.append(f"Decorated with {listed([f'`{name}`' for name in _unique(function.decorators)])}.")
        if others := self._named_others():
            lines = (f"- `{f.key.name}` in `{f.key.path}`. {_kind(f)} {self._summary(f)}".strip() for f in others)
            parts.append("## Also missing\n\n" + "\n".join(lines))
        parts += [self._used_by(limit=8), self._covered(limit=1200)]
        return self._whole(parts)

    def _whole(self, parts: list[str]) -> str:
        return "\n\n".join(filter(None, [*parts, self._helpers(), self._closing()])) + "\n"

    def _opening(self) -> str:
        if self._gone and len(self._gone) < len(self._targets):
            stubs = [function for function in self._targets if function not in self._gone]
            return f"{self._opening_of(stubs, gone=False)} {self._opening_of(self._gone, gone=True)}"
        return self._opening_of(self._targets, gone=bool(self._gone))

    def _opening_of(self, functions: Sequence[Function], gone: bool) -> str:
        names = listed([f"`{f.key.name}`" for f in functions])
        many = len(functions) > 1
        files = listed([f"`{path}`" for path in _unique(f.key.path for f in functions)])
        it = _n(many, "it", "them")
        if gone:
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

    def _named_others(self) -> list[Function]:
        """Stubs, which anyone finds, and public functions that are gone."""
        stubbed = self._deletion.stubbed
        deleted = self._deletion.deleted
        return [f for f in self._others() if not f.nested and (f.key in stubbed or (f.public and f.key in deleted))]

    def _also_missing(self) -> str:
        sentences = []
        for state, opening in (("stub", "Stubs to be written as well"), ("gone", "Removed, to be written as well")):
            by_file: dict[str, list[str]] = {}
            for function in self._named_others():
                if (function.key in self._deletion.deleted) == (state == "gone"):
                    by_file.setdefault(function.key.path, []).append(f"`{function.key.name}`")
            if by_file:
                places = "; ".join(f"{listed(names)} in `{path}`" for path, names in by_file.items())
                sentences.append(f"{opening}: {places}.")
        return " ".join(sentences)

    def _used_by(self, limit: int) -> str:
        own = {function.simple for function in self._targets}
        users = _unique(
            f"`{name}`" + (f" in `{caller.path}`" if caller.simple in own else "")
            for function in self._targets
            for caller in self._users(function)
            if (name := caller.name.replace(".<locals>", ""))
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
        """What the tests' names say, in so many characters; where that is not all, it is not called so."""
        so_far = [*accumulate(map(len, self._behaviours))]
        if not so_far:
            return ""
        whole = ["The tests look at", "It will be checked for", "The tests cover"]
        cut = ["Among other things the tests look at", "Among other things it will be checked for"]
        opening = self._pick("tests", whole if so_far[-1] <= limit else cut)
        num_told = sum(length <= (limit if so_far[-1] <= limit else limit / 2) for length in so_far)
        return f"{opening}: {'; '.join(self._behaviours[: max(1, num_told)])}."

    def _helpers(self) -> str:
        hidden = [f for f in self._others() if f.key in self._deletion.deleted and not f.nested and not f.public]
        if not hidden:
            return ""
        names = "" if len(hidden) > MAX_HELPERS else f" ({', '.join(f'`{f.key.name}`' for f in hidden)})"
        return self._pick("helpers", [
            f"Private helpers are gone as well{names}; how you divide the work is up to you.",
            f"The helper functions behind this were deleted too{names}. You need not write the same ones again.",
            f"Internal helpers went with it{names}, so choose your own structure.",
        ])  # fmt: skip

    def _summary(self, function: Function) -> str:
        """Of what is gone the whole docstring follows."""
        return first_sentence(function.docstring) if function in self._gone else summary(function.docstring)

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


def plain(text: str) -> str:
    """Without reStructuredText roles and doubled code marks."""
    return re.sub(r":\w+(?::\w+)?:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def summary(docstring: str) -> str:
    """What a docstring says in words, before its fields, sections and examples: the first paragraph, or some."""
    told = ""
    for paragraph in FIELDS.split(f"\n{plain(docstring).strip()}")[0].split("\n\n"):
        words = " ".join(paragraph.split()).rstrip(":;, ")
        if told and len(told) + len(words) > SUMMARY_CHARACTERS:
            break
        ending = "" if not words or words.endswith((".", "!", "?")) else "."
        told = f"{told} {words[:1].upper()}{words[1:]}{ending}".strip()
    return told


def first_sentence(docstring: str) -> str:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", summary(docstring.strip().partition("\n\n")[0]))[0]


def behaviours(tests: Sequence[str], targets: Sequence[Function]) -> list[str]:
    """The words of test names, those with words of the target first. A name that only repeats it says nothing."""
    told = [split_name(function.simple) for function in targets]
    found = []
    for test in tests:
        words = words_of(test).split()
        if words not in told and len(" ".join(words)) > 3 and not "".join(words).isdigit():
            found.append((-len({*words} & {word for name in told for word in name}), " ".join(words)))
    return _unique(phrase for _, phrase in sorted(found, key=lambda pair: pair[0]))


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
    names = [key.simple for key in asked_for(deletion)]
    return (
        bool(text)
        and (name != "terse" or len(text) < TERSE_CHARACTERS)
        and all(target in text for target in names)
        and shared_code(text, deletion.removed) is None
    )
