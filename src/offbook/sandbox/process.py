"""A box of plain processes in a temporary directory.

It isolates nothing: a command can read whatever the user can read, reach the network, and leave a process behind by
giving it a session of its own. It is for trusted work and for tests. What it does hold: nothing of the host's
environment, limits on memory, processor time, file size and open files, a deadline, and bounded output.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from offbook.sandbox.box import ExecResult, Names, PathRefused

OUTPUT_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024  # more than a pipe holds, so one read empties it


class ProcessBox:
    def __init__(self, tree: Path):
        self._base = tree
        self._place = Path(os.path.realpath(tempfile.mkdtemp(prefix="offbook-box-")))
        self._groups: set[int] = set()  # process groups of the commands now running
        self.root = self._place / "tree"
        home, temporary = self._place / "home", self._place / "tmp"
        self._environment = {
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            home.mkdir()
            temporary.mkdir()
            shutil.copytree(tree, self.root, symlinks=True)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ProcessBox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """Run `command` in a fresh shell. Whatever it leaves in its process group is killed when it ends.

        The pipe is ours and not asyncio's, because asyncio waits for the pipe to close, and a daemon may hold it open.
        """
        loop = asyncio.get_running_loop()
        output = _Output()
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    "/bin/sh",
                    "-c",
                    f"{_limits(timeout_s)}; {command}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=self.root,
                    env=self._environment,
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
            self._groups.add(process.pid)
            loop.add_reader(read_end, output.read_from, read_end)
            try:
                await asyncio.wait_for(process.wait(), timeout_s)
                timed_out = False
            except TimeoutError:
                timed_out = True
            finally:
                _kill_group(process.pid)
                self._groups.discard(process.pid)
                exit_code = await process.wait()
            output.read_from(read_end)
        finally:
            loop.remove_reader(read_end)
            os.close(read_end)
        return ExecResult(exit_code, output.text(), timed_out, output.truncated)

    def read(self, path: str) -> str:
        return self._regular_file(path).read_bytes().decode(errors="replace")

    def write(self, path: str, text: str) -> None:
        target = self._inside(path)
        if target.exists():
            target = self._regular_file(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())

    def list(self, path: str) -> Names:
        with os.scandir(self._inside(path)) as entries:
            return sorted(entry.name + "/" if entry.is_dir() else entry.name for entry in entries)

    def files(self) -> Names:
        return sorted(_regular_files(self.root))

    def changes(self) -> dict[str, str | None]:
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

    def close(self) -> None:
        for group in self._groups:
            _kill_group(group)
        try:
            shutil.rmtree(self._place)
        except FileNotFoundError:
            return
        except PermissionError:  # the agent took rights away from a folder
            for folder, subfolders, _ in os.walk(self._place):
                for subfolder in (os.path.join(folder, name) for name in subfolders):
                    if not os.path.islink(subfolder):
                        os.chmod(subfolder, stat.S_IRWXU)
            shutil.rmtree(self._place)

    def _inside(self, path: str) -> Path:
        if os.path.isabs(path):
            raise PathRefused(f"{path} is absolute; paths are relative to the repository")
        try:
            resolved = Path(os.path.realpath(self.root / path))
        except ValueError:  # a null byte or a lone surrogate
            raise PathRefused(f"{path!r} is not a path") from None
        if not resolved.is_relative_to(self.root):
            raise PathRefused(f"{path} is outside of the repository")
        return resolved

    def _regular_file(self, path: str) -> Path:
        """Folders are refused, and so are pipes and devices: opening one could wait forever."""
        target = self._inside(path)
        if not stat.S_ISREG(target.stat().st_mode):
            raise PathRefused(f"{path} is not a file")
        return target


class _Output:
    """The beginning and the end of a stream of any length."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def read_from(self, read_end: int) -> None:
        """Take what the pipe holds now. Never waits."""
        try:
            chunk = os.read(read_end, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # every writer closed it, so it would count as readable over and over
            asyncio.get_running_loop().remove_reader(read_end)
        self._num_bytes += len(chunk)
        room = OUTPUT_BYTES // 2 - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        del self._tail[: -OUTPUT_BYTES // 2]

    @property
    def truncated(self) -> bool:
        return self._num_bytes > len(self._head) + len(self._tail)

    def text(self) -> str:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        gap = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return bytes(self._head + gap + self._tail).decode(errors="replace")


def _limits(timeout_s: float) -> str:
    """Shell commands and not `preexec_fn`, which may deadlock in a process with threads.

    The limit on processor time is for a process that left the group: nothing else would ever end it.
    """
    memory_kib = 4 * 1024 * 1024
    file_blocks = 128 * 1024  # of 512 bytes
    processor_s = math.ceil(timeout_s) * (os.cpu_count() or 1) + 1
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
