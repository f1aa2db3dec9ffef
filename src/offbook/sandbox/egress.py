"""Network access from a sandbox for preparing repositories (installing what one needs), never for rollouts.

The sandbox keeps its own empty network. A forwarder inside it carries connections over a unix socket to a proxy
outside, which connects to what an allow-list names (CONNECT only: https addresses). TLS is not opened, so on an
allowed host's address a client can ask for another host that is served there too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import shlex
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from offbook.sandbox.bwrap.bwrap_sandbox import BwrapSandbox
from offbook.sandbox.sandbox import ExecResult, SandboxSpec
from offbook.types import Event, OffbookError

HEADER_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024
CONNECT_S = 10.0
EVENTS = 1000  # refusals that are recorded
WEB_PORTS = (80, 443)  # what an entry without a port allows
PROXY_PORT = 3128  # inside the sandbox
DOOR = "/door"  # where a sandbox finds the proxy
SOCKET = "proxy"

# These carry an IPv4 address inside of an IPv6 one, and so could carry a private address past the check.
TUNNELS = tuple(ipaddress.IPv6Network(network) for network in ("64:ff9b::/96", "2001::/32", "2002::/16"))
AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|((?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63})\.?)(?::([0-9]{1,5}))?")
Address = tuple[str, int]

FORWARDER = """
import contextlib, os, socket, subprocess, sys, threading

def pump(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

def forward(client):
    with client, socket.socket(socket.AF_UNIX) as proxy, contextlib.suppress(OSError):
        proxy.connect(sys.argv[1])
        upwards = threading.Thread(target=pump, args=(client, proxy), daemon=True)
        upwards.start()
        pump(proxy, client)
        upwards.join()

def listen(listener):
    while True:
        client, _ = listener.accept()
        threading.Thread(target=forward, args=(client,), daemon=True).start()

listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
threading.Thread(target=listen, args=(listener,), daemon=True).start()
code = subprocess.call(["/bin/sh", "-c", sys.argv[3]], close_fds=False)
os._exit(code if code >= 0 else 128 - code)
"""
PROXIED = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{PROXY_PORT}"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost"),
}


def forwarded(
    command: str, socket_in_sandbox: str, port: int = PROXY_PORT, variables: Mapping[str, str] = PROXIED
) -> str:
    """A shell command that runs `command` in the sandbox with these variables set, and ends with its exit code.
    Connections to the port of the sandbox's loopback are forwarded to the socket meanwhile.

    The forwarder is the parent of the command: it listens before the command starts and ends when the command does.
    """
    settings = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join(["env", *settings, "python3", "-I", "-c", FORWARDER, socket_in_sandbox, str(port), command])


class OutwardSandbox(BwrapSandbox):
    """A sandbox whose commands reach the proxy that serves in the folder `door`, with `variables` set."""

    def __init__(self, tree: Path, spec: SandboxSpec, door: Path, variables: Mapping[str, str], **more: Any):
        super().__init__(tree, spec, mounts={DOOR: door, **more.pop("mounts", {})}, **more)
        self._variables = {**variables, **PROXIED}

    async def exec(self, command: str, timeout_s: float, report: bool = False) -> ExecResult:
        through = forwarded(command, f"{DOOR}/{SOCKET}", variables=self._variables)
        return await super().exec(through, timeout_s, report)


class _Refused(Exception):
    """Sent to the client as status and reason, and recorded with the target if there is one."""

    def __init__(self, status: int, reason: str, target: str = ""):
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.target = target


class EgressProxy:
    """Serves on `socket_path` inside an `async with` block. `events` are the refused requests.

    Entries of `allow` are hosts or `*.suffix`, with a port or for ports 80 and 443. Private addresses are refused, even
    if an allowed name resolves to one, unless `allow` has the address itself: an index inside a company needs both.
    """

    def __init__(self, socket_path: Path, allow: tuple[str, ...], max_connections: int = 32, idle_s: float = 60.0):
        self._path = socket_path
        self._allow = [entry(text) for text in allow]
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._connections: set[asyncio.Task[Any]] = set()
        self.events: list[Event] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=HEADER_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        # A client that breaks off or falls silent cannot be answered; a cancelled one ends with the proxy.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            try:
                await self._pass_on(reader, writer)
            except _Refused as refused:
                if refused.target and len(self.events) < EVENTS:
                    self.events.append(Event(message=-1, kind="egress_refused", detail=refused.target))
                text = f"HTTP/1.1 {refused.status} {refused.reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                writer.write(text.encode("ascii", errors="replace"))
                await asyncio.wait_for(writer.drain(), self._idle_s)
        writer.close()
        self._connections.discard(connection)

    async def _pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        if len(self._connections) > self._max_connections:
            raise _Refused(503, f"more than {self._max_connections} connections", "too many connections")
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._idle_s)
        except asyncio.LimitOverrunError:
            raise _Refused(431, f"a header of more than {HEADER_BYTES} bytes", "header too large") from None
        server_reader, server_writer = await self._connected(_parsed(head.decode("latin-1")))
        try:
            async with asyncio.timeout(self._idle_s) as deadline, asyncio.TaskGroup() as group:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                group.create_task(self._pump(reader, server_writer, deadline))
                group.create_task(self._pump(server_reader, writer, deadline))
        except* (OSError, TimeoutError):
            pass
        finally:
            server_writer.close()

    async def _pump(self, source: StreamReader, target: StreamWriter, deadline: asyncio.Timeout) -> None:
        """Until the source ends. Bytes in either direction extend the deadline."""
        while chunk := await source.read(CHUNK_BYTES):
            deadline.reschedule(asyncio.get_running_loop().time() + self._idle_s)
            target.write(chunk)
            await target.drain()
        target.write_eof()

    async def _connected(self, address: Address) -> tuple[StreamReader, StreamWriter]:
        """Connect to the address that was checked: a second look-up could answer differently."""
        host, port = address
        target = _joined(address)
        if not self._allows(host, port):
            raise _Refused(403, f"{target} is not on the allow-list", target)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            raise _Refused(502, f"{host} has no address") from None
        addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
        if not all(_is_public(each) or self._allows(each, port) for each in addresses):
            raise _Refused(403, f"{target} has a private address", target)
        for each in addresses:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(each, port)
        raise _Refused(502, f"{target} does not answer")

    def _allows(self, host: str, port: int) -> bool:
        for name, allowed_port in self._allow:
            is_host = host.endswith(name[1:]) and not _is_address(host) if name.startswith("*.") else host == name
            if is_host and port in (WEB_PORTS if allowed_port is None else (allowed_port,)):
                return True
        return False


def _parsed(head: str) -> Address:
    """Where a request goes. Only CONNECT is passed on, so nothing in a request can be read in two ways."""
    first = head.partition("\r\n")[0]
    shown = ascii(first[:100])[1:-1]
    request = re.fullmatch(r"CONNECT (\S+) HTTP/1\.[01]", first)
    found = AUTHORITY.fullmatch(request[1]) if request else None
    port = int(found[3] or 0) if found else 0
    if not found or not 0 < port <= 65535:
        raise _Refused(400, "only CONNECT host:port is passed on, as clients ask for https addresses", shown)
    return _canonical(found[1] or found[2]), port


def entry(text: str) -> tuple[str, int | None]:
    """An entry of an allow-list as name and port."""
    found = AUTHORITY.fullmatch(text.removeprefix("*."))
    if not found:
        raise OffbookError(f"{text!r} in the allow-list is not a host, *.suffix or host:port")
    wildcard = "*." if text.startswith("*.") else ""
    return wildcard + _canonical(found[1] or found[2]), int(found[3]) if found[3] else None


def _canonical(host: str) -> str:
    """An address can be written in many ways."""
    return str(ipaddress.ip_address(host)) if _is_address(host) else host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            address = address.ipv4_mapped
        elif address.is_site_local or any(address in network for network in TUNNELS):
            return False
    return address.is_global and not address.is_multicast


def _joined(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
