"""Context extension: RoPE scaling, written into the model's config.json.

    abf    a larger base: theta' = theta * s ** (d / (d - 2)) for s times the positions and heads of width d
           (2309.16039; the exponent is that of NTK-aware scaling, by which the slowest rotation is stretched s times)
    yarn   slow rotations are interpolated, fast ones are left alone, logits are scaled (2309.00071)

transformers and vLLM load models trained with either.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from offbook.core.runfolder import is_adapter, whole_folder
from offbook.rl.models import chat_folder
from offbook.types import OffbookError

PLAIN = "default"  # transformers' name for unscaled RoPE


def extended(start: Path, folder: Path, context: int, rope: str, tell: Callable[[str], None]) -> Path:
    """The model's folder, or a new one with the same weights and a context of `context` tokens."""
    config = AutoConfig.from_pretrained(chat_folder(start), trust_remote_code=False)
    known = config.get_text_config().max_position_embeddings
    if context <= known:
        return start
    if not rope:
        raise OffbookError(
            f"pretrain.context is {context} and the model reads {known} tokens; give a shorter one, or --pretrain.rope "
            "yarn or abf"
        )
    if is_adapter(start):
        raise OffbookError(f"{start} is an adapter, and positions are its base's; first: offbook export --merged")
    if not folder.is_dir():
        stretch(config.get_text_config(), context, rope)
        with whole_folder(folder) as part:
            for file in start.iterdir():
                if file.suffix == ".safetensors":
                    os.symlink(file.resolve(), part / file.name)
                elif file.is_file() and file.name != "DONE":
                    shutil.copyfile(file, part / file.name)
            config.save_pretrained(part)
    tell(f"positions are stretched by {rope} from {known} to {context}")
    return folder


def stretch(config: PreTrainedConfig, context: int, rope: str) -> None:
    known, old = config.max_position_embeddings, dict(config.rope_parameters or {})
    if old.get("rope_type", PLAIN) != PLAIN:
        raise OffbookError(f"its positions are stretched already ({old['rope_type']}); start from what it was before")
    factor = context / known
    if rope == "yarn":
        more = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": known}
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        more = {"rope_theta": old.get("rope_theta", 10_000.0) * factor ** (width / (width - 2))}
    config.rope_parameters = {**old, **more}
    config.max_position_embeddings = context
