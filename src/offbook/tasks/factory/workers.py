"""The same call in several processes of this machine: each takes the repository that no other one has (pipeline.py)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Any

from offbook.core.processes import end_with

END_S = 30.0  # for what is half done to be put away
Handler = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def workers(count: int, work: Callable[[], None], folder: Path) -> Iterator[None]:
    """Forked, so nothing has to be passed on: before there are threads. What they say is in folder/worker-N.log.

    One that dies leaves its repository to the next process. They end with this process, however that ends.
    """
    before = interrupt_at_term()
    context = multiprocessing.get_context("fork")
    started: list[ForkProcess] = []
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for number in range(1, count + 1):
            folder.mkdir(parents=True, exist_ok=True)
            process = context.Process(
                target=_run, args=(work, folder / f"worker-{number}.log", os.getpid()), daemon=True
            )
            process.start()
            started.append(process)
        yield
        for process in started:
            process.join()
    finally:
        for process in started:
            if process.is_alive():
                process.terminate()
        for process in started:
            process.join(END_S)
            if process.is_alive():
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_at_term() -> dict[int, Handler]:
    """A request to end is an interrupt, so that what is half done is put away; also where interrupts are ignored, as
    they are in what a shell starts in the background. Returns what was done before."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    handlers: dict[int, Handler] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: end}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _run(work: Callable[[], None], log: Path, parent: int) -> None:
    end_with(parent, signal.SIGTERM)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115  # as long as the process lives
    for descriptor in (1, 2):  # of what it starts
        os.dup2(sys.stdout.fileno(), descriptor)
    try:
        work()
    except KeyboardInterrupt:
        os._exit(130)
