"""What a step moves between ranks: bytes that come to one of them, by collective and what they are.

Layers are gathered for the forward pass of a micro-batch and for each of its backward passes, the rest (tables, the
last norm) for each backward pass alone; each of these reduces its gradients, in float32. Of experts that are dealt out
a rank gathers its own from their shards, and copies of tokens go there and back, in every pass and where one is
recomputed. Ranks that share a row gather its keys and values, and the last hidden states. Muon's units that lie on
several ranks go to an owner and back. tests/test_traffic.py and bench/cpu/traffic.py count the same on gloo ranks.

Left out: branches; teachers with weights of their own, gathered once more whenever they are asked; counts and norms.
All-to-alls count what a rank keeps for itself, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig

from offbook.train.optim.units import is_cut_between_units, units_of

REDUCED_BYTES = 4  # an entry of a gradient
Traffic = dict[str, dict[str, float]]  # by collective, by what it moves


@dataclass(frozen=True, slots=True)
class Meshes:
    dense: tuple[int, int]  # replicas and shards
    experts: tuple[int, int, int] | None = None  # replicas, shards and ranks that they are dealt out to
    rows: int = 1  # ranks that share one


@dataclass(frozen=True, slots=True)
class Work:
    """Of one rank in one step."""

    tokens: int
    micro_batches: int = 1
    backwards: int = 1  # of each: parts of the loss that are kept apart
    recomputes: bool = False
    width_bytes: int = 4  # an entry of weights and activations
    wire_bytes: int = 4  # an entry of a unit on its way


@dataclass(frozen=True, slots=True)
class Moved:
    """Entries of a model, by what becomes of them."""

    layers: int  # without experts that are dealt out
    root: int
    trained: int  # of those two
    experts: int  # that are dealt out
    trained_experts: int
    exchanged: int  # of matrices that have a unit on several ranks
    copied: int  # of a token, to experts: all layers and all experts that it goes to
    keys: int  # and values, of a token in all layers
    width: int

    @classmethod
    def of(cls, named: Mapping[str, Tensor], config: PreTrainedConfig, keys: int, meshes: Meshes) -> Moved:
        """`named` are parameters with the shapes of the whole, wherever they lie."""
        text = config.get_text_config()
        dealt = {name for name, one in named.items() if meshes.experts and ".experts." in name and one.ndim == 3}
        in_layers = {name for name in named if ".layers." in name} - dealt
        trained = {name for name, one in named.items() if one.requires_grad}
        units = units_of(((name, named[name]) for name in trained), config)
        cut = {name for name in units if not is_cut_between_units(named[name].shape, units[name], meshes.dense[1])}

        def entries(names: set[str]) -> int:
            return sum(named[name].numel() for name in names)

        expert_layers = len({name.partition(".experts.")[0] for name in dealt})
        return cls(
            layers=entries(in_layers),
            root=entries(named.keys() - dealt - in_layers),
            trained=entries(trained - dealt),
            experts=entries(dealt),
            trained_experts=entries(trained & dealt),
            exchanged=entries(cut),
            copied=expert_layers * text.num_experts_per_tok * text.hidden_size if dealt else 0,
            keys=keys,
            width=text.hidden_size,
        )


def step_traffic(moved: Moved, meshes: Meshes, work: Work, muon: bool) -> Traffic:
    (replicas, shards), entry = meshes.dense, work.width_bytes
    copies, parts, dealt_to = meshes.experts or (1, 1, 1)
    forwards = 1 + work.backwards * work.recomputes
    gathers, reduced = work.micro_batches * entry, work.micro_batches * work.backwards * REDUCED_BYTES
    layers, experts = (size * (1 + work.backwards) for size in (moved.layers, moved.experts / dealt_to))
    dense = (layers + moved.root * work.backwards) * _others(shards)
    own, own_experts = moved.trained / shards, moved.trained_experts / dealt_to / parts  # entries of gradients
    row = work.tokens * entry * (meshes.rows - 1)
    return {
        "all-gather": {
            "weights": gathers * (dense + experts * _others(parts)),
            "keys and values": row * (moved.keys * forwards + moved.width),
        },
        "reduce-scatter": {
            "gradients": reduced * ((shards - 1) * own + (parts - 1) * own_experts),
            "gradients of keys and values": row * (moved.keys + moved.width) * work.backwards,
        },
        "all-reduce": {
            "gradients of replicas": 2 * reduced * (own * (replicas > 1) + own_experts * (copies > 1)),
        },
        "all-to-all": {
            "tokens, to experts and back": 2 * (forwards + work.backwards) * moved.copied * work.tokens * entry,
            "Muon's units": 2 * work.wire_bytes * moved.exchanged / shards if muon else 0.0,
        },
    }


def _others(ranks: int) -> float:
    """Their share."""
    return (ranks - 1) / ranks
