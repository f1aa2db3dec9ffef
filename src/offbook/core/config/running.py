"""Asynchronous sampling, evaluation and learning from use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from offbook.core.config.section import Section


class RayConfig(Section):
    """Rollouts on other machines: docs/scale.md."""

    samplers: int = Field(
        default=0,
        ge=0,
        description="actors that sample, each with its own engine and sandboxes; 0: none",
    )
    address: str = Field(default="", description="of the cluster, or `auto`; empty: start Ray here")


class LoopConfig(Section):
    """Sampling during training: docs/async.md."""

    max_staleness: int = Field(
        default=0,
        ge=0,
        description="steps by which sampling may run ahead; 0: synchronous; lockstep takes at most 1",
    )
    deadline_s: float = Field(default=7200.0, gt=0, description="timeout of every wait without progress")
    refill: int = Field(
        default=0,
        ge=0,
        description="maximum groups per batch with equal rewards that are replaced; needs tasks.order select, and "
        "continuous or vLLM",
    )
    eval_every: int = Field(default=0, ge=0, description="steps between held-out evaluations during training; 0: never")
    store: str = Field(
        default="",
        description="folder or s3://bucket/prefix to publish every version to (docs/sync.md)",
    )
    ray: RayConfig = RayConfig()


class LiveConfig(Section):
    """Learning from use: docs/live.md."""

    consent: Literal["none", "all"] = Field(
        default="none", description="what is kept of a session and learned from: nothing, or all without secrets"
    )
    retention_days: float = Field(default=30.0, gt=0, description="days before a kept session is deleted")
    settle_s: float = Field(default=86_400.0, ge=0, description="wait for reactions before a session is learned from")
    sessions: int = Field(default=256, ge=2, description="settled sessions of the deployed version per cycle")
    user_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="maximum share of a cycle from one user; 1: a user's own model",
    )
    weights: dict[str, float] = Field(
        default={
            "kept": 1.0,
            "reverted": 0.5,
            "dissatisfied": 0.5,
            "thumbs": 0.5,
            "interrupted": 0.25,
            "latency": 0.1,
            "broken_calls": 0.3,
            "dodged": 0.5,
        },
        description="of the parts of a session's reward, each from -1 to 1 (docs/live.md)",
    )
    suites: list[str] = Field(default=[], description="of the gate, added to the held-out tasks, as in `sides`")

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        known = cls.model_fields["weights"].default
        for name, weight in weights.items():
            if name not in known or weight < 0:
                raise ValueError(f"{name} = {weight:g}: give {', '.join(known)} weights of 0 or more")
        return {**known, **weights}


class EvalConfig(Section):
    samples: int = Field(default=2, ge=1, description="rollouts per held-out task")
