"""How fast repositories become verified tasks, and whether all of them hold when looked at again.

    python bench/cpu/tasks.py [--packages toolz ...] [--limit 60] [--out DIR] [--json FILE] [--report FILE]
    python bench/cpu/tasks.py --from bench/cpu/packages.txt --limit 25 --resume --out runs/thousand

Starts from nothing, or goes on with --resume: fetches each package, prepares it, and makes tasks. Then two processes
that know nothing of that check every folder (`offbook tasks check`) and audit it for leaks (`offbook tasks leaks`).
Rates are of this call: what was there before is not counted in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offbook.sandbox import SandboxSpec
from offbook.signals.monitors.rules import annotated
from offbook.tasks import load_task
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import Made, make_tasks
from offbook.tasks.factory.records import funnel

PACKAGES = ("toolz==1.2.0", "boltons==26.2.0", "sqlparse==0.6.1", "tinydb==4.9.0", "humanize==4.16.0", "bottle==0.13.4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--from", dest="listed", type=Path, help="a file of sources, one per line, in their place")
    parser.add_argument("--limit", type=int, default=60, help="tasks of each package")
    parser.add_argument("--level", default="mix")
    parser.add_argument("--out", type=Path, help="keep the tasks there; made anew")
    parser.add_argument("--resume", action="store_true", help="go on with what is there")
    parser.add_argument("--no-again", action="store_true", help="do not check and audit the folders at the end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="write the tables as Markdown")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="offbook-tasks-"))
    if not arguments.resume:
        shutil.rmtree(out, ignore_errors=True)
    before = num_folders(out)
    began, cpu_began = time.monotonic(), cpu_s()
    settings = MakeSettings(level=arguments.level, max_tasks=arguments.limit, annotate=annotated)
    sources = [f"pypi:{name}" for name in arguments.packages]
    if arguments.listed:
        lines = arguments.listed.read_text().splitlines()
        sources = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    made = asyncio.run(make_tasks(sources, out, SandboxSpec(), settings, say, tell))
    seconds, cpu = time.monotonic() - began, cpu_s() - cpu_began
    result = {**numbers(made, out, seconds, cpu, num_folders(out) - before), **size_of(out)}
    if not arguments.no_again:
        result |= again(out)
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


def cpu_s() -> float:
    """Of this process and of all that it has waited for: sandboxes, pip, git."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def num_folders(out: Path) -> int:
    return sum(1 for split in ("train", "heldout") for _ in (out / split).glob("[!.]*/task.toml"))


def size_of(out: Path) -> dict[str, float]:
    """Of the task folders, and of what they share: their repositories' trees and packages."""
    tasks = max(1, num_folders(out))
    own = [file for split in ("train", "heldout") for file in (out / split).rglob("*") if file.is_file()]
    common = [file for part in ("tree", "deps") for file in (out / ".factory").glob(f"*/{part}/**/*") if file.is_file()]
    return {
        "bytes_a_task": round(sum(file.lstat().st_size for file in own) / tasks),
        "files_a_task": round(len(own) / tasks, 1),
        "shared_bytes_a_task": round(sum(file.lstat().st_size for file in common) / tasks),
        "shared_files_a_task": round(len(common) / tasks, 1),
    }


def numbers(made: list[Made], out: Path, seconds: float, cpu: float, new: int) -> dict[str, Any]:
    tried = [outcome for one in made for outcome in one.outcomes]
    verified = [outcome for outcome in tried if not outcome.refused]
    clusters = [outcome for outcome in verified if outcome.kind == "cluster"]
    if not verified:
        raise SystemExit("\n".join(f"{one.source}: {one.unprepared or 'no task'}" for one in made))
    folders = [out / one.split / outcome.id for one in made for outcome in one.verified]
    tasks = [load_task(folder) for folder in folders]
    return {
        "verified": len(verified),
        "candidates": len(tried),
        "seconds": round(seconds, 1),
        "verified_per_minute": round(60 * new / seconds, 2),
        "cores": os.cpu_count(),
        "cpu_s_a_task": round(cpu / max(1, new), 2),
        "per_minute_and_core": round(60 * new / cpu, 2),
        "multi_file_share": round(sum(outcome.files > 1 for outcome in verified) / len(verified), 3),
        "clusters": len(clusters),
        "cluster_median_lines": statistics.median(outcome.lines for outcome in clusters) if clusters else 0,
        "cluster_median_files": statistics.median(outcome.files for outcome in clusters) if clusters else 0,
        "median_characters": statistics.median(len(task.instruction) for task in tasks),
        "median_files": statistics.median(outcome.files for outcome in verified),
        "median_lines": statistics.median(outcome.lines for outcome in verified),
        "mean_floor": round(statistics.mean(task.deleted.floor for task in tasks if task.deleted), 3),
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
        command = [sys.executable, "-m", "offbook", "tasks", verb, str(out), "--json"]
        answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
        found |= {done: answer[done], f"{done}_bad": len(answer[bad])}
    return found


def report(made: list[Made], result: dict[str, Any], command: str) -> str:
    lines = ["# Tasks from real packages", "", f"    python {command}", ""]
    lines += [
        f"{result['verified']} verified tasks from {result['candidates']} candidates in "
        f"{result['seconds'] / 60:.1f} minutes ({result['verified_per_minute']} a minute on {result['cores']} cores), "
        f"fetching and preparing included. A task takes {result['cpu_s_a_task']} CPU seconds, which is "
        f"{result['per_minute_and_core']} a minute on a core that does nothing else.",
    ]
    if "checked" in result:
        lines += [
            f"`offbook tasks check`, in a process of its own: {result['checked'] - result['checked_bad']} of "
            f"{result['checked']} hold. `offbook tasks leaks`: {result['audited'] - result['audited_bad']} of "
            f"{result['audited']} have no leak.",
        ]
    lines += [
        "",
        "| package | split | tests | left out | features | tried | tasks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["repositories"].items():
        cells = [f"{name} {row['version']}", row["split"], row["tests"], row["left_out"], row["features"], row["tried"]]
        cells.append(row["verified"])
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
        f"| what a trivial body passes of the failing tests, mean | {result['mean_floor']:.1%} |",
        f"| levels | {', '.join(f'{level} {count}' for level, count in result['levels'].items())} |",
        f"| gold patch, files in the median; request, characters in the median | {result['median_files']:g}; "
        f"{result['median_characters']:g} |",
        f"| a task's folder | {result['bytes_a_task']:,} bytes in {result['files_a_task']} files |",
        f"| what the tasks of a repository share, a task | {result['shared_bytes_a_task']:,} bytes in "
        f"{result['shared_files_a_task']} files |",
        "| time of a candidate by stage | "
        + ", ".join(f"{stage} {share:.0%}" for stage, share in result["stages"].items())
        + " |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
