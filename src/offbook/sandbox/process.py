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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from offbook.sandbox.bwrap.merged import Merged
from offbook.sandbox.folders import in_history, publish, refuse_history, remove_tree
from offbook.sandbox.output import REPORT_BYTES, Output
from offbook.sandbox.sandbox import HISTORY, Changes, ExecResult, Names, Sandbox, SandboxSpec, environment

DEFAULT = SandboxSpec(backend="process", memory_mb=4096, disk_mb=64)  # disk_mb: of one file
FOLDERS = ("tree", "home", "tmp", "history")


class ProcessSandbox(Sandbox):
    def __init__(self, tree: Path, spec: SandboxSpec = DEFAULT, python: Path | None = None):
        self.spec = spec
        self._base = tree
        self._python = python
        self._place = Path(os.path.realpath(tempfile.mkdtemp(prefix="offbook-sandbox-")))
        self._groups: set[int] = set()  # process groups of the commands now running
        self.root, home, temporary, self._history = (self._place / name for name in FOLDERS)
        self.python = str(python.resolve() / "python" / "bin" / "python") if python else os.path.abspath(sys.executable)
        self._environment = environment(str(Path(self.python).parent.parent), str(home), str(temporary))
        try:
            for folder in (home, temporary, self._history):
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

    async def read(self, path: str) -> str:
        with _system_errors(path):
            return self._files(path).read(path).decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        refuse_history(path)
        self._files(path).write(path, text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        refuse_history(path)
        with _system_errors(path):
            self._files(path).remove(path)

    async def list(self, path: str) -> Names:
        with _system_errors(path):
            return self._files(path).names(path)

    async def files(self) -> Names:
        return sorted("/".join(parts) for parts in Merged([str(self.root)]).files())

    async def changes(self) -> Changes:
        return Merged([str(self.root)]).changes(Merged([str(self._base)]))

    async def publish(self, name: str, text: str) -> None:
        publish(str(self._history), name, text)

    async def fork(self) -> Self:
        """By copying everything."""
        sandbox = type(self)(self._base, self.spec, self._python)
        for name in FOLDERS:
            remove_tree(str(sandbox._place / name))
            shutil.copytree(self._place / name, sandbox._place / name, symlinks=True)
        return sandbox

    async def snapshot(self) -> None:
        """Nothing: this sandbox is not restored after a crash."""

    async def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        self._groups.clear()
        remove_tree(str(self._place))

    def _files(self, path: str) -> Merged:
        if in_history(path):
            return Merged([str(self._history)], HISTORY)
        return Merged([str(self.root)], str(self.root))

    def _limits(self, timeout_s: float) -> str:
        """Shell commands and not `preexec_fn`, which may deadlock in a process with threads.

        The limit on processor time is for a process that left the group: nothing else would ever end it.
        """
        processor_s = math.ceil(timeout_s) * (os.cpu_count() or 1) + 1
        memory_kib = self.spec.memory_mb * 1024
        file_blocks = self.spec.disk_mb * 2048
        return f"ulimit -c 0; ulimit -v {memory_kib}; ulimit -t {processor_s}; ulimit -f {file_blocks}; ulimit -n 256"


@contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Errors with the system's wording, which the pocket model was trained on."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
