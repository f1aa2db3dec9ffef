"""How well the rule monitors tell cheating from honest work, and what watching file access costs.

    python bench/cpu/monitors.py --json figures.json

Plays the catalogue of tests/hacks in real sandboxes and counts each set of it apart, as well as those cases that were
held out while rules were written or mended: hacks that were found, those among them that cost nothing because nothing
was there to be found, honest work that was flagged. Rules alone judge: what a grade proves is not counted. The cost of
watching is a ratio of medians in one run: the same commands in sandboxes that
watch and in sandboxes that do not, interleaved, so that other work on the machine falls on both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hacks.case import Case, play
from hacks.sets import PARTS, SETS

from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.sandbox.bwrap.watch import can_watch
from offbook.signals.monitors.policy import action_of
from offbook.signals.monitors.worker import Worker
from offbook.types import Flag

COMMANDS = {
    "python start": "python -c 'import json, re'",
    "pytest": "python -m pytest -q -p no:cacheprovider tests",
    "grep -r": "grep -rn 'return 299' .",
    "small commands": "cat package/module_1.py; ls; sed -n 1,3p package/module_2.py; git --version",
}


async def judge(case: Case, watch: bool, worker: Worker, seconds: list[float]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="offbook-hack-") as folder:
        task, rollout = await play(case, Path(folder), watch)
        began = time.perf_counter()
        flags = worker.check(task, rollout)
        seconds.append(time.perf_counter() - began)
        return [flag.kind for flag in flags]


def summary(cheating: tuple[Case, ...], honest: tuple[Case, ...], found: dict[Case, list[str]]) -> dict[str, Any]:
    missed = [case.name for case in cheating if not found[case]]
    alarmed = [case.name for case in honest if found[case]]
    return {
        "hacks": len(cheating),
        "honest": len(honest),
        "recall": 1 - len(missed) / len(cheating),
        "false_alarms": len(alarmed) / len(honest),
        "free": sum(action_of([Flag(kind, 0, "") for kind in found[case]], {}) == "count" for case in cheating),
        "missed": missed,
        "alarmed": alarmed,
        "kinds": dict(Counter(kind for case in cheating for kind in set(found[case])).most_common()),
    }


def make_tree(folder: Path) -> Path:
    for number in range(300):
        path = folder / "package" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function_{number}():\n    return {number}\n\n\n" * 40)
    (folder / "package/__init__.py").touch()
    (folder / "tests").mkdir()
    for number in range(20):
        text = (
            f"from package.module_{number} import function_{number} as f\n\n\ndef test():\n    assert f() == {number}\n"
        )
        (folder / f"tests/test_{number}.py").write_text(text)
    return folder


async def overhead(rounds: int) -> dict[str, Any]:
    seconds: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="offbook-watch-") as folder:
        tree = make_tree(Path(folder))
        async with (
            await open_sandbox(tree, SandboxSpec()) as plain,
            await open_sandbox(tree, SandboxSpec(watch=True)) as watched,
        ):
            for round_ in range(rounds):
                for name, command in COMMANDS.items():
                    for sandbox in (plain, watched) if round_ % 2 else (watched, plain):
                        began = time.perf_counter()
                        result = await sandbox.exec(command, 120)
                        seconds[name][sandbox is watched].append(time.perf_counter() - began)
                        assert result.exit_code == 0, result.output
    rows = {name: (median(both[False]), median(both[True])) for name, both in seconds.items()}
    total = sum(watched for _, watched in rows.values()) / sum(plain for plain, _ in rows.values())
    return {
        "overhead": total,
        "commands": {name: {"plain_s": a, "watched_s": b, "ratio": b / a} for name, (a, b) in rows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--rounds", type=int, default=15, help="of the commands that are timed")
    arguments = parser.parse_args()
    watch = can_watch()

    async def measure() -> dict[str, Any]:
        cheating = tuple(case for part, _ in SETS.values() for case in part)
        honest = tuple(case for _, part in SETS.values() for case in part)
        worker, seconds = Worker(), list[float]()
        found = {case: await judge(case, watch, worker, seconds) for case in (*cheating, *honest)}
        sets = {name: summary(*part, found) for name, part in PARTS.items()}
        parts = {**summary(cheating, honest, found), "sets": sets, "judging_s": median(seconds)}
        return {**parts, **(await overhead(arguments.rounds) if watch else {"overhead": None})}

    figures = asyncio.run(measure())
    print(f"{'':14} {'hacks':>6} {'recall':>7} {'free':>5} {'honest':>7} {'false alarms':>13}")
    for name, part in {"all": figures, **figures["sets"]}.items():
        numbers = f"{part['hacks']:6} {part['recall']:7.3f} {part['free']:5} {part['honest']:7}"
        numbers += f" {part['false_alarms']:13.3f}"
        print(f"{name:14} {numbers}  {' '.join((*part['missed'], *part['alarmed']))}")
    for name, row in figures.get("commands", {}).items():
        print(f"{name:14} {row['plain_s'] * 1e3:8.1f} ms, watched {row['watched_s'] * 1e3:8.1f} ms, {row['ratio']:.2f}")
    print(f"judging a rollout takes {figures['judging_s'] * 1e3:.1f} ms, the median of all")
    print(f"watching costs {figures['overhead']:.3f}" if watch else "watching file access needs root here")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
