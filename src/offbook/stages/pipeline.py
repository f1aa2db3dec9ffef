"""`offbook stages`: several stages in sequence, each a run that starts from the model of the one before.

Each stage resumes, so the sequence does. `long` is `pretrain` with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.rl.models import Progress
from offbook.rl.ranks import grouped
from offbook.rl.train import train
from offbook.stages.pretrain import pretrain
from offbook.stages.run import OnStep, Tell
from offbook.stages.sft import sft

RUNS: dict[str, Callable[[Config, OnStep, Progress, Tell], RunFolder]] = {
    "pretrain": pretrain,
    "long": pretrain,
    "sft": sft,
    "train": train,
}


def run_stages(config: Config, on_step: OnStep, progress: Progress, tell: Tell) -> list[dict[str, Any]]:
    """One row of results per stage, also written to OUT/stages.json after each."""
    out, model, rows = Path(config.out), config.model, list[dict[str, Any]]()
    with grouped():
        for number, name in enumerate(config.stages.order, 1):
            folder = out / f"{number}-{name}"
            settings = of_stage(config, name, folder, model)
            tell(f"stage {number} of {len(config.stages.order)}: {name}, from {model}")
            run = RUNS[name](settings, on_step, progress, tell)
            model = str(latest_checkpoint(run))
            rows.append(_row(name, run))
            write_atomic(out / "stages.json", json.dumps(rows, indent=1) + "\n")
    return rows


def of_stage(config: Config, name: str, folder: Path, model: str) -> Config:
    """The stage's configuration, validated as a whole."""
    tree = config.model_dump()
    if name == "long":
        tree["pretrain"] |= config.stages.long
    tree |= {"out": str(folder), "model": model}
    return Config.model_validate(tree)


def _row(name: str, run: RunFolder) -> dict[str, Any]:
    metrics, _ = run.metrics()
    row: dict[str, Any] = {"stage": name, "run": str(run.path), "steps": metrics[-1]["step"]}
    row["train_tokens"] = sum(int(one.get("train_tokens", 0)) for one in metrics)
    if run.data_file.is_file():
        row["left_out"] = json.loads(run.data_file.read_text()).get("left_out", {})
    row["seconds"] = round(sum(one.get("train_s", 0.0) + one.get("rollout_s", 0.0) for one in metrics), 1)
    for key in ("ce/loss", "validation/loss", "solved", "reward"):
        values = [one[key] for one in metrics if key in one]
        if values:
            row[key] = [values[0], values[-1]]
    return row
