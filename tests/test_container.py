import asyncio
import io
import shutil
import subprocess
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from offbook.sandbox.container import ContainerSandbox, find_engine, run_arguments
from offbook.sandbox.sandbox import PathRefused, SandboxSpec
from offbook.types import OffbookError

IMAGE = "offbook-test-busybox:1"
SPEC = SandboxSpec("container", memory_mb=64, pids=64, cpus=1.0, disk_mb=8, image=IMAGE)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine that can run a container of nothing but busybox. One that only answers does not count."""
    busybox = shutil.which("busybox")
    try:
        found = asyncio.run(find_engine())
    except OffbookError as error:
        pytest.skip(str(error))
    if busybox is None:
        pytest.skip("no busybox to make an image of")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(busybox, arcname="bin/busybox")
        applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for applet in set(applets) - {"busybox"}:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    made = subprocess.run([found, "import", "-", IMAGE], input=stream.getvalue(), capture_output=True)
    tried = subprocess.run(
        [found, "run", "--rm", "--network", "none", IMAGE, "/bin/true"], capture_output=True, text=True
    )
    try:
        if made.returncode or tried.returncode:
            pytest.skip(f"{found} answers and cannot run a container: {tried.stderr.strip()}")
        yield found
    finally:
        subprocess.run([found, "rmi", IMAGE], capture_output=True)


def made_by_us(engine: str) -> list[str]:
    listed = ["ps", "-aq", "--filter", "label=offbook=sandbox"], ["images", "-q", "offbook-sandbox"]
    return [subprocess.run([engine, *words], capture_output=True, text=True, check=True).stdout for words in listed]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grown(tmp_path)


def grown(place: Path) -> Path:
    tree = place / "tree"
    (tree / "package").mkdir(parents=True)
    (tree / "package" / "code.py").write_text("one\n")
    (tree / "read me.txt").write_text("words\n")
    (tree / "link").symlink_to("package/code.py")
    (tree / "out").symlink_to("/etc")
    return tree


def with_sandbox(
    engine: str, tree: Path, work: Callable[[ContainerSandbox], Awaitable[None]], spec: SandboxSpec = SPEC
) -> None:
    async def run() -> None:
        sandbox = await ContainerSandbox.open(tree, spec)
        try:
            await work(sandbox)
        finally:
            await sandbox.close()
            await sandbox.close()

    before = made_by_us(engine)
    asyncio.run(run())
    assert made_by_us(engine) == before


Run = Callable[[Callable[[ContainerSandbox], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def in_shared_sandbox(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One sandbox for the tests that leave it as good as they found it: opening one takes a second."""
    with asyncio.Runner() as runner:
        sandbox = runner.run(ContainerSandbox.open(grown(tmp_path_factory.mktemp("shared")), SPEC))

        def run(work: Callable[[ContainerSandbox], Awaitable[None]]) -> None:
            async def coroutine() -> None:
                await work(sandbox)

            runner.run(coroutine())

        yield run
        runner.run(sandbox.close())


def test_commands(in_shared_sandbox: Run) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        result = await sandbox.exec("pwd; echo wrong >&2; cat link; echo told >&3; exit 3", 10, report=True)
        assert (result.exit_code, result.output, result.report) == (3, "/app\nwrong\none\n", "told\n")
        assert not result.timed_out
        assert (await sandbox.exec("echo told >&3", 10)).report == ""
        rights = await sandbox.exec("grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; ls /sys/class/net", 10)
        assert rights.output.split() == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1", "lo"]
        assert (await sandbox.exec("kill -TERM $$", 10)).exit_code == -15

    in_shared_sandbox(work)


def test_what_a_command_leaves_behind_is_killed(in_shared_sandbox: Run) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        result = await sandbox.exec("(sleep 991; echo late) & sleep 992", 0.5)
        assert (result.exit_code, result.timed_out) == (-9, True)
        await sandbox.exec("sleep 993 > /dev/null 2>&1 & setsid sleep 994 > /dev/null 2>&1 &", 10)
        left = await sandbox.exec("ps", 10)
        assert " 99" not in left.output

    in_shared_sandbox(work)


def test_limits(in_shared_sandbox: Run) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        hungry = await sandbox.exec("dd if=/dev/zero of=/dev/null bs=200M count=1", 20)
        assert hungry.exhausted == "memory"
        assert hungry.exit_code != 0
        many = await sandbox.exec("for i in $(seq 100); do sleep 5 & done; echo all", 20)
        assert "all" not in many.output
        assert (await sandbox.exec("head -c 9000000 /dev/zero > large", 20)).exit_code != 0
        assert (await sandbox.exec("echo fine", 20)).output == "fine\n"

    in_shared_sandbox(work)


def test_files(engine: str, tree: Path) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        assert await sandbox.read("link") == "one\n"
        assert await sandbox.list(".") == ["link", "out/", "package/", "read me.txt"]
        assert await sandbox.files() == ["package/code.py", "read me.txt"]
        await sandbox.write("new folder/file.txt", "naïve\n$(echo not run)\n")
        await sandbox.write("link", "two\n")
        await sandbox.remove("read me.txt")
        await sandbox.exec(
            "mkdir package/__pycache__; echo x > package/__pycache__/a; ln package/code.py hard; rm link", 10
        )
        assert await sandbox.changes() == {
            "hard": "two\n",
            "new folder/file.txt": "naïve\n$(echo not run)\n",
            "package/code.py": "two\n",
            "read me.txt": None,
        }

    with_sandbox(engine, tree, work)


def test_paths(in_shared_sandbox: Run) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        await sandbox.exec("mkfifo pipe; ln -s /nowhere/else dangling; ln -s loop loop; mkdir /etc", 10)
        for path in ("/etc/passwd", "nul\0", "\ud800", "../etc/passwd", "out/passwd", "dangling", "loop"):
            with pytest.raises(PathRefused):
                await sandbox.read(path)
        for path in ("/etc/passwd", "out/passwd", "dangling", "new/../../etc/x"):
            with pytest.raises(PathRefused):
                await sandbox.write(path, "x")
        with pytest.raises(PathRefused, match="not a file"):
            await sandbox.read("pipe")
        with pytest.raises(PathRefused, match="not a file"):
            await sandbox.write("package", "x")
        with pytest.raises(PathRefused):
            await sandbox.remove("package")
        with pytest.raises(PathRefused):
            await sandbox.list("out")
        for missing in (sandbox.read("missing"), sandbox.list("missing"), sandbox.remove("missing")):
            with pytest.raises(FileNotFoundError):
                await missing
        await sandbox.remove("out")  # the link, not what it leads to
        assert (await sandbox.exec("test -d /etc && test ! -L out", 10)).exit_code == 0

    in_shared_sandbox(work)


def test_history_can_be_read_and_not_written(in_shared_sandbox: Run) -> None:
    async def work(sandbox: ContainerSandbox) -> None:
        await sandbox.publish("segments/1.md", "before\n")
        assert await sandbox.read("/history/segments/1.md") == "before\n"
        assert await sandbox.list("/history") == ["segments/"]
        with pytest.raises(PathRefused):
            await sandbox.write("/history/x", "")
        with pytest.raises(PathRefused):
            await sandbox.publish("../x", "")
        assert (await sandbox.exec("echo x > /history/segments/1.md || rm -rf /history/segments", 10)).exit_code != 0
        assert (await sandbox.exec("cat /history/segments/1.md", 10)).output == "before\n"
        assert "history/segments/1.md" not in await sandbox.changes()

    in_shared_sandbox(work)


def test_forks_go_separate_ways_and_outlive_their_origin(engine: str, tree: Path) -> None:
    async def run() -> None:
        sandbox = await ContainerSandbox.open(tree, SPEC)
        await sandbox.write("both.txt", "both\n")
        await sandbox.publish("told", "x")
        other = await sandbox.fork()
        await sandbox.write("mine.txt", "mine\n")
        await other.exec("echo theirs > theirs.txt", 10)
        assert set(await sandbox.changes()) == {"both.txt", "mine.txt"}
        await sandbox.close()
        assert set(await other.changes()) == {"both.txt", "theirs.txt"}
        third = await other.fork()
        await other.close()
        assert await third.read("theirs.txt") == "theirs\n"
        assert await third.read("/history/told") == "x"
        await third.close()

    before = made_by_us(engine)
    asyncio.run(run())
    assert made_by_us(engine) == before


def test_arguments_take_everything_away(tmp_path: Path) -> None:
    arguments = run_arguments("name", "image", SPEC, tmp_path)
    line = " ".join(arguments)
    for expected in (
        "--network none", "--cap-drop ALL", "--security-opt no-new-privileges", "--pids-limit 64", "--memory 64m",
        "--memory-swap 64m", "--cpus 1.0", f"--volume {tmp_path}:/history:ro",
    ):  # fmt: skip
        assert expected in line
    assert not {"--privileged", "--user", "--pid", "--ipc", "--cap-add", "--device"} & set(arguments)
    assert "--cpus" not in run_arguments("name", "image", SandboxSpec("container"), tmp_path)


def test_errors_are_one_sentence(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffbookError, match="needs an image"):
        asyncio.run(ContainerSandbox.open(tree, SandboxSpec("container")))
    monkeypatch.setenv("PATH", str(tree))
    with pytest.raises(OffbookError, match="start the Docker daemon, or install podman"):
        asyncio.run(ContainerSandbox.open(tree, SPEC))


def test_an_unknown_image_is_named_and_leaves_nothing(engine: str, tree: Path) -> None:
    before = made_by_us(engine)
    with pytest.raises(OffbookError, match=f"{engine} run failed: .*no-such-image"):
        asyncio.run(ContainerSandbox.open(tree, SandboxSpec("container", image="localhost/no-such-image:1")))
    assert made_by_us(engine) == before
