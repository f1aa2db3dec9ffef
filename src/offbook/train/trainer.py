"""One optimizer step over samples: a sum of parts (rl, ce, and those that branches name), each divided by a global
token count, its own or RL's.

Every rank has samples of its own. All of them run as many micro-batches as the one that has most, ask every teacher
with weights of its own as often, and differentiate the same parts of the loss in the same order; a rank with nothing to
do there does it on one token of weight 0. So none of them waits for a collective that another never starts.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbook.core.adapters import adapter_tensors
from offbook.core.config import TrainConfig
from offbook.core.weights import Gathered, Weights
from offbook.train.batches import POLICY, Batch, BranchBatch, Tokens, micro_batches
from offbook.train.forward import FILLER, IDLE, Decoder, Kind, OwnWeights, make_teachers, reshard
from offbook.train.head import Counts, Ledger, LossHead, Measured, Teacher, sampled_logp
from offbook.train.lora import adapter_of, fingerprint
from offbook.train.optim.muon import BETAS, Muon
from offbook.train.optim.units import local, units_of
from offbook.train.parallel.sharding import in_common, shard, share_again
from offbook.train.precision import compute_linears
from offbook.train.replay import Replay, figures_of
from offbook.train.schedule import GRADIENT_CLIP
from offbook.types import Distill, OffbookError, Sample

REFERENCE = "start"  # the teacher that `train.reference_kl` is taken to
HOOK = "_hands_gradient_over"  # attribute of a working copy: the hook that takes its gradient
PATIENCE = timedelta(days=7)  # timeout while rank 0 collects rollouts, or another one writes
T = TypeVar("T")
NO_TEACHERS: Mapping[str, Kind] = MappingProxyType({})


class Masters:
    """The float32 parameters that are trained, by name; tied ones count once. Lower-precision parameters of the model
    are working copies, whose gradients are summed in their masters."""

    def __init__(self, model: nn.Module):
        self.named: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}
        self._hands_over = True
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.named[name] = parameter
            if parameter.dtype == torch.float32:
                continue
            self.named[name] = nn.Parameter(parameter.detach().float())
            self.copies[name] = parameter
            earlier = getattr(parameter, HOOK, None)  # of another trainer of the same model
            if earlier is not None:
                earlier.remove()
            hook = partial(self._hand_over, self.named[name])
            setattr(parameter, HOOK, parameter.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def write_back(self) -> None:
        """After a step: each working copy is its master, rounded."""
        if self.copies:
            masters = [local(self.named[name]) for name in self.copies]
            torch._foreach_copy_([local(working) for working in self.copies.values()], masters)

    def norm(self) -> Tensor:
        """Of all weights, as the model has them."""
        return total_norm([self.copies.get(name, master) for name, master in self.named.items()])

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.named.values() if master.grad is not None]

    @contextmanager
    def taken(self, kept: dict[str, Tensor]) -> Iterator[None]:
        """Meanwhile gradients are added to `kept`, in the precision of the working copies, and not to the masters'."""
        holders = self.named | self.copies
        before = {name: self.named[name].grad for name in self.named}
        for name, holder in holders.items():
            holder.grad = kept.get(name)
        self._hands_over = False
        try:
            yield
        finally:
            self._hands_over = True
            for name, holder in holders.items():
                if holder.grad is not None:
                    kept[name] = holder.grad
                holder.grad = None
            for name, gradient in before.items():
                self.named[name].grad = gradient

    def add(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        for name, gradient in gradients.items():
            master = self.named[name]
            scaled = gradient.float().mul_(scale)
            master.grad = scaled if master.grad is None else master.grad.add_(scaled)

    def _hand_over(self, master: nn.Parameter, working: Tensor) -> None:
        gradient = working.grad
        assert gradient is not None
        if not self._hands_over:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        working.grad = None


@dataclass
class Plan:
    """Of a step: its denominators, and of each micro-batch the distillation settings of its branches."""

    counts: Counts
    ways: list[frozenset[Distill]]

    @classmethod
    def of(cls, counts: Counts, batches: Sequence[Sequence[Sample]]) -> Plan:
        ways = [frozenset(branch.distill for one in samples for branch in one.branches) for samples in batches]
        return cls(counts, ways)

    def __add__(self, other: Plan) -> Plan:
        both = zip_longest(self.ways, other.ways, fillvalue=frozenset[Distill]())
        return Plan(self.counts + other.counts, [own | its for own, its in both])


@dataclass
class Ranks:
    """`mesh` has all ranks of the training, in dimensions `replicate` and `shard`; None is this process alone.
    `experts` has the same ranks in dimensions `replicate`, `shard` and `ep`, if experts are distributed."""

    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None

    def gathered(self, own: T) -> list[T]:
        if self.mesh is None:
            return [own]
        found: list[T] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return found

    def share_of(self, samples: Sequence[Sample], width: int) -> list[Sample]:
        """This rank's, where every rank has the samples of all."""
        if self.mesh is None:
            return list(samples)
        return balanced(samples, dist.get_world_size(), width)[dist.get_rank()]

    def summed(self, means: Mapping[str, float]) -> dict[str, float]:
        """Figures of all ranks, each a share of the whole already."""
        total: dict[str, float] = {}
        for each in self.gathered(dict(means)):
            for name, value in each.items():
                total[name] = total.get(name, 0.0) + value
        return total


ALONE = Ranks()


class NotFinite(OffbookError):
    """A loss or gradient is NaN or infinite. Nothing of the step was applied."""


class WeightsLost(OffbookError):
    """Weights are NaN or infinite after a step. They must not be kept or published."""


@dataclass
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key
    skipped: str = ""  # why nothing was applied


@dataclass
class Gradients:
    ledger: Ledger
    batches: list[list[Sample]]
    of_parts: dict[str, float]  # gradient norms and scales, where a part of the loss is bounded


class Trainer:
    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainConfig,
        teachers: Mapping[str, Kind] = NO_TEACHERS,
        ranks: Ranks = ALONE,
    ):
        """`teachers` by the names that branches call them. What `settings` leave to be chosen is what a CPU takes. With
        other `ranks` the weights are sharded, and each rank steps on samples of its own."""
        if model.dtype != getattr(torch, settings.precision):
            raise ValueError(f"train.precision is {settings.precision} and the model is in {model.dtype}; load it so")
        self.model = model
        self.settings = settings = settings.settled()
        assert settings.recompute != "auto"
        compute_linears(model, settings.linear)
        self.student = Decoder(model, settings.recompute, settings.compile is True)
        self.head = LossHead(self.student.head, self.student.vocabulary, settings)
        self.teachers = make_teachers(self.student, teachers)
        if settings.reference_kl and REFERENCE not in self.teachers:
            raise ValueError(f"train.reference_kl needs a teacher called {REFERENCE}: Frozen()")
        self.replay = Replay(model)
        self.student.free_routing = self.replay.free
        self.ranks = ranks
        self.base = "" if adapter_of(model) is None else fingerprint(model)  # of the model under an adapter
        if ranks.mesh is not None:
            owns = [own.decoder for own in self.own_weights]
            common = [in_common(own.model, model) for own in owns]
            for decoder in (self.student, *owns):
                shard(decoder, ranks.mesh, ranks.experts)
            for own, names in zip(owns, common, strict=True):
                share_again(own.model, model, names)
        self.masters = Masters(model)
        named = self.masters.named
        how: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        self.optimizer: torch.optim.Optimizer
        if settings.optimizer == "muon":
            self.optimizer = Muon(named.items(), units_of(named.items(), model.config), **how)
        else:
            self.optimizer = torch.optim.AdamW(named.values(), betas=BETAS, fused=True, **how)
        self.steps = 0
        self.micro_batches = 0  # so far: a sign of life within a step
        self.offered: Mapping[str, Tensor] = {}  # what was published last, where it is sharded
        self.snapshot: dict[str, Tensor] = {}  # host buffers for checkpoints
        self.policy_norm = 0.0  # of the gradient without bounded parts, in the last step that had one

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        gradients = self.gradients(samples)
        if gradients is None:
            return StepResult({"train_tokens": 0}, skipped="no tokens were sampled")
        own = self.masters.gradients()
        norm = total_norm(own)
        torch._foreach_mul_([local(each) for each in own], (GRADIENT_CLIP / (norm + 1e-6)).clamp(max=1.0))
        gradient_norm = float(norm)
        tokens = sum(len(sample.ids) for micro in gradients.batches for sample in micro)
        means, measured = gradients.ledger.read()
        metrics = self.ranks.summed({**means, "train_tokens": tokens})
        if not math.isfinite(gradient_norm):
            self.optimizer.zero_grad()
            broken = [name for name, value in metrics.items() if not math.isfinite(value)]
            raise NotFinite(f"the gradient is {gradient_norm} ({', '.join(broken) or 'every loss is finite'})")
        self.steps += 1
        self.policy_norm = gradients.of_parts.get(f"{POLICY}/gradient_norm", 0.0) or self.policy_norm
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.write_back()
        weight_norm = float(self.masters.norm())
        if not math.isfinite(weight_norm):
            raise WeightsLost(f"the norm of the weights is {weight_norm} after it, of the gradient {gradient_norm:.3g}")
        for weights in self.own_weights:
            weights.follow(self.model)
        metrics["gradient_norm"] = gradient_norm
        if self.replay.routers:
            metrics |= figures_of(self.ranks.gathered(self.replay.counted()))
        return StepResult({**metrics, **gradients.of_parts}, measured)

    def gradients(self, samples: list[Sample]) -> Gradients | None:
        """Of the loss over all ranks' samples, in the masters. None where there is nothing to learn from."""
        self.refuse(samples)
        counts = Counts.of(samples)
        samples = [one for one in samples if one.branches or any(one.rl_weight) or any(one.ce_weight)]
        batches = micro_batches(samples, self.settings.micro_tokens if self.student.plain else 0)
        first, *others = self.ranks.gathered(Plan.of(counts, batches))
        plan = sum(others, first)
        if not plan.counts.tokens.total():
            return None
        ledger = Ledger(plan.counts)
        bounded: dict[str, dict[str, Tensor]] = {}  # gradients by part and parameter
        for number, ways in enumerate(plan.ways):
            batch = Batch.collate(batches[number] if number < len(batches) else [FILLER], self.model.device)
            parts = sorted({way.part for way in ways if way.bound})
            if parts:
                self._backward_separately(batch, ledger, ways, {part: bounded.setdefault(part, {}) for part in parts})
            else:
                self.loss(batch, ledger, ways).backward()
            self.micro_batches += 1
            if self.replay.routers:
                self.replay.end()
            if self.ranks.mesh is not None:  # teachers have no backward pass that would free what they gathered
                for own in self.own_weights:
                    reshard(own.decoder.model)
        return Gradients(ledger, batches, self._join(bounded, plan))

    def _backward_separately(
        self, batch: Batch, ledger: Ledger, ways: Collection[Distill], bounded: dict[str, dict[str, Tensor]]
    ) -> None:
        """Gradients of each bounded part are kept separate until the norm of the others is known. That costs one more
        backward pass a part, and a set of gradients in the precision of the weights. In bfloat16 every micro-batch
        after the first rounds the sum once: after N it is off by about sqrt(N) / 800 of the part's norm."""
        with self.student.differentiated_again():
            rest, *losses = self.student.inside(partial(self._losses, batch, ledger, ways, tuple(bounded)))
            rest.backward(retain_graph=True)
            for number, (kept, loss) in enumerate(zip(bounded.values(), losses, strict=True), 1):
                with self.masters.taken(kept):
                    loss.backward(retain_graph=number < len(losses))

    def _join(self, bounded: Mapping[str, dict[str, Tensor]], plan: Plan) -> dict[str, float]:
        """Add bounded gradients to the others', scaled down to at most `bound` times their norm. A step without any RL
        signal takes the norm of the last one that had it: that all rollouts of a task are equal says nothing about how
        much a fault matters. As long as there has been none, there is nothing to drown."""
        if not bounded:
            return {}
        policy = float(total_norm(self.masters.gradients()))
        found = {f"{POLICY}/gradient_norm": policy}
        bounds = {way.part: way.bound for ways in plan.ways for way in ways if way.bound}
        policy = policy or self.policy_norm
        for part, gradients in bounded.items():
            norm = float(total_norm(list(gradients.values())))
            scale = min(1.0, bounds[part] * policy / norm) if policy and norm else 1.0
            self.masters.add(gradients, scale)
            found |= {f"{part}/gradient_norm": norm, f"{part}/scale": scale}
        return found

    def refuse(self, samples: list[Sample]) -> None:
        """Refuse what an annotator or an engine can get wrong."""
        for sample in samples:
            size = len(sample.ids)
            longest = max(map(len, (sample.logprobs, sample.advantage, sample.rl_weight, sample.ce_weight)))
            if longest > size:
                raise ValueError(f"a sample of {size} tokens has {longest} weights")
            if not all(0 <= token < self.student.vocabulary for token in sample.ids):
                raise ValueError(
                    f"a sample has the token {max(sample.ids)}, and the model knows {self.student.vocabulary}"
                )
            if sample.routes is not None and (why := self.replay.fault_of(sample.routes)):
                raise ValueError(why)
            if not all(map(math.isfinite, sample.logprobs)):
                raise NotFinite("a sampled token's log-probability under the policy that sampled it is not finite")
            for branch in sample.branches:
                if branch.distill.teacher not in self.teachers:
                    there = ", ".join(self.teachers) or "none"
                    raise ValueError(f"a branch names the teacher {branch.distill.teacher}; there are {there}")
                if not max(1, branch.insert) <= branch.spans[0][0] <= branch.end <= size:
                    raise ValueError(f"a branch at {branch.insert} has targets {branch.spans} of {size} tokens")

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work` on this trainer, on all ranks that have a part of it."""
        return work(self, *arguments)

    def publish(self, version: int) -> Weights:
        """They are not copied: apply them before the next step. Where they are sharded all ranks have to call it, and
        then to ask for the same tensors; rank 0 gets them."""
        weights = weights_of(self.model, version)
        if self.ranks.mesh is None:
            return weights
        self.offered = weights.tensors
        return replace(
            weights, tensors=Gathered(self.offered, first_names(self.model, self.offered), partial(self.together, hand))
        )

    @property
    def own_weights(self) -> list[OwnWeights]:
        """The teachers' own, each once."""
        return list(dict.fromkeys(own for own in self.teachers.values() if own is not None))

    def loss(self, batch: Batch, ledger: Ledger, ways: Collection[Distill] = ()) -> Tensor:
        """Of one micro-batch, and what it adds to the step's figures. `ways`: of the branches on all ranks."""
        (loss,) = self.student.inside(partial(self._losses, batch, ledger, ways))
        return loss

    def _losses(
        self, batch: Batch, ledger: Ledger, ways: Collection[Distill], separate: tuple[str, ...] = ()
    ) -> tuple[Tensor, ...]:
        hidden_1FD, teachers = self.forward(batch, ways)
        tokens = batch.tokens(self.head.chunk_rows)  # on the host, while a GPU is busy with the forward
        if self.settings.reference_kl:
            tokens = self._held_to_start(batch, tokens, ledger)
        return self.head.losses(hidden_1FD, batch, tokens, teachers, ledger, separate)

    @torch.no_grad()
    def _held_to_start(self, batch: Batch, tokens: Tokens, ledger: Ledger) -> Tokens:
        """Advantages less the k1 estimate of KL(policy || start) at what was sampled (Composer 2, section 4.1). As a
        loss k1 has no gradient in the mean, so it belongs into the reward."""
        own = self.teachers[REFERENCE]
        start = self.student if own is None else own.decoder
        with self.replay.free():
            hidden_1FD, _ = start.inside(lambda: start.hidden(batch.row))
        rows = tokens.rows
        scorer = start.head, hidden_1FD[0].index_select(0, tokens.predictor_N)
        start_N = sampled_logp(scorer, rows.ids_N, rows.temperature_N, self.head.chunk_rows)
        k1_N = torch.where(rows.rl_weight_N != 0, rows.behaviour_N - start_N, 0.0)
        if count := ledger.counts.tokens[POLICY]:
            ledger.add("rl/reference_kl", k1_N, count)
        advantage_N = rows.advantage_N - self.settings.reference_kl * k1_N
        return replace(tokens, rows=rows._replace(advantage_N=advantage_N))

    def forward(self, batch: Batch, ways: Collection[Distill] = ()) -> tuple[Tensor, list[Teacher]]:
        """The student's hidden states and, for each group of branches, its teacher. Teachers with weights of their own
        come first, before the student's forward fills the memory, on all ranks in the same order."""
        owners = [self.teachers[group.distill.teacher] for group in batch.groups]
        asked = {*owners, *(self.teachers[way.teacher] for way in ways)}
        found: dict[int, Teacher] = {}  # by the number of the group
        for own in self.own_weights:
            if own in asked:
                mine = [number for number, owner in enumerate(owners) if owner is own]
                found.update(zip(mine, own.read(batch, [batch.groups[number] for number in mine]), strict=True))
        live = [number for number, owner in enumerate(owners) if owner is None]
        along = [branch for number in live for branch in batch.groups[number].branches]
        if not along and self.ranks.experts is not None and None in asked:
            along = [(0, IDLE)]  # all ranks have to call experts as often
        if self.replay.routers:
            self.replay.begin(batch)
        hidden_1FD, branch_MD = self.student.hidden(batch.row, BranchBatch.collate(batch, along) if along else None)
        start = 0
        for number in live:
            size = sum(batch.groups[number].sizes)
            found[number] = [(self.student.head, branch_MD[start : start + size])]
            start += size
        return hidden_1FD, [found[number] for number in range(len(owners))]


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Over all entries on all ranks, in float32. Replicated tensors count once."""
    parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            cut = tuple(number for number, placement in enumerate(tensor.placements) if not placement.is_replicate())
            parts.setdefault((tensor.device_mesh, cut), []).append(tensor.to_local())
        else:
            parts.setdefault((None, ()), []).append(tensor)
    squares = []
    for (mesh, cut), own in parts.items():
        # torch.nn.utils.get_total_norm would round the norm of each tensor in bfloat16
        square = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own, 2.0, dtype=torch.float32))).square()
        for number in cut:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(number))
        squares.append(square)
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def cost_of(sample: Sample, width: int) -> float:
    """A sample of n tokens costs a layer of width D about n (12 D + n): its products, and attention over what stands
    before. Branches cost a third of that for their own tokens, since they have no backward pass."""
    tokens = len(sample.ids)
    branches = sum((len(one.inserted) + one.end - one.insert) * (12 * width + one.end) for one in sample.branches)
    return tokens * (12 * width + tokens) + branches / 3


def balanced(samples: Sequence[Sample], ranks: int, width: int) -> list[list[Sample]]:
    """The samples of each rank: the costliest sample goes first, to the rank with the least load. Every rank computes
    the same."""
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for sample in sorted(samples, key=lambda sample: -cost_of(sample, width)):
        rank = load.index(min(load))
        shares[rank].append(sample)
        load[rank] += cost_of(sample, width)
    return shares


def gathered(tensors: Mapping[str, Tensor], holders: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank holds, on the device. All ranks have to iterate to the end, and hold one whole
    tensor at a time: no rank has room for all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in tensors.items():
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if holders[name] == rank:
            yield name, whole
        del whole  # before the next is put together


def weights_of(model: PreTrainedModel, version: int) -> Weights:
    """As an engine takes them; of a model with an adapter that alone, since an engine has the rest."""
    adapter = adapter_of(model)
    if adapter is None:
        return Weights(version, model.state_dict())
    return Weights(version, adapter_tensors(model), adapter.to_dict())


def first_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """By name, the first name of the same parameter. Memory would not tell: a rank's part may be empty."""
    seen: dict[int, str] = {}
    firsts = {name: seen.setdefault(id(one), name) for name, one in model.named_parameters(remove_duplicate=False)}
    return {name: firsts.get(name, name) for name in names}


def hand(trainer: Trainer, name: str) -> Tensor | None:
    """One of the tensors that are offered, to rank 0."""
    return dict(gathered({name: trainer.offered[name]}, {name: 0})).get(name)
