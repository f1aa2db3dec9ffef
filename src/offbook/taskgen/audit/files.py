"""Everything that can be read below a folder, archives and git objects opened.

What cannot be read is named with the reason, so that nobody takes it for clean.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from offbook.taskgen.audit.archives import DEPTH, MOST_BYTES, MOST_UNPACKED, Budget, Leaf, unpacked

GIT_S = 120.0
_ABSOLUTE = re.compile(r"""(?:^|file://|gitdir: |["'])(/[^"'\n,:]+)""", re.MULTILINE)


def leaves(path: Path, name: str, unread: Callable[[str, str], None]) -> Iterator[Leaf]:
    """A file and all that is packed in it; of a git folder every object."""
    if path.is_dir():
        yield from _git_objects(path, name, unread)
        return
    try:
        if path.stat().st_size > MOST_BYTES:
            unread(name, f"larger than {MOST_BYTES} bytes")
            return
        data = path.read_bytes()
    except OSError as error:
        unread(name, error.strerror or "unreadable")
        return
    yield from unpacked(Leaf(name, data), DEPTH, Budget(unread))


def is_git_folder(path: Path) -> bool:
    return (path / "objects").is_dir() and (path / "HEAD").is_file()


def _git_objects(folder: Path, name: str, unread: Callable[[str, str], None]) -> Iterator[Leaf]:
    """Every object, reachable or not: git reads packs and deltas, with none of the repository's own configuration."""
    if shutil.which("git") is None:
        unread(name, "git is not installed")
        return
    with tempfile.TemporaryDirectory() as empty:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": empty, "GIT_CONFIG_NOSYSTEM": "1"}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_NO_LAZY_FETCH": "1"}
        subprocess.run(["git", "init", "-q", "--bare", "--template=", empty], env=environment, check=True)
        environment["GIT_OBJECT_DIRECTORY"] = str((folder / "objects").resolve())
        command = ["git", "--git-dir", empty, "cat-file", "--batch-all-objects", "--batch", "--unordered"]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
            assert process.stdout is not None
            total = 0
            try:
                while header := process.stdout.readline().split():
                    digest, kind, size = header[0].decode(), header[1].decode(), int(header[2])
                    total += size
                    if total > MOST_UNPACKED or size > MOST_BYTES:
                        unread(name, "the objects are more than is read")
                        return
                    data = process.stdout.read(size + 1)[:size]
                    if kind != "tree":
                        yield from unpacked(Leaf(f"{name}!{kind} {digest}", data), DEPTH, Budget(unread))
            finally:
                process.stdout.close()
                process.kill()
                process.wait(GIT_S)
            errors.seek(0)
            if said := errors.read(200):
                unread(name, said.decode(errors="replace").strip())


def files_below(root: Path, leave_out: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Files and git folders with their paths relative to the root. No symbolic link is followed."""
    pending = [(root, "")] if root.is_dir() else []
    if not pending:
        yield root, root.name
    while pending:
        folder, prefix = pending.pop()
        is_git = is_git_folder(folder)
        if is_git:
            yield folder, prefix.rstrip("/") or folder.name
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    if not (is_git and entry.name == "objects") and Path(entry.path) not in leave_out:
                        pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    yield Path(entry.path), prefix + entry.name


def links_out(root: Path) -> dict[str, Path]:
    """What leads from below the root to elsewhere: symbolic links, .pth files, editable installs, git worktrees."""
    found: dict[str, Path] = {}
    root = root.resolve()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder) / name
            targets: list[str] = []
            if path.is_symlink():
                targets = [os.path.realpath(path)]
            elif name.endswith((".pth", ".egg-link")) or name.startswith("__editable__"):
                targets = _ABSOLUTE.findall(path.read_text(errors="replace"))
            elif name == "direct_url.json" or (name == ".git" and path.is_file()):
                targets = _ABSOLUTE.findall(path.read_text(errors="replace").replace("\\/", "/"))
            for target in map(Path, targets):
                if target.exists() and not target.resolve().is_relative_to(root):
                    found[f"{path.relative_to(root)} -> {target}"] = target.resolve()
    return found


def is_source(name: str) -> bool:
    return name.endswith((".py", ".pyi", ".pyx", ".pxd"))
