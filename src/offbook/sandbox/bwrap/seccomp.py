"""The system calls a sandbox may not make, as a filter that the kernel runs (`bwrap --seccomp FD`).

It closes what namespaces leave open: parts of the kernel that are large, seldom needed and often broken into, and
sockets that belong to no network namespace. It names what is refused and allows the rest, because programs need far
more calls than anyone lists, except that calls younger than this file do not exist for a sandbox.
"""

from __future__ import annotations

import errno
import platform
import struct

from offbook.types import OffbookError

# name: (x86_64, aarch64), None where that architecture has no such call
REFUSED: dict[str, tuple[int, int | None]] = {
    # mounts, roots and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # the kernel's keys, programs, rings and modules
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "query_module": (178, None),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    # files by handle, which no mount holds back
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    # what of a file is in memory: sandboxes that share a file would learn from one another what was read of it
    "fadvise64": (221, 223),
    "mincore": (27, 232),
    "cachestat": (451, 451),
    # the whole machine
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# An ordinary user's sandboxes count for that user, whose programs outside must go on getting these. Programs take the
# error for a limit that is reached, and look at the files themselves.
INOTIFY = {"inotify_init": (253, None), "inotify_init1": (294, 26)}
CHECKED: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "personality": (135, 92),
    "preadv2": (327, 286),
}
YOUNGEST = 469  # file_setattr, Linux 6.17; since 2019 new calls have one number on every architecture
X32 = 0x40000000  # x86_64 numbers with this bit mean the same calls again, under the unused x32 ABI
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that `clone` takes
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. AF_VSOCK would reach the host from any namespace
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into the terminal that the sandbox was started from
PERSONALITIES = (0, 0xFFFFFFFF)  # the ordinary one, and the question which one it is

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000


def seccomp_program(machine: str | None = None, inotify: bool = True) -> bytes:
    """A classic BPF program for this machine, or for the one named. `inotify`: whether files may be watched.

    Every test skips over what directly follows it, so no jump comes near the 255 instructions that one can reach.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise OffbookError(f"sandboxes have no system call filter for {machine} machines, only for x86_64 and aarch64")
    column = list(ARCHITECTURES).index(machine)
    refuse, missing = _fail(errno.EPERM), _fail(errno.ENOSYS)

    program = _load(4) + _when(JUMP_EQUAL, ARCHITECTURES[machine], b"", refuse)
    program += _load(0) + _when(JUMP_AT_LEAST, X32, refuse) + _when(JUMP_AT_LEAST, YOUNGEST + 1, missing)
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += _when(JUMP_EQUAL, number, refuse)
    for numbers in () if inotify else INOTIFY.values():
        number = numbers[column]
        if number is not None:
            program += _when(JUMP_EQUAL, number, _fail(errno.EMFILE))

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
