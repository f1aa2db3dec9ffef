"""The step of TRL 1.16's SDPO trainer on the rollouts of feedback.py: the same lesson as far as it can be said there.

A sample of TRL's is a prompt and a completion; its teacher reads another prompt before the same completion, its losses
cover the whole completion, and prefixes are not shared. So a target becomes a sample of its own: the rollout up to the
message, the message, and for the teacher the same with the hint spliced in. The RL part is each rollout once more as a
sample: its completion begins at the first sampled token, and per-token advantages, 0 on what was not sampled, keep the
policy loss to the sampled tokens. Leaving the others out of `completion_mask` would hide them from attention too.

TRL's own code does the work: `SDPOTrainer.training_step` (student, teacher, loss, backward), accelerate's clipping, the
fused AdamW of `create_optimizer`. Left out: generation, rewards, building of batches, logging. Settings in its favour:
  - targets are run with distillation_weight 1 and rollouts with 0, so that neither pays for the loss it has no use for;
    a run of TRL has one weight for all samples, and between 0 and 1 every sample pays for a teacher
  - weights, gradients and logits in bfloat16, without autocast; no copy of the weights for the teacher (`live`)
  - samples of equal lengths share a batch, others run alone: nothing is padded, and attention takes the causal kernels
    without a mask, the same ones in the same order as ours
  - every layer recomputed, TRL's default; `recompute_every` 2 keeps each second one, 0 all of them
`torch_compile` is off: traced, transformers cannot see that nothing is masked, and builds the square mask.
Divergence: exact forward KL, as ours, without the cap on a token and without the gate. Policy loss: PPO's clipped ratio
to the recorded log-probabilities, a mean over sampled tokens; ours truncates the ratio. Both losses weigh 1.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from huggingface_hub import constants
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from offbook.train.attention import KERNELS
from offbook.types import Branch, Sample

MAX_ROWS = 8


class DidNotFit(Exception):
    """The device's memory does not hold this step."""


class PreparedTrainer(SDPOTrainer):
    """Batches come as they are trained on: nothing is generated."""

    def _prepare_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


@dataclass(frozen=True)
class Part:
    """A micro-batch of TRL's, and how many of its kind the step averages over."""

    inputs: dict[str, Tensor]
    distillation_weight: float
    count: int

    def __str__(self) -> str:
        rows, completion = self.inputs["completion_ids"].shape
        kind = "target" if self.distillation_weight else "rollout"
        return f"{rows} x {self.inputs['prompt_ids'].shape[1]} + {completion} tokens of a {kind}"


class SdpoStep:
    """`step` takes the weights of `model` one optimizer step further. The model's attention is set to sdpa for good."""

    def __init__(
        self,
        model: PreTrainedModel,
        samples: list[Sample],
        with_targets: bool,
        recompute_every: int = 1,
        learning_rate: float = 1e-6,
    ):
        model.set_attn_implementation("sdpa")
        self.folder = tempfile.TemporaryDirectory()
        self.trainer = _trainer(model, self.folder.name, learning_rate)
        self.trainer.create_optimizer()
        if recompute_every:
            model.gradient_checkpointing_enable(every_n_layers=recompute_every)
        else:
            model.gradient_checkpointing_disable()
        self.parts = _parts([_rollout(sample) for sample in samples], 0.0, model.device)
        if with_targets:
            targets = [_target(sample, branch) for sample in samples for branch in sample.branches]
            self.parts += _parts(targets, 1.0, model.device)

    def step(self) -> None:
        trainer, model = self.trainer, self.trainer.model
        for part in self.parts:
            self._backward(part)
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    def _backward(self, part: Part) -> None:
        trainer, trouble = self.trainer, ""
        trainer.args.distillation_weight = part.distillation_weight
        trainer.current_gradient_accumulation_steps = part.count
        try:
            with sdpa_kernel(KERNELS, set_priority=True):
                trainer.training_step(trainer.model, part.inputs, None)
        except torch.OutOfMemoryError as error:
            trouble = str(error).split(". GPU")[0]
        if trouble:  # raised out here, where no traceback holds on to the tensors
            trainer.model.zero_grad()
            raise DidNotFit(f"{part}: {trouble}")


def _trainer(model: PreTrainedModel, folder: str, learning_rate: float) -> PreparedTrainer:
    constants.HF_HUB_DISABLE_TELEMETRY = True
    settings = SDPOConfig(
        output_dir=folder,
        bf16=False,
        gradient_checkpointing=True,
        learning_rate=learning_rate,
        max_grad_norm=1.0,
        per_device_train_batch_size=MAX_ROWS,
        num_generations=1,
        distillation_mode="full_logits",
        distillation_alpha=0.0,
        distillation_is_clip=None,
        teacher_model_kind="live",
        report_to="none",
        disable_tqdm=True,
    )
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    unused = Dataset.from_dict({"prompt": [""] * MAX_ROWS})
    return PreparedTrainer(
        model, reward_funcs=_no_reward, args=settings, train_dataset=unused, processing_class=tokenizer
    )


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("nothing is generated here, so nothing is rewarded")


def _rollout(sample: Sample) -> dict[str, list[Any]]:
    start = next(place for place, weight in enumerate(sample.rl_weight) if weight)
    num_sampled = sum(weight != 0 for weight in sample.rl_weight)
    share = num_sampled / (len(sample.ids) - start)  # TRL divides by all tokens of the completion
    pairs = zip(sample.advantage[start:], sample.rl_weight[start:], strict=True)
    return {
        "prompt_ids": sample.ids[:start],
        "completion_ids": sample.ids[start:],
        "advantages": [advantage * weight / share for advantage, weight in pairs],
        "old_per_token_logps": sample.logprobs[start:],
    }


def _target(sample: Sample, branch: Branch) -> dict[str, list[Any]]:
    assert branch.weight == 1.0
    ((start, end),) = branch.spans
    return {
        "prompt_ids": sample.ids[:start],
        "completion_ids": sample.ids[start:end],
        "teacher_input_ids": [*sample.ids[: branch.insert], *branch.inserted, *sample.ids[branch.insert : end]],
    }


def _parts(rows: list[dict[str, list[Any]]], distillation_weight: float, device: torch.device) -> list[Part]:
    alike: dict[Hashable, list[dict[str, list[Any]]]] = defaultdict(list)
    for row in rows:
        alike[tuple(len(values) for values in row.values())].append(row)
    batches = [group[k : k + MAX_ROWS] for group in alike.values() for k in range(0, len(group), MAX_ROWS)]
    return [Part(_tensors(batch, device), distillation_weight, len(batches)) for batch in batches]


def _tensors(batch: list[dict[str, list[Any]]], device: torch.device) -> dict[str, Tensor]:
    inputs = {name: torch.tensor([row[name] for row in batch], device=device) for name in batch[0]}
    for name, mask in (
        ("prompt_ids", "prompt_mask"),
        ("completion_ids", "completion_mask"),
        ("teacher_input_ids", "teacher_attention_mask"),
    ):
        if name in inputs:
            inputs[mask] = torch.ones_like(inputs[name])
    if "teacher_input_ids" in inputs:
        inputs["self_distillation_mask"] = torch.ones(len(batch), device=device)
    return inputs
