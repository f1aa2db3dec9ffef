"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Schedule = Literal["constant", "cosine", "linear", "wsd"]
TeacherName = Literal["live", "ema", "frozen", "trust_region"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
