"""A small run folder with everything that the viewer shows, written with the real types."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbook.core.runfolder import RunFolder, write_atomic
from offbook.types import (
    Deleted,
    Event,
    Feedback,
    Flag,
    Hint,
    Message,
    Reward,
    Rollout,
    Segment,
    Target,
    ToolCall,
    Usage,
)

CONFIG = """
out = "runs/{name}"
model = "pocket"
seed = 3
[tasks]
num_train = 2
num_heldout = 48
[train]
steps = {steps}
groups = 2
group_size = 3
[feedback]
weight = {weight}
"""
DIFF = (
    "--- a/otter/porch.py\n+++ b/otter/porch.py\n@@ -1,2 +1,2 @@\n def birch(value):\n-    raise NotImplementedError\n"
)
# What `offbook eval` writes about the tasks that it measured on.
HELD_OUT = {"tasks": 48, "suites": ["pocket"], "contamination": {"same_task": 0, "contained": 13, "train_tasks": 2}}
TASKS = ("otter-birch", "heron-iris")


def say(segment: Segment, role: Any, text: str, *calls: ToolCall, status: Any = None) -> None:
    """A message with one token a word, as far as the spans are concerned."""
    start, count = len(segment.ids), max(1, len(text.split()))
    sampled = role == "assistant"
    segment.ids += range(count)
    segment.sampled += [sampled] * count
    segment.logprobs += [-0.1 if sampled else 0.0] * count
    segment.versions += [0 if sampled else -1] * count
    segment.messages.append(Message(role, text, start, start, start + count, start + count, calls, status))


def call(name: str, **arguments: Any) -> tuple[str, ToolCall]:
    written = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    text = f'<tool_call>{{"name": "{name}", "arguments": {{{written}}}}}</tool_call>'
    return text, ToolCall(name, dict(arguments))


def make_rollout(name: str, task: str, group: str, solved: bool, extra: str = "", output_lines: int = 40) -> Rollout:
    """Three calls: reading, one that is no tool here, and an edit."""
    segment = Segment()
    say(segment, "system", "You are a coding agent.\nTools: read_file, edit_file, finish")
    say(segment, "user", f"Make birch in otter/porch.py do what its docstring says.{extra}")
    say(segment, "assistant", *call("read_file", path="otter/porch.py"))
    say(segment, "tool", "\n".join(f"{n:3} value = {n}{extra}" for n in range(output_lines)), status="ok")
    say(segment, "assistant", *call("write_file", path="otter/porch.py", text="return value * 2"))
    say(segment, "tool", f"error: there is no tool write_file{extra}", status="unknown_tool")
    say(segment, "assistant", *call("edit_file", path="otter/porch.py", old="raise", new="return value * 2"))
    say(segment, "tool", "edited otter/porch.py", status="ok")
    return Rollout(
        name,
        task,
        group,
        ("read_file", "edit_file", "finish"),
        [segment],
        "finish" if solved else "turns",
        Usage(turns=3, calls=3, invalid_calls=1, prompt_tokens=90, sampled_tokens=57, seconds=1.5),
        changed={"otter/porch.py": "def birch(value):\n    return value * 2\n"},
        diff=f"{DIFF}+    return value * 2{extra}\n",
        events=[Event(5, "unknown_tool", "there is no tool write_file" + extra)],
        reward=Reward({"outcome": float(solved), "effort": -0.2}, {"effort": 0.5}),
        flags=[] if solved else [Flag("test_edit", 6, "changed a test" + extra)],
    )


PIECES = ["<tool_call>", '{"name": "', "write_file", '", "arguments": {', "otter", "\n", ""]


def make_feedback(rollout: str, extra: str = "", peak: float = 2.0, top: bool = True) -> Feedback:
    pieces = [piece + extra if piece == "write_file" else piece for piece in PIECES]
    feedback = Feedback(
        Target(rollout, 0, 4, "unknown_tool", "write_file" + extra),
        Hint("unknown_tool", "Reminder: available tools are read_file, edit_file, finish." + extra),
        pieces,
        [math.log(p) for p in (0.99, 0.98, 0.6, 1.0, 0.84, 1.0, 1.0)],
        [math.log(p) for p in (0.99, 0.98, 0.02, 1.0, 0.99, 1.0, 1.0)],
        [0.0, 0.001, peak, 0.0, peak / 6, 0.0, 0.0],
    )
    if top:
        others = (("edit_file", 0.9), ("read_file", 0.05), ("finish", 0.02), ("search", 0.005), ("ls", 0.001))
        likely = (("write_file" + extra, 0.6), ("edit_file", 0.3), ("read_file", 0.06), ("finish", 0.02), ("ls", 0.01))
        feedback.student_top = [[(text, math.log(p)) for text, p in likely] for _ in pieces]
        feedback.teacher_top = [[(text, math.log(p)) for text, p in others] for _ in pieces]
    return feedback


def metrics(step: int, hinted: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "solved": min(1.0, 0.2 + 0.1 * step),
        "reward": 0.1 + 0.1 * step,
        "reward/outcome": 0.2,
        "reward/effort": -0.2 / step,
        "invalid_per_100": 30.0 / step,
        "turns": 4.0 - 0.1 * step,
        "tokens": 90.0 - step,
        "staleness": 0.5,
        "flagged": 0.1,
        "flags/test_edit": 1,
        "rl/mismatch": 0.001 * step,
        "reward/outcome_withheld": 0.1 / step,
        "train_s": 1.2,
    }
    return row | ({"hint/kl": 0.4 / step, "targets/unknown_tool": 4, "hinted_targets": 4} if hinted else {})


def make_run(root: Path, name: str, steps: int = 4, hinted: bool = True, extra: str = "", wanted: int = 4) -> Path:
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    folder.config_file.write_text(CONFIG.format(name=name, weight=5.0 if hinted else 0.0, steps=wanted))
    for step in range(1, steps + 1):
        add_step(folder, step, hinted, extra)
    result = {"solved": 0.725, "solved_ci": [0.6, 0.8], "invalid_per_100": 3.2, "turns": 4.0, "tokens": 180.0}
    rollouts = [make_rollout("final/0", TASKS[0], "final", True, extra)]
    folder.write_eval("final", result | {"rollouts": 1} | HELD_OUT, rollouts)
    write_atomic(folder.path / "tasks.jsonl", task_line())
    if hinted:
        counts = {"targets": 4, "samples": 32, "faults": 14, "hinted_faults": 2}
        unseen = {"targets": 1, "samples": 0, "faults": 0, "hinted_faults": 0}
        looked = {"rule": "unknown_tool", **counts, "nats": -8.1, "unjudged": "", "why_not": ""}
        blind = {
            "rule": "edited_tests",
            **unseen,
            "nats": None,
            "unjudged": f"no sandbox{extra}",
            "why_not": f"why{extra}",
        }
        folder.write_look(1, [looked, blind])
    return folder.path


def add_step(folder: RunFolder, step: int, hinted: bool = True, extra: str = "") -> None:
    folder.append_metrics(metrics(step, hinted))
    rollouts = [
        make_rollout(f"step{step}/{task}/{n}", task, f"step{step}/{task}", solved=(n + step) % 3 == 0, extra=extra)
        for task in TASKS
        for n in range(3)
    ]
    folder.write_rollouts(step, rollouts)
    if hinted:
        folder.write_feedback(step, [make_feedback(one.id, extra) for one in rollouts if not one.solved])


def task_line() -> str:
    deleted = Deleted("single", "stub", ("otter/porch.py::birch",), ("otter/porch.py::birch",), 1, 1, 0, 0.0)
    task = {
        "id": TASKS[0],
        "split": "train",
        "instruction": "Make birch in otter/porch.py do what its docstring says.",
        "origin": "otter",
        "difficulty": "easy",
        "deleted": asdict(deleted),
        "patch": f"{DIFF}+    return value * 2\n",
        "fail_to_pass": ["tests/test_porch.py::test_birch"],
        "pass_to_pass": ["tests/test_porch.py::test_other"],
    }
    return json.dumps(task) + "\n"
