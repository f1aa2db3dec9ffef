"""One optimizer step over samples: a sum of parts (rl, ce, and those that branches name), each divided by a global
token count, its own or RL's.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import mul
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from offbook.core.adapters import adapter_tensors
from offbook.core.config import TrainConfig
from offbook.core.weights import Gathered, Weights
from offbook.train import head
from offbook.train.batches import IMITATION, POLICY, Batch, BranchBatch, Tokens
from offbook.train.forward import Decoder
from offbook.train.head import (
    Counts,
    Ledger,
    Measured,
    Scorer,
    Scorers,
    Scoring,
    Shift,
    decided,
    percentiles,
    sampled_logp,
)
from offbook.train.host import round_length
from offbook.train.lora import adapter_of, fingerprint
from offbook.train.optim.muon import Muon
from offbook.train.optim.units import local, units_of
from offbook.train.parallel.balance import cost_of
from offbook.train.parallel.dense import in_common, shard, share_again
from offbook.train.parallel.gather import gathered
from offbook.train.parallel.ranks import ALONE, FILLER, IDLE, Micro, Plan, Ranks, total_norm
from offbook.train.precision import compute_linears
from offbook.train.replay import Replay, figures_of
from offbook.train.schedule import GRADIENT_CLIP
from offbook.train.teachers import Kind, OwnWeights, make_teachers
from offbook.types import Branch, OffbookError, Sample

HOOK = "_hands_gradient_over"  # of a working copy: what takes its gradient


class Masters:
    def __init__(self, model: nn.Module):
        """Of the parameters of `model` that are trained; those that are tied count once."""
        self.named: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}  # the parameters that are not their own masters
        self._hands_over = True
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.named[name] = parameter
            if parameter.dtype != torch.float32:
                self.named[name], self.copies[name] = nn.Parameter(parameter.detach().float()), parameter
                self._take_from(parameter, self.named[name])

    @torch.no_grad()
    def write_back(self) -> None:
        """After a step: each working copy is its master, rounded."""
        if self.copies:
            masters = [local(self.named[name]) for name in self.copies]
            torch._foreach_copy_([local(working) for working in self.copies.values()], masters)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of all weights, as the model has them."""
        working = [self.copies.get(name, master) for name, master in self.named.items()]
        return total_norm(working)

    @contextmanager
    def handing_over(self, does: bool) -> Iterator[None]:
        """Whether working copies hand their gradients to their masters, or keep and add them up themselves."""
        self._hands_over = does
        try:
            yield
        finally:
            self._hands_over = True

    def _take_from(self, working: nn.Parameter, master: nn.Parameter) -> None:
        """From now on, and no earlier trainer does: a model may be trained by one trainer after another."""
        earlier = getattr(working, HOOK, None)
        if earlier is not None:
            earlier.remove()
        setattr(working, HOOK, working.register_post_accumulate_grad_hook(partial(self._hand_over, master)))

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


T = TypeVar("T")
NO_TEACHERS: Mapping[str, Kind] = MappingProxyType({})
REFERENCE = "start"  # the teacher that `reference_kl` is taken to
ALONE_ASKED = Micro()


class NotFinite(OffbookError):
    """A loss or gradient that is no number. Nothing of the step was applied."""


class WeightsLost(OffbookError):
    """Weights that are no numbers after a step. They must not be kept or published."""


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key
    skipped: str = ""  # why nothing was applied


@dataclass(frozen=True, slots=True)
class Gradients:
    ledger: Ledger
    batches: list[list[Sample]]
    of_parts: dict[str, float]  # what is known of the parts of the loss, where they were taken apart


class Trainer:
    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainConfig,
        teachers: Mapping[str, Kind] = NO_TEACHERS,
        ranks: Ranks = ALONE,
    ):
        """`teachers` by the names that branches call them. What `settings` leave to be chosen is what a CPU takes. With
        other `ranks` the weights are sharded, and each steps on samples of its own."""
        if model.dtype != getattr(torch, settings.precision):
            raise ValueError(f"train.precision is {settings.precision} and the model is in {model.dtype}; load it so")
        self.model = model
        self.settings = settings = settings.settled()
        assert settings.recompute != "auto"
        self.compiled = settings.compile is True
        compute_linears(model, settings.linear)
        self.student = Decoder(model, settings.recompute, self.compiled)
        self.teachers = make_teachers(self.student, teachers)
        if settings.reference_kl and REFERENCE not in self.teachers:
            raise ValueError(f"train.reference_kl needs a teacher called {REFERENCE}: Frozen()")
        self.replay = Replay(model)
        self.student.free_routing = self.replay.free
        self.ranks = ranks
        self.base = "" if adapter_of(model) is None else fingerprint(model)  # of what an adapter is on
        if ranks.mesh is not None:
            owns = [own.decoder for own in self.own_weights().values()]
            common = [in_common(own.model, model) for own in owns]
            for decoder in (self.student, *owns):
                shard(decoder, ranks.mesh, ranks.experts, ranks.context)
            for own, names in zip(owns, common, strict=True):
                share_again(own.model, model, names)
        self.masters = Masters(model)
        self.optimizer = _optimizer(self.masters, model, settings)
        self.steps = 0
        self._has_learned = settings.linear.kind == "plain"  # else its layers have to show that they get a gradient
        self.micro_batches = 0  # so far: a sign of life within a step
        self.offered: Mapping[str, Tensor] = {}  # what was published last, where it is sharded
        self.snapshot: dict[str, Tensor] = {}  # the host's memory for what is kept of it, used again and again
        self.policy_norm = 0.0  # of RL's gradient in the last step that had one and in which it was taken by itself

    def step(self, samples: list[Sample], lr_scale: float = 1.0) -> StepResult:
        gradients = self.gradients(samples)
        if gradients is None:
            return StepResult({"train_tokens": 0}, skipped="no tokens were sampled")
        ledger, batches, of_parts = gradients.ledger, gradients.batches, gradients.of_parts
        gradient_norm = self._clip()
        if not math.isfinite(gradient_norm):
            self.optimizer.zero_grad()
            broken = [name for name, value in self.ranks.summed(ledger.means()).items() if not math.isfinite(value)]
            raise NotFinite(f"the gradient is {float(gradient_norm)} ({', '.join(broken) or 'every loss is finite'})")
        if not self._has_learned and any(self.ranks.gathered(any(map(_asks, samples)))):
            self._refuse_lost()
            self._has_learned = True
        self.steps += 1
        self.policy_norm = of_parts.get(f"{POLICY}/gradient_norm", 0.0) or self.policy_norm
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters.write_back()
        if not math.isfinite(norm := self.masters.norm()):
            raise WeightsLost(f"the norm of the weights is {float(norm)} after it, of the gradient {gradient_norm:.3g}")
        for weights in self.own_weights().values():
            weights.follow(self.model)
        tokens = [sum(len(sample.ids) for sample in micro) for micro in batches]
        padded = sum(round_length(count, self.model.device) for count in tokens)
        metrics = self.ranks.summed({**ledger.means(), "train_tokens": sum(tokens), "padded": padded})
        metrics["padding_share"] = 1 - metrics["train_tokens"] / max(1, metrics.pop("padded"))
        metrics["gradient_norm"] = gradient_norm
        metrics |= percentiles(torch.cat(self.ranks.gathered(ledger.log_ratios())[:: self.ranks.sharing]))
        width = self.model.config.get_text_config().hidden_size
        if self.replay.routers:
            metrics |= figures_of(self.ranks.gathered(self.replay.counted()))
        metrics |= self.ranks.spread(sum(cost_of(sample, width) for micro in batches for sample in micro))
        if isinstance(self.optimizer, Muon):
            metrics["muon/fallbacks"] = sum(self.ranks.gathered(self.optimizer.fallbacks)[: self.ranks.distinct])
        return StepResult({**metrics, **of_parts}, ledger.measured())

    def gradients(self, samples: list[Sample]) -> Gradients | None:
        """Of the loss over all ranks' samples, in the masters. None where there is nothing to learn from."""
        counts, fault = Counts.of(samples), self._fault_of(samples)
        samples = [one for one in samples if one.branches or any(one.rl_weight) or any(one.ce_weight)]
        batches = self.student.micro_batches(samples, self.settings.micro_tokens)
        contested = self.student.micro_batches(_across_batches(batches), self.settings.micro_tokens)
        plan = self.ranks.agreed(self._plan(counts, batches, contested, fault))
        if not plan.counts.tokens.total():
            return None
        if plan.fault is not None:
            raise plan.fault
        ledger = Ledger(plan.counts)
        ledger.verdicts = self._decide(contested, plan, ledger)
        return Gradients(ledger, batches, self._differentiate(batches, plan, ledger))

    def _plan(
        self, counts: Counts, batches: list[list[Sample]], contested: list[list[Sample]], fault: Exception | None
    ) -> Plan:
        """What other ranks have to know of these micro-batches."""
        if fault is not None:
            return Plan(counts, [], [], {}, fault)
        distills = {branch.distill for samples in batches for sample in samples for branch in sample.branches}
        bounds = {distill.part: distill.bound for distill in distills if distill.bound}
        return Plan(counts, list(map(self._micro, batches)), list(map(self._micro, contested)), bounds)

    def _micro(self, samples: list[Sample]) -> Micro:
        batch = Batch.collate(samples, torch.device("cpu"))
        asked = Counter(name for group in batch.groups if (name := self._own_name(group.distill.teacher)))
        rides = any(self.teachers[group.distill.teacher].rides for group in batch.groups)
        return Micro(asked, batch.parts, rides)

    def _own_name(self, teacher: str) -> str:
        """Of a teacher's own weights: the first name that they go by; none is empty."""
        own = self.teachers[teacher].own
        return next((name for name, weights in self.own_weights().items() if weights is own), "")

    def _clip(self) -> float:
        """Gradients, to the norm that they may have. Returns the norm that they had."""
        gradients = [master.grad for master in self.masters.named.values() if master.grad is not None]
        norm = total_norm(gradients)
        share = (GRADIENT_CLIP / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(gradient) for gradient in gradients], share)
        return float(norm)

    def _refuse_lost(self) -> None:
        """Layers whose product lost the gradient on the way: head and embeddings would learn alone, without a word."""
        inside = [master for name, master in self.masters.named.items() if ".layers." in name]
        gradients = [master.grad for master in inside if master.grad is not None]
        if inside and not (gradients and total_norm(gradients)):
            kind = self.settings.linear.kind
            raise OffbookError(f"layers in {kind} get no gradient on this machine; leave train.linear.kind plain")

    def _collated(self, batches: list[list[Sample]], planned: list[Micro]) -> Iterator[tuple[Batch, Micro]]:
        """As many as other ranks have."""
        filled = [*batches, *([FILLER] for _ in planned[len(batches) :])]
        for samples, micro in zip(filled, planned, strict=True):
            yield Batch.collate(samples, self.model.device), micro

    def _decide(self, batches: list[list[Sample]], plan: Plan, ledger: Ledger) -> dict[int, int]:
        """Which branches of contests across micro-batches may teach, by their ids, before anything is differentiated:
        so how samples are cut into micro-batches does not matter."""
        branches: list[Branch] = []
        shifts: list[Shift] = []
        for batch, micro in self._collated(batches, plan.judged):
            shift = self.student.read(self._shift, batch, ledger, micro)
            if shift is not None:
                shifts.append(shift)
                branches += [branch for _, branch in batch.branches]
            self._over()
        self.replay.counted()  # they are counted when they are trained on
        if not shifts:
            return {}
        verdict_B = decided(Shift(*map(torch.cat, zip(*shifts, strict=True))), branches)
        return dict(zip(map(id, branches), verdict_B.tolist(), strict=True))

    def _shift(self, _student: Decoder, batch: Batch, ledger: Ledger, micro: Micro) -> Shift | None:
        """Of all branches, without gradients. On a rank that has none the forward pass is for others."""
        _, scoring = self._scoring(batch, ledger, micro)
        return scoring.shift(self._target_rows) if batch.branches else None

    def _differentiate(self, batches: list[list[Sample]], plan: Plan, ledger: Ledger) -> dict[str, float]:
        """All micro-batches, one after the other. Returns what is known of the parts, where they are taken apart."""
        every, bounds = self.settings.log_parts, plan.bounds
        collated = self._collated(batches, plan.micro)
        if not bounds and not (every and self.steps % every == 0):
            for batch, micro in collated:
                self.loss(batch, ledger, micro).backward()
                self._over()
            return {}
        parts = PartGradients(self.masters, bounded=bounds)
        for batch, micro in collated:
            with self.student.differentiated(len(micro.parts)):
                losses = self.student.inside(partial(self._losses, batch, ledger, micro, micro.parts))
                parts.add(dict(zip(micro.parts, losses, strict=True)))
            self._over()
        norms = parts.norms()
        scales = scales_of(norms, bounds, self.policy_norm)
        parts.join(scales)
        found = {f"{part}/gradient_norm": norm for part, norm in norms.items()}
        return found | {f"{part}/scale": scales.get(part, 1.0) for part in bounds}

    def _over(self) -> None:
        """A micro-batch. What was gathered of teachers is given up: they have no backward pass that would do so."""
        self.micro_batches += 1
        self.replay.end()
        for own in self.own_weights().values():
            if isinstance(own.decoder.model, FSDPModule):
                own.decoder.model.reshard()

    def _fault_of(self, samples: list[Sample]) -> Exception | None:
        """What an annotator can get wrong, before anything is computed."""
        for sample in samples:
            streams = sample.logprobs, sample.advantage, sample.rl_weight, sample.ce_weight
            if not sample.ids or max(map(len, streams)) > len(sample.ids):
                return ValueError(f"a sample of {len(sample.ids)} tokens has {max(map(len, streams))} weights")
            if not 0 <= min(sample.ids) <= max(sample.ids) < (size := self.model.config.get_text_config().vocab_size):
                return ValueError(f"a sample has the token {max(sample.ids)}, and the model knows {size}")
            if sample.routes is not None and (why := self.replay.fault_of(sample.routes)):
                return ValueError(why)
            if not all(map(math.isfinite, sample.logprobs)):
                return NotFinite("a sampled token's log-probability under the policy that sampled it is not finite")
            for branch in sample.branches:
                name, part = branch.distill.teacher, branch.distill.part
                if name not in self.teachers:
                    return ValueError(
                        f"a branch names the teacher {name}; there are {', '.join(self.teachers) or 'none'}"
                    )
                if part in (POLICY, IMITATION):
                    return ValueError(f"a branch's part of the loss cannot be called {part}")
                if not 0 < branch.spans[0][0] <= branch.end <= len(sample.ids) or branch.insert > branch.spans[0][0]:
                    return ValueError(
                        f"a branch at {branch.insert} has targets {branch.spans} of {len(sample.ids)} tokens"
                    )
        return None

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

    def own_weights(self) -> dict[str, OwnWeights]:
        """The teachers' own, each once, by the first name that it goes by."""
        found: dict[int, tuple[str, OwnWeights]] = {}
        for name, teacher in self.teachers.items():
            if teacher.own is not None:
                found.setdefault(id(teacher.own), (name, teacher.own))
        return dict(found.values())

    def loss(self, batch: Batch, ledger: Ledger, micro: Micro = ALONE_ASKED) -> Tensor:
        """Of one micro-batch, and what it adds to the step's figures."""
        (loss,) = self.student.inside(partial(self._losses, batch, ledger, micro))
        return loss

    def _losses(self, batch: Batch, ledger: Ledger, micro: Micro, apart: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
        """The sum of its parts, or some of them one by one."""
        hidden_ND, scoring = self._scoring(batch, ledger, micro)
        if self.settings.reference_kl:
            scoring.tokens = self._with_reference(batch, scoring.tokens)
        if batch.branches and (scoring.is_contested or scoring.tokens.has_cut_target):
            scoring.judge(self._target_rows)
        losses = head.in_chunks(hidden_ND, self.student.head, scoring.losses, scoring.tokens.chunks, apart)
        if batch.branches:
            scoring.record_targets(self._target_rows)
        return tuple(loss / self.ranks.sharing for loss in losses) if self.ranks.sharing > 1 else losses

    def _scoring(self, batch: Batch, ledger: Ledger, micro: Micro) -> tuple[Tensor, Scoring]:
        """The forward pass: hidden states before each token that counts, and what scores these."""
        settings = self.settings
        hidden_1FD, teachers = self._forward(batch, micro)
        tokens = batch.tokens(self._chunk_rows)  # on the host, while a GPU is busy with the forward
        hidden_ND = hidden_1FD[0].index_select(0, tokens.predictor_N)
        student: Scorer = self.student.head, hidden_ND.detach()[: len(tokens.weight_M)]
        return hidden_ND, Scoring(
            batch, tokens, student, teachers, settings.ratio_cap, ledger, self.compiled, settings.reference_kl
        )

    @torch.no_grad()
    def _with_reference(self, batch: Batch, tokens: Tokens) -> Tokens:
        own = self.teachers[REFERENCE].own
        assert own is not None
        with self.replay.free():
            hidden_1FD, _ = own.decoder.inside(lambda: own.decoder.hidden(batch.row))
        scorer = own.decoder.head, hidden_1FD[0].index_select(0, tokens.predictor_N)
        reference_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, self._chunk_rows)
        return replace(tokens, rows=tokens.rows._replace(reference_N=reference_N))

    def _forward(self, batch: Batch, micro: Micro = ALONE_ASKED) -> tuple[Tensor, list[Scorers]]:
        """The student's hidden states and, for each group of branches, what its teacher is scored with. Teachers with
        weights of their own come first, before the student's forward fills the memory, all ranks in the same order."""
        teachers = [self.teachers[group.distill.teacher] for group in batch.groups]
        owners = [self._own_name(group.distill.teacher) for group in batch.groups]
        found: dict[int, Scorers] = {}
        for name in sorted({*owners, *micro.asked}):
            for number in (number for number, owner in enumerate(owners) if owner == name):
                group = batch.groups[number]
                gates = group.distill.gate, group.distill.token_gate
                found[number] = teachers[number].own_scorers(batch, group.branches, plain=any(gates))
            for _ in range(micro.asked[name] - owners.count(name)):
                self._ask_idly(name)
        scorers = [found[number] for number in range(len(teachers))]
        riding = [number for number, teacher in enumerate(teachers) if teacher.rides]
        along = [branch for number in riding for branch in batch.groups[number].branches]
        if not along and micro.rides and self.ranks.experts is not None:
            along = [(0, IDLE)]
        branches = BranchBatch.collate(batch, along) if along else None
        self.replay.begin(batch, self.ranks.context)
        hidden_1FD, branch_MD = self.student.hidden(batch.row, branches)
        if branch_MD is not None and riding:
            sizes = [sum(branch.num_targets for _, branch in batch.groups[number].branches) for number in riding]
            for number, part_MD in zip(riding, branch_MD.split(sizes), strict=True):
                scorers[number].models.append((self.student.head, part_MD))
        return hidden_1FD, scorers

    @torch.no_grad()
    def _ask_idly(self, name: str) -> None:
        """Another rank needs this teacher's weights: take part in gathering them."""
        decoder = self.own_weights()[name].decoder
        filler = Batch.collate([FILLER], self.model.device)
        decoder.inside(lambda: decoder.targets(filler, BranchBatch.collate(filler, [(0, IDLE)])))

    @property
    def _chunk_rows(self) -> int:
        entries = head.COMPILED_CHUNK_ENTRIES if self.compiled else head.CHUNK_ENTRIES
        return max(1, entries // self.model.config.vocab_size)

    @property
    def _target_rows(self) -> int:
        """A teacher's logits lie beside the student's."""
        return -(-self._chunk_rows // 2)


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


def _across_batches(batches: list[list[Sample]]) -> list[Sample]:
    """What has to be read to decide contests that have more branches than places, in several micro-batches."""
    found: dict[str, list[int]] = {}
    for number, samples in enumerate(batches):
        for sample in samples:
            for branch in sample.branches:
                found.setdefault(branch.contest, []).append(number)
    undecided = {contest: len(numbers) for contest, numbers in found.items() if contest and len(set(numbers)) > 1}
    cut = []
    for sample in chain.from_iterable(batches):
        branches = [one for one in sample.branches if 0 < one.distill.places < undecided.get(one.contest, 0)]
        if branches:
            ids = sample.ids[: max(branch.end for branch in branches)]
            cut.append(Sample(ids, branches=branches, temperature=sample.temperature, routes=sample.routes))
    return cut


def _asks(sample: Sample) -> bool:
    """For a gradient: a group whose rewards are all alike has no advantage, and rightly none. Nothing predicts a first
    token."""
    learned = any(map(mul, sample.advantage[1:], sample.rl_weight[1:]))
    return learned or any(sample.ce_weight[1:]) or bool(sample.branches)


def _optimizer(masters: Masters, model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        units = units_of(masters.named.items(), model.config)
        return Muon(masters.named.items(), units, lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(masters.named.values(), lr=lr, betas=betas, weight_decay=decay, fused=True)


class PartGradients:
    """The gradients of each part of the loss, summed over the micro-batches of a step. Data-parallel ranks add theirs
    up before anyone takes a norm.

    A part can be held to a share of RL's gradient, which is known only after all micro-batches, so gradients are kept
    apart until then, under any optimizer. That costs one more backward pass for each micro-batch that has such a part,
    and a set of gradients in the precision of the weights. In float32 everything is exact. In bfloat16 a micro-batch's
    gradient comes out of the backward pass in bfloat16 anyway: the first is stored as it is, and each later one rounds
    the sum once. After N micro-batches with hints that is off by about sqrt(N) / 800 of the part's norm (0.7% after
    32), and the part is at most `bound` of RL's gradient. RL's own sum, and that of every part without a bound, is in
    float32.
    """

    def __init__(self, masters: Masters, bounded: Collection[str]):
        self.masters = masters
        self.bounded = bounded
        self.of: dict[str, dict[str, Tensor]] = {}  # by part, by parameter

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Differentiate each. They hang on one graph."""
        for number, (part, loss) in enumerate(losses.items(), 1):
            is_bounded = part in self.bounded
            holders = self.masters.named | self.masters.copies if is_bounded else self.masters.named
            before = self.of.get(part, {})
            for name, holder in holders.items():
                holder.grad = before.get(name)
            with self.masters.handing_over(not is_bounded):
                loss.backward(retain_graph=number < len(losses))
            self.of[part] = {name: holder.grad for name, holder in holders.items() if holder.grad is not None}
            for holder in holders.values():
                holder.grad = None

    def norms(self) -> dict[str, float]:
        return {part: float(total_norm(list(grads.values()))) for part, grads in self.of.items()}

    def join(self, scales: Mapping[str, float]) -> None:
        """Their sum, some of them scaled, is the gradient of the step. They are used up by it."""
        for name, master in self.masters.named.items():
            master.grad = None
            for part, grads in self.of.items():
                gradient = grads.pop(name, None)
                if gradient is None:
                    continue
                gradient = gradient.float()
                if part in scales:
                    gradient.mul_(scales[part])
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def scales_of(norms: Mapping[str, float], bounds: Mapping[str, float], policy_norm: float) -> dict[str, float]:
    """What bounded parts are multiplied by. `policy_norm` is RL's in the last step in which it had a gradient, for a
    step in which it has none: all rollouts of a task are equal then, which says nothing about how much a fault matters.
    As long as there has been none at all, there is nothing that could be drowned."""
    policy = norms.get(POLICY, 0.0) or policy_norm
    return {
        part: min(1.0, bound * policy / norm)
        for part, bound in bounds.items()
        if policy and (norm := norms.get(part, 0.0))
    }
