"""How a run is laid out on many GPUs, before any is rented: computed from the model's shapes and the configuration.

Half of the GPUs train and half sample. The trainer's meshes are those of train/parallel/: weights are cut over as few
ranks as they fit on, a node at least, and the rest are replicas of that; experts are dealt out inside a node, where
tokens travel fast; ranks share a row where its tokens do not fit on one. A copy of the model that samples gets the
fewest GPUs that hold it and one rollout; there are as many copies as GPUs are left. What train.ranks names is taken.

What a version of the weights weighs is from docs/results/sync.md, whose two learning rates are drawn out to others.
Left out: how long anything takes, so that half and half is a beginning and no optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from offbook.core.config import Config
from offbook.engine.sync.publisher import ANCHOR_EVERY
from offbook.rl.models import described, meta_model
from offbook.rl.plan import LARGEST_SHARE, SPARE, Device, Needs, kv_room, trainer_parts, ways_of
from offbook.train.memory import Share, Way
from offbook.train.parallel.experts import refuse_undealt
from offbook.train.parallel.spmd import expert_shape, refuse_uneven
from offbook.train.parallel.traffic import Meshes, Moved, Traffic, Work, step_traffic
from offbook.train.precision import refuse_lacking

NODE = 8  # GPUs that share a fast network
PATCH = {"adamw": 72.4, "muon": 192.6}  # times smaller than the weights in bfloat16, at a learning rate of 1e-6
PATCH_RATE, PATCH_SLOPE = 1e-6, 0.685  # 34.1 times smaller at 3e-6
LEAST_PATCH = 1.5  # where every weight changes, as in adapters
ANCHOR_SHARE = 0.68  # of the weights


@dataclass(frozen=True, slots=True)
class Layout:
    model: str
    gpus: int
    device: str
    parameters: int
    context: int
    training_gpus: int
    dense: tuple[int, int]  # replicas and shards
    experts: tuple[int, int, int] | None  # replicas, shards and ep
    rows: int  # ranks that share one
    way: Way
    parts: dict[str, float]  # bytes of one rank
    room: float
    replicas: int  # copies of the model that sample
    replica_gpus: int
    kv_tokens: int  # that one holds
    slots: int  # rollouts that are under way at once
    slots_held: int  # that the engines could hold, if all were as long as can be
    sandboxes_a_node: int
    sandbox_bytes: float  # of all sandboxes of a node
    version_bytes: float  # full weights, as they are served
    patch_bytes: float
    anchor_bytes: float  # a version on average, of anchors
    traffic: Traffic  # bytes that come to a rank that trains, a step, where all rollouts are as long as can be

    @property
    def need(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.room and self.replicas > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "need_bytes": self.need, "fits": self.fits}


def make_layout(config: Config, device: Device, gpus: int) -> Layout:
    refuse_lacking(config.train.linear, device.name, device.capability)
    needs = Needs.of(config, described(config.model))
    shapes, context = needs.shapes, needs.context
    training = 2 ** ((gpus // 2).bit_length() - 1)  # meshes are powers of two
    refuse_uneven(config.train.ranks, training)
    tried = list(_tried(config, needs, device, training))
    shard, rows, way, parts = next((one for one in tried if sum(one[3].values()) <= device.room), tried[-1])
    replica_gpus, kv_tokens = _replica(config, needs, device, gpus - training)
    replicas = (gpus - training) // replica_gpus if kv_tokens >= context else 0
    ep = _ep(config, shapes.num_experts, shard)
    ranks = config.train.ranks.model_copy(update={"replicate": training // shard, "experts": ep})
    experts = expert_shape(training, ranks) if ep > 1 else None
    meshes = Meshes((training // shard, shard), experts, rows)
    wanted = config.train.groups * config.train.group_size * (1 + config.loop.max_staleness)
    held = replicas * (kv_tokens // context)
    sandboxes = -(-wanted // -(-gpus // NODE))
    served = 2.0 * shapes.parameters if not config.train.lora.rank else 4.0 * shapes.trained
    smaller = PATCH[config.train.optimizer] * (PATCH_RATE / config.train.learning_rate) ** PATCH_SLOPE
    smaller = max(LEAST_PATCH, smaller) if not config.train.lora.rank else LEAST_PATCH
    return Layout(
        model=config.model,
        gpus=gpus,
        device=device.name,
        parameters=shapes.parameters,
        context=context,
        training_gpus=training,
        dense=meshes.dense,
        experts=experts,
        rows=rows,
        way=way,
        parts=parts,
        room=device.room,
        replicas=replicas,
        replica_gpus=replica_gpus,
        kv_tokens=kv_tokens,
        slots=wanted,
        slots_held=held,
        sandboxes_a_node=sandboxes,
        sandbox_bytes=sandboxes * config.sandbox.memory_mb * 2.0**20,
        version_bytes=served,
        patch_bytes=served / smaller,
        anchor_bytes=ANCHOR_SHARE * served / ANCHOR_EVERY,
        traffic=_traffic(config, needs, meshes, way, training),
    )


def _traffic(config: Config, needs: Needs, meshes: Meshes, way: Way, training: int) -> Traffic:
    model, settings, shapes = described(config.model), config.train, needs.shapes
    named = dict(meta_model(model, settings).named_parameters())
    rollouts = -(-settings.groups * settings.group_size * meshes.rows // training)  # of ranks that share rows
    work = Work(
        tokens=rollouts * needs.context // meshes.rows,
        micro_batches=rollouts if meshes.rows > 1 else -(-rollouts // max(1, way.micro_tokens // needs.context)),
        backwards=needs.parts,
        recomputes=way.recompute != "none",
        width_bytes=shapes.width_bytes,
        wire_bytes=2,
    )
    return step_traffic(Moved.of(named, model, shapes.kv_entries, meshes), meshes, work, settings.optimizer == "muon")


def _ep(config: Config, num_experts: int, shard: int) -> int:
    """The most ranks of a node that experts can be dealt out to alike."""
    if (asked := config.train.ranks.experts) > 1:
        refuse_undealt(num_experts, asked)
        return asked
    if not num_experts:
        return 1
    return max(size for size in _powers(1, min(NODE, shard)) if num_experts % size == 0)


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _tried(
    config: Config, needs: Needs, device: Device, training: int
) -> Iterator[tuple[int, int, Way, dict[str, float]]]:
    """Shards, ranks a row, way and bytes of a rank: what costs least comes first."""
    asked = config.train.ranks
    for rows in [asked.context] if asked.context > 1 else _powers(1, min(NODE, training)):
        least = training // asked.replicate if asked.replicate > 1 else min(NODE, training)
        for shard in [least] if asked.replicate > 1 else _powers(least, training):
            for way in ways_of(config.train, device):
                yield shard, rows, way, _rank_parts(config, needs, shard, rows, way)


def _rank_parts(config: Config, needs: Needs, shard: int, rows: int, way: Way) -> dict[str, float]:
    share = Share(shard, shard, _ep(config, needs.shapes.num_experts, shard), rows)
    return trainer_parts(config, replace(needs, share=share), way, needs.context)


def _replica(config: Config, needs: Needs, device: Device, gpus: int) -> tuple[int, int]:
    """GPUs of a copy that samples, and the tokens whose keys and values it holds."""
    given = config.engine.vllm.gpus
    for size in [given] if given > 1 else _powers(1, gpus):
        found = size, kv_room(needs.shapes, size, LARGEST_SHARE * device.memory)
        if found[1] >= SPARE * needs.context:
            break
    return found
