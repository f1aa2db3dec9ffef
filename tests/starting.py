"""`offbook` in a process of its own, forked from one that has torch and transformers imported already: in every new
interpreter they take five seconds of processor time.

The process gets its arguments, folder, environment and output files, can be killed, and ends as any interpreter ends.
What is read only once, at the start of an interpreter or of a library (PYTHONHASHSEED, HF_ENDPOINT), it has from the
one it is forked from. `fresh` starts an interpreter, for tests that are about that and for one test of every verb.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

COMMAND = [sys.executable, "-m", "offbook"]
IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "offbook.cli",
    "offbook.evals.run",
    "offbook.rl.train",
    "offbook.stages.sft",
    "offbook.tasks.factory.pipeline",
)


class Started:
    """The part of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None):
        self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 as long as this lives
        self._news, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "arguments": [*arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": {**(os.environ if env is None else env)},
        }
        with theirs:
            passed = [theirs.fileno(), *(file.fileno() for file in self._output)]
            socket.send_fds(_server(), [json.dumps(order).encode()], passed)
        self.pid = self._told(120)
        self.returncode: int | None = None

    def _told(self, timeout: float) -> int:
        self._news.settimeout(timeout)
        told = self._news.recv(100)
        assert told, "the process that offbook is forked from has ended; its stderr says why"
        return int(told)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._told(0)
            except BlockingIOError:
                return None
        return self.returncode

    def said(self) -> str:
        """What it has printed so far."""
        return Path(f"/proc/self/fd/{self._output[0].fileno()}").read_text()

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        if self.returncode is None:
            try:
                self.returncode = self._told(timeout)
            except BaseException:  # also the test's own deadline
                self.send_signal(signal.SIGKILL)
                raise
        out, err = (Path(f"/proc/self/fd/{file.fileno()}").read_text() for file in self._output)
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def run(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    words = [str(argument) for argument in arguments]
    if fresh:
        return subprocess.run(
            [*COMMAND, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
        )
    process = Started(words, cwd, env)
    out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode or 0, out, err)


@cache
def _server() -> socket.socket:
    """It ends with this process, whose end of the connection closes then. What libraries read when they are imported
    is as `offbook` itself or the tests set it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, __file__],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "GOMP_SPINCOUNT": "1000"},
        )
    return ours


def _serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # an interpreter that ends clears all it has; of this much that takes a second
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            order, passed, *_ = socket.recv_fds(orders, 1 << 20, 3)
            if not order:
                sys.exit()
            if os.fork() == 0:
                break
            for number in passed:
                os.close(number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _start(**json.loads(order), news=socket.socket(fileno=passed[0]), output=passed[1:])


def _start(arguments: list[str], cwd: str, env: dict[str, str], news: socket.socket, output: list[int]) -> None:
    """In two processes: `offbook`, and its parent, which tells how it ended."""
    if pid := os.fork():
        news.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        news.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    news.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *output)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = ["", *(path for path in env.get("PYTHONPATH", "").split(":") if path and path not in sys.path)]
    sys.argv = ["offbook", *arguments]
    runpy.run_module("offbook", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
