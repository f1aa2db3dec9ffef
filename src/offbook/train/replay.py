"""Router replay: a training forward sends tokens to the experts that they went to when the engine read or wrote them.

Rounding in the engine and here tips tokens that are nearly undecided to other experts, and then both compute something
else for them. The recorded choice is taken, with gates from this forward's own logits, so that gradients reach the
router (R3, 2510.11370). A token without a record, or with one that cannot be right, goes where the router sends it:
all of it, so that no expert comes twice. Choices are kept by layer and token for as long as the micro-batch lasts:
recomputation in the backward pass runs a layer again. Branches route freely.

Axes: L layers with a router, N tokens of a micro-batch (filler too), K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.routers import TRIED_IDS, routers_of
from offbook.train.batches import Batch
from offbook.types import OffbookError, Routes

PLAUSIBLE = 0.25  # of what the router's own choice weighs: a recorded choice that weighs less is taken for a mistake
NONE = -1


@dataclass
class Gates:
    """How a family makes gates of logits."""

    sigmoid: bool
    normalised: bool
    scale: float = 1.0

    def weights(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.float().sigmoid() if self.sigmoid else logits_NE.float().softmax(-1)

    def of(self, weights_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        gates_NK = weights_NE.gather(1, chosen_NK)
        if self.normalised:
            gates_NK = gates_NK / (gates_NK.sum(-1, keepdim=True) + 1e-20)
        return gates_NK * self.scale


class Replay:
    """Of the routers of one model. `begin` says which micro-batch comes next."""

    def __init__(self, model: PreTrainedModel):
        self.routers = routers_of(model)
        self.gates, self.top = _find_gates(model, self.routers) if self.routers else ([], 0)
        self.routes_LNK: Tensor | None = None
        self.is_real_N = torch.empty(0)  # else it is filler
        self._free = True
        self._counted: set[int] = set()  # layers of this micro-batch
        self._counts: dict[int, Tensor] = {}  # by layer: tokens recorded, replayed and routed, then the load of experts
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._replace, number))

    def begin(self, batch: Batch) -> None:
        self._counted.clear()
        self._free = False
        self.routes_LNK = batch.routes(len(self.routers))
        place_N = torch.arange(batch.row.ids_1F.shape[1], device=batch.row.ids_1F.device)
        self.is_real_N = place_N < sum(len(sample.ids) for sample in batch.samples)

    def end(self) -> None:
        """What is read from now on belongs to no micro-batch, and is not counted."""
        self.routes_LNK = None
        self._free = True

    def fault_of(self, routes: Routes) -> str:
        """Why a record is not one of this model's."""
        if not self.routers:
            return ""
        if (routes.layers, routes.top) != (len(self.routers), self.top):
            own = f"the model has {len(self.routers)} and {self.top}"
            return f"recorded routes are of {routes.layers} layers with {routes.top} experts per token, and {own}"
        try:
            is_whole = len(routes.unpack()) % (2 * routes.layers * routes.top) == 0
        except ValueError:
            is_whole = False
        return "" if is_whole else "recorded routes are cut off or damaged"

    @contextmanager
    def free(self) -> Iterator[None]:
        """Meanwhile tokens go where the router sends them."""
        before, self._free = self._free, True
        try:
            yield
        finally:
            self._free = before

    def _replace(self, layer: int, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_NE, gates_NK, own_NK = output
        if self._free:
            return None
        if self.routes_LNK is None:
            nothing_N = torch.zeros_like(self.is_real_N)
            self._count(layer, nothing_N, nothing_N, own_NK, logits_NE.shape[1])
            return None
        routes_NK = self.routes_LNK[layer].long()
        weights_NE = self.gates[layer].weights(logits_NE)
        is_there_N = routes_NK[:, 0] != NONE
        is_right_N = is_there_N & _is_plausible(routes_NK, own_NK, weights_NE.detach())
        chosen_NK = torch.where(is_right_N[:, None], routes_NK, own_NK)
        self._count(layer, is_there_N, is_right_N, chosen_NK, logits_NE.shape[1])
        return logits_NE, self.gates[layer].of(weights_NE, chosen_NK).to(gates_NK.dtype), chosen_NK

    def _count(self, layer: int, is_there_N: Tensor, is_right_N: Tensor, chosen_NK: Tensor, experts: int) -> None:
        if layer in self._counted:  # recomputed
            return
        self._counted.add(layer)
        tokens = torch.stack([is_there_N.sum(), is_right_N.sum(), self.is_real_N.sum()])
        load_E = torch.bincount(chosen_NK[self.is_real_N].flatten(), minlength=experts)
        self._counts[layer] = torch.cat([tokens, load_E]) + self._counts.get(layer, 0)

    def counted(self) -> dict[int, Tensor]:
        """Since it was last asked for, on this rank."""
        counts = {layer: count.cpu() for layer, count in self._counts.items()}
        self._counts = {}
        return counts


def figures_of(counted: Sequence[Mapping[int, Tensor]]) -> dict[str, float]:
    """Of all ranks: shares of tokens and layers, and by layer the load of its busiest expert by the mean."""
    layers = sorted({layer for one in counted for layer in one})
    totals = [torch.stack([one[layer] for one in counted if layer in one]).sum(0) for layer in layers]
    if not totals:
        return {}
    recorded, replayed, tokens = torch.stack([total[:3] for total in totals]).sum(0).tolist()
    found = {"moe/replayed": replayed / tokens, "moe/implausible": 1 - replayed / recorded if recorded else 0.0}
    for layer, total in zip(layers, totals, strict=True):
        load_E = total[3:]
        found[f"moe/load.{layer:02d}"] = float(load_E.max() / load_E.float().mean())
    return found


def _is_plausible(routes_NK: Tensor, own_NK: Tensor, weights_NE: Tensor) -> Tensor:
    experts = weights_NE.shape[1]
    is_known = ((routes_NK >= 0) & (routes_NK < experts)).all(-1)
    in_order = routes_NK.sort(-1).values
    is_distinct = (in_order[:, 1:] != in_order[:, :-1]).all(-1)
    known_NK = routes_NK.clamp(0, experts - 1)
    given, own = (weights_NE.gather(1, chosen_NK).sum(-1) for chosen_NK in (known_NK, own_NK))
    return is_known & is_distinct & (given >= PLAUSIBLE * own)


@torch.no_grad()
def _find_gates(model: PreTrainedModel, routers: list[nn.Module]) -> tuple[list[Gates], int]:
    """And how many experts a token goes to. By trying: every family has names of its own for it."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    hooks = [router.register_forward_hook(lambda _m, _i, output: seen.append(output)) for router in routers]
    try:
        model.base_model(input_ids=torch.tensor([TRIED_IDS], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [_gates_like(*output, model.config.model_type) for output in seen], seen[0][2].shape[1]


def _gates_like(logits_NE: Tensor, gates_NK: Tensor, chosen_NK: Tensor, kind: str) -> Gates:
    wanted = gates_NK.float()
    tolerance = 1e-4 if gates_NK.dtype == torch.float32 else 2e-2
    for sigmoid in (False, True):
        for normalised in (True, False):
            plain = Gates(sigmoid, normalised)
            found = plain.of(plain.weights(logits_NE), chosen_NK)
            scale = float((wanted * found).sum() / found.square().sum())
            if (wanted - scale * found).norm() <= tolerance * wanted.norm():
                return Gates(sigmoid, normalised, scale if abs(scale - 1) > tolerance else 1.0)
    raise OffbookError(f"the gates of {kind} follow from its router's logits in a way that is not known here")
