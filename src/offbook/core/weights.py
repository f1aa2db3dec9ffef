"""Weights on their way from a trainer to an engine. Tensors are whatever holds them: this room knows no torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gathered(Mapping[str, Any]):
    """Tensors that lie over ranks, each put together when it is asked for: who takes one after the other never has all.

    `like` has their shapes and dtypes, `firsts` for each name the first one of the same tensor.
    """

    like: Mapping[str, Any]
    firsts: Mapping[str, str]
    gather: Callable[[str], Any]

    def __getitem__(self, name: str) -> Any:
        return self.gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


@dataclass(frozen=True)
class Weights:
    """What a trainer publishes and an engine applies: tensors by name, and the policy version that they are.

    With `adapter`, PEFT's configuration of it, they are those of an adapter alone, by the names that PEFT's files have;
    those on experts are in the form that they have in a model (adapters.py).
    """

    version: int
    tensors: Mapping[str, Any]
    adapter: Mapping[str, Any] | None = None

    @property
    def like(self) -> Mapping[str, Any]:
        """The tensors, as far as names, shapes and dtypes go."""
        return self.tensors.like if isinstance(self.tensors, Gathered) else self.tensors

    def firsts(self) -> dict[str, str]:
        """By name, the first name of the same tensor: an output layer may be tied to the input's."""
        if isinstance(self.tensors, Gathered):
            return dict(self.tensors.firsts)
        seen: dict[tuple[object, ...], str] = {}
        memory = {name: (one.data_ptr(), one.dtype, one.shape, one.stride()) for name, one in self.tensors.items()}
        return {name: seen.setdefault(place if place[0] else (name,), name) for name, place in memory.items()}
