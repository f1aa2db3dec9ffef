"""The reader model of a run: where it is, and what its readings come to."""

from __future__ import annotations

from offbook.config import ConfigError, FeedbackConfig
from offbook.feedback import ModelReader, Reading


def reader_of(settings: FeedbackConfig) -> ModelReader | None:
    if not settings.model_url or not settings.weight:
        return None
    if not settings.model_rate:
        raise ConfigError("feedback.model_rate is 0: the model at feedback.model_url would read nothing; give a share")
    return ModelReader(settings.model_url, settings.model_name, settings.model_rate)


def reader_row(reading: Reading) -> dict[str, float]:
    """Nothing where no model was asked."""
    if not reading.rollouts:
        return {}
    refused = {f"reader/refused/{reason}": count for reason, count in sorted(reading.refused.items())}
    return {"reader/rollouts": reading.rollouts, "reader/found": len(reading.found), **refused}
