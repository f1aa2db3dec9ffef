"""The output of a command: bounded, as text, and harmless to show.

Text from a sandbox ends up in prompts, records and terminals. There an escape sequence could hide or fake lines, set a
window's title or write to the clipboard, so of all control characters only newlines and tabs stay.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re

READ_BYTES = 1024 * 1024  # more than a pipe holds, so one read empties it
OUTPUT_BYTES = 64 * 1024  # kept of what a command prints
REPORT_BYTES = 4 * 1024 * 1024  # kept of what it writes to file descriptor 3

# ECMA-48. Each alternative begins at an introducer and none can run past another introducer, and possessive
# quantifiers never step back: any input is read in linear time.
_CONTROLS = re.compile(
    r"(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x00-\x1f\x7f-\x9f]*+(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*+[ -/]*+[@-~]?"  # CSI: colours, cursor movements
    r"|\x1b[ -/]*+[0-~]?"  # any other escape
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_LINE_END = re.compile(r"(?<!\r)\r++$", re.MULTILINE)
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\n])", re.MULTILINE)
_CUT_AT_START = re.compile(rb"^[\x80-\xbf]{1,3}")
_CUT_AT_END = re.compile(rb"(?:[\xc0-\xff]|[\xe0-\xff][\x80-\xbf]|[\xf0-\xff][\x80-\xbf]{2})\Z")


def plain_text(text: str) -> str:
    """Text without escape sequences and control characters, and with the last state of lines that a progress bar wrote.

    A string sequence (OSC, DCS) that its own line does not close hides nothing: only its introducer is removed.
    """
    text = _CONTROLS.sub("", text)
    text = _LINE_END.sub("", text)
    return _OVERWRITTEN.sub("", text)


def pipe() -> tuple[int, int]:
    """A non-blocking end to read, and one to write for a child.

    The latter has at least two digits: a shell may know only descriptors of one digit, and must not use it as one.
    """
    read_end, low = os.pipe()
    os.set_blocking(read_end, False)
    write_end = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(low)
    return read_end, write_end


class Output:
    """The beginning and the end of what comes through a pipe.

    The pipe is not asyncio's, which waits for a pipe to close, and a daemon may hold it open.
    """

    def __init__(self, limit_bytes: int = OUTPUT_BYTES) -> None:
        self.read_end = -1
        self._head = bytearray()
        self._tail = bytearray()
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._num_bytes = 0

    def open(self) -> int:
        """Start reading. Returns the end to write to, which the caller closes."""
        self.read_end, write_end = pipe()
        asyncio.get_running_loop().add_reader(self.read_end, self.read)
        return write_end

    def close(self) -> None:
        if self.read_end >= 0:
            asyncio.get_running_loop().remove_reader(self.read_end)
            os.close(self.read_end)
            self.read_end = -1

    def read(self) -> None:
        """Read what the pipe holds now, without blocking."""
        try:
            chunk = os.read(self.read_end, READ_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # every writer closed it, so it would count as readable over and over
            asyncio.get_running_loop().remove_reader(self.read_end)
        self._num_bytes += len(chunk)
        room = self._head_bytes - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_bytes)]

    @property
    def truncated(self) -> bool:
        return self._num_bytes > len(self._head) + len(self._tail)

    def text(self) -> str:
        if not self.truncated:
            return plain_text(bytes(self._head + self._tail).decode(errors="replace"))
        head = _CUT_AT_END.sub(b"", self._head)
        tail = _CUT_AT_START.sub(b"", self._tail)
        gap = f"\n[{self._num_bytes - len(head) - len(tail)} bytes left out]\n"
        return plain_text(head.decode(errors="replace")) + gap + plain_text(tail.decode(errors="replace"))
