"""Asynchronous sampling, evaluation and learning from use."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from offbook.core.config.section import Section, key


class RayConfig(Section):
    """Rollouts on other machines: docs/scale.md."""

    samplers: int = key(0, "actors that sample, each with its own engine and sandboxes; 0: none", ge=0)
    address: str = key("", "of the cluster, or `auto`; empty: start Ray here")


class LoopConfig(Section):
    """Sampling during training: docs/async.md."""

    max_staleness: int = key(0, "steps by which sampling may run ahead; 0: synchronous; lockstep takes at most 1", ge=0)
    deadline_s: float = key(7200.0, "timeout of every wait without progress", gt=0)
    refill: int = key(
        0,
        "maximum groups per batch with equal rewards that are replaced; needs tasks.order select, and continuous "
        "or vLLM",
        ge=0,
    )
    store: str = key("", "folder or s3://bucket/prefix to publish every version to (docs/sync.md)")
    ray: RayConfig = RayConfig()


class LiveConfig(Section):
    """Learning from use: docs/live.md."""

    consent: Literal["none", "all"] = key(
        "none", "what is kept of a session and learned from: nothing, or all without secrets"
    )
    retention_days: float = key(30.0, "days before a kept session is deleted", gt=0)
    settle_s: float = key(86_400.0, "wait for reactions before a session is learned from", ge=0)
    sessions: int = key(256, "settled sessions of the deployed version per cycle", ge=2)
    user_share: float = key(0.25, "maximum share of a cycle from one user; 1: a user's own model", gt=0, le=1)
    weights: dict[str, float] = key(
        {
            "kept": 1.0,
            "reverted": 0.5,
            "dissatisfied": 0.5,
            "thumbs": 0.5,
            "interrupted": 0.25,
            "latency": 0.1,
            "broken_calls": 0.3,
            "dodged": 0.5,
        },
        "of the parts of a session's reward, each from -1 to 1 (docs/live.md)",
    )
    suites: list[str] = key([], "of the gate, added to the held-out tasks, as in `sides`")

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        known = cls.model_fields["weights"].default
        for name, weight in weights.items():
            if name not in known or weight < 0:
                raise ValueError(f"{name} = {weight:g}: give {', '.join(known)} weights of 0 or more")
        return {**known, **weights}


class EvalConfig(Section):
    samples: int = key(2, "rollouts per held-out task", ge=1)
