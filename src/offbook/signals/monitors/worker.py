"""Monitors in a process of their own: warm, one monitor after the other, each with a deadline, all with little memory.

A deadline is CPU time of that process: a busy machine is nobody's fault.

What they read was written by whoever is judged. A text on which a rule takes forever, or all memory, costs a worker and
is a finding; it never costs the run. A monitor that misses its deadline, or dies, is tried once more alone in a fresh
worker. One that somebody else kills is nobody's finding: it is started again, said and counted.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import IO

from pydantic import ConfigDict, TypeAdapter

import offbook
from offbook.signals.monitors.facts import bounded
from offbook.signals.monitors.rules import MONITORS, in_order, run_monitors, with_room
from offbook.types import Event, Flag, OffbookError, Rollout, Task

DEADLINE_S, ALONE_S = 5.0, 15.0  # of CPU, for one monitor, and where it is tried once more
WAITED = 24  # times as long by the clock, which is for a process that does nothing at all
START_S, GONE_S = 120.0, 5.0
JUDGES = "the process that judges rollouts"
MEMORY_BYTES = 2 << 30
STARTS = 3  # attempts, before it is given up
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # how it ends by somebody else's hand: no text brings that about
GIVE_UP_AFTER = 2  # monitors that missed it twice: the rest is not tried
Done = tuple[str, list[Flag], str]
log = logging.getLogger(__name__)
JOB = TypeAdapter(tuple[Task | None, Rollout, list[str]], config=ConfigDict(ser_json_inf_nan="constants"))


class Worker:
    """Judges rollouts one at a time, from any thread. The process starts with the first and ends with the object."""

    def __init__(self, deadline_s: float = DEADLINE_S, alone_s: float = ALONE_S, memory: int = MEMORY_BYTES):
        self.starts, self.deaths = 0, 0  # those by somebody else's hand
        self._deadline_s, self._alone_s, self._memory = deadline_s, alone_s, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, task: Task | None, rollout: Rollout) -> list[Flag]:
        """As `rules.check`. Files that were read in part are events of the rollout."""
        slim, unread, cut = bounded(rollout)
        if cut:
            told = f"{len(cut)} files were read in part: {', '.join(cut[:5])}"
            rollout.events.append(Event(-1, "monitor_unread", told))
        with self._lock:
            return in_order(slim, self._judge(task, slim), unread)

    def _judge(self, task: Task | None, rollout: Rollout) -> list[Done]:
        done, left, lost = list[Done](), list(MONITORS), 0
        while left:
            some, why = self._attempt(task, rollout, left, self._deadline_s)
            done += some
            left = left[len(some) :]
            if not left:
                break
            again, _ = self._attempt(task, rollout, left[:1], self._alone_s)
            lost += not again
            done += again or [(left[0], [], why)]
            left = left[1:]
            if lost >= GIVE_UP_AFTER:
                return done + [(name, [], "not tried, others did not end") for name in left]
        return done

    def _attempt(
        self, task: Task | None, rollout: Rollout, names: Sequence[str], deadline_s: float
    ) -> tuple[list[Done], str]:
        """What the monitors said before one of them missed its deadline, and why that one did."""
        done, before = list[Done](), self.deaths
        while len(done) < len(names):
            process, left = self._started(), list(names[len(done) :])
            try:
                _send(process.stdin, JOB.dump_json((task, rollout, left)), WAITED * deadline_s)
                for _ in left:
                    said = _receive(process.stdout, WAITED * deadline_s, (process.pid, deadline_s))
                    name, flags, error = json.loads(said)
                    done.append((name, [Flag(*one) for one in flags], error))
            except TimeoutError:
                self.close()
                return done, f"did not end within {deadline_s:g} s of CPU"
            except (EOFError, BrokenPipeError):
                if not self._was_killed(process):
                    return done, "took its process down"
                if self.deaths - before == STARTS:
                    raise OffbookError(f"{JUDGES} was killed {STARTS} times while it judged {rollout.id}") from None
        return done, ""

    def _was_killed(self, process: subprocess.Popen[bytes]) -> bool:
        with suppress(subprocess.TimeoutExpired):  # its pipes close a little before
            process.wait(GONE_S)
        code = process.returncode
        self.close()
        if code not in KILLED:
            return False
        self.deaths += 1
        log.warning("%s was killed (signal %d), and is started again", JUDGES, -code)
        return True

    def _started(self) -> subprocess.Popen[bytes]:
        """One that dies on its way up, as whatever is killed from outside may, is started again."""
        for left in reversed(range(STARTS)):
            if self._process is not None:
                break
            roots = [str(Path(offbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OPENBLAS_NUM_THREADS": "1"}
            command = [
                sys.executable,
                "-c",
                "from offbook.signals.monitors.worker import main; main()",
                str(self._memory),
            ]
            self._process = subprocess.Popen(
                command, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
            )
            self.starts += 1
            try:
                _receive(self._process.stdout, START_S)
            except (TimeoutError, EOFError) as error:
                self.close()
                if not left:
                    raise OffbookError(
                        f"{JUDGES} does not start; look at its words above, or turn monitors "
                        "off with --monitors.on false"
                    ) from error
        assert self._process is not None
        return self._process

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):  # at the end of Python it may be gone already
                    assert pipe is not None
                    pipe.close()

    def __del__(self) -> None:
        self.close()


def _send(pipe: IO[bytes] | None, message: bytes, wait_s: float | None = None) -> None:
    """Whoever does not read in time has missed its deadline as well."""
    assert pipe is not None
    until = None if wait_s is None else time.monotonic() + wait_s
    rest = memoryview(struct.pack("<Q", len(message)) + message)
    while rest:
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([], [pipe], [], left)[1]:
            raise TimeoutError
        rest = rest[os.write(pipe.fileno(), rest[: select.PIPE_BUF]) :]  # so much never blocks


def _receive(pipe: IO[bytes] | None, wait_s: float | None = None, cpu: tuple[int, float] | None = None) -> bytes:
    """`cpu`: a process, and how many seconds of CPU it may take until it says something."""
    assert pipe is not None
    until = None if wait_s is None else time.monotonic() + wait_s
    spent_before_s = _cpu_s(cpu[0]) if cpu else 0.0

    def exactly(count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            left = None if until is None else max(0.0, until - time.monotonic())
            look_s = left if cpu is None or left is None else min(left, cpu[1] / 4)
            if not select.select([pipe], [], [], look_s)[0]:
                if look_s == left or (cpu and _cpu_s(cpu[0]) - spent_before_s > cpu[1]):
                    raise TimeoutError
                continue
            part = os.read(pipe.fileno(), count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts

    (length,) = struct.unpack("<Q", exactly(8))
    return exactly(length)


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The process: jobs come in, and after each monitor its answer goes out, until the other side is gone."""
    jobs, answers = (os.fdopen(os.dup(number), mode, 0) for number, mode in ((0, "rb"), (1, "wb")))
    os.dup2(2, 1)  # whatever prints is not an answer
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def judge() -> None:
        is_well = True
        with suppress(EOFError, BrokenPipeError):
            _send(answers, b"ready")
            while is_well:
                task, rollout, left = JOB.validate_json(_receive(jobs))
                for name, flags, error in run_monitors(task, rollout, left):
                    _send(answers, json.dumps([name, [astuple(one) for one in flags], error]).encode())
                    left = left[1:]
                is_well = not left

    with_room(judge)
