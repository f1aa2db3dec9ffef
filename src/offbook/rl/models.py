"""From a model's name to its folder: `pocket` is made on the spot, hub ids are downloaded."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import httpx2
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from offbook.agent.chat import Chat, byte_chat, chat_for
from offbook.core.config import Config, Precision, cache_folder, is_url, shipped_models
from offbook.core.routers import Mixture, mixture_of
from offbook.core.runfolder import ADAPTER, base_named, checkpoint_named, is_adapter, whole_folder
from offbook.core.weights import Weights
from offbook.pocket.model import POCKETS, make_pocket, shape_of
from offbook.rl.checks import SMOLLM2, Progress, pocket_cache, quiet, refuse_missing_model
from offbook.train.checkpoint import copy_tokenizer
from offbook.train.forward import sharing_copy
from offbook.train.lora import (
    DIALECT,
    DIALECT_FILE,
    adapter_of,
    load_adapter,
    make_trainable,
    merged,
    refuse_unusable,
    stored_adapter,
)
from offbook.train.parallel.sharding import put
from offbook.types import OffbookError

HUB_S = 10.0  # for the hub to say that it is there
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def model_folder(name: str, seed: int, progress: Progress = quiet) -> Path:
    """The local folder of a named model; `pocket` and `pocket-moe` are made if they are missing. A run folder stands
    for its newest checkpoint."""
    if name in POCKETS:
        return make_pocket(pocket_cache(), seed, progress, POCKETS[name])
    if name and Path(name).is_dir():
        return Path(checkpoint_named(name))
    return _named_on_hub(SMOLLM2_HUB if name == SMOLLM2 else name)


def described(name: str) -> PreTrainedConfig:
    """The shape of a model as its config.json has it, which ships with offbook for common models. No weight is read,
    downloaded or made."""
    if name in POCKETS:
        return shape_of(POCKETS[name])
    name = SMOLLM2_HUB if name == SMOLLM2 else name
    shipped = shipped_models()
    if name in shipped and not Path(name).exists():
        known: PreTrainedConfig = AutoConfig.for_model(**shipped[name])
        return known
    place = Path(checkpoint_named(name)) if name and Path(name).exists() else _named_on_hub(name, config_alone=True)
    if is_adapter(place):
        refuse_unusable(place)
        return described(base_named(place))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OffbookError(f"cannot read what {name} is: {str(error).splitlines()[0]}") from None
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder or is_encoder:
        what = f"{name} is a model of the kind {config.model_type}, which is no causal language model"
        raise OffbookError(f"{what}: it cannot write messages; give another, as in Qwen/Qwen3-0.6B")
    return config


def local_or_remote(model: str, remote_name: str, seed: int, progress: Progress = quiet) -> Path | None:
    """A model's folder; None where it is behind a URL, which has to carry no password: run folders keep it."""
    if not is_url(model):
        return model_folder(model, seed, progress)
    if "@" in model.partition("://")[2].partition("/")[0]:
        raise OffbookError("the URL has a password in it; give the key in the variable OPENAI_API_KEY instead")
    if not remote_name:
        raise OffbookError("a URL may serve several models; say which with --name")
    return None


def load_model(folder: Path, precision: Precision | Literal["auto"] = "float32", device: str = "") -> PreTrainedModel:
    """On the GPU, if there is one, in the precision that is asked for, whatever its files are in.

    An adapter's folder stands for its base with the adapter in it.
    """
    if is_adapter(folder):
        model = load_model(base_folder(folder), precision, device)
        load_adapter(model, folder)
        return model
    if not (folder / "config.json").is_file():
        raise OffbookError(f"{folder} has no config.json, so it is not a model folder")
    transformers_logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=precision, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(info["missing_keys"]):  # they would be random
        raise OffbookError(f"{folder} lacks {len(missing)} of the model's tensors: {', '.join(missing[:3])} ...")
    return model.to(device or _best_device()).eval()


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def base_folder(adapter: Path) -> Path:
    name = base_named(adapter)
    try:
        return model_folder(name, 0)
    except OffbookError as error:
        way_out = f"write where it is into base_model_name_or_path of {adapter / ADAPTER}"
        raise OffbookError(f"the base of the adapter {adapter} cannot be loaded ({error}); {way_out}") from None


def chat_folder(model: Path) -> Path:
    """Where a model's tokenizer and configuration are: an adapter's are its base's."""
    return base_folder(model) if is_adapter(model) else model


def trained_dialect(model: Path) -> str:
    """The call dialect that a checkpoint was trained with; auto if it does not say."""
    for path in (model / DIALECT_FILE, chat_folder(model) / "config.json"):
        if path.is_file() and (found := json.loads(path.read_text()).get(DIALECT)):
            return str(found)
    return "auto"


def chat_of(model: Path | None, config: Config) -> Chat:
    """The chat that a configuration has with a model.

    The ids of a model behind a URL stay there: its record, in bytes, is for reading and not for training.
    """
    profile = config.harness.profile
    if model is None:
        return byte_chat("bash" if profile == "bash" else "hermes")
    return model_chat(model, profile, config.harness.dialect)


def model_chat(model: Path, profile: str, dialect: str) -> Chat:
    """The chat of a model's folder. The profile `bash` has calls of its own, whatever the model's are."""
    if profile == "bash":
        dialect = "bash"
    elif dialect == "auto":
        dialect = trained_dialect(model)
    return chat_for(chat_folder(model), dialect)


def model_to_train(config: Config, start: Path, device: str = "") -> PreTrainedModel:
    """With the adapter that is trained, if one is."""
    model = load_model(start, config.train.precision, device)
    is_hub_id = not Path(config.model).exists() and config.model.count("/") == 1
    make_trainable(model, config.train.lora, config.model if is_hub_id else str(start.resolve()), config.seed)
    dialect = config.harness.dialect if config.harness.dialect != "auto" else trained_dialect(start)
    if dialect != "auto":  # checkpoints inherit it
        setattr(model.config, DIALECT, dialect)
    return model


def model_to_sample(config: Config, start: Path, trained: PreTrainedModel) -> PreTrainedModel | None:
    """For a local engine with a trainer of an adapter, before that begins; None where the engine is another. In one
    precision, and in one place, the two share the base."""
    if config.engine.kind == "vllm" or adapter_of(trained) is None:
        return None
    if config.engine.precision == config.train.precision and trained.device.type == _best_device():
        return sharing_copy(trained)
    model = load_model(start, config.engine.precision)
    make_trainable(model, config.train.lora, "", config.seed)
    return model


def load_weights(model: PreTrainedModel, checkpoint: Path, base: str = "") -> None:
    """Those of a checkpoint into the model that it is of; `base`: what an adapter of it is on, if that is known."""
    if is_adapter(checkpoint):
        load_adapter(model, checkpoint, base)
    else:  # by way of the host: a GPU may have no room for a second model
        precision: Precision = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
        stored = load_model(checkpoint, precision, "cpu").state_dict()
        for name, tensor in model.state_dict().items():
            put(tensor, stored[name])


def weights_in(checkpoint: Path, version: int) -> Weights:
    """As an engine takes them."""
    if is_adapter(checkpoint):
        return replace(stored_adapter(checkpoint), version=version)
    return Weights(version, load_model(checkpoint, "auto", "cpu").state_dict())


def write_merged(checkpoint: Path, out: Path) -> None:
    """An adapter and its base as one model, in the precision that the base is stored in."""
    if not is_adapter(checkpoint):
        raise OffbookError(f"{checkpoint} holds all weights, not an adapter: there is nothing to merge")
    if out.exists():
        raise OffbookError(f"{out} is there already; give another --out")
    model = merged(load_model(base_folder(checkpoint), "auto", "cpu"), checkpoint)
    if (dialect := trained_dialect(checkpoint)) != "auto":
        setattr(model.config, DIALECT, dialect)
    with whole_folder(out) as part:
        model.save_pretrained(part)
        copy_tokenizer(chat_folder(checkpoint), part)


def positions(folder: Path) -> int:
    """How many tokens the model in this folder can read."""
    found: int = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().max_position_embeddings
    return found


def mixture_in(folder: Path) -> Mixture | None:
    """What is known of its experts, if it has any."""
    return mixture_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def _named_on_hub(name: str, config_alone: bool = False) -> Path:
    """A model that the hub's cache on this machine has is taken from there and not looked up again. So its config.json
    alone must not get there: it would look like the whole."""
    refuse_missing_model(name)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    files = ["*.json", "*.safetensors", "*.jinja"]
    try:
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, allow_patterns=files, local_files_only=True))
        HfApi().model_info(name, timeout=HUB_S)  # snapshot_download waits for a silent server without end
        if config_alone:
            apart = cache_folder() / "described" / name
            return Path(snapshot_download(name, allow_patterns=["config.json"], local_dir=apart))
        return Path(snapshot_download(name, allow_patterns=files))
    except (httpx2.HTTPError, HFValidationError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OffbookError(f"there is no folder {name}, and the hub does not give it: {reason}") from None
