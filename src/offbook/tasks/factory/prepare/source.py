"""Where a repository comes from: a folder, a git URL, an archive, or the package index that pip is set up with.

No code of the repository runs here. `pip download` asks a source distribution's build backend for metadata, which runs
it, so only pip's search of the index is used, and the file is downloaded and unpacked by the rules of tasks/unpack.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from offbook.tasks.factory.audit.scrub import CACHES, VERSION_CONTROL
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.unpack import MB, BadArchive, SourceLimits, copy_tree, unpack
from offbook.types import OffbookError

SKIPPED = VERSION_CONTROL | CACHES | {".venv", "venv", "node_modules", ".cache"}
ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
# The ref is what follows an @ in the last part of the path.
GIT_URL = re.compile(r"((?:(?:https|ssh|file)://|[\w.]+@[\w.-]+:)[^-].*?)(?:@([^-/@][^/@]*))?")
PYTHON_VERSION = "{}.{}.{}".format(*sys.version_info[:3])
# Arguments: name, version specifier, Python version, folder, limit in bytes. The last line is the file and its version,
# or null; the lines before it say what could not be fetched.
FIND_AND_DOWNLOAD = """\
import hashlib, json, logging, pathlib, sys
from pip._internal.commands import create_command
from pip._internal.models.target_python import TargetPython
from pip._vendor.packaging.specifiers import SpecifierSet
name, wanted, python, folder, limit = sys.argv[1:]
logging.basicConfig(format="%(message)s")
logging.getLogger("pip._internal.index.collector").setLevel(logging.DEBUG)
command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:"])
with command.main_context():
    session = command.get_default_session(options)
    target = TargetPython(py_version_info=tuple(int(part) for part in python.split(".")[:3]))
    finder = command._build_package_finder(options, session, target)
    best = finder.find_best_candidate(name, SpecifierSet(wanted)).best_candidate
    if best is None:
        sys.exit(print("null"))
    answer = session.get(best.link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"})
    answer.raise_for_status()
    content = answer.raw.read(int(limit) + 1)
if best.link.hash_name and hashlib.new(best.link.hash_name, content).hexdigest() != best.link.hash:
    sys.exit(f"{best.link.filename} does not match the {best.link.hash_name} digest of the package index")
path = pathlib.Path(folder, best.link.filename)
path.write_bytes(content)
print(json.dumps([str(path), str(best.version)]))
"""
# What pip itself would use, from its files, its environment variables and its defaults.
PIP_INDEXES = """\
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args([])
print(json.dumps([] if options.no_index else [options.index_url, *options.extra_index_urls]))
"""


@dataclass(frozen=True)
class Fetched:
    """Source in a folder: as it was published, without version control and caches."""

    name: str
    version: str  # empty where only the metadata in the tree can tell
    tree: Path
    message: str = ""  # of the commit


async def fetch(spec: str, into: Path, limits: SourceLimits | None = None, python: str = PYTHON_VERSION) -> Fetched:
    """Bring the source that `spec` names to `into`/NAME, which must not exist.

    A spec is a folder, a git URL (https, ssh or file, `@REF` behind it for another branch, tag or commit than the
    default, `@REF^` for its first parent), an archive, or `pypi:NAME` or `pypi:NAME==VERSION`. Without a
    version it is the newest that runs on the version `python`.
    """
    limits = limits or SourceLimits()
    with tempfile.TemporaryDirectory(prefix="offbook-fetch-") as place:
        try:
            fetched = await _fetch(spec, Path(place), limits, python)
            copy = Path(place) / "tree"
            await asyncio.to_thread(copy_tree, fetched.tree, copy, spec, limits, SKIPPED)
        except BadArchive as error:
            raise Unprepared(str(error)) from error
        if not copy.is_dir():
            raise Unprepared(f"{spec} is empty")
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(copy, into / fetched.name)
        return replace(fetched, tree=into / fetched.name)


async def _fetch(spec: str, work: Path, limits: SourceLimits, python: str) -> Fetched:
    """The source as it came, in `work` or where it was."""
    what = without_secrets(spec)
    version = message = ""
    if spec.startswith("pypi:"):
        archive, name, version = await _from_index(spec.removeprefix("pypi:"), work, limits, python)
    elif ending := next(filter(spec.endswith, ARCHIVE_ENDINGS), ""):
        archive = Path(spec)
        if not archive.is_file():
            raise Unprepared(f"there is no file {spec}")
        name = archive.name.removesuffix(ending)
    elif git := GIT_URL.fullmatch(spec.removeprefix("git+")):
        url = git[1]
        ref = git[2] or "HEAD"
        name = re.split(r"[/:]", url.removesuffix("/").removesuffix(".git"))[-1]
        archive, message = await _clone(url, ref, work, limits)
    elif Path(spec).is_dir():
        return Fetched(Path(spec).resolve().name, "", Path(spec))
    else:
        raise Unprepared(f"{spec} is neither a folder, nor an archive, nor a git URL, nor pypi:NAME")
    if archive.stat().st_size > limits.tree_mb * MB:
        raise Unprepared(f"{what} is larger than {limits.tree_mb} MB")
    unpacked = work / "unpacked"
    unpacked.mkdir()
    await asyncio.to_thread(unpack, archive, unpacked, what, limits)
    entries = list(unpacked.iterdir())
    # Most archives hold one folder with all the rest.
    is_wrapped = len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink()
    return Fetched(name, version, entries[0] if is_wrapped else unpacked, message)


def one_spelling(spec: str) -> str:
    """The same for each way to write a source: files by their whole path, packages by the index's name for them."""
    if spec.startswith("pypi:"):
        name, equals, version = spec.removeprefix("pypi:").partition("==")
        return f"pypi:{canonicalize_name(name)}{equals}{version}"
    return os.path.realpath(spec) if os.path.exists(spec) else spec


async def _clone(url: str, ref: str, work: Path, limits: SourceLimits) -> tuple[Path, str]:
    """The files of one commit as a tar, and the commit's message.

    There is no checkout, so no hook, no filter and no submodule has a say.
    """
    git = work / "git"
    archive = work / "tree.tar"
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes", "LC_ALL": "C"}
    environment = {**os.environ, **quiet}
    options = ["--git-dir", str(git), "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never"]

    async def run(*arguments: str) -> str:
        limited = f'ulimit -f {limits.tree_mb * 2048}; exec "$@"'  # a fetch is one pack
        command = ["sh", "-c", limited, "sh", "git", *options, *arguments]
        exit_code, output = await run_quietly(command, limits.seconds, environment)
        if not exit_code and exit_code is not None:
            return output.strip()
        reasons = re.findall(r"^(?:fatal|error): .*", output, re.M) or [f"git ended with {exit_code}"]
        why = f"could not be cloned ({without_secrets(reasons[0])})"
        if exit_code is None:
            why = f"could not be cloned within {limits.seconds:.0f} s"
        elif re.search(r"File too large|signal 25|index-pack", output):
            why = f"is larger than {limits.tree_mb} MB"
        raise Unprepared(f"{without_secrets(url)} {why}")

    await run("init", "--quiet", "--bare", "--template=", str(git))
    (git / "info").mkdir(exist_ok=True)
    # `export-ignore` would leave the tests out of many repositories.
    (git / "info" / "attributes").write_text("* -export-ignore -export-subst -filter\n")
    plain_fetch = ["fetch", "--quiet", "--depth=2", "--no-tags", "--no-recurse-submodules"]
    await run(*plain_fetch, "--", url, ref.removesuffix("^"))
    commit = "FETCH_HEAD" + "^" * ref.endswith("^")
    await run("archive", "--format=tar", f"--output={archive}", commit)
    return archive, await run("log", "-1", "--format=%B", "FETCH_HEAD")


async def _from_index(wanted: str, work: Path, limits: SourceLimits, python: str) -> tuple[Path, str, str]:
    """Download the source distribution that pip would take, and return its name and version too."""
    match = re.fullmatch(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(==\d[\w.!+]*)?", wanted)
    if not match:
        raise Unprepared(f"pypi:{wanted} is neither pypi:NAME nor pypi:NAME==VERSION")
    name = canonicalize_name(match[1])
    version = match[2] or ""
    limit = str(limits.tree_mb * MB)
    command = [sys.executable, "-c", FIND_AND_DOWNLOAD, name, version, python, str(work), limit]
    exit_code, output = await run_quietly(command, limits.seconds)
    *before, last = without_secrets(output).strip().splitlines() or [""]
    if exit_code is None:
        raise Unprepared(f"{name} could not be downloaded within {limits.seconds:.0f} s")
    if exit_code:
        raise Unprepared(f"{name} could not be downloaded ({last})")
    found = json.loads(last)
    if found is None:
        failed = [f" ({line})" for line in before if line.startswith("Could not fetch") and "404" not in line]
        what = f"{name} {version.removeprefix('==')}".strip()
        raise Unprepared(
            f"the package index has no source distribution of {what} for Python {python}{''.join(failed[:1])}"
        )
    return Path(found[0]), name, found[1]


async def run_quietly(
    command: list[str], timeout_s: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """How a trusted command ended and what it printed; None as exit code after a timeout."""
    quiet = asyncio.subprocess.DEVNULL
    pipe = asyncio.subprocess.PIPE
    both = asyncio.subprocess.STDOUT
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=quiet, stdout=pipe, stderr=both)
    except FileNotFoundError:
        raise OffbookError(f"{command[0]} is not installed") from None
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        return None, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")


async def pip_indexes() -> list[str]:
    """The URLs of the package indexes that pip is set up with."""
    exit_code, output = await run_quietly([sys.executable, "-c", PIP_INDEXES], 60.0)
    if exit_code != 0:
        raise Unprepared(f"pip's settings cannot be read; is pip installed for {sys.executable}?")
    found: list[str] = json.loads(output.splitlines()[-1])
    return found


def without_secrets(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)
