"""What quickstart shows, over several seeds: before, RL alone, RL with hints, on held-out tasks.

    python bench/cpu/quickstart.py --seeds 0 1 2 --json figures.json

Each seed has a model, tasks and rollouts of its own, and a cache of its own, so the seconds include all the making.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

COLUMNS = {"solved": "solved", "invalid_per_100": "invalid calls per 100", "turns": "turns", "tokens": "sampled tokens"}
ROWS = {"before": "before", "rl": "RL only", "rl_hints": "RL + hints"}


def run_seed(seed: int, out: Path) -> dict:
    environment = {**os.environ, "OFFBOOK_CACHE": str(out / f"cache-{seed}")}
    command = [sys.executable, "-m", "offbook", "quickstart", "--seed", str(seed), "--out", str(out / f"seed-{seed}")]
    subprocess.run([*command], env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / f"seed-{seed}" / "summary.json").read_text())


def table(summaries: dict[int, dict]) -> list[str]:
    lines = ["| | seed | " + " | ".join(COLUMNS.values()) + " |", "|---|---|" + "---:|" * len(COLUMNS)]
    for row, label in ROWS.items():
        for seed, summary in summaries.items():
            lines.append(f"| {label} | {seed} | " + " | ".join(show(key, summary[row][key]) for key in COLUMNS) + " |")
        values = {key: [summary[row][key] for summary in summaries.values()] for key in COLUMNS}
        cells = [f"**{show(key, mean(values[key]))}**{spread(key, values[key])}" for key in COLUMNS]
        lines.append(f"| **{label}** | mean | " + " | ".join(cells) + " |")
    return lines


def show(key: str, value: float) -> str:
    return f"{value:.1%}" if key == "solved" else f"{value:.0f}" if key == "tokens" else f"{value:.2f}"


def spread(key: str, values: list[float]) -> str:
    return f" ± {show(key, stdev(values))}" if len(values) > 1 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parser.parse_args()
    summaries = {seed: run_seed(seed, arguments.out) for seed in arguments.seeds}
    lines = table(summaries)
    seconds = ", ".join(f"{summary['seconds']:.0f}" for summary in summaries.values())
    lines += ["", f"Seconds, all the making included: {seconds}."]
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({str(seed): summary for seed, summary in summaries.items()}, indent=2) + "\n"
        )
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
