"""Docker or podman, through their command lines, and the scripts that run inside."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from offbook.sandbox.box import HISTORY, BoxSpec
from offbook.sandbox.output import plain_text
from offbook.types import OffbookError

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
# Kills what is left of a command, then tells what control groups (version 2 or 1) counted, then the report.
AFTER = """
exec 2> /dev/null
kill -9 -$(cat /dev/shm/$1.group)
[ "$2" ] && kill -9 -1
cd /sys/fs/cgroup
echo counted
cat memory.events memory/memory.oom_control
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


async def find_engine() -> str:
    for engine in ("docker", "podman"):
        if shutil.which(engine) and (await call(engine, "ps", "-q"))[0] == 0:
            return engine
    raise OffbookError("no container engine answers: start the Docker daemon, or install podman")


def run_arguments(name: str, image: str, spec: BoxSpec, history: Path) -> list[str]:
    """The first process must reap the orphans of commands: a shell that waits does. The image's user stays."""
    memory = f"{spec.memory_mb}m"
    arguments = ["run", "--detach", "--name", name, "--label", "offbook=box", "--pull", "never", "--stop-timeout", "0"]
    arguments += ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    arguments += ["--pids-limit", str(spec.pids), "--memory", memory, "--memory-swap", memory]
    arguments += ["--cpus", str(spec.cpus)] if spec.cpus else []
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
        member.uid, member.gid = user, group  # without rights, even root can write only what is its own
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
