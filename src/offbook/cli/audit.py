"""offbook audit: was there cheating, in a run or in another agent's trajectories?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbook.cli.options import Json, say, tasks_in

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder
    from offbook.signals.monitors.review import Flagged, Review

MAX_SHOWN = 5  # findings of one kind
PAGE = "report.html"


def audit(
    source: Annotated[Path, typer.Argument(help="A run folder, or a file: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, typer.Option(help="`pocket`, or the folder of the tasks, to compare with their trees.")] = "",
    page: Annotated[str, typer.Option(help="The page of `offbook view` that links lead into.")] = PAGE,
    as_json: Json = False,
) -> None:
    """Findings by kind with the step, the message and the line, and what changed over a run. Blind to the outcome."""
    from offbook.core.runfolder import RunFolder
    from offbook.signals.monitors.review import review_file, review_run

    folder = RunFolder.open(source) if source.is_dir() else None
    known = tasks_in(tasks, folder) if tasks else {}
    if folder:
        review, links = review_run(folder, known), _links(folder, page)
    else:
        review, links = review_file(source, known), {}
    print(json.dumps(_as_dict(review, links))) if as_json else _show(review, links)


def _links(folder: RunFolder, page: str) -> dict[str, str]:
    """Where a rollout begins in the page of the run, or in one that has this run among others."""
    from urllib.parse import quote

    from offbook.view.index import RunIndex

    run = RunIndex(folder.path.resolve().name, folder.path)
    run.refresh()
    start = f"{page}#/rollout/{quote(run.name, safe='')}"
    return {
        place.said["id"]: f"{start}/{source}/{number}"
        for source, lines in run.rollouts.items()
        for number, place in enumerate(lines.places)
    }


def _link(finding: Flagged, links: dict[str, str]) -> str:
    start = links.get(finding.rollout)
    if not start or finding.flag.message < 0:
        return start or ""
    return f"{start}/{finding.flag.segment}.{finding.flag.message}"


def _as_dict(review: Review, links: dict[str, str]) -> dict[str, Any]:
    return {
        "source": review.source,
        "rollouts": review.rollouts,
        "flagged": review.flagged,
        "unreadable": review.unreadable,
        "without_tree": review.without_tree,
        "kinds": {kind: len(findings) for kind, findings in review.by_kind().items()},
        "findings": [
            {"step": one.step, "rollout": one.rollout, "task": one.task, **asdict(one.flag), "link": _link(one, links)}
            for one in review.findings
        ],
        "drift": {
            "series": {name: [asdict(point) for point in points] for name, points in review.series.items()},
            "alarms": [asdict(alarm) for alarm in review.alarms],
        },
    }


def _show(review: Review, links: dict[str, str]) -> None:
    from offbook.signals.monitors.rules import KINDS

    say(f"{review.source}: {review.rollouts} rollouts, {review.flagged} with findings")
    for kind, findings in review.by_kind().items():
        say(f"\n{kind} ({len(findings)}): {KINDS.get(kind, 'found by a model')}", style="bold")
        for one in findings[:MAX_SHOWN]:
            place = f"message {one.flag.message}" + (f" of segment {one.flag.segment}" if one.flag.segment else "")
            say(f"  {one.rollout}, {place}: {one.flag.evidence}  {_link(one, links)}".rstrip())
        if len(findings) > MAX_SHOWN:
            say(f"  and {len(findings) - MAX_SHOWN} more; --json has all")
    for alarm in review.alarms:
        change = f"{alarm.before:.3g} to {alarm.after:.3g} since step {alarm.since}"
        examples = ", ".join(alarm.examples)
        say(f"\ndrift, {alarm.series}: {change}, noticed at step {alarm.step}; such as {examples}")
    if review.without_tree:
        say(f"\n{review.without_tree} rollouts were judged without the tree of their task; --tasks gives it")
    if review.unreadable:
        say(f"\n{review.unreadable} records could not be read")
