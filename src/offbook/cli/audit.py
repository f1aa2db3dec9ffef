"""offbook audit: was there cheating, in a run or in another agent's trajectories?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbook.cli.options import Json, say, tasks_in

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder
    from offbook.signals.monitors.review import Review

MAX_SHOWN = 5  # findings of one kind


def audit(
    source: Annotated[Path, typer.Argument(help="A run folder, or a file: ATIF, OpenAI messages, rollouts.")],
    tasks: Annotated[str, typer.Option(help="`pocket`, or the folder of the tasks, to compare with their trees.")] = "",
    as_json: Json = False,
) -> None:
    """Findings by kind with the step, the message and the line, and what changed over a run. Blind to the outcome."""
    from offbook.core.runfolder import RunFolder
    from offbook.signals.monitors.review import review_file, review_run

    folder = RunFolder.open(source) if source.is_dir() else None
    known = tasks_in(tasks, folder) if tasks else {}
    review = review_run(folder, known) if folder else review_file(source, known)
    links = _links(review, folder) if folder else [""] * len(review.findings)
    if not as_json:
        _show(review, links)
        return
    findings = [
        {"step": one.step, "rollout": one.rollout, "task": one.task, **asdict(one.flag), "link": link}
        for one, link in zip(review.findings, links, strict=True)
    ]
    drift = {
        "series": {name: [asdict(point) for point in points] for name, points in review.series.items()},
        "alarms": [asdict(alarm) for alarm in review.alarms],
    }
    counts = ("source", "rollouts", "flagged", "unreadable", "without_tree")
    kinds = {kind: len(found) for kind, found in review.by_kind().items()}
    answer = {key: getattr(review, key) for key in counts}
    print(json.dumps({**answer, "kinds": kinds, "findings": findings, "drift": drift}))


def _links(review: Review, folder: RunFolder) -> list[str]:
    """Where each finding is in the page of `offbook view`."""
    from urllib.parse import quote

    from offbook.view.index import RunIndex

    run = RunIndex(folder.path.resolve().name, folder.path)
    run.refresh()
    places = {
        place.said["id"]: f"report.html#/rollout/{quote(run.name, safe='')}/{source}/{number}"
        for source, lines in run.rollouts.items()
        for number, place in enumerate(lines.places)
    }
    links = []
    for one in review.findings:
        start = places.get(one.rollout, "")
        links.append(f"{start}/{one.flag.segment}.{one.flag.message}" if start and one.flag.message >= 0 else start)
    return links


def _show(review: Review, links: list[str]) -> None:
    from offbook.signals.monitors.rules import KINDS

    say(f"{review.source}: {review.rollouts} rollouts, {review.flagged} with findings")
    link_of = {id(one): link for one, link in zip(review.findings, links, strict=True)}
    for kind, findings in review.by_kind().items():
        say(f"\n{kind} ({len(findings)}): {KINDS.get(kind, 'found by a model')}", style="bold")
        for one in findings[:MAX_SHOWN]:
            place = f"message {one.flag.message}" + (f" of segment {one.flag.segment}" if one.flag.segment else "")
            say(f"  {one.rollout}, {place}: {one.flag.evidence}  {link_of[id(one)]}".rstrip())
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
