"""Rule readers: plain functions from a rollout to the messages that broke a rule, precise by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from offbook.types import Message, Rollout, Target, ToolCall, is_test_file


@dataclass(frozen=True, slots=True)
class Exchange:
    """One call of the model's and the answer to it."""

    segment: int
    message: int
    call: ToolCall
    answer: Message


def exchanges(rollout: Rollout) -> Iterator[Exchange]:
    for number, segment in enumerate(rollout.segments):
        for index, message in enumerate(segment.messages):
            answers = segment.messages[index + 1 : index + 1 + len(message.calls)]
            for call, answer in zip(message.calls, answers, strict=False):  # the last call of all may have no answer
                yield Exchange(number, index, call, answer)


def unknown_tool(rollout: Rollout) -> Iterator[Target]:
    """A call to a tool that this task does not have: invented, or removed."""
    for exchange in exchanges(rollout):
        if exchange.answer.status == "unknown_tool":
            yield _target(rollout, exchange, "unknown_tool", exchange.call.name)


def malformed_arguments(rollout: Rollout) -> Iterator[Target]:
    """A call that is not valid JSON or whose arguments are not the tool's."""
    for exchange in exchanges(rollout):
        if exchange.answer.status == "malformed":
            yield _target(rollout, exchange, "malformed_arguments", exchange.answer.text)


def repeated_call(rollout: Rollout) -> Iterator[Target]:
    """The same call with the same answer as before: nothing was learned and nothing changed."""
    seen: set[tuple[str, str, str]] = set()
    for exchange in exchanges(rollout):
        if exchange.answer.status != "ok":
            continue
        key = (exchange.call.name, repr(sorted(exchange.call.arguments.items())), exchange.answer.text)
        if key in seen:
            yield _target(rollout, exchange, "repeated_call", exchange.call.name)
        seen.add(key)


def edited_tests(rollout: Rollout) -> Iterator[Target]:
    """An edit of a test, whether or not it applied."""
    for exchange in exchanges(rollout):
        path = exchange.call.arguments.get("path")
        if exchange.call.name == "edit_file" and isinstance(path, str) and is_test_file(path):
            yield _target(rollout, exchange, "edited_tests", path)


RULES: dict[str, Callable[[Rollout], Iterator[Target]]] = {
    reader.__name__: reader for reader in (unknown_tool, malformed_arguments, repeated_call, edited_tests)
}


def read_rollout(rollout: Rollout, max_targets: int) -> list[Target]:
    """The first `max_targets` faulty messages, each for one rule: the first of RULES that it broke."""
    by_message: dict[tuple[int, int], Target] = {}
    for reader in RULES.values():
        for target in reader(rollout):
            by_message.setdefault((target.segment, target.message), target)
    return [by_message[place] for place in sorted(by_message)][:max_targets]


def _target(rollout: Rollout, exchange: Exchange, rule: str, evidence: str) -> Target:
    return Target(rollout.id, exchange.segment, exchange.message, rule, evidence)
