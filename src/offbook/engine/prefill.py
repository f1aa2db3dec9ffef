"""What has to be computed before rows can write: only tokens that nobody has keys and values of yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_SHARED = 16  # tokens; fewer are computed sooner than copied


@dataclass(frozen=True, slots=True)
class Fill:
    """The first `shared` tokens of a place are there, or come from `source`; the others are to be computed.

    All shared: the source ends with the same token, and the next one is drawn from the same distribution.
    """

    place: int
    ids: list[int]
    shared: int
    source: int | None
    wave: int  # sources are filled in earlier ones

    @property
    def new(self) -> int:
        """Tokens that are to be computed."""
        return len(self.ids) - self.shared

    def start(self, again: int) -> int:
        """Of what is read, where so many of the shared tokens are read once more."""
        return max(0, self.shared - again)


def plan_fills(wanted: Mapping[int, list[int]], kept: Mapping[int, list[int]]) -> list[Fill]:
    """Ids by place, and what lies at places now; in the order of the waves.

    The last token of a row is computed in any case but the one above, since the next is drawn from what it gives.
    Among rows in lexical order the longest prefix that a row shares with any before it is that with the last.
    """
    others = [(ids, place) for place, ids in kept.items() if place not in wanted and ids]
    fills: dict[int, Fill] = {}
    last: Fill | None = None
    for ids, place in sorted((ids, place) for place, ids in wanted.items()):
        shared = min(common_prefix(ids, kept.get(place, [])), len(ids) - 1)
        source, wave = None, 0
        for other, at in others:
            if (count := min(common_prefix(ids, other), len(ids) - 1)) >= shared + MIN_SHARED:
                shared, source = count, at
        if last is not None:
            count = common_prefix(ids, last.ids)
            if count >= shared + MIN_SHARED or count == len(ids):
                root = last
                while count <= root.shared and root.source in fills:  # it has them from there itself
                    root = fills[root.source]
                shared, source, wave = count, root.place, root.wave + 1
        last = fills[place] = Fill(place, ids, shared, source, wave)
    return sorted(fills.values(), key=lambda fill: (fill.wave, fill.place))


def common_prefix(one: list[int], other: list[int]) -> int:
    """Slices are compared in C: by halves this is quicker than token by token."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # one[:low] is common, one[:high] is not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
