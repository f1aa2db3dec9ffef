"""The local engine: many rollouts in flight on one transformers model, in lockstep.

A batch is decoded when every open session waits for one. Which rollouts share a batch then depends on nothing but the
rollouts themselves, and each draws from random numbers of its own: the same seed gives the same tokens however
long the sandboxes took. The price is that all wait for the slowest tool call of a turn.

Whatever touches the weights runs in one thread of the engine's own, one thing after another, so the event loop goes on
while the model writes: sandboxes are read, deadlines fire, displays move.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from offbook.types import Completion, ModelLost, Prompt, PromptTooLong, Weights

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Request:
    key: str
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    done: asyncio.Future[Completion]
    abandoned: bool = False  # nobody waits any more; read by the decoding thread, which then drops the row


@dataclass(slots=True)
class LocalSession:
    """One rollout's way to the engine. `key` orders it in a batch and seeds its random numbers."""

    engine: LocalEngine
    key: str
    turn: int = 0

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        """A message of at most `max_tokens`, fewer where the model's positions end before."""
        room = self.engine.positions - len(prompt.ids)
        if room <= 0:
            raise PromptTooLong(
                f"the prompt has {len(prompt.ids)} tokens and the model has {self.engine.positions} positions"
            )
        done = asyncio.get_running_loop().create_future()
        request = _Request(self.key, self.turn, prompt.ids, min(max_tokens, room), done)
        self.turn += 1
        self.engine.waiting.append(request)
        self.engine.decode_if_all_wait()
        try:
            return await done
        finally:
            request.abandoned = True
            if request in self.engine.waiting:  # the rollout ran out of time while it waited
                self.engine.waiting.remove(request)

    def close(self) -> None:
        self.engine.open_sessions -= 1
        self.engine.decode_if_all_wait()


@dataclass
class LocalEngine:
    """`version` is the policy version of the weights now in `model`. A message ends with any of `stop_ids`."""

    model: PreTrainedModel
    stop_ids: frozenset[int]
    temperature: float = 1.0
    max_rows: int = 64
    seed: int = 0
    version: int = 0
    waiting: list[_Request] = field(default_factory=list)
    open_sessions: int = 0
    tokens_sampled: int = 0  # since the engine was made, by rows that were dropped too
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "decode"), repr=False)
    _decoding: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def positions(self) -> int:
        positions: int = self.model.config.get_text_config().max_position_embeddings
        return positions

    def open(self, key: str) -> LocalSession:
        """Open all sessions of a batch before the first one asks, or the first is decoded alone."""
        self.open_sessions += 1
        return LocalSession(self, key)

    def apply(self, weights: Weights) -> None:
        """Swap them in place; tokens sampled from now on carry their version. Waits for a batch in the making."""
        self._submit(partial(self._swap, weights)).result()

    @torch.no_grad()
    def _swap(self, weights: Weights) -> None:
        own = self.model.state_dict()
        for name, tensor in weights.tensors.items():  # an adapter's alone, where that is all that changes
            own[name].copy_(tensor)
        self.version = weights.version

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """To the engine's thread. torch counts OpenMP threads per thread: the caller's number is taken along."""
        num_threads = torch.get_num_threads()

        def run() -> T:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            return job()

        return self._thread.submit(run)

    def decode_if_all_wait(self) -> None:
        requests = [request for request in self.waiting if not request.done.done()]
        if self._decoding or not requests or len(requests) < self.open_sessions:
            return
        self.waiting = []
        requests.sort(key=lambda request: (len(request.prompt_ids), request.key))
        self._decoding = asyncio.get_running_loop().create_task(self._serve(requests))

    async def _serve(self, requests: list[_Request]) -> None:
        """Every request gets its completion, the error that stopped the decoding, or a cancellation: never silence."""
        try:
            for start in range(0, len(requests), self.max_rows):
                batch = requests[start : start + self.max_rows]
                completions = await asyncio.wrap_future(self._submit(partial(self._decode, batch)))
                for request, completion in zip(batch, completions, strict=True):
                    if not request.done.done():
                        request.done.set_result(completion)
        except Exception as error:  # not handled here: every rollout that waits for the batch gets it
            lost = _lost(error)
            for request in requests:
                if not request.done.done():
                    request.done.set_exception(lost)
                    request.done.exception()  # the first rollout that gets it ends the others: theirs is not unread
        finally:
            for request in requests:
                request.done.cancel()
                request.abandoned = True
            self._decoding = None
            self.decode_if_all_wait()

    def _uniforms(self, request: _Request) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{request.key}/{request.turn}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)

    @torch.inference_mode()
    def _decode(self, requests: list[_Request]) -> list[Completion]:
        """Left-padded prompts, one cache, one token a row and round; rows that ended or were abandoned leave the batch.

        Axes: B rows still writing, T tokens, V vocabulary.
        """
        device = self.model.device
        width = max(len(request.prompt_ids) for request in requests)
        pads = [width - len(request.prompt_ids) for request in requests]
        ids_BT = torch.tensor([[0] * p + r.prompt_ids for p, r in zip(pads, requests, strict=True)], device=device)
        pad_B = torch.tensor(pads, device=device)
        mask_BT = torch.arange(width, device=device) >= pad_B[:, None]
        uniforms = [self._uniforms(request) for request in requests]
        out: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
        rows = list(range(len(requests)))
        cache = DynamicCache(config=self.model.config)
        position_BT = (torch.arange(width, device=device) - pad_B[:, None]).clamp(min=0)
        while rows:
            logits_BV = self.model(
                input_ids=ids_BT,
                attention_mask=mask_BT.long(),
                position_ids=position_BT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            logp_BV = torch.log_softmax(logits_BV.double() / self.temperature, dim=-1)
            draw_B = torch.stack([uniforms[row][len(out[row][0])] for row in rows]).to(device)
            cumulative_BV = logp_BV.exp().cumsum(-1)
            threshold_B = draw_B * cumulative_BV[:, -1]
            token_B = torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]
            token_B = token_B.clamp(max=logp_BV.shape[1] - 1)
            logprob_B = logp_BV.gather(1, token_B[:, None])[:, 0]
            for row, token, logprob in zip(rows, token_B.tolist(), logprob_B.tolist(), strict=True):
                out[row][0].append(token)
                out[row][1].append(logprob)
            self.tokens_sampled += len(rows)
            going = [
                place
                for place, row in enumerate(rows)
                if out[row][0][-1] not in self.stop_ids
                and len(out[row][0]) < requests[row].max_tokens
                and not requests[row].abandoned
            ]
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                keep_B = torch.tensor(going, dtype=torch.long, device=device)
                cache.batch_select_indices(keep_B)
                token_B, mask_BT, position_BT = token_B[keep_B], mask_BT[keep_B], position_BT[keep_B]
            ids_BT = token_B[:, None]
            mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
            position_BT = position_BT[:, -1:] + 1
        return [Completion(ids, logprobs, [self.version] * len(ids)) for ids, logprobs in out]


def _lost(error: Exception) -> ModelLost:
    """No rollout's fault: a model that cannot write now will not write for the next one."""
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    advice = ""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in said:
        advice = "; lower engine.max_rows or harness.context"
    lost = ModelLost(f"the model stopped writing: {type(error).__name__}: {said}{advice}")
    lost.__cause__ = error
    return lost
