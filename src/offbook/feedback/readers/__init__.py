"""Rule readers: plain functions from a rollout to the messages that broke a rule, precise by construction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from offbook.feedback.readers.calls import malformed_arguments, repeated_call, unknown_tool, whole_file_read
from offbook.feedback.readers.editing import edit_not_applied, edited_tests, thinking_in_comments
from offbook.feedback.readers.reading import Exchange, Reading, read
from offbook.feedback.readers.style import camel_case_name, lint_introduced, missing_docstring
from offbook.feedback.readers.talking import asked_instead, final_names_nothing, final_too_long, finished_without_edit
from offbook.feedback.readers.testing import claimed_success, whole_suite_again
from offbook.types import Rollout, Target, Task

__all__ = ["RULES", "Exchange", "Reading", "read", "read_all", "read_rollout"]

# The more specific come first: a message that breaks several rules is a target for the first of them.
RULES: dict[str, Callable[[Reading], Iterator[Target]]] = {
    reader.__name__: reader
    for reader in (
        unknown_tool,
        malformed_arguments,
        whole_suite_again,
        repeated_call,
        edited_tests,
        edit_not_applied,
        thinking_in_comments,
        lint_introduced,
        camel_case_name,
        missing_docstring,
        whole_file_read,
        claimed_success,
        asked_instead,
        finished_without_edit,
        final_too_long,
        final_names_nothing,
    )
}


def read_all(rollout: Rollout, task: Task | None = None, rules: Collection[str] = ()) -> list[Target]:
    """Every rule that every message broke, in the order of messages; of `rules` only, where any are named."""
    reading = read(rollout, task)
    found = [target for rule, reader in RULES.items() if not rules or rule in rules for target in reader(reading)]
    return sorted(found, key=lambda target: (target.segment, target.message))  # stable: rules keep their order


def read_rollout(
    rollout: Rollout, max_targets: int, task: Task | None = None, rules: Collection[str] = ()
) -> list[Target]:
    """The first `max_targets` faulty messages, each for one rule: the first of RULES that it broke."""
    by_message: dict[tuple[int, int], Target] = {}
    for target in read_all(rollout, task, rules):
        by_message.setdefault((target.segment, target.message), target)
    return list(by_message.values())[:max_targets]
