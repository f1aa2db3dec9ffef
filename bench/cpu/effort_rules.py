"""The rule of bench/cpu/effort.py: `more_than_needed` for tasks that are over in three calls."""

from collections.abc import Iterator

from offbook.signals.feedback import more_than_needed
from offbook.signals.trajectory import At, Trajectory

TIMES = 1.1  # one call that is not needed is about a tenth more


def more_than_siblings(trajectory: Trajectory) -> Iterator[tuple[At, str]]:
    """Reminder: look only at what the change needs, and finish once it is made."""
    yield from more_than_needed(trajectory, TIMES)
