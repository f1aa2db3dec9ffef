"""One question to a model behind a URL that speaks OpenAI's chat completions, and its answer as text.

For what reads and writes beside the rollouts: coaches, monitors, instructions. Rollouts have engine/remote.py.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import re
import socket
import ssl
from importlib.resources.abc import Traversable

import httpx2

from offbook.types import OffbookError

TRIES = 3
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# A pair of escapes that make one character, or half of such a pair. A backslash that is escaped itself begins neither.
ESCAPES = re.compile(r"(\\\\|\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w)|\\u[dD][89a-fA-F]\w\w")


class NoAnswer(OffbookError):
    """`reason` is what happened in a few words, for counts: it names no server."""

    def __init__(self, url: str, reason: str):
        super().__init__(f"{url} does not answer ({reason})")
        self.reason = reason


class Asked:
    """`key_env` names the variable with the server's key, if it wants one. The key goes nowhere but to that server."""

    def __init__(self, url: str, model: str, timeout_s: float = 120.0, key_env: str = "OPENAI_API_KEY"):
        if not url.startswith(("http://", "https://")):
            raise OffbookError(f"a model's URL looks like https://host/v1, not {url.partition('@')[2] or url}")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise OffbookError(f"the URL has a password in it; give the key in the variable {key_env} instead")
        self.url, self.model, self._timeout_s = f"{url.rstrip('/')}/chat/completions", model, timeout_s
        self._key = os.environ.get(key_env, "").strip()

    async def ask(self, question: str, max_tokens: int = 2048) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": max_tokens,
        }
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        problem = ""
        async with httpx2.AsyncClient(timeout=self._timeout_s, verify=_certificates()) as client:
            for attempt in range(TRIES):
                if attempt:
                    await asyncio.sleep(2.0**attempt / 2)
                try:
                    response = await client.post(self.url, json=body, headers=headers)
                except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                    problem = _reason(error)
                    continue
                if response.status_code == 200:
                    return _content(response, self.url)
                problem = f"status {response.status_code}"
                if response.status_code not in RETRIED:
                    break
        raise NoAnswer(self.url, problem)


def is_sampled(rollout_id: str, rate: float) -> bool:
    """The same rollouts every time, as many as the rate says."""
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < rate * 2**64


def prompts_in(folder: Traversable, frame: str) -> dict[str, str]:
    """The prompts of a folder by name, but for the one that is put around each of them."""
    files = [path for path in folder.iterdir() if path.name.endswith(".md") and path.name != f"{frame}.md"]
    return {path.name.removesuffix(".md"): path.read_text() for path in sorted(files, key=lambda path: path.name)}


def mend_escapes(text: str) -> str:
    """JSON may have half a character as an escape. json.loads takes it and no file does, so it becomes `?`."""
    return ESCAPES.sub(lambda found: found.group(1) or "?", text)


def json_part(answer: str, opening: str = "{", closing: str = "}") -> str:
    """What of an answer is JSON: no thinking, no fence, no words around it."""
    said = mend_escapes(answer.rpartition("</think>")[2])
    starts = [start for start in map(said.find, opening) if start >= 0]
    return said[min(starts, default=0) : max(map(said.rfind, closing)) + 1]


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes as long as a short answer, so it is done once."""
    return ssl.create_default_context()


def _reason(error: Exception) -> str:
    """What the system says of a connection, which lies below what the library makes of it; else the kind of failure."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, ssl.SSLError | socket.gaierror):  # their numbers are not the system's
            return str(below.strerror)
        if isinstance(below, OSError) and below.errno:
            return os.strerror(below.errno).lower()
        below = below.__cause__ or below.__context__
    return "no answer in time" if isinstance(error, httpx2.TimeoutException) else type(error).__name__


def _content(response: httpx2.Response, url: str) -> str:
    try:
        value = json.loads(mend_escapes(response.text))
    except (ValueError, RecursionError):
        raise NoAnswer(
            url, f"no chat completion, not JSON but {response.headers.get('content-type', 'of no type')}"
        ) from None
    try:
        return str(value["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise NoAnswer(url, "no chat completion, but other JSON") from error
