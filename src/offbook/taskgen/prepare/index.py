"""The package index that pip is set up with: which source distributions it has, and how to get one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import json
import re
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from offbook.taskgen.nouns import Unprepared
from offbook.tasks.unpack import MB, SourceLimits
from offbook.types import OffbookError

SIMPLE_API = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
PYTHON_VERSION = "{}.{}.{}".format(*sys.version_info[:3])
ATTRIBUTE = r"""([\w-]+)\s*=\s*(["'])(.*?)\2"""
# What pip itself would use, from its files, its environment variables and its defaults.
PIP_SETTINGS = """\
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args([])
print(json.dumps([[] if options.no_index else [options.index_url, *options.extra_index_urls], options.cert or ""]))
"""


class Missing(Exception):
    """The address answers that there is nothing."""


async def run_quietly(
    command: list[str], timeout_s: float, environment: dict[str, str] | None = None
) -> tuple[int | None, str]:
    """How a trusted command ended and what it printed; None as exit code where it ran past the deadline."""
    quiet, pipe, both = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
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


async def source_distribution(name: str, version: str | None, work: Path, limits: SourceLimits) -> tuple[Path, str]:
    """Download the newest one that is final and runs on this Python, or the one asked for."""
    exit_code, output = await run_quietly([sys.executable, "-c", PIP_SETTINGS], 60.0)
    if exit_code != 0:
        raise Unprepared(f"pip's settings cannot be read; is pip installed beside {sys.executable}?")
    urls, certificates = json.loads(output.splitlines()[-1])
    return await asyncio.to_thread(_source_distribution, name, version, urls, certificates, work, limits)


def _source_distribution(
    name: str, version: str | None, indexes: list[str], certificates: str, work: Path, limits: SourceLimits
) -> tuple[Path, str]:
    found: dict[Version, _File] = {}
    known = False
    for url in indexes:
        page = f"{url.rstrip('/')}/{name}/" + ("index.html" if url.startswith("file:") else "")
        try:
            content, kind = download(page, limits, SIMPLE_API, certificates)
        except Missing:
            continue
        known = True
        for file in _files(content, kind, page):
            try:
                file_project, file_version = parse_sdist_filename(file.name)
            except InvalidSdistFilename:
                continue
            if file_project == name and runs_here(file.requires_python) and (version is not None or not file.yanked):
                found.setdefault(file_version, file)
    if not known:
        raise Unprepared(f"the package index has no package {name}")
    if version is not None:
        try:
            candidates = [one for one in found if one == Version(version)]
        except InvalidVersion:
            raise Unprepared(f"{version} is no version") from None
    else:
        candidates = [one for one in found if not one.is_prerelease] or list(found)
    if not candidates:
        raise Unprepared(f"the package index has no source distribution of {name}" + (f" {version}" if version else ""))
    newest = max(candidates)
    file = found[newest]
    content, _ = download(file.url, limits, certificates=certificates)
    algorithm, _, expected = file.digest.partition("=")
    if expected and hashlib.new(algorithm, content).hexdigest() != expected:
        raise Unprepared(f"the source distribution of {name} {newest} does not match the index's {algorithm} digest")
    target = work / Path(urllib.parse.urlsplit(file.url).path).name
    target.write_bytes(content)
    return target, str(newest)


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    url: str
    digest: str
    requires_python: str
    yanked: bool


def _files(content: bytes, kind: str, page: str) -> Iterator[_File]:
    """What a page of the index lists, which is JSON (PEP 691) or HTML."""
    if "json" in kind:
        for file in json.loads(content)["files"]:
            digest = f"sha256={file['hashes']['sha256']}" if "sha256" in file["hashes"] else ""
            required = file.get("requires-python") or ""
            yield _File(
                file["filename"], urllib.parse.urljoin(page, file["url"]), digest, required, bool(file.get("yanked"))
            )
        return
    for attributes, text in re.findall(r"<a\s([^>]*)>([^<]*)</a>", content.decode(errors="replace"), re.I):
        values = {key.lower(): html.unescape(value) for key, _, value in re.findall(ATTRIBUTE, attributes)}
        link, _, digest = values.get("href", "").partition("#")
        required, yanked = values.get("data-requires-python", ""), "data-yanked" in attributes.lower()
        yield _File(html.unescape(text).strip(), urllib.parse.urljoin(page, link), digest, required, yanked)


def runs_here(required: str) -> bool:
    try:
        return SpecifierSet(required).contains(PYTHON_VERSION, prereleases=True)
    except InvalidSpecifier:
        return True


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
            content = bytearray()
            while chunk := answer.read(MB):
                content += chunk
                if len(content) > limits.archive_mb * MB:
                    raise Unprepared(f"{shown} is larger than {limits.archive_mb} MB")
                if time.monotonic() > deadline:
                    raise Unprepared(f"{shown} could not be downloaded within {limits.seconds:.0f} s")
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
