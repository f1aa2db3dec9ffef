"""Low-rank adapters (LoRA, Hu et al., 2021) through peft, put into the layers of the model itself.

The model's layers run with their adapters, and what is trained is what requires gradients. A folder in PEFT's format
holds an adapter alone and names its base. Beside its tensors is a fingerprint of the base, so that an adapter is not
put on another model of the same shape.

Left out: dropout, which would make the teacher's pass another function than the student's, and what is trained another
policy than what sampled; adapters on embeddings, which a head that is tied to them would get by merging and not before;
several adapters at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbook.core.adapters import NAME, adapter_tensors
from offbook.core.config import LoraConfig
from offbook.core.weights import Weights
from offbook.train.parallel.sharding import put
from offbook.types import OffbookError

WEIGHTS = "adapter_model.safetensors"
BASE = "offbook_base"  # in the metadata of the tensors: the fingerprint of their base
DIALECT = "offbook_dialect"  # in a model's config.json: the call dialect that it was trained with
DIALECT_FILE = "offbook.json"  # the same of an adapter, which has no config.json
ON_LINEAR = "only adapters on linear layers are supported"
OTHERS = re.compile(r"lora_embedding_|\.experts\.(base_layer\.)*lora_")  # on embeddings, on fused experts
SAMPLED = 64  # entries of each parameter that make the fingerprint


def adapter_of(model: PreTrainedModel) -> Any | None:
    """The settings of the adapter in a model, as peft has them."""
    return (getattr(model, "peft_config", None) or {}).get(NAME)  # which peft sets, on whatever it is given


def make_trainable(model: PreTrainedModel, settings: LoraConfig, base: str, seed: int) -> None:
    """A fresh adapter or, where the model came with one, that: it alone is trained. Without either all weights are."""
    before = adapter_of(model)
    if before is not None:
        if settings.rank not in (0, before.r):
            raise ValueError(f"train.lora.rank is {settings.rank} and that of the model's adapter {before.r}")
        return
    if not settings.rank:
        return
    from peft import LoraConfig as PeftLoraConfig

    linear = {name.rpartition(".")[2] for name, one in model.base_model.named_modules() if isinstance(one, nn.Linear)}
    embeddings = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Embedding)}
    if wrong := embeddings & {name.rpartition(".")[2] for name in settings.targets}:
        raise OffbookError(f"train.lora cannot be put on {', '.join(sorted(wrong))}: {ON_LINEAR}")
    wanted = PeftLoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=sorted(settings.targets or linear),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _inject(model, wanted, f"train.lora cannot be put on {', '.join(settings.targets)}")


def _inject(model: PreTrainedModel, settings: Any, problem: str) -> None:
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(settings, model, NAME)
    except ValueError as error:
        raise OffbookError(f"{problem}: {str(error).splitlines()[0]}") from None
    if not isinstance(settings.target_modules, str):  # that is an expression
        settings.target_modules = sorted(settings.target_modules)  # a set is written in another order every time


def save_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path, base: str = "") -> None:
    """The adapter of `model`, as PEFT, transformers and vLLM read it. `base` is the fingerprint, for a sharded model,
    which cannot compute it."""
    settings = adapter_of(model)
    assert settings is not None
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    if dialect := model.config.to_dict().get(DIALECT):
        (folder / DIALECT_FILE).write_text(json.dumps({DIALECT: dialect}) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={BASE: base or fingerprint(model)},
    )


def stored_adapter(folder: Path) -> Weights:
    """As an engine takes it that has the base."""
    refuse_unusable(folder)
    return Weights(0, load_file(folder / WEIGHTS), json.loads((folder / "adapter_config.json").read_text()))


def load_adapter(model: PreTrainedModel, folder: Path, base: str = "") -> None:
    """An adapter's values into its base, or into a model that has the same one with other values. `base`: as above."""
    another = f"{folder} is an adapter of another model than {model.name_or_path}"
    _refuse_other_base(model, folder, base)
    if adapter_of(model) is None:
        from peft import PeftConfig

        settings = PeftConfig.from_pretrained(str(folder))
        settings.inference_mode = False  # or it could not be trained on
        settings.lora_dropout = 0.0
        _inject(model, settings, another)
    own = adapter_tensors(model)
    stored = load_file(folder / WEIGHTS)
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in stored.items()}:
        raise OffbookError(f"{another}: their shapes differ")
    for name, tensor in stored.items():
        put(own[name], tensor)


def refuse_unusable(folder: Path) -> str:
    """Without its base, and before that is loaded. Returns the base's fingerprint."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            base = (file.metadata() or {}).get(BASE, "")
            others = [name for name in file.keys() if OTHERS.search(name)]  # noqa: SIM118 - it is no dict
    except FileNotFoundError:
        raise OffbookError(f"the adapter {folder} has no {WEIGHTS}, so its weights are missing") from None
    except (OSError, SafetensorError) as error:
        problem = str(error).splitlines()[0]
        raise OffbookError(f"{folder / WEIGHTS} cannot be read ({problem}); copy the adapter again") from None
    kind = json.loads((folder / "adapter_config.json").read_text()).get("peft_type")
    if kind != "LORA":
        raise OffbookError(f"{folder} is an adapter of the kind {kind}; only LoRA is known here")
    if others:
        raise OffbookError(f"{folder} cannot be used, since it is on {others[0]}: {ON_LINEAR}")
    return base


def _refuse_other_base(model: PreTrainedModel, folder: Path, known: str = "") -> None:
    """Adapters from elsewhere do not say what their base was."""
    base = refuse_unusable(folder)
    if base and base != (known or fingerprint(model)):
        raise OffbookError(f"{folder} is an adapter of another model than {model.name_or_path}: their weights differ")


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Of the base: some entries of every weight, rounded to bfloat16, so that it is the same in either precision."""
    named = {name.replace(".base_layer", ""): value for name, value in model.named_parameters() if "lora_" not in name}
    digest = hashlib.sha256("\n".join([model.config.model_type, *sorted(named)]).encode())
    parts = []
    for _, value in sorted(named.items()):
        flat = value.detach().flatten()
        parts.append(flat[:: max(1, len(flat) // SAMPLED)][:SAMPLED].bfloat16())
    digest.update(torch.cat(parts).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A base with an adapter added to its weights: a model that knows nothing of adapters."""
    from peft import PeftModel

    _refuse_other_base(base, folder)
    try:
        return PeftModel.from_pretrained(base, str(folder)).merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise OffbookError(f"the adapter {folder} cannot be merged into {base.name_or_path}: {problem}") from None
