"""git with nobody's configuration: a tree becomes a checkout with a single commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from offbook.types import OffbookError

GIT_S = 120.0


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
    """With a fixed author and date."""
    environment = plain_environment(tree)
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "offbook", f"GIT_{who}_EMAIL": "offbook@localhost"}
        environment[f"GIT_{who}_DATE"] = "2000-01-01T00:00:00+0000"
    settings = ["-c", "core.autocrlf=false", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false"]
    command = ["git", *settings, "-C", str(tree), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GIT_S, check=False)
    if done.returncode:
        raise OffbookError(f"git {arguments[0]} failed in {tree}: {done.stderr.strip()}")
