"""From names in a configuration to things: a model folder, tasks, a cache."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

import offbook
from offbook.config import Config, cache_folder
from offbook.pocket.model import make_pocket
from offbook.tasks import load_tasks, make_pocket_tasks
from offbook.types import OffbookError, Task

Progress = Callable[[str, float], None]  # what is being done, and how much of it is done (0 to 1)


def quiet(what: str, share: float) -> None:
    """Progress for nobody."""


def _pocket_cache() -> Path:
    """What is made on the spot depends on the code that makes it: changed code makes it anew."""
    package = Path(offbook.__file__).parent
    digest = hashlib.sha256((package / "tokens.py").read_bytes())
    for room in ("algo", "feedback", "harness", "pocket", "sandbox", "tasks", "train"):
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.read_bytes())
    return cache_folder() / digest.hexdigest()[:12]


def model_folder(name: str, seed: int, progress: Progress = quiet) -> Path:
    """A local folder with the named model; `pocket` is made if it is not there yet."""
    if name == "pocket":
        return make_pocket(_pocket_cache(), seed, progress)
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise OffbookError(f"there is no model folder {name}; give `pocket`, a folder or a hub id (Qwen/Qwen3-0.6B)")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OffbookError(f"cannot get the model {name} from the hub: {str(error).splitlines()[0]}") from None


def load_model(folder: Path) -> PreTrainedModel:
    """Float32 on a CPU, where half precision is many times slower; bfloat16 weights are widened."""
    if not (folder / "config.json").is_file():
        raise OffbookError(f"{folder} has no config.json, so it is not a model folder")
    transformers_logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return model


@dataclass(frozen=True, slots=True)
class TaskSets:
    train: list[Task]
    heldout: list[Task]


def refuse_missing_tasks(config: Config) -> None:
    """Before minutes go into a model: is the task folder there?"""
    if config.tasks.source != "pocket" and not Path(config.tasks.source).is_dir():
        raise OffbookError(f"there is no task folder {config.tasks.source}")


def task_sets(config: Config, progress: Progress = quiet) -> TaskSets:
    """The train and held-out tasks of a configuration; pocket tasks are made and verified if they are not there yet."""
    root = Path(config.tasks.source)
    if config.tasks.source == "pocket":
        wanted = config.tasks.num_train, config.tasks.num_heldout
        root = _pocket_cache() / f"tasks-{config.seed}-{wanted[0]}-{wanted[1]}"
        if not root.is_dir():
            asyncio.run(make_pocket_tasks(root, config.seed, *wanted, lambda share: progress("making tasks", share)))
    return TaskSets(load_tasks(root / "train"), load_tasks(root / "heldout"))
