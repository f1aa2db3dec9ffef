"""Supervised training of the pocket model, which is too small for threads inside operations.

Two threads take half of every step each: gradients first, then the optimizer. There are always two, so a seed gives the
same weights on any number of cores.

Left out: what offbook.train needs for other losses, long samples or a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from offbook.core.config import TrainConfig
from offbook.train.optim.muon import Muon
from offbook.train.optim.newton_schulz import CLASSIC
from offbook.train.optim.units import units_of
from offbook.train.schedule import GRADIENT_CLIP, learning_rate_share
from offbook.types import Sample

WINDOW = 256  # episodes
Named = tuple[str, nn.Parameter]


def imitate(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    size: int,
    learning_rate: float,
    seed: int,
    progress: Callable[[float], None],
) -> None:
    """Train `model` on every sample once, `size` of them a step."""
    batches = _batches(samples, size, random.Random(seed))
    settings = TrainConfig(steps=len(batches), learning_rate=learning_rate, schedule="cosine", warmup_steps=20)
    how: dict[str, Any] = {"lr": learning_rate, "method": CLASSIC, "scale": 7.0, "weight_decay": 0.01}
    optimizers = [Muon(half, units_of(half), **how) for half in _halves(model)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = list(model.parameters())
    with ThreadPoolExecutor(2, "imitation", torch.set_num_threads, (1,)) as threads:
        for step, batch in enumerate(batches, start=1):
            count = sum(sum(map(bool, sample.ce_weight[1:])) for sample in batch)
            # The sum of two gradients is the same whichever comes first; with three it would not be.
            halves = [threads.submit(_backward, model, half, count) for half in (batch[::2], batch[1::2]) if half]
            _finish(halves)
            _finish([threads.submit(nn.utils.clip_grad_norm_, parameters, GRADIENT_CLIP)])
            for group in groups:
                group["lr"] = learning_rate * learning_rate_share(settings, step, final_share=0.0)
            _finish([threads.submit(optimizer.step) for optimizer in optimizers])
            model.zero_grad()
            progress(step / len(batches))


def _finish(work: list[Future[Any]]) -> None:
    for each in work:
        each.result()


def _backward(model: PreTrainedModel, samples: Sequence[Sample], count: int) -> None:
    """Accumulate the gradient of these samples; `count` is the number of predicted tokens in the step."""
    ids_BT = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True).to(model.device)
    weight_BT = pad_sequence([torch.tensor(sample.ce_weight) for sample in samples], batch_first=True).to(model.device)
    hidden_BTD = model.model(
        input_ids=ids_BT, use_cache=False
    ).last_hidden_state  # padding comes last and attention is causal
    kept_BT = weight_BT[:, 1:] != 0
    logits_NV = model.lm_head(hidden_BTD[:, :-1][kept_BT])
    loss_N = cross_entropy(logits_NV, ids_BT[:, 1:][kept_BT], reduction="none")
    ((loss_N * weight_BT[:, 1:][kept_BT]).sum() / count).backward()


def _halves(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """Split the parameters so that both halves have about as much to orthogonalize."""
    halves: tuple[list[Named], list[Named]] = [], []
    for number, named in enumerate(sorted(model.named_parameters(), key=lambda named: named[1].shape)):
        halves[number % 2].append(named)
    return halves


def _batches(samples: Sequence[Sample], size: int, rng: random.Random) -> list[list[Sample]]:
    """Group samples of similar length to avoid padding; batches in random order within a window."""
    batches = []
    for start in range(0, len(samples), WINDOW):
        part = sorted(samples[start : start + WINDOW], key=lambda sample: len(sample.ids))
        inside = [part[place : place + size] for place in range(0, len(part), size)]
        batches += rng.sample(inside, len(inside))
    return batches
