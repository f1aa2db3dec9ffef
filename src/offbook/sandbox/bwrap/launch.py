"""One start of a sandbox: some commands side by side in one set of namespaces, and nothing of them afterwards.

The shell that is process 1 inside starts the commands and tells through a pipe how each one ended. When it ends, the
kernel kills all that is left inside, daemons too, before anyone can see that it ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offbook.sandbox.bwrap.watch import AccessWatch
from offbook.sandbox.output import REPORT_BYTES, Output, high, pipe
from offbook.sandbox.sandbox import ExecResult
from offbook.types import MachineFault, OffbookError

STATUS_BYTES = 64 * 1024
COMMAND_BYTES = 120_000  # the kernel takes 128 KiB for one argument
KILL_S = 30.0
KILLED = -int(signal.SIGKILL)


@dataclass(slots=True, eq=False)
class Command:
    text: str
    timeout_s: float
    wants_report: bool
    result: asyncio.Future[ExecResult]
    output: Output = field(default_factory=Output)
    report: Output = field(default_factory=lambda: Output(REPORT_BYTES))
    exit_code: int | None = None
    timed_out: bool = False

    @property
    def outputs(self) -> list[Output]:
        return [self.output, self.report] if self.wants_report else [self.output]


class Launch:
    """`limits` are shell commands that come before the others inside. A process that writes 0 to `entrance`, if there
    is one, is in the sandbox's control group; process 1 gets it open. `out_of` says which limit the kernel enforced by
    killing, if it did. With `watch`, process 1 waits until the sandbox's mounts are marked."""

    def __init__(
        self,
        commands: list[Command],
        limits: str,
        entrance: str,
        out_of: Callable[[], str],
        watch: bool = False,
    ):
        self.commands = commands
        self.exhausted = ""  # which limit ended it, as the one who kills it says
        self.killed = False
        self.ended = False
        self._limits = limits
        self._entrance = entrance
        self._out_of = out_of
        self._process: subprocess.Popen[bytes] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._ended: asyncio.Future[None]
        self._status_end = -1
        self._status = b""
        self._wants_watch = watch
        self._gate = -1  # process 1 waits at the other end of this pipe
        self._access: AccessWatch | None = None

    async def run(self, arguments: Sequence[str], inherited: Sequence[int], environment: dict[str, str]) -> None:
        """`arguments` start the sandbox up to the command inside. Results are set as commands end. This returns when
        nothing of them is left, a little later."""
        loop = asyncio.get_running_loop()
        write_ends: list[int] = []  # of the status pipe first, then of the first command's output
        opened: list[int] = []  # closed here once the process has them
        try:
            script = self._script(write_ends)
            opened.append(os.open(self._entrance or os.devnull, os.O_RDWR | os.O_CLOEXEC))
            if self._wants_watch:  # process 1 says that its mounts are there and starts nothing before it is let go
                gate, self._gate = os.pipe()
                opened.append(high(gate))
                script = f"echo ready >/proc/self/fd/{write_ends[0]}; read go </proc/self/fd/{opened[1]}; {script}"
            # The entrance is standard input at first, so that it does not stay open for the agent. A thread that moves
            # itself costs next to nothing; moving another process stops every fork on the machine for milliseconds.
            enter = "echo 0 >&0 || exit; " if self._entrance else ""
            script = f"{enter}exec </dev/null; {script}"
            inner = ["--", "/bin/sh", "-c", script, "sh", *(command.text for command in self.commands)]
            self._process = subprocess.Popen(
                [*arguments, *inner],
                stdin=opened[0],
                stdout=write_ends[1],
                stderr=write_ends[1],
                env=environment,
                cwd="/",
                pass_fds=(*inherited, *write_ends, *opened[1:]),
                start_new_session=True,
            )
            watched = os.pidfd_open(self._process.pid)
        except BaseException:
            self.kill_at_exit()
            self._close_pipes()
            raise
        finally:
            for descriptor in (*write_ends, *opened):
                os.close(descriptor)
        self._timers += [loop.call_later(command.timeout_s, self.time_out, command) for command in self.commands]
        self._ended = ended = loop.create_future()
        loop.add_reader(watched, self._end)
        loop.add_reader(self._status_end, self._read_status)
        try:
            await ended
            self._process.wait()
            self._read_status()
            for command in self.commands:
                _drain(command)
            if self._access is not None:
                self._access.stop()
                await asyncio.to_thread(self._access.close)  # unmounts, which writes out a disk's data
        except asyncio.CancelledError:  # the event loop is ending
            self.kill_at_exit()
            raise
        finally:
            self.ended = True
            for timer in self._timers:
                timer.cancel()
            loop.remove_reader(watched)
            os.close(watched)
            self._close_pipes()
        waiting = [command for command in self.commands if not command.result.done()]
        exceeded = self._out_of()
        if (
            len(waiting) == len(self.commands) and not self.killed and not exceeded
        ):  # only we and the kernel end process 1
            text = self.commands[0].output.text().strip()
            raise MachineFault(f"a sandbox could not start its command: {text or 'no reason given'}")
        for command in waiting:
            exit_code = KILLED if command.exit_code is None or command.timed_out else command.exit_code
            self._set_result(command, exit_code, (self.exhausted or exceeded) if exit_code else "")

    def kill(self) -> None:
        """Process 1 first: bwrap then waits for all of it to be gone, which it would not if it were killed itself."""
        self.killed = True
        if self._process is not None and self._process.returncode is None:
            _kill_first(self._process.pid)
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(KILL_S, self._give_up, self._process.pid))

    def kill_at_exit(self) -> None:
        """Where the event loop is of no use any more. Waits for the end, which is near."""
        if self._process is not None and self._process.returncode is None:
            _kill_first(self._process.pid)
            self._process.wait()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _give_up(self, pid: int) -> None:
        if not self._ended.done():
            self._ended.set_exception(
                OffbookError(f"process {pid} of a sandbox is still there {KILL_S:.0f} s after its end")
            )

    def is_over(self) -> bool:
        """All results are there. What the commands left may still be dying."""
        return all(command.result.done() for command in self.commands)

    def time_out(self, command: Command) -> None:
        """Whether or not it said that it ended: the agent could have said so."""
        if not command.result.done():
            command.timed_out = True
            self.stop(command)

    def stop(self, command: Command) -> None:
        """End one command and leave the others. A daemon it started goes on until the launch ends."""
        others = [other for other in self.commands if other is not command and not other.result.done()]
        if not others:
            self.kill()
            return
        pipe_number = os.fstat(command.output.read_end).st_ino
        assert self._process is not None
        for first in _children(self._process.pid):
            for starter in _children(first):
                with suppress(OSError):
                    if os.stat(f"/proc/{starter}/fd/1").st_ino == pipe_number:
                        _kill_all(starter)
        self._set_result(command, KILLED, "")

    def pids(self) -> list[int]:
        """All processes inside, by the numbers they have outside."""
        return _descendants(self._process.pid) if self._process else []

    def _script(self, write_ends: list[int]) -> str:
        """What process 1 runs once it is in. Opens the pipes and adds the ends that are written to inside; they are
        reached by path, because the shell may know only descriptors of one digit."""
        self._status_end, status_write = pipe()
        write_ends.append(status_write)
        parts = []
        for number, command in enumerate(self.commands):
            redirect = ""
            for output, place in zip(command.outputs, (">", "3>"), strict=False):
                write_ends.append(output.open())
                redirect += f" {place}/proc/self/fd/{write_ends[-1]}"
            ran = f'sh -c "${{{number + 1}}}"; echo "{number} $?" >/proc/self/fd/{status_write}'
            parts.append(f"{{ {ran}; }}{redirect} 2>&1")
        return f"{self._limits}; " + (parts[0] if len(parts) == 1 else " & ".join(parts) + " & wait")

    def _close_gate(self) -> None:
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def _read_status(self) -> None:
        try:
            chunk = os.read(self._status_end, STATUS_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._status_end)
            return
        *lines, self._status = (self._status + chunk).split(b"\n")
        self._status = self._status[-100:]  # the agent can write here too, but only about itself
        for line in lines:
            if line == b"ready" and self._gate >= 0:
                assert self._process is not None
                with suppress(OSError, IndexError):  # killed meanwhile
                    self._access = AccessWatch(_children(self._process.pid)[0])
                with suppress(OSError):
                    os.write(self._gate, b"\n")
                self._close_gate()
            words = line.split()
            with suppress(ValueError, IndexError):
                number, exit_code = (int(word) for word in words)
                command = self.commands[number]
                if command.exit_code is None:
                    command.exit_code = exit_code
                    _drain(command)
                    self._set_result(command, exit_code, self._out_of() if exit_code else "")
                    if self.is_over():  # one that only said so would go on
                        self.kill()

    def _set_result(self, command: Command, exit_code: int, exhausted: str) -> None:
        if not command.result.done():
            opened = self._access.opened() if self._access is not None else None
            output = command.output
            report = command.report.text()
            command.result.set_result(
                ExecResult(exit_code, output.text(), command.timed_out, output.truncated, report, exhausted, opened)
            )

    def _close_pipes(self) -> None:
        if self._status_end >= 0:
            asyncio.get_running_loop().remove_reader(self._status_end)
            os.close(self._status_end)
        for command in self.commands:
            for output in command.outputs:
                output.close()
        self._close_gate()
        if self._access is not None:
            self._access.stop()
            self._access.close()


def _drain(command: Command) -> None:
    for output in command.outputs:
        output.read()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _kill_first(pid: int) -> None:
    for inner in _children(pid) or [pid]:
        with suppress(ProcessLookupError):
            os.kill(inner, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found = []
    pending = [pid]
    while pending:
        inner = _children(pending.pop())
        found += inner
        pending += inner
    return found


def _kill_all(pid: int) -> None:
    """A process and all below it. They may be starting others meanwhile, so more than once."""
    for _ in range(3):
        for inner in _descendants(pid):
            with suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
