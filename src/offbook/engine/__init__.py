"""Inference: ids in, sampled ids with log-probabilities and policy versions out."""

from offbook.engine.local import LocalEngine, PromptTooLong, Session
from offbook.engine.remote import RemoteEngine, RemoteSession

__all__ = ["LocalEngine", "PromptTooLong", "RemoteEngine", "RemoteSession", "Session"]
