"""One optimizer step: what is trained, on which ranks, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Precision, Schedule, Section


class LoraConfig(Section):
    """Low-rank adapters: they are trained instead of the weights."""

    rank: int = Field(default=0, ge=0, description="rank of the adapters; 0: none, all weights are trained")
    alpha: int = Field(default=32, ge=1, description="adapters are scaled by alpha / rank")
    targets: list[str] = Field(
        default=[], description="layers with an adapter, as in `q_proj`; empty: all linear layers but the head"
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if not self.rank and self.targets:
            raise ValueError("train.lora.rank is 0, so there are no adapters to put on anything; give a rank, as in 16")
        return self


class LinearConfig(Section):
    """How linear layers multiply: docs/precision.md."""

    kind: Literal["plain", "fp8", "nvfp4"] = Field(
        default="plain",
        description="`train.precision`, FP8 (on GPUs that have it), or emulated NVFP4",
    )


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """How the ranks of a run that torchrun starts share the weights: docs/scale.md."""

    replicate: int = 1  # copies of the weights; each is sharded over its ranks
    experts: int = 1  # ranks that share a layer's experts


class TrainConfig(Section):
    steps: int = Field(default=30, ge=1, description="optimizer steps; a finished run may be trained further")
    groups: int = Field(default=4, ge=1, description="tasks per step")
    group_size: int = Field(default=8, ge=2, description="rollouts per task")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: matrices by Muon, the rest by AdamW"
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="peak learning rate")
    schedule: Schedule = Field(
        default="constant",
        description="after warm-up; cosine and linear fall to a tenth over train.steps, wsd over the last fifth; "
        "raising train.steps later raises the rate again",
    )
    warmup_steps: int = Field(default=3, ge=0, description="linear warm-up")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, as in AdamW")
    rl_weight: float = Field(
        default=1.0, ge=0, description="of the RL loss; 0: no RL, only other losses (docs/methods.md)"
    )
    ratio_cap: float = Field(default=2.0, ge=1, description="cap of the importance weight")
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="when a gradient is NaN or infinite: end the run, or skip the step"
    )
    no_signal_steps: int = Field(
        default=3,
        ge=0,
        description="end the run after so many steps in a row in which all groups were alike and no hint taught; "
        "0: never",
    )
    micro_tokens: int = Field(default=0, ge=0, description="tokens per forward; 0: by memory, 8192 on a CPU")
    recompute: Literal["auto", "none", "layers", "all"] = Field(
        default="auto",
        description="activation checkpointing: none, layers without attention, layers; auto: the least that fits, "
        "none on a CPU",
    )
    compile: Literal["auto", True, False] = Field(default="auto", description="torch.compile; auto: on a GPU")
    precision: Precision = Field(
        default="float32",
        description="of the trained model; bfloat16 keeps float32 master weights",
    )
    ranks: dict[Literal["replicate", "experts"], Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="under torchrun (docs/scale.md): `replicate`: copies of the weights, each sharded; `experts`: "
        "ranks that share a layer's experts",
    )
    linear: LinearConfig = LinearConfig()
    lora: LoraConfig = LoraConfig()

    @property
    def mesh(self) -> RanksConfig:
        return RanksConfig(**self.ranks)

    def settled(
        self, recompute: Literal["none", "layers", "all"] = "none", compile: bool = False, micro_tokens: int = 8192
    ) -> TrainConfig:
        """What was left to be chosen is this. By default what a CPU takes."""
        chosen = {
            "recompute": recompute if self.recompute == "auto" else self.recompute,
            "compile": compile if self.compile == "auto" else self.compile,
            "micro_tokens": self.micro_tokens or micro_tokens,
        }
        return self.model_copy(update=chosen)


class CheckpointConfig(Section):
    """Checkpoints are written during training and at its end."""

    every: int = Field(
        default=0,
        ge=0,
        description="steps between checkpoints; 0: every step below 1 GB, else every 30 minutes",
    )
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept")


class MtpConfig(Section):
    """`offbook mtp` trains a draft head: docs/mtp.md."""

    depth: int = Field(default=3, ge=1, le=16, description="tokens ahead that the head learns")
    learning_rate: float = Field(default=1e-3, gt=0, description="peak learning rate")
    steps: int = Field(default=400, ge=1, description="training steps")
    batch_tokens: int = Field(default=8192, ge=1, description="tokens per step, about")
