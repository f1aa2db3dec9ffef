"""What rollouts in a folder are of. Others may join them only if they are of the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbook.config import Config
from offbook.types import Task

DECIDES = ("seed", "harness", "sandbox", "engine", "rewards", "monitors", "eval")  # of a configuration


def claim_of(config: Config, model: Path | None, remote_name: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """The model in its folder or, without one, behind its URL; its weights, the tasks, and how they are worked on."""
    settings = config.model_dump()
    return {
        "model": f"{config.model} {remote_name}" if model is None else str(model),
        "weights": "" if model is None else _fingerprint(model),
        "tasks": hashlib.sha256("".join(map(_task_fingerprint, tasks)).encode()).hexdigest(),
        **{key: settings[key] for key in DECIDES},
        **({"tools": settings["tools"]} if config.tools.add or config.tools.files else {}),
    }


def differing(before: Mapping[str, Any], claim: Mapping[str, Any]) -> list[str]:
    return [key for key in {**claim, **before} if before.get(key) != claim.get(key)]


def _fingerprint(model: Path) -> str:
    """Of the files by size and time: weights are too large to be read for this."""
    files = sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json", ".bin", ".jinja"))
    told = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _task_fingerprint(task: Task) -> str:
    settings = (task.folder / "task.toml").read_bytes()
    return hashlib.sha256(settings + task.instruction.encode()).hexdigest()
