"""A sandbox of plain processes in a temporary directory.

It isolates nothing: a command can read whatever the user can read, reach the network, and leave a process behind by
giving it a session of its own. It is for trusted work and for tests. What it does hold: nothing of the host's
environment, limits on memory, processor time, file size and open files, a deadline, and bounded output.
"""

from __future__ import annotations

import asyncio
import filecmp
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

from offbook.sandbox.bwrap.merged import Merged, remove_file, write_file
from offbook.sandbox.folders import in_history, publish, recordable, refuse_history, regular_files, remove_tree
from offbook.sandbox.output import REPORT_BYTES, Output
from offbook.sandbox.sandbox import HISTORY, Changes, ExecResult, Names, Sandbox, SandboxSpec, environment

DEFAULT = SandboxSpec(backend="process", memory_mb=4096, disk_mb=64)  # disk_mb: of one file


class ProcessSandbox(Sandbox):
    def __init__(self, tree: Path, spec: SandboxSpec = DEFAULT, python: Path | None = None):
        self.spec = spec
        self._base = tree
        self._python = python
        self._place = Path(os.path.realpath(tempfile.mkdtemp(prefix="offbook-sandbox-")))
        self._groups: set[int] = set()  # process groups of the commands now running
        self.root = self._place / "tree"
        self._history = self._place / "history"
        home = self._place / "home"
        temporary = self._place / "tmp"
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
        """Run `command` in a fresh shell. Whatever it leaves in its process group is killed when it ends."""
        output = Output()
        reported = Output(REPORT_BYTES)
        try:
            write_ends = [output.open(), *([reported.open()] if report else [])]
            exit_code, timed_out = await self._run(command, timeout_s, *write_ends)
            output.read()
            if report:
                reported.read()
        finally:
            output.close()
            reported.close()
        return ExecResult(exit_code, output.text(), timed_out, output.truncated, reported.text())

    async def _run(self, command: str, timeout_s: float, output: int, *report: int) -> tuple[int, bool]:
        fd_3 = "".join(f"exec 3>/proc/self/fd/{write_end}; " for write_end in report)
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                f"{self._limits(timeout_s)}; {fd_3}{command}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=report,
                cwd=self.root,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            for write_end in (output, *report):
                os.close(write_end)
        self._groups.add(process.pid)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
            timed_out = False
        except TimeoutError:
            timed_out = True
        finally:
            _kill_group(process.pid)
            was_open = process.pid in self._groups
            self._groups.discard(process.pid)
            exit_code = await process.wait()
        ended_itself = exit_code < 0 and was_open and not timed_out
        return 128 - exit_code if ended_itself else exit_code, timed_out  # as a shell tells of a signal

    async def read(self, path: str) -> str:
        with _system_errors(path):
            return self._files(path).read(path).decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        refuse_history(path)
        write_file(self._files(path), path, text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        refuse_history(path)
        with _system_errors(path):
            remove_file(self._files(path), path)

    async def list(self, path: str) -> Names:
        with _system_errors(path):
            return self._files(path).names(path)

    async def files(self) -> Names:
        return sorted("/".join(parts) for parts in regular_files(str(self.root)))

    async def changes(self) -> Changes:
        before = set(regular_files(str(self._base)))
        after = set(regular_files(str(self.root)))
        changed = Changes()
        for parts in sorted(before | after):
            if "__pycache__" in parts:
                continue
            if parts not in after:
                changed[recordable(parts)] = None
                continue
            path = self.root.joinpath(*parts)
            if parts not in before or not filecmp.cmp(self._base.joinpath(*parts), path, shallow=False):
                with path.open("rb") as file:
                    changed.put(recordable(parts), file.read(changed.left + 1))
        return changed.settled()

    async def publish(self, name: str, text: str) -> None:
        publish(str(self._history), name, text)

    async def fork(self) -> Self:
        """By copying everything."""
        sandbox = type(self)(self._base, self.spec, self._python)
        for name in ("tree", "home", "tmp", "history"):
            remove_tree(str(sandbox._place / name))
            shutil.copytree(self._place / name, sandbox._place / name, symlinks=True)
        return sandbox

    async def snapshot(self) -> None:
        """Nothing: this sandbox does not come back after a crash."""

    async def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        self._groups.clear()
        remove_tree(str(self._place))

    def _files(self, path: str) -> Merged:
        """Followed by hand, so that no link leads out of the tree."""
        return Merged([str(self._history)], HISTORY) if in_history(path) else Merged([str(self.root)], str(self.root))

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
