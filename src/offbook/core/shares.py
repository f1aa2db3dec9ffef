"""How sure a share of some trials is."""

import math
from statistics import NormalDist

LEVEL = 0.95


def wilson(num_hits: float, num_trials: int) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927)."""
    share, z2 = num_hits / num_trials, NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    middle = (share + z2 / (2 * num_trials)) / (1 + z2 / num_trials)
    reach = math.sqrt(z2 * (share * (1 - share) + z2 / (4 * num_trials)) / num_trials) / (1 + z2 / num_trials)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def rise(first_hits: int, second_hits: int, num_trials: int) -> tuple[float, float]:
    """The interval of the second share less the first, of as many trials each that have nothing to do with one another
    (Newcombe 1998, from the two score intervals)."""
    first, second = first_hits / num_trials, second_hits / num_trials
    (low_1, high_1), (low_2, high_2) = (wilson(hits, num_trials) for hits in (first_hits, second_hits))
    below, above = math.hypot(second - low_2, high_1 - first), math.hypot(high_2 - second, first - low_1)
    return second - first - below, second - first + above
