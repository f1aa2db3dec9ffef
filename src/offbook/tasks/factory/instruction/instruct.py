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

from offbook.core.client import Client, json_part
from offbook.core.copies import shared_code
from offbook.tasks.factory.delete.symbols import Function, Symbols, is_public
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
CLOSINGS = (
    "Everything else should keep working as it does now.",
    "Please leave the rest of the behaviour as it is.",
    "The remaining tests must still pass.",
    "Do not change what other functions do.",
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
    public = [key for key in (*deletion.stubbed, *deletion.deleted) if is_public(key)]
    if deletion.level == "release" or not public or any(map(is_public, deletion.feature.targets)):
        return deletion.feature.targets
    return public


class _Writer:
    def __init__(self, feature: Feature, symbols: Symbols, deletion: Deletion, tests: Sequence[str]):
        self._feature = feature
        self._symbols = symbols
        self._deletion = deletion
        self._targets = [symbols.functions[key] for key in asked_for(deletion)]
        self._behaviours = behaviours(tests, self._targets)
        self._many = len(self._targets) > 1
        self._paths = _unique(f.key.path for f in self._targets)
        others = (symbols.functions[key] for key in feature.functions)
        self._others = [f for f in others if f not in self._targets and not f.nested]

    def _pick(self, what: str, choices: Sequence[str]) -> str:
        return choices[zlib.crc32(f"{self._feature.id}/{what}".encode()) % len(choices)]

    def _is_gone(self, function: Function) -> bool:
        return function.key in self._deletion.deleted

    def _request(self, what: str) -> str:
        """For the stubs and for what is gone, a sentence each."""
        stubs = [function for function in self._targets if not self._is_gone(function)]
        gone = [function for function in self._targets if self._is_gone(function)]
        return " ".join(self._request_for(what, some, some is gone) for some in (stubs, gone) if some)

    def _request_for(self, what: str, functions: Sequence[Function], is_gone: bool) -> str:
        names = listed([f"`{function.key.name}`" for function in functions])
        where = listed([f"`{path}`" for path in _unique(function.key.path for function in functions)])
        if is_gone:
            choices = [
                f"We need {names} back in {where}: the code was removed.",
                f"Please add {names} to {where} again; the code went missing.",
                f"This code base used to have {names}, in {where}. Bring the code back.",
                f"Add {names} to {where}, with the behaviour that was there before.",
            ]
        else:
            choices = [
                f"Please implement {names} in {where}; right now there is only NotImplementedError.",
                f"Can you fill in {names} in {where}? Only the signature is left, and NotImplementedError.",
                f"Implement {names} in {where}. At the moment a call raises NotImplementedError.",
                f"The code of {names} in {where} is missing: a call raises NotImplementedError. Write it again.",
            ]
        return self._pick(what, choices)

    def terse(self) -> str:
        text = self._request("terse")
        if len(text) >= TERSE_CHARACTERS:
            text = f"Please implement what is missing in {listed(self._paths)}."
        about = first_sentence(self._targets[0].docstring) or self._used_by(limit=2) or self._covered(limit=80)
        for more in ("" if self._many else about, self._also_missing()):
            if more and len(text) + 1 + len(more) < TERSE_CHARACTERS:
                text = f"{text} {more}"
        return text

    def normal(self) -> str:
        said = [f"{_kind(f)} {self._summary(f)}".strip() for f in self._targets]
        named = [f"- `{f.key.name}`: {one}" for f, one in zip(self._targets, said, strict=True)]
        about = "\n".join(named) if self._many else said[0]
        return self._whole(
            [self._request("opening"), about, self._also_missing(), self._used_by(3), self._covered(400)]
        )

    def detailed(self, documented: bool) -> str:
        modules = ((path, first_sentence(self._symbols.modules[path].docstring)) for path in self._paths)
        parts = [self._request("opening"), "\n".join(f"About `{path}`: {about}" for path, about in modules if about)]
        for function in self._targets:
            parts.append(f"## `{function.key.name}` in `{function.key.path}`")
            if self._is_gone(function):  # declared in full at the end
                parts.append(self._summary(function))
                continue
            parts.append(f"```python\n{function.signature}\n```")
            parts.append((documented and plain(function.docstring).strip()) or self._summary(function))
            if function.decorators:
                parts.append(f"Decorated with {listed([f'`{name}`' for name in _unique(function.decorators)])}.")
        parts += [self._also_missing(), self._used_by(limit=8), self._covered(limit=1200)]
        return self._whole(parts)

    def _whole(self, parts: Sequence[str]) -> str:
        return "\n\n".join(filter(None, [*parts, self._helpers(), self._pick("closing", CLOSINGS)])) + "\n"

    def _also_missing(self) -> str:
        """Stubs, which anyone finds, and public functions that are gone."""
        sentences = []
        stubs = [f for f in self._others if f.key in self._deletion.stubbed]
        gone = [f for f in self._others if f.public and self._is_gone(f)]
        for opening, functions in (("Stubs to be written as well", stubs), ("Removed, to be written as well", gone)):
            places = [f"`{f.key.name}` in `{f.key.path}`" for f in functions]
            if places:
                sentences.append(f"{opening}: {listed(places)}.")
        return " ".join(sentences)

    def _used_by(self, limit: int) -> str:
        own = {function.simple for function in self._targets}
        callers = (caller for function in self._targets for caller in self._symbols.callers[function.key])
        users = _unique(
            f"`{caller.name.replace('.<locals>', '')}`" + (f" in `{caller.path}`" if caller.simple in own else "")
            for caller in callers
            if caller not in self._feature.functions
        )
        if not users:
            return ""
        choices = ["use", "rely on", "depend on"] if len(users) > 1 else ["uses", "relies on", "depends on"]
        return f"{listed(users[:limit])} {self._pick('users', choices)} {'them' if self._many else 'it'}."

    def _covered(self, limit: int) -> str:
        """What the tests' names say, in so many characters; where that is not all, it is not called so."""
        if not self._behaviours:
            return ""
        told = self._behaviours[:1]
        for phrase in self._behaviours[1:]:
            if sum(map(len, told)) + len(phrase) <= limit:
                told.append(phrase)
        openings = ["The tests look at", "It will be checked for", "The tests cover"]
        if len(told) < len(self._behaviours):
            openings = ["Among other things the tests look at", "Among other things it will be checked for"]
        return f"{self._pick('tests', openings)}: {'; '.join(told)}."

    def _helpers(self) -> str:
        hidden = [f for f in self._others if self._is_gone(f) and not f.public]
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
        return first_sentence(function.docstring) if self._is_gone(function) else summary(function.docstring)


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
    own = {word for name in told for word in name}
    phrases = _unique(map(words_of, tests))
    found = [one for one in phrases if one.split() not in told and len(one) > 3 and not one.replace(" ", "").isdigit()]
    return sorted(found, key=lambda phrase: -len({*phrase.split()} & own))


def rewriter(url: str, model: str) -> Rewrite:
    client = Client(url, model)

    async def rewrite(words: Mapping[str, str], deletion: Deletion) -> dict[str, str]:
        """The versions that the model wrote and that can be used; those it spoiled are left out."""
        reply = await client.ask((PROMPTS / "rewrite.md").read_text().format(**words), max_tokens=4096)
        try:
            versions = json.loads(json_part(reply))
        except ValueError:
            return {}
        known = {name: str(versions[name]).strip() for name in ("terse", "normal", "detailed") if name in versions}
        return {name: text for name, text in known.items() if usable(name, text, deletion)}

    return rewrite


def usable(name: str, text: str, deletion: Deletion) -> bool:
    """It names all that is asked for, is as short as it must be, and gives nothing away."""
    is_named = all(key.simple in text for key in asked_for(deletion))
    is_short = name != "terse" or len(text) < TERSE_CHARACTERS
    return is_named and is_short and shared_code(text, deletion.removed) is None
