"""Instructions in a model's words, held to the same rules as our own; and deletions that a model proposes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources

from offbook.client import Client, json_part
from offbook.copies import shared_code
from offbook.taskgen.instruct import TERSE_CHARACTERS
from offbook.taskgen.nouns import Deletion
from offbook.taskgen.proposals import Proposal
from offbook.taskgen.workshop import Workshop

PROMPTS = resources.files("offbook.taskgen") / "prompts"
MAX_SOURCE = 60_000  # characters of a file that a model is shown
Rewrite = Callable[[Mapping[str, str], Deletion], Awaitable[dict[str, str]]]
Propose = Callable[[Workshop, str, int], Awaitable[list[Proposal]]]


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
    names = [key.name.rpartition(".")[2] for key in deletion.feature.targets]
    return (
        bool(text)
        and (name != "terse" or len(text) < TERSE_CHARACTERS)
        and all(target in text for target in names)
        and shared_code(text, deletion.removed) is None
    )


def proposer(url: str, model: str) -> Propose:
    client = Client(url, model)

    async def propose(workshop: Workshop, source: str, count: int) -> list[Proposal]:
        """One for each of the files with the most code that tests enter."""
        found = []
        for path in _richest(workshop)[:count]:
            question = (PROMPTS / "propose.md").read_text().format(path=path, source=workshop.files[path])
            found.append(Proposal(source, diff_in(await client.ask(question, max_tokens=8192))))
        return found

    return propose


def _richest(workshop: Workshop) -> list[str]:
    weight: Counter[str] = Counter()
    for key in (workshop.map.tests_of.keys() & workshop.symbols.functions.keys()) - workshop.map.at_import:
        weight[key.path] += workshop.symbols.functions[key].statements
    shown = [path for path in weight if len(workshop.files[path]) <= MAX_SOURCE]
    return sorted(shown, key=lambda path: (-weight[path], path))


def diff_in(reply: str) -> str:
    """The diff of a reply, out of the fence that models like to put around it."""
    fenced = re.search(r"```(?:diff|patch)?\n(.*?)```", reply, re.S)
    text = fenced[1] if fenced else reply
    start = re.search(r"^(diff --git |--- )", text, re.M)
    return text[start.start() :] if start else text
