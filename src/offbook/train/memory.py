"""How much memory a training step takes, from the model's shapes alone, and how much there is.

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

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from offbook.train import head
from offbook.train.optim.units import units_of

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
CGROUPS = (  # of version 2 and of version 1: limit, use
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
KEPT_FILES = ("active_file", "inactive_file")  # counted as used, and given back when somebody needs it
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


@dataclass(frozen=True, slots=True)
class Share:
    """What one of the ranks has that train a model together."""

    shards: int = 1  # that the weights are cut into
    expert_shards: int = 1  # that experts are, all in all
    dealt_to: int = 1  # ranks, of those, that tokens travel to: nobody gathers more of a layer's experts than its own
    rows: int = 1  # ranks that share one


ALONE = Share()


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


def rank_parts(shapes: Shapes, share: Share, held: Mapping[str, float], context: int) -> dict[str, float]:
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
    if share.rows > 1:
        parts["keys of a shared row"] = shapes.width_bytes * shapes.kv_entries / shapes.layers * context
    return parts


def free_host_memory() -> int:
    """Bytes that this process may still take, by the machine and by the control group that it is in."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * int(_table(meminfo)["MemAvailable:"].split()[0])
    for folder, limit, used in CGROUPS:
        if (path := Path(folder, limit)).is_file() and (most := path.read_text().strip()) != "max":
            kept = sum(int(value) for key, value in _table(Path(folder, "memory.stat")).items() if key in KEPT_FILES)
            free = min(free, int(most) - int(Path(folder, used).read_text()) + kept)
    return max(0, free)


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
