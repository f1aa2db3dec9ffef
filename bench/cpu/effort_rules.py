"""The rule of bench/cpu/effort.py: `more_than_needed` for tasks that are over in three calls."""

from collections.abc import Iterator

from offbook.acts import Acts, At
from offbook.feedback import more_than_needed

TIMES = 1.1  # one call that is not needed is about a tenth more


def more_than_siblings(acts: Acts) -> Iterator[tuple[At, str]]:
    """Reminder: look only at what the change needs, and finish once it is made."""
    yield from more_than_needed(acts, TIMES)
