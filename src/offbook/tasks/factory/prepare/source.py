"""Where a repository comes from: a folder, a git URL, an archive, or the package index that pip is set up with.

No code of the repository runs here. That is why a source distribution is taken from the index by hand: `pip download`
asks its build backend for metadata, which runs it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import os
import re
import shutil
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from offbook.tasks.factory.audit.scrub import CACHES, VERSION_CONTROL
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.unpack import MB, BadArchive, SourceLimits, copy_tree, unpack
from offbook.types import OffbookError

SKIPPED = VERSION_CONTROL | CACHES | {".venv", "venv", "node_modules", ".cache"}
FILE_TOO_LARGE = (-25, 128 + 25)  # ended by SIGXFSZ, directly or in a shell
ARCHIVE_ENDINGS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".zip")
SIMPLE_API = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
PYTHON_VERSION = "{}.{}.{}".format(*sys.version_info[:3])
ATTRIBUTE = r"""([\w-]+)\s*=\s*(["'])(.*?)\2"""
# What pip itself would use, from its files, its environment variables and its defaults.
PIP_SETTINGS = """\
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args([])
indexes = [] if options.no_index else [options.index_url, *options.extra_index_urls]
print(json.dumps([indexes, options.cert or "", options.find_links]))
"""


@dataclass(frozen=True)
class Fetched:
    """Source in a folder: as it was published, without version control and caches."""

    name: str
    version: str  # empty where only the metadata in the tree can tell
    tree: Path
    message: str = ""  # of the commit


async def fetch(spec: str, into: Path, limits: SourceLimits | None = None, python: str = PYTHON_VERSION) -> Fetched:
    """Bring the source that `spec` names to `into`/NAME, which must not exist; `into` is made if it is not there.
    Where the index has several versions, it is one that runs on the version `python`.

    A spec is a folder, a git URL (https, ssh or file, `@REF` behind it for another branch, tag or commit than the
    default, `@REF^` for its first parent), an archive (path or URL), or `pypi:NAME` or `pypi:NAME==VERSION`.
    """
    limits = limits or SourceLimits()
    with tempfile.TemporaryDirectory(prefix="offbook-fetch-") as place:
        try:
            fetched = await _fetch(spec, Path(place), limits, python)
            part = Path(place) / "tree"
            await asyncio.to_thread(copy_tree, fetched.tree, part, spec, limits, SKIPPED)
        except BadArchive as error:
            raise Unprepared(str(error)) from error
        if not part.is_dir():
            raise Unprepared(f"{spec} is empty")
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(part, into / fetched.name)
        return replace(fetched, tree=into / fetched.name)


async def _fetch(spec: str, work: Path, limits: SourceLimits, python: str) -> Fetched:
    """The source as it came, in `work` or where it was."""
    what = spec
    message = ""
    if spec.startswith("pypi:"):
        name, wanted = _requirement(spec.removeprefix("pypi:"))
        archive, version = await source_distribution(name, wanted, work, limits, python)
        what = f"{name} {version}"
    elif spec.endswith(ARCHIVE_ENDINGS) or urllib.parse.urlsplit(spec).path.endswith(ARCHIVE_ENDINGS):
        archive = await _archive(spec, work, limits)
        name, version = _split_name(archive.name)
    elif git := _git_url(spec):
        url, ref = git
        what = without_secrets(url)
        name = re.split(r"[/:]", url.rstrip("/").removesuffix(".git"))[-1]
        version = ref.removeprefix("v") if re.fullmatch(r"v?\d[\w.]*", ref) else ""
        archive, message = await _clone(url, ref, work, limits)
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
    return Fetched(name, version, unpacked if whole else entries[0], message)


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


async def _clone(url: str, ref: str, work: Path, limits: SourceLimits) -> tuple[Path, str]:
    """The files of one commit as a tar, and the commit's message.

    There is no checkout, so no hook, no filter and no submodule has a say.
    """
    git = work / "git"
    archive = work / "tree.tar"
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -o BatchMode=yes", "LC_ALL": "C"}
    quiet = {name: value for name, value in quiet.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    here = ["git", "--git-dir", str(git), "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never"]
    shown = without_secrets(url)
    deadline = asyncio.get_running_loop().time() + limits.seconds
    output = ""
    for arguments in (
        ["init", "--quiet", "--bare", "--template=", str(git)],
        ["fetch", "--quiet", "--depth=2", "--no-tags", "--no-recurse-submodules", "--", url, ref.removesuffix("^")],
        ["archive", "--format=tar", f"--output={archive}", "FETCH_HEAD" + "^" * ref.endswith("^")],
        ["log", "-1", "--format=%B", "FETCH_HEAD"],
    ):
        # The limit is on one file: a fetch is one pack, an archive one tar.
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
    return archive, output.strip()


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
    return _written(content, spec, work)


def _written(content: bytes, url: str, work: Path) -> Path:
    target = work / Path(urllib.parse.urlsplit(url).path).name
    target.write_bytes(content)
    return target


def _requirement(wanted: str) -> tuple[str, str | None]:
    match = re.fullmatch(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(\d[\w.!+]*))?", wanted)
    if not match:
        raise Unprepared(f"pypi:{wanted} is neither pypi:NAME nor pypi:NAME==VERSION")
    return canonicalize_name(match[1]), match[2]


class Missing(Exception):
    """The address answers that there is nothing."""


async def run_quietly(
    command: list[str], timeout_s: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """How a trusted command ended and what it printed; None as exit code where it ran past the deadline."""
    quiet = asyncio.subprocess.DEVNULL
    pipe = asyncio.subprocess.PIPE
    both = asyncio.subprocess.STDOUT
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=quiet, stdout=pipe, stderr=both)
    except FileNotFoundError:
        raise OffbookError(f"{command[0]} is not installed") from None
    try:
        output, _ = await asyncio.wait_for(process.communicate(), max(timeout_s, 0.1))
    except TimeoutError:
        return None, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")


def without_secrets(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


async def file_urls() -> list[str]:
    """Some of the files themselves, which an index may keep on another host: those of pip."""
    settings = await pip_settings()
    with contextlib.suppress(Unprepared):
        found = await asyncio.to_thread(_listed, "pip", settings, SourceLimits())
        return [file.url for file in found.values() if file.url.startswith("http")]
    return []


@dataclass(frozen=True)
class PipSettings:
    indexes: list[str]
    certificates: str  # a file, or nothing
    find_links: list[str]


async def pip_settings() -> PipSettings:
    """What pip is set up with."""
    exit_code, output = await run_quietly([sys.executable, "-c", PIP_SETTINGS], 60.0)
    if exit_code != 0:
        raise Unprepared(f"pip's settings cannot be read; is pip installed for {sys.executable}?")
    return PipSettings(*json.loads(output.splitlines()[-1]))


async def source_distribution(
    name: str, version: str | None, work: Path, limits: SourceLimits, python: str = PYTHON_VERSION
) -> tuple[Path, str]:
    """Download the newest one that is final and runs on the version `python`, or the one asked for."""
    settings = await pip_settings()
    found = await asyncio.to_thread(_listed, name, settings, limits)
    try:
        asked = [one for one in found if (not found[one].yanked if version is None else one == Version(version))]
    except InvalidVersion:
        raise Unprepared(f"{version} is no version") from None
    if not asked:
        raise Unprepared(f"the package index has no source distribution of {name}" + (f" {version}" if version else ""))
    usable = [one for one in asked if runs_on(found[one].requires_python, python)]
    if not usable:
        newest = max(asked)
        raise Unprepared(needs_another(f"{name} {newest}", found[newest].requires_python, python))
    newest = max([one for one in usable if not one.is_prerelease] or usable)
    file = found[newest]
    content, _ = await asyncio.to_thread(download, file.url, limits, certificates=settings.certificates)
    algorithm, _, expected = file.digest.partition("=")
    if expected and hashlib.new(algorithm, content).hexdigest() != expected:
        raise Unprepared(f"the source distribution of {name} {newest} does not match the index's {algorithm} digest")
    return _written(content, file.url, work), str(newest)


@dataclass(frozen=True)
class _File:
    url: str
    digest: str
    requires_python: str
    yanked: bool


def _listed(name: str, settings: PipSettings, limits: SourceLimits) -> dict[Version, _File]:
    """The source distributions, of whatever Python they are."""
    found: dict[Version, _File] = {}
    known = False
    for url in settings.indexes:
        page = f"{url.rstrip('/')}/{name}/" + ("index.html" if url.startswith("file:") else "")
        try:
            content, kind = download(page, limits, SIMPLE_API, settings.certificates)
        except Missing:
            continue
        known = True
        for file_name, link, required, yanked in _json_rows(content) if "json" in kind else _html_rows(content):
            address, _, digest = urllib.parse.urljoin(page, link).partition("#")
            with contextlib.suppress(InvalidSdistFilename):
                file_project, file_version = parse_sdist_filename(file_name)
                if file_project == name:
                    found.setdefault(file_version, _File(address, digest, required, yanked))
    if not known:
        raise Unprepared(f"the package index has no package {name}")
    return found


Row = tuple[str, str, str, bool]  # name of a file, its link with its digest behind a #, required Python, yanked


def _json_rows(content: bytes) -> Iterator[Row]:
    """PEP 691."""
    for file in json.loads(content)["files"]:
        digest = f"#sha256={file['hashes']['sha256']}" if "sha256" in file["hashes"] else ""
        yield file["filename"], file["url"] + digest, file.get("requires-python") or "", bool(file.get("yanked"))


def _html_rows(content: bytes) -> Iterator[Row]:
    for attributes, text in re.findall(r"<a\s([^>]*)>([^<]*)</a>", content.decode(errors="replace"), re.I):
        values = {key.lower(): html.unescape(value) for key, _, value in re.findall(ATTRIBUTE, attributes)}
        required = values.get("data-requires-python", "")
        yield html.unescape(text).strip(), values.get("href", ""), required, "data-yanked" in attributes.lower()


def runs_on(required: str, python: str) -> bool:
    try:
        return SpecifierSet(required).contains(python, prereleases=True)
    except InvalidSpecifier:
        return True


def needs_another(name: str, required: str, python: str) -> str:
    """One sentence, with a version that would do where one of the last years does."""
    fits = next((f"3.{minor}" for minor in range(9, 20) if runs_on(required, f"3.{minor}.99")), "")
    hint = f"; say --python {fits}" if fits else ""
    return f"{name} needs Python {required} and this is {python}{hint}"


def download(url: str, limits: SourceLimits, accept: str = "*/*", certificates: str = "") -> tuple[bytes, str]:
    """The content and its kind. Credentials in the URL are sent as a header, and never shown."""
    shown = without_secrets(url)
    headers = {"Accept": accept, "User-Agent": "offbook"}
    login = re.match(r"https?://([^/@]+)@", url)
    if login:
        secret = urllib.parse.unquote(login[1]).encode()
        headers["Authorization"] = "Basic " + base64.b64encode(secret).decode()
    context = ssl.create_default_context(cafile=certificates or None)
    deadline = time.monotonic() + limits.seconds
    try:
        request = urllib.request.Request(shown, headers=headers)
        with urllib.request.urlopen(request, timeout=min(60.0, limits.seconds), context=context) as answer:
            kind = answer.headers.get("Content-Type", "")
            length = answer.headers.get("Content-Length", "")
            content = bytearray()
            while chunk := answer.read(MB):
                content += chunk
                if len(content) > limits.archive_mb * MB:
                    raise Unprepared(f"{shown} is larger than {limits.archive_mb} MB")
                if time.monotonic() > deadline:
                    raise Unprepared(f"{shown} could not be downloaded within {limits.seconds:.0f} s")
        if length.isdigit() and len(content) < int(length):  # a connection that ends early is no error to the library
            raise Unprepared(f"{shown} ended after {len(content)} of {length} bytes; try again")
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise Missing from None
        raise Unprepared(f"{shown} answers with {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, FileNotFoundError):
            raise Missing from None
        raise Unprepared(f"{shown} cannot be reached ({error.reason})") from None
    except OSError as error:
        raise Unprepared(f"{shown} cannot be reached ({error or type(error).__name__})") from None
    return bytes(content), kind
