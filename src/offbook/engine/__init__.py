"""Inference: ids in, sampled ids with log-probabilities and policy versions out."""

from typing import Protocol

from offbook.engine.local import LocalEngine
from offbook.engine.remote import RemoteEngine, RemoteSession
from offbook.types import Policy

__all__ = ["Engine", "LocalEngine", "RemoteEngine", "RemoteSession", "Session"]


class Session(Policy, Protocol):
    """One rollout's way to an engine."""

    def close(self) -> None: ...


class Engine(Protocol):
    """`key` names a rollout: it seeds its random numbers and orders it among others. An engine that can be trained has
    `apply(weights)` too, which takes what a trainer publishes."""

    def open(self, key: str) -> Session: ...
