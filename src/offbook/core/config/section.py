"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Precision = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "cosine", "linear", "wsd"]
TeacherName = Literal["live", "ema", "frozen"]
LOCAL = "local"  # in the place of a judge model's URL: it runs here


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
