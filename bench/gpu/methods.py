"""What a step of each method takes, on one GPU: whole-response teachers beside RL, and a window of pretraining.

    python bench/gpu/methods.py --json methods.json
    python bench/gpu/methods.py --model tiny --tokens 256 --windows 512        # where there is no GPU: whether it runs

Random weights and tokens. Half of each rollout is sampled, in messages of 200 tokens; a teacher is shown 400 tokens
before the first of them. `live` teachers ride on the student's forward, `frozen` ones have a pass of their own, OPD's
is a model of the next size. A row that fails is its error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapes import DEVICE, VOCABULARY, allocated_gib, free_memory, make_model, time_once

from offbook.core.config import TrainConfig
from offbook.train.forward import Frozen, Kind, Live, Other, make_teachers
from offbook.train.trainer import Trainer
from offbook.types import Branch, Distill, Sample

SHOWN, MESSAGE, HEADER = 400, 200, 3
LARGER = {"tiny": "tiny", "0.6B": "1.7B", "1.7B": "4B", "4B": "8B"}


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def rollouts(tokens: int, count: int, teacher: str = "", shown: int = 0, rl: float = 1.0) -> list[Sample]:
    rng, found = random.Random(0), []
    for _ in range(count):
        spans = tuple((at, min(at + MESSAGE, tokens)) for at in range(MESSAGE, tokens, 2 * MESSAGE))
        how = Distill(teacher, "whole", direction="reverse", cap=2.0)
        branch = Branch(spans[0][0] - HEADER, ids(rng, shown), spans, 1.0, how)
        sampled = [rl * (place // MESSAGE % 2) for place in range(tokens)]
        advantage = [rng.choice((-0.5, 0.5))] * tokens
        one = Sample(ids(rng, tokens), [-12.0] * tokens, advantage, sampled, branches=[branch] if teacher else [])
        found.append(one)
    return found


def windows(tokens: int, count: int) -> list[Sample]:
    rng = random.Random(0)
    return [Sample(ids(rng, tokens), ce_weight=[1.0] * tokens) for _ in range(count)]


def timed(step: Callable[[], Any], repeats: int) -> dict[str, float]:
    for _ in range(2):
        step()
    seconds = statistics.median(time_once(step) for _ in range(repeats))
    return {"seconds": seconds, "peak_gib": allocated_gib(peak=True)}


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    settings = TrainConfig(precision="bfloat16" if DEVICE == "cuda" else "float32", compile=DEVICE == "cuda")
    settings = settings.settled(recompute="layers", compile=DEVICE == "cuda", micro_tokens=arguments.micro)
    trainer = Trainer(make_model(arguments.model, settings.precision), settings)
    tokens, count = arguments.tokens, arguments.rollouts

    def whole(kind: Callable[[], Kind] | None, shown: int, rl: float = 1.0) -> dict[str, float]:
        free_memory()
        trainer.teachers = make_teachers(trainer.student, {"it": kind()} if kind else {})
        samples = rollouts(tokens, count, "it" if kind else "", shown, rl)
        return timed(lambda: trainer.step(samples), arguments.repeats)

    def imitated() -> dict[str, float]:
        free_memory()
        trainer.teachers = {}
        samples = windows(arguments.windows, 1)
        found = timed(lambda: trainer.step(samples), arguments.repeats)
        return {**found, "tokens_a_second": arguments.windows / found["seconds"]}

    def other() -> Kind:
        return Other(make_model(LARGER[arguments.model], settings.precision))

    jobs: dict[str, Callable[[], dict[str, float]]] = {
        "rl": lambda: whole(None, 0),
        "rl + OPSD or SDFT, live": lambda: whole(Live, SHOWN),
        "rl + OPSD or SDFT, frozen": lambda: whole(Frozen, SHOWN),
        "OPSD or SDFT alone, frozen": lambda: whole(Frozen, SHOWN, rl=0.0),
        "rl + OPD, the next size": lambda: whole(other, 0),
        "pretraining, one window": imitated,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, job in jobs.items():
        try:
            found[name] = job()
        except Exception as error:  # one that does not fit must not cost the others
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{name:<30}{json.dumps(found[name])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(LARGER), default="0.6B")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--windows", type=int, default=32_768)
    parser.add_argument("--micro", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    found = measure(parser.parse_args())
    base = found["rl"].get("seconds")
    print(f"\n| {'step':<28} | seconds | by RL | peak GiB |\n|---|---|---|---|")
    for name, row in found.items():
        if "error" in row:
            print(f"| {name} | {row['error']} | | |")
            continue
        by_rl = f"{row['seconds'] / base:.2f}" if base and "tokens_a_second" not in row else ""
        print(f"| {name} | {row['seconds']:.3f} | {by_rl} | {row['peak_gib']:.1f} |")


if __name__ == "__main__":
    main()
