"""What `offbook tasks make` has made, in tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from offbook.tasks.factory.pipeline import Made


def summary(result: list[Made]) -> Iterator[Table | Text]:
    """The repositories, and what became of the candidates."""
    from offbook.tasks.factory.records import funnel

    for made in result:
        if made.unprepared:
            yield Text(f"{made.source}: {made.unprepared}" + (f" (see {made.log})" if made.log else ""))
    if all(made.unprepared for made in result):
        return
    table = Table(
        Column("repository", overflow="fold"), "split", "tests", "left out", "found", "tasks", "wide", "lines"
    )
    table.caption = "wide: tasks over several files; lines: of the gold patch, median"
    for made in result:
        if made.unprepared:
            table.add_row(made.source, "", "", "", "", "0", "", "")
            continue
        wide = sum(outcome.files > 1 for outcome in made.verified)
        lines = statistics.median(outcome.lines for outcome in made.verified) if made.verified else 0
        numbers = [made.num_tests, made.num_excluded, made.candidates, len(made.verified), wide]
        table.add_row(f"{made.name} {made.version}", made.split, *map(str, numbers), f"{lines:g}")
    yield table
    outcomes = [outcome for made in result for outcome in made.outcomes]
    reasons = Table("what became of the candidates", "number", Column("for example", overflow="fold"))
    made_of = [outcome for outcome in outcomes if not outcome.refused]
    blank, shown = sum(outcome.blank for outcome in made_of), sum(outcome.shown for outcome in made_of)
    bare = sum(outcome.bare for outcome in made_of)
    told = (
        f"{blank} of their tests are also run with expected values hidden, {shown} cannot be; of these {bare} cannot "
        "be run with other expected values either"
        if shown
        else ""
    )
    reasons.add_row("became tasks", str(len(made_of)), told)
    if open_tasks := [outcome.id for outcome in made_of if outcome.shown > outcome.blank]:
        reasons.add_row("  of these, most expected values cannot be hidden", str(len(open_tasks)), Text(open_tasks[0]))
    for reason, count in funnel(outcomes).items():
        example = next(outcome for outcome in outcomes if outcome.refused == reason)
        reasons.add_row(reason, str(count), Text(f"{example.id}: {example.evidence}"[:150]))
    reasons.add_section()
    left_out = [(why, function) for made in result for function, why in made.left_out.items()]
    for why, count in Counter(why for why, _ in left_out).most_common():
        function = next(function for reason, function in left_out if reason == why)
        reasons.add_row(f"functions in no candidate: {why}", str(count), Text(function))
    yield reasons
    sizes = [(outcome.kind, outcome.changed, outcome.files, outcome.characters) for outcome in made_of]
    yield Text("\n".join(medians(sizes)))


def medians(sizes: Sequence[tuple[str, int, int, int]]) -> Iterator[str]:
    """A line per kind, from (kind, changed lines, files, characters of the request) of each task."""
    names = {"single": "deletions", "cluster": "deletions, clusters", "release": "releases"}
    for kind in sorted({size[0] for size in sizes}, key=lambda kind: [*names, kind].index(kind)):
        lines, files, characters = (
            statistics.median(values) for values in zip(*(size[1:] for size in sizes if size[0] == kind), strict=True)
        )
        count = sum(size[0] == kind for size in sizes)
        yield (
            f"median of {count} {names.get(kind, 'others')}: {lines:g} changed lines, {files:g} files, "
            f"{characters:g} characters of the request"
        )
