"""How the learning rate goes over a stage of training. Every stage asks here."""

from __future__ import annotations

import math

from offbook.core.config import TrainConfig

GRADIENT_CLIP = 1.0  # the largest norm of the gradient
FALLING = 0.2  # of the steps, with `wsd`


def learning_rate_share(settings: TrainConfig, step: int) -> float:
    """Of the highest rate, at a step counted from 1.

    Warm-up and decay are multiplied, and the decay counts from the first step: it would reach `final_share` one step
    after the last.
    """
    warm = min(1.0, step / max(1, settings.warmup_steps))
    if settings.schedule == "constant":
        return warm
    done, steps = float(min(step - 1, settings.steps)), float(settings.steps)
    if settings.schedule == "wsd":  # warm-up, stable, decay: 2404.06395; what is level can be gone on with
        done, steps = max(0.0, done - (1 - FALLING) * steps), FALLING * steps
    falling = 0.5 * (1 + math.cos(math.pi * done / steps)) if settings.schedule == "cosine" else 1 - done / steps
    return warm * (settings.final_share + (1 - settings.final_share) * falling)
