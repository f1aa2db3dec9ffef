"""A piece of a release becomes a task folder, or is refused with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.instruction.needs import Evidence, Needs
from offbook.tasks.factory.make import MakeSettings, Outcome, Shown, task_from
from offbook.tasks.factory.releases.cut import Piece
from offbook.tasks.factory.releases.pieces import change_of, identity
from offbook.tasks.factory.releases.release import Release
from offbook.tasks.factory.releases.request import requests
from offbook.tasks.factory.repeated import Taken
from offbook.tasks.factory.types import Deletion
from offbook.tasks.factory.verification.verify import Verdict
from offbook.tasks.factory.workshop import Workshop

MAX_LINES = 1200


async def make_piece(
    release: Release,
    piece: Piece,
    stable: Collection[str],
    entries: Sequence[str],
    folder: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    taken: Taken | None = None,
) -> Outcome:
    """`stable` are the tests that both releases pass, `entries` what the changelog has for the newer one."""
    lines = sum(release.hunks.hunks[number].changed_lines for number in piece.hunks)
    refused, evidence = piece.refused, piece.evidence
    if not refused and lines > MAX_LINES:
        refused, evidence = f"it takes over {MAX_LINES} lines", f"{lines} lines"
    if refused:
        return Outcome(identity(release, piece), release.repository.name, "release", "release", refused, evidence)
    change = await asyncio.to_thread(change_of, release, piece, stable)

    def show(workshop: Workshop, deletion: Deletion, verdict: Verdict) -> Shown:
        """The older release as it is, and the newer one's tests."""
        tree = {path: text for path, text in deletion.files.items() if text is not None}
        hidden: dict[str, str | bytes] = {path: workshop.files[path] for path in release.tests}
        evidence = Evidence(
            workshop.files,
            release.old_files,
            verdict.fail_to_pass,
            deletion.removed,
            deletion.feature.functions,
            deletion.feature.targets,
            workshop.symbols,
            is_told=True,  # or `requests` has nothing
        )
        return Shown(tree, requests(change, verdict.fail_to_pass, entries), hidden, Needs(evidence))

    return await task_from(change.workshop, change.deletion, folder, spec, settings, taken, show)
