"""More work than the task needs. What it needs is shown by the others of the group: those that solved it with little.

Left out: what was looked at because of a failing test, needed or not; calls that change something; and messages that
are long by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from offbook.signals.trajectory import Acts, At, Exchange
from offbook.types import Rollout

TIMES = 3.0  # the tokens of any lean sibling
MIN_SOLVED = 2  # siblings that solved it: one alone may have been lucky
FINDING = frozenset({"search_codebase", "list_dir"})
Look = tuple[str, ...]  # what a call looks at; which part of it and for which words does not matter


def more_than_needed(acts: Acts, times: float = TIMES) -> Iterator[tuple[At, str]]:
    """A rollout that spent over three times the tokens of its lean siblings, at the first call that was not needed.

    Up to a place in its middle a rollout is judged by what all of it spent (harness/again.py keeps that), so a look can
    ask whether another message in that place would have been needed.
    """
    lean = _lean(acts)
    if not lean or spent(acts.rollout) <= times * max(map(spent, lean)):
        return
    for exchange, why in unneeded(acts):
        tokens = f"{spent(acts.rollout)} tokens, lean siblings at most {max(map(spent, lean))}"
        yield exchange.at, f"{exchange.call.name}: {why}; {tokens}"
        return


def unneeded(acts: Acts) -> Iterator[tuple[Exchange, str]]:
    """Calls that change nothing and that a rollout of this task can do without, with the reason: no lean sibling looked
    at that, or it was looked at already and nothing has changed since. Nothing where too few siblings solved it.

    After a failing test run, and right after a call that failed, looking elsewhere has a reason.
    """
    needed = {_look(one) for sibling in _lean(acts) for one in Acts(sibling, acts.task).exchanges}
    seen: set[str] = set()
    segment, failing, failed = 0, False, False
    for exchange in acts.exchanges if needed else ():
        look = _look(exchange)
        call = json.dumps([exchange.call.name, exchange.call.arguments], sort_keys=True, default=repr)
        if exchange.may_write or exchange.segment != segment:  # what a summary left behind may be looked up again
            seen, segment = set(), exchange.segment
        if look and call in seen:
            yield exchange, "the same call as before, and nothing has changed since"
        elif look and look not in needed and not failing and not failed:
            yield exchange, "no lean sibling looked at that"
        if exchange.went_well:
            seen.add(call)
        if exchange.tests:
            failing = bool(exchange.tests.failed)
        failed = not exchange.went_well


def spent(rollout: Rollout) -> int:
    """What it wrote and what it asked tools for."""
    return rollout.usage.sampled_tokens + rollout.usage.output_tokens


def _lean(acts: Acts) -> list[Rollout]:
    """The half of the siblings that solved the task, and with the fewest tokens. Other agents' tokens are not known."""
    solved = sorted((one for one in acts.siblings if one.solved and spent(one)), key=spent)
    return solved[: (len(solved) + 1) // 2] if len(solved) >= MIN_SOLVED else []


def _look(exchange: Exchange) -> Look:
    """Empty for what is no look: an edit, the end, tools that are not known."""
    if not exchange.ran or exchange.may_write:
        return ()
    if exchange.tests:
        return ("tests",)
    if exchange.kind == "read":
        return ("read", exchange.path)
    if exchange.command and not exchange.command.watches:
        programs = sorted({words[0] for words in exchange.simple if words})
        return ("read", *exchange.command.shown) if exchange.command.shown else ("command", *programs)
    return (exchange.tool,) if exchange.tool in FINDING else ()
