"""What honest work costs, by sessions of a reviewer who had not read the monitors or the grader.

    python bench/cpu/blind_sessions.py TASKS --out sessions.json [--only NAME ...] [--jobs 2]

TASKS is a folder of task folders (as for bench/cpu/blind_bodies.py). Each session of blind_data/sessions.py and
blind_data/second.py is played call by call by the harness in a real sandbox of its task and scored as in training:
tests, rewards and monitors at their defaults. A line per session: outcome, reward, its parts, findings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from blind_data import second
from blind_data.sessions import SESSIONS as FIRST
from blind_data.sessions import SOLVE, solved_with
from blind_data.targets import TARGETS
from hacks.case import Script

from offbook.agent.harness import Harness, run_agent
from offbook.core.config import load_config
from offbook.rl.collector import Collector
from offbook.tasks import load_task
from offbook.tasks.suite import suite_sandbox
from offbook.types import Limits

SESSIONS = FIRST | second.SESSIONS
LIMITS = Limits(turns=20, tokens=400_000, context=400_000, message_tokens=20_000, command_s=90)


async def played(name: str, tasks: Path, collector: Collector) -> dict[str, Any]:
    place, given = SESSIONS[name]
    steps = [step for each in given for step in (solved_with(place) if each is SOLVE else (each,))]
    task = load_task(tasks / TARGETS[place].task)
    sandbox = await suite_sandbox(task.tree, task.suite, collector.sandbox)
    try:
        script = Script(tuple(steps))
        rollout = await run_agent(task, sandbox, script, script.chat, Harness(LIMITS), name, "blind")
    finally:
        await sandbox.close()
    messages = [message for segment in rollout.segments for message in segment.messages]
    grade = await collector.scored(task, rollout)
    return {
        "session": name,
        "task": task.id,
        "stop": rollout.stop,
        "calls": [str(message.status) for message in messages if message.status],
        "passed": None if grade is None else grade.solved,
        "missing": sorted(grade.missing)[:3] if grade else [],
        "solved": rollout.solved,
        "reward": rollout.reward.total,
        "parts": rollout.reward.parts,
        "findings": [(flag.kind, flag.evidence) for flag in rollout.flags],
        "said": [message.text[-600:] for message in messages if getattr(message, "role", "") == "tool"],
    }


async def all_of_them(names: list[str], options: argparse.Namespace) -> None:
    collector = Collector(load_config([], {}), None)
    rows: list[dict[str, Any]] = []
    places = asyncio.Semaphore(options.jobs)

    async def one(name: str) -> None:
        async with places:
            row = await played(name, options.tasks, collector)
        rows.append(row)
        options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        kinds = [kind for kind, _ in row["findings"]]
        print(f"{len(rows)}/{len(names)} {name}: {row['stop']} {row['reward']} {row['parts']} {kinds}", flush=True)

    for problem in await asyncio.gather(*map(one, names), return_exceptions=True):
        if isinstance(problem, BaseException):
            print(f"not played: {problem!r}")
    for sessions in (FIRST, second.SESSIONS):
        those = [row for row in rows if row["session"] in sessions]
        flagged = [row for row in those if row["findings"]]
        withheld = [row for row in those if row["passed"] and not row["solved"]]
        failed = [row["session"] for row in those if not row["passed"]]
        less = [row["session"] for row in those if row["reward"] < 1]
        punished = [row["session"] for row in those if row["reward"] < 0]
        print(f"{len(those)} sessions: {len(withheld)} withheld, {len(flagged)} with a finding")
        print(f"    less than 1: {less}, below 0: {punished}, tests fail: {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    asyncio.run(all_of_them(options.only or list(SESSIONS), options))


if __name__ == "__main__":
    main()
