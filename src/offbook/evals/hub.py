"""Push a run's newest checkpoint to the hub, with a model card."""

from __future__ import annotations

from pathlib import Path
from string import Template

import offbook
from offbook.core.config import load_config
from offbook.core.runfolder import RunFolder, base_named, is_adapter, latest_checkpoint
from offbook.evals.tables import markdown, result_cells
from offbook.types import OffbookError

FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "token*", "*.jinja")
WEIGHTS = ("model*.safetensors*", "adapter_*")
CARD = Template("""\
---
library_name: $library
tags: [offbook, reinforcement-learning]
$front---
# $name

Trained with offbook $version.

- Base model: `$base`
- Method: $method
- Tasks: `$tasks`
- Steps: $steps, each of $groups tasks x $group_size rollouts

## Held-out tasks

$measured""")


def push(folder: RunFolder, name: str) -> str:
    """One commit of weights, tokenizer and card, without the optimizer. Returns its URL."""
    from httpx2 import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError

    checkpoint = latest_checkpoint(folder)
    if is_adapter(checkpoint) and Path(base := base_named(checkpoint)).is_dir():
        whole = f"`offbook export {folder.path} --merged --out FOLDER` makes one model of the two"
        raise OffbookError(f"the adapter's base is the folder {base}, which exists only on this machine; {whole}")
    files = sorted({path for pattern in (*FILES, *WEIGHTS) for path in checkpoint.glob(pattern)})
    changes = [CommitOperationAdd(path.name, path) for path in files]
    changes.append(CommitOperationAdd("README.md", card(folder, checkpoint).encode()))
    try:
        hub = HfApi()
        url = hub.create_repo(name, exist_ok=True)
        hub.create_commit(name, changes, commit_message=f"{checkpoint.name} of {folder.path.name}, by offbook")
    except (HTTPError, HFValidationError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise OffbookError(f"cannot push to {name}: {reason}; `hf auth login` or HF_TOKEN says who you are") from None
    return str(url)


def card(folder: RunFolder, checkpoint: Path) -> str:
    config = load_config([folder.config_file], {})
    measured = folder.read_eval("final")
    hints = f"RL with {config.feedback.method} hints of weight {config.feedback.weight:g}"
    is_id = config.model.count("/") == 1 and not Path(config.model).exists()  # else the hub would look for it
    return CARD.substitute(
        library="peft" if is_adapter(checkpoint) else "transformers",
        front=f"base_model: {config.model}\n" if is_id else "",
        name=folder.path.resolve().name,
        version=offbook.__version__,
        base=config.model if is_id else Path(config.model).name,
        method=hints if config.feedback.weight else "RL alone",
        tasks=Path(config.tasks.source).name,
        steps=int(checkpoint.name.removeprefix("step_")),
        groups=config.train.groups,
        group_size=config.train.group_size,
        measured=markdown(result_cells(measured)) if measured else "It was not evaluated: `offbook eval` does that.\n",
    )
