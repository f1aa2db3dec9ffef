"""What `offbook view` costs on a large run: 5,000 rollouts, and one of 100,000 tokens among them.

    python bench/cpu/view.py --json figures.json

Needs playwright and the machine's Chromium (`make test-browser` installs the first). The run folder is made with the
real types in a temporary folder; the server is the command itself, in a process of its own. Frames are those of
software rendering.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright

from offbook.core.runfolder import RunFolder
from offbook.types import Feedback, Hint, Message, Reward, Rollout, Segment, Target, ToolCall, Usage
from offbook.view.index import RunIndex

WORDS = ["value", "return", "import", "assert", "folder", "reward", "token", "policy", "message", "target", "hint"]
ROLLOUTS_A_STEP, GROUP = 32, 8
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

# In the page: milliseconds until `ready` is there and was painted.
PAINTED = """([address, ready]) => new Promise((done) => {
  const start = performance.now();
  if (address) location.hash = address;
  const painted = () => requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
  const look = () => (document.querySelector(ready) ? painted() : setTimeout(look, 2));
  look();
})"""
SCROLL = """(times) => new Promise((done) => {
  const frames = [], sandbox = document.querySelector(".rows") || document.scrollingElement;
  let last = 0;
  function frame(now) {
    if (last) frames.push(now - last);
    last = now;
    if (frames.length >= times) return done(frames);
    sandbox.scrollTop += 400;
    requestAnimationFrame(frame);
  }
  requestAnimationFrame(frame);
})"""


def text(rng: random.Random, num_words: int) -> str:
    words = rng.choices(WORDS, k=num_words)
    return "\n".join(" ".join(words[at : at + 9]) for at in range(0, num_words, 9))


def make_rollout(rng: random.Random, name: str, num_tokens: int, num_turns: int) -> Rollout:
    """As many calls as turns; a fifth of the tokens is sampled."""
    segment = Segment()

    def say(role: Any, count: int, words: str, *calls: ToolCall, status: Any = None) -> None:
        start, sampled = len(segment.ids), role == "assistant"
        segment.ids += [rng.randrange(50_000) for _ in range(count)]
        segment.sampled += [sampled] * count
        segment.logprobs += [-rng.expovariate(2.0) if sampled else 0.0 for _ in range(count)]
        segment.versions += [3 if sampled else -1] * count
        segment.messages.append(Message(role, words, start, start, start + count, start + count, calls, status))

    each = num_tokens // num_turns
    say("user", 40, text(rng, 40))
    for turn in range(num_turns):
        arguments = {"path": f"package/module_{turn}.py", "old": "raise", "new": text(rng, each // 8)}
        written = json.dumps({"name": "edit_file", "arguments": arguments})
        say("assistant", each // 5, f"<tool_call>{written}</tool_call>", ToolCall("edit_file", arguments))
        say("tool", each * 4 // 5, text(rng, each * 4 // 5), status=rng.choice(("ok", "ok", "failed", "malformed")))
    diff = "".join(f"+{line}\n" for line in text(rng, 200).splitlines())
    usage = Usage(num_turns, num_turns, 1, prompt_tokens=num_tokens * 4 // 5, sampled_tokens=num_tokens // 5)
    reward = Reward({"outcome": float(rng.random() < 0.4), "effort": -rng.random() / 5})
    return Rollout(name, "task", "group", ("edit_file",), [segment], "finish", usage, diff=diff, reward=reward)


def make_feedback(rng: random.Random, rollout: Rollout) -> Feedback:
    count = 40
    likely = [[(rng.choice(WORDS), -rng.expovariate(1.0)) for _ in range(5)] for _ in range(count)]
    sides = [[-rng.expovariate(2.0) for _ in range(count)] for _ in range(2)]
    divergence = [rng.expovariate(5.0) for _ in range(count)]
    target, hint = (
        Target(rollout.id, 0, 1, "unknown_tool", "open_file"),
        Hint("unknown_tool", "Call only listed tools."),
    )
    pieces = [f"{rng.choice(WORDS)} " for _ in range(count)]
    return Feedback(target, hint, pieces, *sides, divergence, student_top=likely, teacher_top=likely)


def make_run(path: Path, num_rollouts: int, num_tokens: int, long_tokens: int) -> None:
    rng = random.Random(0)
    folder = RunFolder(path)
    path.mkdir(parents=True)
    steps = -(-num_rollouts // ROLLOUTS_A_STEP)
    folder.config_file.write_text(f'model = "made"\n[train]\nsteps = {steps}\n')
    shapes = [make_rollout(rng, "shape", num_tokens, 5) for _ in range(16)]
    for step in range(1, steps + 1):
        count = min(ROLLOUTS_A_STEP, num_rollouts - (step - 1) * ROLLOUTS_A_STEP)
        rollouts = []
        for number in range(count):
            task = f"task-{(step * 4 + number // GROUP) % 120:03d}"
            rollouts.append(
                replace(rng.choice(shapes), id=f"step{step}/{task}/{number}", task=task, group=f"{step}/{task}")
            )
        if step == 1:
            rollouts[0] = make_rollout(rng, "step1/long/0", long_tokens, 400)
        folder.write_rollouts(step, rollouts)
        folder.write_feedback(step, [make_feedback(rng, one) for one in rollouts if rng.random() < 0.3])
        solved = sum(one.solved for one in rollouts) / count
        folder.append_metrics({"step": step, "solved": solved, "reward": solved, "targets/unknown_tool": 4})


def memory_mb(pid: int) -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: round(int(lines[key].split()[0]) / 1024, 1) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def frames(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "frames": len(values),
        "median_ms": round(median(ordered), 1),
        "p95_ms": round(ordered[int(0.95 * len(ordered))], 1),
        "worst_ms": round(ordered[-1], 1),
        "over_50_ms": sum(value > 50 for value in values),
    }


def in_browser(url: str, rounds: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {name: [] for name in ("list_cold_ms", "long_cold_ms", "long_warm_ms")}
    scrolls: dict[str, list[float]] = {"list_scroll": [], "long_scroll": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for _ in range(rounds):
            for name, address, ready in (
                ("list_cold_ms", "#/rollouts/0", ".spacer .row"),
                ("long_cold_ms", "#/rollout/0/step_00001/0", ".message.filled"),
            ):
                page = browser.new_page(viewport={"width": 1200, "height": 900})
                began = time.perf_counter()
                page.goto(url + address, wait_until="commit")
                page.evaluate(PAINTED, [None, ready])
                found[name].append(round(1000 * (time.perf_counter() - began)))
                if name == "list_cold_ms":
                    scrolls["list_scroll"] += page.evaluate(SCROLL, 120)
                    found["long_warm_ms"].append(
                        round(page.evaluate(PAINTED, ["#/rollout/0/step_00001/0", ".message.filled"]))
                    )
                else:
                    scrolls["long_scroll"] += page.evaluate(SCROLL, 240)
                page.close()
        browser.close()
    first = {"list_first_ms": found["list_cold_ms"][0]}  # the server reads the whole run folder for this one
    medians = {name: median(values) for name, values in found.items()}
    return first | medians | {name: frames(values) for name, values in scrolls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=1000, help="of an ordinary rollout")
    parser.add_argument("--long", type=int, default=100_000, help="tokens of the long one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run"
        make_run(path, options.rollouts, options.tokens, options.long)
        size = sum(file.stat().st_size for file in path.rglob("*.jsonl"))
        loads = []
        for _ in range(options.rounds):
            began = time.perf_counter()
            index = RunIndex("run", path)
            index.refresh()
            loads.append(time.perf_counter() - began)
        command = [sys.executable, "-m", "offbook", "view", str(path), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            page = in_browser(url, options.rounds)
            memory = memory_mb(server.pid)
        finally:
            server.terminate()
            server.wait()
    figures = {
        "rollouts": sum(len(lines.places) for lines in index.rollouts.values()),
        "run_folder_mb": round(size / 1e6),
        "index_load_s": round(median(loads), 3),
        **page,
        "server_memory_mb": memory,
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
