"""What does YaRN do? A small model that looks things up in its context, stretched 4 and 8 times.

    python bench/cpu/long.py --out runs/long --seeds 0 1 2 --json docs/results/long.json
    python bench/cpu/long.py --out runs/long --seeds 0 --arms yarn-8     # some; several processes at once
    python bench/cpu/long.py --out runs/long-tiny --tiny                 # a minute on a CPU

The base is trained on windows of 512 tokens in which what stands far away has to be copied (long_windows.py). An arm
stretches its positions, or leaves them alone, and is measured at once and after a few steps of `offbook pretrain` on
windows of the new length, the same for all. Loss is in nats per token on windows of held-out repositories, by position:
up to the old length (what was harmed), and up to 2, 4 and 8 times that. `answers` are the tokens alone that can be
copied. Questions are those of questions.py. What is done already is not done again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import shutil
import time
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from long_windows import first_model, repositories, windows, write_windows
from methods import kept
from questions import is_right, long_questions

from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, latest_checkpoint, whole_folder, write_atomic
from offbook.core.shares import wilson
from offbook.evals.base import TextModel
from offbook.stages.pretrain import extended, pretrain
from offbook.train.forward import token_logprobs

ARMS = ["none-4", "yarn-4", "none-8", "yarn-8"]
BASE = "base"  # as it is, beyond what it was trained for
QUESTIONS = ("needle", "recall")
MARGIN = 16  # tokens of a window that a path may take


class Bench:
    """Of one seed."""

    def __init__(self, seed: int, arguments: argparse.Namespace):
        self.seed, self.arguments, self.short = seed, arguments, arguments.short
        self.root: Path = arguments.out / f"seed-{seed}"

    def prepare(self) -> None:
        """By whoever comes first; the others wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "preparing").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            first = self.root / "first"
            if not first.is_dir():
                first_model(first, self.seed, self.short, self.arguments.width)
            steps, rate = self.arguments.base_steps, self.arguments.base_rate
            self.base = self.trained(first, "base-run", self.short, "", steps, rate)

    def trained(self, model: Path, name: str, context: int, rope: str, steps: int, rate: float) -> Path:
        """By `offbook pretrain`, as users do it."""
        batch, data = max(context, self.arguments.batch), self.root / f"windows-{context}-{steps}"
        if not data.is_dir():
            with whole_folder(data) as part:
                made = windows(f"{self.seed} {context}", "train", context - MARGIN, (asked := TextModel(model)).count)
                write_windows(part, made, max(1, steps * batch // context), context, asked.count)
        given = {
            "model": model, "out": self.root / name, "seed": self.seed, "threads": self.arguments.threads,
            "pretrain.data": json.dumps([str(data)]), "pretrain.context": context, "pretrain.rope": rope,
            "pretrain.batch_tokens": batch + MARGIN, "pretrain.learning_rate": rate,
            "pretrain.licences": '["any"]', "pretrain.validation_share": 0, "train.micro_tokens": batch,
        }  # fmt: skip

        def on_step(row: dict[str, Any]) -> None:
            if row["step"] % 50 == 0 or row["step"] == row["steps"]:
                print(f"seed {self.seed} {name}: step {row['step']}, loss {row['ce/loss']:.3f}", flush=True)

        run = pretrain(load_config([], {key: str(value) for key, value in given.items()}), on_step=on_step)
        return latest_checkpoint(RunFolder(run.path))

    def measured(self, model: Path, times: int) -> dict[str, Any]:
        """Up to so many times the old length."""
        asked, found = TextModel(model), dict[str, Any]()
        sums: dict[str, list[float]] = {}
        for pieces in islice(windows("held-out", "heldout", 8 * self.short, asked.count), self.arguments.apart):
            ids, is_answer = [], []
            for text, answers in pieces:
                new = asked.ids(text)
                ids, is_answer = [*ids, *new], [*is_answer, *[answers] * len(new)]
            for place, logprob in enumerate(token_logprobs(asked.decoder, ids[: times * self.short], 1.0)):
                part = 1 << (place // self.short).bit_length()
                for key in [f"loss/{part}", *([f"answers/{part}"] if is_answer[place] else [])]:
                    sums.setdefault(key, []).append(-logprob)
        found |= {key: mean(values) for key, values in sums.items()}
        lengths = {part: int(0.95 * part * self.short) for part in (1, 2, 4, 8) if part <= times}
        code = list(islice(repositories(random.Random("asked"), "heldout"), 60))
        made = long_questions(code, list(lengths.values()), asked.count, self.seed, *[self.arguments.questions] * 2)
        for kind in QUESTIONS:
            for part, length in lengths.items():
                of_kind = made[f"{kind}/{length}"]
                found[f"{kind}/{part}"] = [sum(is_right(asked, one) for one in of_kind), len(of_kind)]
        guessed = made["recall/none"]
        return {**found, "recall/none": [sum(is_right(asked, one) for one in guessed), len(guessed)]}

    def arm(self, name: str) -> dict[str, Any]:
        began = time.monotonic()
        if name == BASE:
            return {"0": self.measured(self.base, 8), "seconds": time.monotonic() - began}
        rope, _, times = name.partition("-")
        context, steps = int(times) * self.short, self.arguments.steps
        start, row = self.base, dict[str, Any]()
        if rope == "none":  # which `offbook pretrain` refuses
            start, rope = self._renamed(context, self.root / f"{name}-start"), ""
        else:
            made = extended(self.base, self.root / f"{name}-start", context, rope, lambda line: None)
            row["0"] = self.measured(made, int(times))
        trained = self.trained(start, f"{name}-run", context, rope, steps, self.arguments.rate)
        return {**row, str(steps): self.measured(trained, int(times)), "seconds": time.monotonic() - began}

    def _renamed(self, context: int, folder: Path) -> Path:
        """The base, said to read more than it was trained for."""
        if not folder.is_dir():
            with whole_folder(folder) as part:
                shutil.copytree(self.base, part, dirs_exist_ok=True)
                config = json.loads((part / "config.json").read_text())
                write_atomic(part / "config.json", json.dumps({**config, "max_position_embeddings": context}))
        return folder


def shown(rows: list[Any]) -> str:
    """Losses: a mean over seeds and its standard error. Answers: the share that is right and Wilson's interval."""
    if isinstance(rows[0], list):
        right, of = map(sum, zip(*rows, strict=True))
        low, high = wilson(right, of) if of else (0.0, 1.0)
        return f"{right / of:.2f} ({low:.2f} to {high:.2f})" if of else ""
    return f"{mean(rows):.2f}" + (f" ± {stdev(rows) / len(rows) ** 0.5:.2f}" if len(rows) > 1 else "")


def table(found: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = []
    for kind in ("loss", "answers", *QUESTIONS):
        lines += ["", f"| {kind} | steps | up to 1x | 2x | 4x | 8x |", "|---|---|---|---|---|---|"]
        for name, by_seed in found.items():
            rows = [row for row in by_seed.values() if "error" not in row]
            for steps in [key for key in (rows[0] if rows else {}) if key.isdigit()]:
                of_parts = ([row[steps].get(f"{kind}/{part}") for row in rows] for part in (1, 2, 4, 8))
                cells = [shown(one) if None not in one else "" for one in of_parts]
                lines.append(f"| {name} | {steps} | " + " | ".join(cells) + " |")
    return lines


def run(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for seed in arguments.seeds:
        bench = Bench(seed, arguments)
        bench.prepare()
        for name in arguments.arms:
            row = found.setdefault(name, {})[str(seed)] = kept(bench.root / f"{name}.json", partial(bench.arm, name))
            print(f"seed {seed} {name}: {json.dumps(row)}", flush=True)
        if arguments.json:
            write_atomic(arguments.json, json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/long"))
    add("--seeds", type=int, nargs="+", default=[0])
    add("--arms", nargs="+", choices=[BASE, *ARMS], default=[BASE, *ARMS])
    add("--short", type=int, default=512, help="tokens that the base is trained on")
    add("--width", type=int, default=128)
    add("--base-steps", type=int, default=450)
    add("--base-rate", type=float, default=1e-3)
    add("--steps", type=int, default=10, help="at the longer length")
    add("--rate", type=float, default=5e-4)
    add("--batch", type=int, default=1024, help="tokens of a step, or one window")
    add("--apart", type=int, default=6, help="windows that the loss is measured on")
    add("--questions", type=int, default=16, help="of a kind and length")
    add("--threads", type=int, default=1)
    add("--json", type=Path)
    add("--tiny", action="store_true", help="that it runs, and nothing else")
    arguments = parser.parse_args()
    if arguments.tiny:
        parser.set_defaults(short=256, width=32, base_steps=2, steps=1, apart=1, questions=1, batch=512)
        arguments = parser.parse_args()
    found = run(arguments)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
