"""Rules: plain functions from what an agent did to the messages that broke one, precise by construction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from offbook.acts import Acts, At
from offbook.feedback.rules.calls import malformed_arguments, repeated_call, unknown_tool, whole_file_read
from offbook.feedback.rules.editing import edit_not_applied, edited_tests, thinking_in_comments
from offbook.feedback.rules.style import camel_case_name, lint_introduced, missing_docstring
from offbook.feedback.rules.talking import asked_instead, final_names_nothing, final_too_long, finished_without_edit
from offbook.feedback.rules.testing import claimed_success, whole_suite_again
from offbook.types import Rollout, Target, Task

SHOWN = 160  # characters of what shows a fault
Rule = Callable[[Acts], Iterator[tuple[At, str]]]  # the faulty messages, and what shows it

# The more specific come first: a message that breaks several rules is a target for the first of them.
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
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
    acts = Acts(rollout, task)
    found = [
        Target(rollout.id, *at, name, _shown(evidence))
        for name, rule in RULES.items()
        if not rules or name in rules
        for at, evidence in rule(acts)
    ]
    return sorted(found, key=lambda target: (target.segment, target.message))  # stable: rules keep their order


def read_rollout(
    rollout: Rollout, max_targets: int, task: Task | None = None, rules: Collection[str] = ()
) -> list[Target]:
    """The first `max_targets` faulty messages, each for one rule: the first of RULES that it broke."""
    by_message: dict[At, Target] = {}
    for target in read_all(rollout, task, rules):
        by_message.setdefault((target.segment, target.message), target)
    return list(by_message.values())[:max_targets]


def _shown(text: str) -> str:
    text = " ".join(text[: 4 * SHOWN].split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
