"""Steps an hour and how long the GPU is idle: synchronous against asynchronous, with offbook's engine and with vLLM.

    python bench/gpu/asynchronous.py --model smollm2-135m --steps 8 --json asynchronous.json
    python bench/gpu/asynchronous.py --model pocket --steps 2 --ways local-synchronous local-asynchronous   # on a CPU

Each way is a run of `offbook train` in a process of its own; what fails is a row that says so. Seconds are from the
first request to the end of the last step: models and servers are up by then (--boot is how long they may take). A way
that runs past --timeout is judged by the steps that it has done. Idle is the share of samples, five a second, in which
nvidia-smi saw no kernel.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SAMPLE_S = 0.2
WAYS = {
    "local-lockstep": {"engine.kind": "lockstep"},
    "local-synchronous": {"engine.kind": "continuous"},
    "local-asynchronous": {"engine.kind": "continuous", "loop.max_staleness": "1"},
    "local-asynchronous-2": {"engine.kind": "continuous", "loop.max_staleness": "2"},
    "vllm-synchronous": {"engine.kind": "vllm"},
    "vllm-asynchronous": {"engine.kind": "vllm", "loop.max_staleness": "1"},
    "vllm-asynchronous-2": {"engine.kind": "vllm", "loop.max_staleness": "2"},
}
Samples = list[tuple[float, float]]  # when, and per cent


def watch(found: Samples, over: threading.Event) -> None:
    if shutil.which("nvidia-smi") is None:
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    while not over.wait(SAMPLE_S):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found.append((time.time(), float(done.stdout.split()[0])))


def measured(way: str, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    settings = {**WAYS[way], **dict(pair.split("=", 1) for pair in arguments.set)}
    options = [word for key, value in settings.items() for word in (f"--{key}", value)]
    recipe = ["@", arguments.recipe] if arguments.recipe else []
    command = [sys.executable, "-m", "offbook", "train", *recipe, "--model", arguments.model, "--out", str(out)]
    command += ["--train.steps", str(arguments.steps), "--feedback.look", "false", *options]
    samples, over = Samples(), threading.Event()
    watcher = threading.Thread(target=watch, args=(samples, over))
    watcher.start()
    try:
        with out.with_suffix(".log").open("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                until = time.monotonic() + arguments.boot
                while not _has_begun(out) and process.poll() is None and time.monotonic() < until:
                    time.sleep(SAMPLE_S)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(arguments.timeout if _has_begun(out) else 0)
            finally:
                process.terminate()  # its servers end with it
                process.wait(30)
            log.seek(0)
            said = log.read()
    finally:
        over.set()
        watcher.join()
    metrics = out / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    if not rows:
        raise RuntimeError(" | ".join(said.strip().splitlines()[-3:]))
    lines = [json.loads(line) for line in (out / "slots" / "journal.jsonl").read_text().splitlines()]
    began = next(line["at"] for line in lines if line["state"] == "requested")
    ended = metrics.stat().st_mtime
    use = [value for at, value in samples if began <= at <= ended]
    return {
        "steps": len(rows),
        "seconds": ended - began,
        "steps_an_hour": 3600 * len(rows) / (ended - began),
        "waited_for_rollouts_s": statistics.mean(row["rollout_s"] for row in rows),
        "train_s": statistics.mean(row["train_s"] for row in rows),
        "gpu_idle": sum(value == 0 for value in use) / len(use) if use else None,
        "gpu_use": statistics.mean(use) / 100 if use else None,
        "staleness": statistics.mean(row["staleness"] for row in rows),
        "too_old": sum(row["staleness/too_old"] for row in rows),
        "mismatch": rows[-1].get("rl/mismatch"),
        "truncated": statistics.mean(row["rl/truncated"] for row in rows if "rl/truncated" in row),
        "solved": statistics.mean(row["solved"] for row in rows[-3:]),
    }


def _has_begun(out: Path) -> bool:
    journal = out / "slots" / "journal.jsonl"
    return journal.is_file() and journal.stat().st_size > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipe", default="")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for the steps of one way")
    parser.add_argument("--boot", type=float, default=400.0, help="seconds before that for models and servers")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the configuration, for all ways")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for way in arguments.ways:
            row: dict[str, Any] = {"way": way}
            try:
                row |= measured(way, arguments, Path(scratch) / way)
            except Exception as error:  # one way that fails must not cost the others
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            rows.append(row)
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
