"""The system calls a sandbox may not make, as a filter that the kernel runs (`bwrap --seccomp FD`).

It closes what namespaces leave open: parts of the kernel that are large, seldom needed and often broken into, and
sockets that belong to no network namespace. It names what is refused and allows the rest, because programs need far
more calls than anyone lists, except that calls younger than this file do not exist for a sandbox.
"""

from __future__ import annotations

import errno
import platform
import struct
import tomllib
from pathlib import Path

from offbook.types import OffbookError

CALLS: dict[str, dict[str, list[int]]] = tomllib.loads(
    Path(__file__).with_name("syscalls.toml").read_text()
)  # their numbers on each of ARCHITECTURES, -1 where it has no such call
REFUSED = CALLS["refused"]
INOTIFY = CALLS["inotify"]
CHECKED = CALLS["checked"]
YOUNGEST = 469  # file_setattr, Linux 6.17; since 2019 new calls have one number on every architecture
X32 = 0x40000000  # x86_64 numbers with this bit mean the same calls again, under the unused x32 ABI
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that `clone` takes
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. AF_VSOCK would reach the host from any namespace
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into the terminal that the sandbox was started from
PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question which one it is

LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
JUMP_ANY_BIT = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
FAIL = 0x00050000


def seccomp_program(machine: str | None = None, inotify: bool = True) -> bytes:
    """A classic BPF program for this machine, or for the one named. `inotify`: whether files may be watched.

    Every test skips over what directly follows it, so no jump comes near the 255 instructions that one can reach.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OffbookError(f"sandboxes have no system call filter for {machine} machines, only for x86_64 and aarch64")
    column = list(ARCHITECTURES).index(machine)
    refuse = _fail(errno.EPERM)
    missing = _fail(errno.ENOSYS)

    program = _load(4) + _when(JUMP_EQUAL, ARCHITECTURES[machine], b"", refuse)
    program += _load(0) + _when(JUMP_AT_LEAST, X32, refuse) + _when(JUMP_AT_LEAST, YOUNGEST + 1, missing)
    for refused, answer in ((REFUSED, refuse), ({} if inotify else INOTIFY, _fail(errno.EMFILE))):
        for numbers in refused.values():
            program += _when(JUMP_EQUAL, numbers[column], answer) if numbers[column] >= 0 else b""

    family = _one_of(0, FAMILIES, _return(ALLOW), _fail(errno.EAFNOSUPPORT))
    rules = {
        "clone": _load(16) + _when(JUMP_ANY_BIT, NEW_NAMESPACES, refuse) + _return(ALLOW),
        "clone3": missing,  # its flags lie in memory, which no filter can read; a libc then takes clone
        "socket": family,
        "socketpair": family,
        "ioctl": _one_of(1, TERMINAL_INPUT, refuse, _return(ALLOW)),
        "personality": _one_of(0, PERSONALITIES, _return(ALLOW), refuse),
        # RWF_NOWAIT reads only what is in memory; as where the kernel knows no flags
        "preadv2": _one_of(5, (0,), _return(ALLOW), _fail(errno.EOPNOTSUPP)),
    }
    for name, rule in rules.items():
        program += _when(JUMP_EQUAL, CHECKED[name][column], rule)
    return program + _return(ALLOW)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)  # struct sock_filter


def _load(offset: int) -> bytes:
    return _instruction(LOAD, offset)  # of struct seccomp_data: number 0, architecture 4, arguments from 16


def _return(action: int) -> bytes:
    return _instruction(RETURN, action)


def _fail(number: int) -> bytes:
    return _return(FAIL | number)


def _when(test: int, value: int, then: bytes, otherwise: bytes = b"") -> bytes:
    """`then` and `otherwise` must return, unless they are empty: then the program goes on behind both."""
    if then:
        return _instruction(test, value, 0, len(then) // 8) + then + otherwise
    return _instruction(test, value, len(otherwise) // 8, 0) + otherwise


def _one_of(argument: int, values: tuple[int, ...], then: bytes, otherwise: bytes) -> bytes:
    """The kernel takes these arguments as 32-bit integers, so their upper halves are not looked at: filling them must
    not get a call past the filter."""
    tests = b"".join(_when(JUMP_EQUAL, value, then) for value in values)
    return _load(16 + 8 * argument) + tests + otherwise
