"""Where a repository comes from: a folder, a git URL, an archive, or the package index.

No code of the repository runs here. That is why a source distribution is taken from the index by hand: `pip download`
asks its build backend for metadata, which runs it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from offbook.taskgen.nouns import Unprepared
from offbook.taskgen.prepare.index import (
    Missing,
    download,
    run_quietly,
    source_distribution,
    without_secrets,
)
from offbook.tasks.unpack import MB, BadArchive, SourceLimits, copy_tree, unpack

SKIPPED = frozenset(
    {".git", ".hg", ".svn", ".bzr", ".tox", ".nox", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache"}
    | {".ruff_cache", ".pytest_cache", ".hypothesis", ".eggs", ".cache", ".coverage", "htmlcov", ".idea", ".vscode"}
)
FILE_TOO_LARGE = (-25, 128 + 25)  # ended by SIGXFSZ, directly or in a shell
ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Source that lies in a folder: as it was published, without version control and caches."""

    name: str
    version: str  # empty where only the metadata in the tree can tell
    tree: Path


async def fetch(spec: str, into: Path, limits: SourceLimits | None = None) -> Fetched:
    """Bring the source that `spec` names to `into`/NAME, which must not exist; `into` is made if it is not there.

    A spec is a folder, a git URL (https, ssh or file, `@REF` behind it for another branch, tag or commit than the
    default), an archive (path or URL), or `pypi:NAME` or `pypi:NAME==VERSION`.
    """
    limits = limits or SourceLimits()
    with tempfile.TemporaryDirectory(prefix="offbook-fetch-") as place:
        try:
            fetched = await _fetch(spec, Path(place), limits)
            part = Path(place) / "tree"
            await asyncio.to_thread(copy_tree, fetched.tree, part, spec, limits, SKIPPED)
        except BadArchive as error:
            raise Unprepared(str(error)) from error
        if not part.is_dir():
            raise Unprepared(f"{spec} is empty")
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(part, into / fetched.name)
        return Fetched(fetched.name, fetched.version, into / fetched.name)


async def _fetch(spec: str, work: Path, limits: SourceLimits) -> Fetched:
    """The source as it came, in `work` or where it was."""
    what = spec
    if spec.startswith("pypi:"):
        name, wanted = _requirement(spec.removeprefix("pypi:"))
        archive, version = await source_distribution(name, wanted, work, limits)
        what = f"{name} {version}"
    elif spec.endswith(ARCHIVE_ENDINGS) or urllib.parse.urlsplit(spec).path.endswith(ARCHIVE_ENDINGS):
        archive = await _archive(spec, work, limits)
        name, version = _split_name(archive.name)
    elif git := _git_url(spec):
        url, ref = git
        what = without_secrets(url)
        name = re.split(r"[/:]", url.rstrip("/").removesuffix(".git"))[-1]
        version = ref.removeprefix("v") if re.fullmatch(r"v?\d[\w.]*", ref) else ""
        archive = await _clone(url, ref, work, limits)
    elif Path(spec).is_dir():
        return Fetched(Path(spec).resolve().name, "", Path(spec))
    else:
        raise Unprepared(f"{spec} is neither a folder, nor an archive, nor a git URL, nor pypi:NAME")
    unpacked = work / "unpacked"
    unpacked.mkdir()
    await asyncio.to_thread(unpack, archive, unpacked, what, limits)
    entries = list(unpacked.iterdir())
    if not entries:
        raise Unprepared(f"{what} is empty")
    # Most archives hold one folder with all the rest.
    whole = len(entries) > 1 or entries[0].is_symlink() or not entries[0].is_dir()
    return Fetched(name, version, unpacked if whole else entries[0])


def one_spelling(spec: str) -> str:
    """The same for each way to write a source: files by their whole path, packages by the index's name for them."""
    if spec.startswith("pypi:"):
        name, equals, version = spec.removeprefix("pypi:").partition("==")
        return f"pypi:{canonicalize_name(name)}{equals}{version}"
    return os.path.realpath(spec) if os.path.exists(spec) else spec


def _split_name(file_name: str) -> tuple[str, str]:
    for ending in ARCHIVE_ENDINGS:
        file_name = file_name.removesuffix(ending)
    match = re.fullmatch(r"(.+?)-(v?\d[\w.]*)", file_name)
    return (match[1], match[2].removeprefix("v")) if match else (file_name, "")


def _git_url(spec: str) -> tuple[str, str] | None:
    """The URL and the ref, which is what follows an @ in the last part of the path."""
    spec = spec.removeprefix("git+")
    if not re.match(r"(https|ssh|file)://[^-]|[\w.]+@[\w.-]+:[^-]", spec):
        return None
    start, slash, last = spec.rpartition("/")
    last, _, ref = last.partition("@")
    if ref.startswith("-"):
        raise Unprepared(f"{ref} is no name of a branch, tag or commit")
    return f"{start}{slash}{last}", ref or "HEAD"


async def _clone(url: str, ref: str, work: Path, limits: SourceLimits) -> Path:
    """The files of one commit as a tar. There is no checkout, so no hook, no filter and no submodule has a say."""
    git, archive = work / "git", work / "tree.tar"
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes", "LC_ALL": "C"}
    quiet = {name: value for name, value in quiet.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    here = ["git", "--git-dir", str(git), "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never"]
    shown = without_secrets(url)
    deadline = asyncio.get_running_loop().time() + limits.seconds
    for arguments in (
        ["init", "--quiet", "--bare", "--template=", str(git)],
        ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--", url, ref],
        ["archive", "--format=tar", f"--output={archive}", "FETCH_HEAD"],
    ):
        # The limit is on one file: everything that is fetched lies in one pack, everything archived in one tar.
        limit_mb = limits.tree_mb if arguments[0] == "archive" else limits.archive_mb
        command = ["sh", "-c", f'ulimit -f {limit_mb * 2048}; exec "$@"', "sh", *here, *arguments]
        exit_code, output = await run_quietly(command, deadline - asyncio.get_running_loop().time(), quiet)
        if exit_code is None:
            raise Unprepared(f"{shown} could not be cloned within {limits.seconds:.0f} s")
        if exit_code and (exit_code in FILE_TOO_LARGE or re.search(r"File too large|signal 25|index-pack", output)):
            raise Unprepared(f"{shown} is larger than {limit_mb} MB")
        if exit_code:
            lines = [line for line in output.splitlines() if line.startswith(("fatal: ", "error: "))]
            reason = lines[0] if lines else f"git ended with {exit_code}"
            raise Unprepared(f"{shown} could not be cloned ({without_secrets(reason)})")
        if arguments[0] == "init":
            # `export-ignore` would leave the tests out of many repositories.
            (git / "info").mkdir(exist_ok=True)
            (git / "info" / "attributes").write_text("* -export-ignore -export-subst -filter\n")
    return archive


async def _archive(spec: str, work: Path, limits: SourceLimits) -> Path:
    if "://" not in spec:
        archive = Path(spec)
        if not archive.is_file():
            raise Unprepared(f"there is no file {spec}")
        if archive.stat().st_size > limits.archive_mb * MB:
            raise Unprepared(f"{spec} is larger than {limits.archive_mb} MB")
        return archive
    if not spec.startswith(("https://", "http://", "file://")):
        raise Unprepared(f"{spec} is no URL that can be downloaded from")
    try:
        content, _ = await asyncio.to_thread(download, spec, limits)
    except Missing:
        raise Unprepared(f"there is nothing at {without_secrets(spec)}") from None
    target = work / Path(urllib.parse.urlsplit(spec).path).name
    target.write_bytes(content)
    return target


def _requirement(wanted: str) -> tuple[str, str | None]:
    match = re.fullmatch(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(\d[\w.!+]*))?", wanted)
    if not match:
        raise Unprepared(f"pypi:{wanted} is neither pypi:NAME nor pypi:NAME==VERSION")
    return canonicalize_name(match[1]), match[2]
