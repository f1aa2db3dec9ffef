"""Do summaries learn? Tasks that outlive the window: what is solved, spent and forgotten, before and after RL.

    python bench/cpu/summaries.py --seeds 0 --steps 20 --out runs/summaries --json figures.json
    python bench/cpu/summaries.py --model smollm2-135m --tasks pocket-long-3 --episodes 3000 --set train.lora.rank=12 \
        --set harness.turns=40 --set harness.tokens=8192 --set harness.context=1536 --set harness.summarize_at=800 \
        --set harness.message_tokens=192 --set train.learning_rate=2e-4 --set train.precision=bfloat16 \
        --set engine.kind=continuous --out runs/summaries-smollm                # on a GPU

No model here has been asked for such a summary. So it first imitates scripted episodes of tasks with several functions,
in windows so small that most episodes need one to three summaries; these say what is done and what is left, and forget
a fifth of it. Then RL, with the outcome as the only reward: a summary earns what the windows after it bring.

A fact is a missing function that the window has named by then, and whether it is written yet. A summary keeps it if it
names the function on the right side, after `Done:` or after `Left:`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from offbook.api import rollouts, sft, train
from offbook.core.config import Config, load_config
from offbook.core.runfolder import latest_checkpoint
from offbook.core.shares import wilson
from offbook.rl.tasks import task_sets
from offbook.signals.trajectory import Trajectory
from offbook.types import Rollout, Task

STUB = re.compile(r'raise NotImplementedError\("(\w+)"\)')
COMMON = {
    "harness.profile": "pocket", "harness.turns": "26", "harness.tokens": "4096", "harness.context": "1024",
    "harness.message_tokens": "96", "harness.summarize_at": "600", "harness.summary_tokens": "96",
    "harness.command_s": "20", "harness.wall_s": "300",
    "sft.learning_rate": "1e-3", "sft.batch_tokens": "4096", "sft.reminders": "0",
    "train.groups": "4", "train.group_size": "8", "train.learning_rate": "5e-4",
    "feedback.weight": "0", "feedback.rules": "[]", "checkpoint.every": "2", "checkpoint.keep": "1",
}  # fmt: skip
COLUMNS = {
    "solved": "solved",
    "summaries": "summaries per rollout",
    "kept": "facts kept",
    "wrong": "· on the wrong side",
    "lost": "· not named",
    "made_up": "names that are no fact",
    "tokens": "sampled tokens",
    "summary_tokens": "· in summaries",
    "turns": "turns",
    "invalid": "invalid calls per 100",
}


def run_seed(seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is there already is not done again."""
    started, out = time.monotonic(), arguments.out / f"seed-{seed}"
    common = {
        **COMMON,
        **dict(option.split("=", 1) for option in arguments.set),
        "seed": str(seed),
        "sft.data": json.dumps([f"{arguments.tasks}:{arguments.episodes}"]),
        "tasks.source": arguments.tasks,
        "tasks.num_train": str(arguments.train_tasks),
        "tasks.num_heldout": str(arguments.eval_tasks),
        "train.steps": str(arguments.steps),
    }
    imitation = load_config(["pocket"], {**common, "model": arguments.model, "out": str(out / "start")})
    run = sft(imitation, lambda row: told("imitation", row, ("ce/loss", "validation/loss")))
    start = latest_checkpoint(run)
    config = load_config(["pocket"], {**common, "model": str(start), "out": str(out / "rl")})
    tasks = {task.id: task for task in task_sets(config).heldout}
    result: dict[str, Any] = {"before": measured(config, start, tasks, arguments, out / "before.json")}
    run = train(config, lambda row: told("RL", row, ("solved", "turns", "rollout_s", "train_s")))
    last = latest_checkpoint(run)
    result["after"] = measured(config, last, tasks, arguments, out / f"after-{arguments.steps}.json")
    result["curve"] = [row["solved"] for row in run.metrics()[0]]
    return {**result, "seconds": time.monotonic() - started}


def told(what: str, row: dict[str, Any], keys: tuple[str, ...]) -> None:
    numbers = ", ".join(f"{key} {row[key]:.3f}" for key in keys if key in row)
    print(f"{what}, step {row['step']}: {numbers}", flush=True)


def measured(
    config: Config, model: Path, tasks: dict[str, Task], arguments: argparse.Namespace, path: Path
) -> dict[str, Any]:
    """Held-out rollouts as numbers; what was measured is in a file."""
    if not path.is_file():
        asked = config.model_copy(update={"model": str(model)})
        found = rollouts(asked, list(tasks.values()), arguments.samples)
        path.write_text(json.dumps({**figures(found, tasks), "examples": examples(found)}, indent=1) + "\n")
    return json.loads(path.read_text())


def figures(found: list[Rollout], tasks: dict[str, Task]) -> dict[str, Any]:
    facts = sum((facts_in(rollout, missing_in(tasks[rollout.task])) for rollout in found), Counter[str]())
    known, count = facts["kept"] + facts["wrong"] + facts["lost"], len(found)
    calls = sum(rollout.usage.calls for rollout in found)
    return {
        "rollouts": count,
        "solved": sum(rollout.solved for rollout in found) / count,
        "interval": wilson(sum(rollout.solved for rollout in found), count),
        "facts": known,
        **{key: facts[key] / max(1, known) for key in ("kept", "wrong", "lost")},
        "made_up": facts["made_up"] / max(1, facts["summaries"]),
        "summaries": facts["summaries"] / count,
        "tokens": sum(rollout.usage.sampled_tokens for rollout in found) / count,
        "summary_tokens": sum(rollout.usage.summary_tokens for rollout in found) / count,
        "turns": sum(rollout.usage.turns for rollout in found) / count,
        "invalid": 100 * sum(rollout.usage.invalid_calls for rollout in found) / max(1, calls),
    }


def missing_in(task: Task) -> set[str]:
    return {name for path in task.tree.rglob("*.py") for name in STUB.findall(path.read_text())}


def facts_in(rollout: Rollout, missing: set[str]) -> Counter[str]:
    """Of all its summaries, where these functions were missing at the start."""
    written: set[str] = set()
    counts: Counter[str] = Counter()
    for number, segment in enumerate(rollout.segments):
        for use in Trajectory(rollout).uses:
            if use.segment == number and use.kind == "edit" and use.went_well:
                written |= {name for old, new in use.replacements for name in STUB.findall(old) if old != new}
        if segment.summary is None:
            continue
        seen = {word for one in segment.messages[: segment.summary] for word in re.findall(r"\w+", one.text)}
        done, _, left = segment.messages[segment.summary].text.partition("Left:")
        sides = [set(re.findall(r"(\w+) in ", side)) for side in (done, left)]
        counts["summaries"] += 1
        counts["made_up"] += len((sides[0] | sides[1]) - missing)
        for name in missing & (seen | written):
            right, wrong = sides if name in written else reversed(sides)
            counts["kept" if name in right - wrong else "wrong" if name in wrong else "lost"] += 1
    return counts


def examples(found: list[Rollout]) -> list[str]:
    texts = [one.messages[one.summary].text for rollout in found for one in rollout.segments if one.summary is not None]
    return texts[:: max(1, len(texts) // 8)][:8]


def table(results: dict[int, dict[str, Any]]) -> list[str]:
    lines = ["| | seed | " + " | ".join(COLUMNS.values()) + " |", "|---|---|" + "---:|" * len(COLUMNS)]
    for seed, result in results.items():
        for row in ("before", "after"):
            lines.append(f"| {row} | {seed} | " + " | ".join(show(key, result[row]) for key in COLUMNS) + " |")
    return lines


def show(key: str, row: dict[str, Any]) -> str:
    if key == "solved":
        low, high = row["interval"]
        return f"{row[key]:.0%} ({low:.0%} to {high:.0%})"
    return f"{row[key]:.0%}" if key in ("kept", "wrong", "lost") else f"{row[key]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--tasks", default="pocket-long-2")
    parser.add_argument("--episodes", type=int, default=1500, help="that are imitated")
    parser.add_argument("--train-tasks", type=int, default=60)
    parser.add_argument("--eval-tasks", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="rollouts a held-out task")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of every run")
    parser.add_argument("--out", type=Path, default=Path("runs/summaries"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {seed: run_seed(seed, arguments) for seed in arguments.seeds}
    print("\n".join(table(results)))
    for seed, result in results.items():
        print(f"seed {seed}: {result['seconds']:.0f} s; summaries before: {result['before']['examples'][:3]}")
        print(f"after: {result['after']['examples'][:3]}")
    if arguments.json:
        arguments.json.write_text(json.dumps({str(seed): result for seed, result in results.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
