"""The interface that all kinds of sandboxes have."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from offbook.sandbox.access import Opened

Names = list[str]  # inside a class with a method called `list`, the builtin cannot be named
Backend = Literal["bwrap", "container", "process"]
HISTORY = "/history"  # where the agent finds what the harness published: it can read there and not write
# Errors of the machine, which no command in a sandbox can cause. Not EDQUOT (the sandbox is full) nor EAGAIN (a command
# can hold a lease on a file, or fork without limit where there are no control groups).
HOST_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.ESTALE, errno.EROFS, errno.ENODEV}
)
# Vim waits for keys on stderr where stdin has none. With this it ends, unless its own arguments end it before.
VIMINIT = "if resolve('/proc/self/fd/0') ==# '/dev/null' | autocmd VimEnter * cquit | endif"
CHANGED_BYTES = 16 * 1024 * 1024  # of all text that a rollout changed; what comes after is only named


class PathRefused(ValueError):
    """A path that leaves the tree or is no regular file. The tool call turns it into a message for the agent."""


def environment(python: str, home: str, temporary: str) -> dict[str, str]:
    """What commands find set: nothing of the host's own. `python` is a prefix, whose bin/ comes first on the path."""
    return {
        "PATH": os.pathsep.join([os.path.join(python, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "VIMINIT": VIMINIT,
    }


@dataclass(frozen=True)
class SandboxSpec:
    """Which kind of sandbox, and how much of the machine one sandbox may use."""

    backend: Backend = "bwrap"
    memory_mb: int = 2048
    pids: int = 256
    cpus: float = 0.0  # cores' worth of processor time; 0 is no limit
    disk_mb: int = 512  # what may be written, all files together
    image: str = ""  # container only
    watch: bool = False  # tell which files commands open; bwrap only, and only for root


@dataclass(frozen=True)
class ExecResult:
    """How a command ended and what it printed, stdout and stderr as they came.

    The exit code is the shell's, 128 + n where signal n ended the command; -9 where the sandbox killed it.
    """

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool  # the middle of the output was left out
    report: str = ""  # what it wrote to file descriptor 3, where that was asked for
    exhausted: str = ""  # which limit of the sandbox ended it ("memory", "disk"), if one did
    opened: Opened | None = None  # None without watching; commands started together share the list


class Changes(dict[str, str | None]):
    """What differs from the tree that a sandbox was made from: path -> new text, None where the file is gone.

    `partial` names the files whose content was left out: binary ones, and those beyond CHANGED_BYTES in all. They must
    not be written back to a user's disk."""

    def __init__(self) -> None:
        super().__init__()
        self.partial: list[str] = []
        self.left = CHANGED_BYTES

    def put(self, path: str, content: bytes) -> None:
        """Record a file. `content` may end one byte after what is `left`, which tells that there is more."""
        why = ""
        if b"\0" in content:
            why = "binary"
        elif len(content) > self.left:
            why = f"more than {CHANGED_BYTES >> 20} MB were changed"
        if why:
            self.partial.append(path)
            self[path] = f"[{why}: the content is left out]\n"
            return
        self.left -= len(content)
        self[path] = content.decode(errors="replace")

    def settled(self) -> Self:
        """The same, sorted by path."""
        items = sorted(self.items())
        self.clear()
        self.update(items)
        return self


class Sandbox(Protocol):
    """A private world around a tree. Paths are relative to the tree, or under /history; a bad one raises PathRefused,
    a missing one OSError. Commands run in the tree, each in processes of its own that do not outlive it.

    Calls may overlap: commands started together run side by side; writes and forks wait for them.
    """

    python: str  # the interpreter that tests run on, as commands inside name it

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        """Run a shell command. With `report` it also gets a pipe as file descriptor 3, which is not its output."""
        ...

    async def read(self, path: str) -> str: ...

    async def write(self, path: str, text: str) -> None: ...

    async def remove(self, path: str) -> None: ...

    async def list(self, path: str) -> Names:
        """The sorted names in a folder; names of folders end with a slash."""
        ...

    async def files(self) -> Names:
        """The sorted paths of all regular files of the tree."""
        ...

    async def changes(self) -> Changes:
        """What differs from the tree that the sandbox was made from."""
        ...

    async def publish(self, name: str, text: str) -> None:
        """Put a file under /history, where the agent can read it and not write it."""
        ...

    async def fork(self) -> Self:
        """Another sandbox that starts from exactly here. The two go separate ways."""
        ...

    async def close(self) -> None:
        """Kill what runs and leave nothing behind. A closed sandbox may be closed again."""
        ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
