"""A sandbox in a container, for tasks that bring an image.

The image needs a shell, cat, readlink, mkdir and rm. What differs from the other sandboxes: `disk_mb` bounds each file
and not all of them together; an exit code above 128 is read as a signal, as engines tell the two no other way; a
process that made itself a session while commands overlapped lives until a command ends alone. Tried with podman 4.3
and runc; not yet with a docker daemon.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from offbook.sandbox.folders import in_history, publish, refuse_history
from offbook.sandbox.output import Output, plain_text
from offbook.sandbox.sandbox import HISTORY, Changes, ExecResult, Names, PathRefused, Sandbox, SandboxSpec
from offbook.types import OffbookError

LAST_WORDS_S = 5.0
CRASHED = "\n[the container broke down; it is back at its last snapshot]\n"
TREE = "/app"
ENGINE_S = 120.0  # an engine that takes longer over anything hangs

# Engines start each command as the leader of a session of its own, so its number is that of its process group.
LAUNCH = """
exec 2>&1
echo $$ > /dev/shm/$1.group
ulimit -f $2
[ "$3" ] && exec 3> /dev/shm/$1.report
exec /bin/sh -c "$4"
"""
# Kills what is left of a command, then tells what control groups counted, then the report.
AFTER = """
exec 2> /dev/null
kill -9 -$(cat /dev/shm/$1.group)
[ "$2" ] && kill -9 -1
cd /sys/fs/cgroup
echo counted
cat memory.events
echo
cat /dev/shm/$1.report
rm -f /dev/shm/$1.group /dev/shm/$1.report
"""
# Follows links as far as the path exists. The rest is for `write` to make, and cannot lead back up.
RESOLVE = """
path=$1 rest=
while [ "$path" ] && [ ! -e "$path" ] && [ ! -L "$path" ]; do rest=/${path##*/}$rest path=${path%/*}; done
case $rest/ in */../* | */./*) exit 90 ;; esac
real=$(readlink -f "$path")$rest || exit 90
case $real in /app | /app/* | /history | /history/*) ;; *) exit 90 ;; esac
"""
READ = '[ -e "$real" ] || exit 92; [ -f "$real" ] || exit 91; exec cat "$real"'
WRITE = '[ ! -e "$real" ] || [ -f "$real" ] || exit 91; mkdir -p "${real%/*}" && exec cat > "$real"'
REMOVE = """
real=$real/$2
[ -L "$real" ] || [ -e "$real" ] || exit 92
[ -L "$real" ] || [ -f "$real" ] || exit 91
rm "$real"
"""
LIST = """
[ -e "$real" ] || exit 92
cd "$real" || exit 1
for name in * .[!.]* ..?*; do
    if [ -d "$name" ]; then printf '%s/\\0' "$name"
    elif [ -e "$name" ] || [ -L "$name" ]; then printf '%s\\0' "$name"
    fi
done
"""


class ContainerSandbox(Sandbox):
    python = "python3"  # the image's own

    def __init__(self, engine: str, spec: SandboxSpec, base: dict[str, str]):
        self._engine = engine
        self._spec = spec
        self._base = base  # path -> hash of the tree that the sandbox was made from
        self._history = Path(tempfile.mkdtemp(prefix="offbook-history-"))
        self._history.chmod(0o755)
        self._name = ""
        self._images: list[str] = []  # those that this sandbox made; the last is its snapshot
        self._quiet = asyncio.Condition()
        self._num_running = 0
        self._num_memory_kills = 0
        self._closed = False

    @classmethod
    async def open(cls, tree: Path, spec: SandboxSpec) -> Self:
        if not spec.image:
            raise OffbookError(
                "a container sandbox needs an image: name one, or build the task's environment/Dockerfile"
            )
        engine = await find_engine()
        base = {path: _hash(content) for path, content in archived(await asyncio.to_thread(packed, tree, 0, 0))}
        sandbox = cls(engine, spec, base)
        try:
            await sandbox._start(spec.image)
            user, group = (await must(*sandbox._inside("/", "/bin/sh", "-c", "id -u; id -g"))).split()
            contents = await asyncio.to_thread(packed, tree, int(user), int(group))
            await must(engine, "cp", "-", f"{sandbox._name}:/", stdin=contents)
            await sandbox.snapshot()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        output = Output()
        key = uuid.uuid4().hex
        blocks = str(self._spec.disk_mb * 2048)
        async with self._beside_commands():
            name = self._name
            num_kills = self._num_memory_kills
            try:
                write_end = output.open()
                try:
                    arguments = ["/bin/sh", "-c", LAUNCH, "sh", key, blocks, "3" if report else "", command]
                    process = await asyncio.create_subprocess_exec(
                        *self._inside(TREE, *arguments), stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end
                    )
                finally:
                    os.close(write_end)
                timed_out = False
                try:
                    await asyncio.wait_for(process.wait(), timeout_s)
                except TimeoutError:
                    timed_out = True
                finally:
                    crashed, written = await self._clean_up(key, name)
                    with suppress(TimeoutError):  # the command is gone; its last words may still be on their way
                        await asyncio.wait_for(process.wait(), LAST_WORDS_S)
                    if process.returncode is None:
                        process.kill()
                    exit_code = await process.wait()
                output.read()
            finally:
                output.close()
        exhausted = "memory" if self._num_memory_kills > num_kills else ""
        code = -9 if timed_out else 128 - exit_code if exit_code > 128 else exit_code
        text = output.text() + (CRASHED if crashed else "")
        return ExecResult(code, text, timed_out, output.truncated, written if report else "", exhausted)

    async def read(self, path: str) -> str:
        return (await self._file(READ, path, _absolute(path))).decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        async with self._alone():
            await self._file(WRITE, path, _absolute(path, writes=True), stdin=text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        """A file or a link itself, not what it leads to."""
        folder, name = os.path.split(_absolute(path, writes=True))
        if name in ("", ".", ".."):
            raise PathRefused(f"{path} is not a file")
        async with self._alone():
            await self._file(REMOVE, path, folder, name)

    async def list(self, path: str) -> Names:
        names = (await self._file(LIST, path, _absolute(path))).decode(errors="replace")
        return sorted(names.split("\0")[:-1])

    async def files(self) -> Names:
        return sorted(path for path, _ in archived(await must(self._engine, "cp", f"{self._name}:{TREE}", "-")))

    async def changes(self) -> Changes:
        """Without compiled Python."""
        gone = set(self._base)
        changed = Changes()
        for path, content in archived(await must(self._engine, "cp", f"{self._name}:{TREE}", "-")):
            gone.discard(path)
            if self._base.get(path) != _hash(content) and "__pycache__" not in path.split("/"):
                changed.put(path, content)
        changed.update(dict.fromkeys(path for path in gone if "__pycache__" not in path.split("/")))
        return changed.settled()

    async def publish(self, name: str, text: str) -> None:
        publish(str(self._history), name, text)

    async def fork(self) -> Self:
        other = type(self)(self._engine, self._spec, self._base)
        try:
            shutil.copytree(self._history, other._history, dirs_exist_ok=True)
            async with self._alone():
                other._images.append(await self._commit())
            await other._start(other._images[-1])
        except BaseException:
            await other.close()
            raise
        return other

    async def snapshot(self) -> None:
        async with self._alone():
            self._images.append(await self._commit())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        shutil.rmtree(self._history)
        await call(self._engine, "rm", "--force", self._name)  # one that never started is not there
        for image in reversed(self._images):
            await must(self._engine, "rmi", image)

    def _inside(self, folder: str, *command: str) -> Names:
        if self._closed:
            raise RuntimeError("this sandbox is closed")
        return [self._engine, "exec", "--interactive", "--workdir", folder, self._name, *command]

    async def _file(self, script: str, path: str, *arguments: str, stdin: bytes = b"") -> bytes:
        command = self._inside("/", "/bin/sh", "-c", RESOLVE + script, "sh", *arguments)
        code, output, error = await call(*command, stdin=stdin)
        if code == 90:
            raise PathRefused(f"{path} is outside of the repository")
        if code == 91:
            raise PathRefused(f"{path} is not a file")
        if code:
            raise FileNotFoundError(f"{path} does not exist") if code == 92 else OSError(f"{path}: {error}")
        return output

    async def _clean_up(self, key: str, name: str) -> tuple[bool, str]:
        """Whether the container had broken down, and the command's report."""
        alone = "alone" if self._num_running == 1 else ""
        code, output, _ = await call(*self._inside("/", "/bin/sh", "-c", AFTER, "sh", key, alone))
        if code and name == self._name:  # no other command has brought it back yet
            await call(self._engine, "rm", "--force", name)
            await self._start(self._images[-1])
        counts, _, report = output.decode(errors="replace").partition("\n\n")
        kills = re.search(r"^oom_kill (\d+)$", counts, re.M)
        self._num_memory_kills = int(kills[1]) if kills else 0
        return code != 0, report

    async def _start(self, image: str) -> None:
        self._name = f"offbook-{uuid.uuid4().hex}"
        await must(self._engine, *run_arguments(self._name, image, self._spec, self._history))

    async def _commit(self) -> str:
        image = f"offbook-sandbox:{uuid.uuid4().hex}"
        await must(self._engine, "commit", self._name, image)
        return image

    @asynccontextmanager
    async def _beside_commands(self) -> AsyncIterator[None]:
        async with self._quiet:
            self._num_running += 1
        try:
            yield
        finally:
            async with self._quiet:
                self._num_running -= 1
                self._quiet.notify_all()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        async with self._quiet:
            await self._quiet.wait_for(lambda: self._num_running == 0)
            yield


def _absolute(path: str, writes: bool = False) -> str:
    if "\0" in path or path.encode(errors="replace").decode() != path:  # a lone surrogate is no character of a path
        raise PathRefused(f"{path!r} is not a path")
    if writes:
        refuse_history(path)
    if in_history(path):
        return path
    if path.startswith("/"):
        raise PathRefused(f"{path} is absolute; paths are relative to the repository")
    return f"{TREE}/{path}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def find_engine() -> str:
    for engine in ("docker", "podman"):
        if shutil.which(engine) and (await call(engine, "ps", "-q"))[0] == 0:
            return engine
    raise OffbookError("no container engine answers: start the Docker daemon, or install podman")


def run_arguments(name: str, image: str, spec: SandboxSpec, history: Path) -> list[str]:
    """The first process must reap the orphans of commands: a shell that waits does. The image's user stays."""
    memory = f"{spec.memory_mb}m"
    cpus = f"--cpus {spec.cpus}" if spec.cpus else ""
    limits = f"--pids-limit {spec.pids} --memory {memory} --memory-swap {memory} {cpus}"
    options = f"--label offbook=sandbox --pull never --stop-timeout 0 --network none --cap-drop ALL {limits}"
    arguments = ["run", "--detach", "--name", name, *options.split(), "--security-opt", "no-new-privileges"]
    arguments += ["--volume", f"{history}:{HISTORY}:ro,z", "--entrypoint", "/bin/sh"]
    return [*arguments, image, "-c", "while :; do sleep 3600; done"]


async def call(*command: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Exit code, output, and the last line of what it complained about."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(process.communicate(stdin), ENGINE_S)
    except TimeoutError:
        raise OffbookError(f"{command[0]} {command[1]} did not end within {ENGINE_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = plain_text(errors.decode(errors="replace")).strip().splitlines()
    return process.returncode or 0, output, lines[-1] if lines else ""


async def must(*command: str, stdin: bytes = b"") -> bytes:
    code, output, error = await call(*command, stdin=stdin)
    if code:
        raise OffbookError(f"{command[0]} {command[1]} failed: {error}")
    return output


def packed(tree: Path, user: int, group: int) -> bytes:
    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = user  # without rights, even root can write only what is its own
        member.gid = group
        return member

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(tree, arcname=TREE.strip("/"), filter=owned)
    return stream.getvalue()


def archived(stream: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        for member in archive:
            if member.isreg() or member.islnk():
                content = archive.extractfile(member)
                assert content
                name = os.fsencode(member.name.partition("/")[2]).decode(errors="replace")
                yield name, content.read()
