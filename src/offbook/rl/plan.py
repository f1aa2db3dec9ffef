"""Whether a run fits into memory, before a weight is loaded, and how its steps are computed then.

Trainer, teachers and engine by part, from the model's shapes and the configuration. What the configuration leaves to be
chosen is the fastest way that fits.

What autograd keeps of a layer is not written down as a formula for each family: the model runs on the meta device,
where tensors have shapes and no data, and what it saves for the backward pass is counted. Attention is taken to be a
fused kernel, which keeps queries, keys, values, its output and a float32 number a head and token, and no mask. For a
Qwen3 layer of width D, feed-forward width F, H query and K key heads of width W, in bfloat16, that comes to

    2 * (8 D + 4 F + 5 W (H + K)) + 8 H + 4 K + 8    bytes per token,

of which RMSNorm's float32 copies are 8 D + 4 W (H + K). Of that the modes of train.recompute keep: `none` all; `layers`
the layer's input and what attention gave, 2 D + 2 W H + 4 H; `all` the input, 2 D. A compiled layer keeps
COMPILED_SHARE of what an eager one does.

The peak is taken while several micro-batches add up gradients:

    weights + masters + optimizer + gradients + teachers + activations + max(head, one layer's backward pass, ...)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from offbook.core.config import Config, TrainConfig
from offbook.engine.local import CPU_TOKENS
from offbook.engine.vllm.gpus import leave_the_trainer_alone
from offbook.engine.vllm.server import BATCHED_TOKENS, SHARE
from offbook.rl.models import described, meta_model
from offbook.rl.train_step import teachers_of
from offbook.train import head
from offbook.train.checkpoint import free_host_memory
from offbook.train.optim.units import units_of
from offbook.train.parallel.spmd import ALONE, Share
from offbook.train.precision import refuse_lacking
from offbook.train.teachers import Live
from offbook.types import OffbookError

# What is measured and not derived. Everything else follows from shapes.
COMPILED_SHARE = {2: 0.66, 4: 0.74}  # by bytes an entry: of an eager layer's saved bytes (the partitioner, Qwen3)
COMPILED_ADAPTER_SHARE = {2: 0.47, 4: 0.53}  # the same under adapters (an H200, Qwen3-8B; float32 by proportion)
CHUNK_BYTES = {2: 16.0, 4: 20.0}  # a logit of an eager chunk: logits, log-probabilities and their gradients
COMPILED_CHUNK_BYTES = {2: 10.0, 4: 12.0}  # the same of fused kernels
COPY_BYTES = {"plain": 0, "fp8": 9, "nvfp4": 20}  # an entry of what is multiplied: quantized, and on the way to it
COMPILED_COPY_BYTES = {"plain": 0, "fp8": 2, "nvfp4": 8}  # counted in the code, and not held against a GPU yet
BACKWARD_SHARE = 0.25  # of what a layer saves, for gradients in flight in its backward pass
FORWARD_SHARE = 0.5  # of what a layer saves, that is alive at a time in a pass without gradients
RESERVE_SHARE = 0.05  # of a GPU's memory, for pieces that the allocator cannot use
CONTEXT_BYTES = 1.0e9  # of CUDA itself, its libraries and workspaces; no part of torch's peak

TRIED_TOKENS = 128
SHAPES_ONLY = "offbook-shapes"
IN_A_STEP = ("activations", "head, or a layer's backward", "branch pass")  # the parts of `step_parts`
Mode = Literal["none", "layers", "all"]
Linear = Literal["plain", "fp8", "nvfp4"]
MODES: tuple[Mode, ...] = ("none", "layers", "all")  # from the fastest to the smallest
GATHERED = 2  # layers of a sharded model at a time: one computes, the next is on its way


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the memory of a model follows from. `width_bytes`: of an entry of the weights and activations."""

    width_bytes: int
    parameters: int  # all of them, adapters too
    trained: int
    matrices: int  # of those that are trained: in matrices that are no tables, which Muon has one state for
    width: int
    layers: int
    saved: float  # bytes per token and layer for the backward pass
    attention: float  # of those: the output of attention
    head_entries: int  # vocabulary times width
    head_trained: bool
    tied: bool  # the head is the table of embeddings
    kv_entries: int  # keys and values per token, in all layers
    vocabulary: int
    positions: int
    num_experts: int  # of a layer; 0 where it has none
    expert_entries: int  # parameters in experts, of all layers, and in adapters on them
    trained_experts: int  # of those
    product_entries: int  # of the largest matrix of a linear layer
    product_width: int  # what that takes and gives of a token, together


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is computed."""

    recompute: Mode
    compile: bool
    micro_tokens: int


def shapes_of(model: PreTrainedModel) -> Shapes:
    """`model` is on the meta device, with adapters where there are any; what is trained requires gradients."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    shared = getattr(config, "num_key_value_heads", None) or heads  # older families have none
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    named = dict(model.named_parameters())
    linear = [one for one in model.base_model.modules() if isinstance(one, nn.Linear) and one.weight.ndim == 2]
    largest = max(((one.weight.numel(), sum(one.weight.shape)) for one in linear), default=(0, 0))
    experts = [one for name, one in named.items() if ".experts." in name and one.ndim == 3]
    output = model.get_output_embeddings().weight
    tables = {id(output), id(model.get_input_embeddings().weight)}
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    width_bytes = model.dtype.itemsize
    attended = heads * (head_width * width_bytes + 4)
    try:
        saved = _saved_bytes(model)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # its layers look at data: routers
        saved = _guessed_bytes(config, heads, shared, head_width, width_bytes)
    return Shapes(
        width_bytes=width_bytes,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in trained),
        matrices=sum(named[name].numel() for name in units_of(named.items()) if named[name].requires_grad),
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        saved=saved,
        attention=attended,
        head_entries=output.numel(),
        head_trained=output.requires_grad,
        tied=len(tables) == 1,
        kv_entries=2 * config.num_hidden_layers * shared * head_width,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        num_experts=max((len(one) for one in experts), default=0),
        expert_entries=sum(one.numel() for one in experts),
        trained_experts=sum(one.numel() for one in experts if one.requires_grad),
        product_entries=largest[0],
        product_width=largest[1],
    )


class _Fused(torch.autograd.Function):
    """Saves what a fused attention kernel does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[3]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, query.new_empty(rows, heads, tokens, dtype=torch.float32))
        return out


def _shapes_only(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _Fused.apply(query, key, value).transpose(1, 2).contiguous(), None


def _saved_bytes(model: PreTrainedModel) -> float:
    """Of the last layer, a token: where a model has layers without experts, they come first."""
    AttentionInterface.register(SHAPES_ONLY, _shapes_only)
    AttentionMaskInterface.register(SHAPES_ONLY, lambda *_, **__: None)
    model.set_attn_implementation(SHAPES_ONLY)
    base, width = model.base_model, model.config.get_text_config().hidden_size
    hidden = torch.empty(1, TRIED_TOKENS, width, dtype=model.dtype, device="meta", requires_grad=True)
    rotary = base.rotary_emb(hidden, torch.arange(TRIED_TOKENS, device="meta")[None])
    with saved_storages([*model.parameters(), *rotary]) as found:
        base.layers[-1](hidden, attention_mask=None, position_embeddings=rotary)
    return sum(found.values()) / TRIED_TOKENS


@contextmanager
def saved_storages(apart: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd saves meanwhile, but for those that are there anyway."""
    known = {tensor.untyped_storage()._cdata for tensor in apart}
    found: dict[int, int] = {}
    alive = []  # a storage that is gone leaves its number to the next

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _guessed_bytes(config: Any, heads: int, shared: int, head_width: int, width_bytes: int) -> float:
    """The formula above, with as many feed-forward widths as experts see a token."""
    told = config.to_dict()
    inner = told.get("moe_intermediate_size") or told.get("intermediate_size") or 4 * config.hidden_size
    inner *= told.get("num_experts_per_tok") or 1
    entries = 8 * config.hidden_size + 4 * inner + 5 * head_width * (heads + shared)
    return width_bytes * entries + 8 * heads


def static_parts(
    shapes: Shapes, optimizer: str = "adamw", teachers: int = 0, parts: int = 1, bounded: int = 0
) -> dict[str, float]:
    """Bytes that a trainer holds from step to step, by part. `teachers` have weights of their own. Of the `parts` of
    the loss whose gradients are kept apart, those that are `bounded` have them in the precision of the weights."""
    state = 8 * shapes.trained - (4 * shapes.matrices if optimizer == "muon" else 0)
    return {
        "weights": shapes.width_bytes * shapes.parameters,
        "master weights": 4 * shapes.trained if shapes.width_bytes == 2 else 0,
        "optimizer state": state,
        "gradients": (4 * (parts - bounded) + shapes.width_bytes * bounded) * shapes.trained,
        "teacher copy": teachers * shapes.width_bytes * shapes.trained,
    }


def step_parts(
    shapes: Shapes, way: Way, tokens: int, branch_tokens: int = 0, linear: Linear = "plain", parts: int = 1
) -> dict[str, float]:
    """Bytes that come on top in a step, by part: `tokens` in one forward, `branch_tokens` that ride along.

    Where `parts` of the loss are differentiated one by one, the larger of a micro-batch that has one of them and one
    that has all, which recomputes whole layers, keeps its graph for the next part, and has a sum of the head's
    gradients for each."""
    if parts > 1:
        one = step_parts(shapes, way, tokens, branch_tokens, linear)
        way = replace(way, recompute="all") if way.recompute == "layers" else way
        each = _micro_batch(shapes, way, tokens, branch_tokens, linear, parts)
        return max(one, each, key=lambda found: sum(found.values()))
    return _micro_batch(shapes, way, tokens, branch_tokens, linear, parts)


def _micro_batch(
    shapes: Shapes, way: Way, tokens: int, branch_tokens: int, linear: Linear, parts: int
) -> dict[str, float]:
    share = COMPILED_SHARE if shapes.trained == shapes.parameters else COMPILED_ADAPTER_SHARE
    layer = shapes.saved * (share[shapes.width_bytes] if way.compile else 1.0)
    given = shapes.width_bytes * shapes.width  # what a layer is given
    kept = {"none": layer, "layers": given + shapes.attention, "all": given}[way.recompute]
    behind = (4 + shapes.width_bytes) * shapes.width + given  # the last norm; gradients of its output
    again = layer if way.recompute != "none" else 0.0
    entries = head.COMPILED_CHUNK_ENTRIES if way.compile else head.CHUNK_ENTRIES
    entries = min(entries, tokens * shapes.vocabulary)
    chunk = entries * (COMPILED_CHUNK_BYTES if way.compile else CHUNK_BYTES)[shapes.width_bytes]
    table = shapes.head_entries if shapes.head_trained else 0
    activations = tokens * (shapes.layers * kept + behind)
    at_head = chunk + (4 * parts + shapes.width_bytes) * table  # a chunk's gradient, and a sum of them for each part
    at_head += (1 + parts) * tokens * given
    copied = (COMPILED_COPY_BYTES if way.compile else COPY_BYTES)[linear]
    copies = copied * (tokens * shapes.product_width + shapes.product_entries)
    heads = 1 if parts == 1 else parts + 1  # the head's gradients: of this part, and of all where the graph is kept
    in_layer = tokens * (again + BACKWARD_SHARE * layer) + copies + heads * shapes.width_bytes * table
    # At the end no activations are left, but of a graph that is kept. Gradients of a table that is tied meet there: the
    # head's and its own.
    at_end = (heads + 1) * shapes.width_bytes * table * shapes.tied - (activations if parts == 1 else 0)
    most = max(at_head, in_layer, at_end)
    return dict(zip(IN_A_STEP, (activations, most, branch_tokens * FORWARD_SHARE * shapes.saved), strict=True))


def rank_parts(shapes: Shapes, share: Share, held: Mapping[str, float]) -> dict[str, float]:
    """Of what a trainer holds from step to step, a rank's; and what it gathers of the others' in a step."""

    def cut(part: str, size: float) -> float:
        is_weights = part == "weights"  # else of what is trained
        entries = shapes.parameters if is_weights else max(1, shapes.trained)
        experts = (shapes.expert_entries if is_weights else shapes.trained_experts) / entries
        return size * ((1 - experts) / share.shards + experts / share.expert_shards)

    parts = {part: cut(part, size) for part, size in held.items()}
    if share.shards > 1:
        tables = shapes.head_entries * (1 if shapes.tied else 2)
        layers = shapes.parameters - tables - shapes.expert_entries + shapes.expert_entries / share.dealt_to
        parts["gathered weights"] = shapes.width_bytes * (tables + GATHERED * layers / shapes.layers)
    return parts


GB = 1e9
S = TypeVar("S", bound=BaseModel)
MICRO_TOKENS = (32_768, 16_384, 8_192)  # that are tried, in each way to recompute; then less
FEWER_TOKENS = (4_096, 2_048, 1_024)
HINT_TOKENS = 128
KV_SHARE = 0.25  # of the memory that its weights leave, that the local engine takes for keys and values at most
LORA_RANK = 16  # that is proposed
KV_CACHE = "engine KV cache"  # of the local engine, on a GPU
VLLM = "engine (vLLM's share)"
VLLM_CPU_BYTES = 2**30  # its keys and values without a GPU
LARGEST_SHARE = 0.9  # of a GPU, for a server that sleeps while the trainer works, or has the GPU for itself
FEWER_ROLLOUTS = (1.0, 0.75, 0.5, 0.25, 0.0)  # from all that run at once down to one
SPARE = 1.1  # times what one rollout needs


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory: float  # bytes that are free
    is_gpu: bool
    whole: float = 0.0  # bytes, with those that others hold; 0: no others
    capability: tuple[int, int] | None = None  # of a GPU that is here

    @property
    def room(self) -> float:
        """What tensors can take of it."""
        return self.memory * (1 - RESERVE_SHARE) - CONTEXT_BYTES if self.is_gpu else self.memory

    def bytes_of(self, share: float) -> float:
        """As vLLM counts."""
        return share * (self.whole or self.memory)

    def share_of(self, size: float) -> float:
        return size / (self.whole or self.memory)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the engine gets of a GPU."""

    tokens: int | None = None  # whose keys and values it holds; None where a server of its own decides it
    share: float | None = None  # of a vLLM that is started here


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
    gpu_share: float | None = None  # of a vLLM that is started here
    sleeps: bool = False  # it does, while the trainer works
    linear: str = "plain"  # how linear layers multiply
    share: Share = ALONE
    engine_apart: bool = False  # on a GPU of its own
    samples: bool = True  # rollouts: stages have none
    row: int = 0  # tokens, where it is not what a rollout may have

    @property
    def need(self) -> float:
        return _peak(self.parts, self.sleeps)

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
            "linear": self.linear,
            "parts": self.parts,
            "need_bytes": self.need,
            "kv_tokens": self.kv_tokens,
            "gpu_share": self.gpu_share,
            "sleeps": self.sleeps,
            "fits": self.fits,
            "largest_context": self.largest_context,
        }

    def __str__(self) -> str:
        how = f"recompute {self.way.recompute}, {'compiled' if self.way.compile else 'not compiled'}"
        how += f", linear layers in {self.linear}" if self.linear != "plain" else ""
        engine = "" if self.gpu_share is None else f", engine.vllm.gpu_share {self.gpu_share:g}"
        engine += f", engine.kv_tokens {self.kv_tokens}" if self.parts.get(KV_CACHE) else ""
        needs = f"{self.need / GB:.1f} of {self.device.memory / GB:.0f} GB planned"
        return f"{needs}: {how}, {self.way.micro_tokens} tokens{engine}"


def _peak(parts: Mapping[str, float], sleeps: bool) -> float:
    """A server that sleeps is awake while the trainer holds its static parts, and keeps its CUDA context in a step."""
    asleep = min(sum(parts[part] for part in IN_A_STEP), parts[VLLM] - CONTEXT_BYTES) if sleeps else 0.0
    return sum(parts.values()) - asleep


def this_device(gpu_memory_gb: float = 0.0) -> Device:
    """What is free here; or a GPU of that size, wherever it is."""
    if gpu_memory_gb:
        return Device(f"a GPU of {gpu_memory_gb:g} GB", gpu_memory_gb * GB, is_gpu=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what an earlier run in this process has left is free, too
        free, whole = torch.cuda.mem_get_info()
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        return Device(name, free, is_gpu=True, whole=whole, capability=capability)
    return Device("the memory of this machine (it has no GPU)", free_host_memory(), is_gpu=False)


def make_plan(
    config: Config,
    device: Device,
    engine_apart: bool = False,
    samples: bool = True,
    context: int = 0,
    share: Share = ALONE,
) -> Plan:
    """`engine_apart`: it has a GPU of its own. `samples`: there is one. `context`: of a row, where it is not what a
    rollout may have. `share`: of a rank that shares its GPU with the engine."""
    refuse_lacking(config.train.linear, device.name, device.capability)
    run = Needs.of(config, described(config.model))
    run = replace(run, context=context or run.context, samples=samples, share=share)
    has_own = _is_started(config, device) and leave_the_trainer_alone(config.engine.vllm)
    plan = _planned(config, run, device, engine_apart or has_own or not samples)
    return replace(plan, engine_apart=engine_apart, samples=samples, row=context)


def planned(config: Config, engine_apart: bool = False, share: Share = ALONE) -> tuple[Config, Plan]:
    """The configuration of a run on this machine with what the plan chose. Refuses a run that does not fit."""
    plan = make_plan(config, this_device(), engine_apart=engine_apart, share=share)
    refuse_too_large(config, plan)
    return as_planned(config, plan), plan


def as_planned(config: Config, plan: Plan) -> Config:
    """What was left to be chosen is what the plan chose."""
    train, engine = config.train.settled(*astuple(plan.way)), config.engine
    if plan.parts.get(KV_CACHE):
        engine = engine.model_copy(update={"kv_tokens": plan.kv_tokens})
    if plan.gpu_share is not None:
        engine = engine.model_copy(update={"vllm": engine.vllm.model_copy(update={"gpu_share": plan.gpu_share})})
    return config.model_copy(update={"train": train, "engine": engine})


@dataclass(frozen=True, slots=True)
class Needs:
    """What of a configuration decides its memory."""

    shapes: Shapes
    teachers: int  # with weights of their own
    parts: int  # of the loss, whose gradients are kept apart
    bounded: int  # of those
    other: float  # bytes of a teacher that is another model
    branch_tokens: int  # that ride along with a forward
    context: int
    samples: bool = True
    share: Share = ALONE

    @classmethod
    def of(cls, config: Config, model: PreTrainedConfig) -> Needs:
        shapes = meta_shapes(model, config.train)
        context = min(config.harness.context, shapes.positions)
        kinds = teachers_of(config.feedback, config.teachers).values()
        other = config.teachers
        shown = meta_shapes(described(other.model), config.train) if other.opd else None
        own = {kind for kind in kinds if not isinstance(kind, Live)}
        riding = any(isinstance(kind, Live) for kind in kinds)
        targets = config.feedback.max_candidates * (config.harness.message_tokens + HINT_TOKENS)
        feedback = config.feedback
        is_bounded = feedback.weight > 0 and feedback.balance == "bounded"
        parts = 2 if is_bounded else 1
        if riding and config.teachers.opsd + config.teachers.sdft:
            targets = context
        held = shown.width_bytes * shown.parameters if shown else 0.0
        return cls(
            shapes=shapes,
            teachers=len(own),
            parts=parts,
            bounded=int(is_bounded),
            other=held,
            branch_tokens=riding * min(targets, context),
            context=context,
        )


def meta_shapes(model: PreTrainedConfig, settings: TrainConfig) -> Shapes:
    return shapes_of(meta_model(model, settings))


def _planned(config: Config, run: Needs, device: Device, engine_apart: bool) -> Plan:
    ways, sleeps = list(ways_of(config.train, device)), _is_started(config, device) and config.engine.vllm.sleep
    sleeps = sleeps and not engine_apart

    def parts(way: Way, context: int, engine: Sampling) -> dict[str, float]:
        return {
            **trainer_parts(config, run, way, context),
            **({} if engine_apart else _engine_parts(config, run.shapes, device, engine)),
        }

    def choose(context: int) -> tuple[Way, Sampling, bool]:
        """Many rollouts at once come before a faster step."""
        engines = _engines(config, run, device, context, sleeps or engine_apart)
        for engine in engines:
            for way in ways:
                found = parts(way, context, engine)
                left = device.room - _peak(found, sleeps)
                if left < 0:
                    continue
                if engine.share is not None and len(engines) > 1:  # and what the trainer leaves, up to the most
                    left = device.room - sum(found[part] for part in found if part not in IN_A_STEP) if sleeps else left
                    more = engine.share + math.floor(1000 * device.share_of(left)) / 1000
                    engine = _vllm(config, run.shapes, device, min(engines[0].share or 0.0, more))
                return way, engine, engine.tokens is None or context <= engine.tokens
        return (ways[-1] if device.is_gpu else ways[0]), engines[-1], False

    way, engine, _ = choose(run.context)
    contexts = [run.context, *(1024 * 2**power * step // 4 for power in range(1, 12) for step in (4, 5, 6, 7))]
    most = max(run.shapes.positions, run.context)  # positions that are stretched
    fitting = [context for context in contexts if context <= most and choose(context)[2]]
    return Plan(
        model=config.model,
        device=device,
        parameters=run.shapes.parameters,
        trained=run.shapes.trained,
        context=run.context,
        way=way,
        parts=parts(way, run.context, engine),
        kv_tokens=engine.tokens,
        largest_context=max(fitting, default=0),
        gpu_share=engine.share,
        sleeps=sleeps,
        linear=config.train.linear.kind,
        share=run.share,
    )


def trainer_parts(config: Config, run: Needs, way: Way, context: int) -> dict[str, float]:
    """Bytes of one rank."""
    held = static_parts(run.shapes, config.train.optimizer, run.teachers, run.parts, run.bounded)
    held |= {"other teacher": run.other} if run.other else {}
    tokens = max(way.micro_tokens, context)
    return {
        **rank_parts(run.shapes, run.share, held),
        **step_parts(run.shapes, way, tokens, run.branch_tokens, config.train.linear.kind, run.parts),
    }


def ways_of(settings: TrainConfig, device: Device) -> list[Way]:
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


def _is_started(config: Config, device: Device) -> bool:
    """A vLLM, on the GPU that is planned for."""
    return config.engine.kind == "vllm" and not config.engine.vllm.given_urls and device.is_gpu


def _engines(config: Config, run: Needs, device: Device, context: int, alone: bool) -> list[Sampling]:
    """What the engine may get, the most first. `alone`: the trainer's steps need nothing of the GPU meanwhile."""
    engine, shapes = config.engine, run.shapes
    server, rollouts = engine.vllm, config.train.groups * config.train.group_size
    if not run.samples or (engine.kind == "vllm" and not _is_started(config, device)):
        return [Sampling()]
    if engine.kind != "vllm":
        if engine.kv_tokens or not device.is_gpu:
            return [Sampling(engine.kv_tokens or CPU_TOKENS)]
        weights, token = _local_engine(config, shapes)
        room = KV_SHARE * (device.room - weights - shapes.width_bytes * shapes.parameters) / token
        fewest = SPARE * context
        most = max(fewest, min(rollouts * context, room))
        return [Sampling(int(fewest + part * (most - fewest))) for part in FEWER_ROLLOUTS]
    if server.gpu_share != "auto":
        return [_vllm(config, shapes, device, server.gpu_share)]

    def share(tokens: float) -> float:
        size = _vllm_bytes(shapes, server.gpus) + 2 * shapes.kv_entries * tokens / server.gpus
        return math.ceil(1000 * device.share_of(size)) / 1000

    least, wanted = share(SPARE * context), share(rollouts * context)
    largest = device.share_of((LARGEST_SHARE if alone else SHARE) * device.memory)
    most = max(least, min(wanted, round(largest, 3)))
    shares = (round(least + part * (most - least), 3) for part in FEWER_ROLLOUTS)
    return [_vllm(config, shapes, device, share) for share in shares]


def _vllm(config: Config, shapes: Shapes, device: Device, share: float) -> Sampling:
    return Sampling(kv_room(shapes, config.engine.vllm.gpus, device.bytes_of(share)), share)


def _vllm_bytes(shapes: Shapes, gpus: int) -> float:
    """On each of its GPUs, without keys and values: its weights in bfloat16, one forward, and CUDA's own."""
    forward = BATCHED_TOKENS * FORWARD_SHARE * shapes.saved * 2 / shapes.width_bytes
    return (2 * shapes.parameters + forward) / gpus + CONTEXT_BYTES


def kv_room(shapes: Shapes, gpus: int, each: float) -> int:
    """Tokens whose keys and values a vLLM holds that has so many bytes of each of its GPUs."""
    return max(0, int(gpus * (each - _vllm_bytes(shapes, gpus))) // (2 * shapes.kv_entries))


def _engine_parts(config: Config, shapes: Shapes, device: Device, engine: Sampling) -> dict[str, float]:
    """Rollouts are sampled by a copy of the weights; with an adapter the two share the base. Keys and values have
    their place also while training."""
    if engine.share is not None:
        return {VLLM: device.bytes_of(engine.share)}
    if config.engine.kind == "vllm":
        server = config.engine.vllm
        return {VLLM: 0.0 if server.given_urls else server.copies * (4.0 * shapes.parameters + VLLM_CPU_BYTES)}
    weights, token = _local_engine(config, shapes)
    return {"engine weights": weights, KV_CACHE: token * (engine.tokens or 0) if device.is_gpu else 0.0}


def _local_engine(config: Config, shapes: Shapes) -> tuple[int, int]:
    """Bytes of its weights, and of a token's keys and values."""
    entry = 2 if config.engine.precision == "bfloat16" else 4
    is_shared = bool(config.train.lora.rank) and config.engine.precision == config.train.precision
    return (0 if is_shared else entry * shapes.parameters), entry * shapes.kv_entries


def refuse_too_large(config: Config, plan: Plan) -> None:
    """One sentence, with what would fit, before minutes go into a run that dies.

    On a CPU, where the memory may be had from elsewhere and few train for long, only what cannot even be held.
    """
    if (plan.need if plan.device.is_gpu else plan.held) > plan.device.room:
        rank = "" if plan.share == ALONE else "a rank of "
        needs = f"{rank}{config.model} needs {plan.need / GB:.3g} GB here"
        raise OffbookError(
            f"{needs} and {plan.device.name} has {plan.device.memory / GB:.3g} GB; {advice(config, plan)}"
        )
    if not plan.holds_a_rollout:
        raise OffbookError(advice(config, plan))


def advice(config: Config, plan: Plan) -> str:
    """What to do about a plan that does not fit."""
    device = plan.device
    if plan.need > device.room:
        if plan.need <= replace(device, memory=device.whole).room:
            return f"that is what is free of {device.whole / GB:.0f} GB: end what else runs there"
        for options in _ladder(config, plan):
            changed = config
            for key, value in options.items():
                changed = _with(changed, key, value)
            found = make_plan(changed, device, plan.engine_apart, plan.samples, plan.row, plan.share)
            if found.fits:
                share = "engine.vllm.gpu_share"
                if config.engine.vllm.gpu_share == "auto":
                    options.pop(share, None)
                elif share in options:
                    options[share] = found.gpu_share
                shown = " ".join(f"--{key} {str(value).lower()}" for key, value in options.items())
                return f"fits with: {shown}, {found.need / GB:.3g} GB"
        return "take a smaller model, or plan for a larger GPU, as in: --gpu-memory 141"
    problem = f"a rollout may have {plan.context} tokens (harness.context) and the engine holds {plan.kv_tokens}"
    if config.engine.kind == "vllm":
        return f"{problem} in its share of the GPU; raise engine.vllm.gpu_share or lower harness.context"
    return f"{problem}; raise engine.kv_tokens to {plan.context} or more, or lower harness.context"


def _ladder(config: Config, plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes to try, by key: those first that change least of what is learned."""
    engine: dict[str, Any] = {}
    if plan.gpu_share is not None:
        yield {"engine.vllm.gpu_share": "auto"}
        engine = {"engine.vllm.sleep": True, "engine.vllm.gpu_share": "auto"}
    elif config.engine.kv_tokens:
        engine = {"engine.kv_tokens": 0}
    adapter = {} if config.train.lora.rank else {"train.lora.rank": LORA_RANK}
    half = {} if config.train.precision == "bfloat16" else {"train.precision": "bfloat16"}
    yield from (engine, half, engine | half, adapter, adapter | half, adapter | half | engine)
    if plan.row:  # of a stage, which says itself how long its rows are
        return
    for context in (plan.context // 2, plan.context // 4):
        shorter = {"harness.context": context}
        if config.harness.summarize_at:
            shorter["harness.summarize_at"] = context * 3 // 4
        yield from (shorter, engine | shorter, adapter | half | engine | shorter)


def _with(section: S, key: str, value: Any) -> S:
    """A copy with another value. The engine's precision goes with the trainer's."""
    name, _, rest = key.partition(".")
    changed = section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
    return _with(changed, "engine.precision", value) if key == "train.precision" else changed
