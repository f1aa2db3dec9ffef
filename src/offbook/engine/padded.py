"""Decoding for models whose layers are not all plain attention: sliding windows, recurrent states, soft caps.

transformers' own cache knows them. It lives for one batch: every turn reads the whole conversation again, and prompts
are padded on the left to the longest. Axes: R rows still writing, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from offbook.engine.decode import Row
from offbook.engine.sampling import sample


class PaddedDecoder:
    """In lockstep only."""

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int], temperature: float, budget: int):
        self.model, self.stop_ids, self.temperature, self.budget = model, stop_ids, temperature, budget
        self.version = 0
        self.tokens_sampled = self.tokens_prefilled = 0
        self.tokens_reread = 0  # nothing is kept that could be lost

    def fitting(self, rows: list[Row]) -> int:
        need = 0
        for count, row in enumerate(rows):
            need = max(need, row.need)
            if (count + 1) * need > self.budget:
                return count
        return len(rows)

    def renew(self, version: int) -> None:
        self.version = version

    def reset(self) -> None:
        """Nothing is kept."""

    @torch.inference_mode()
    def write(self, requests: list[Row]) -> None:
        """One cache, one token a row and round; rows that ended or were abandoned leave the batch."""
        device = self.model.device
        width = max(len(row.prompt_ids) for row in requests)
        pads = [width - len(row.prompt_ids) for row in requests]
        ids_RT = torch.tensor([[0] * p + r.prompt_ids for p, r in zip(pads, requests, strict=True)], device=device)
        pad_R = torch.tensor(pads, device=device)
        mask_RT = torch.arange(width, device=device) >= pad_R[:, None]
        position_RT = (torch.arange(width, device=device) - pad_R[:, None]).clamp(min=0)
        cache, rows = DynamicCache(config=self.model.config), requests
        self.tokens_prefilled += sum(len(row.prompt_ids) for row in rows)
        while rows:
            logits_RV = self.model(
                input_ids=ids_RT,
                attention_mask=mask_RT.long(),
                position_ids=position_RT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            uniform_R = torch.stack([row.uniforms[len(row.ids)] for row in rows]).to(device)
            token_R, logprob_R = sample(logits_RV, uniform_R, self.temperature)
            for row, token, logprob in zip(rows, token_R.tolist(), logprob_R.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
                row.versions.append(self.version)
            self.tokens_sampled += len(rows)
            going = [
                place
                for place, row in enumerate(rows)
                if row.ids[-1] not in self.stop_ids and len(row.ids) < row.max_tokens and not row.abandoned
            ]
            if len(going) < len(rows):
                rows = [rows[place] for place in going]
                keep_R = torch.tensor(going, dtype=torch.long, device=device)
                cache.batch_select_indices(keep_R)
                token_R, mask_RT, position_RT = token_R[keep_R], mask_RT[keep_R], position_RT[keep_R]
            ids_RT = token_R[:, None]
            mask_RT = torch.cat([mask_RT, torch.ones_like(mask_RT[:, :1])], dim=1)
            position_RT = position_RT[:, -1:] + 1
