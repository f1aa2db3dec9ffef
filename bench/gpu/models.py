"""What a step takes, by model: `python bench/gpu/models.py --json models.json`.

Qwen3 shapes with random weights in bfloat16: all weights trained with float32 masters, or adapters alone. One rollout
of 16k tokens with 4 targets, as in feedback.py, scored by a live and by a frozen teacher. Every row runs in a process
of its own, so that one which does not fit takes nothing from the next. `held` is what is allocated before the first
step and `state` after it; `peak` is the most of a step, by torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from shapes import DEVICE

ROWS = {"0.6B": 0, "1.7B": 0, "4B": 0, "8B": 16, "32B": 16}  # and the rank of the adapters; 0 trains all weights
TRY = {"tiny": 0, "tiny+lora": 4}
LIMIT_S = 500.0  # of one row, compiling included


def measure(name: str, rank: int, tokens: int, recompute: str, compiled: bool) -> dict[str, Any]:
    from feedback import KINDS, Shape, make_samples
    from shapes import allocated_gib, forget, free_memory, make_model, time_once

    from offbook.config import LoraConfig, TrainConfig
    from offbook.train.teachers import make_teachers
    from offbook.train.trainer import Trainer

    settings = TrainConfig(
        micro_tokens=tokens,
        recompute=recompute,
        compile=compiled,
        precision="bfloat16",
        lora=LoraConfig(rank=rank),
    )
    model = make_model(name.partition("+")[0], settings.precision, rank)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer = Trainer(model, settings)
    trained = sum(master.numel() for master in trainer.masters.named.values())
    row: dict[str, Any] = {"parameters": parameters, "trained": trained, "held_gib": allocated_gib()}
    for arm in ("live", "frozen"):
        forget(trainer.model, trainer.masters.named)
        trainer.teachers = {}
        free_memory()
        trainer.teachers = make_teachers(trainer.student, {arm: KINDS[arm]})
        step = partial(trainer.step, make_samples(Shape(1, tokens, 4), arm))
        first_s, _ = time_once(step), time_once(step)
        free_memory()
        step_s = statistics.median(time_once(step) for _ in range(3))
        memory = {"state_gib": allocated_gib(), "peak_gib": allocated_gib(peak=True)}
        row[arm] = {"first_s": first_s, "step_s": step_s, **memory}
    return row


def in_own_process(name: str, rank: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--rank", str(rank), "--tokens", str(options.tokens)]
    command += ["--recompute", options.recompute, *(["--eager"] if options.eager else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {LIMIT_S:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip() or "it was killed").splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows = ROWS if DEVICE == "cuda" else TRY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows))
    parser.add_argument("--tokens", type=int, default=16_384 if DEVICE == "cuda" else 2_400)
    parser.add_argument("--recompute", choices=("none", "layers", "all"), default="layers")
    parser.add_argument("--eager", action="store_true", help="nothing is compiled")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        compiled = DEVICE == "cuda" and not options.eager
        print(json.dumps(measure(options.one, options.rank, options.tokens, options.recompute, compiled)))
        return
    print(f"one rollout of {options.tokens} tokens, 4 targets, recompute {options.recompute}")
    print(f"{'':12}{'':8}{'teacher':>9}{'step s':>9}{'held GiB':>10}{'state':>8}{'peak':>8}{'first s':>9}")
    found = []
    for name in options.rows:
        row = {"model": name, "rank": rows[name], "tokens": options.tokens, "recompute": options.recompute}
        row |= in_own_process(name, rows[name], options)
        method = f"LoRA {rows[name]}" if rows[name] else "full"
        if "failed" in row:
            print(f"{name:12}{method:8}{row['failed']}", flush=True)
        for arm in ("live", "frozen") if "failed" not in row else ():
            of = row[arm]
            figures = f"{of['step_s']:9.2f}{row['held_gib']:10.1f}{of['state_gib']:8.1f}{of['peak_gib']:8.1f}"
            print(f"{name:12}{method:8}{arm:>9}{figures}{of['first_s']:9.0f}", flush=True)
        found.append(row)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
