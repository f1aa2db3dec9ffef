"""Running a decoder over samples while their branches go along, layer by layer.

Each layer runs on the base sequences and, right after, without gradients, on the branches against the KV cache that
the base has just filled. So that of one layer at a time is alive, and all branches of a batch cost one pass of their
own tokens. Models whose layers are not plain attention run one sample at a time, and re-encode each target.
`measure_branches` is the same forward without any gradient.

Every kind of teacher is the same branch pass; they differ in the weights that run it:

Live     the student as it is now: its branches go along with the training forward and cost only their own tokens
Frozen   the model the run started from, on a base of its own without gradients
Ema      a slow average of the student, likewise
Other    another model with the same vocabulary, which stays as it is

A trainer is given them by name. Those with equal weights share one copy.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from offbook.core.output import output_of
from offbook.train import attention, head
from offbook.train.attention import LayerKV
from offbook.train.batches import Batch, BranchAt, BranchBatch, BranchGroup, Packed, micro_batches
from offbook.train.head import Measured, Teacher, measured_branches, sampled_logp
from offbook.train.host import compile_once
from offbook.train.optim.units import local
from offbook.train.precision import plainly
from offbook.types import Branch, OffbookError, Sample

Recompute = Literal["none", "layers", "all"]
Rotary = tuple[Tensor, Tensor]
TRIED_LAYERS = 4
T = TypeVar("T")
FILLER = Sample(ids=[0, 0])
IDLE = Branch(1, [0], ((1, 2),))  # of any sample; its result is not used
ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position is encoded otherwise in a longer sequence, as a branch makes it
log = logging.getLogger(__name__)

ATTENTION_KERNELS = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
}


class Decoder:
    """A causal language model as the trainer runs it: hidden states of samples and of the targets of their branches."""

    def __init__(
        self,
        model: PreTrainedModel,
        recompute: Recompute = "none",
        compiled: bool = False,
        plain: bool | None = None,
    ):
        """`plain` says whether the layers are plain attention; by default a few tokens are tried."""
        self.model = model
        self.recompute = recompute
        self.compiled = compiled
        self.run_layer = compile_once(_run_layer) if compiled else _run_layer
        self.plain = _is_plain(model) if plain is None else plain
        if plain:
            attention.install(model)
        self.head = output_of(model)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self.free_routing: Callable[[], AbstractContextManager[None]] = nullcontext  # where experts are replayed
        self.inside: Callable[[Callable[[], Any]], Any] = operator.call  # with a sharded model's root gathered
        self.together: Callable[..., Any] = self.read  # on all ranks that hold a part of the model
        if not self.plain and recompute != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()

    @property
    def chunk_rows(self) -> int:
        """Rows of logits that are scored at a time."""
        return max(1, head.CHUNK_ENTRIES // self.vocabulary)

    @torch.no_grad()
    def read(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work` on this decoder without gradients."""
        found: T = self.inside(partial(work, self, *arguments))
        reshard(self.model)
        return found

    @contextmanager
    def differentiated_again(self) -> Iterator[None]:
        """Meanwhile a forward can be differentiated several times. One that recomputes all but some kernels cannot, so
        it recomputes all. Compiled layers overwrite what their backward pass has read unless this is set before, so
        they are compiled again, once."""
        if self.compiled and torch._functorch.config.donated_buffer:
            torch._functorch.config.donated_buffer = False
            torch.compiler.reset()
        usual = self.recompute
        self.recompute = "all" if usual == "layers" else usual
        try:
            yield
        finally:
            self.recompute = usual

    def micro_batches(self, samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
        """Of one sample each where the layers are not plain attention."""
        return micro_batches(samples, max_tokens if self.plain else 0)

    def hidden(self, row: Packed, branches: BranchBatch | None = None) -> tuple[Tensor, Tensor]:
        """The last hidden states of the samples and, without gradients, those that predict the targets, if any."""
        if self.plain:
            hidden_1FD, hidden_MD = self._layer_by_layer(row, branches)
            return self.model.base_model.norm(hidden_1FD), hidden_MD
        each = [_states(self.model, ids_1T) for ids_1T in row.ids_1F.split(row.lengths, dim=1)]
        hidden_1FD = torch.cat(each, dim=1)
        if branches is None:
            return hidden_1FD, hidden_1FD[0, :0]
        with self.free_routing():
            return hidden_1FD, reencoded(self.model, row, branches)

    @torch.no_grad()
    def targets(self, batch: Batch, branches: BranchBatch) -> Tensor:
        """What `hidden` gives for the targets, for a model that is only a teacher."""
        if not self.plain:
            return reencoded(self.model, batch.row, branches)
        return self._layer_by_layer(batch.row, branches, only_targets=True)[1]

    def _layer_by_layer(
        self, row: Packed, branches: BranchBatch | None, only_targets: bool = False
    ) -> tuple[Tensor, Tensor]:
        base, length, device = self.model.base_model, row.ids_1F.shape[1], row.ids_1F.device
        hidden_1FD, rotary = _embed(base, row.ids_1F, row.positions_1F)
        if self.compiled and torch.is_grad_enabled():
            hidden_1FD.requires_grad_()  # under adapters it does not; the first layer would be compiled as another one
        if branches is None:
            for layer in base.layers:
                hidden_1FD = self._base_layer(layer, hidden_1FD, rotary, packed=row)
                reshard(layer)
            return hidden_1FD, hidden_1FD[0, :0]
        with torch.no_grad():
            hidden_1LD, branch_rotary = _embed(base, branches.ids_1L, branches.positions_1L)
        reading = None  # how branches are read
        for layer in base.layers:
            kv = LayerKV(only=only_targets and layer is base.layers[-1])
            hidden_1FD = self._base_layer(layer, hidden_1FD, rotary, kv=kv, packed=row)
            if reading is None:  # now, while a GPU is busy with the first layer
                is_fused = self.compiled and device.type == "cuda"
                make = attention.branch_blocks if is_fused else attention.branch_groups
                reading = make(branches.rows, length, device)
            kv.reading = reading
            with torch.no_grad(), self.free_routing():
                hidden_1LD = self.run_layer(layer, hidden_1LD, branch_rotary, kv=kv, reads=True)
            self.plain = self.plain and kv.plain
            kv.wanted = False  # the keys of one layer at a time are alive
            kv.base = ()
            reshard(layer)
        with torch.no_grad():
            return hidden_1FD, base.norm(hidden_1LD)[0, branches.predictors]

    def _base_layer(self, layer: nn.Module, hidden: Tensor, rotary: Rotary, **how: Any) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.run_layer(layer, hidden, rotary, **how)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.recompute == "layers":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(self.run_layer, layer, hidden, rotary, **how, **options)


def reshard(model: nn.Module) -> None:
    """Free what was gathered of a sharded model or layer."""
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def reencoded(model: PreTrainedModel, base: Packed, branches: BranchBatch) -> Tensor:
    """The reference and the fallback: everything from scratch, one branch at a time."""
    hidden = []
    for row in branches.rows:
        before_1K = base.ids_1F[:, row.base : row.base + row.insert]
        own_1L = branches.ids_1L[:, row.start : row.end]
        mine = (branches.predictors >= row.start) & (branches.predictors < row.end)
        states_1TD = _states(model, torch.cat([before_1K, own_1L], dim=1))
        hidden.append(states_1TD[0, branches.predictors[mine] - row.start + row.insert])
    return torch.cat(hidden)


def _states(model: PreTrainedModel, ids_1T: Tensor) -> Tensor:
    states_1TD: Tensor = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state
    return states_1TD


def _embed(base: nn.Module, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotary]:
    hidden = base.get_input_embeddings()(ids)
    return hidden, base.rotary_emb(hidden, positions)


def _run_layer(layer: nn.Module, hidden: Tensor, rotary: Rotary, **how: Any) -> Tensor:
    """As a module, so that hooks on it (sharding, adapters) are run too. `how` goes to attention."""
    return layer(hidden, attention_mask=None, position_embeddings=rotary, **how)


def _keep_attention(_context: Any, operation: Callable[..., Any], *_: Any, **__: Any) -> CheckpointPolicy:
    """Attention is most of the work of a long sample and its output is small: that alone is not computed again."""
    return CheckpointPolicy.MUST_SAVE if operation in ATTENTION_KERNELS else CheckpointPolicy.PREFER_RECOMPUTE


@torch.no_grad()
def _is_plain(model: PreTrainedModel) -> bool:
    """Whether a branch read layer by layer, in a row behind another sample, equals re-encoding it. Tried on a few
    tokens instead of looking names up, and in a few layers, since rounding in bfloat16 grows with each."""
    base, described = model.base_model, model.config.to_dict()
    rope = (described.get("rope_parameters") or {}).get("rope_type", "default")
    layer_types = set(described.get("layer_types") or ())
    is_whole = all(hasattr(base, part) for part in ("layers", "norm", "rotary_emb"))
    if is_whole and layer_types <= {"full_attention"} and rope not in ROPE_BY_LENGTH:
        native, layers = model.config._attn_implementation, base.layers
        base.layers = layers[:TRIED_LAYERS]
        try:
            with plainly(model):
                if _reads_as_reencoded(model):
                    return True
        except (AttributeError, TypeError, ValueError, AssertionError):  # other arguments, or no keys
            pass
        finally:
            base.layers = layers
        model.set_attn_implementation(native)
    _say_fallback(model.config.model_type)
    return False


def _reads_as_reencoded(model: PreTrainedModel) -> bool:
    sample = Sample([1, 5, 2, 7, 3, 6, 4, 9], branches=[Branch(5, [8, 2, 6], ((6, 8),))])
    batch = Batch.collate([Sample([9, 3, 8]), sample], model.device)
    branches = BranchBatch.collate(batch, batch.branches)
    wanted = reencoded(model, batch.row, branches)
    tried = Decoder(model, plain=True)
    _, found = tried.hidden(batch.row, branches)
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    return tried.plain and float((found - wanted).norm() / wanted.norm()) <= tolerance


@cache  # once
def _say_fallback(kind: str) -> None:
    log.warning(
        "%s has layers other than plain attention, or positions that depend on the length: targets of branches are "
        "re-encoded one by one, each with its prefix",
        kind,
    )


def measure_branches(decoder: Decoder, samples: list[Sample], micro_tokens: int) -> Iterator[dict[str, Measured]]:
    """By the branch's key, micro-batch by micro-batch. Teacher and student are the same model."""
    for micro in decoder.micro_batches(samples, micro_tokens):
        yield decoder.together(_measured, micro)


def _measured(decoder: Decoder, samples: list[Sample]) -> dict[str, Measured]:
    batch = Batch.collate(samples, decoder.model.device)
    chunk_rows = max(1, decoder.chunk_rows // 2)
    tokens = batch.tokens(chunk_rows)
    hidden_1FD, branch_MD = decoder.hidden(batch.row, BranchBatch.collate(batch, batch.branches))
    hidden_ND = hidden_1FD[0, tokens.predictor_N]
    return measured_branches((decoder.head, hidden_ND), (decoder.head, branch_MD), batch, tokens, chunk_rows)


@torch.no_grad()
def token_logprobs(decoder: Decoder, ids: list[int], temperature: float) -> list[float]:
    """What the model makes of each token, after all those before it; 0 for the first."""
    row = Packed.of([ids], decoder.model.device)
    hidden_1FD, _ = decoder.hidden(row)
    scorer = decoder.head, hidden_1FD[0, : len(ids) - 1]
    temperature_N = torch.full((len(ids) - 1,), temperature, device=decoder.model.device)
    return [0.0, *sampled_logp(scorer, row.ids_1F[0, 1 : len(ids)], temperature_N, decoder.chunk_rows).tolist()]


def imitation_loss(decoder: Decoder, samples: list[Sample], micro_tokens: int) -> float:
    """On samples that nothing is learned from. Nats a token: a mean over all tokens with a weight, weighted by it."""
    sums = [decoder.together(_loss_and_weight, one) for one in decoder.micro_batches(samples, micro_tokens)]
    return sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)


def _loss_and_weight(decoder: Decoder, samples: list[Sample]) -> tuple[float, float]:
    batch = Batch.collate(samples, decoder.model.device)
    tokens = batch.tokens(decoder.chunk_rows)
    hidden_1FD, _ = decoder.hidden(batch.row)
    scorer = decoder.head, hidden_1FD[0].index_select(0, tokens.predictor_N)
    logp_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, decoder.chunk_rows)
    weight_N = tokens.rows.ce_weight_N.double()
    return -float((logp_N.double() * weight_N).sum()), float(weight_N.sum())


@dataclass(frozen=True, slots=True)
class Live:
    pass


@dataclass(frozen=True, slots=True)
class Frozen:
    share = 0.0  # of the student, by which the weights move to it after each step


@dataclass(frozen=True, slots=True)
class Ema:
    decay: float = 0.99

    @property
    def share(self) -> float:
        return 1 - self.decay


@dataclass(frozen=True, slots=True)
class Other:
    model: PreTrainedModel
    share = 0.0


Kind = Live | Frozen | Ema | Other


class OwnWeights:
    """A copy of the student that goes its own way, or another model. `name`: of the first teacher that has them."""

    def __init__(self, student: Decoder, kind: Frozen | Ema | Other, name: str):
        self.name = name
        self.share = kind.share
        if isinstance(kind, Other):
            self.decoder = Decoder(kind.model.requires_grad_(False), compiled=student.compiled)
            if self.decoder.vocabulary != student.vocabulary:
                raise OffbookError(
                    f"the student's vocabulary has {student.vocabulary} entries and its teacher's "
                    f"{self.decoder.vocabulary}: they are compared entry by entry, so take a teacher of the same family"
                )
        else:
            self.decoder = Decoder(sharing_copy(student.model), compiled=student.compiled, plain=student.plain)
        self.steps = 0

    @torch.no_grad()
    def follow(self, student: PreTrainedModel) -> None:
        """After each step: move towards the student by the share that the kind says."""
        self.steps += 1
        if not self.share:
            return
        both = zip(self.decoder.model.parameters(), student.parameters(), strict=True)
        pairs = [(local(mine), local(its)) for mine, its in both if mine is not its]
        rounded = [pair for pair in pairs if pair[0].dtype == torch.bfloat16]
        exact = [pair for pair in pairs if pair[0].dtype != torch.bfloat16]
        if rounded:
            _lerp_by_chance(rounded, self.share, self.steps)
        if exact:
            slow, fast = zip(*exact, strict=True)
            torch._foreach_lerp_(slow, fast, self.share)

    def read(self, batch: Batch, groups: Sequence[BranchGroup]) -> list[Teacher]:
        """The targets of each group. Without what is inserted they are branches that insert nothing, on the same base.
        Without groups the pass is a filler, in which this rank only gives its shards."""
        asked: list[list[BranchAt]] = []
        for group in groups:
            asked.append(group.branches)
            is_gated = group.distill.gate or group.distill.token_gate
            bare = [(number, replace(branch, inserted=[])) for number, branch in group.branches]
            asked.append(bare if is_gated else [])
        branches = [one for each in asked for one in each]
        if not branches:
            batch, branches = Batch.collate([FILLER], self.decoder.model.device), [(0, IDLE)]
        hidden_MD = self.decoder.inside(lambda: self.decoder.targets(batch, BranchBatch.collate(batch, branches)))
        if not groups:
            return []
        parts = hidden_MD.split([sum(branch.num_targets for _, branch in each) for each in asked])
        hidden = parts[::2], parts[1::2]
        return [
            [(self.decoder.head, part_MD) for part_MD in both if len(part_MD)] for both in zip(*hidden, strict=True)
        ]


def make_teachers(student: Decoder, kinds: Mapping[str, Kind]) -> dict[str, OwnWeights | None]:
    """By name; None is the student itself."""
    copies: dict[Kind, OwnWeights] = {}
    teachers: dict[str, OwnWeights | None] = {}
    for name, kind in kinds.items():
        if not isinstance(kind, Live) and kind not in copies:
            copies[kind] = OwnWeights(student, kind, name)
        teachers[name] = copies.get(kind)
    return teachers


def _lerp_by_chance(pairs: Sequence[tuple[Tensor, Tensor]], share: float, seed: int) -> None:
    """For bfloat16, whose steps are larger than a hundredth of most differences: rounding to the nearest would never
    move. Stochastic rounding is right on average and needs no copy in float32."""
    rng = torch.Generator(pairs[0][0].device).manual_seed(seed)
    for slow, fast in pairs:
        bits = torch.lerp(slow.float(), fast.float(), share).view(torch.int32)
        bits += torch.randint(1 << 16, bits.shape, generator=rng, dtype=torch.int32, device=bits.device)
        slow.copy_((bits & -(1 << 16)).view(torch.float32))


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares what is not trained: with a low-rank adapter it is as small as the adapter."""
    untrained = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, untrained).requires_grad_(False)
