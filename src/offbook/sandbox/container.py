"""A sandbox in a container, for tasks that bring an image. Tested with podman 4.3 and runc, not with docker.

The image needs a shell, cat, readlink, mkdir and rm. Unlike other sandboxes, `disk_mb` bounds each file and not their
sum, and an exit code above 128 is read as a signal.
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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from offbook.sandbox.folders import in_history, publish, refuse_history
from offbook.sandbox.output import Output, plain_text
from offbook.sandbox.sandbox import HISTORY, Changes, ExecResult, Names, PathRefused, Sandbox, SandboxSpec
from offbook.types import OffbookError

LAST_WORDS_S = 5.0
TREE = "/app"
ENGINE_S = 120.0  # timeout of an engine

# Engines start each command as the leader of a session of its own.
LAUNCH = """
exec 2>&1
ulimit -f $1
[ "$2" ] && exec 3> /dev/shm/report
exec /bin/sh -c "$3"
"""
# Kills what is left of a command, then prints what control groups counted, then the report.
AFTER = """
exec 2> /dev/null
kill -9 -1
cd /sys/fs/cgroup
echo counted
cat memory.events
echo
cat /dev/shm/report
rm -f /dev/shm/report
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
    if [ -d "$name" ] && [ ! -L "$name" ]; then printf '%s/\\0' "$name"
    elif [ -e "$name" ] || [ -L "$name" ]; then printf '%s\\0' "$name"
    fi
done
"""


class ContainerSandbox(Sandbox):
    """Commands run one after the other."""

    python = "python3"  # the image's own

    def __init__(self, engine: str, spec: SandboxSpec, base: dict[str, str]):
        self._engine = engine
        self._spec = spec
        self._base = base  # path -> hash of the tree that the sandbox was made from
        self._history = Path(tempfile.mkdtemp(prefix="offbook-history-"))
        self._history.chmod(0o755)
        self._name = f"offbook-{uuid.uuid4().hex}"
        self._image = ""  # that was made for this fork
        self._lock = asyncio.Lock()
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
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        output = Output()
        timed_out = False
        async with self._lock:
            try:
                write_end = output.open()
                try:
                    launch = [LAUNCH, "sh", str(self._spec.disk_mb * 2048), "3" if report else "", command]
                    process = await asyncio.create_subprocess_exec(
                        *self._inside(TREE, "/bin/sh", "-c", *launch),
                        stdin=subprocess.DEVNULL,
                        stdout=write_end,
                        stderr=write_end,
                    )
                finally:
                    os.close(write_end)
                try:
                    await asyncio.wait_for(process.wait(), timeout_s)
                except TimeoutError:
                    timed_out = True
                finally:
                    after = await must(*self._inside("/", "/bin/sh", "-c", AFTER))
                    with suppress(TimeoutError):  # the command is gone; its last output may still be on its way
                        await asyncio.wait_for(process.wait(), LAST_WORDS_S)
                    if process.returncode is None:
                        process.kill()
                    exit_code = await process.wait()
                output.read()
            finally:
                output.close()
        counts, _, written = after.decode(errors="replace").partition("\n\n")
        kills = re.search(r"^oom_kill (\d+)$", counts, re.M)
        before = self._num_memory_kills
        self._num_memory_kills = int(kills[1]) if kills else 0
        exhausted = "memory" if self._num_memory_kills > before else ""
        code = -9 if timed_out else 128 - exit_code if exit_code > 128 else exit_code
        return ExecResult(code, output.text(), timed_out, output.truncated, written if report else "", exhausted)

    async def read(self, path: str) -> str:
        return (await self._file(READ, path, _absolute(path))).decode(errors="replace")

    async def write(self, path: str, text: str) -> None:
        refuse_history(path)
        async with self._lock:
            await self._file(WRITE, path, _absolute(path), stdin=text.encode(errors="replace"))

    async def remove(self, path: str) -> None:
        """Remove a file or a link itself, not its target."""
        refuse_history(path)
        folder, name = os.path.split(_absolute(path))
        if name in ("", ".", ".."):
            raise PathRefused(f"{path} is not a file")
        async with self._lock:
            await self._file(REMOVE, path, folder, name)

    async def list(self, path: str) -> Names:
        names = (await self._file(LIST, path, _absolute(path))).decode(errors="replace")
        return sorted(names.split("\0")[:-1])

    async def files(self) -> Names:
        return sorted(path for path, _ in archived(await self._tree()))

    async def changes(self) -> Changes:
        """Without compiled Python."""
        gone = set(self._base)
        changed = Changes()
        for path, content in archived(await self._tree()):
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
            image = f"offbook-sandbox:{uuid.uuid4().hex}"
            async with self._lock:
                await must(self._engine, "commit", self._name, image)
            other._image = image
            await other._start(image)
        except BaseException:
            await other.close()
            raise
        return other

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        shutil.rmtree(self._history)
        await call(self._engine, "rm", "--force", self._name)  # may not have started
        if self._image:
            await must(self._engine, "rmi", self._image)

    async def _start(self, image: str) -> None:
        await must(self._engine, *run_arguments(self._name, image, self._spec, self._history))

    async def _tree(self) -> bytes:
        return await must(self._engine, "cp", f"{self._name}:{TREE}", "-")

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


def _absolute(path: str) -> str:
    if "\0" in path or path.encode(errors="replace").decode() != path:  # a lone surrogate is no character of a path
        raise PathRefused(f"{path!r} is not a path")
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
    """Exit code, output, and the last line of its errors."""
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
        member.uid = user  # without rights, even root can write only its own files
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
