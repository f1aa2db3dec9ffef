"""Whether a run fits into memory, before a weight is loaded, and how its steps are computed then.

Trainer, teachers and engine by part, from the model's shapes and the configuration (train/memory.py says how). What the
configuration leaves to be chosen is the fastest way that fits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from offbook.config import Config, LoraConfig, TrainConfig
from offbook.engine.local import CPU_TOKENS
from offbook.loop.annotate import teachers_of
from offbook.loop.models import described
from offbook.train.lora import make_trainable
from offbook.train.memory import (
    CONTEXT_BYTES,
    IN_A_STEP,
    MODES,
    RESERVE_SHARE,
    Mode,
    Shapes,
    Way,
    free_host_memory,
    shapes_of,
    static_parts,
    step_parts,
)
from offbook.train.teachers import Live, Mix
from offbook.types import OffbookError

GB = 1e9
MICRO_TOKENS = (32_768, 16_384, 8_192)  # that are tried, in each way to recompute; then less
FEWER_TOKENS = (4_096, 2_048, 1_024)
HINT_TOKENS = 128
KV_SHARE = 0.25  # of the memory beside its weights, that the local engine takes for keys and values
LORA_RANK = 16  # that is proposed


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: float  # bytes
    is_gpu: bool

    @property
    def room(self) -> float:
        """What tensors can take of it."""
        return self.memory * (1 - RESERVE_SHARE) - CONTEXT_BYTES if self.is_gpu else self.memory


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    device: Device
    parameters: int
    trained: int
    context: int
    way: Way
    parts: dict[str, float]  # bytes
    kv_tokens: int | None  # that the engine holds keys and values of; None where a server of its own decides it
    largest_context: int  # 0 where none fits

    @property
    def need(self) -> float:
        return sum(self.parts.values())

    @property
    def held(self) -> float:
        """From step to step, whatever the rollouts turn out to be."""
        return sum(size for part, size in self.parts.items() if part not in IN_A_STEP)

    @property
    def holds_a_rollout(self) -> bool:
        """A context ends with the message that is written in it."""
        return self.kv_tokens is None or self.context <= self.kv_tokens

    @property
    def fits(self) -> bool:
        return self.need <= self.device.room and self.holds_a_rollout

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device.name,
            "device_bytes": self.device.memory,
            "room_bytes": self.device.room,
            "parameters": self.parameters,
            "trained": self.trained,
            "context": self.context,
            "recompute": self.way.recompute,
            "compile": self.way.compile,
            "micro_tokens": self.way.micro_tokens,
            "parts": self.parts,
            "need_bytes": self.need,
            "kv_tokens": self.kv_tokens,
            "fits": self.fits,
            "largest_context": self.largest_context,
        }

    def __str__(self) -> str:
        how = f"recompute {self.way.recompute}, {'compiled' if self.way.compile else 'not compiled'}"
        return (
            f"{self.need / GB:.1f} of {self.device.memory / GB:.0f} GB planned: {how}, {self.way.micro_tokens} tokens"
        )


def this_device(gpu_memory_gb: float = 0.0) -> Device:
    """What is free here; or a GPU of that size, wherever it is."""
    if gpu_memory_gb:
        return Device(f"a GPU of {gpu_memory_gb:g} GB", gpu_memory_gb * GB, is_gpu=True)
    if torch.cuda.is_available():
        return Device(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], is_gpu=True)
    return Device("the memory of this machine (it has no GPU)", free_host_memory(), is_gpu=False)


def make_plan(config: Config, device: Device, engine_apart: bool = False) -> Plan:
    """`engine_apart`: it has a GPU of its own."""
    return _planned(config, _Run.of(config, described(config.model)), device, engine_apart)


@dataclass(frozen=True, slots=True)
class _Run:
    """What of a configuration decides its memory."""

    shapes: Shapes
    teachers: int  # with weights of their own
    branch_tokens: int  # that ride along with a forward
    context: int

    @classmethod
    def of(cls, config: Config, model: PreTrainedConfig) -> _Run:
        shapes = meta_shapes(model, config.train)
        context = min(config.harness.context, shapes.positions)
        kinds = teachers_of(config.feedback, reference=config.train.reference_kl > 0).values()
        own = {kind.own if isinstance(kind, Mix) else kind for kind in kinds if not isinstance(kind, Live)}
        riding = any(isinstance(kind, Live | Mix) for kind in kinds)
        targets = config.feedback.max_candidates * (config.harness.message_tokens + HINT_TOKENS)
        return cls(shapes, len(own), min(targets, context) if riding else 0, context)


def meta_shapes(model: PreTrainedConfig, settings: TrainConfig) -> Shapes:
    with torch.device("meta"):
        # A copy: how attention runs is written into the configuration.
        meta = AutoModelForCausalLM.from_config(copy.deepcopy(model), dtype=getattr(torch, settings.precision))
        make_trainable(meta, settings.lora, "", 0)
    return shapes_of(meta)


def _planned(config: Config, run: _Run, device: Device, engine_apart: bool) -> Plan:
    def parts(way: Way, context: int) -> dict[str, float]:
        tokens = max(way.micro_tokens, context)
        gradients = 2 if config.feedback.weight and config.feedback.balance == "bounded" else 1
        return {
            **static_parts(run.shapes, config.train.optimizer, run.teachers, gradients),
            **step_parts(run.shapes, way, tokens, run.branch_tokens),
            **({} if engine_apart else _engine_parts(config, run.shapes, device)),
        }

    kv_tokens = _kv_tokens(config, run.shapes, device)

    def choose(context: int) -> tuple[Way, bool]:
        ways = list(_ways(config.train, device))
        for way in ways:
            if sum(parts(way, context).values()) <= device.room:
                return way, kv_tokens is None or context <= kv_tokens
        return (ways[-1] if device.is_gpu else ways[0]), False

    way, _ = choose(run.context)
    contexts = [run.context, *(1024 * 2**power * step // 4 for power in range(1, 12) for step in (4, 5, 6, 7))]
    fitting = [context for context in contexts if context <= run.shapes.positions and choose(context)[1]]
    return Plan(
        model=config.model,
        device=device,
        parameters=run.shapes.parameters,
        trained=run.shapes.trained,
        context=run.context,
        way=way,
        parts=parts(way, run.context),
        kv_tokens=kv_tokens,
        largest_context=max(fitting, default=0),
    )


def _ways(settings: TrainConfig, device: Device) -> list[Way]:
    """Those that the settings leave open, the fastest first."""
    if not device.is_gpu:
        settled = settings.settled()
        assert settled.recompute != "auto"
        return [Way(settled.recompute, settled.compile is True, settled.micro_tokens)]
    compiled = settings.compile is not False
    modes: tuple[Mode, ...] = MODES if settings.recompute == "auto" else (settings.recompute,)
    many, few = ((settings.micro_tokens,),) * 2 if settings.micro_tokens else (MICRO_TOKENS, FEWER_TOKENS)
    ways = [Way(mode, compiled, tokens) for mode in modes for tokens in many]
    return [*ways, *(Way(modes[-1], compiled, tokens) for tokens in few)]


def _engine_parts(config: Config, shapes: Shapes, device: Device) -> dict[str, float]:
    """Rollouts are sampled by a copy of the weights; beside an adapter the two share the base. Keys and values have
    their place also while training."""
    if config.engine.kind == "vllm":
        server = config.engine.vllm
        elsewhere = server.url or server.sleep
        return {"engine (vLLM's share)": 0.0 if elsewhere else server.gpu_share * device.memory}
    weights, token = _local_engine(config, shapes)
    kv = token * (_kv_tokens(config, shapes, device) or 0)
    wanted = config.train.groups * config.train.group_size * min(config.harness.context, shapes.positions) * token
    taken = kv if config.engine.kv_tokens else min(wanted, kv)
    return {"engine weights": weights, "engine KV cache": taken if device.is_gpu else 0.0}


def _local_engine(config: Config, shapes: Shapes) -> tuple[int, int]:
    """Bytes of its weights, and of a token's keys and values."""
    entry = 2 if config.engine.precision == "bfloat16" else 4
    is_shared = bool(config.train.lora.rank) and config.engine.precision == config.train.precision
    return (0 if is_shared else entry * shapes.parameters), entry * shapes.kv_entries


def _kv_tokens(config: Config, shapes: Shapes, device: Device) -> int | None:
    """How many tokens' keys and values the engine holds; None where that is seen when its server starts."""
    if config.engine.kind == "vllm":
        server = config.engine.vllm
        if server.url or not device.is_gpu:
            return None
        share = server.gpus * (server.gpu_share * device.memory - CONTEXT_BYTES)
        return max(0, int(share - 2 * shapes.parameters) // (2 * shapes.kv_entries))
    if config.engine.kv_tokens or not device.is_gpu:
        return config.engine.kv_tokens or CPU_TOKENS
    weights, token = _local_engine(config, shapes)
    return max(0, int(KV_SHARE * (device.room - weights - shapes.width_bytes * shapes.parameters)) // token)


def refuse_too_large(config: Config, plan: Plan) -> None:
    """One sentence, with what would fit, before minutes go into a run that dies.

    On a CPU, where the memory may be had from elsewhere and few train for long, only what cannot even be held.
    """
    if (plan.need if plan.device.is_gpu else plan.held) > plan.device.room:
        needs = f"{config.model} needs {plan.need / GB:.0f} GB here"
        told = f"{needs} and {plan.device.name} has {plan.device.memory / GB:.0f} GB"
        raise OffbookError(f"{told}; {_cheaper(config, plan) or 'take a smaller model or a larger GPU'}")
    if not plan.holds_a_rollout:
        raise OffbookError(_too_long(config, plan))


def _too_long(config: Config, plan: Plan) -> str:
    told = f"a rollout may have {plan.context} tokens (harness.context) and the engine holds {plan.kv_tokens}"
    if config.engine.kind == "vllm":
        return f"{told} in its share of the GPU; raise engine.vllm.gpu_share or lower harness.context"
    if config.engine.kv_tokens or not plan.device.is_gpu:
        return f"{told}; raise engine.kv_tokens to {plan.context} or more, or lower harness.context"
    return f"{told} in a quarter of the GPU's memory; lower harness.context, or set engine.kv_tokens to {plan.context}"


def _cheaper(config: Config, plan: Plan) -> str:
    """The first change that makes it fit."""
    model, context, adapter = described(config.model), plan.context // 2, LoraConfig(rank=LORA_RANK)
    tried: dict[str, dict[str, Any]] = {
        "--train.precision bfloat16": {"precision": "bfloat16"},
        f"--train.lora.rank {LORA_RANK}": {"lora": adapter},
        f"--train.precision bfloat16 --train.lora.rank {LORA_RANK}": {"precision": "bfloat16", "lora": adapter},
    }
    updates: dict[str, dict[str, Any]] = {}
    for options, update in tried.items():
        updates[options] = {"train": config.train.model_copy(update=update)}
        if precision := update.get("precision"):  # the engine's goes with it
            updates[options]["engine"] = config.engine.model_copy(update={"precision": precision})
    updates[f"--harness.context {context}"] = {"harness": config.harness.model_copy(update={"context": context})}
    for options, update in updates.items():
        changed = config.model_copy(update=update)
        found = _planned(changed, _Run.of(changed, model), plan.device, engine_apart=False)
        if found.fits:
            return f"{options} needs {found.need / GB:.0f} GB"
    return ""
