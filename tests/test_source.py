"""Sources: what a stranger's archive may not do, what git and the index give, and what is said if not."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import io
import os
import stat
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.tasks.factory.prepare.source import Fetched, fetch, one_spelling
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.unpack import SourceLimits, stays_inside

SMALL = SourceLimits(tree_mb=1, files=20, seconds=20.0)


def bring(spec: object, into: Path, limits: SourceLimits = SMALL) -> Fetched:
    return asyncio.run(fetch(str(spec), into, limits))


def refused(spec: object, into: Path, limits: SourceLimits = SMALL) -> str:
    """The sentence; nothing may be left behind."""
    with pytest.raises(Unprepared) as error:
        bring(spec, into, limits)
    assert not into.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def files_of(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir())


Entry = tuple[str, bytes] | tarfile.TarInfo


def entry(name: str, kind: bytes, link: str = "", size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    return member


def make_tar(path: Path, *entries: Entry) -> Path:
    with tarfile.open(path, "w:" + path.suffix.removeprefix(".").replace("tar", "")) as archive:
        for one in entries:
            if isinstance(one, tarfile.TarInfo):
                archive.addfile(one)
            else:
                member = tarfile.TarInfo(one[0])
                member.size = len(one[1])
                archive.addfile(member, io.BytesIO(one[1]))
    return path


def make_zip(path: Path, *entries: tuple[str, bytes], mode: int = stat.S_IFREG | 0o644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    return path


# --- folders


def test_a_folder_is_copied_without_version_control_and_caches(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    for path in ("pkg/__init__.py", ".git/config", "pkg/__pycache__/x.pyc", "old.pyc", ".venv/bin/python", "run.sh"):
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(path)
    (repo / "run.sh").chmod(0o755)
    (repo / "alias.py").symlink_to("pkg/__init__.py")
    fetched = bring(repo, tmp_path / "into")
    assert (fetched.name, fetched.version) == ("repo", "")
    assert files_of(fetched.tree) == ["alias.py", "pkg/__init__.py", "run.sh"]
    assert os.access(fetched.tree / "run.sh", os.X_OK)
    assert os.readlink(fetched.tree / "alias.py") == "pkg/__init__.py"


def test_folders_have_limits(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    assert refused(repo, tmp_path / "into") == f"{repo} is empty"
    for number in range(20):
        (repo / f"{number}.py").touch()
    bring(repo, tmp_path / "enough")
    (repo / "20.py").touch()
    assert refused(repo, tmp_path / "into") == f"{repo} holds more than 20 files"
    (repo / "20.py").unlink()
    (repo / "0.py").write_bytes(b"#" * (1 << 20))
    bring(repo, tmp_path / "just")
    (repo / "1.py").write_bytes(b"#")
    assert refused(repo, tmp_path / "into") == f"{repo} is larger than 1 MB"


def test_a_folder_with_a_pipe_or_a_link_out_is_refused(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    os.mkfifo(repo / "pipe")
    assert refused(repo, tmp_path / "into") == f"{repo} holds a device: 'pipe'"
    (repo / "pipe").unlink()
    (repo / "secret").symlink_to("/etc/passwd")
    assert refused(repo, tmp_path / "into") == f"{repo} holds a link that leaves it: 'secret'"


@pytest.mark.parametrize("spec", ["nothing-here", "/no/such/folder", "ext::sh -c touch x", "pypi", "ftp://a/b"])
def test_what_is_no_source(spec: str, tmp_path: Path) -> None:
    assert refused(spec, tmp_path / "into").endswith(
        "is neither a folder, nor an archive, nor a git URL, nor pypi:NAME"
    )


# --- archives


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "tar.bz2", "tar.xz", "tar", "zip"])
def test_archives_of_every_kind(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"thing-1.2.{ending}"
    content = (("thing-1.2/a.py", b"A"), ("thing-1.2/sub/b.py", b"B"))
    if ending == "zip":
        make_zip(path, *content)
    else:
        make_tar(path if ending != "tgz" else path.with_suffix(".gz"), *content)
        if ending == "tgz":
            path.with_suffix(".gz").rename(path)
    fetched = bring(path, tmp_path / "into")
    assert (fetched.name, fetched.version, files_of(fetched.tree)) == ("thing-1.2", "", ["a.py", "sub/b.py"])


OUTSIDE = "holds a file that would land outside of it"
LEAVES = "holds a link that leaves it"


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([("../evil", b"x")], OUTSIDE),
        ([("a/../../evil", b"x")], OUTSIDE),
        ([("/tmp/evil", b"x")], OUTSIDE),
        ([("a\\..\\evil", b"x")], OUTSIDE),
        ([entry("a", tarfile.SYMTYPE, "/etc")], LEAVES),
        ([entry("a", tarfile.SYMTYPE, "..")], LEAVES),
        ([entry("a/b", tarfile.SYMTYPE, "../../c")], LEAVES),
        ([entry("a", tarfile.SYMTYPE, "."), entry("b", tarfile.SYMTYPE, "a/a/../../../etc")], LEAVES),
        ([entry("a", tarfile.SYMTYPE, "b"), ("a/evil", b"x")], "behind a link"),
        ([("a", b"x"), entry("a", tarfile.SYMTYPE, "b")], "holds a link in the place of"),
        ([("a/b", b"x"), entry("a", tarfile.SYMTYPE, "b")], "holds a link in the place of"),
        ([("real/x", b"x"), entry("a", tarfile.SYMTYPE, "real"), entry("a/b", tarfile.SYMTYPE, "x")], "behind a link"),
        ([entry("a", tarfile.LNKTYPE, "../../../etc/passwd")], OUTSIDE),
        ([entry("a", tarfile.LNKTYPE, "/etc/passwd")], OUTSIDE),
        ([entry("a", tarfile.FIFOTYPE)], "holds a device"),
        ([entry("a", tarfile.CHRTYPE)], "holds a device"),
        ([(f"{number}.py", b"") for number in range(21)], "holds more than 20 files"),
        ([], "is empty"),
    ],
)
def test_tars_that_are_refused(entries: list[Entry], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(make_tar(tmp_path / "x.tar.gz", *entries), tmp_path / "into")
    assert not (tmp_path.parent / "evil").exists()


def test_hard_links_and_links_inside_are_kept(tmp_path: Path) -> None:
    entries: list[Entry] = [("x/a.py", b"A"), entry("x/b.py", tarfile.LNKTYPE, "x/a.py")]
    entries += [entry("x/s/c.py", tarfile.SYMTYPE, "../a.py"), entry("x/missing", tarfile.SYMTYPE, "nothing")]
    tree = bring(make_tar(tmp_path / "x.tar.gz", *entries), tmp_path / "into").tree
    assert files_of(tree) == ["a.py", "b.py", "missing", "s/c.py"]
    assert (tree / "b.py").read_text() == (tree / "s/c.py").read_text() == "A"


def test_bombs_go_out_early(tmp_path: Path) -> None:
    big = tmp_path / "big.tar.gz"
    make_tar(big, ("zeros", bytes(20 << 20)))
    assert big.stat().st_size < 1 << 20
    assert refused(big, tmp_path / "into") == f"{big} is larger than 1 MB"
    header = tmp_path / "header.tar.gz"  # all of it in a header, which tarfile would read into memory
    with tarfile.open(header, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"comment": "x" * (5 << 20)}
        archive.addfile(member)
    assert refused(header, tmp_path / "into") == f"{header} is larger than 1 MB"
    zipped = make_zip(tmp_path / "big.zip", ("zeros", bytes(20 << 20)))
    assert refused(zipped, tmp_path / "into") == f"{zipped} is larger than 1 MB"
    random = tmp_path / "random.tar"
    random.write_bytes(os.urandom((1 << 20) + 1))
    assert refused(random, tmp_path / "into") == f"{random} is larger than 1 MB"


def test_zips_that_are_refused(tmp_path: Path) -> None:
    into = tmp_path / "into"
    assert OUTSIDE in refused(make_zip(tmp_path / "a.zip", ("../evil", b"x")), into)
    tree = bring(make_zip(tmp_path / "d.zip", ("a", b"/etc/passwd"), mode=stat.S_IFLNK | 0o777), into).tree
    assert (tree / "a").read_bytes() == b"/etc/passwd", "no link"


@pytest.mark.parametrize("content", [b"", b"hello", b"\x1f\x8bnot really", b"PK\x03\x04", b"BZh9", b"\xfd7zXZ\x00"])
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(content)
    sentence = refused(path, tmp_path / "into")
    assert sentence.startswith(f"{path} is no archive that can be unpacked (") or sentence == f"{path} is empty"
    assert refused(tmp_path / "none.zip", tmp_path / "into") == f"there is no file {tmp_path / 'none.zip'}"


NAMES = st.sampled_from(["a", "b", "a/c", "b/c", "d"])
TARGETS = st.lists(st.sampled_from(["a", "b", "c", "d", "..", ".", "/"]), min_size=1, max_size=5).map("/".join)


@given(st.dictionaries(NAMES, TARGETS, max_size=4))
def test_accepted_links_never_lead_out(tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]) -> None:
    root = tmp_path_factory.mktemp("links")
    accepted = {name: target for name, target in links.items() if stays_inside(PurePosixPath(name), target)}
    for name in accepted:
        (root / name).parent.mkdir(exist_ok=True)
    for name, target in accepted.items():
        if not os.path.lexists(root / name):
            (root / name).symlink_to(target)
    for name in accepted:
        assert Path(os.path.realpath(root / name)).is_relative_to(os.path.realpath(root))


# --- git


def git(repo: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    command = ["git", "-C", str(repo), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **who}).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "project.git"
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "test_a.py").write_text("first")
    (path / ".gitattributes").write_text("tests export-ignore\n* filter=evil\n")
    git(path, "init", "-q", "-b", "main")
    git(path, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "one")
    git(path, "tag", "v1.5")
    (path / "tests" / "test_a.py").write_text("second")
    git(path, "commit", "-q", "-a", "-m", "two")
    return path


@pytest.mark.parametrize(
    ("prefix", "ref", "text"),
    [("", "", "second"), ("", "@main", "second"), ("", "@v1.5", "first"), ("git+", "@v1.5", "first")],
)
def test_git(repo: Path, prefix: str, ref: str, text: str, tmp_path: Path) -> None:
    fetched = bring(f"{prefix}{repo.as_uri()}{ref}", tmp_path / "into")
    assert (fetched.name, fetched.version) == ("project", "")
    assert files_of(fetched.tree) == [".gitattributes", "tests/test_a.py"]
    assert (fetched.tree / "tests" / "test_a.py").read_text() == text


def test_a_commit_and_a_bad_ref(repo: Path, tmp_path: Path) -> None:
    commit = git(repo, "rev-parse", "v1.5")
    assert (bring(f"{repo.as_uri()}@{commit}", tmp_path / "one").tree / "tests/test_a.py").read_text() == "first"
    sentence = refused(f"{repo.as_uri()}@nope", tmp_path / "into")
    assert sentence == f"{repo.as_uri()} could not be cloned (fatal: couldn't find remote ref nope)"
    for nowhere in (f"{repo.as_uri()}@--upload-pack=touch {tmp_path}/harm", "file:///no/such/repo"):
        assert "could not be cloned (fatal: " in refused(nowhere, tmp_path / "into")
    assert not (tmp_path / "harm").exists()


def test_a_large_repository_is_not_fetched_whole(repo: Path, tmp_path: Path) -> None:
    for number in range(150):  # more objects than git keeps unpacked
        (repo / f"{number}.bin").write_bytes(os.urandom(16_000))
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "large")
    assert refused(repo.as_uri(), tmp_path / "into") == f"{repo.as_uri()} is larger than 1 MB"


# --- the index


SETUP = "open({path!r}, 'w').write('ran')\n"


class Index(http.server.BaseHTTPRequestHandler):
    pages: dict[str, tuple[str, bytes]]
    logins: list[str]

    def do_GET(self) -> None:
        self.logins.append(self.headers.get("Authorization", ""))
        if self.path not in self.pages:
            self.send_error(404)
        else:
            kind, content = self.pages[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    handler = type("Handler", (Index,), {"pages": {}, "logins": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name in [name for name in os.environ if name.upper().startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "extra").as_uri())
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def sdist(tmp_path: Path, version: str) -> bytes:
    setup = SETUP.format(path=str(tmp_path / "ran")).encode()
    return make_tar(tmp_path / "made.tar.gz", (f"thing-{version}/setup.py", setup)).read_bytes()


def publish(index: type[Index], tmp_path: Path, *files: tuple[str, str, bool]) -> None:
    """Each with what Python it needs and whether it was yanked."""
    links = []
    for name, python, yanked in files:
        content = sdist(tmp_path, name)
        digest = hashlib.sha256(content).hexdigest()
        index.pages[f"/files/{name}"] = ("application/gzip", content)
        mark = ' data-yanked=""' if yanked else ""
        needs = f' data-requires-python="{python.replace(">", "&gt;")}"' if python else ""
        links.append(f'<a href="../../files/{name}#sha256={digest}"{needs}{mark}>{name}</a><br/>')
    page = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>"
    index.pages["/simple/thing/"] = ("text/html; charset=UTF-8", page.encode())


def test_the_newest_source_distribution_that_fits(index: type[Index], tmp_path: Path) -> None:
    publish(
        index,
        tmp_path,
        ("thing-1.9.tar.gz", "", False),
        ("thing-1.10.tar.gz", ">=3.8", False),
        ("thing-2.0rc1.tar.gz", "", False),
        ("thing-3.0.tar.gz", ">=99", False),
        ("thing-4.0.tar.gz", "", True),
        ("thing-5.0-py3-none-any.whl", "", False),
        ("other-6.0.tar.gz", "", False),
    )
    fetched = bring("pypi:Thing", tmp_path / "newest")
    assert (fetched.name, fetched.version, files_of(fetched.tree)) == ("thing", "1.10", ["setup.py"])
    assert bring("pypi:thing==2.0rc1", tmp_path / "candidate").version == "2.0rc1"
    for version in ("5.0", "3.0"):
        sentence = refused(f"pypi:thing=={version}", tmp_path / "into")
        assert sentence.startswith(f"the package index has no source distribution of thing {version} for Python 3.")
    assert asyncio.run(fetch("pypi:thing", tmp_path / "later", SMALL, "99.1")).version == "3.0"
    assert not (tmp_path / "ran").exists()
    assert set(index.logins) == {"Basic dXNlcjpzZWNyZXQ="}


def test_what_the_index_does_not_give(index: type[Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "into"
    publish(index, tmp_path, ("thing-1.0.tar.gz", "", False))
    index.pages["/files/thing-1.0.tar.gz"] = ("application/gzip", b"something else")
    assert "does not match the sha256 digest of the package index" in refused("pypi:thing", into)
    assert refused("pypi:a b", into) == "pypi:a b is neither pypi:NAME nor pypi:NAME==VERSION"
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    sentence = refused("pypi:thing", into)
    assert "(Could not fetch URL http://127.0.0.1:9/simple/thing/: " in sentence
    assert "secret" not in sentence


def test_each_way_to_write_a_source_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "link").symlink_to("project")
    monkeypatch.chdir(tmp_path)
    typed = ["project", "./project/", "../" + tmp_path.name + "/project", "link", str(tmp_path / "project")]
    assert {one_spelling(spec) for spec in typed} == {str(tmp_path.resolve() / "project")}
    assert one_spelling("pypi:Jaraco.Text==1.0") == one_spelling("pypi:jaraco_text==1.0") == "pypi:jaraco-text==1.0"
    others = ["https://host/project.git@v1", "git@host:a/project", "nowhere", "x" * 5000]
    assert [one_spelling(spec) for spec in others] == others
