"""What a box offers, whatever stands behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Names = list[str]  # inside a class with a method called `list`, the builtin cannot be named


class PathRefused(ValueError):
    """A path that leaves the tree or is no regular file. The tool call turns it into a message for the agent."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended and what it printed, stdout and stderr as they came. Negative exit codes are signals."""

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool  # the middle of the output was left out


class Box(Protocol):
    """A private copy of a tree. Paths are relative to it; a bad one raises PathRefused, a missing one OSError."""

    async def exec(self, command: str, timeout_s: float) -> ExecResult: ...

    def read(self, path: str) -> str: ...

    def write(self, path: str, text: str) -> None: ...

    def list(self, path: str) -> Names:
        """The sorted names in a folder; names of folders end with a slash."""
        ...

    def files(self) -> Names:
        """The sorted paths of all regular files."""
        ...

    def changes(self) -> dict[str, str | None]:
        """What differs from the tree that the box was made from: path -> new text, None where the file is gone."""
        ...

    def close(self) -> None: ...
