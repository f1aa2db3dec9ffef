"""Memory of a run by part, before a weight is loaded, and how its steps are computed so that it fits.

What autograd keeps of a layer is counted, not derived: the model's last layer runs on the meta device, where tensors
have shapes and no data, and the storages saved for the backward pass are added up. Attention counts as a fused kernel,
which keeps queries, keys, values, its output, and one float32 per head and token. For a Qwen3 layer of width D,
feed-forward width F, H query and K key heads of width W, in bfloat16, that is

    2 * (8 D + 4 F + 5 W (H + K)) + 8 H + 4 K + 8    bytes per token.

`train.recompute` keeps of it: `none` all; `layers` the layer's input and the output of attention; `all` the input.
The peak is taken while several micro-batches add up gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from offbook.core.config import Config, TrainConfig
from offbook.engine.local import CPU_TOKENS
from offbook.engine.vllm.gpus import leave_the_trainer_alone
from offbook.engine.vllm.server import BATCHED_TOKENS
from offbook.rl.models import described
from offbook.rl.train_step import teachers_of
from offbook.train import head
from offbook.train.forward import Live
from offbook.train.lora import make_trainable
from offbook.train.optim.units import units_of
from offbook.train.parallel.spmd import ALONE, Share
from offbook.train.precision import refuse_lacking
from offbook.types import OffbookError

# Measured, where the rest follows from shapes. Tables are by bytes per entry.
COMPILED_SHARE = {2: 0.66, 4: 0.74}  # of the bytes that an eager layer saves (Qwen3)
COMPILED_ADAPTER_SHARE = {2: 0.47, 4: 0.53}  # the same under adapters (Qwen3-8B on an H200)
CHUNK_BYTES = {2: 16.0, 4: 20.0}  # per logit of an eager chunk: logits, log-probabilities and their gradients
COMPILED_CHUNK_BYTES = {2: 10.0, 4: 12.0}
BACKWARD_SHARE = 0.25  # of what a layer saves: gradients in flight in its backward pass
FORWARD_SHARE = 0.5  # of what a layer saves: alive at a time in a pass without gradients
RESERVE_SHARE = 0.05  # of a GPU: fragments that the allocator cannot use
CONTEXT_BYTES = 1.0e9  # CUDA, its libraries and workspaces

Mode = Literal["none", "layers", "all"]
MODES: tuple[Mode, ...] = ("none", "layers", "all")  # from the fastest to the smallest
MICRO_TOKENS = (32_768, 16_384, 8_192, 2_048)  # tried with every mode
HINT_TOKENS = 128
KV_SHARE = 0.25  # of what weights leave: the most that is planned for keys and values
FEWER_ROLLOUTS = (1.0, 0.75, 0.5, 0.25, 0.0)  # from all rollouts at once down to one
SPARE = 1.1  # times the need of one rollout
TRIED_TOKENS = 128
SHAPES_ONLY = "offbook-shapes"
IN_A_STEP = ("activations", "head, or a layer's backward", "branch pass")  # parts that come and go with a step
KV_CACHE, VLLM = "engine KV cache", "engine (vLLM's share)"
CGROUP = Path("/sys/fs/cgroup")
GB = 1e9


@dataclass(frozen=True)
class Shapes:
    """The figures of a model that its memory follows from."""

    width_bytes: int  # per entry of weights and activations
    parameters: int
    trained: int
    matrices: int  # trained entries in matrices other than embeddings: Muon has one state for them
    width: int
    layers: int
    saved: float  # bytes per token and layer for the backward pass
    attention: float  # of those, the output of attention
    head_entries: int
    tied: bool  # the head is the embedding table
    kv_entries: int  # keys and values per token, in all layers
    vocabulary: int
    positions: int


@dataclass(frozen=True)
class Way:
    """How a step is computed."""

    recompute: Mode
    compile: bool
    micro_tokens: int


@dataclass(frozen=True)
class Device:
    name: str
    memory: float  # free bytes
    is_gpu: bool
    whole: float = 0.0  # all bytes of a GPU that is here; vLLM counts shares of them
    capability: tuple[int, int] | None = None

    @property
    def room(self) -> float:
        """Bytes for tensors."""
        return self.memory * (1 - RESERVE_SHARE) - CONTEXT_BYTES if self.is_gpu else self.memory


@dataclass(frozen=True)
class MemoryPlan:
    model: str
    device: Device
    parameters: int
    trained: int
    context: int
    way: Way
    parts: dict[str, float]  # bytes
    kv_tokens: int | None  # in the engine's KV cache; None: a server elsewhere decides
    gpu_share: float | None  # of a vLLM started here
    is_rank: bool  # one of several
    largest_context: int = 0  # 0: none fits

    @property
    def need(self) -> float:
        return sum(self.parts.values())

    @property
    def holds_a_rollout(self) -> bool:
        return self.kv_tokens is None or self.context <= self.kv_tokens

    @property
    def fits(self) -> bool:
        return self.need <= self.device.room and self.holds_a_rollout

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self) | asdict(self.way)
        return found | {"room_bytes": self.device.room, "need_bytes": self.need, "fits": self.fits}

    def __str__(self) -> str:
        compiled = "compiled" if self.way.compile else "not compiled"
        way = f"recompute {self.way.recompute}, {compiled}, {self.way.micro_tokens} tokens"
        text = f"{self.need / GB:.1f} of {self.device.memory / GB:.0f} GB planned: {way}"
        if self.gpu_share is not None:
            return f"{text}, engine.vllm.gpu_share {self.gpu_share:g}"
        return text if self.kv_tokens is None else f"{text}, engine.kv_tokens {self.kv_tokens}"


def free_host_memory() -> int:
    """Bytes that this process may still take, by the machine and by its control group."""
    free = 1024 * _number(Path("/proc/meminfo"), "MemAvailable:")
    limit = CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        kinds = ("\nactive_file ", "\ninactive_file ")  # the cache: counted as used, and given back when needed
        cache = sum(_number(CGROUP / "memory.stat", kind) for kind in kinds)
        free = min(free, int(most) - int((CGROUP / "memory.current").read_text()) + cache)
    return max(0, free)


def _number(path: Path, name: str) -> int:
    return int(path.read_text().partition(name)[2].split()[0])


def this_device(gpu_memory_gb: float = 0.0) -> Device:
    """This machine's GPU or memory; or a GPU of the given size."""
    if gpu_memory_gb:
        return Device(f"a GPU of {gpu_memory_gb:g} GB", gpu_memory_gb * GB, is_gpu=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Device(name, free, is_gpu=True, whole=whole, capability=torch.cuda.get_device_capability())
    return Device("the memory of this machine (it has no GPU)", free_host_memory(), is_gpu=False)


class _Fused(torch.autograd.Function):
    """Attention that saves what a fused kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(rows, heads, tokens, dtype=torch.float32))
        return out


def _shapes_only(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _Fused.apply(query, key, value).transpose(1, 2).contiguous(), None


def _saved_bytes(model: PreTrainedModel) -> float:
    """Bytes per token that the last layer saves: layers without experts come first."""
    AttentionInterface.register(SHAPES_ONLY, _shapes_only)
    AttentionMaskInterface.register(SHAPES_ONLY, lambda *_, **__: None)
    model.set_attn_implementation(SHAPES_ONLY)
    base = model.base_model
    width = model.config.get_text_config().hidden_size
    hidden = torch.empty(1, TRIED_TOKENS, width, dtype=model.dtype, device="meta", requires_grad=True)
    rotary = base.rotary_emb(hidden, torch.arange(TRIED_TOKENS, device="meta")[None])
    with saved_storages([*model.parameters(), *rotary]) as found:
        base.layers[-1](hidden, attention_mask=None, position_embeddings=rotary)
    return sum(found.values()) / TRIED_TOKENS


@contextmanager
def saved_storages(known: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves meanwhile, without those of `known` tensors."""
    left_out = {tensor.untyped_storage()._cdata for tensor in known}
    found: dict[int, int] = {}
    alive = []  # a freed storage's number may be used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out:
            found[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def meta_shapes(described_as: PreTrainedConfig, settings: TrainConfig) -> Shapes:
    with torch.device("meta"):
        # A copy: how attention runs is written into the configuration.
        own = copy.deepcopy(described_as)
        model = AutoModelForCausalLM.from_config(own, dtype=getattr(torch, settings.precision))
        make_trainable(model, settings.lora, "", 0)
    config = model.config.get_text_config()
    given = config.to_dict()
    heads = config.num_attention_heads
    shared = given.get("num_key_value_heads") or heads
    head_width = given.get("head_dim") or config.hidden_size // heads
    width_bytes = model.dtype.itemsize
    try:
        saved = _saved_bytes(model)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # routers look at data: take the formula
        inner = given.get("moe_intermediate_size") or given.get("intermediate_size") or 4 * config.hidden_size
        inner *= given.get("num_experts_per_tok") or 1
        saved = width_bytes * (8 * config.hidden_size + 4 * inner + 5 * head_width * (heads + shared)) + 8 * heads
    named = dict(model.named_parameters())
    output = model.get_output_embeddings().weight
    return Shapes(
        width_bytes=width_bytes,
        parameters=sum(one.numel() for one in named.values()),
        trained=sum(one.numel() for one in named.values() if one.requires_grad),
        matrices=sum(named[name].numel() for name in units_of(named.items()) if named[name].requires_grad),
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        saved=saved,
        attention=heads * (head_width * width_bytes + 4),
        head_entries=output.numel(),
        tied=output is model.get_input_embeddings().weight,
        kv_entries=2 * config.num_hidden_layers * shared * head_width,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
    )


def static_parts(
    shapes: Shapes, optimizer: str = "adamw", teachers: int = 0, parts: int = 1, bounded: int = 0
) -> dict[str, float]:
    """Bytes that a trainer holds between steps. Each of the loss's `parts` has its own gradients, those that are
    `bounded` in the precision of the weights."""
    return {
        "weights": shapes.width_bytes * shapes.parameters,
        "master weights": 4 * shapes.trained if shapes.width_bytes == 2 else 0,
        "optimizer state": 8 * shapes.trained - (4 * shapes.matrices if optimizer == "muon" else 0),
        "gradients": (4 * (parts - bounded) + shapes.width_bytes * bounded) * shapes.trained,
        "teacher copy": teachers * shapes.width_bytes * shapes.trained,
    }


def step_parts(shapes: Shapes, way: Way, tokens: int, branch_tokens: int = 0, parts: int = 1) -> dict[str, float]:
    """Bytes that a step adds: `tokens` in one forward, with `branch_tokens` of teachers that share it.

    Several `parts` of the loss are differentiated one by one, which recomputes whole layers and keeps the graph; a
    micro-batch with one part alone may still take more.
    """
    table = shapes.head_entries if shapes.trained == shapes.parameters else 0  # adapters leave the head alone
    size = shapes.width_bytes
    given = size * shapes.width  # input of a layer, per token
    share = COMPILED_SHARE if shapes.trained == shapes.parameters else COMPILED_ADAPTER_SHARE
    layer = shapes.saved * (share[size] if way.compile else 1.0)
    most = head.COMPILED_CHUNK_ENTRIES if way.compile else head.CHUNK_ENTRIES
    chunk_bytes = COMPILED_CHUNK_BYTES if way.compile else CHUNK_BYTES
    chunk = min(most, tokens * shapes.vocabulary) * chunk_bytes[size]

    def of(mode: Mode, parts: int) -> dict[str, float]:
        kept = {"none": layer, "layers": given + shapes.attention, "all": given}[mode]
        again = 0.0 if mode == "none" else layer
        activations = tokens * (shapes.layers * kept + (4 + size) * shapes.width + given)
        at_head = chunk + (4 * parts + size) * table + (1 + parts) * tokens * given
        heads = 1 if parts == 1 else parts + 1  # gradients of the head: this part's, and all if the graph is kept
        in_layer = tokens * (again + BACKWARD_SHARE * layer) + heads * size * table
        # A tied table's gradients meet at the end, when the activations are free unless the graph is kept.
        at_end = (heads + 1) * size * table * shapes.tied - (activations if parts == 1 else 0)
        branches = branch_tokens * FORWARD_SHARE * shapes.saved
        return dict(zip(IN_A_STEP, (activations, max(at_head, in_layer, at_end), branches), strict=True))

    kept_graph: Mode = "all" if way.recompute == "layers" and parts > 1 else way.recompute
    return max(of(way.recompute, 1), of(kept_graph, parts), key=lambda found: sum(found.values()))


class _Planner:
    """The memory of one configuration on one device, for any context."""

    def __init__(self, config: Config, device: Device, engine_apart: bool, samples: bool, share: Share):
        self.config = config
        self.device = device
        self.is_rank = share != ALONE
        self.shapes = meta_shapes(described(config.model), config.train)
        server = config.engine.vllm
        self.starts_vllm = config.engine.kind == "vllm" and not server.given_urls and device.is_gpu
        self.samples = samples and (config.engine.kind != "vllm" or self.starts_vllm)
        self.engine_apart = engine_apart or (self.starts_vllm and leave_the_trainer_alone(server))
        feedback = config.feedback
        kinds = teachers_of(feedback, config.teachers, config.train.reference_kl > 0).values()
        copies = {kind for kind in kinds if not isinstance(kind, Live)}
        bounded = feedback.weight > 0 and feedback.balance == "bounded"
        self.parts = 2 if bounded else 1
        held = static_parts(self.shapes, config.train.optimizer, len(copies), self.parts, int(bounded))
        if config.teachers.opd:
            other = meta_shapes(described(config.teachers.model), config.train)
            held["other teacher"] = other.width_bytes * other.parameters
        self.held = {part: size / share.shards for part, size in held.items()}
        self.branch_tokens = 0
        if any(isinstance(kind, Live) for kind in kinds):  # it rides along
            self.branch_tokens = feedback.max_candidates * (config.harness.message_tokens + HINT_TOKENS)
        settled = config.train if device.is_gpu else config.train.settled()
        modes: tuple[Mode, ...] = MODES if settled.recompute == "auto" else (settled.recompute,)
        sizes = (settled.micro_tokens,) if settled.micro_tokens else MICRO_TOKENS
        self.ways = [Way(mode, settled.compile is not False, tokens) for mode in modes for tokens in sizes]

    def plan(self, context: int) -> MemoryPlan:
        """By the first way that fits, or the last: many rollouts at once come before a faster step."""
        for part in FEWER_ROLLOUTS:
            for way in self.ways:
                tokens = max(way.micro_tokens, context)
                step = step_parts(self.shapes, way, tokens, min(self.branch_tokens, context), self.parts)
                engine, kv_tokens, gpu_share = self.engine(context, part, sum(step.values()))
                found = MemoryPlan(
                    self.config.model,
                    self.device,
                    self.shapes.parameters,
                    self.shapes.trained,
                    context,
                    way,
                    self.held | step | ({} if self.engine_apart else engine),
                    kv_tokens,
                    gpu_share,
                    self.is_rank,
                )
                if found.need <= self.device.room:
                    return found
        return found

    def engine(self, context: int, part: float, step: float) -> tuple[dict[str, float], int | None, float | None]:
        """Bytes of the engine, tokens in its KV cache, and a vLLM's share of the GPU.

        `part` is how many rollouts it holds at once: 1 is all, or as many as it may take; 0 is one. A vLLM that sleeps
        frees its share for a step of `step` bytes, except its CUDA context. With an adapter, a local engine of the
        same precision shares the base.
        """
        if not self.samples:
            return {}, None, None
        config = self.config
        settings = config.engine
        server = settings.vllm
        shapes = self.shapes
        entry = 2 if settings.precision == "bfloat16" or self.starts_vllm else 4
        gpus = server.gpus if self.starts_vllm else 1
        token = entry * shapes.kv_entries / gpus
        fewest = SPARE * context
        rollouts = config.train.groups * config.train.group_size
        left = self.device.room - 2 * entry * shapes.parameters  # besides the trainer's weights and the engine's
        most = max(fewest, min(rollouts * context, (1.0 if self.engine_apart else KV_SHARE) * left / token))
        tokens = int(fewest + part * (most - fewest))
        if not self.starts_vllm:
            is_shared = config.train.lora.rank and settings.precision == config.train.precision
            weights = 0 if is_shared else entry * shapes.parameters
            tokens = settings.kv_tokens or (tokens if self.device.is_gpu else CPU_TOKENS)
            return {"engine weights": weights, KV_CACHE: token * tokens * self.device.is_gpu}, tokens, None
        forward = BATCHED_TOKENS * FORWARD_SHARE * shapes.saved * 2 / shapes.width_bytes
        base = (2 * shapes.parameters + forward) / gpus + CONTEXT_BYTES
        whole = self.device.whole or self.device.memory
        auto = math.ceil(1000 * (base + token * tokens) / whole) / 1000
        share = auto if server.gpu_share == "auto" else server.gpu_share
        freed = min(step, whole * share - CONTEXT_BYTES) if server.sleep else 0.0
        return {VLLM: whole * share - freed}, max(0, int((whole * share - base) / token)), share


def make_plan(
    config: Config,
    device: Device,
    engine_apart: bool = False,
    samples: bool = True,
    context: int = 0,
    share: Share = ALONE,
) -> MemoryPlan:
    """`engine_apart`: the engine has other GPUs. `samples`: there is an engine. `context`: tokens of a row, where they
    are not those of a rollout. `share`: a rank's."""
    if config.train.linear.kind != "plain":
        refuse_lacking(config.train.linear, device.name, device.capability)
    planner = _Planner(config, device, engine_apart, samples, share)
    positions = planner.shapes.positions
    tokens = context or min(config.harness.context, positions)
    others = (1024 * 2**power * step // 4 for power in range(1, 12) for step in (4, 5, 6, 7))
    longest = max(positions, tokens)  # positions may be stretched
    fitting = [each for each in (tokens, *others) if each <= longest and planner.plan(each).fits]
    return replace(planner.plan(tokens), largest_context=max(fitting, default=0))


def planned(config: Config, engine_apart: bool = False, share: Share = ALONE) -> tuple[Config, MemoryPlan]:
    """The configuration of a run on this machine with what the plan chose. Refuses a run that does not fit."""
    plan = make_plan(config, this_device(), engine_apart=engine_apart, share=share)
    refuse_too_large(config, plan)
    return as_planned(config, plan), plan


def as_planned(config: Config, plan: MemoryPlan) -> Config:
    engine = config.engine
    if plan.gpu_share is not None:
        vllm = engine.vllm.model_copy(update={"gpu_share": plan.gpu_share})
        engine = engine.model_copy(update={"vllm": vllm})
    elif plan.device.is_gpu and plan.kv_tokens:
        engine = engine.model_copy(update={"kv_tokens": plan.kv_tokens})
    return config.model_copy(update={"train": config.train.settled(*astuple(plan.way)), "engine": engine})


def refuse_too_large(config: Config, plan: MemoryPlan) -> None:
    """On a CPU refuse only what is held between steps: rollouts may turn out short."""
    need = plan.need
    if not plan.device.is_gpu:
        need -= sum(plan.parts[part] for part in IN_A_STEP)
    if need > plan.device.room:
        rank = "a rank of " if plan.is_rank else ""
        sizes = f"{plan.need / GB:.3g} GB here and {plan.device.name} has {plan.device.memory / GB:.3g} GB"
        raise OffbookError(f"{rank}{config.model} needs {sizes}; {advice(config, plan)}")
    if not plan.holds_a_rollout:
        raise OffbookError(advice(config, plan))


def advice(config: Config, plan: MemoryPlan) -> str:
    """What to do about a plan that does not fit."""
    if plan.need <= plan.device.room:
        return (
            f"a rollout may have {plan.context} tokens (harness.context) and the engine holds {plan.kv_tokens}; raise "
            "engine.kv_tokens or engine.vllm.gpu_share, or lower harness.context"
        )
    ways = {
        "--train.precision bfloat16": config.train.precision == "float32",
        "--engine.vllm.sleep true": plan.gpu_share is not None and not config.engine.vllm.sleep,
        "--train.lora.rank 16": not config.train.lora.rank,
        f"--harness.context {plan.context // 2}": True,
    }
    return f"each of these takes less: {', '.join(way for way, helps in ways.items() if helps)}, or a smaller model"
