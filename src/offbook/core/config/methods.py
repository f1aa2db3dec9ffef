"""Teachers of whole responses and corrections: docs/methods.md."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbook.core.config.section import Section


class CorrectionsConfig(Section):
    """Imitation of faulty messages that the hinted model rewrote: docs/methods.md."""

    weight: float = Field(default=0.0, ge=0, description="of their cross-entropy, where the RL loss has 1")


class TeachersConfig(Section):
    """Teachers of whole responses: docs/methods.md."""

    weights: dict[Literal["opd", "opsd", "sdft"], Annotated[float, Field(ge=0)]] = Field(
        default={}, description="of each method's loss, where the RL loss has 1"
    )
    model: str = Field(default="", description="opd: the teacher, named as in `model`, with the student's tokenizer")
    data: list[str] = Field(
        default=[],
        description="sdft: run folders or rollout files whose solved rollouts are the demonstrations; empty: "
        "another solved rollout of the group",
    )

    @model_validator(mode="after")
    def _refuse_idle(self) -> Self:
        if self.opd and not self.model:
            raise ValueError("teachers.model is empty, so opd has no teacher; give a model")
        return self

    @property
    def opd(self) -> float:
        return self.weights.get("opd", 0.0)

    @property
    def opsd(self) -> float:
        return self.weights.get("opsd", 0.0)

    @property
    def sdft(self) -> float:
        return self.weights.get("sdft", 0.0)
