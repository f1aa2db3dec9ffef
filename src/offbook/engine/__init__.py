"""Inference: ids in, sampled ids with log-probabilities and policy versions out."""

from typing import Protocol

from offbook.core.weights import Weights
from offbook.engine.local import LocalEngine
from offbook.engine.remote import RemoteEngine, RemoteSession
from offbook.engine.vllm import AnyVllm, VllmEngine
from offbook.types import Policy

__all__ = ["AnyVllm", "Engine", "LocalEngine", "RemoteEngine", "RemoteSession", "Session", "Trainable", "VllmEngine"]


class Session(Policy, Protocol):
    """One rollout's way to an engine."""

    def close(self) -> None: ...


class Engine(Protocol):
    """`key` names a rollout: where an engine seeds its random numbers by rollout, by this."""

    def open(self, key: str) -> Session: ...


class Trainable(Engine, Protocol):
    """An engine whose model is being trained. `version` is of the weights that it has now."""

    @property
    def version(self) -> int: ...

    def apply(self, weights: Weights) -> None:
        """What a trainer publishes. Tokens sampled from now on are of these weights and carry their version."""
