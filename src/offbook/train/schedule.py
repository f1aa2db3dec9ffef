"""How the learning rate goes over a stage of training. Every stage asks here."""

from __future__ import annotations

import math

from offbook.core.config import TrainConfig

GRADIENT_CLIP = 1.0  # the largest norm of the gradient
FALLING = 0.2  # of the steps, with `wsd`
FINAL_SHARE = 0.1  # of the highest rate, one step after the last


def learning_rate_share(settings: TrainConfig, step: int, final_share: float = FINAL_SHARE) -> float:
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
    return warm * (final_share + (1 - final_share) * falling)
