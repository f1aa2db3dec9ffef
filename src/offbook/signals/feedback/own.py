"""The rules of a run: the built-in ones and a user's own, functions of `Acts` from the files of `feedback.files`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from pathlib import Path

from offbook.core.plugins import functions_in
from offbook.signals.feedback.judged import MISTAKES
from offbook.signals.feedback.rules import RULES, Rule
from offbook.types import OffbookError


def rules_of(files: Sequence[str], chosen: Collection[str] = (), weighted: Collection[str] = ()) -> dict[str, Rule]:
    """By name. Whatever is wrong with one is said before the first rollout.

    `chosen` are the rules that a run goes by, all where there are none; what a judge finds can be `weighted` too.
    """
    rules = dict(RULES)
    for file in files:
        found = functions_in(Path(file), "feedback.files", "rules", rules)
        if not found or (chosen and found.keys().isdisjoint(chosen)):
            if not found:
                raise OffbookError(f"{file} has no functions; each rule is one")
            given = f"--feedback.rules {','.join([*chosen, *found])}"
            raise OffbookError(
                f"{file} has {', '.join(found)}; feedback.rules has to name one of them, as in {given}, "
                "or nothing at all, which is all rules: --feedback.rules '[]'"
            )
        for name, function in found.items():
            hint = " ".join((inspect.getdoc(function) or "").split())
            if not hint:
                raise OffbookError(f"the rule {name} of {file} needs a docstring, which is its hint")
            rules[name] = Rule(name, function, hint, file)
    for names, known in ((chosen, list(rules)), (weighted, [*rules, *MISTAKES.rules])):
        for name in names:
            if name not in known:
                raise OffbookError(f"there is no rule {name}; the rules are {', '.join(known)}")
    return rules
