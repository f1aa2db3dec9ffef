"""Two versions side by side: a test that may be looked at after every user, and stopped whenever it says something.

Users are given to a version by a hash, so the n-th user of one and the n-th user of the other make a pair, and under
"no difference" a pair's difference has mean 0 whatever came before. Betting against that, a fortune of 1 stays a fair
game, and that it ever reaches 1/alpha has at most the chance alpha (Ville's inequality; Waudby-Smith and Ramdas 2024).
Each direction gets half of alpha. The fortune is a mean over stakes from small to large, so none has to be guessed.

Of a user the first session counts: later ones tell of the same person again, and a test that took them for new ones
would find differences that are not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

import numpy as np

from offbook.live.sessions import Session

STAKES = np.linspace(0.05, 0.95, 19)  # of the fortune, at the largest difference that there can be
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Verdict:
    """`other` against `base`, by the reward."""

    verdict: Literal["better", "worse", "undecided"]
    pairs: int
    difference: float | None  # of the means, `other` less `base`, over the pairs that were looked at
    fortune_better: float  # the highest so far of whoever bets that it is better, or worse
    fortune_worse: float
    needed: float  # that one of them has to reach
    later_sessions: int = 0  # of users who had one before: not counted
    detectable: float | None = None  # a difference that so many pairs would show with a chance of 0.8


def fortunes(differences_N: Sequence[float], most: float) -> list[float]:
    """Of whoever bets that differences are above 0, after each of them; none is further from 0 than `most`."""
    if any(abs(one) > most + 1e-9 for one in differences_N):
        raise ValueError(f"a difference is larger than {most:g}")
    wealth_K, found = np.ones(len(STAKES)), []
    for one in differences_N:
        wealth_K = wealth_K * (1 + STAKES * one / most)
        found.append(float(wealth_K.mean()))
    return found


def judge_pairs(pairs: Sequence[tuple[float, float]], most: float, alpha: float, later: int = 0) -> Verdict:
    """Pairs of rewards, base first, in the order in which they came. What comes after a verdict does not change it."""
    differences, needed = [other - base for base, other in pairs], 2 / alpha
    better, worse = fortunes(differences, most), fortunes([-one for one in differences], most)
    first = {name: _first(each, needed) for name, each in (("better", better), ("worse", worse))}
    decided = min(first, key=lambda name: first[name])
    stop = first[decided]
    seen = differences[: stop + 1] if stop < len(pairs) else differences
    return Verdict(
        decided if stop < len(pairs) else "undecided",  # type: ignore[arg-type]
        len(seen),
        fmean(seen) if seen else None,
        max([1.0, *better[: len(seen)]]),
        max([1.0, *worse[: len(seen)]]),
        needed,
        later,
        detectable(differences, alpha),
    )


def _first(fortune_N: Sequence[float], needed: float) -> int:
    return next((place for place, one in enumerate(fortune_N) if one >= needed), len(fortune_N))


def detectable(differences_N: Sequence[float], alpha: float) -> float | None:
    """By a test at the end alone; one that may stop at any time needs more."""
    if len(differences_N) < 2:
        return None
    reach = NormalDist().inv_cdf(1 - alpha / 2) + NormalDist().inv_cdf(POWER)
    return reach * stdev(differences_N) / math.sqrt(len(differences_N))


def span(weights: dict[str, float]) -> float:
    """How far two rewards can be apart: thumbs go both ways, every other part one."""
    return sum(weights.values()) + weights.get("thumbs", 0.0)


def first_of_each_user(sessions: Sequence[Session]) -> tuple[list[Session], int]:
    """In the order in which they ended, and how many others there are."""
    first: dict[str, Session] = {}
    for one in sessions:
        first.setdefault(one.user, one)
    return list(first.values()), len(sessions) - len(first)


def compare_versions(
    sessions: Sequence[Session], base: int, other: int, weights: dict[str, float], alpha: float
) -> Verdict:
    """By all sessions of users who were given one of the two. They are scored."""
    (ours, more), (theirs, and_more) = (
        first_of_each_user([one for one in sessions if one.version == version and one.arm != "shadow"])
        for version in (base, other)
    )
    pairs = [(a.rollout.reward.total, b.rollout.reward.total) for a, b in zip(ours, theirs, strict=False)]
    return judge_pairs(pairs, span(weights), alpha, more + and_more)


def concurrent(sessions: Sequence[Session], base: int, other: int) -> list[Session]:
    """Of the time in which both versions were served, and of users who then had one of them alone: what a comparison
    outside of a trial may use. Another time has other requests."""
    seen = [one for one in sessions if one.version in (base, other) and one.arm != "shadow"]
    times = [[one.at for one in seen if one.version == version] for version in (base, other)]
    if not all(times):
        return []
    since, until = max(map(min, times)), min(map(max, times))
    seen = [one for one in seen if since <= one.at <= until]
    mixed = set.intersection(*({one.user for one in seen if one.version == version} for version in (base, other)))
    return [one for one in seen if one.user not in mixed]


def compare_shadow(
    sessions: Sequence[Session], candidate: int, weights: dict[str, float], alpha: float, names: Sequence[str]
) -> Verdict:
    """The same requests answered by both, of which the user saw one: by the parts that need no user, and both have."""
    pairs = []
    for one in sessions:
        if one.arm == "shadow" and one.version == candidate:
            both = one.shown, one.rollout.reward.parts
            shown, unseen = (
                sum(weights[name] * side[name] for name in names if all(name in each for each in both)) for side in both
            )
            pairs.append((shown, unseen))
    return judge_pairs(pairs, sum(weights[name] for name in names), alpha)
