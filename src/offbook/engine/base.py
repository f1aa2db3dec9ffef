"""What every engine offers: token ids in, sampled ids with log-probabilities and policy versions out.

Callers use these two classes and never ask which engine they have: what an engine does not have or need is a default
here (no counters, an empty KV cache, a pause without effect). The engines are LocalEngine (a transformers model in this
process), VllmEngine and SeveralEngines (vLLM servers), RemoteEngine (a model behind a URL, which cannot be trained).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbook.core.weights import Weights
from offbook.types import Completion, OffbookError, Prompt, ServerLost


class Session:
    """One rollout's connection to an engine, from `Engine.open` to `close`. Satisfies `offbook.types.Policy`."""

    __slots__ = ()

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        """Sample one message of at most `max_tokens`, fewer where the model's context ends.

        Raises PromptTooLong if the prompt leaves no room, ModelLost if the model cannot be asked. May be cancelled.
        """
        raise NotImplementedError

    async def alive(self) -> None:
        """Return as soon as the model shows a sign of life; raise ModelLost if it died or hangs.

        Asked after a rollout's timeout, also when the session is closed: a timeout with a dead model is no failure of
        the agent. The default trusts the model.
        """

    def close(self) -> None:
        """Free what the rollout holds. A lockstep engine waits for all open sessions, so each one must be closed."""


class Engine:
    """A model that writes messages.

    keeps_weights  `apply` keeps references to the tensors (for a server that is restarted): pass copies if the trainer
                   changes its own meanwhile
    seed           of the random numbers of each rollout, where the engine draws them itself; may be set between runs
    """

    keeps_weights: bool = False
    seed: int = 0

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token is sampled from."""
        return 0

    @property
    def counters(self) -> Mapping[str, float]:
        """Totals since the engine was made, by the names that metrics.jsonl has. Callers take differences."""
        return {}

    @property
    def kv_load(self) -> float:
        """Share of the KV cache in use, 0 to 1; 0 where the engine queues by itself what it has no room for."""
        return 0.0

    @property
    def losses(self) -> Sequence[ServerLost]:
        """Every loss of a server since the engine was made; each server was restarted since."""
        return ()

    def open(self, key: str) -> Session:
        """A session for the rollout `key`, which seeds its random numbers; `group/number` keeps groups together."""
        raise NotImplementedError

    def apply(self, weights: Weights) -> None:
        """Replace the weights. Tokens sampled from now on carry `weights.version`.

        Blocks until they are in; sampling may go on meanwhile in another thread. Raises OffbookError if they do not
        fit, and then the old weights stay.
        """
        raise OffbookError("a model behind a URL cannot take new weights: --model is a URL; give a folder or a name")

    def pause(self) -> None:
        """Give GPU memory back until the next `apply` or message, which resumes by itself. Nothing may be running."""

    async def aclose(self) -> None:
        """Stop what the engine started: connections, servers."""
