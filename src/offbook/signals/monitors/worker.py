"""Monitors in a subprocess: a timeout of CPU time for each monitor, and little memory for all of them.

What they read was written by the agent that is judged. A text on which a rule takes forever, or all memory, costs a
subprocess and is a finding; it never costs the run. A monitor that times out or dies is retried once, alone in a fresh
subprocess. CPU time is counted, so a busy machine is no finding, and neither is a subprocess that something else
kills: it is restarted, logged and counted.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from pydantic import TypeAdapter

import offbook
from offbook.signals.monitors.facts import bounded
from offbook.signals.monitors.rules import MONITORS, in_order, run_monitors, with_room
from offbook.types import Event, Flag, OffbookError, Rollout, Task

TIMEOUT_S, RETRY_TIMEOUT_S = 5.0, 15.0  # of CPU, for one monitor
STALL_FACTOR = 24  # times the timeout by the clock: then the subprocess does nothing at all
START_S, EXIT_S = 120.0, 5.0
NAME = "the process that judges rollouts"
MEMORY_BYTES = 2 << 30
MAX_STARTS = 3
KILLED = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes that no text brings about
GIVE_UP_AFTER = 2  # monitors that failed twice: the rest is not tried
START = "from offbook.signals.monitors.worker import main; main()"
Done = tuple[str, list[Flag], str]
JOB: TypeAdapter[tuple[Task | None, Rollout, list[str], float]] = TypeAdapter(
    tuple[Task | None, Rollout, list[str], float]
)
log = logging.getLogger(__name__)


class Worker:
    """Judges rollouts one at a time, from any thread. The subprocess starts with the first and ends with the object."""

    def __init__(
        self, timeout_s: float = TIMEOUT_S, retry_timeout_s: float = RETRY_TIMEOUT_S, memory: int = MEMORY_BYTES
    ):
        self.starts = 0
        self.deaths = 0  # by a signal from outside
        self._timeout_s = timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def check(self, task: Task | None, rollout: Rollout) -> list[Flag]:
        """As `rules.check`. Files that were read in part are events of the rollout."""
        slim, unread, cut = bounded(rollout)
        if cut:
            detail = f"{len(cut)} files were read in part: {', '.join(cut[:5])}"
            rollout.events.append(Event(-1, "monitor_unread", detail))
        with self._lock:
            return in_order(slim, self._judge(task, slim), unread)

    def _judge(self, task: Task | None, rollout: Rollout) -> list[Done]:
        done, left, lost = list[Done](), list(MONITORS), 0
        while left:
            some, why = self._attempt(task, rollout, left, self._timeout_s)
            done += some
            left = left[len(some) :]
            if not left:
                break
            again, _ = self._attempt(task, rollout, left[:1], self._retry_timeout_s)
            lost += not again
            done += again or [(left[0], [], why)]
            left = left[1:]
            if lost >= GIVE_UP_AFTER:
                return done + [(name, [], "not tried, others did not end") for name in left]
        return done

    def _attempt(
        self, task: Task | None, rollout: Rollout, names: Sequence[str], timeout_s: float
    ) -> tuple[list[Done], str]:
        """The findings of the monitors before the first one that failed, and why that one did."""
        done, deaths = list[Done](), 0
        while len(done) < len(names):
            process, channel = self._started()
            left = list(names[len(done) :])
            # A file, since a pipe would block where the subprocess does not read. That it cannot be written is a fault
            # of the machine and not of the rollout, so it is outside of the `try`.
            with tempfile.NamedTemporaryFile() as job:
                job.write(JOB.dump_json((task, rollout, left, timeout_s)))
                job.flush()
                try:
                    channel.send_bytes(job.name.encode())
                    for _ in left:
                        if not channel.poll(STALL_FACTOR * timeout_s):
                            self.close()
                            return done, f"did not end within {timeout_s:g} s of CPU"
                        name, flags, error = json.loads(channel.recv_bytes())
                        done.append((name, [Flag(*one) for one in flags], error))
                    continue
                except (EOFError, OSError):
                    pass
            if len(done) < len(names):
                with suppress(subprocess.TimeoutExpired):  # its channel closes a little before
                    process.wait(EXIT_S)
                code = process.returncode
                self.close()
                if code not in KILLED:
                    is_timeout = code == -signal.SIGPROF
                    return done, f"did not end within {timeout_s:g} s of CPU" if is_timeout else "took its process down"
                deaths += 1
                self.deaths += 1
                log.warning("%s was killed (signal %d), and is started again", NAME, -code)
                if deaths == MAX_STARTS:
                    raise OffbookError(f"{NAME} was killed {deaths} times while it judged {rollout.id}") from None
        return done, ""

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Started again where it died on its way up, as a signal from outside may have it."""
        for _ in range(MAX_STARTS):
            if self._process is not None and self._channel is not None:
                return self._process, self._channel
            roots = [str(Path(offbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OPENBLAS_NUM_THREADS": "1"}
            self._channel, theirs = Pipe()
            command = [sys.executable, "-c", START, str(theirs.fileno()), str(self._memory)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # prints are no answers
                env=environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._end = weakref.finalize(self, _end, self._process, self._channel)
            self.starts += 1
            with suppress(EOFError, OSError):
                if self._channel.poll(START_S) and self._channel.recv_bytes():
                    continue
            self.close()
        if self._process is not None and self._channel is not None:
            return self._process, self._channel
        raise OffbookError(
            f"{NAME} does not start; see its output above, or turn monitors off with --monitors.on false"
        )

    def close(self) -> None:
        self._process = self._channel = None
        self._end()


def _end(process: subprocess.Popen[bytes], channel: Connection) -> None:
    """End a worker process: when it is closed, dropped, or at the exit of the interpreter."""
    process.kill()
    process.wait()
    channel.close()


def main() -> None:
    """The subprocess: takes jobs and answers after each monitor until the parent is gone.

    A monitor that uses up its CPU time is ended by the kernel's timer, also inside of a regular expression.
    """
    channel, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    def judge() -> None:
        left: list[str] = []
        with suppress(EOFError, OSError):
            channel.send_bytes(b"ready")
            while not left:
                task, rollout, left, timeout_s = JOB.validate_json(Path(channel.recv_bytes().decode()).read_bytes())
                signal.setitimer(signal.ITIMER_PROF, timeout_s)
                for name, flags, error in run_monitors(task, rollout, left):
                    channel.send_bytes(json.dumps([name, [astuple(one) for one in flags], error]).encode())
                    signal.setitimer(signal.ITIMER_PROF, timeout_s)
                    left = left[1:]
                signal.setitimer(signal.ITIMER_PROF, 0)

    with_room(judge)
