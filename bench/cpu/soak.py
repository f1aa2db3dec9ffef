"""Thousands of scripted rollouts with faults injected: all accounted for, nothing left behind, memory bounded.

    python bench/cpu/soak.py --rollouts 2000 --json figures.json

The agent is a script, everything else is real: the harness, the tools, the sandboxes. Faults: malformed calls, tools
that do not exist, commands that never end, floods of output, daemons, a sandbox that breaks inside a tool, an engine
that breaks, and sandboxes killed from outside while a command runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sandbox import left_behind

from offbook.agent.chat import byte_chat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.sandbox import Sandbox, open_sandbox
from offbook.types import Completion, Limits, Prompt, Rollout, Task

TOOLS = ("read_file", "edit_file", "run_command", "search_codebase", "list_dir", "finish")
LIMITS = Limits(turns=10, tokens=200_000, context=100_000, message_tokens=4_000, command_s=0.5, wall_s=60)
CHAT = byte_chat()
FAULTS = {
    "malformed": "<tool_call>{broken</tool_call>",
    "unknown_tool": render_call("open_file", {"path": "pkg/calc.py"}),
    "timeout": render_call("run_command", {"command": "sleep 30"}),
    "flood": render_call("run_command", {"command": "head -c 20000000 /dev/zero | tr '\\0' x"}),
    "daemon": render_call("run_command", {"command": "setsid sleep 60 & echo started"}),
    "tool_crash": render_call("read_file", {"path": "breaks"}),
    "killed": render_call("run_command", {"command": ": killed; sleep 0.4"}),
    "engine": "",
}
ORDINARY = (
    render_call("list_dir", {"path": "."}),
    render_call("read_file", {"path": "pkg/calc.py"}),
    render_call("search_codebase", {"pattern": "def "}),
    render_call("run_command", {"command": "cat pkg/calc.py | wc -l"}),
    render_call("edit_file", {"path": "pkg/calc.py", "old": "return 0", "new": "return 1"}),
    render_call("run_command", {"command": "echo a"}) + render_call("run_command", {"command": "echo b"}),
)


class Scripted:
    def __init__(self, rng: random.Random):
        self.fault = rng.choice([*FAULTS, None, None])
        self.lines = [rng.choice(ORDINARY) for _ in range(rng.randint(2, 5))]
        if self.fault:
            self.lines.insert(rng.randrange(len(self.lines)), FAULTS[self.fault])
        self.lines.append(render_call("finish", {}))

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        line = self.lines.pop(0)
        if not line:
            raise ConnectionError("the engine went away")
        ids = [*CHAT.encode(line), CHAT.end_id]
        return Completion(ids, [0.0] * len(ids), [0] * len(ids))


class Breaking:
    """A sandbox whose `read` breaks on one path."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> object:
        return getattr(self._sandbox, name)

    async def read(self, path: str) -> str:
        if path == "breaks":
            raise RuntimeError("injected")
        return await self._sandbox.read(path)


def sandboxes() -> Iterator[int]:
    """Our own child processes that run a command which waits to be killed."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(OSError):
            if b": killed" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def killer(period_s: float, rng: random.Random) -> None:
    """From time to time a sandbox dies under a running command."""
    while True:
        await asyncio.sleep(period_s)
        if victims := list(sandboxes()):
            with suppress(ProcessLookupError):
                os.kill(rng.choice(victims), signal.SIGKILL)


def seen(fault: str | None, rollout: Rollout) -> bool:
    """Does the record of the rollout show the fault that was injected, and did it go on where it should?"""
    kinds = {event.kind for event in rollout.events}
    texts = [m.text for segment in rollout.segments for m in segment.messages if m.role == "tool"]
    if fault == "engine":
        return rollout.stop == "crash" and "crash" in kinds
    if rollout.stop != "finish":
        return False
    if fault == "timeout":
        return any("stopped after" in text for text in texts)
    if fault == "flood":
        return any("left out" in text for text in texts)
    return fault not in ("malformed", "unknown_tool", "tool_crash") or fault in kinds


async def soak(count: int, at_once: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    slots = asyncio.Semaphore(at_once)
    stops: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    peak = [resident_mb()]

    async def one(number: int, tree: Path) -> None:
        policy = Scripted(random.Random(f"{seed}/{number}"))
        task = Task(str(number), tree, "Make it work.", tree, tree, (), (), (), TOOLS, "soak")
        async with slots, await open_sandbox(tree) as sandbox:
            rollout = await run_agent(
                task, Breaking(sandbox), policy, CHAT, Harness(LIMITS, "pocket"), str(number), "soak"
            )
        stops[rollout.stop] += 1
        if not seen(policy.fault, rollout):
            unseen[str(policy.fault)] += 1
        peak.append(max(peak.pop(), resident_mb()))

    with tempfile.TemporaryDirectory(prefix="offbook-soak-") as place:
        tree = Path(place) / "tree"
        (tree / "pkg").mkdir(parents=True)
        (tree / "pkg" / "calc.py").write_text("def one():\n    return 0\n")
        for number in range(min(at_once, count)):  # the first ones fill caches; memory is compared after them
            await one(-1 - number, tree)
        stops.clear()
        unseen.clear()
        start_mb = resident_mb()
        peak[:] = [start_mb]
        started = time.monotonic()
        killing = asyncio.create_task(killer(0.2, rng))
        async with asyncio.TaskGroup() as jobs:
            for number in range(count):
                jobs.create_task(one(number, tree))
        killing.cancel()
        seconds = time.monotonic() - started
        left = left_behind()
    return {
        "rollouts": count,
        "accounted": sum(stops.values()),
        "stops": dict(stops),
        "faults_not_recorded": dict(unseen),
        "leaks": sum(left.values()),
        "left_behind": left,
        "rollouts_per_s": count / seconds,
        "start_mb": start_mb,
        "peak_mb": peak[0],
        "end_mb": resident_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(soak(arguments.rollouts, arguments.at_once, arguments.seed))
    for name, value in figures.items():
        print(f"{name:>20}  {value:.1f}" if isinstance(value, float) else f"{name:>20}  {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
