"""What an editor would show next to a request: open files, and places that were edited lately.

Some of it has to do with the task and most has not, and nothing of it comes from the solution: it is read off the tree
that the agent gets. The same task always gets the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from offbook.tasks.factory.types import Deletion
from offbook.tasks.factory.workshop import Workshop
from offbook.types import Context

TOUCHED = 2  # at most
OTHERS = 3
EDITS = 3
EDITED_LINES = 6


def context_of(workshop: Workshop, deletion: Deletion, tree: Mapping[str, str | None]) -> Context:
    rng = random.Random(f"context/{deletion.feature.id}")
    before = {path: text for path, text in workshop.files.items() if path not in deletion.tests}
    files = {**before, **deletion.files, **tree}
    lines = {path: text.count("\n") or 1 for path, text in sorted(files.items()) if text and path.endswith(".py")}
    touched = [path for path in lines if path in deletion.files]
    others = [path for path in lines if path not in deletion.files]
    chosen = rng.sample(touched, min(len(touched), TOUCHED)) + rng.sample(others, min(len(others), OTHERS))
    rng.shuffle(chosen)
    opened = [f"{path}:{rng.randint(1, lines[path])}" for path in chosen]
    edits = []
    for path in rng.sample(chosen, min(len(chosen), EDITS)):
        start = rng.randint(1, lines[path])
        edits.append(f"{path}:{start}-{min(lines[path], start + EDITED_LINES)}")
    return Context(tuple(opened), tuple(edits))
