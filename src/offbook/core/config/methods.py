"""What teaches in addition to RL and hints: docs/methods.md."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from offbook.core.config.section import Section


class CorrectionsConfig(Section):
    """Faulty messages rewritten by the hinted model; those that pass are imitated: docs/methods.md."""

    weight: float = Field(default=0.0, ge=0, description="of their cross-entropy, next to an RL loss of weight 1")


class OpdConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="next to an RL loss of weight 1; 0 is none")
    model: str = Field(default="", description="the teacher, named as in `model`; it has the student's tokenizer")

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.weight and not self.model:
            raise ValueError("teachers.opd.model is empty, so there is no teacher; give a model")
        return self


class OpsdConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="next to an RL loss of weight 1; 0 is none")


class SdftConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="next to an RL loss of weight 1; 0 is none")
    data: list[str] = Field(
        default=[],
        description="runs or files whose solved rollouts are the demonstrations; empty: a solved rollout of the same"
        " group",
    )


class TeachersConfig(Section):
    """Teachers of whole responses: docs/methods.md."""

    opd: OpdConfig = OpdConfig()
    opsd: OpsdConfig = OpsdConfig()
    sdft: SdftConfig = SdftConfig()
