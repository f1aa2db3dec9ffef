"""Sandboxes of processes and of namespaces: commands end when they must, paths stay inside, changes are seen, forks go
separate ways, and nothing is left behind. What a sandbox keeps an agent from is in test_escape.py."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.sandbox import (
    HISTORY,
    BwrapSandbox,
    ExecResult,
    PathRefused,
    ProcessSandbox,
    Sandbox,
    SandboxSpec,
    isolation,
    open_sandbox,
    require_isolation,
)
from offbook.sandbox.bwrap import arguments
from offbook.sandbox.bwrap.isolation import Groups, find_groups, make_group
from offbook.sandbox.output import OUTPUT_BYTES
from offbook.sandbox.sandbox import CHANGED_BYTES
from offbook.types import OffbookError

SECRET = "not for the agent"
KINDS = [ProcessSandbox, BwrapSandbox]

pytestmark = pytest.mark.anyio  # runs async tests
needs_isolation = pytest.mark.skipif(not isolation().works, reason=isolation().missing)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree beside a folder that sandboxes must never touch."""
    place = tmp_path_factory.mktemp("base")
    outside = place / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    tree = place / "tree"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "one.py").write_text("ONE = 1\n")
    (tree / "pkg" / "two.py").write_text("TWO = 2\n")
    (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "out").symlink_to(outside)
    (tree / "dangling").symlink_to(outside / "nothing")
    (tree / "inner").symlink_to("pkg")
    return tree


@pytest.fixture(params=[ProcessSandbox, pytest.param(BwrapSandbox, marks=needs_isolation)])
def sandbox(base: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = request.param(base)
    yield sandbox
    asyncio.run(sandbox.close())


@pytest.fixture
def isolated(base: Path) -> Iterator[BwrapSandbox]:
    require_isolation()
    sandbox = BwrapSandbox(base)
    yield sandbox
    asyncio.run(sandbox.close())


def is_running(pid: int) -> bool:
    """A zombie that nobody has collected yet does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int) -> bool:
    """A killed process takes a moment to go."""
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def sleepers(seconds: str) -> list[int]:
    """Processes on this machine that run `sleep seconds`."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and Path(f"/proc/{name}/cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(name))
        except OSError:
            continue
    return found


def unique_sleep() -> str:
    return f"{random.randint(10**6, 10**9)}"


async def test_output_is_merged_and_the_exit_code_kept(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 3", 20)
    assert result == ExecResult(3, "out\nerr\n", timed_out=False, truncated=False)


async def test_a_command_starts_in_the_tree_without_input(sandbox: Sandbox) -> None:
    root = sandbox.root if isinstance(sandbox, ProcessSandbox) else "/app"
    assert (await sandbox.exec("pwd; cat; ./run.sh", 20)).output == f"{root}\nran\n"


@pytest.mark.parametrize(
    "command",
    [
        "python -i",
        "python -c 'input()'",
        "bash -i",
        "cat > new <<EOF\nwithout an end",
        "git init -q && git add . && git commit",
        "cat /dev/tty",
        "less run.sh",
        "python -m http.server & echo started",
        pytest.param("vim run.sh", marks=pytest.mark.skipif(not shutil.which("vim"), reason="there is no vim")),
    ],
)
async def test_a_command_that_would_wait_for_a_person_ends_at_once(sandbox: Sandbox, command: str) -> None:
    assert not (await sandbox.exec(f"bash -c {shlex.quote(command)}", 10)).timed_out


async def test_nothing_of_the_hosts_environment_is_seen(sandbox: Sandbox) -> None:
    os.environ["OFFBOOK_TOKEN"] = SECRET
    try:
        lines = (await sandbox.exec("env", 20)).output.splitlines()
    finally:
        del os.environ["OFFBOOK_TOKEN"]
    names = {line.partition("=")[0] for line in lines} - {"PWD", "OLDPWD", "SHLVL", "_"}  # set by the shell itself
    assert names == {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "VIMINIT"}
    assert (await sandbox.exec('touch "$HOME/a" "$TMPDIR/b"', 20)).exit_code == 0
    assert (await sandbox.exec('ls "$HOME/a" "$TMPDIR/b"', 20)).exit_code == 0  # and they stay
    assert await sandbox.changes() == {}


async def test_python_is_the_one_that_runs_offbook(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("python -c 'import pytest, pkg.one; print(pkg.one.ONE)'", 20)).output == "1\n"


async def test_long_output_keeps_its_beginning_and_end(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo begin; head -c 100000000 /dev/zero | tr '\\0' x; echo end", 30)
    assert result.truncated
    assert result.exit_code == 0
    assert result.output.startswith("begin\nxxx")
    assert result.output.endswith("xxx" + "end\n")
    assert "bytes left out" in result.output
    assert len(result.output) < OUTPUT_BYTES + 100


async def test_a_report_is_not_output(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo seen; echo told >&3; echo also >&3", 20, report=True)
    assert (result.output, result.report) == ("seen\n", "told\nalso\n")
    assert (await sandbox.exec("(echo told >&3) 2>/dev/null || echo closed", 20)).output == "closed\n"


async def test_the_deadline_kills_grandchildren_and_keeps_the_output(sandbox: Sandbox) -> None:
    mark, began = unique_sleep(), time.monotonic()
    result = await sandbox.exec(f"echo so far; sh -c 'sleep {mark} & wait' & wait", 1.0)
    assert time.monotonic() - began < 8
    assert result == ExecResult(-signal.SIGKILL, "so far\n", timed_out=True, truncated=False)
    assert all(map(ends, sleepers(mark)))


async def test_what_a_command_leaves_in_the_background_is_killed(sandbox: Sandbox) -> None:
    mark = unique_sleep()
    result = await sandbox.exec(f"sleep {mark} & echo done", 20)
    assert (result.output, result.timed_out) == ("done\n", False)
    assert all(map(ends, sleepers(mark)))


async def test_a_process_sandbox_limits_memory_and_file_size(base: Path) -> None:
    async with ProcessSandbox(base) as sandbox:
        assert "MemoryError" in (await sandbox.exec("python -c 'bytearray(5 << 30)'", 20)).output
        assert (await sandbox.exec("head -c 500000000 /dev/zero > big", 20)).exit_code != 0
        assert (sandbox.root / "big").stat().st_size < 200_000_000


async def test_a_signal_of_its_own_ends_a_command_as_a_shell_tells(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("kill -SEGV $$", 20)).exit_code == 128 + signal.SIGSEGV


async def test_commands_started_together_do_not_disturb_each_other(sandbox: Sandbox) -> None:
    results = await asyncio.gather(
        sandbox.exec("sleep 0.3; echo a", 20),
        sandbox.exec("sleep 0.3; echo b; echo r >&3; exit 4", 20, report=True),
        sandbox.exec("echo c; sleep 50", 0.5),
        sandbox.exec("echo later", 20),
    )
    assert [(result.exit_code, result.output, result.report) for result in results] == [
        (0, "a\n", ""),
        (4, "b\n", "r\n"),
        (-signal.SIGKILL, "c\n", ""),
        (0, "later\n", ""),
    ]
    assert [result.timed_out for result in results] == [False, False, True, False]


async def test_a_write_waits_for_a_running_command(isolated: BwrapSandbox) -> None:
    command = asyncio.create_task(isolated.exec("sleep 0.3; cat new 2>/dev/null || echo absent", 20))
    await asyncio.sleep(0.1)
    await isolated.write("new", "text")
    assert (await command).output == "absent\n"
    assert (await isolated.exec("cat new", 20)).output == "text"


async def test_cancelling_kills_the_command(sandbox: Sandbox) -> None:
    mark = unique_sleep()
    command = asyncio.create_task(sandbox.exec(f"touch started; sleep {mark}", 60))
    while "started" not in await sandbox.files():
        await asyncio.sleep(0.01)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    assert (await sandbox.exec("echo next", 20)).output == "next\n"
    assert all(map(ends, sleepers(mark)))


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_ends_a_running_command(base: Path, kind: type[ProcessSandbox] | type[BwrapSandbox]) -> None:
    sandbox = kind(base)
    command = asyncio.create_task(sandbox.exec("touch started; sleep 60", 60))
    while "started" not in await sandbox.files():
        await asyncio.sleep(0.01)
    await sandbox.close()
    result = await command
    assert (result.exit_code, result.timed_out) == (-signal.SIGKILL, False)


@pytest.mark.parametrize("kind", KINDS)
async def test_close_removes_everything_and_may_be_called_again(
    base: Path, kind: type[ProcessSandbox] | type[BwrapSandbox]
) -> None:
    sandbox = kind(base)
    place = sandbox.root.parent if isinstance(sandbox, ProcessSandbox) else Path(sandbox.place)
    await sandbox.exec(
        "mkdir -p locked/inner && touch locked/inner/file && chmod 000 locked/inner locked . ~ $TMPDIR", 20
    )
    if isinstance(sandbox, BwrapSandbox):
        assert (await sandbox.exec("echo still", 20)).output == "still\n"
    await sandbox.close()
    await sandbox.close()
    assert not place.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sandbox_of_a_missing_tree_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ProcessSandbox] | type[BwrapSandbox]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        kind(tmp_path / "missing")
    assert [entry for entry in tmp_path.iterdir() if kind is ProcessSandbox or list(entry.glob("*/layer-*"))] == []


async def test_files_are_read_written_and_listed(sandbox: Sandbox) -> None:
    text = "line\r\nÜber\n\ttab"
    await sandbox.write("new/deep/file.txt", text)
    assert await sandbox.read("new/deep/file.txt") == text
    assert await sandbox.read("inner/one.py") == "ONE = 1\n"  # through a link that stays inside
    assert await sandbox.list("pkg") == ["one.py", "two.py"]
    assert await sandbox.list(".") == ["dangling", "inner", "new/", "out", "pkg/", "run.sh"]
    assert await sandbox.files() == ["new/deep/file.txt", "pkg/one.py", "pkg/two.py", "run.sh"]
    await sandbox.write("run.sh", "#!/bin/sh\necho changed\n")
    await sandbox.write("inner/one.py", "ONE = 'through the link'\n")
    assert (await sandbox.exec("./run.sh; cat pkg/one.py", 20)).output == "changed\nONE = 'through the link'\n"
    await sandbox.remove("run.sh")
    await sandbox.remove("inner")
    assert await sandbox.list(".") == ["dangling", "new/", "out", "pkg/"]
    assert (await sandbox.exec("ls", 20)).output == "dangling\nnew\nout\npkg\n"
    with pytest.raises(PathRefused):
        await sandbox.remove("pkg")
    with pytest.raises(FileNotFoundError):
        await sandbox.remove("pkg/none.py")


async def test_what_was_deleted_can_be_made_again(sandbox: Sandbox) -> None:
    """The old content must not shine through from below."""
    await sandbox.exec("rm -r pkg run.sh", 20)
    await sandbox.write("pkg/new.py", "NEW = 1\n")
    await sandbox.write("run.sh/now/a/folder", "x")
    assert await sandbox.list("pkg") == ["new.py"]
    assert (await sandbox.exec("ls pkg; cat run.sh/now/a/folder", 20)).output == "new.py\nx"
    await sandbox.remove("pkg/new.py")
    await sandbox.write("pkg/one.py", "ONE = 1\n")
    assert await sandbox.changes() == {"pkg/two.py": None, "run.sh": None, "run.sh/now/a/folder": "x"}
    assert (await sandbox.exec("rm -r pkg; mkdir pkg; ls pkg", 20)).output == ""
    assert await sandbox.changes() == {
        "pkg/one.py": None,
        "pkg/two.py": None,
        "run.sh": None,
        "run.sh/now/a/folder": "x",
    }


async def test_changes_are_seen_and_the_base_stays_as_it_was(base: Path, sandbox: Sandbox) -> None:
    assert await sandbox.changes() == {}
    await sandbox.write("pkg/one.py", "ONE = 11\n")
    await sandbox.write("pkg/three.py", "THREE = 3\n")
    await sandbox.remove("pkg/two.py")
    commands = r"printf '\377\000' > binary; mkdir pkg/__pycache__; touch pkg/__pycache__/one.pyc"
    await sandbox.exec(commands + r"; touch $(printf 'odd\377'); touch run.sh; ln -sf nowhere link", 20)
    assert await sandbox.changes() == {
        "binary": "[binary: the content is left out]\n",
        "odd\ufffd": "",
        "pkg/one.py": "ONE = 11\n",
        "pkg/three.py": "THREE = 3\n",
        "pkg/two.py": None,
    }
    assert (await sandbox.changes()).partial == ["binary"]
    assert (base / "pkg" / "one.py").read_text() == "ONE = 1\n"


async def test_all_changed_text_of_a_rollout_has_one_budget(sandbox: Sandbox) -> None:
    """Sparse files and many large ones are named and not read into memory."""
    await sandbox.exec(
        "for n in 1 2 3; do truncate -s 30M sparse$n; done; yes | head -c 9000000 | tee one two > three", 60
    )
    changes = await sandbox.changes()
    text = sum(len(content or "") for content in changes.values())
    assert text < CHANGED_BYTES + 1000
    assert len(changes) == 6
    assert len({*changes.partial} & {"one", "two", "three"}) == 2
    assert {"sparse1", "sparse2", "sparse3"} < {*changes.partial}


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../outside/secret.txt",
        "pkg/../../outside/secret.txt",
        "out/secret.txt",
        "dangling",
        "a\0b",
        "\ud800",
        HISTORY + "/../outside",
    ],
)
async def test_paths_that_leave_the_tree_are_refused(sandbox: Sandbox, path: str) -> None:
    for refused in (sandbox.read, sandbox.list, lambda path: sandbox.write(path, "x")):
        with pytest.raises(PathRefused):
            await refused(path)


PARTS = [
    "..",
    ".",
    "",
    "/",
    "/app",
    "pkg",
    "one.py",
    "out",
    "outside",
    "secret.txt",
    "dangling",
    "inner",
    "home",
    "tree",
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(path=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=6).map("/".join))
def test_no_path_reaches_outside(base: Path, kind: type[ProcessSandbox] | type[BwrapSandbox], path: str) -> None:
    async def attempt() -> None:
        async with kind(base) as sandbox:
            for use in (sandbox.read, sandbox.list, lambda path: sandbox.write(path, "x"), sandbox.remove):
                try:
                    assert SECRET not in str(await use(path))
                except (PathRefused, OSError):
                    continue

    asyncio.run(attempt())
    outside = base.parent / "outside"
    assert {entry.name: entry.read_text() for entry in outside.iterdir()} == {"secret.txt": SECRET}
    assert sorted(entry.name for entry in base.parent.iterdir()) == ["outside", "tree"]


async def test_a_pipe_is_no_file(sandbox: Sandbox) -> None:
    await sandbox.exec("mkfifo fifo", 20)
    with pytest.raises(PathRefused):
        await sandbox.read("fifo")
    with pytest.raises(PathRefused):
        await sandbox.write("fifo", "x")
    assert "fifo" not in await sandbox.files()


async def test_a_missing_file_is_the_file_systems_error(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.read("pkg/none.py")
    with pytest.raises(FileNotFoundError):
        await sandbox.read(HISTORY + "/none")
    with pytest.raises(PathRefused):
        await sandbox.read("pkg")


async def test_history_is_read_and_not_written(sandbox: Sandbox) -> None:
    await sandbox.publish("segment-1.txt", "what was said\n")
    await sandbox.publish("segment-1.txt", "what was really said\n")
    assert await sandbox.read(HISTORY + "/segment-1.txt") == "what was really said\n"
    assert await sandbox.list(HISTORY) == ["segment-1.txt"]
    for use in (lambda path: sandbox.write(path, "x"), sandbox.remove):
        with pytest.raises(PathRefused):
            await use(HISTORY + "/segment-1.txt")
    for name in ("../tree/x", "/x", ""):
        with pytest.raises(PathRefused):
            await sandbox.publish(name, "x")
    if isinstance(sandbox, BwrapSandbox):
        tries = (
            f"cat {HISTORY}/*; for c in 'touch {HISTORY}/x' 'rm -f {HISTORY}/segment-1.txt'; do $c 2>&-; echo $?; done"
        )
        assert (await sandbox.exec(tries, 20)).output == "what was really said\n1\n1\n"
    assert await sandbox.changes() == {}


async def test_forks_go_separate_ways(base: Path, sandbox: Sandbox) -> None:
    await sandbox.exec("echo 2 > pkg/one.py; rm pkg/two.py; echo t > $TMPDIR/t; echo h > ~/h", 20)
    await sandbox.publish("a", "a")
    async with await sandbox.fork() as fork:
        await asyncio.gather(fork.exec("echo 3 > pkg/one.py; rm run.sh", 20), sandbox.exec("echo 4 > pkg/four.py", 20))
        await fork.publish("b", "b")
        assert await fork.changes() == {"pkg/one.py": "3\n", "pkg/two.py": None, "run.sh": None}
        assert await sandbox.changes() == {"pkg/four.py": "4\n", "pkg/one.py": "2\n", "pkg/two.py": None}
        assert (await fork.exec("cat $TMPDIR/t ~/h", 20)).output == "t\nh\n"
        assert (await sandbox.list(HISTORY), await fork.list(HISTORY)) == (["a"], ["a", "b"])
        async with await fork.fork() as second:
            await sandbox.close()  # the others still have what they share
            await fork.exec("echo 5 > five", 20)
            assert await second.changes() == {"pkg/one.py": "3\n", "pkg/two.py": None, "run.sh": None}
            assert (await second.exec("cat pkg/one.py; ls", 20)).output == "3\ndangling\ninner\nout\npkg\n"


STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(["a", "d/a", "d/e/b", "new/x"]), st.text("xy", max_size=2)),
    st.tuples(st.just("remove"), st.sampled_from(["a", "d/a", "d/e/b", "new/x"])),
    st.tuples(st.just("exec"), st.sampled_from(["rm -rf d", "rm -rf a; mkdir a; echo 1 > a/in", "rm -rf d; echo f > d",
        "mkdir -p d/e; echo 2 > d/e/b", "rm -rf new d/e", "mv d moved", "ln -s d/a l", "rm -rf *"])),
    st.tuples(st.just("fork")),
)  # fmt: skip


@needs_isolation
@settings(max_examples=20)
@given(steps=st.lists(STEPS, max_size=8))
def test_both_kinds_of_sandboxes_see_the_same(steps: list[tuple[str, ...]]) -> None:
    """The plain copy is the reference for the merged view and for what the kernel and we write into layers."""

    async def both() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "d" / "e").mkdir(parents=True)
            for name in ("a", "d/a", "d/e/b"):
                (Path(folder) / name).write_text(name)
            sandboxes: list[Sandbox] = [ProcessSandbox(Path(folder)), BwrapSandbox(Path(folder))]
            try:
                for step, *arguments in steps:
                    sandboxes = [await _apply(sandbox, step, arguments) for sandbox in sandboxes]
                for look in (
                    lambda sandbox: sandbox.changes(),
                    lambda sandbox: sandbox.files(),
                    lambda sandbox: sandbox.list("."),
                ):
                    assert await look(sandboxes[0]) == await look(sandboxes[1])
                inside = (await sandboxes[1].exec("find . -type f | sed 's#^./##' | LC_ALL=C sort", 20)).output.split()
                assert inside == await sandboxes[1].files()
            finally:
                for sandbox in sandboxes:
                    await sandbox.close()

    async def _apply(sandbox: Sandbox, step: str, arguments: list[str]) -> Sandbox:
        if step == "fork":
            fork = await sandbox.fork()
            await sandbox.close()
            return fork
        try:
            if step == "exec":
                await sandbox.exec(arguments[0], 20)
            else:
                await getattr(sandbox, step)(*arguments)
        except (OSError, PathRefused):
            pass
        return sandbox

    asyncio.run(both())


async def test_changes_and_forks_in_turns_end_in_one_sentence_and_lose_nothing(isolated: BwrapSandbox) -> None:
    async def change_and_fork() -> None:
        for number in range(200):
            await isolated.write(f"files/{number}", str(number))
            await (await isolated.fork()).close()

    with pytest.raises(OffbookError, match="no more layers"):
        await change_and_fork()
    names = await isolated.list("files")
    assert len(names) > 20
    assert (await isolated.exec("ls files", 20)).output.split() == names


LEAVING = """
import asyncio, sys
from pathlib import Path
from offbook.sandbox import BwrapSandbox

async def main():
    sandbox = BwrapSandbox(Path(sys.argv[1]))
    asyncio.create_task(sandbox.exec("touch running; sleep " + sys.argv[2], 60))
    while "running" not in await sandbox.files():
        await asyncio.sleep(0.01)
    print(sandbox.place, *[sandbox.group.folder] if sandbox.group else [], flush=True)
    globals()["kept"] = sandbox
    if sys.argv[3] == "kill":
        import os
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@needs_isolation
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_ends_leaves_nothing(base: Path, tmp_path: Path, how: str) -> None:
    """At exit it cleans up itself. When it was killed, the next process that opens a sandbox does."""
    mark = unique_sleep()
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # where no other process opens sandboxes
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, base, mark, how], env=env, check=False, stdout=subprocess.PIPE, text=True
    )
    left = done.stdout.split()
    assert left
    assert all(map(ends, sleepers(mark)))
    if how == "kill":
        assert os.path.exists(left[0])
        code = "import pathlib, sys, offbook.sandbox as s; s.BwrapSandbox(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, base], env=env, check=True)
    assert [path for path in left if os.path.exists(path)] == []


@needs_isolation
async def test_folders_that_can_only_be_read(base: Path, tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "tool").write_text("tool")
    (tmp_path / "beside").write_text(SECRET)
    async with await open_sandbox(
        base, SandboxSpec(), mounts={str(tmp_path / "environment"): tmp_path / "environment"}
    ) as sandbox:
        path = tmp_path / "environment"
        result = await sandbox.exec(f"cat {path}/tool; ls {tmp_path}; touch {path}/x", 20)
        assert result.output.startswith("toolenvironment\ntouch: ")
    with pytest.raises(OffbookError, match="no folder"):
        await open_sandbox(base, SandboxSpec(), mounts={"/missing": tmp_path / "missing"})


@needs_isolation
async def test_folders_below_var_tmp_can_be_read(base: Path) -> None:
    """Which is /tmp in sandboxes that are shown none of it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        Path(place, "tool").write_text("tool")
        async with await open_sandbox(base, SandboxSpec(), mounts={place: Path(place)}) as sandbox:
            assert (await sandbox.exec(f"cat {place}/tool; touch /tmp/x", 20)).output == "tool"
    async with await open_sandbox(base, SandboxSpec()) as sandbox:
        assert (await sandbox.exec("touch /var/tmp/x; ls /tmp", 20)).output == "x\n"


@needs_isolation
@pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/dev/shm"])
@pytest.mark.parametrize("called", ["{}", "{}/../a clone"])
async def test_a_sandbox_is_the_same_wherever_the_environment_lies(
    base: Path, place: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with a space in its name too, which scripts name in another way, and called through `..`."""
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        venv = Path(temporary, "a clone", ".venv")
        packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        packages.mkdir(parents=True)
        (packages / "beside.py").write_text("print('beside')")
        (venv / "bin").mkdir()
        (venv / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
        (venv / "bin" / "script").write_text(
            f"#!/bin/sh\n'''exec' \"{venv}/bin/python\" \"$0\" \"$@\"\n' '''\nimport beside\n"
        )
        (venv / "bin" / "script").chmod(0o755)
        monkeypatch.setattr(sys, "prefix", called.format(venv.parent) + "/.venv")
        arguments._view_arguments.cache_clear()
        try:
            async with await open_sandbox(base, SandboxSpec()) as sandbox:
                seen = "ls -A /tmp /var/tmp/ /dev/shm; which python; python -c 'import sys; print(sys.prefix)'; script"
                told = (await sandbox.exec(seen, 20)).output
                assert not await sandbox.changes()
        finally:
            arguments._view_arguments.cache_clear()
    assert told == "/dev/shm:\n\n/tmp:\n\n/var/tmp/:\n/python/bin/python\n/python\nbeside\n"


@needs_isolation
async def test_processor_time_is_limited(base: Path) -> None:
    if "cpu" not in isolation().controllers:
        pytest.skip("no control group for processor time")
    async with BwrapSandbox(base, SandboxSpec(cpus=0.2)) as sandbox:
        busy = (
            "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        )
        used = await sandbox.exec(f"python -c '{busy}'", 20)
        assert 0 < float(used.output) < 0.6


@needs_isolation
async def test_odd_names_of_the_tree(tmp_path: Path) -> None:
    """Colons, commas and backslashes mean something in the options of an overlay."""
    tree = tmp_path / "a:b,c d\\e"
    tree.mkdir()
    (tree / "file").write_text("one\n")
    async with BwrapSandbox(tree) as sandbox:
        await sandbox.exec("echo two >> file", 20)
        assert (await sandbox.exec("cat file", 20)).output == "one\ntwo\n"


@needs_isolation
async def test_a_tree_of_another_owner_is_copied(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("before\n")
    os.chown(tmp_path / "folder" / "file", 12345, 12345)
    async with BwrapSandbox(tmp_path) as sandbox:
        assert (await sandbox.exec("echo after >> folder/file; cat folder/file", 20)).output == "before\nafter\n"
        assert await sandbox.changes() == {"folder/file": "before\nafter\n"}
    assert (tmp_path / "folder" / "file").read_text() == "before\n"


async def test_a_command_too_long_to_start_is_refused(isolated: BwrapSandbox) -> None:
    assert (await isolated.exec("true " + "x" * 200_000, 20)).exit_code == 126
    assert (await isolated.exec("echo a\0b", 20)).exit_code == 126


async def test_a_closed_sandbox_is_not_used(base: Path) -> None:
    sandbox = BwrapSandbox(base)
    await sandbox.close()
    with pytest.raises(RuntimeError):
        await sandbox.read("run.sh")
    with pytest.raises(RuntimeError):
        await sandbox.exec("true", 20)


async def test_a_machine_without_isolation_gets_one_clear_sentence(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    isolation.cache_clear()
    try:
        with pytest.raises(OffbookError, match=r"0\.8\.0 .* 0\.11 .*--sandbox\.backend process"):
            await open_sandbox(base)
        async with await open_sandbox(base, SandboxSpec(backend="process")) as sandbox:
            assert isinstance(sandbox, ProcessSandbox)
    finally:
        isolation.cache_clear()


def test_control_groups_are_found_and_filled(tmp_path: Path) -> None:
    """On plain files, because the machine may have none."""
    own = tmp_path / "user.slice" / "run.scope"
    own.mkdir(parents=True)
    for folder, handed_down in (own, ""), (own.parent, "cpu memory pids"):
        (folder / "cgroup.controllers").write_text("cpu memory pids" if folder != own else "")
        (folder / "cgroup.subtree_control").write_text(handed_down)
        (folder / "cgroup.procs").touch()
    mounts = f"30 23 0:26 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    groups = find_groups(mounts, "0::/user.slice/run.scope\n")
    assert groups == Groups(own.parent, ("memory", "pids", "cpu"))
    group_folder = own.parent / "sandbox"
    group_folder.mkdir()
    files = {"memory.max": "", "pids.max": "", "cpu.max": "", "cgroup.procs": "", "memory.swap.max": ""}
    files["memory.events"] = "low 0\noom 3\noom_kill 2\n"
    for name, text in files.items():
        (group_folder / name).write_text(text)
    group = make_group(groups, "sandbox", SandboxSpec(memory_mb=100, pids=7, cpus=1.5))
    told = {name: (group_folder / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert told == {"memory.max": str(100 << 20), "pids.max": "7", "cpu.max": "150000 100000"}
    assert group.entrance == f"{group_folder}/cgroup.procs"
    assert group.num_memory_kills() == 2


def test_no_control_group_is_found_where_none_may_be_made(tmp_path: Path) -> None:
    assert find_groups("30 23 0:26 / /nowhere rw - cgroup2 cgroup2 rw\n", "0::/\n") is None
    old = f"31 23 0:27 / {tmp_path} rw,relatime - cgroup cgroup rw,pids\n"
    assert find_groups(old, "8:pids:/\n0::/\n") == Groups(tmp_path, ("pids",)), "version 1 bounds processes alone"
    assert find_groups(old.replace("rw,pids", "rw,memory"), "0::/\n") is None
    assert find_groups("", "") is None
