"""Side suites: what a score on ordinary tasks does not see. Made from templates, verified by running."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from offbook.core.runfolder import whole_folder
from offbook.evals.sides.draft import SideDraft, write_verified
from offbook.evals.sides.templates import TEMPLATES

SIDES = list(TEMPLATES)
NUM_TASKS = 14
AT_ONCE = 2


async def make_side(
    name: str,
    root: Path,
    seed: int,
    on_progress: Callable[[float], None] = lambda share: None,
    num_tasks: int = NUM_TASKS,
) -> None:
    """Task folders of one suite, the first so many by id. `root` appears when all are there.

    The untouched tree, the right submission and wrong ones are graded; a draft that does not behave as its template
    says stops it.
    """
    drawn = islice(TEMPLATES[name](random.Random(f"side {name} {seed}")), NUM_TASKS)
    drafts = sorted(drawn, key=lambda draft: draft.id)[:num_tasks]
    slots = asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(draft: SideDraft, part: Path) -> None:
        nonlocal done
        async with slots:
            await write_verified(part / draft.id, draft)
        done += 1
        on_progress(done / len(drafts))

    with whole_folder(root) as part:
        await asyncio.gather(*(one(draft, part) for draft in drafts))
