"""One optimizer step: what is trained, on which ranks, and what is kept of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Precision, Schedule, Section


class LoraConfig(Section):
    """Low-rank adapters: they are trained, and the weights under them stay."""

    rank: int = Field(default=0, ge=0, description="of the adapters; 0 is none: all weights are trained")
    alpha: int = Field(default=32, ge=1, description="what an adapter adds is scaled by alpha / rank")
    targets: list[str] = Field(
        default=[], description="layers with an adapter, as in `q_proj`; empty: all linear layers but the head"
    )
    parameters: list[str] = Field(
        default=[], description="of fused experts, as in `mlp.experts.gate_up_proj`: matrices that get one too"
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if not self.rank and (self.targets or self.parameters):
            raise ValueError("train.lora.rank is 0, so there are no adapters to put on anything; give a rank, as in 16")
        return self


class LinearConfig(Section):
    """How linear layers multiply: docs/precision.md. Embeddings, output head and routers stay plain."""

    kind: Literal["plain", "fp8", "nvfp4"] = Field(
        default="plain",
        description="how linear layers multiply; nvfp4 is emulated, with MXFP8 backward",
    )


class RanksConfig(Section):
    """How weights are sharded over the ranks of torchrun: docs/scale.md. No effect in one process."""

    replicate: int = Field(default=1, ge=1, description="copies of the weights, each sharded on its ranks")
    experts: int = Field(default=1, ge=1, description="ranks that a layer's experts are dealt out to")
    context: int = Field(default=1, ge=1, description="ranks that share a row of tokens")


class TrainConfig(Section):
    steps: int = Field(default=30, ge=1, description="optimizer steps; a finished run may be trained further")
    groups: int = Field(default=4, ge=1, description="tasks per step")
    group_size: int = Field(default=8, ge=2, description="rollouts per task")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for matrices, with AdamW for the rest"
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="the highest; `schedule` says what becomes of it")
    schedule: Schedule = Field(
        default="constant",
        description="after the warm-up; cosine and linear fall over all of train.steps, wsd over the last fifth",
    )
    warmup_steps: int = Field(default=3, ge=0, description="of a linear rise")
    final_share: float = Field(default=0.1, ge=0, le=1, description="of the learning rate at the end of a schedule")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, as in AdamW")
    rl_weight: float = Field(default=1.0, ge=0, description="of the RL loss; 0: no RL")
    ratio_cap: float = Field(default=2.0, ge=1, description="cap of the importance weight")
    reference_kl: float = Field(
        default=0.0,
        ge=0,
        description="weight of the KL to the run's start in each token's advantage (k1, detached)",
    )
    log_parts: int = Field(
        default=0,
        ge=0,
        description="steps between reports of `PART/gradient_norm`, at the cost of a backward pass per part; 0 is "
        "never",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="on a non-finite gradient: end the run, or skip the step"
    )
    micro_tokens: int = Field(default=0, ge=0, description="tokens in one forward; 0: what fits, 8192 on a CPU")
    recompute: Literal["auto", "none", "layers", "all"] = Field(
        default="auto",
        description="recomputed in the backward pass to save memory; auto: the least that fits",
    )
    compile: Literal["auto", True, False] = Field(default="auto", description="fuse kernels; auto does so on a GPU")
    precision: Precision = Field(
        default="float32",
        description="of the trained model; bfloat16 has float32 masters",
    )
    linear: LinearConfig = LinearConfig()
    lora: LoraConfig = LoraConfig()
    ranks: RanksConfig = RanksConfig()

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
    """Written during training, and at the end of a run. Without `every` and `minutes`: after every step where
    one is below 1 GB, else every 30 minutes."""

    every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 leaves it to `minutes`")
    minutes: float = Field(default=0.0, ge=0, description="between checkpoints, at the end of a step; 0 is not by time")
    keep: int = Field(default=2, ge=1, description="newest checkpoints kept")


class MtpConfig(Section):
    """A draft head: `offbook mtp` trains one, vLLM drafts with it: docs/mtp.md."""

    loss: Literal["kl", "tv", "lk", "ce"] = Field(
        default="kl",
        description="KL(model || head), total variation, -log of what sampling keeps, or cross-entropy to the tokens",
    )
    depth: int = Field(default=3, ge=1, le=16, description="tokens ahead that it learns to draft")
    learning_rate: float = Field(default=1e-3, gt=0, description="the highest")
    steps: int = Field(default=400, ge=1, description="of the training")
    batch_tokens: int = Field(default=8192, ge=1, description="of one step, about")
