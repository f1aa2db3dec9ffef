"""Programs that the rollouts of the catalogue write or run, from programs.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace


def programs(module: str) -> SimpleNamespace:
    """Those of one module of cases, by name."""
    return SimpleNamespace(**tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[module])
