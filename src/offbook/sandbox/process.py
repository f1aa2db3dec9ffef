"""A box of plain processes in a temporary directory.

It isolates nothing: a command can read whatever the user can read, reach the network, and leave a process behind by
giving it a session of its own. It is for trusted work and for tests. What it does hold: nothing of the host's
environment, limits on memory, processor time, file size and open files, a deadline, and bounded output.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from offbook.sandbox.box import HISTORY, BoxSpec, BoxUsage, ExecResult, Names, PathRefused
from offbook.sandbox.folders import bytes_in, remove_tree
from offbook.sandbox.output import Output

OUTPUT_BYTES = 64 * 1024
REPORT_BYTES = 4 * 1024 * 1024
DEFAULT = BoxSpec(backend="process", memory_mb=4096, disk_mb=64)  # disk_mb: of one file


class ProcessBox:
    def __init__(self, tree: Path, spec: BoxSpec = DEFAULT, python: Path | None = None):
        self.spec = spec
        self._base = tree
        self._python = python
        self._place = Path(os.path.realpath(tempfile.mkdtemp(prefix="offbook-box-")))
        self._groups: set[int] = set()  # process groups of the commands now running
        self._num_commands, self._wall_s, self._cpu_s = 0, 0.0, 0.0
        self.root = self._place / "tree"
        self._history = self._place / "history"
        home, temporary = self._place / "home", self._place / "tmp"
        tools = str(python.resolve() / "python" / "bin") if python else os.path.dirname(sys.executable)
        self._environment = {
            "PATH": os.pathsep.join([tools, "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            for folder in (home, temporary, self._history):
                folder.mkdir()
            shutil.copytree(tree, self.root, symlinks=True)
        except BaseException:
            remove_tree(str(self._place))
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        """Run `command` in a fresh shell. Whatever it leaves in its process group is killed when it ends.

        The pipes are ours and not asyncio's, because asyncio waits for a pipe to close, and a daemon may hold it open.
        """
        outputs = [Output(OUTPUT_BYTES), Output(REPORT_BYTES)][: 1 + report]
        pipes = [os.pipe() for _ in outputs]
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            exit_code, timed_out = await self._run(command, timeout_s, pipes, outputs)
        finally:
            for read_end, _ in pipes:
                asyncio.get_running_loop().remove_reader(read_end)
                os.close(read_end)
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._cpu_s += now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            self._wall_s += time.monotonic() - began
            self._num_commands += 1
        told = outputs[1].text() if report else ""
        return ExecResult(exit_code, outputs[0].text(), timed_out, outputs[0].truncated, told)

    async def _run(
        self, command: str, timeout_s: float, pipes: list[tuple[int, int]], outputs: list[Output]
    ) -> tuple[int, bool]:
        loop = asyncio.get_running_loop()
        fd_3 = f"exec 3>/proc/self/fd/{pipes[1][1]}; " if len(pipes) > 1 else ""
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                f"{self._limits(timeout_s)}; {fd_3}{command}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipes[0][1],
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[write_end for _, write_end in pipes[1:]],
                cwd=self.root,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        self._groups.add(process.pid)
        for (read_end, _), output in zip(pipes, outputs, strict=True):
            os.set_blocking(read_end, False)
            loop.add_reader(read_end, output.read_from, read_end)
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
        for (read_end, _), output in zip(pipes, outputs, strict=True):
            output.read_from(read_end)
        ended_itself = exit_code < 0 and was_open and not timed_out
        return 128 - exit_code if ended_itself else exit_code, timed_out  # as a shell tells of a signal

    async def read(self, path: str) -> str:
        return self._regular_file(path).read_bytes().decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        target = self._writable(path)
        if target.exists():
            target = self._regular_file(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        target = self._writable(os.path.dirname(path)) / os.path.basename(path)
        self._inside(path)
        if target.is_dir() and not target.is_symlink():
            raise PathRefused(f"{path} is not a file")
        target.unlink()

    async def list(self, path: str) -> Names:
        folder = self._inside(path)
        with os.scandir(folder) as entries:
            return sorted(entry.name + "/" if self._is_folder(entry) else entry.name for entry in entries)

    async def files(self) -> Names:
        return sorted(_regular_files(self.root))

    async def changes(self) -> dict[str, str | None]:
        before, after = set(_regular_files(self._base)), set(_regular_files(self.root))
        changed: dict[str, str | None] = {}
        for path in sorted(before | after):
            if "__pycache__" in path.split("/"):
                continue
            # A name that is not UTF-8 comes as lone surrogates, which no record of the rollout could be written with.
            name = os.fsencode(path).decode(errors="replace")
            if path not in after:
                changed[name] = None
                continue
            content = (self.root / path).read_bytes()
            if path not in before or (self._base / path).read_bytes() != content:
                changed[name] = content.decode(errors="replace")
        return changed

    async def publish(self, name: str, text: str) -> None:
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise PathRefused(f"{name!r} is not a name under {HISTORY}")
        target = self._history / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_bytes(text.encode(errors="replace"))
        target.chmod(0o444)

    async def fork(self) -> Self:
        """By copying everything."""
        box = type(self)(self._base, self.spec, self._python)
        for name in ("tree", "home", "tmp", "history"):
            remove_tree(str(box._place / name))
            shutil.copytree(self._place / name, box._place / name, symlinks=True)
        return box

    async def snapshot(self) -> None:
        """Nothing: this box does not come back after a crash."""

    def usage(self) -> BoxUsage:
        disk_mb = bytes_in(str(self._place)) / 2**20
        return BoxUsage(self._num_commands, self._wall_s, self._cpu_s, None, disk_mb)

    async def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        self._groups.clear()
        remove_tree(str(self._place))

    def _inside(self, path: str) -> Path:
        try:
            if path == HISTORY or path.startswith(HISTORY + "/"):
                place, resolved = self._history, os.path.realpath(f"{self._history}{path.removeprefix(HISTORY)}")
            else:
                place, resolved = self.root, os.path.realpath(self.root / path)
        except ValueError:  # a null byte or a lone surrogate
            raise PathRefused(f"{path!r} is not a path") from None
        if not Path(resolved).is_relative_to(place):
            raise PathRefused(f"{path} is outside of the repository")
        return Path(resolved)

    def _writable(self, path: str) -> Path:
        target = self._inside(path)
        if not target.is_relative_to(self.root):
            raise PathRefused(f"{HISTORY} can be read and not written")
        return target

    def _regular_file(self, path: str) -> Path:
        """Folders are refused, and so are pipes and devices: opening one could wait forever."""
        target = self._inside(path)
        if not stat.S_ISREG(target.stat().st_mode):
            raise PathRefused(f"{path} is not a file")
        return target

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        """A link out of the tree tells nothing about what it leads to."""
        if not entry.is_symlink():
            return entry.is_dir(follow_symlinks=False)
        target = os.path.realpath(entry.path)
        return Path(target).is_relative_to(self.root) and os.path.isdir(target)

    def _limits(self, timeout_s: float) -> str:
        """Shell commands and not `preexec_fn`, which may deadlock in a process with threads.

        The limit on processor time is for a process that left the group: nothing else would ever end it.
        """
        processor_s = math.ceil(timeout_s) * (os.cpu_count() or 1) + 1
        memory_kib, file_blocks = self.spec.memory_mb * 1024, self.spec.disk_mb * 2048
        return f"ulimit -c 0; ulimit -v {memory_kib}; ulimit -t {processor_s}; ulimit -f {file_blocks}; ulimit -n 256"


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _regular_files(folder: str | Path, prefix: str = "") -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _regular_files(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name
