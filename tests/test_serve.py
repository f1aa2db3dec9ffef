"""The endpoint as the vendors' own clients see it, and what is recorded of what they do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from scripted import Scripted, merging_chat, sampled_runs

from offbook.agent.chat import render_call
from offbook.agent.recorder import Recorder, Refused
from offbook.agent.serve.apis import APIS, Api
from offbook.agent.serve.app import Serving, Sessions, listen, make_app
from offbook.types import Limits, Rollout

OWNER = "the-owner's-key"
LS = render_call("shell", {"command": "ls ä"})
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "runs", "parameters": SCHEMA}
THOUGHT = f"<think>\nlet me see\n</think>\n\nI look.\n{LS}"


@dataclass
class Place:
    url: str
    engine: Scripted
    sessions: Sessions
    kept: list[Rollout]
    clients: AsyncExitStack

    async def openai(self, key: str, **more: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, **more)
        return await self.clients.enter_async_context(client)

    async def anthropic(self, key: str, **more: Any) -> anthropic.AsyncAnthropic:
        return await self.clients.enter_async_context(anthropic.AsyncAnthropic(base_url=self.url, api_key=key, **more))

    async def http(self, key: str = OWNER) -> httpx2.AsyncClient:
        client = httpx2.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {key}"})
        return await self.clients.enter_async_context(client)


@asynccontextmanager
async def place(*answers: str | float | None, **limits: int) -> AsyncIterator[Place]:
    engine, kept = Scripted(merging_chat(), list(answers)), list[Rollout]()
    limits = {"message_tokens": 1000, "context": 20_000, "tokens": 100_000, **limits}

    def make(rollout: Rollout) -> Recorder:
        return Recorder(rollout, engine.chat, engine.open, Limits(**limits))  # type: ignore[arg-type]

    sessions, listener = Sessions(make, kept.append, OWNER), listen()
    async with aclosing(Serving(make_app(sessions), listener)), AsyncExitStack() as clients:
        yield Place(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, sessions, kept, clients)


def run(work: Callable[..., Awaitable[None]], *answers: str | float | None, **limits: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), place(*answers, **limits) as here:
            await work(here)
            for rollout in here.kept:
                assert all(one in here.engine.log for one in sampled_runs(rollout.segments))

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_chat_completions(streams: bool) -> None:
    async def work(here: Place) -> None:
        session, key = here.sessions.open()
        client, tools = await here.openai(key), [{"type": "function", "function": FUNCTION}]
        messages: list[Any] = [{"role": "system", "content": "be terse"}, {"role": "user", "content": "hello"}]
        first: Any
        if streams:
            pieces = []
            async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:  # type: ignore[arg-type]
                async for event in stream:
                    if event.type == "content.delta":
                        pieces.append(event.delta)
                first = await stream.get_final_completion()
            assert "".join(pieces) == "I look."
        else:
            first = await client.chat.completions.create(model="m", messages=messages, tools=tools)  # type: ignore[call-overload]
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert choice.message.reasoning_content == "let me see"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"command": "ls ä"}
        assert first.usage.completion_tokens == len(here.engine.log[0][1])
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})
        second = await client.chat.completions.create(model="m", messages=messages, tools=tools)  # type: ignore[call-overload]
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "done")
        rollout = here.sessions.end(session.rollout.id)
        (segment,) = rollout.segments
        assert [message.role for message in segment.messages] == ["system", "user", "assistant", "tool", "assistant"]

    run(work, 0.3, THOUGHT, "done")


@pytest.mark.parametrize("streams", [False, True])
def test_messages(streams: bool) -> None:
    async def work(here: Place) -> None:
        session, key = here.sessions.open()
        client = await here.anthropic(key)
        tools: Any = [{"name": "shell", "description": "runs", "input_schema": SCHEMA}]
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        asked: Any = {"model": "m", "max_tokens": 500, "system": "be terse", "tools": tools}
        if streams:
            pieces, kinds = [], []
            async with client.messages.stream(messages=messages, **asked) as stream:
                async for event in stream:
                    kinds.append(event.type)
                    if event.type == "text":
                        pieces.append(event.text)
                first = await stream.get_final_message()
            assert "".join(pieces) == "I look."
            assert kinds[0] == "message_start"
            assert kinds[-1] == "message_stop"
        else:
            first = await client.messages.create(messages=messages, **asked)
        assert first.usage.input_tokens == len(here.engine.log[0][0]) or streams
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        use = first.content[2]
        assert isinstance(use, anthropic.types.ToolUseBlock)
        assert use.input == {"command": "ls ä"}
        answer = {"type": "tool_result", "tool_use_id": use.id, "content": "no such file", "is_error": True}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [answer]}]
        second = await client.messages.create(messages=messages, **asked)
        assert second.content[0].text == "done"  # type: ignore[union-attr]
        assert second.usage.output_tokens == len(here.engine.log[1][1])
        (segment,) = here.sessions.end(session.rollout.id).segments
        assert [message.status for message in segment.messages] == [None, None, None, "failed", None]

    run(work, 0.3, THOUGHT, "done")


@pytest.mark.parametrize("streams", [False, True])
def test_responses(streams: bool) -> None:
    async def work(here: Place) -> None:
        session, key = here.sessions.open()
        client, tools = await here.openai(key), [{"type": "function", "strict": False, **FUNCTION}]
        asked: Any = {"model": "m", "instructions": "be terse", "tools": tools}
        if streams:
            pieces = []
            async with client.responses.stream(input="hello", **asked) as stream:
                async for event in stream:
                    if event.type == "response.output_text.delta":
                        pieces.append(event.delta)
                first: Any = await stream.get_final_response()
            assert "".join(pieces) == "I look."
        else:
            first = await client.responses.create(input="hello", **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.output_text == "I look."
        call = first.output[2]
        assert json.loads(call.arguments) == {"command": "ls ä"}
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
        items = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in first.output), answer]
        second = await client.responses.create(input=items, **asked)
        assert second.output_text == "done"
        (segment,) = here.sessions.end(session.rollout.id).segments
        assert [message.role for message in segment.messages] == ["system", "user", "assistant", "tool", "assistant"]

    run(work, 0.3, THOUGHT, "done")


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


CHAT = "/v1/chat/completions"


def test_what_a_session_earned_is_kept_when_it_ends() -> None:
    async def work(here: Place) -> None:
        owner = await here.http()
        opened = (await owner.post("/sessions", json={"task": "t1", "group": "g1"})).json()
        agent = await here.http(opened["key"])
        first = (await agent.post(CHAT, json=chat(temperature=0.0))).json()
        at = f"/sessions/{opened['id']}"
        assert (await agent.post(f"{at}/reward", json={"value": 1})).status_code == 401, "no agent rewards itself"
        assert (await agent.post(f"{at}/end")).status_code == 401
        for value in ("nan", 1e308):
            assert (await owner.post(f"{at}/reward", json={"value": value})).status_code == 400
        assert (await owner.post(f"{at}/reward", json={"value": 1})).json() == {"total": 1.0}
        more = {"value": -0.5, "name": "style", "weight": 0.5}
        assert (await owner.post(f"{at}/reward", json=more)).json() == {"total": 0.75}
        assert (await owner.post(f"{at}/feedback", json={"text": "too curt", "answer": first["id"]})).status_code == 200
        assert not here.kept
        assert (await owner.post(f"{at}/end")).json() == {"stop": "answer", "segments": 1, "turns": 1}
        assert (await agent.post(CHAT, json=chat())).status_code == 401
        assert (await owner.post(f"{at}/reward", json={"value": 1})).status_code == 403
        (rollout,) = here.kept
        assert (rollout.task, rollout.group, rollout.reward.total, rollout.solved) == ("t1", "g1", 0.75, True)
        events = [(event.kind, event.detail, event.message) for event in rollout.events]
        assert events == [("feedback", "too curt", 1)]

    run(work, "yes")


def test_clients_that_go_away_leave_nothing_behind() -> None:
    async def work(here: Place) -> None:
        _, key = here.sessions.open("s")
        agent = await here.http(key)
        for body in (chat(), chat(stream=True)):
            with pytest.raises(httpx2.ReadTimeout):
                await agent.post(CHAT, json=body, timeout=0.3)
            await until(lambda: here.engine.dropped > 0)
            here.engine.dropped = 0
        assert (await agent.post(CHAT, json=chat())).json()["choices"][0]["message"]["content"] == "at last"
        rollout = here.sessions.end("s")
        assert [len(segment.messages) for segment in rollout.segments] == [2]

    run(work, None, None, "at last")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_a_client_s_own_retries_are_one_message() -> None:
    """The first attempt is answered after its client has given up; the client asks again by itself."""

    async def work(here: Place) -> None:
        _, key = here.sessions.open("s")
        client = await here.openai(key, timeout=0.4, max_retries=2)
        first = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        assert first.choices[0].message.content == "here you are"
        rollout = here.sessions.end("s")
        assert (len(rollout.segments), rollout.usage.turns) == (1, 1)
        assert here.engine.dropped == 1

    run(work, 5.0, "never seen", "here you are")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "cannot be read"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "messages"),
        (b'{"messages": 3}', 400, "messages must be a list"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', 400, "role must be one of system"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            400,
            "the type of content must be text",
        ),
        (json.dumps(chat(n=2)).encode(), 400, "n is not offered"),
        (json.dumps(chat(stop=["x"])).encode(), 400, "stop is not offered"),
        (json.dumps(chat(max_tokens=-1)).encode(), 400, "greater than 0"),
        (json.dumps(chat("x" * 30_000)).encode(), 400, "maximum context length"),
        (json.dumps(chat("x" * 10_000_000)).encode(), 413, "bytes"),
        (b"[" * 100_000, 400, "cannot be read"),
    ],
    ids=["half", "list", "empty", "number", "role", "image", "n", "stop", "negative", "long", "10 MB", "deep"],
)
def test_requests_that_are_none(body: bytes, status: int, said: str) -> None:
    async def work(here: Place) -> None:
        _, key = here.sessions.open("s")
        agent = await here.http(key)
        answer = await agent.post(CHAT, content=body)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]
        assert (await agent.post(CHAT, json=chat())).status_code == 200, "and the session goes on"
        assert here.sessions.end("s").usage.turns == 1

    run(work, "yes")


TOOL = {"name": "look", "description": "x", "parameters": {"type": "object", "properties": {}}}
RIGHT = (
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "max_tokens": 5,
    },
    {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]},
        ],
        "tools": [{"name": "look", "description": "x", "input_schema": {"type": "object", "properties": {}}}],
        "max_tokens": 5,
    },
    {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
        ],
        "tools": [{"type": "function", **TOOL}],
        "max_output_tokens": 5,
    },
)
WRONG = (None, 5, -1, 0.5, True, "x", "", [], {}, [5], [[]], [None], {"type": 5}, "[" * 100_000)


def spoiled(right: Any) -> Iterator[Any]:
    """With one thing in it missing, or another."""
    yield from WRONG
    members = right.items() if isinstance(right, dict) else enumerate(right) if isinstance(right, list) else ()
    for name, inner in members:
        without = {k: v for k, v in right.items() if k != name} if isinstance(right, dict) else right
        yield without
        for other in spoiled(inner):
            changed = right.copy()
            changed[name] = other
            yield changed


@pytest.mark.parametrize(("api", "right"), list(zip(APIS, RIGHT, strict=True)), ids=["chat", "messages", "responses"])
def test_what_is_wrong_with_a_request_is_said_in_plain_words(api: Api, right: dict[str, Any]) -> None:
    assert len(api.read(right).messages) >= 3
    said = set()
    for body in spoiled(right):
        if isinstance(body, dict):
            try:
                api.read(body)
            except Refused as refused:
                said.add(str(refused))
    assert len(said) > 15
    for sentence in said:
        assert "\n" not in sentence
        assert not re.search(r"NoneType|'str'|\bdict\b|\bint\b|subscript|attribute|Expecting|iterable", sentence), (
            sentence
        )


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/sessions", {"id": 5}, "id must be a text"),
        ("/sessions/s/reward", {}, "value must be a number from -1e+06 to 1e+06"),
        ("/sessions/s/reward", {"value": 1e9}, "value must be a number from -1e+06 to 1e+06"),
        ("/sessions/s/reward", {"value": 1, "weight": []}, "weight must be a number from -1e+06 to 1e+06"),
        ("/sessions/s/feedback", {"text": 5}, "text must be a text"),
    ],
)
def test_the_owner_is_told_so_too(path: str, body: dict[str, Any], said: str) -> None:
    async def work(here: Place) -> None:
        here.sessions.open("s")
        owner = await here.http(OWNER)
        answer = await owner.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)

    run(work)


def test_half_a_character_is_refused_before_it_spoils_a_record() -> None:
    async def work(here: Place) -> None:
        _, key = here.sessions.open("s")
        agent, owner = await here.http(key), await here.http()
        odd = b'{"messages": [{"role": "user", "content": "x"}], "seed": "\\uD83D"}'
        assert (await agent.post(CHAT, content=odd)).status_code == 400
        assert (await owner.post("/sessions/s/feedback", content=b'{"text": "\\ud83d"}')).status_code == 400
        assert (await owner.post("/sessions/s/feedback", content=b'{"text": "\\ud83d\\ude00"}')).status_code == 200

    run(work)


def test_a_session_that_cannot_be_kept_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(here: Place) -> None:
        for name in ("one", "other"):
            _, key = here.sessions.open(name)
            await (await here.http(key)).post(CHAT, json=chat())

        def full(rollout: Rollout) -> None:
            if rollout.id == "one":
                raise OSError("no space left")
            here.kept.append(rollout)

        monkeypatch.setattr(here.sessions, "_keep", full)
        assert [rollout.id for rollout in here.sessions.end_idle(-1.0)] == ["other"]
        monkeypatch.setattr(here.sessions, "_keep", here.kept.append)
        assert [rollout.id for rollout in here.sessions.end_idle(0.0)] == ["one"], "it is tried again"

    run(work, "yes", "yes")


def test_keys_open_their_own_session_and_no_other() -> None:
    async def work(here: Place) -> None:
        _, key = here.sessions.open("one")
        here.sessions.open("other")
        agent = await here.http(key)
        for header in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            answer = await agent.post(CHAT, json=chat(), headers=header)
            assert answer.status_code == 401
        assert (await agent.post("/sessions", json={})).status_code == 401
        with pytest.raises(anthropic.AuthenticationError, match="no open session"):
            await (await here.anthropic("wrong")).messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}]
            )
        assert not here.engine.log

    run(work, "yes")


def test_a_session_nobody_uses_any_more_is_kept_as_it_is() -> None:
    async def work(here: Place) -> None:
        _, key = here.sessions.open("s")
        await (await here.http(key)).post(CHAT, json=chat())
        assert here.sessions.end_idle(60.0) == []
        (rollout,) = here.sessions.end_idle(0.0)
        assert (rollout.stop, rollout.usage.turns) == ("wall", 1)
        assert here.kept == [rollout]

    run(work, "yes")


@pytest.mark.parametrize("first", [b"", b"POST /v1/chat", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /v1"])
def test_half_a_head_is_closed(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """Also one whose bytes come one at a time, and a second request on a connection that is kept."""
    monkeypatch.setattr("offbook.agent.serve.app.HEADERS_S", 0.5)

    async def work(here: Place) -> None:
        host, port = here.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)

        async def drip() -> None:
            while first:
                await asyncio.sleep(0.1)
                writer.write(b"x")

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(20):
            await reader.read()  # ends when the server closes
        dripping.cancel()
        writer.close()
        _, key = here.sessions.open("s")
        assert (await (await here.http(key)).post(CHAT, json=chat())).status_code == 200

    run(work, "yes")
