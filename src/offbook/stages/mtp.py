"""Train a draft head from scratch on a model's rollouts; the model itself is frozen.

Writes OUT/config.toml, OUT/data.json, OUT/metrics.jsonl and, at the end, OUT/draft/ with the head. Left out: resuming;
a head takes minutes.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offbook.core.config import Config, TrainConfig
from offbook.core.draft import FOLDER, DraftHead, save_head
from offbook.core.runfolder import RunFolder, only_writer, whole_folder, write_atomic
from offbook.rl.models import Progress, described, load_model, model_folder, quiet
from offbook.stages.conversations import Renderer
from offbook.stages.run import OnStep, Tell
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.train.batches import Batch
from offbook.train.draft import DraftTrainer
from offbook.train.forward import Decoder
from offbook.train.schedule import learning_rate_share
from offbook.types import OffbookError, Sample

HELD_OUT_EVERY = 20  # one sample in so many
MAX_HELD_OUT = 32


def mtp(
    config: Config,
    on_step: OnStep = lambda row: None,
    progress: Progress = quiet,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Train the head that `config` describes. Returns its folder and the acceptance of its drafts by depth."""
    folder = RunFolder(config.out)
    folder.refuse_file()
    described(config.model)  # refuse a missing model before reading data
    with only_writer(folder.path):
        place = folder.path / FOLDER
        if place.exists():
            raise OffbookError(f"{place} is there already; give another --out")
        torch.set_num_threads(config.threads)
        samples = read_samples(config, progress, tell)
        start = model_folder(config.model, config.seed, progress)
        decoder = Decoder(load_model(start, config.train.precision))
        torch.manual_seed(config.seed)
        head = DraftHead(decoder.model)
        write_atomic(folder.config_file, config.to_toml())
        write_atomic(folder.data_file, json.dumps({"verb": "mtp", "sources": config.sft.data}, indent=1) + "\n")
        folder.metrics_file.unlink(missing_ok=True)  # of an interrupted run
        trainer = DraftTrainer(decoder.model, head, config.mtp)
        held_out, learned = split(samples, config.seed)
        tell(f"{len(learned)} samples of {sum(len(one.ids) for one in learned)} tokens, {len(held_out)} for validation")
        micro_tokens = config.train.settled().micro_tokens
        steps = config.mtp.steps
        schedule = TrainConfig(steps=steps, schedule="cosine", warmup_steps=max(1, steps // 20))
        batches = _batches(learned, config.mtp.batch_tokens, config.seed)
        for step in range(1, steps + 1):
            began = time.monotonic()
            drawn = next(batches)
            learn(trainer, decoder, drawn, micro_tokens)
            row = {"step": step, **trainer.step(learning_rate_share(schedule, step, final_share=0.05))}
            row |= {"train_tokens": sum(len(one.ids) for one in drawn), "step_s": time.monotonic() - began}
            folder.append_metrics(row)
            progress(f"draft head {config.out}", step / steps)
            on_step(row)
        found = measure(trainer, decoder, held_out, micro_tokens)
        with whole_folder(place) as part:
            save_head(head, decoder.model, part)
        result = {"head": str(place), **{f"validation/{key}": value for key, value in found.items()}}
        write_atomic(folder.path / "result.json", json.dumps(result, indent=1) + "\n")
    return result


def measure(trainer: DraftTrainer, decoder: Decoder, samples: list[Sample], micro_tokens: int) -> dict[str, float]:
    """Evaluate on samples without training on them."""
    learn(trainer, decoder, samples, micro_tokens, differentiate=False)
    found = {name.removeprefix("mtp/"): value for name, value in trainer.measured().items()}
    trainer.forget()
    return found


def learn(
    trainer: DraftTrainer, decoder: Decoder, samples: list[Sample], micro_tokens: int, differentiate: bool = True
) -> None:
    for micro in decoder.micro_batches(samples, micro_tokens):
        batch = Batch.collate(micro, decoder.model.device)
        with torch.no_grad():
            hidden_1FD, _ = decoder.hidden(batch.row)
        trainer.learn(batch, hidden_1FD, differentiate)


def split(samples: list[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """Validation samples and training samples."""
    drawn = random.Random(f"{seed} mtp").sample(samples, len(samples))
    count = min(MAX_HELD_OUT, max(1, len(drawn) // HELD_OUT_EVERY)) if len(drawn) > 1 else 0
    return drawn[:count], drawn[count:]


def _batches(samples: list[Sample], batch_tokens: int, seed: int) -> Iterator[list[Sample]]:
    """Endless batches, shuffled each epoch."""
    rng = random.Random(f"{seed} mtp batches")
    batch: list[Sample] = []
    while True:
        for sample in rng.sample(samples, len(samples)):
            batch.append(sample)
            if sum(len(one.ids) for one in batch) >= batch_tokens:
                yield batch
                batch = []


def read_samples(config: Config, progress: Progress = quiet, tell: Callable[[str], None] = print) -> list[Sample]:
    """Rollouts and trajectories, which train on the agent's tokens."""
    refuse_missing_data(config)
    start = model_folder(config.model, config.seed, progress)
    renderer = Renderer.of(start, config)
    found = []
    for source in read_sources(config, start, progress):
        tell(str(source))
        for rollout, tools in zip(source.rollouts, source.tools, strict=True):
            for segment in renderer.segments(rollout, tools, Counter()):
                ids = segment.ids[: renderer.context]
                weights = list(map(float, segment.sampled[: renderer.context]))
                if any(weights[2:]):
                    found.append(Sample(ids, ce_weight=weights, temperature=config.engine.temperature))
    if not found:
        raise OffbookError("nothing is left to learn from: no token of an agent has two before it; give other --data")
    return found
