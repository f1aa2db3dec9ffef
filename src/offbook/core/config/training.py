"""One optimizer step: what is trained, on which ranks, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from offbook.core.config.section import Precision, Schedule, Section, key


class LoraConfig(Section):
    """Low-rank adapters: they are trained instead of the weights."""

    rank: int = key(0, "rank of the adapters; 0: none, all weights are trained", ge=0)
    alpha: int = key(32, "adapters are scaled by alpha / rank", ge=1)
    targets: list[str] = key([], "layers with an adapter, as in `q_proj`; empty: all linear layers but the head")


class LinearConfig(Section):
    """How linear layers multiply: docs/precision.md."""

    kind: Literal["plain", "fp8"] = key(
        "plain",
        "`train.precision`, or FP8 (on GPUs that have it)",
    )


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """How the ranks of a run that torchrun starts share the weights: docs/scale.md."""

    replicate: int = 1  # copies of the weights; each is sharded over its ranks
    experts: int = 1  # ranks that share a layer's experts


class TrainConfig(Section):
    steps: int = key(30, "optimizer steps; a finished run may be trained further", ge=1)
    groups: int = key(4, "tasks per step", ge=1)
    group_size: int = key(8, "rollouts per task", ge=2)
    optimizer: Literal["adamw", "muon"] = key("adamw", "muon: matrices by Muon, the rest by AdamW")
    learning_rate: float = key(1e-6, "peak learning rate", gt=0)
    schedule: Schedule = key(
        "constant",
        "after warm-up; cosine and linear fall to a tenth over train.steps, wsd over the last fifth; raising "
        "train.steps later raises the rate again",
    )
    warmup_steps: int = key(3, "linear warm-up", ge=0)
    weight_decay: float = key(0.0, "decoupled, as in AdamW", ge=0)
    rl_weight: float = key(1.0, "of the RL loss; 0: no RL, only other losses (docs/methods.md)", ge=0)
    ratio_cap: float = key(2.0, "cap of the importance weight", ge=1)
    reference_kl: float = key(
        0.0, "KL penalty to the run's start: subtracted from each token's advantage (k1, a constant)", ge=0
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop",
        "when a gradient is NaN or infinite: end the run, or skip the step",
    )
    no_signal_steps: int = key(
        3,
        "end the run after so many steps in a row without a signal (docs/feedback.md#metrics); 0: never",
        ge=0,
    )
    micro_tokens: int = key(0, "tokens per forward; 0: by memory, 8192 on a CPU", ge=0)
    recompute: Literal["auto", "none", "layers", "all"] = key(
        "auto",
        "activation checkpointing: none, layers without attention, layers; auto: the least that fits, none on a CPU",
    )
    compile: Literal["auto", True, False] = key("auto", "torch.compile; auto: on a GPU")
    precision: Precision = key("float32", "of the trained model; bfloat16 keeps float32 master weights")
    ranks: dict[Literal["replicate", "experts"], PositiveInt] = key(
        {},
        "under torchrun (docs/scale.md): `replicate`: copies of the weights, each sharded; `experts`: ranks that "
        "share a layer's experts",
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

    every: int = key(0, "steps between checkpoints; 0: every step below 1 GB, else every 30 minutes", ge=0)
    keep: int = key(2, "newest checkpoints kept", ge=1)


class MtpConfig(Section):
    """`offbook mtp` trains a draft head: docs/mtp.md."""

    depth: int = key(3, "tokens ahead that the head learns", ge=1, le=16)
    learning_rate: float = key(1e-3, "peak learning rate", gt=0)
    steps: int = key(400, "training steps", ge=1)
    batch_tokens: int = key(8192, "tokens per step, about", ge=1)
