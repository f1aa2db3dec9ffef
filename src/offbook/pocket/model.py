"""The pocket model: a tokenizer trained on the tasks, a small transformer, a minute of imitation.

The model is too small for threads inside operations. So two threads take half of every step each: gradients first, then
the optimizer. There are always two, so a seed gives the same weights on any number of cores.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from offbook.agent.chat import BLOCK_END, BLOCK_START, CALL_END, CALL_START
from offbook.agent.harness import make_toolset
from offbook.agent.harness.toolsets import prompt
from offbook.core.config import TrainConfig
from offbook.core.runfolder import whole_folder
from offbook.pocket.demonstrations import LEARNED, make_demonstrations
from offbook.pocket.script import Habits, Script
from offbook.pocket.tasks import draft_tasks
from offbook.signals.feedback import RULES, write_hint
from offbook.train.optim.muon import Muon
from offbook.train.optim.newton_schulz import CLASSIC
from offbook.train.optim.units import units_of
from offbook.train.schedule import GRADIENT_CLIP, learning_rate_share
from offbook.types import Sample

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the pocket model; each recipe has its own cache entry."""

    layers: int = 2
    width: int = 128
    heads: int = 8
    vocabulary: int = 1280
    episodes: int = 6000
    episodes_a_step: int = 4
    learning_rate: float = 2.5e-3
    experts: int = 0  # per layer, two active per token; 0 is a dense model
    habits: Habits = field(default_factory=Habits)


POCKET = Recipe()
POCKETS = {"pocket": POCKET, "pocket-moe": Recipe(experts=8)}  # by model name


def make_pocket(cache: Path, seed: int, progress: Callable[[str, float], None], recipe: Recipe = POCKET) -> Path:
    """The cached pocket model of this seed, made on first use. The same seed gives the same weights."""
    written = json.dumps(asdict(recipe), indent=2, sort_keys=True)
    folder = cache / f"pocket-{seed}-{hashlib.sha256(written.encode()).hexdigest()[:8]}"
    if folder.is_dir():
        return folder
    # Byte-level BPE. Words do not include the space before them, so a name is the same token everywhere and the model
    # only has to learn to copy it.
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[A-Za-z_]+|[0-9]|[^\sA-Za-z_0-9]+(?: [^\sA-Za-z_0-9]+)* ?|\n *|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[BLOCK_START, BLOCK_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(recipe, seed), trainer)
    marks = (CALL_START, CALL_END, *_phrases(recipe))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    samples = make_demonstrations(
        tokenizer, seed, recipe.episodes, recipe.habits, lambda share: progress("pocket: demonstrations", share)
    )
    torch.manual_seed(seed)
    shape = shape_of(recipe, tokenizer.get_vocab_size(), tokenizer.token_to_id(BLOCK_END))
    model = AutoModelForCausalLM.from_config(shape).to("cuda" if torch.cuda.is_available() else "cpu")
    steps = recipe.episodes_a_step, recipe.learning_rate, seed
    imitate(model, samples, *steps, lambda share: progress("pocket: imitation", share))
    transformers_logging.disable_progress_bar()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=BLOCK_END, pad_token=BLOCK_END, chat_template=CHAT_TEMPLATE
    )
    with whole_folder(folder) as part:
        model.save_pretrained(part)
        wrapped.save_pretrained(part)
        (part / "recipe.json").write_text(written + "\n")
    return folder


def _corpus(recipe: Recipe, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for draft in draft_tasks(seed=seed, count=400, split="train"):
        yield make_toolset(draft.tools, "pocket").system_prompt()
        yield draft.instruction
        yield from draft.files.values()
        script = Script(draft, rng, recipe.habits)
        yield from (script.next_message() for _ in range(4))
        yield from (write_hint(rule, draft.tools).text for rule in LEARNED)
        yield from ("system", "user", "assistant", "tool", "edited", "done", "error: there is no tool")


def _phrases(recipe: Recipe) -> Iterator[str]:
    """Fixed phrases become single tokens, which makes episodes shorter."""
    yield prompt("pocket").partition("{signatures}")[0]
    yield from ('{"name": "', '", "arguments": {')
    yield from (RULES[rule].text.partition("{tools}")[0] for rule in LEARNED)


def shape_of(
    recipe: Recipe = POCKET, vocabulary: int = POCKET.vocabulary, end: int | None = None
) -> Qwen3Config | Qwen3MoeConfig:
    experts = {"num_experts": recipe.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    experts["moe_intermediate_size"] = recipe.width
    kind, more = (Qwen3MoeConfig, experts) if recipe.experts else (Qwen3Config, {})
    return kind(
        vocab_size=vocabulary,
        hidden_size=recipe.width,
        intermediate_size=3 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.width // recipe.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=end,
        initializer_range=0.05,
        **more,
        offbook_profile="pocket",  # tool format; checkpoints inherit it
    )


WINDOW = 256  # episodes
Named = tuple[str, nn.Parameter]


def imitate(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    size: int,
    learning_rate: float,
    seed: int,
    progress: Callable[[float], None],
) -> None:
    """Train `model` on every sample once, `size` of them a step."""
    # Group samples of similar length to avoid padding; batches in random order within a window.
    rng = random.Random(seed)
    batches = []
    for start in range(0, len(samples), WINDOW):
        part = sorted(samples[start : start + WINDOW], key=lambda sample: len(sample.ids))
        inside = [part[place : place + size] for place in range(0, len(part), size)]
        batches += rng.sample(inside, len(inside))
    settings = TrainConfig(steps=len(batches), learning_rate=learning_rate, schedule="cosine", warmup_steps=20)
    how: dict[str, Any] = {"lr": learning_rate, "method": CLASSIC, "scale": 7.0, "weight_decay": 0.01}
    halves: tuple[list[Named], list[Named]] = [], []  # both with about as much to orthogonalize
    for number, named in enumerate(sorted(model.named_parameters(), key=lambda named: named[1].shape)):
        halves[number % 2].append(named)
    optimizers = [Muon(half, units_of(half), **how) for half in halves]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters = list(model.parameters())
    with ThreadPoolExecutor(2, "imitation", torch.set_num_threads, (1,)) as threads:
        for step, batch in enumerate(batches, start=1):
            count = sum(sum(map(bool, sample.ce_weight[1:])) for sample in batch)
            # The sum of two gradients is the same whichever comes first; with three it would not be.
            _finish([threads.submit(_backward, model, half, count) for half in (batch[::2], batch[1::2]) if half])
            _finish([threads.submit(nn.utils.clip_grad_norm_, parameters, GRADIENT_CLIP)])
            for group in groups:
                group["lr"] = learning_rate * learning_rate_share(settings, step, final_share=0.0)
            _finish([threads.submit(optimizer.step) for optimizer in optimizers])
            model.zero_grad()
            progress(step / len(batches))


def _finish(work: list[Future[Any]]) -> None:
    for each in work:
        each.result()


def _backward(model: PreTrainedModel, samples: Sequence[Sample], count: int) -> None:
    """Accumulate the gradient of these samples; `count` is the number of predicted tokens in the step."""
    ids_BT = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True).to(model.device)
    weight_BT = pad_sequence([torch.tensor(sample.ce_weight) for sample in samples], batch_first=True).to(model.device)
    hidden_BTD = model.model(
        input_ids=ids_BT, use_cache=False
    ).last_hidden_state  # padding comes last and attention is causal
    kept_BT = weight_BT[:, 1:] != 0
    logits_NV = model.lm_head(hidden_BTD[:, :-1][kept_BT])
    loss_N = cross_entropy(logits_NV, ids_BT[:, 1:][kept_BT], reduction="none")
    ((loss_N * weight_BT[:, 1:][kept_BT]).sum() / count).backward()
