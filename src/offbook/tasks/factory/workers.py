"""The same call in several processes of this machine: each takes the repository that no other one has (pipeline.py)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offbook.core.processes import end_with

END_S = 30.0  # for what is half done to be put away


@contextmanager
def workers(count: int, work: Callable[[], None], folder: Path) -> Iterator[None]:
    """Forked, so nothing has to be passed on: before there are threads. What they say is in folder/worker-N.log.

    One that dies leaves its repository to the next process. They end with this process, however that ends. A request
    to end is an interrupt for all of them, also where interrupts are ignored, as in the background of a shell.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_term = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    context = multiprocessing.get_context("fork")
    if count:
        folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"worker-{number}.log" for number in range(1, count + 1)]
    started = [context.Process(target=_run, args=(work, log, os.getpid()), daemon=True) for log in logs]
    sys.stdout.flush()
    sys.stderr.flush()
    for process in started:
        process.start()
    try:
        yield
        for process in started:
            process.join()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join(END_S)
            process.kill()
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, before_term)


def _run(work: Callable[[], None], log: Path, parent: int) -> None:
    end_with(parent, signal.SIGTERM)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):  # of what it starts
        os.dup2(sys.stdout.fileno(), descriptor)
    try:
        work()
    except KeyboardInterrupt:
        os._exit(130)
