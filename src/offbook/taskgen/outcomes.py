"""What became of a repository's candidates: .factory/NAME/outcomes.jsonl, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from offbook.taskgen.make import Outcome

_OUTCOME = TypeAdapter(Outcome)


def record(path: Path, outcome: Outcome) -> None:
    """In one write, so that lines of two processes do not run into each other."""
    with open(path, "ab", buffering=0) as file:
        file.write(_OUTCOME.dump_json(outcome) + b"\n")


def earlier_outcomes(path: Path) -> dict[tuple[str, str], Outcome]:
    """What became of candidates in earlier calls, by id and level asked for, so that none is tried twice."""
    found = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValidationError):  # the last line of a call that was killed
            outcome = _OUTCOME.validate_json(line)
            found[outcome.id, outcome.asked or outcome.level] = outcome
    return found


def funnel(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many candidates were refused for which reason, the most frequent first."""
    return dict(Counter(outcome.refused for outcome in outcomes if outcome.refused).most_common())
