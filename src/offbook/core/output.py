"""From hidden states to logits, as the model itself would: some families scale or bend them after the last product."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.types import OffbookError


class LogitHead(nn.Module):
    """A head whose logits are bent towards a bound, if there is one, and scaled."""

    def __init__(self, head: nn.Module, scale: float, bound: float | None):
        super().__init__()
        self.head = head
        self.scale = scale
        self.bound = bound

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        if self.bound:
            logits = self.bound * torch.tanh(logits / self.bound)
        return logits * self.scale


@torch.no_grad()
def output_of(model: PreTrainedModel) -> nn.Module:
    """The model's head, or that and what comes after it. The scale is found by trying a few tokens: every family has a
    name of its own for it."""
    ids_1T = torch.tensor([[1, 5, 2, 7, 3, 6, 4, 9]], device=model.device)
    hidden = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    wanted = model(input_ids=ids_1T, use_cache=False).logits.float()
    bound = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    head = model.get_output_embeddings()
    plain = LogitHead(head, 1.0, bound)(hidden).float()
    scale = float((wanted * plain).sum() / plain.square().sum())
    tolerance = 1e-3 if wanted.dtype == hidden.dtype else 0.05
    if not (wanted - scale * plain).norm() <= tolerance * wanted.norm():
        raise OffbookError(
            f"{model.config.model_type} does more to its logits than scaling them, so its samples cannot be scored; "
            "take a model of another family"
        )
    is_plain = not bound and abs(scale - 1) <= tolerance
    return head if is_plain else LogitHead(head, scale, bound)
