"""A step of single-turn RL on one GPU, ours and TRL's GRPO with vLLM: `python bench/gpu/grpo.py --model FOLDER`.

The same model, 4 prompts of about 1,000 tokens x 8 completions of 128 tokens each, random rewards, one update of all
weights by AdamW, bfloat16 computation with float32 weights under it. A step is sampling, update and new weights in the
engine; the median of those after the second is reported. Each side runs in a process of its own.

Ours: `VllmEngine.complete`, `Trainer.step`, `VllmEngine.apply`. TRL 1.16: `GRPOTrainer`, vLLM in its own process
(`colocate`, no sleep). Settings in its favour: no correction for the difference between sampler and trainer, which
would cost it another forward (ours corrects, by the sampler's log-probabilities); no recomputation; one batch; no
logging, no reference model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

GROUPS, SIZE, NEW = 4, 8, 128
WORDS = ("the", "file", "has", "a", "test", "that", "fails", "when", "its", "input", "is", "empty", "and", "none")


def text(options: argparse.Namespace, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(options.length))


def ours(options: argparse.Namespace) -> dict[str, Any]:
    from offbook.core.config import TrainConfig, VllmConfig
    from offbook.engine import VllmEngine
    from offbook.engine.vllm import Server
    from offbook.rl.models import load_model
    from offbook.train.trainer import Trainer
    from offbook.types import Prompt, Sample

    on_gpu = torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    precision = "bfloat16" if on_gpu else "float32"
    settings = TrainConfig(precision=precision, micro_tokens=65_536, learning_rate=1e-6)
    trainer = Trainer(load_model(Path(options.model), precision), settings)

    async def sample(engine: VllmEngine, prompts: list[list[int]]) -> list[Sample]:
        answers = await asyncio.gather(*(engine.open("").complete(Prompt(ids), NEW) for ids in prompts))
        samples = []
        for ids, answer in zip(prompts, answers, strict=True):
            before, count = [0.0] * len(ids), len(answer.ids)
            advantage = random.random() - 0.5
            samples.append(
                Sample(
                    ids + answer.ids,
                    before + answer.logprobs,
                    before + [advantage] * count,
                    before + [1.0] * count,
                    versions=[-1] * len(ids) + answer.versions,
                )
            )
        return samples

    times = []
    with TemporaryDirectory() as folder, asyncio.Runner() as runner:
        vllm = VllmConfig(gpu_share=options.share, options=[] if on_gpu else ["--enforce-eager"])
        log = Path(folder) / "vllm.log"
        server = Server(Path(options.model), vllm, 2 * options.length + NEW, log, lambda what, share: None)
        engine = VllmEngine(server, frozenset())
        try:
            engine.apply(trainer.publish(0))
            for step in range(options.steps):
                began = time.monotonic()
                texts = [text(options, GROUPS * step + number) for number in range(GROUPS)]
                prompts = [ids for ids in tokenizer(texts)["input_ids"] for _ in range(SIZE)]
                samples = runner.run(sample(engine, prompts))
                sampled = time.monotonic()
                trainer.step(samples)
                trained = time.monotonic()
                engine.apply(trainer.publish(step + 1))
                times.append((time.monotonic() - began, sampled - began, trained - sampled))
        except Exception:
            print(log.read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            runner.run(engine.aclose())
    parts = {name: statistics.median(each[place] for each in times[2:]) for place, name in enumerate(PARTS)}
    return parts | {"prompt": len(prompts[0]), "steps": [each[0] for each in times]}


PARTS = ("step_s", "sample_s", "update_s")


def theirs(options: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.monotonic())

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    on_gpu = torch.cuda.is_available()
    in_vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.share}
    in_vllm |= {"vllm_max_model_length": 2 * options.length + NEW, "vllm_importance_sampling_correction": False}
    with TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            bf16=on_gpu,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            learning_rate=1e-6,
            per_device_train_batch_size=GROUPS * SIZE,
            gradient_accumulation_steps=1,
            num_generations=SIZE,
            max_completion_length=NEW,
            generation_kwargs={"ignore_eos": True} if on_gpu else {"min_new_tokens": NEW},
            beta=0.0,
            max_steps=options.steps,
            report_to="none",
            logging_steps=1000,
            save_strategy="no",
            disable_tqdm=True,
            **(in_vllm if on_gpu else {}),
        )
        data = Dataset.from_dict({"prompt": [text(options, number) for number in range(GROUPS * options.steps)]})
        trainer = GRPOTrainer(
            options.model, reward_funcs=reward, args=settings, train_dataset=data, callbacks=[Clock()]
        )
        trainer.train()
    steps = [after - before for before, after in pairwise(times)]
    return {"step_s": statistics.median(steps[1:]), "steps": steps}


def side(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--inner", name, "--model", options.model, "--steps", str(options.steps)]
    command += ["--length", str(options.length), "--share", str(options.share)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200)
        said = [line for line in done.stdout.splitlines() if line.startswith('{"step_s"')]
        row: dict[str, Any] = json.loads(said[-1]) if said else {"error": done.stdout[-3000:]}
    except subprocess.TimeoutExpired as error:
        row = {"error": str(error)[-500:]}
    row["took_s"] = time.monotonic() - began
    print(f"\n== {name}\n{json.dumps(row, indent=1)}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sides", nargs="+", default=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=900, help="words of a prompt")
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps({"ours": ours, "trl": theirs}[options.inner](options)))
        return
    rows = {name: side(name, options) for name in options.sides}
    if all("step_s" in row for row in rows.values()) and len(rows) == 2:
        print(f"\nTRL's step takes {rows['trl']['step_s'] / rows['ours']['step_s']:.2f} times as long as ours")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
