"""The local engine: many rollouts in flight on one transformers model, in lockstep.

A batch is decoded when every open session waits for one. Which rollouts share a batch then depends on nothing but the
rollouts themselves, and each draws from random numbers of its own: the same seed gives the same tokens however
long the sandboxes took. The price is that all wait for the slowest tool call of a turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from offbook.types import Completion


@dataclass(slots=True, eq=False)
class _Request:
    key: str
    turn: int
    prompt_ids: list[int]
    max_tokens: int
    done: asyncio.Future[Completion]


@dataclass(slots=True)
class Session:
    """One rollout's way to the engine. `key` orders it in a batch and seeds its random numbers."""

    engine: LocalEngine
    key: str
    turn: int = 0

    async def complete(self, prompt_ids: list[int], max_tokens: int) -> Completion:
        done = asyncio.get_running_loop().create_future()
        request = _Request(self.key, self.turn, prompt_ids, max_tokens, done)
        self.turn += 1
        self.engine.waiting.append(request)
        self.engine.decode_if_all_wait()
        try:
            return await done
        finally:
            if request in self.engine.waiting:  # the rollout ran out of time while it waited
                self.engine.waiting.remove(request)

    def close(self) -> None:
        self.engine.open_sessions -= 1
        self.engine.decode_if_all_wait()


@dataclass
class LocalEngine:
    """`version` is the policy version of the weights now in `model`."""

    model: PreTrainedModel
    stop_id: int
    temperature: float = 1.0
    max_rows: int = 64
    seed: int = 0
    version: int = 0
    waiting: list[_Request] = field(default_factory=list)
    open_sessions: int = 0

    def open(self, key: str) -> Session:
        """Open all sessions of a batch before the first one asks, or the first is decoded alone."""
        self.open_sessions += 1
        return Session(self, key)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Swap the weights in place; tokens sampled from now on carry `version`."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(weights[name])
        self.version = version

    def decode_if_all_wait(self) -> None:
        if not self.waiting or len(self.waiting) < self.open_sessions:
            return
        requests = sorted(self.waiting, key=lambda request: (len(request.prompt_ids), request.key))
        self.waiting = []
        for start in range(0, len(requests), self.max_rows):
            batch = requests[start : start + self.max_rows]
            for request, completion in zip(batch, self._decode(batch), strict=True):
                if not request.done.cancelled():
                    request.done.set_result(completion)

    def _uniforms(self, request: _Request) -> Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{request.key}/{request.turn}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest))
        return torch.rand(request.max_tokens, generator=generator, dtype=torch.float64)

    @torch.inference_mode()
    def _decode(self, requests: list[_Request]) -> list[Completion]:
        """Left-padded prompts, one cache, one token a row and round; rows that ended leave the batch.

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
            going = [
                place
                for place, row in enumerate(rows)
                if out[row][0][-1] != self.stop_id and len(out[row][0]) < requests[row].max_tokens
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
