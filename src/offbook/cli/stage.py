"""What the verbs of stages that learn from data have in common: how a run is shown while it goes on, and at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from offbook.cli.options import console, progress_display, say
from offbook.core.config import Config

if TYPE_CHECKING:
    from offbook.core.runfolder import RunFolder
    from offbook.rl.trackers import Tracker

NUMBERS = {
    "loss": "ce/loss",
    "validation": "validation/loss",
    "learning rate": "learning_rate",
}


def show_run(
    run: Callable[..., RunFolder], config: Config, tracker: Tracker | None, plain: bool, as_json: bool
) -> dict[str, Any]:
    """Returns the last step's metrics, which --json has printed; none where another rank is the run."""
    with progress_display(plain) as progress:

        def on_step(row: dict[str, Any]) -> None:
            if tracker:
                tracker.follow()
            shown = ", ".join(f"{name} {row[key]:.3g}" for name, key in NUMBERS.items() if key in row)
            console.print(f"step {row['step']} of {row['steps']}: {shown}")

        folder = run(config, on_step, progress, partial(say, to=console))
    if int(os.environ.get("RANK", "0")):
        return {}
    if tracker:
        tracker.close()
    last: dict[str, Any] = folder.metrics()[0][-1]
    print(json.dumps(last) if as_json else f"{config.out}: {last['step']} steps done")
    return last
