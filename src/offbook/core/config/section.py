"""What all sections of the configuration have in common."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "cosine", "linear", "wsd"]
TeacherName = Literal["live", "ema", "frozen"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def key(default: Any, description: str, **limits: Any) -> Any:
    """A key of the configuration; `limits` are pydantic's."""
    return Field(default=default, description=description, **limits)
