"""The same job as Ray tasks, one per repository (`pip install offbook[ray]`).

The folder has to be one that all machines of the cluster see. What is done is found done, so a call that was stopped,
or a task that Ray starts again on another machine, goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import Made, OnOutcome, make_tasks, prepare_all
from offbook.tasks.factory.prepare.prepare import Progress
from offbook.tasks.factory.prepare.source import one_spelling
from offbook.tasks.factory.records import settle
from offbook.types import OffbookError

RETRIES = 3  # of a task whose machine went away
CPUS = 2  # of a task
POLL_S = 5.0


def make_on_ray(
    sources: Sequence[str],
    out: Path,
    spec: SandboxSpec,
    settings: MakeSettings,
    progress: Progress = lambda message: None,
    on_outcome: OnOutcome = lambda made: None,
    address: str = "",
) -> list[Made]:
    """`address` is the cluster's; without one Ray is started on this machine."""
    try:
        import ray
    except ImportError:
        raise OffbookError("Ray is not installed: pip install 'offbook[ray]'") from None
    out = out.resolve()
    ray.init(address=address or None, log_to_driver=False, configure_logging=False)
    try:
        cpus = min(CPUS, int(ray.cluster_resources().get("CPU", 1)))  # more than there are would wait for ever
        settings = replace(settings, jobs=cpus + 1)
        known = dict.fromkeys(map(one_spelling, sources))

        def every(work: Callable[[str], Made], what: str) -> dict[str, Made]:
            remote = ray.remote(num_cpus=cpus, max_retries=RETRIES)(work)
            waiting = {remote.remote(source): source for source in known}
            found: dict[str, Made] = {}
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=POLL_S)
                for one in done:
                    source = waiting.pop(one)
                    found[source] = made = _answer(ray, one, source)
                    progress(f"{made.name or source}: {made.unprepared or what}")
                    on_outcome(made)
            return found

        def prepared(source: str) -> Made:
            (made,) = asyncio.run(prepare_all([source], out, spec, settings))
            return made

        def made(source: str) -> Made:
            (result,) = asyncio.run(make_tasks([source], out, spec, settings))
            return result

        found = every(prepared, "prepared").values()
        for one in found:
            if one.differs:
                progress(f"{one.name}: {one.differs}")
        ready = [one.name for one in found if not one.unprepared]
        if ready:
            settle(out, ready, settings.heldout)
        return list(every(made, "done").values())
    finally:
        ray.shutdown()


def _answer(ray: object, reference: object, source: str) -> Made:
    """What the task returned; a task that failed for good is a repository that gives nothing, and the rest goes on."""
    try:
        return ray.get(reference)  # type: ignore[attr-defined]
    except Exception as error:  # the border of a machine
        return Made(source, unprepared=f"its Ray task failed ({type(error).__name__}: {str(error).strip()[-200:]})")
