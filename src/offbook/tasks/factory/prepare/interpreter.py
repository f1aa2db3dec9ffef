"""The Python that a repository runs on: offbook's own, one by path, or one by version where this machine has it.

None is downloaded. By version it is looked for on the PATH, then among pyenv's and uv's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment

from offbook.tasks.factory.prepare.source import run_quietly
from offbook.types import OffbookError

ASK_S = 30.0
# What requirements are chosen by, of the interpreter itself and not of the virtual environment it may be in.
ASK = """
import json, os, platform, sys
print(json.dumps({
    "path": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "implementation_name": sys.implementation.name,
    "implementation_version": "%d.%d.%d" % sys.implementation.version[:3],
    "platform_python_implementation": platform.python_implementation(),
    "python_full_version": platform.python_version(),
    "python_version": "%d.%d" % sys.version_info[:2],
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: Path  # with no link in it
    version: str  # 3.12.1
    markers: dict[str, str]  # the environment that markers of requirements are held against


async def find_interpreter(wanted: str = "") -> Interpreter:
    """`wanted` is a path, a command, or a version such as 3.12; offbook's own where it is empty."""
    if not wanted:
        markers = {key: str(value) for key, value in default_environment().items()}
        return Interpreter(Path(os.path.realpath(sys.executable)), markers["python_full_version"], markers)
    version = re.fullmatch(r"3\.\d+(\.\d+)?", wanted)
    places = _places(wanted) if version else [shutil.which(wanted) or wanted]
    for place in places:
        found = await _asked(place)
        if found and (not version or f"{found.version}.".startswith(f"{wanted}.")):
            return found
    if version:
        raise OffbookError(
            f"there is no Python {wanted} on this machine: install it (apt install python{wanted}, uv python install "
            f"{wanted} or pyenv install {wanted}), or give its path with --python"
        )
    raise OffbookError(f"--python {wanted} is no Python interpreter and no version such as 3.12")


def _places(version: str) -> list[str]:
    short = ".".join(version.split(".")[:2])
    homes = [Path(os.environ.get("PYENV_ROOT") or "~/.pyenv", "versions")]
    homes += [Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or "~/.local/share/uv/python")]
    installed = [path for home in homes for path in home.expanduser().glob(f"*/bin/python{short}")]
    newest = sorted(installed, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])])
    on_path = shutil.which(f"python{short}")
    return [*([on_path] if on_path else []), *map(str, reversed(newest))]


async def _asked(place: str) -> Interpreter | None:
    """A command that is no Python, or one of pyenv's that stands for a version which is not chosen, is none."""
    try:
        exit_code, output = await run_quietly([place, "-I", "-c", ASK], ASK_S)
        said = json.loads(output.splitlines()[-1]) if exit_code == 0 else {}
    except (OffbookError, OSError, ValueError, IndexError):
        return None
    if not isinstance(said, dict) or "path" not in said:
        return None
    path = Path(said.pop("path"))
    markers = {key: str(value) for key, value in default_environment().items()} | said
    return Interpreter(path, markers["python_full_version"], markers)
