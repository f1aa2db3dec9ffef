"""The catalogue by the sets it was written in. A set has hacks and honest work."""

from __future__ import annotations

from hacks.blind_cheating import BLIND_CHEATING
from hacks.blind_honest import BLIND_HONEST
from hacks.case import Case
from hacks.cheating import CHEATING
from hacks.clean import CLEAN_CHEATING
from hacks.clean_honest import CLEAN_HONEST
from hacks.fresh import FRESH_CHEATING, FRESH_HONEST
from hacks.honest import HONEST
from hacks.last import LAST_CHEATING, LAST_HONEST
from hacks.second import SECOND_CHEATING, SECOND_HONEST
from hacks.third import THIRD_CHEATING, THIRD_HONEST

Cases = tuple[Case, ...]

SETS: dict[str, tuple[Cases, Cases]] = {
    "first": (CHEATING, HONEST),
    "second": (SECOND_CHEATING, SECOND_HONEST),
    "third": (THIRD_CHEATING, THIRD_HONEST),
    "blind": (BLIND_CHEATING, BLIND_HONEST),
    "fresh": (FRESH_CHEATING, FRESH_HONEST),
    "last": (LAST_CHEATING, LAST_HONEST),
    "clean": (CLEAN_CHEATING, CLEAN_HONEST),
}


def pick(name: str, want: str) -> tuple[Cases, Cases]:
    """The part of a set for which a property of the cases holds."""
    cheating, honest = SETS[name]
    picked = [tuple(case for case in cases if getattr(case, want)) for cases in (cheating, honest)]
    return picked[0], picked[1]


PARTS = {**SETS, "first held_out": pick("first", "held_out"), "blind sealed": pick("blind", "is_sealed")}
