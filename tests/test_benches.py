"""Benchmarks are run seldom, and by hand: what they import is looked at here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"
EXTRAS = "datasets", "playwright", "trl"  # of benchmarks against others
LOAD = """
import importlib.util, sys, traceback
folders, extras = sys.argv[1:3], sys.argv[3:]
sys.path += folders
from pathlib import Path
for file in sorted(path for folder in folders for path in Path(folder).glob("*.py")):
    name = f"bench_{file.parent.name}_{file.stem}"  # others import some of them by their own
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name not in extras:
            print(f"{file}: {error}")
    except ImportError as error:
        print(f"{file}: {error}")
"""


def test_every_benchmark_finds_what_it_imports() -> None:
    command = [sys.executable, "-c", LOAD, str(BENCH / "cpu"), str(BENCH / "gpu"), *EXTRAS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-2000:]
