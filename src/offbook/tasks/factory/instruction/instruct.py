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
from offbook.tasks.factory.types import Deletion, FunctionKey

PROMPTS = resources.files("offbook.tasks.factory") / "prompts"
TERSE_CHARACTERS = SUMMARY_CHARACTERS = 400
MAX_USERS = 4
# Where words end in a docstring: a field, a section, a list, an example.
FIELDS = re.compile(
    r"\n\s*(?:[:@](?:param|arg|key|return|rtype|raise|type|yield)\w*\b|>>>|\.\. |[-*] |"
    r"(?:Args?|Arguments|Parameters|Inputs|Returns?|Raises|Yields|Examples?|See Also|Notes?|Usage)(?::|\n\s*-{3,}))",
    re.IGNORECASE,
)
ASKING_FOR_STUBS = (
    "Please implement {names} in {where}; right now there is only NotImplementedError.",
    "Can you fill in {names} in {where}? Only the signature is left, and NotImplementedError.",
    "Implement {names} in {where}. At the moment a call raises NotImplementedError.",
    "The code of {names} in {where} is missing: a call raises NotImplementedError. Write it again.",
)
ASKING_FOR_GONE = (
    "We need {names} back in {where}: the code was removed.",
    "Please add {names} to {where} again; the code went missing.",
    "This code base used to have {names}, in {where}. Bring the code back.",
    "Add {names} to {where}, with the behaviour that was there before.",
)
CLOSINGS = (
    "Everything else should keep working as it does now.",
    "Please leave the rest of the behaviour as it is.",
    "The remaining tests must still pass.",
)
Rewrite = Callable[[Mapping[str, str], Deletion], Awaitable[dict[str, str]]]


def instructions(symbols: Symbols, deletion: Deletion, tests: Sequence[str]) -> dict[str, str]:
    """`terse`, `normal` and `detailed`. `tests` are those that need the feature; only their words are used.

    What stands nowhere in the tree any more is not said here, but by `Needs.stated`.
    """
    targets = [symbols.functions[key] for key in asked_for(deletion)]
    paths = listed(_unique(f"`{function.key.path}`" for function in targets))
    every = [symbols.functions[key] for key in deletion.feature.functions]
    others = [function for function in every if function not in targets and not function.nested]
    stubs = [function for function in others if function.key in deletion.stubbed]
    gone = [function for function in others if function.key in deletion.deleted]
    also = _places("Stubs to be written as well", stubs)
    also = f"{also} {_places('Removed, to be written as well', [one for one in gone if one.public])}".strip()
    users = _used_by(symbols, deletion, targets)
    found = behaviours(tests, targets)
    terse = _request("terse", targets, deletion)
    if len(terse) >= TERSE_CHARACTERS:
        terse = f"Please implement what is missing in {paths}."
    about = first_sentence(targets[0].docstring) or users or _covered(found, 80)
    for more in ("" if len(targets) > 1 else about, also):
        if more and len(terse) + 1 + len(more) < TERSE_CHARACTERS:
            terse = f"{terse} {more}"
    opening = _request("opening", targets, deletion)
    sayings = [f"{_kind(function)} {_summary(function, deletion)}".strip() for function in targets]
    if len(targets) > 1:
        sayings = [f"- `{one.key.name}`: {saying}" for one, saying in zip(targets, sayings, strict=True)]
    closing = ["Private helpers are gone as well; how you divide the work is up to you."] if gone else []
    closing.append(_pick(deletion, "closing", CLOSINGS))
    normal = [opening, "\n".join(sayings), also, users, _covered(found, 400), *closing]
    detailed = [opening, *(_detailed(function, deletion) for function in targets)]
    detailed += [also, users, _covered(found, 1200), *closing]
    return {"terse": terse, "normal": f"{_joined(normal)}\n", "detailed": f"{_joined(detailed)}\n"}


def complete(texts: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Every length with what has to be stated besides the request."""
    more = needs.stated()
    return {name: f"{text.rstrip()}\n\n{more}\n" if more else text for name, text in texts.items()}


def asked_for(deletion: Deletion) -> Sequence[FunctionKey]:
    """What a request names: the targets, or where all of these are private the public functions that went with them."""
    public = [key for key in (*deletion.stubbed, *deletion.deleted) if is_public(key)]
    return (
        deletion.feature.targets
        if any(map(is_public, deletion.feature.targets))
        else public or deletion.feature.targets
    )


def _pick(deletion: Deletion, what: str, choices: Sequence[str]) -> str:
    return choices[zlib.crc32(f"{deletion.feature.id}/{what}".encode()) % len(choices)]


def _request(what: str, targets: Sequence[Function], deletion: Deletion) -> str:
    """For the stubs and for what is gone, a sentence each."""
    sentences = []
    for choices, is_gone in ((ASKING_FOR_STUBS, False), (ASKING_FOR_GONE, True)):
        functions = [function for function in targets if (function.key in deletion.deleted) == is_gone]
        if functions:
            names = listed([f"`{function.key.name}`" for function in functions])
            where = listed(_unique(f"`{function.key.path}`" for function in functions))
            sentences.append(_pick(deletion, what, choices).format(names=names, where=where))
    return " ".join(sentences)


def _places(opening: str, functions: Sequence[Function]) -> str:
    places = [f"`{function.key.name}` in `{function.key.path}`" for function in functions]
    return f"{opening}: {listed(places)}." if places else ""


def _detailed(function: Function, deletion: Deletion) -> str:
    """What is gone is declared in full at the end."""
    title = f"## `{function.key.name}` in `{function.key.path}`"
    documented = plain(function.docstring).strip()
    if function.key in deletion.deleted:
        return _joined([title, _summary(function, deletion)])
    if shared_code(documented, deletion.removed):  # an example may be a line of the body
        documented = _summary(function, deletion)
    return _joined([title, f"```python\n{function.signature}\n```", documented])


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts))


def _used_by(symbols: Symbols, deletion: Deletion, targets: Sequence[Function]) -> str:
    callers = {caller: None for function in targets for caller in symbols.callers[function.key]}
    outside = [caller for caller in callers if caller not in deletion.feature.functions]
    users = [f"`{caller.name.replace('.<locals>', '')}` in `{caller.path}`" for caller in outside]
    return f"Used by {listed(users[:MAX_USERS])}." if users else ""


def _covered(found: Sequence[str], limit: int) -> str:
    """What the tests' names say, in so many characters."""
    told: list[str] = []
    for phrase in found:
        if not told or sum(map(len, told)) + len(phrase) <= limit:
            told.append(phrase)
    return f"Among other things the tests look at: {'; '.join(told)}." if told else ""


def _summary(function: Function, deletion: Deletion) -> str:
    """Of what is gone the whole docstring follows. An example may be a line of the body."""
    said = summary(function.docstring)
    is_short = function.key in deletion.deleted or shared_code(said, deletion.removed)
    return first_sentence(function.docstring) if is_short else said


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


def listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


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


def behaviours(tests: Iterable[str], targets: Iterable[Function]) -> list[str]:
    """The words of test names. A name that only repeats the target says nothing."""
    names = {" ".join(split_name(function.simple)) for function in targets}
    return [
        words for words in _unique(map(words_of, tests)) if words not in names and len(words.strip("0123456789 ")) > 3
    ]


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
