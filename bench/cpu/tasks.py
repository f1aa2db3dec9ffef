"""How fast repositories become verified tasks, and whether all of them hold when looked at again.

    python bench/cpu/tasks.py [--packages toolz ...] [--limit 60] [--out DIR] [--json FILE] [--report FILE]

Starts from nothing: fetches each package, prepares it, and makes tasks. Then two processes that know nothing of that
check every folder (`offbook tasks check`) and audit it for leaks (`offbook tasks leaks`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offbook.sandbox import BoxSpec
from offbook.taskgen.make import MakeSettings
from offbook.taskgen.pipeline import Made, funnel, make_tasks

PACKAGES = ("toolz==1.2.0", "boltons==26.2.0", "sqlparse==0.6.1", "tinydb==4.9.0", "humanize==4.16.0", "bottle==0.13.4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--limit", type=int, default=60, help="tasks of each package")
    parser.add_argument("--level", default="mix")
    parser.add_argument("--out", type=Path, help="keep the tasks there; made anew")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="write the tables as Markdown")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="offbook-tasks-"))
    shutil.rmtree(out, ignore_errors=True)
    began = time.monotonic()
    settings = MakeSettings(level=arguments.level, max_tasks=arguments.limit)
    sources = [f"pypi:{name}" for name in arguments.packages]
    made = asyncio.run(make_tasks(sources, out, BoxSpec(), settings, say, tell))
    seconds = time.monotonic() - began
    result = {**numbers(made, seconds), **again(out)}
    text = report(made, result, " ".join(sys.argv))
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.report:
        arguments.report.write_text(text)
    if not arguments.out:
        shutil.rmtree(out)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def tell(made: Made) -> None:
    if made.outcomes and len(made.outcomes) % 10 == 0:
        say(f"{made.name}: {len(made.verified)} tasks of {len(made.outcomes)}/{made.candidates} candidates")


def numbers(made: list[Made], seconds: float) -> dict[str, Any]:
    tried = [outcome for one in made for outcome in one.outcomes]
    verified = [outcome for outcome in tried if not outcome.refused]
    clusters = [outcome for outcome in verified if outcome.kind == "cluster"]
    return {
        "verified": len(verified),
        "candidates": len(tried),
        "seconds": round(seconds, 1),
        "verified_per_minute": round(60 * len(verified) / seconds, 2),
        "multi_file_share": round(sum(outcome.files > 1 for outcome in verified) / len(verified), 3),
        "test_time_share": round(sum(o.test_s for o in tried) / sum(o.seconds for o in tried), 3),
        "clusters": len(clusters),
        "cluster_median_lines": statistics.median(outcome.lines for outcome in clusters) if clusters else 0,
        "cluster_median_files": statistics.median(outcome.files for outcome in clusters) if clusters else 0,
        "median_lines": statistics.median(outcome.lines for outcome in verified),
        "as_predicted": round(sum(outcome.exact for outcome in verified) / len(verified), 3),
        "mean_floor": round(statistics.mean(outcome.floor for outcome in verified), 3),
        "levels": {level: sum(o.level == level for o in verified) for level in ("stub", "hybrid", "gone")},
        "refused": funnel(tried),
        "repositories": {
            one.name or one.source: {
                "version": one.version,
                "split": one.split,
                "tests": one.num_tests,
                "left_out": one.num_excluded,
                "features": one.candidates,
                "tried": len(one.outcomes),
                "verified": len(one.verified),
                "prepare_s": round(one.prepare_s, 1),
                "make_s": round(one.make_s, 1),
                "unprepared": one.unprepared,
            }
            for one in made
        },
    }


def again(out: Path) -> dict[str, int]:
    """What processes of their own say of the folders."""
    found = {}
    for verb, done, bad in (("check", "checked", "bad"), ("leaks", "audited", "leaks")):
        say(f"offbook tasks {verb} {out}")
        command = [sys.executable, "-m", "offbook", "tasks", verb, str(out), "--plain", "--json"]
        answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
        found |= {done: answer[done], f"{done}_bad": len(answer[bad])}
    return found


def report(made: list[Made], result: dict[str, Any], command: str) -> str:
    lines = ["# Tasks from real packages", "", f"    python {command}", ""]
    lines += [
        f"{result['verified']} verified tasks from {result['candidates']} candidates in "
        f"{result['seconds'] / 60:.1f} minutes ({result['verified_per_minute']} a minute), fetching and preparing "
        "included.",
        f"`offbook tasks check`, in a process of its own: {result['checked'] - result['checked_bad']} of "
        f"{result['checked']} hold. `offbook tasks leaks`: {result['audited'] - result['audited_bad']} of "
        f"{result['audited']} have no leak.",
        "",
        "| package | split | tests | left out | features | tried | tasks | prepare, s | make, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["repositories"].items():
        cells = [f"{name} {row['version']}", row["split"], row["tests"], row["left_out"], row["features"], row["tried"]]
        cells += [row["verified"], row["prepare_s"], row["make_s"]]
        lines.append(
            f"| {' | '.join(map(str, cells))} |" if not row["unprepared"] else f"| {name} | {row['unprepared']} |"
        )
    lines += ["", "| what became of a candidate | number | for example |", "|---|---|---|"]
    lines.append(f"| became a task | {result['verified']} | |")
    tried = [outcome for one in made for outcome in one.outcomes]
    for reason, count in result["refused"].items():
        example = next(outcome for outcome in tried if outcome.refused == reason)
        evidence = example.evidence.replace("|", "/").replace("\n", " ")[:120]
        lines.append(f"| {reason} | {count} | `{example.id}`: {evidence} |")
    share = f"{result['multi_file_share']:.0%}"
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| tasks that touch more than one file | {share} |",
        f"| clusters | {result['clusters']}, gold patch {result['cluster_median_lines']:g} lines over "
        f"{result['cluster_median_files']:g} files in the median |",
        f"| gold patch of all tasks, median | {result['median_lines']:g} lines |",
        f"| failing tests just as the map says | {result['as_predicted']:.0%} of the tasks |",
        f"| what a trivial body passes of the failing tests, mean | {result['mean_floor']:.1%} |",
        f"| levels | {', '.join(f'{level} {count}' for level, count in result['levels'].items())} |",
        f"| share of the working time that is spent in tests | {result['test_time_share']:.0%} |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
