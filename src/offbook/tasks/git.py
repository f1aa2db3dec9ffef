"""git without any configuration: a tree as a checkout with a single commit; patches between a tree with a feature
deleted and the tree as it was, made here and applied by git."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from offbook.types import OffbookError

GIT_S = 120.0
SETTINGS = ("-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false")


class BadPatch(OffbookError):
    """A patch that cannot be applied, and why."""


def plain_environment(folder: Path) -> dict[str, str]:
    """For git in a folder: no settings of the machine or the user, and no repository above it."""
    return {
        "PATH": os.environ.get("PATH", ""),
        "HOME": os.devnull,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
    }


def single_commit(tree: Path) -> None:
    """Make the tree a git checkout whose only commit is what it holds now. Equal trees get equal commits.

    Ignored files are committed too, so that `git clean` and `git stash` cannot take away what the tests need.
    """
    if shutil.which("git") is None:
        raise OffbookError("git is not installed, and a task's tree needs it for its history")
    folder = tree / ".git"
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    _git(tree, "init", "--quiet", "--template=", "--initial-branch=main")
    _git(tree, "add", "--all", "--force")
    _git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", "Initial commit")
    _git(tree, "gc", "--quiet", "--prune=now")
    for leftover in ("COMMIT_EDITMSG", "ORIG_HEAD", "gc.log"):
        (folder / leftover).unlink(missing_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)


def _git(tree: Path, *arguments: str) -> None:
    done = _run(tree, *arguments)
    if done.returncode:
        raise OffbookError(f"git {arguments[0]} failed in {tree}: {done.stderr.decode(errors='replace').strip()}")


def _run(folder: Path, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """With a fixed author and date."""
    environment = plain_environment(folder)
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "offbook", f"GIT_{who}_EMAIL": "offbook@localhost"}
        environment[f"GIT_{who}_DATE"] = "2000-01-01T00:00:00+0000"
    command = ["git", *SETTINGS, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, input=given, capture_output=True, timeout=GIT_S)


def gold_patch(before_deletion: Mapping[str, str], after_deletion: Mapping[str, str | None]) -> str:
    """A unified diff that `patch -p1` and `git apply` take from the deleted tree back to the original.

    Both are trees; of the second it is enough to give what changed, None where a file went.
    """
    parts = []
    for path in sorted({*before_deletion} | {*after_deletion}):
        original = before_deletion.get(path)
        deleted = after_deletion.get(path, original)
        if original != deleted:
            parts.append("".join(_file_patch(path, deleted, original)))
    return "".join(parts)


def _file_patch(path: str, old: str | None, new: str | None) -> Iterator[str]:
    tab = "\t" if " " in path else ""
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    yield f"diff --git a/{path} b/{path}\n{mode}"
    source = f"a/{path}{tab}" if old is not None else "/dev/null"
    target = f"b/{path}{tab}" if new is not None else "/dev/null"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), source, target)
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """By line feeds only: other line breaks are part of a line for git."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def touched_by(patch: str) -> dict[str, tuple[int, int]]:
    """Path -> lines added and removed."""
    with tempfile.TemporaryDirectory(prefix="offbook-patch-") as folder:
        records = _apply(Path(folder), patch, "--numstat", "-z").split("\0")
    found = {}
    for record in filter(None, records):
        added, removed, path = record.split("\t", 2)
        if added == "-":
            raise BadPatch(f"it changes the binary file {path}")
        found[path] = int(added), int(removed)
    return found


def applied(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """What the patch makes of the files that it touches, None where one goes. Without fuzz.

    `files` has at least those of them that exist.
    """
    with tempfile.TemporaryDirectory(prefix="offbook-patch-") as folder:
        root = Path(folder)
        before = {path for path in touched_by(patch) if path in files}
        for path in before:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(files[path].encode())
        _apply(root, patch, "--whitespace=nowarn")
        after = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        changed: dict[str, str | None] = {path: file.read_bytes().decode() for path, file in after.items()}
    return {**dict.fromkeys(before - changed.keys()), **changed}


def _apply(root: Path, patch: str, *options: str) -> str:
    done = _run(root, "apply", *options, "-", given=(patch if patch.endswith("\n") else patch + "\n").encode())
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("error: ")
        raise BadPatch(f"it does not apply: {reason}")
    return done.stdout.decode()
