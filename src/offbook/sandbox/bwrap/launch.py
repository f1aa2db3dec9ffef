"""One command in one set of fresh namespaces, and nothing of it afterwards.

Process 1 inside is a shell that sets limits, runs the command and ends with its exit code. When it ends, the kernel
kills everything else inside, daemons too, before bubblewrap can report the end.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offbook.sandbox.access import Opened
from offbook.sandbox.bwrap.watch import AccessWatch
from offbook.sandbox.output import REPORT_BYTES, Output, pipe
from offbook.sandbox.sandbox import ExecResult
from offbook.types import MachineFault, OffbookError

COMMAND_BYTES = 120_000  # the kernel takes 128 KiB for one argument
STATUS_BYTES = 64 * 1024
KILL_S = 30.0
KILLED = -int(signal.SIGKILL)
RUNNING: set[Launch] = set()


@dataclass(eq=False)
class Launch:
    """`arguments` are bwrap's, without the command; `inherited` are descriptors that they name. `limits` are shell
    commands that process 1 runs first. A process that writes 0 to `entrance` joins the sandbox's control group. With
    `watch`, process 1 waits until the sandbox's mounts are watched."""

    arguments: Sequence[str]
    inherited: Sequence[int]
    environment: dict[str, str]
    command: str
    limits: str
    entrance: str
    watch: bool
    exhausted: str = ""  # the limit that this launch was killed for
    killed: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _access: AccessWatch | None = None
    _descriptors: list[int] = field(default_factory=list)  # ours, closed at the end

    async def run(self, timeout_s: float, wants_report: bool) -> ExecResult:
        """Returns when all processes inside are gone."""
        loop = asyncio.get_running_loop()
        output = Output()
        report = Output(REPORT_BYTES)
        ended = asyncio.Event()
        RUNNING.add(self)
        try:
            status = self._start(output, report if wants_report else None)
            assert self._process is not None
            watched = os.pidfd_open(self._process.pid)
            self._descriptors.append(watched)
            loop.add_reader(watched, ended.set)
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), timeout_s)
                timed_out = not ended.is_set()
            finally:
                if not ended.is_set():
                    self.kill()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), KILL_S)
                loop.remove_reader(watched)
            if not ended.is_set():
                raise OffbookError(f"a sandbox's process {self._process.pid} did not end in {KILL_S:.0f} s")
            self._process.wait()
            output.read()
            if wants_report:
                report.read()
            opened: Opened | None = None
            if self._access is not None:
                opened = self._access.stop()
                await asyncio.to_thread(self._access.close)  # unmounts, which writes out a disk's data
            found = re.search(rb'"exit-code": (\d+)', os.read(status, STATUS_BYTES))
            text = output.text()
            if found is None and not self.killed:
                raise MachineFault(f"a sandbox could not start its command: {text.strip() or 'no reason given'}")
            exit_code = int(found[1]) if found and not self.killed else KILLED
            return ExecResult(
                exit_code, text, timed_out, output.truncated, report.text(), self.exhausted if exit_code else "", opened
            )
        finally:
            self.kill_and_wait()
            RUNNING.discard(self)
            output.close()
            report.close()
            if self._access is not None:
                self._access.stop()
                self._access.close()
            for descriptor in self._descriptors:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def _start(self, output: Output, report: Output | None) -> int:
        """Start bwrap. Returns the pipe with its status, which has an exit code only if the command started."""
        theirs: list[int] = []  # closed here once the process has them
        try:
            status, status_write = pipe()
            self._descriptors.append(status)
            theirs += [status_write, output.open()]
            # Descriptors are opened by path: a shell may know only those of one digit.
            redirect = ""
            if report is not None:
                theirs.append(report.open())
                redirect = f" 3>/proc/self/fd/{theirs[-1]}"
            script = f'{self.limits}; sh -c "$1"{redirect}; exit $?'
            if self.watch:
                ready, ready_write = pipe()
                go, go_write = pipe()
                self._descriptors += [ready, go_write]
                theirs += [ready_write, go]
                os.set_blocking(go, True)
                script = f"echo >/proc/self/fd/{ready_write}; read go </proc/self/fd/{go}; {script}"
                asyncio.get_running_loop().add_reader(ready, self._begin_watch, ready, go_write)
            # The entrance is standard input at first, so that it does not stay open for the agent. A thread that moves
            # itself costs next to nothing; moving another process stops every fork on the machine for milliseconds.
            enter = "echo 0 >&0 || exit; " if self.entrance else ""
            theirs.append(os.open(self.entrance or os.devnull, os.O_RDWR | os.O_CLOEXEC))
            inner = ["--", "/bin/sh", "-c", f"{enter}exec </dev/null; {script}", "sh", self.command]
            self._process = subprocess.Popen(
                [*self.arguments, "--json-status-fd", str(status_write), *inner],
                stdin=theirs[-1],
                stdout=theirs[1],
                stderr=theirs[1],
                env=self.environment,
                cwd="/",
                pass_fds=(*self.inherited, *theirs[:-1]),
                start_new_session=True,
            )
            return status
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _begin_watch(self, ready: int, go: int) -> None:
        """The mounts are there: watch them and let process 1 go on."""
        asyncio.get_running_loop().remove_reader(ready)
        assert self._process is not None
        with suppress(OSError, IndexError):  # killed meanwhile
            self._access = AccessWatch(_children(self._process.pid)[0])
        with suppress(OSError):
            os.write(go, b"\n")

    def kill(self) -> None:
        """Kill process 1: bwrap then waits until all processes inside are gone."""
        self.killed = True
        if self._process is not None and self._process.returncode is None:
            for pid in _children(self._process.pid) or [self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        """Without an event loop, as at exit."""
        if self._process is not None and self._process.returncode is None:
            self.kill()
            self._process.wait()

    def pids(self) -> list[int]:
        """All processes inside, by their numbers outside."""
        found = []
        pending = [self._process.pid] if self._process else []
        while pending:
            inner = _children(pending.pop())
            found += inner
            pending += inner
        return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
