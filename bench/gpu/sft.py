"""Imitation with and without reminders: `python bench/gpu/sft.py --model smollm2-135m --json sft.json`.

One start and the same demonstrations in two ways: no reminders, reminders. Of each: seconds,
tokens per second, the loss; and what hints do to faulty messages of other episodes, in nats per message without and
with the hint, for rules that reminders stated and for one that was held out. --tiny: try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

from offbook.core.config import Config, load_config
from offbook.rl.hint_probe import measure
from offbook.rl.models import chat_of, load_model, model_folder
from offbook.signals.feedback import read_rollout, write_hint
from offbook.stages.sft import sft
from offbook.stages.sources import read_sources
from offbook.train.forward import Decoder
from offbook.types import Feedback

WAYS = {"none": 0.0, "reminders": 0.4}
RULES = ["unknown_tool", "malformed_arguments", "repeated_call", "edited_tests"]
HELD_OUT = "malformed_arguments"


def settings(options: argparse.Namespace, way: str, out: Path) -> Config:
    given = {
        "model": options.model,
        "out": str(out),
        "harness.profile": "pocket",
        "harness.context": "2048",
        "harness.message_tokens": "256",
        "harness.summary_tokens": "256",
        "feedback.rules": json.dumps([rule for rule in RULES if rule != HELD_OUT]),
        "train.lora.rank": str(options.rank),
        "sft.data": json.dumps([f"pocket:{options.episodes}"]),
        "sft.learning_rate": str(options.learning_rate),
        "sft.reminders": str(WAYS[way]),
    }
    return load_config(["standard"], given)


def shifts(model: Path, config: Config, episodes: int) -> dict[str, list[float]]:
    """By rule: how many messages, and their log-probability without and with the hint."""
    others = config.model_copy(
        update={"seed": config.seed + 1000, "sft": config.sft.model_copy(update={"data": [f"pocket:{episodes}"]})}
    )
    (source,) = read_sources(others, model, lambda what, share: None)
    pairs = [
        (rollout, Feedback(target, write_hint(target.rule, rollout.tools)))
        for rollout in source.rollouts
        for target in read_rollout(rollout, 6, rules=RULES)
    ]
    measure(pairs, Decoder(load_model(model)), chat_of(model, config))
    by_rule: dict[str, list[Feedback]] = defaultdict(list)
    for _, item in pairs:
        if item.student:
            by_rule[item.target.rule].append(item)
    return {
        rule: [
            len(items),
            sum(sum(item.student) for item in items) / len(items),
            sum(sum(item.teacher) for item in items) / len(items),
        ]
        for rule, items in sorted(by_rule.items())
    }


def row_of(options: argparse.Namespace, way: str, out: Path) -> dict[str, Any]:
    config = settings(options, way, out)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    run = sft(config, rows.append, tell=lambda line: print(f"  {line}", flush=True))
    seconds, stepping = time.monotonic() - started, sum(row["train_s"] for row in rows)
    return {
        "way": way,
        "other_s": seconds - stepping,
        "train_s": stepping,
        "steps": len(rows),
        "tokens_a_second": sum(row["train_tokens"] for row in rows) / stepping,
        "padding_share": sum(row["padding_share"] for row in rows) / len(rows),
        "loss": rows[-1]["ce/loss"],
        "validation": rows[-1].get("validation/loss"),
        "shifts": shifts(model_folder(str(run.path), 0), config, options.measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--episodes", type=int, default=6000)
    parser.add_argument("--measured", type=int, default=100, help="episodes that the effect of hints is measured on")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--rank", type=int, default=0, help="of adapters; 0 trains all weights")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.episodes, options.measured = 40, 10
    found = []
    with tempfile.TemporaryDirectory() as place:
        for number, way in enumerate(WAYS):
            print(way, flush=True)
            try:
                row = row_of(options, way, Path(place) / str(number))
            except Exception:  # the other rows are worth having
                traceback.print_exc()
                continue
            found.append(row)
            print(
                f"  {row['steps']} steps in {row['train_s']:.1f} s and {row['other_s']:.1f} s of other work, "
                f"{row['tokens_a_second']:.0f} tokens/s, {row['padding_share']:.0%} padding, loss {row['loss']:.3f}, "
                f"validation {row['validation']:.3f}"
            )
            for rule, (count, without, hinted) in row["shifts"].items():
                held = " (held out)" if rule == HELD_OUT else ""
                print(f"  {rule + held:<32} {count:>4} messages: {without:8.2f} -> {hinted:8.2f} nats", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
