"""Rephrased hints per rule (wordings.toml), so that a model learns the rule and not its wording."""

from __future__ import annotations

import tomllib
from pathlib import Path

WORDINGS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text())
