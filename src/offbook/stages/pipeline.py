"""`offbook stages`: several stages in sequence, each a folder, each from the model of the one before.

Each stage resumes, so the sequence does. `long` is `pretrain` with other settings. A stage may come several times:
`sft`, `sample`, `sft` is a round of rejection sampling, in which what `sample` kept joins the data of later `sft`.
`fit` settles profile and dialect for all later stages; `eval` measures on held-out tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.rl.fit import best, fit, recipe_of
from offbook.rl.models import Progress
from offbook.rl.ranks import follows, grouped, joined
from offbook.rl.train import train
from offbook.stages.demos import KEPT, sample
from offbook.stages.pretrain import pretrain
from offbook.stages.run import OnStep, Tell
from offbook.stages.sft import sft

RUNS: dict[str, Callable[[Config, OnStep, Progress, Tell], RunFolder]] = {
    "pretrain": pretrain,
    "long": pretrain,
    "sft": sft,
    "train": train,
}
Measure = Callable[[Config, Progress], dict[str, Any]]  # an evaluation on the held-out tasks, in `config.out`


def run_stages(
    config: Config, on_step: OnStep, progress: Progress, tell: Tell, measure: Measure
) -> list[dict[str, Any]]:
    """One row of results per stage, also written to OUT/stages.json after each."""
    out = Path(config.out)
    model = config.model
    rows: list[dict[str, Any]] = []
    more: list[str] = []
    with grouped():
        for number, name in enumerate(config.stages.order, 1):
            folder = out / f"{number}-{name}"
            settings = of_stage(config, name, folder, model, more)
            tell(f"stage {number} of {len(config.stages.order)}: {name}, from {model}")
            if name in RUNS:
                run = RUNS[name](settings, on_step, progress, tell)
                model = str(latest_checkpoint(run))
                rows.append(_row(name, run))
            else:
                with joined() as orders:
                    if orders is not None and follows(orders):  # the rank that is the run samples alone
                        continue
                    if name == "fit":
                        fits = _fitting(settings, progress)
                        config = config.model_copy(update={"harness": config.harness.model_copy(update=fits)})
                        rows.append({"stage": name, "run": str(folder), **fits})
                    elif name == "eval":
                        found = measure(settings, progress)
                        row = {key: found[key] for key in ("invalid_per_100", "turns", "tokens", "seconds")}
                        rows.append({"stage": name, "run": str(folder), "solved": [found["solved"]] * 2, **row})
                    else:
                        rows.append(_row(name, sample(settings, progress, tell)))
                        more += [str(folder / KEPT)] if (folder / KEPT).stat().st_size else []
            write_atomic(out / "stages.json", json.dumps(rows, indent=1) + "\n")
    return rows


def of_stage(config: Config, name: str, folder: Path, model: str, more: list[str] | None = None) -> Config:
    """The stage's configuration, validated as a whole. `more` is imitated besides `sft.data`."""
    tree = config.model_dump()
    if name == "long":
        tree["pretrain"] |= config.stages.long
    if name == "sft":
        tree["sft"]["data"] += more or []
    tree |= {"out": str(folder), "model": model}
    return Config.model_validate(tree)


def _fitting(settings: Config, progress: Progress) -> dict[str, str]:
    """The profile and dialect that fit the model."""
    file = Path(settings.out) / "fit.json"
    if not file.is_file():
        found = fit(settings, progress=progress)
        write_atomic(file.with_suffix(".toml"), recipe_of(found, settings))
        fits = best(found)
        dialect = "auto" if fits.profile == "bash" else fits.dialect
        write_atomic(file, json.dumps({"profile": fits.profile, "dialect": dialect}) + "\n")
    fitting: dict[str, str] = json.loads(file.read_text())
    return fitting


def _row(name: str, run: RunFolder) -> dict[str, Any]:
    metrics, _ = run.metrics()
    row: dict[str, Any] = {"stage": name, "run": str(run.path), "steps": metrics[-1]["step"]}
    row["train_tokens"] = sum(int(one.get("train_tokens", 0)) for one in metrics)
    if run.data_file.is_file():
        row["left_out"] = json.loads(run.data_file.read_text()).get("left_out", {})
    timed = ("train_s", "rollout_s", "seconds")
    row["seconds"] = round(sum(one.get(key, 0.0) for one in metrics for key in timed), 1)
    for key in ("ce/loss", "validation/loss", "solved", "reward"):
        values = [one[key] for one in metrics if key in one]
        if values:
            row[key] = [values[0], values[-1]]
    return row
