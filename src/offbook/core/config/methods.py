"""What teaches beside RL and hints: docs/methods.md."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Section, TeacherName


class CorrectionsConfig(Section):
    """Faulty messages written anew by the hinted model; those that pass are imitated: docs/methods.md."""

    weight: float = Field(default=0.0, ge=0, description="of their cross-entropy, beside an RL loss of weight 1")
    samples: int = Field(default=2, ge=1, description="messages written for a faulty one; the first to pass is learned")
    solve: bool = Field(
        default=True, description="what goes on from the message, without the hint, has to pass the tests, too"
    )


class OpdConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="beside an RL loss of weight 1; 0 is none")
    model: str = Field(default="", description="the teacher, named as in `model`; it has the student's tokenizer")

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.weight and not self.model:
            raise ValueError("teachers.opd.model is empty, so there is nobody to learn from; give a model")
        return self


class OpsdConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="beside an RL loss of weight 1; 0 is none")
    teacher: TeacherName = Field(default="frozen", description="whose weights read the reference solution")


class SdftConfig(Section):
    weight: float = Field(default=0.0, ge=0, description="beside an RL loss of weight 1; 0 is none")
    teacher: TeacherName = Field(default="ema", description="whose weights read the demonstration")
    data: list[str] = Field(
        default=[],
        description="run folders or files with rollouts of the same tasks, of which those that solved theirs are the "
        "demonstrations; empty: another rollout of the group that solved it",
    )


class TeachersConfig(Section):
    """Teachers of whole responses, beside RL and hints: docs/methods.md. `feedback` says how ema and others move."""

    direction: Literal["forward", "reverse", "jsd"] = Field(
        default="reverse", description="forward is KL(teacher || student), reverse the other way round"
    )
    token_cap: float = Field(default=2.0, gt=0, description="the most nats that one token may count for")
    opd: OpdConfig = OpdConfig()
    opsd: OpsdConfig = OpsdConfig()
    sdft: SdftConfig = SdftConfig()
