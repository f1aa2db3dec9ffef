"""One optimizer step over samples: a sum of parts (rl, ce, and those that branches name), each divided by a global
token count, its own or RL's.

Left out on purpose: critics, trust-region clipping, entropy bonuses, several epochs over the same rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.config import TrainConfig
from offbook.train import head
from offbook.train.balance import PartGradients, scales_of
from offbook.train.batches import IMITATION, POLICY, Batch, BranchBatch, Tokens, micro_batches, row_length
from offbook.train.forward import Decoder
from offbook.train.lora import adapter_of, adapter_tensors
from offbook.train.masters import Masters
from offbook.train.optim.muon import Muon
from offbook.train.optim.units import units_of
from offbook.train.scoring import Counts, Ledger, Scoring
from offbook.train.targets import Measured, Scorer, Scorers, sampled_logp
from offbook.train.teachers import Kind, OwnWeights, make_teachers
from offbook.types import OffbookError, Sample, Weights

NO_TEACHERS: Mapping[str, Kind] = MappingProxyType({})
REFERENCE = "start"  # the teacher that `reference_kl` is taken to


class NotFinite(OffbookError):
    """A loss or gradient that is no number. Nothing of the step was applied."""


class WeightsLost(OffbookError):
    """Weights that are no numbers after a step. They must not be kept or published."""


@dataclass(slots=True)
class StepResult:
    metrics: dict[str, float]
    measured: dict[str, Measured] = field(default_factory=dict)  # by Branch.key
    skipped: str = ""  # why nothing was applied


class Trainer:
    def __init__(self, model: PreTrainedModel, settings: TrainConfig, teachers: Mapping[str, Kind] = NO_TEACHERS):
        """`teachers` by the names that branches call them. What `settings` leave to be chosen is what a CPU takes."""
        if model.dtype != getattr(torch, settings.precision):
            raise ValueError(f"train.precision is {settings.precision} and the model is in {model.dtype}; load it so")
        self.model = model
        self.settings = settings = settings.settled()
        assert settings.recompute != "auto"
        self.compiled = settings.compile is True
        self.student = Decoder(model, settings.recompute, self.compiled)
        self.teachers = make_teachers(self.student, teachers)
        if settings.reference_kl and REFERENCE not in self.teachers:
            raise ValueError(f"train.reference_kl needs a teacher called {REFERENCE}: Frozen()")
        self.masters = Masters(model)
        self.optimizer = _optimizer(self.masters, model, settings)
        self.steps = 0
        self.policy_norm = 0.0  # of RL's gradient in the last step that had one and in which it was taken by itself

    def step(self, samples: list[Sample], lr_scale: float = 1.0, counts: Counts | None = None) -> StepResult:
        """`counts` are those of all ranks together, where others train on other samples of the same step."""
        counts = counts or Counts.of(samples)
        if not counts.tokens.total():
            return StepResult({"train_tokens": 0}, skipped="no tokens were sampled")
        self._refuse_faulty(samples)
        samples = [one for one in samples if one.branches or any(one.rl_weight) or any(one.ce_weight)]
        batches = micro_batches(samples, self.settings.micro_tokens)
        ledger = Ledger(counts, split=_split_contests(batches))
        of_parts = self._gradients(samples, batches, ledger)
        gradient_norm = torch.nn.utils.clip_grad_norm_(self.masters.named.values(), self.settings.gradient_clip)
        if not math.isfinite(gradient_norm):
            self.optimizer.zero_grad()
            broken = [name for name, value in ledger.means().items() if not math.isfinite(value)]
            raise NotFinite(f"the gradient is {float(gradient_norm)} ({', '.join(broken) or 'every loss is finite'})")
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
        padded = sum(len(micro) * row_length(micro, self.model.device) for micro in batches)
        used = sum(len(sample.ids) for sample in samples)
        padding = 1 - used / max(1, padded)
        metrics = {"gradient_norm": float(gradient_norm), "train_tokens": used, "padding_share": padding}
        return StepResult({**ledger.means(), **metrics, **of_parts}, ledger.measured())

    def _gradients(self, samples: list[Sample], batches: list[list[Sample]], ledger: Ledger) -> dict[str, float]:
        """Of all micro-batches together. Returns what is known of the parts of the loss, where they are taken apart."""
        distills = {branch.distill for sample in samples for branch in sample.branches}
        bounds = {distill.part: distill.bound for distill in distills if distill.bound}
        every = self.settings.log_parts
        if not bounds and not (every and self.steps % every == 0):
            for micro in batches:
                self.loss(Batch.collate(micro, self.model.device), ledger).backward()
            return {}
        parts = PartGradients(self.masters)
        with self.student.differentiable_twice():
            for micro in batches:
                batch = Batch.collate(micro, self.model.device)
                losses = self._losses(batch, ledger, batch.parts)
                parts.add(dict(zip(batch.parts, losses, strict=True)))
        norms = parts.norms()
        scales = scales_of(norms, bounds, self.policy_norm)
        parts.join(scales)
        found = {f"{part}/gradient_norm": norm for part, norm in norms.items()}
        return found | {f"{part}/scale": scales.get(part, 1.0) for part in bounds}

    def _refuse_faulty(self, samples: list[Sample]) -> None:
        """What an annotator can get wrong, before anything is computed."""
        for sample in samples:
            if not all(map(math.isfinite, sample.logprobs)):
                raise NotFinite("a sampled token's log-probability under the policy that sampled it is not finite")
            for branch in sample.branches:
                name, part = branch.distill.teacher, branch.distill.part
                if name not in self.teachers:
                    raise ValueError(
                        f"a branch names the teacher {name}; there are {', '.join(self.teachers) or 'none'}"
                    )
                if part in (POLICY, IMITATION):
                    raise ValueError(f"a branch's part of the loss cannot be called {part}")
                if not 0 < branch.spans[0][0] <= branch.end <= len(sample.ids) or branch.insert > branch.spans[0][0]:
                    raise ValueError(
                        f"a branch at {branch.insert} has targets {branch.spans} of {len(sample.ids)} tokens"
                    )

    def publish(self, version: int) -> Weights:
        """They are not copied: apply them before the next step."""
        return weights_of(self.model, version)

    def own_weights(self) -> dict[str, OwnWeights]:
        """The teachers' own, each once, by the first name that it goes by."""
        found: dict[int, tuple[str, OwnWeights]] = {}
        for name, teacher in self.teachers.items():
            if teacher.own is not None:
                found.setdefault(id(teacher.own), (name, teacher.own))
        return dict(found.values())

    def loss(self, batch: Batch, ledger: Ledger) -> Tensor:
        """Of one micro-batch, and what it adds to the step's figures."""
        (loss,) = self._losses(batch, ledger)
        return loss

    def _losses(self, batch: Batch, ledger: Ledger, apart: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
        """The sum of its parts, or some of them one by one."""
        output, settings = self.student.head, self.settings
        hidden_BTD, teachers = self._forward(batch)
        tokens = batch.tokens(self._chunk_rows)  # on the host, while a GPU is busy with the forward
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
        student: Scorer = output, hidden_ND.detach()[: len(tokens.weight_M)]
        if settings.reference_kl:
            tokens = self._with_reference(batch, tokens)
        scoring = Scoring(
            batch, tokens, student, teachers, settings.ratio_cap, ledger, self.compiled, settings.reference_kl
        )
        target_rows = -(-self._chunk_rows // 2)  # a teacher's logits lie beside the student's
        if batch.branches and (scoring.is_contested or tokens.has_cut_target):
            scoring.judge(target_rows)
        losses = head.in_chunks(hidden_ND, output, scoring.losses, tokens.chunks, apart)
        if batch.branches:
            scoring.record_targets(target_rows)
        return losses

    @torch.no_grad()
    def _with_reference(self, batch: Batch, tokens: Tokens) -> Tokens:
        own = self.teachers[REFERENCE].own
        assert own is not None
        hidden_BTD, _ = own.decoder.hidden(batch.ids_BT)
        scorer = own.decoder.head, hidden_BTD.flatten(0, 1).index_select(0, tokens.predictor_N)
        reference_N = sampled_logp(scorer, tokens.rows.ids_N, tokens.rows.temperature_N, self._chunk_rows)
        return replace(tokens, rows=tokens.rows._replace(reference_N=reference_N))

    def _forward(self, batch: Batch) -> tuple[Tensor, list[Scorers]]:
        """The student's hidden states and, for each group of branches, what its teacher is scored with. Teachers with
        weights of their own come first, before the student's forward fills the memory."""
        teachers = [self.teachers[group.distill.teacher] for group in batch.groups]
        scorers = [
            teacher.own_scorers(batch, group.branches, plain=group.distill.gate > 0)
            for teacher, group in zip(teachers, batch.groups, strict=True)
        ]
        riding = [number for number, teacher in enumerate(teachers) if teacher.rides]
        along = [branch for number in riding for branch in batch.groups[number].branches]
        branches = BranchBatch.collate(batch, along) if along else None
        hidden_BTD, branch_MD = self.student.hidden(batch.ids_BT, branches)
        if branch_MD is not None:
            sizes = [sum(branch.num_targets for _, branch in batch.groups[number].branches) for number in riding]
            for number, part_MD in zip(riding, branch_MD.split(sizes), strict=True):
                scorers[number].models.append((self.student.head, part_MD))
        return hidden_BTD, scorers

    @property
    def _chunk_rows(self) -> int:
        entries = head.COMPILED_CHUNK_ENTRIES if self.compiled else head.CHUNK_ENTRIES
        return max(1, entries // self.model.config.vocab_size)


def weights_of(model: PreTrainedModel, version: int) -> Weights:
    """As an engine takes them; of a model with an adapter that alone, since an engine has the rest."""
    adapter = adapter_of(model)
    if adapter is None:
        return Weights(version, model.state_dict())
    return Weights(version, adapter_tensors(model), adapter.to_dict())


def _split_contests(batches: list[list[Sample]]) -> frozenset[str]:
    """Those that are not decided within one micro-batch."""
    places = Counter(
        contest
        for micro in batches
        for contest in {branch.contest for sample in micro for branch in sample.branches if branch.contest}
    )
    return frozenset(contest for contest, count in places.items() if count > 1)


def _optimizer(masters: Masters, model: PreTrainedModel, settings: TrainConfig) -> torch.optim.Optimizer:
    lr, decay, betas = settings.learning_rate, settings.weight_decay, (0.9, 0.95)
    if settings.optimizer == "muon":
        units = units_of(masters.named.items(), model.config)
        return Muon(masters.named.items(), units, lr, betas=betas, weight_decay=decay)
    return torch.optim.AdamW(masters.named.values(), lr=lr, betas=betas, weight_decay=decay, fused=True)
