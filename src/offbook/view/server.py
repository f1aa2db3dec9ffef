"""The server behind `offbook view`: the standard library's, on this machine's loopback, and it only reads.

Run folders hold what a model and its tools wrote, so all of it is hostile text. Requests name runs, rollouts and
messages by number and never a path; the page may load nothing but its own files; and a request whose Host is another
name is refused, so that a web page elsewhere cannot reach it through a name that it points here (DNS rebinding).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from offbook.types import OffbookError
from offbook.view import about, answers
from offbook.view.index import RunIndex, said_in

SCRIPTS = (
    *("dom.js", "data.js", "charts.js", "target.js", "conversation.js", "list.js"),
    *("runs.js", "compare.js", "tasks.js", "group.js", "decisions.js", "main.js"),
)
STYLES = ("style.css", "app.css")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def asset(name: str) -> bytes:
    """A file of the page."""
    return resources.files("offbook.view").joinpath("page", name).read_bytes()


def assets() -> dict[str, bytes]:
    return {name: asset(name) for name in ("index.html", "icon.svg", *STYLES, *SCRIPTS)}


class Query:
    """The parameters of an address. A missing or wrong one is the asker's mistake."""

    def __init__(self, text: str):
        self.values = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}

    def text(self, name: str) -> str:
        if name not in self.values:
            raise OffbookError(f"the address lacks {name}")
        return self.values[name]

    def whole(self, name: str) -> int:
        text = self.text(name)
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise OffbookError(f"{name} must be a whole number")
        return int(text)


def _where(query: Query) -> tuple[str, int]:
    return query.text("source"), query.whole("number")


# What came out of the runs, in a sentence. It takes statistics that this room may not know, so it is handed in.
Outcome = Callable[[list[RunIndex]], str]
Answer = Callable[[RunIndex, Query], dict[str, Any]]
OF_A_RUN: dict[str, Answer] = {
    "example": lambda run, query: answers.example(run),
    "curves": lambda run, query: answers.curves(run),
    "rollouts": lambda run, query: answers.rollout_list(run),
    "tasks": lambda run, query: answers.tasks(run),
    "decisions": lambda run, query: {"decisions": said_in(run.files["decision"])},
    "task": lambda run, query: answers.task(run, query.text("id")),
    "rollout": lambda run, query: answers.rollout(run, *_where(query)),
    "messages": lambda run, query: answers.messages(run, *_where(query), query.whole("first"), query.whole("count")),
    "group": lambda run, query: answers.group(run, query.text("source"), query.text("group")),
}


def no_outcome(runs: list[RunIndex]) -> str:
    return ""


def answer(runs: list[RunIndex], address: str, outcome: Outcome = no_outcome) -> dict[str, Any]:
    """The data at an address such as api/runs or api/run/0/rollout?source=step_00003&number=4. One request at a time
    looks at a run, so none sees a file half read."""
    parts = urlsplit(address)
    match [unquote(part) for part in parts.path.split("/")]:
        case ["api", "runs"]:
            with ExitStack() as locks:
                for run in runs:
                    locks.enter_context(run.lock)
                    run.refresh()
                every = [about.overview(run) for run in runs]
                return {"runs": every, "sentence": about.sentence(runs), "outcome": outcome(runs)}
        case ["api", "run", number, what] if what in OF_A_RUN and number.isascii() and number.isdigit():
            if int(number) < len(runs):
                run = runs[int(number)]
                with run.lock:
                    run.refresh()
                    return OF_A_RUN[what](run, Query(parts.query))
    raise OffbookError("there is nothing at this address")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "offbook"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        if self.headers.get_all("Host") not in self.server.hosts:
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"this server answers to its own address only\n")
            return
        address = self.path.removeprefix("/")
        name = address.partition("?")[0] or "index.html"
        if name in self.server.assets:
            kind = TYPES[name.rsplit(".", 1)[1]]
            self._send(HTTPStatus.OK, kind, self.server.assets[name])
            return
        try:
            found = answer(self.server.runs, address, self.server.outcome)
            self._send(HTTPStatus.OK, "application/json", answers.to_json(found))
        except OffbookError as error:
            self._send(HTTPStatus.NOT_FOUND, "application/json", answers.to_json({"error": str(error)}))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page went elsewhere meanwhile
        except FileNotFoundError:
            self._send(HTTPStatus.NOT_FOUND, "application/json", b'{"error": "it was there a moment ago and is gone"}')

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses carry names from the run."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, runs: list[RunIndex], port: int, outcome: Outcome = no_outcome):
        super().__init__(("127.0.0.1", port), Handler)
        self.runs = runs
        self.outcome = outcome
        self.assets = assets()
        self.hosts = [[f"{name}:{self.server_port}"] for name in ("127.0.0.1", "localhost")]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An internal error is one line in the terminal, and the page says that it got no answer."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"offbook: the viewer failed to answer: {type(error).__name__}: {error}", file=sys.stderr)
