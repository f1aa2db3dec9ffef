"""The tables of proof.py, from its result files or from the JSON file that it keeps:

python bench/gpu/proof_report.py runs/proof/results
python bench/gpu/proof_report.py docs/results/real-model.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
from panels import Lines, mean_curve
from panels import figure as drawn

from offbook.evals.metrics import Row, handed_in, metric_of, ratios, show, show_change, show_interval
from offbook.evals.statistics import Ratio, compare_paired, interval, wilson

BASE = "rl"
# What else an arm is held against
BESIDE = {"hints": ("donor", "constant_negative"), "tokens": ("hints",), "bounded": ("hints",)}
NOTHING = "-"
Result = dict[str, Any]
Arms = dict[tuple[str, int], list[Result]]  # by arm and steps, one result per seed
KEPT = ("solved", "reward", "tokens", "turns", "calls", "invalid_calls")  # of a rollout, in the JSON file


def load(source: Path) -> Arms:
    """The measured arms of a results folder, or of a JSON file that `report` wrote, in the order in which they ran."""
    found: Arms = {}
    if source.is_file():
        results = json.loads(source.read_text())
    else:
        results = [json.loads(path.read_text()) for path in sorted(source.glob("*.json"))]
    for result in sorted(results, key=lambda one: (one["order"], one["seed"])):
        if "eval" in result:
            found.setdefault((result["arm"], result["steps"]), []).append(result)
    return found


def rows_of(results: Iterable[Result]) -> list[Row]:
    """Tasks of different seeds are different tasks, whatever they are called."""
    rows = []
    for one in results:
        for row in one["eval"]:
            numbers = {**row["numbers"], "handed_in": handed_in(row["numbers"]["solved"], row["stop"])}
            unknown = {"id": "", "suite": "", "difficulty": ""}  # the kept JSON file leaves these out
            rows.append(Row(**{**unknown, **row, "task": f"{one['seed']}/{row['task']}", "numbers": numbers}))
    return rows


def numbers(results: Sequence[Result]) -> dict[str, Ratio]:
    return {key: ratio for key, (_, ratio) in ratios(rows_of(results)).items()}


def shown_keys(arms: Arms) -> list[str]:
    """With the largest k that all have: pass@1 is what is solved."""
    sizes = [
        {int(key.removeprefix("pass@")) for key in numbers(results) if key.startswith("pass@")}
        for results in arms.values()
    ]
    best = max(set.intersection(*sizes), default=0)
    return ["handed_in", "solved", *([f"pass@{best}"] if best else []), "invalid_per_100", "turns", "tokens"]


def label(results: Sequence[Result]) -> str:
    return f"{results[0]['label']}, {results[0]['steps']} steps" if results[0]["steps"] else str(results[0]["label"])


def table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(heading)} |",
        "|---|" + "---:|" * (len(heading) - 1),
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
    ]


def mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else math.nan


def figure(value: float, form: str = ".1f") -> str:
    return format(value, form) if math.isfinite(value) else NOTHING


# What each table has


def main_table(arms: Arms) -> list[str]:
    keys = shown_keys(arms)

    def line(results: list[Result]) -> list[str]:
        found = numbers(results)
        cells = [label(results), str(len(results))]
        for key in keys:
            metric = metric_of(key)
            around = (
                show_interval(metric, interval(found[key])) if key in ("handed_in", "solved", "invalid_per_100") else ""
            )
            cells.append(f"{show(metric, found[key].value)} {around}".strip())
        reached = [step for one in results if (step := steps_to_level(one, arms)) is not None]
        some = f" ({len(reached)} of {len(results)})" if 0 < len(reached) < len(results) else ""
        return [*cells, figure(mean(reached)) + some, figure(mean(one["perplexity"] for one in results), ".2f")]

    heading = ["", "seeds", *(metric_of(key).label for key in keys), "steps to RL's level", "perplexity"]
    return table(heading, (line(results) for results in arms.values()))


def level_of(curve: Sequence[Result]) -> tuple[float, int]:
    """What a run ends at: the mean of its last third, and how many steps that is."""
    window = max(1, len(curve) // 3)
    return fmean(row["solved"] for row in curve[-window:]), window


def steps_to_level(result: Result, arms: Arms) -> float | None:
    """The first step at which a moving mean of the solved training tasks is where as many steps of RL end."""
    base = [one for one in arms.get((BASE, result["steps"]), ()) if one["seed"] == result["seed"]]
    if not base or not result.get("curve"):
        return None
    level, window = level_of(base[0]["curve"])
    solved = [row["solved"] for row in result["curve"]]
    return next(
        (float(step) for step in range(window, len(solved) + 1) if fmean(solved[step - window : step]) >= level), None
    )


def paired_table(arms: Arms) -> list[str]:
    """An arm less another of the same number of steps, on the same tasks of the same seeds."""
    keys = shown_keys(arms)

    def line(ours: list[Result], theirs: list[Result]) -> list[str] | None:
        base = {one["seed"]: one for one in theirs}
        shared = [one for one in ours if one["seed"] in base]
        if not shared:
            return None
        this, other = numbers(shared), numbers([base[one["seed"]] for one in shared])
        cells = [f"{label(ours)}, less {theirs[0]['label']}", str(len(shared))]
        for key in keys:
            apart, metric = compare_paired(other[key], this[key]), metric_of(key)
            p = NOTHING if apart.p is None else "p < .001" if apart.p < 0.001 else f"p {apart.p:.3f}"
            cells.append(f"{show_change(metric, apart.value)} {show_interval(metric, apart.interval)}, {p}")
        return cells

    lines = []
    for (arm, steps), results in arms.items():
        for base in (BASE, *BESIDE.get(arm, ())):
            if base != arm:
                lines.append(line(results, arms.get((base, steps), [])))
    return table(["difference", "seeds", *(metric_of(key).label for key in keys)], filter(None, lines))


def seed_table(arms: Arms) -> list[str]:
    """All seeds: solved with the interval of Wilson over rollouts, and invalid calls."""

    def cell(result: Result) -> str:
        rows = [row["numbers"] for row in result["eval"]]
        hits, calls = sum(row["solved"] for row in rows), sum(row["calls"] for row in rows) or 1
        low, high = wilson(hits, len(rows))
        invalid = 100 * sum(row["invalid_calls"] for row in rows) / calls
        return f"{100 * hits / len(rows):.1f}% [{100 * low:.1f}, {100 * high:.1f}], {invalid:.1f}"

    seeds = sorted({one["seed"] for results in arms.values() for one in results})
    lines = []
    for results in arms.values():
        by_seed = {one["seed"]: one for one in results}
        lines.append([label(results), *(cell(by_seed[seed]) if seed in by_seed else NOTHING for seed in seeds)])
    return table(["solved, invalid per 100", *(f"seed {seed}" for seed in seeds)], lines)


def size_table(arms: Arms) -> list[str]:
    """By the functions that a task lacks: rollouts that solve it, their valid calls, rollouts that end at the limit."""
    sizes = sorted({size for results in arms.values() for one in results for size in one.get("functions", {}).values()})

    def cell(results: list[Result], size: int) -> str:
        rows = [row for one in results for row in one["eval"] if one["functions"][row["task"]] == size]
        if not rows:
            return NOTHING
        solved, limit = mean(row["numbers"]["solved"] for row in rows), mean(row["stop"] == "turns" for row in rows)
        valid = mean(row["numbers"]["calls"] - row["numbers"]["invalid_calls"] for row in rows)
        return f"{solved:.0%}, {valid:.1f}, {limit:.0%}"

    lines = [[label(results), *(cell(results, size) for size in sizes)] for results in arms.values()]
    heading = ["solved, valid calls, at the limit of turns", *(f"{size} functions" for size in sizes)]
    return table(heading, lines) if sizes else []


def rule_table(arms: Arms) -> list[str]:
    """Of all messages of all seeds."""
    rules = sorted({rule for results in arms.values() for one in results for rule in one["rules"]})

    def rate(results: list[Result], rule: str) -> str:
        faults = sum(one["rules"].get(rule, 0) for one in results)
        return figure(100 * faults / max(1, sum(one["messages"] for one in results)))

    lines = [[label(results), *(rate(results, rule) for rule in rules)] for results in arms.values()]
    return table(["faults per 100 messages", *rules], lines)


def reading_table(arms: Arms) -> list[str]:
    """How much likelier a hint makes a scripted fault, and the hint of another rule."""
    rules = list(dict.fromkeys(rule for results in arms.values() for one in results for rule in one["readings"]))

    def cell(results: list[Result], rule: str) -> str:
        found = [one["readings"][rule] for one in results if rule in one["readings"]]
        return f"{figure(mean(one['hint'] for one in found))} ({figure(mean(one['donor'] for one in found))})"

    lines = [[label(results), *(cell(results, rule) for rule in rules)] for results in arms.values()]
    return table(["nats by the hint (by another rule's)", *rules], lines)


def taught_table(arms: Arms) -> list[str]:
    """The messages that hints were put before, in the first and in the last steps: log p without and with the hint."""
    lines = []
    for results in arms.values():
        steps = [[step for step in one.get("taught", ()) if step["fault"]] for one in results]
        ends = [(of[: max(1, len(of) // 4)], of[-max(1, len(of) // 4) :]) for of in steps if of]
        if ends:
            parts = [[step for end in ends for step in end[which]] for which in (0, 1)]
            read = [figure(mean(step[key] for step in part)) for part in parts for key in ("fault", "hinted_fault")]
            lines.append([label(results), *read])
    return table(["log p of hinted messages", "first quarter", "hinted", "last quarter", "hinted"], lines)


def cost_table(arms: Arms) -> list[str]:
    def of_curve(results: list[Result], key: Callable[[Result], float | None], form: str, first: int = 0) -> str:
        return figure(mean(key(row) for one in results for row in one["curve"][first:]), form)

    def norm(part: str) -> Callable[[Result], float | None]:
        return lambda row: row.get(f"{part}/gradient_norm", row.get(f"{part}/hidden_gradient"))

    def told(key: str) -> Callable[[Result], float | None]:
        return lambda row: row.get(key)

    lines = []
    for results in arms.values():
        if results[0].get("curve"):
            seconds = [of_curve(results, told(key), ".1f", first=1) for key in COSTS]  # the first step warms up
            minutes = figure(sum(one["train_s"] + one["eval_s"] for one in results) / 60)
            norms = [of_curve(results, norm(part), ".2g") for part in ("rl", "hint")]
            tokens = [of_curve(results, told(f"{part}/signal_tokens"), ".0f") for part in ("rl", "hint")]
            lines.append([label(results), *seconds, *norms, *tokens, minutes])
    heading = ["", *COSTS.values(), "gradient, RL", "gradient, hints", "tokens with signal, RL", "hints", "minutes"]
    return table(heading, lines)


COSTS = {
    "rollout_s": "s per step: rollouts",
    "slowest/model_s": "of its slowest rollout: the model",
    "slowest/tools_s": "tools",
    "slowest/scoring_s": "scoring",
    "train_s": "s per step: training",
}


DRAWN = {
    "rl": "RL",
    "tokens_bounded": "bounded hints",
    "hints": "hints",
    "donor": "another rule's",
    "constant_negative": "-1",
}
CURVES = {"invalid calls per 100": "invalid_per_100", "solved": "solved"}


def picture(arms: Arms) -> str:
    """What the arms that all seeds have did on their training tasks, step by step; the mean of the seeds."""

    def lines(key: str) -> Lines:
        longest = {arm: results for (arm, _), results in sorted(arms.items(), key=lambda each: each[0][1])}
        curves = {name: [one["curve"] for one in longest[arm]] for arm, name in DRAWN.items() if arm in longest}
        return {
            name: mean_curve([[(float(row["step"]), float(row[key])) for row in curve] for curve in each])
            for name, each in curves.items()
        }

    return drawn({title: lines(key) for title, key in CURVES.items()}, percent=("solved",))


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What the tables are of, and what is worth telling apart by task."""
    numbers = {name: row["numbers"][name] for name in KEPT}
    return {"task": row["task"], "stop": row["stop"], "numbers": numbers}


def report(source: Path, json_file: Path | None = None, markdown: Path | None = None) -> None:
    arms = load(source)
    if not arms:
        print("no arm is measured yet")
        return
    tables = (main_table, paired_table, seed_table, size_table, rule_table, reading_table, taught_table, cost_table)
    lines = [line for each in tables for line in each(arms)]
    print("\n".join(lines))
    if json_file:
        every = [{**one, "eval": [kept(row) for row in one["eval"]]} for results in arms.values() for one in results]
        short = json.loads(json.dumps(every), parse_float=lambda digits: float(f"{float(digits):.5g}"))
        json_file.write_text(json.dumps(short, separators=(",", ":")) + "\n")
    if markdown:
        markdown.write_text("\n".join(lines) + "\n")
        markdown.with_suffix(".svg").write_text(picture(arms))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    report(options.source, options.json, options.markdown)
