"""What the pocket model is shown."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def test_workers_end_with_a_process_that_is_killed() -> None:
    code = """
import os, time
from offbook.pocket.demonstrations import _by_all_cores
print(os.getpid(), flush=True)
made = _by_all_cores(time.sleep, [(0.1,), (60,), (60,)])
next(made)
print("begun", flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    number = parent.stdout.readline().strip()
    assert parent.stdout.readline() == "begun\n"
    by_thread = Path(f"/proc/{number}/task").glob("*/children")
    children = [child for listed in by_thread for child in listed.read_text().split()]
    workers = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert workers
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}/cwd").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if Path(f"/proc/{worker}/cwd").exists()]
