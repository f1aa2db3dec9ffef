"""A client of sessions: opens one for an agent, says what it earned, ends it."""

from __future__ import annotations

import os
from typing import Any, Self

import httpx2

from offbook.types import Json, OffbookError

URL, KEY = "OFFBOOK_SERVE_URL", "OFFBOOK_SERVE_KEY"
TIMEOUT_S = 60.0


def agent_environment(url: str, key: str) -> dict[str, str]:
    """Environment variables that point OpenAI's client, LiteLLM and Anthropic's client to the endpoint."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
    }


class Serve:
    """A server of `offbook serve`; by default the one that the environment names."""

    def __init__(self, url: str = "", key: str = ""):
        self.url = (url or os.environ.get(URL, "")).rstrip("/")
        key = key or os.environ.get(KEY, "")
        if not self.url or not key:
            raise OffbookError(f"give the server's URL and its owner's key, or set {URL} and {KEY}")
        self._http = httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S)

    def session(self, task: str = "", group: str = "", id: str = "") -> AgentSession:
        """`group` names rollouts that are compared with one another; by default those of a task."""
        opened = self.post("/sessions", {"task": task, "group": group, "id": id})
        return AgentSession(self, opened["id"], opened["key"])

    def post(self, path: str, body: Json) -> Json:
        try:
            response = self._http.post(self.url + path, json=body)
        except httpx2.RequestError as error:
            raise OffbookError(f"the server {self.url} cannot be reached: {error}") from None
        if not response.is_success:
            raise OffbookError(f"the server {self.url} answered {response.status_code}: {response.text}")
        return response.json()


class AgentSession:
    """`env` is for the agent. As a context manager it ends where the block does."""

    def __init__(self, serve: Serve, id: str, key: str):
        self._serve, self.id, self.key = serve, id, key
        self.env = agent_environment(serve.url, key)

    def reward(self, value: float, name: str = "outcome", weight: float = 1.0) -> None:
        self._post("reward", value=value, name=name, weight=weight)

    def feedback(self, text: str, answer: str = "") -> None:
        """About the answer with this id; without one about the last."""
        self._post("feedback", text=text, answer=answer)

    def end(self) -> Json:
        return self._post("end")

    def _post(self, what: str, **body: Any) -> Json:
        return self._serve.post(f"/sessions/{self.id}/{what}", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
