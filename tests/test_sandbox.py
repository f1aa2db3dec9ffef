"""The process box: commands end when they must, paths stay inside, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.sandbox import Box, ExecResult, PathRefused, ProcessBox
from offbook.sandbox.process import OUTPUT_BYTES, _Output

SECRET = "not for the agent"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree beside a folder that boxes must never touch."""
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


@pytest.fixture
def box(base: Path) -> Iterator[ProcessBox]:
    with ProcessBox(base) as box:
        yield box


def run(box: Box, command: str, timeout_s: float = 20.0) -> ExecResult:
    return asyncio.run(box.exec(command, timeout_s))


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


def test_output_is_merged_and_the_exit_code_kept(box: ProcessBox) -> None:
    result = run(box, "echo out; echo err >&2; exit 3")
    assert result == ExecResult(3, "out\nerr\n", timed_out=False, truncated=False)


def test_a_command_starts_in_the_tree_without_input(box: ProcessBox) -> None:
    assert run(box, "pwd; cat; ./run.sh").output == f"{box.root}\nran\n"


def test_nothing_of_the_hosts_environment_is_seen(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_TOKEN", SECRET)
    with ProcessBox(base) as box:
        lines = run(box, "env").output.splitlines()
        names = {line.partition("=")[0] for line in lines} - {"PWD", "SHLVL", "_"}  # set by the shell itself
        assert names == {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE"}
        assert run(box, 'touch "$HOME/a" "$TMPDIR/b"').exit_code == 0
        assert box.changes() == {}


def test_python_is_the_one_that_runs_offbook(box: ProcessBox) -> None:
    assert run(box, "python -c 'import pytest, pkg.one; print(pkg.one.ONE)'").output == "1\n"


def test_undecodable_output_is_replaced(box: ProcessBox) -> None:
    assert run(box, r"printf 'a\377b'").output == "a\ufffdb"


def test_long_output_keeps_its_beginning_and_end(box: ProcessBox) -> None:
    result = run(box, "echo begin; head -c 100000000 /dev/zero | tr '\\0' x; echo end")
    assert result.truncated
    assert result.exit_code == 0
    assert result.output.startswith("begin\nxxx")
    assert result.output.endswith("xxx" + "end\n")
    assert "bytes left out" in result.output
    assert len(result.output) < OUTPUT_BYTES + 100


@given(chunks=st.lists(st.integers(0, OUTPUT_BYTES), max_size=4))
def test_output_is_cut_only_above_the_cap(chunks: list[int]) -> None:
    async def feed() -> _Output:
        output = _Output()
        read_end, write_end = os.pipe()
        for number, size in enumerate(chunks):
            os.write(write_end, bytes([97 + number]) * size)
            if size:
                output.read_from(read_end)
        os.close(read_end)
        os.close(write_end)
        return output

    output = asyncio.run(feed())
    whole = "".join(chr(97 + number) * size for number, size in enumerate(chunks))
    assert output.truncated == (len(whole) > OUTPUT_BYTES)
    if output.truncated:
        assert output.text().startswith(whole[: OUTPUT_BYTES // 2] + "\n[")
        assert output.text().endswith("]\n" + whole[-OUTPUT_BYTES // 2 :])
    else:
        assert output.text() == whole


def test_the_deadline_kills_grandchildren_and_keeps_the_output(box: ProcessBox) -> None:
    result = run(box, "echo so far; sh -c 'sleep 60 & echo $! > grandchild; wait' & wait", timeout_s=2.0)
    assert result == ExecResult(-signal.SIGKILL, "so far\n", timed_out=True, truncated=False)
    assert ends(int(box.read("grandchild")))


def test_what_a_command_leaves_in_the_background_is_killed(box: ProcessBox) -> None:
    result = run(box, "sleep 60 & echo $! > child; echo done")
    assert (result.output, result.timed_out) == ("done\n", False)
    assert ends(int(box.read("child")))


def test_a_daemon_that_holds_the_pipe_is_not_waited_for(box: ProcessBox) -> None:
    daemon = "setsid sh -c 'echo $$ > daemon.part; mv daemon.part daemon; exec sleep 60' &"
    result = run(box, f"{daemon} while [ ! -e daemon ]; do sleep 0.01; done; echo started")
    pid = int(box.read("daemon"))
    try:
        assert (result.output, result.timed_out) == ("started\n", False)
        assert is_running(pid)  # so it did hold the pipe: the box does not claim to catch a process like this
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_command_may_close_its_output_and_go_on(box: ProcessBox) -> None:
    run(box, "exec >&- 2>&-; sleep 0.2; touch finished")
    assert "finished" in box.files()


def test_memory_and_file_size_are_limited(box: ProcessBox) -> None:
    assert "MemoryError" in run(box, "python -c 'bytearray(5 << 30)'").output
    assert run(box, "head -c 500000000 /dev/zero > big").exit_code != 0
    assert (box.root / "big").stat().st_size < 200_000_000


def test_cancelling_kills_the_command(box: ProcessBox) -> None:
    async def start_and_cancel() -> int:
        command = asyncio.create_task(box.exec("echo $$ > shell.part; mv shell.part shell; sleep 60", 60))
        while "shell" not in box.files():
            await asyncio.sleep(0.01)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        return int(box.read("shell"))

    assert ends(asyncio.run(start_and_cancel()))


def test_closing_ends_a_running_command(base: Path) -> None:
    async def close_under_it() -> ExecResult:
        box = ProcessBox(base)
        command = asyncio.create_task(box.exec("touch started; sleep 60", 60))
        while "started" not in box.files():
            await asyncio.sleep(0.01)
        box.close()
        return await command

    result = asyncio.run(close_under_it())
    assert (result.exit_code, result.timed_out) == (-signal.SIGKILL, False)


def test_close_removes_everything_and_may_be_called_again(base: Path) -> None:
    box = ProcessBox(base)
    run(box, "mkdir -p locked/inner && touch locked/inner/file && chmod 000 locked/inner locked")
    box.close()
    box.close()
    assert not box.root.parent.exists()


def test_a_box_of_a_missing_tree_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        ProcessBox(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_files_are_read_written_and_listed(box: ProcessBox) -> None:
    text = "line\r\nÜber\n\ttab"
    box.write("new/deep/file.txt", text)
    assert box.read("new/deep/file.txt") == text
    assert box.read("inner/one.py") == "ONE = 1\n"  # through a link that stays inside
    assert box.list("pkg") == ["one.py", "two.py"]
    assert box.list(".") == ["dangling", "inner/", "new/", "out/", "pkg/", "run.sh"]
    assert box.files() == ["new/deep/file.txt", "pkg/one.py", "pkg/two.py", "run.sh"]


def test_changes_are_seen_and_the_base_stays_as_it_was(base: Path, box: ProcessBox) -> None:
    assert box.changes() == {}
    box.write("pkg/one.py", "ONE = 11\n")
    box.write("pkg/three.py", "THREE = 3\n")
    (box.root / "pkg" / "two.py").unlink()
    (box.root / "binary").write_bytes(b"\xff\x00")
    (box.root / "pkg" / "__pycache__").mkdir()
    (box.root / "pkg" / "__pycache__" / "one.pyc").write_bytes(b"\x00")
    (box.root / os.fsdecode(b"odd\xff")).touch()
    assert box.changes() == {
        "binary": "\ufffd\x00",
        "odd\ufffd": "",
        "pkg/one.py": "ONE = 11\n",
        "pkg/three.py": "THREE = 3\n",
        "pkg/two.py": None,
    }
    assert (base / "pkg" / "one.py").read_text() == "ONE = 1\n"


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
    ],
)
def test_paths_that_leave_the_tree_are_refused(box: ProcessBox, path: str) -> None:
    for refused in (box.read, box.list, lambda path: box.write(path, "x")):
        with pytest.raises(PathRefused):
            refused(path)


PARTS = [
    "..",
    ".",
    "",
    "/",
    "pkg",
    "one.py",
    "out",
    "outside",
    "secret.txt",
    "dangling",
    "inner",
    "new",
    "home",
    "tree",
]


@given(path=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=6).map("/".join))
def test_no_path_reaches_outside(base: Path, path: str) -> None:
    with ProcessBox(base) as box:
        for use in (box.read, box.list, lambda path: box.write(path, "x")):
            try:
                assert SECRET not in str(use(path))
            except (PathRefused, OSError):
                continue
        assert sorted(entry.name for entry in box.root.parent.iterdir()) == ["home", "tmp", "tree"]
        assert [*(box.root.parent / "home").iterdir(), *(box.root.parent / "tmp").iterdir()] == []
    outside = base.parent / "outside"
    assert {entry.name: entry.read_text() for entry in outside.iterdir()} == {"secret.txt": SECRET}


def test_a_pipe_is_no_file(box: ProcessBox) -> None:
    os.mkfifo(box.root / "fifo")
    with pytest.raises(PathRefused):
        box.read("fifo")
    with pytest.raises(PathRefused):
        box.write("fifo", "x")
    assert "fifo" not in box.files()


def test_a_missing_file_is_the_file_systems_error(box: ProcessBox) -> None:
    with pytest.raises(FileNotFoundError):
        box.read("pkg/none.py")
    with pytest.raises(PathRefused):
        box.read("pkg")
