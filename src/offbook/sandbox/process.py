"""A sandbox of plain processes in a temporary directory.

It isolates nothing: a command can read whatever the user can read, reach the network, and leave a process behind by
giving it a session of its own. It is for trusted work and for tests. What it does hold: nothing of the host's
environment, limits on memory, processor time, file size and open files, a timeout, and bounded output.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from offbook.sandbox.bwrap.merged import FolderSandbox, Merged
from offbook.sandbox.folders import refuse_history, remove_tree
from offbook.sandbox.output import REPORT_BYTES, Output
from offbook.sandbox.sandbox import ExecResult, SandboxSpec, environment

DEFAULT = SandboxSpec(backend="process", memory_mb=4096, disk_mb=64)  # disk_mb: of one file
FOLDERS = ("tree", "home", "tmp", "history")


class ProcessSandbox(FolderSandbox):
    def __init__(self, tree: Path, spec: SandboxSpec = DEFAULT, python: Path | None = None):
        self.spec = spec
        self._base = str(tree)
        self._python = python
        self._place = Path(os.path.realpath(tempfile.mkdtemp(prefix="offbook-sandbox-")))
        self._groups: set[int] = set()  # process groups of the commands now running
        self.root, home, temporary, history = (self._place / name for name in FOLDERS)
        self._history = str(history)
        self.python = str(python.resolve() / "python" / "bin" / "python") if python else os.path.abspath(sys.executable)
        self._environment = environment(str(Path(self.python).parent.parent), str(home), str(temporary))
        try:
            for folder in (home, temporary, history):
                folder.mkdir()
            shutil.copytree(tree, self.root, symlinks=True)
        except BaseException:
            remove_tree(str(self._place))
            raise

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        """Run `command` in a fresh shell. What it leaves in its process group is killed when it ends."""
        outputs = [Output(), *([Output(REPORT_BYTES)] if report else [])]
        timed_out = False
        try:
            write_ends = [output.open() for output in outputs]
            fd_3 = f"exec 3>/proc/self/fd/{write_ends[1]}; " if report else ""
            try:
                process = await asyncio.create_subprocess_exec(
                    *("/bin/sh", "-c", f"{self._limits(timeout_s)}; {fd_3}{command}"),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_ends[0],
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=write_ends[1:],
                    cwd=self.root,
                    env=self._environment,
                    start_new_session=True,
                )
            finally:
                for write_end in write_ends:
                    os.close(write_end)
            self._groups.add(process.pid)
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                timed_out = True
            finally:
                _kill_group(process.pid)
                was_open = process.pid in self._groups
                self._groups.discard(process.pid)
                exit_code = await process.wait()
            for output in outputs:
                output.read()
        finally:
            for output in outputs:
                output.close()
        if exit_code < 0 and was_open and not timed_out:
            exit_code = 128 - exit_code  # a signal of its own, as a shell reports it
        texts = [output.text() for output in outputs]
        return ExecResult(exit_code, texts[0], timed_out, outputs[0].truncated, texts[1] if report else "")

    async def write(self, path: str, text: str) -> None:
        refuse_history(path)
        self._merged().write(path, text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        refuse_history(path)
        self._merged().remove(path)

    async def fork(self) -> Self:
        """By copying everything."""
        sandbox = type(self)(Path(self._base), self.spec, self._python)
        for name in FOLDERS:
            remove_tree(str(sandbox._place / name))
            shutil.copytree(self._place / name, sandbox._place / name, symlinks=True)
        return sandbox

    async def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        self._groups.clear()
        remove_tree(str(self._place))

    def _merged(self) -> Merged:
        return Merged([str(self.root)], str(self.root))

    def _limits(self, timeout_s: float) -> str:
        """Shell commands and not `preexec_fn`, which may deadlock in a process with threads.

        The limit on processor time is for a process that left the group: nothing else would ever end it.
        """
        processor_s = math.ceil(timeout_s) * (os.cpu_count() or 1) + 1
        memory_kib = self.spec.memory_mb * 1024
        file_blocks = self.spec.disk_mb * 2048
        return f"ulimit -c 0; ulimit -v {memory_kib}; ulimit -t {processor_s}; ulimit -f {file_blocks}; ulimit -n 256"


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
