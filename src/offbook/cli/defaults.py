"""What suits a model, where neither a file nor the command line says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

# Config's own defaults fit the pocket model. What fits a model that reads and writes English:
SPACIOUS = {
    "harness.profile": "standard",
    "harness.turns": "30",
    "harness.tokens": "131072",
    "harness.context": "32768",
    "harness.message_tokens": "2048",
    "harness.summarize_at": "24576",
    "harness.summary_tokens": "2048",
    "harness.command_s": "60",
    "harness.wall_s": "3600",
    "train.learning_rate": "1e-6",
    "feedback.weight": "1",
    "feedback.rules": "[]",
}
# A model behind a URL keeps its tokenizer to itself, so its conversation is counted in bytes here.
REMOTE = {
    **SPACIOUS,
    "harness.tokens": "2000000",
    "harness.context": "400000",
    "harness.summarize_at": "320000",
    "harness.summary_tokens": "8192",
}
# And one that is too small to go by descriptions of tools: it copies worked turns.
SMALL = {
    **SPACIOUS,
    "harness.profile": "worked",
    "harness.turns": "10",
    "harness.context": "4096",
    "harness.message_tokens": "256",
    "harness.summarize_at": "3072",
    "harness.summary_tokens": "256",
    "engine.temperature": "0.2",
}


def suited(model: str) -> dict[str, str]:
    """Checkpoints of the pocket model say that they are."""
    described = Path(model) / "config.json"
    if model == "pocket" or (described.is_file() and "offbook_profile" in json.loads(described.read_text())):
        return {}
    if model.startswith(("http://", "https://")):
        return REMOTE
    return SMALL if model == "smollm2-135m" else SPACIOUS
