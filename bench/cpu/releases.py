"""Tasks from releases: how many a jump gives, what became of the rest, and how large they are.

python bench/cpu/releases.py --out runs/releases --json docs/results/releases.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from dataclasses import asdict
from pathlib import Path

from offbook.sandbox import SandboxSpec
from offbook.tasks import load_task
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import Made, make_tasks
from offbook.tasks.factory.records import funnel
from offbook.tasks.git import touched_by

JUMPS = (
    *("cachetools==5.3.0..6.2.0", "more-itertools==10.1.0..10.7.0", "parse==1.18.0..1.20.2", "sqlparse==0.4.4..0.5.5"),
    *("boltons==23.0.0..25.0.0", "tinydb==4.5.0..4.8.2", "voluptuous==0.13.1..0.15.2", "python-dotenv==0.19.2..1.1.1"),
)


def size_of(folder: Path) -> tuple[int, int, int]:
    """Changed lines, files and characters of the request."""
    changed = touched_by((folder / "solution" / "gold.patch").read_text())
    product = [sum(lines) for path, lines in changed.items() if path.endswith(".py")]
    return sum(product), len(product), len(load_task(folder).instruction)


def row(made: Made, out: Path) -> str:
    if made.unprepared:
        return f"| {made.source} | | | | | | {made.unprepared} |"
    done = made.verified
    sizes = [size_of(out / made.split / one.id) for one in done]
    medians = [f"{statistics.median(values):g}" for values in zip(*sizes, strict=True)] if done else ["", "", ""]
    refused = "; ".join(f"{count} {reason}" for reason, count in funnel(made.outcomes).items())
    cells = [made.source.removeprefix("release:"), str(made.candidates), str(len(done)), *medians, refused]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jumps", nargs="*", default=JUMPS)
    parser.add_argument("--out", type=Path, default=Path("runs/releases"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: list[Made] = []
    print("| jump | pieces | tasks | changed lines | files | characters of the request | refused |")
    print("|---|---|---|---|---|---|---|")
    for jump in options.jumps:  # one by one: a jump that fails does not take the others with it
        try:
            result += asyncio.run(
                make_tasks([f"release:{jump}"], options.out, SandboxSpec(), MakeSettings(heldout=0.0))
            )
        except Exception as error:
            print(f"| {jump} | | | | | | {type(error).__name__}: {error} |", flush=True)
            continue
        print(row(result[-1], options.out), flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(made) for made in result], indent=1))
    every = [options.out / made.split / one.id for made in result for one in made.verified]
    if every:
        values = zip(*map(size_of, every), strict=True)
        print(f"\n{len(every)} tasks; medians: {', '.join(f'{statistics.median(one):g}' for one in values)}")


if __name__ == "__main__":
    main()
