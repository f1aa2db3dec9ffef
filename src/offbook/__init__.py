"""offbook: post-train a coding agent until it no longer needs the hint."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def frames(run: Any, library: Any = None) -> Any:
    """A run as data frames: `.rollouts`, `.messages`, `.targets`, in pandas or polars. See offbook.evals.frames."""
    return import_module("offbook.evals.frames").frames(run, library)
