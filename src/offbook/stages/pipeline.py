"""`offbook stages`: several stages in sequence, each a folder, each from the model of the one before.

Each stage resumes, so the sequence does. `long` is `pretrain` with other settings. A stage may come several times:
`sft`, `sample`, `sft` is a round of rejection sampling, in which what `sample` kept joins the data of later `sft`.
`fit` settles profile and dialect for all later stages; `eval` measures on held-out tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, latest_checkpoint, write_atomic
from offbook.rl.fit import best, fit, recipe_of
from offbook.rl.models import Progress
from offbook.rl.ranks import follows, grouped, joined
from offbook.rl.train import train
from offbook.stages.pretrain import pretrain
from offbook.stages.run import OnStep, Tell
from offbook.stages.sample import KEPT, sample
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
    out, model, rows, more = Path(config.out), config.model, list[dict[str, Any]](), list[str]()
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
                    if follows(orders):  # the rank that is the run samples alone
                        continue
                    if name == "fit":
                        config = _fitted(config, settings, progress)
                        rows.append({"stage": name, "run": str(folder), **_fit_in(folder)})
                    elif name == "eval":
                        rows.append(_measured(folder, measure(settings, progress)))
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


def _fitted(config: Config, settings: Config, progress: Progress) -> Config:
    """With the profile and dialect that fit the model."""
    folder = Path(settings.out)
    if not (folder / "fit.json").is_file():
        found = fit(settings, progress=progress)
        write_atomic(folder / "fit.toml", recipe_of(found, settings))
        write_atomic(folder / "fit.json", json.dumps(asdict(best(found)), indent=1) + "\n")
    harness = config.harness.model_copy(update=_fit_in(folder))
    return config.model_copy(update={"harness": harness})


def _fit_in(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "fit.json").read_text())
    dialect = "auto" if found["profile"] == "bash" else found["dialect"]
    return {"profile": found["profile"], "dialect": dialect}


def _measured(folder: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    row = {"stage": "eval", "run": str(folder), "solved": [numbers["solved"], numbers["solved"]]}
    return row | {key: numbers[key] for key in ("invalid_per_100", "turns", "tokens", "seconds")}


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
