"""The trained agent as a person uses it: it works in a sandbox on a copy, and what it changed is applied on a yes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from offbook.core.runfolder import write_atomic
from offbook.live.sessions import Reaction, Session, kind_of, lines_of, refuse_no_folder
from offbook.rl.collector import Collector, Job, OnRollout, unwatched
from offbook.types import OffbookError, Rollout, Task

TOOLS = ("read_file", "edit_file", "run_command", "search_codebase", "list_dir", "todo", "finish")
POCKET_TOOLS = ("read_file", "edit_file", "search_codebase", "finish")  # what the pocket model knows
MOST_MB = 1024
GIT_S = 60.0
SKIPPED = (".git", "__pycache__", ".venv", "node_modules")
LOST = "\ufffd"  # what bytes that are not UTF-8 become in a record


class Elsewhere(OffbookError):
    """The user's tree is no longer what the agent saw."""


@dataclass(frozen=True)
class Worked:
    """The rollout of a request, and the changed files as the agent found them."""

    rollout: Rollout
    before: Mapping[str, bytes | None]  # None: the file is new


@contextmanager
def copy_of(path: Path) -> Iterator[Path]:
    """A copy of the files that git tracks or would track; without git all but caches and environments."""
    refuse_no_folder(path)
    with tempfile.TemporaryDirectory(prefix="offbook-agent-") as place:
        tree = Path(place) / "tree"
        tree.mkdir()
        size = 0
        for name in _files(path):
            source = path / name
            if source.is_symlink() or not source.is_file():
                continue
            size += source.stat().st_size
            if size > MOST_MB << 20:
                raise OffbookError(f"{path} holds more than {MOST_MB} MB; give a folder of it, or ignore what is large")
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)
        yield tree


def _files(path: Path) -> list[str]:
    whole = path.resolve()
    if not any((folder / ".git").exists() for folder in (whole, *whole.parents)):  # it may be a folder of a repository
        every = [file.relative_to(path) for file in sorted(path.rglob("*"))]
        return [str(file) for file in every if not {*file.parts} & {*SKIPPED}]
    options = ("-c", "core.fsmonitor=false")  # nothing of the repository's own is run
    command = ["git", "-C", str(path), *options, "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    if listed.returncode:
        raise OffbookError(f"git says about {path}: {listed.stderr.decode(errors='replace').strip()}")
    return listed.stdout.decode(errors="replace").rstrip("\0").split("\0")


async def work(collector: Collector, path: Path, request: str, id: str, watch: OnRollout = unwatched) -> Worked:
    """Run the agent on a copy of `path`; the rollout is not scored."""
    tools = POCKET_TOOLS if collector.config.harness.profile == "pocket" else TOOLS
    with copy_of(path) as tree:
        task = Task(id, tree, request, tree, tree, (), (), (), tools, str(path))
        rollout = await collector.work(Job(task, id, id), collector.engine.open(id), watch)
        before = {name: _bytes(tree / name) for name in rollout.changed}
    return Worked(rollout, before)


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def apply(worked: Worked, path: Path) -> list[str]:
    """Write all changes or none. Returns the files.

    Every overwritten file has a backup next to it (NAME.PID.old) until all is done, so a kill -9 loses nothing.
    """
    changed = worked.rollout.changed
    reasons = (_why_not(name, text, worked.before[name], path) for name, text in changed.items())
    why_not = next(filter(None, reasons), "")
    if worked.rollout.partial:
        why_not = f"{', '.join(worked.rollout.partial[:3])}: not text, or too large to be kept whole"
    if why_not:
        raise Elsewhere(f"{why_not}; nothing was applied")
    backups = {name: path / f"{name}.{os.getpid()}.old" for name in changed if worked.before[name] is not None}
    try:
        for name, copy in backups.items():
            write_atomic(copy, worked.before[name] or b"")
            shutil.copystat(path / name, copy)
        for name, text in changed.items():
            file = path / name
            if text is None:
                file.unlink()
                continue
            mode = file.stat().st_mode if file.exists() else None
            write_atomic(file, text)
            if mode is not None:
                file.chmod(mode & 0o777)
    except BaseException as error:
        for name in changed:
            with suppress(FileNotFoundError, NotADirectoryError):  # not written yet
                os.replace(backups[name], path / name) if name in backups else (path / name).unlink()
        if not isinstance(error, Exception):
            raise
        raise Elsewhere(f"{error}; nothing was applied") from None
    for copy in backups.values():
        copy.unlink()
    return sorted(changed)


def _why_not(name: str, text: str | None, before: bytes | None, path: Path) -> str:
    """Why a change cannot be applied; empty if it can."""
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()) or file.is_symlink():
        return f"{name} leads out of {path}"
    if ".git" in Path(name.lower()).parts:  # what stands there may be run
        return f"{name} is git's own"
    if text and text.count(LOST) > (before or b"").count(LOST.encode()):
        return f"{name} is not text in UTF-8 and would be spoilt"
    if _bytes(file) != before or file.is_dir():
        return f"{name} changed while the agent worked"
    blocked = [above for above in file.parents if above.exists() and not above.is_dir()]
    return f"{name}: {blocked[0]} is no folder" if blocked else ""


def session_of(worked: Worked, path: Path, request: str, user: str, version: int, said: bool | None) -> Session:
    """The session right after the user said yes, no or nothing. What was not applied is never measured as kept."""
    lines = lines_of(worked.rollout)
    session = Session(worked.rollout, user, kind_of(request), version, time.time(), lines)
    if said:
        session.place = str(path.resolve())
    if said is False:
        session.reactions.append(Reaction("declined", at=session.at))
    return session
