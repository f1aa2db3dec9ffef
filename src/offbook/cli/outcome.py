"""What came out of measured runs, in sentences: the page of `offbook view` begins with them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from offbook.types import OffbookError

if TYPE_CHECKING:
    from offbook.evals.compare import Comparison
    from offbook.loop.resume import RolloutFiles
    from offbook.view.index import RunIndex

KEYS = ("invalid_per_100", "solved")
MAX_OTHERS = 3  # runs beside the first; more of them are read in a table
LEVEL = 0.05


def outcome(runs: list[RunIndex]) -> str:
    """Each run that was measured against the first one. Empty where there are not two of them."""
    from offbook.evals.compare import find_evaluation

    places = [(run.name, find_evaluation(run.root)) for run in runs]
    measured = [(name, one, one.results.stat().st_mtime_ns) for name, one in places if one and one.results.is_file()]
    return _compared(*measured) if 1 < len(measured) <= 1 + MAX_OTHERS else ""


@lru_cache(maxsize=4)  # the page asks every two seconds
def _compared(*measured: tuple[str, RolloutFiles, int]) -> str:
    from offbook.evals.compare import compare, load_evaluation

    try:
        compared = compare([load_evaluation(name, place) for name, place, _ in measured], KEYS)
    except (OffbookError, OSError):  # the page counts what cannot be read
        return ""
    said = (_said(compared, index) for index in range(len(compared.num_paired)))
    return " ".join(filter(None, said))


def _said(compared: Comparison, index: int) -> str:
    base, other = compared.evaluations[0], compared.evaluations[index + 1]
    values = [one.result.get(key) for one in (other, base) for key in KEYS]
    if None in values:  # a run that called nothing has no share of invalid calls
        return ""
    theirs, their_share, ours, our_share = values
    invalid_p, solved_p = (compared.differences[key][index].p for key in KEYS)
    paired = compared.num_paired[index]
    return (
        f"{other.name} makes {theirs:.1f} invalid calls per 100, {base.name} {ours:.1f}{_verdict(invalid_p)}. "
        f"They solve {their_share:.1%} and {our_share:.1%}{_verdict(solved_p)}. "
        + (f"Paired over {paired} tasks." if paired else "They have no task in common.")
    )


def _verdict(p: float | None) -> str:
    if p is None:
        return ""
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    return f" ({chance})" if p < LEVEL else f": not different ({chance})"
