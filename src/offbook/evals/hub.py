"""Push a run's newest checkpoint to the hub, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_origin

import tomli_w
from pydantic import BaseModel

import offbook
from offbook.core.config import Config, load_config
from offbook.core.runfolder import RunFolder, base_named, is_adapter, latest_checkpoint
from offbook.evals.tables import markdown, result_cells
from offbook.types import OffbookError

SHOWN = ("seed", "harness", "engine", "train", "feedback", "rewards")  # of the configuration
FILES = [
    *("config.json", "generation_config.json", "special_tokens_map.json", "token*", "*.jinja"),
    *("model*.safetensors*", "adapter_*"),
]


def push(folder: RunFolder, name: str) -> str:
    """One commit of weights, tokenizer and card, without the optimizer. Returns its URL."""
    from httpx2 import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError

    checkpoint = latest_checkpoint(folder)
    if is_adapter(checkpoint) and Path(base := base_named(checkpoint)).is_dir():
        whole = f"`offbook export {folder.path} --merged --out FOLDER` makes one model of the two"
        raise OffbookError(f"the adapter's base is the folder {base}, which exists only on this machine; {whole}")
    files = sorted({path for pattern in FILES for path in checkpoint.glob(pattern)})
    changes = [CommitOperationAdd(path.name, path) for path in files]
    changes.append(CommitOperationAdd("README.md", card(folder, checkpoint).encode()))
    try:
        hub = HfApi()
        url = hub.create_repo(name, exist_ok=True)
        hub.create_commit(name, changes, commit_message=f"{checkpoint.name} of {folder.path.name}, by offbook")
    except (HTTPError, HFValidationError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        status = getattr(getattr(error, "response", None), "status_code", 401 if "token" in reason.lower() else 0)
        way_out = "; `hf auth login` or HF_TOKEN says who you are" if status in (401, 403) else ""
        raise OffbookError(f"cannot push to {name}: {reason}{way_out}") from None
    return str(url)


def card(folder: RunFolder, checkpoint: Path) -> str:
    config = load_config([folder.config_file], {})
    step = int(checkpoint.name.removeprefix("step_"))
    measured = folder.read_eval("final")
    table = markdown(result_cells(measured)) if measured else "It was not evaluated: `offbook eval` does that.\n"
    is_id = config.model.count("/") == 1 and not Path(config.model).exists()  # else the hub would look for it
    front = [
        f"library_name: {'peft' if is_adapter(checkpoint) else 'transformers'}",
        "tags: [offbook, reinforcement-learning]",
    ]
    front += [f"base_model: {config.model}"] if is_id else []
    return "\n".join(
        [
            "---",
            *front,
            "---",
            f"# {folder.path.resolve().name}",
            "",
            f"Trained with offbook {offbook.__version__}.",
            "",
            f"- Base model: `{config.model if is_id else Path(config.model).name}`",
            f"- Method: {_method(config)}",
            f"- Tasks: `{Path(config.tasks.source).name}`",
            f"- Steps: {step}, each of {config.train.groups} tasks x {config.train.group_size} rollouts",
            "",
            "## Held-out tasks",
            "",
            table,
            "## Configuration",
            "",
            f"```toml\n{tomli_w.dumps({name: public(config)[name] for name in SHOWN})}```",
            "",
        ]
    )


def public(section: BaseModel) -> dict[str, Any]:
    """Config values safe to publish: numbers, switches, fixed choices. Free text may hold paths, hosts or keys."""
    said: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        is_choice = isinstance(value, str) and get_origin(field.annotation) is Literal
        is_weights = isinstance(value, dict) and all(isinstance(weight, float) for weight in value.values())
        if isinstance(value, BaseModel):
            said |= {name: inner} if (inner := public(value)) else {}
        elif isinstance(value, (int, float)) or is_choice or is_weights:
            said[name] = value
    return said


def _method(config: Config) -> str:
    if not config.feedback.weight:
        return "RL alone"
    return f"RL with {config.feedback.method} hints of weight {config.feedback.weight:g}"
