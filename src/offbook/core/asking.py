"""Questions that are answered by a small JSON object, so that small models will do: its schema goes along, and a
reply that cannot be used is asked for once more, with what was wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offbook.core.client import json_part
from offbook.types import PromptTooLong

Turns = Sequence[tuple[str, str]]  # role and text
Schema = dict[str, Any]
AGAIN = "That cannot be used: {problem}. Answer once more, with the JSON object alone."


class Answers(Protocol):
    """A model: behind a URL, or here. `schema` bounds the reply where the model's server can do that."""

    async def ask(self, question: str | Turns, *, schema: Schema | None = None) -> str: ...


def object_of(**properties: Schema) -> Schema:
    """The schema of an object with all of these, in this order."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def loaded(reply: str) -> Any:
    """The JSON in a reply, also in a fence or between words; None if there is none."""
    try:
        return json.loads(json_part(reply, "[{", "]}"))
    except (ValueError, RecursionError):
        return None


async def ask_json(model: Answers, question: str, schema: Schema, problem: Callable[[Any], str]) -> tuple[Any, str]:
    """The reply's JSON and what is wrong with it, if anything. `problem` is given None where there is no JSON."""
    first = await model.ask(question, schema=schema)
    value = loaded(first)
    if not (wrong := problem(value)):
        return value, ""
    turns = [("user", question), ("assistant", first or "(nothing)"), ("user", AGAIN.format(problem=wrong))]
    try:
        value = loaded(await model.ask(turns, schema=schema))
    except PromptTooLong:  # the question itself was not
        return value, wrong
    return value, problem(value)
