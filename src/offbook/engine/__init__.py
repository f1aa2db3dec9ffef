"""Inference: ids in, sampled ids with log-probabilities and policy versions out."""

from offbook.engine.local import LocalEngine, Session

__all__ = ["LocalEngine", "Session"]
