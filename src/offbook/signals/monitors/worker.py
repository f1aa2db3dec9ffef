"""Monitors in a subprocess: a timeout of CPU time for each monitor, and little memory for all of them.

What they read was written by the agent that is judged. A text on which a rule takes forever, or all memory, costs a
subprocess and is a finding; it never costs the run. A monitor that times out or dies is retried once, first in a fresh
subprocess. CPU time is counted, so a busy machine is no finding, and neither is a subprocess that something else
kills: it is restarted and logged. Jobs and answers are lines of JSON: nothing of a rollout is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

from pydantic import TypeAdapter

from offbook.signals.monitors.facts import bounded
from offbook.signals.monitors.rules import MONITORS, Done, in_order, run_monitors, with_room
from offbook.types import Flag, OffbookError, Rollout, Task

TIMEOUT_S = 10.0  # of CPU, for one monitor
STALL_FACTOR = 24  # times the timeout by the clock: then the subprocess does nothing at all
NAME = "the process that judges rollouts"
MEMORY_BYTES = 2 << 30
MAX_KILLS = 3
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes that no text brings about
GIVE_UP_AFTER = 2  # monitors that failed twice: the rest is not tried
START = "from offbook.signals.monitors.worker import main; main()"
Job = tuple[Task | None, Rollout, list[str], float]
JOB: TypeAdapter[Job] = TypeAdapter(Job)
log = logging.getLogger(__name__)


class Worker:
    """Judges rollouts one at a time, from any thread. The subprocess starts with the first and ends with the object."""

    def __init__(self, timeout_s: float = TIMEOUT_S, memory: int = MEMORY_BYTES):
        self.starts = 0
        self._timeout_s = timeout_s
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, task: Task | None, rollout: Rollout) -> list[Flag]:
        """As `rules.check`."""
        slim, unread = bounded(rollout)
        with self._lock:
            return in_order(slim, self._judge(task, slim), unread)

    def _judge(self, task: Task | None, rollout: Rollout) -> list[Done]:
        done: list[Done] = []
        left = list(MONITORS)
        failures: Counter[str] = Counter()
        while left:
            some, why = self._attempt(task, rollout, left)
            done += some
            left = left[len(some) :]
            failures["killed" if why == "killed" else "".join(left[:1])] += 1
            if failures["killed"] == MAX_KILLS:
                raise OffbookError(f"{NAME} was killed {MAX_KILLS} times while it judged {rollout.id}")
            if left and failures[left[0]] == 2:
                done.append((left.pop(0), [], why))
                failures["given up"] += 1
            if failures["given up"] == GIVE_UP_AFTER:
                return done + [(name, [], "not tried, others did not end") for name in left]
        return done

    def _attempt(self, task: Task | None, rollout: Rollout, names: Sequence[str]) -> tuple[list[Done], str]:
        """The findings of the monitors before the first one that failed, and why that one did."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        done: list[Done] = []
        stalled = threading.Event()

        def stop() -> None:
            stalled.set()
            process.kill()

        timer = threading.Timer(STALL_FACTOR * self._timeout_s, stop)
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it died before it had read the job
                process.stdin.write(JOB.dump_json((task, rollout, list(names), self._timeout_s)) + b"\n")
                process.stdin.flush()
            while len(done) < len(names) and (line := process.stdout.readline()):
                name, flags, error = json.loads(line)
                done.append((name, [Flag(*one) for one in flags], error))
        finally:
            timer.cancel()
        if len(done) == len(names):
            return done, ""
        code = process.wait()
        self.close()
        if stalled.is_set() or code == -signal.SIGPROF:
            return done, f"did not end within {self._timeout_s:g} s of CPU"
        if code not in KILLED:
            return done, "took its process down"
        log.warning("%s was killed (signal %d), and is started again", NAME, -code)
        return done, "killed"

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(self._memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # each thread takes memory
                start_new_session=True,
            )
            self._end = weakref.finalize(self, _end, self._process)
            self.starts += 1
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                self.close()
                raise OffbookError(f"{NAME} does not start; see its output above, or use --monitors.on false")
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process = None
            self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker process: when it is closed, dropped, or at the exit of the interpreter."""
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


def main() -> None:
    """The subprocess: takes jobs and answers after each monitor until the parent is gone.

    A monitor that uses up its CPU time is ended by the kernel's timer, also inside of a regular expression.
    """
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints are no answers

    def answer(value: Any) -> None:
        answers.write(json.dumps(value).encode() + b"\n")

    def judge() -> None:
        answer("ready")
        for line in sys.stdin.buffer:
            task, rollout, left, timeout_s = JOB.validate_json(line)
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            for name, flags, error in run_monitors(task, rollout, left):
                answer([name, [astuple(one) for one in flags], error])
                signal.setitimer(signal.ITIMER_PROF, timeout_s)
                left = left[1:]
            signal.setitimer(signal.ITIMER_PROF, 0)
            if left:  # without memory
                return

    with_room(judge)
