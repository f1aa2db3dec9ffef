"""Asynchronous sampling, evaluation, and learning from users."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from offbook.core.config.judging import JudgeConfig
from offbook.core.config.section import LOCAL, Section


class RayConfig(Section):
    """Rollouts on other machines, by Ray: docs/scale.md."""

    samplers: int = Field(
        default=0,
        ge=0,
        description="actors that sample; 0: none",
    )
    cpus: float = Field(default=1.0, ge=0, description="of each sampler")
    gpus: float = Field(default=0.0, ge=0, description="of each sampler")
    address: str = Field(default="", description="of the cluster, or `auto`; empty: Ray is started on this machine")


class LoopConfig(Section):
    """Asynchronous sampling: docs/async.md."""

    max_staleness: int = Field(
        default=0,
        ge=0,
        description="steps that a rollout may start before the one that trains on it; 0 is synchronous; lockstep "
        "takes at most 1",
    )
    deadline_s: float = Field(default=7200.0, gt=0, description="without any sign of life, after which a run ends")
    refill: int = Field(
        default=0,
        ge=0,
        description="groups without a signal that may be replaced per batch; needs tasks.order select, and "
        "continuous or vLLM",
    )
    eval_every: int = Field(
        default=0, ge=0, description="steps between held-out evaluations during training; 0 is never"
    )
    store: str = Field(
        default="",
        description="folder or s3://bucket/prefix to publish weights to: docs/sync.md",
    )
    ray: RayConfig = RayConfig()


class LiveConfig(Section):
    """Learning from use: docs/live.md."""

    consent: Literal["none", "numbers", "all"] = Field(
        default="numbers",
        description="what is kept of a session: nothing; counts without any text; everything without secrets, which "
        "alone can be learned from",
    )
    retention_days: float = Field(default=30.0, gt=0, description="until a session is deleted")
    settle_s: float = Field(
        default=86_400.0, ge=0, description="that reactions have to come in before a session is learned from"
    )
    sessions: int = Field(default=256, ge=2, description="of the deployed version, settled, that a cycle learns from")
    user_share: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="most sessions of a cycle from one user",
    )
    batch: int = Field(default=32, ge=2, description="sessions per optimizer step")
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
        description="of the parts of a session's reward, each between -1 and 1: docs/live.md",
    )
    hints: bool = Field(
        default=True,
        description="teach dissatisfied users' words as hints; rules teach anyway",
    )
    first: Literal["share", "shadow"] = Field(
        default="share",
        description="where a version that passed the gate starts",
    )
    share: float = Field(default=0.2, gt=0, le=0.5, description="of the users, by hash, or of the requests in shadow")
    trial: int = Field(default=50, ge=1, description="users per version before it gets the rest")
    suites: list[str] = Field(default=[], description="of the gate, on top of the held-out tasks")
    populations: list[str] = Field(default=[], description="users with an adapter of their own; needs train.lora.rank")
    judge: JudgeConfig = JudgeConfig()

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        known = cls.model_fields["weights"].default
        for name, weight in weights.items():
            if name not in known or weight < 0:
                raise ValueError(f"{name} = {weight:g}: give {', '.join(known)} weights of 0 or more")
        return {**known, **weights}

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.judge.url == LOCAL:
            raise ValueError("follow-ups are read by a server; give its URL as live.judge.url")
        if problem := self.judge.idle("live", True):
            raise ValueError(problem)
        return self


class EvalConfig(Section):
    samples: int = Field(default=2, ge=1, description="rollouts a held-out task")
