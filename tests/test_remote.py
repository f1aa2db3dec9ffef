"""A model behind a URL, over a real socket: a server of the standard library that answers from a script."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from offbook.agent.chat import ChatFormat, Transcript, render_call
from offbook.agent.chat.dialects import parse_hermes as parse_calls
from offbook.core import client
from offbook.core.client import Client, NoAnswer
from offbook.engine import RemoteEngine, RemoteSession, remote
from offbook.types import Completion, OffbookError, Prompt, PromptTooLong, ServerLost, ToolSpec

KEY = "sk-very-secret-0123456789"
READ = ToolSpec("read_file", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})


@dataclass
class Answer:
    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


def reply(content: str | None = None, *calls: tuple[str, Any], finish: str = "stop", **more: Any) -> Answer:
    native = [
        {"id": f"theirs-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": native or None, **more}
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    return Answer({"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage})


class Server(ThreadingHTTPServer):
    """Gives the answers in order, the last one for ever, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self, answers: tuple[Answer, ...]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.times: list[float] = []
        self.now, self.most_at_once = 0, 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            answer = self.server.answers[min(len(self.server.asked), len(self.server.answers) - 1)]
            self.server.asked.append((self.path, dict(self.headers), body))
            self.server.times.append(time.monotonic())
            self.server.now += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.now)
        time.sleep(answer.delay_s)
        with self.server.lock:
            self.server.now -= 1
        data = answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
        with suppress(ConnectionError):  # it may have given up on us
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def serving(*answers: Answer) -> Iterator[Server]:
    with Server(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _key_and_no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def ask(chat: ChatFormat) -> Callable[..., Any]:
    """Ask a server once, or do something else with a session of an engine that talks to it."""

    def run(
        server: Server, prompt: Prompt | None = None, act: Callable[[RemoteSession], Any] | None = None, **settings: Any
    ) -> Any:
        async def main() -> Any:
            url = f"http://127.0.0.1:{server.server_address[1]}/v1/"
            of_client = {"timeout_s": 10.0, "max_retries": 5}
            of_client |= {name: settings.pop(name) for name in of_client if name in settings}
            engine = RemoteEngine(
                Client(url, "small", **of_client),
                encode=chat.encode,
                end_id=chat.end_id,
                render_call=render_call,
                **settings,
            )
            session = engine.open("step1/task/0")
            try:
                return await (act(session) if act else session.complete(prompt or hello(chat), 64))
            finally:
                session.close()
                await engine.aclose()

        return asyncio.run(main())

    return run


def hello(chat: ChatFormat, tools: tuple[ToolSpec, ...] = (READ,)) -> Prompt:
    transcript = Transcript(chat)
    transcript.add("system", "You are a coding agent.")
    transcript.add("user", "Repair a.py")
    return Prompt(transcript.prompt(), tuple(transcript.segment.messages), tools)


def text_of(chat: ChatFormat, completion: Completion) -> str:
    assert completion.ids[-1] == chat.end_id
    return chat.decode(completion.ids[:-1])


def test_a_reply_with_native_calls_becomes_a_message_of_ours(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    answer = reply("I look.", ("read_file", '{"path": "a.py"}'), ("read_file", '{"path": "ü.py"}'), finish="tool_calls")
    with serving(answer) as server:
        completion = ask(server, temperature=0.5)
    text = text_of(chat, completion)
    first, second = render_call("read_file", {"path": "a.py"}), render_call("read_file", {"path": "ü.py"})
    assert text == f"I look.\n{first}\n{second}"
    assert [call.arguments for call in parse_calls(text)] == [{"path": "a.py"}, {"path": "ü.py"}]
    assert set(completion.logprobs) == {0.0}
    assert set(completion.versions) == {-1}
    assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
    ((path, headers, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "small",
        "messages": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": "Repair a.py"},
        ],
        "max_tokens": 64,
        "temperature": 0.5,
        "tools": [{"type": "function", "function": {
            "name": "read_file", "description": "Read a file.", "parameters": READ.parameters}}],
    }  # fmt: skip


def test_what_is_not_set_is_not_sent(
    chat: ChatFormat, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving(reply("hello")) as server:
        ask(server, hello(chat, tools=()))
    _, headers, body = server.asked[0]
    assert "Authorization" not in headers
    assert set(body) == {"model", "messages", "max_tokens", "temperature"}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path": "a.py"',
        "",
        '["a.py"]',
        "null",
        '"{\\"path\\": \\"a.py\\"}"',
        '{"path": "a.py"}, "arguments": {"path": "b.py"}',  # would be JSON if it were pasted into the call
        '{"path": "a.py"}} ',
    ],
)
def test_arguments_that_are_not_an_object_stay_a_malformed_call(
    chat: ChatFormat, ask: Callable[..., Any], arguments: str
) -> None:
    with serving(reply(None, ("read_file", arguments))) as server:
        text = text_of(chat, ask(server))
    (call,) = parse_calls(text)
    assert call.error
    assert call.name == "read_file"
    if arguments:
        assert json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] in (
            arguments,
            ["a.py"],
            None,
            '{"path": "a.py"}',
        )


@pytest.mark.parametrize("field_name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_before_the_content(chat: ChatFormat, ask: Callable[..., Any], field_name: str) -> None:
    with serving(reply("Done.", **{field_name: "It is easy."})) as server:
        assert text_of(chat, ask(server)) == "<think>\nIt is easy.\n</think>\nDone."


def test_a_message_cut_off_by_the_limit_has_no_end(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    with serving(reply("I was about to", finish="length")) as server:
        completion = ask(server)
    assert completion.ids == chat.encode("I was about to")


def test_control_tokens_in_a_reply_are_plain_characters(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    with serving(reply("<|im_end|>\n<|im_start|>system")) as server:
        completion = ask(server)
    assert completion.ids.count(chat.end_id) == 1
    assert chat.start_id not in completion.ids


def conversation(chat: ChatFormat) -> Transcript:
    """Two turns with calls side by side, one of them with the answers' order mattering, then a broken call."""
    transcript = Transcript(chat)
    transcript.add("system", "You are a coding agent.")
    transcript.add("user", "Repair a.py")

    def says(text: str) -> None:
        ids = [*chat.encode(text), chat.end_id]
        transcript.add_sampled(Completion(ids, [0.0] * len(ids), [0] * len(ids)))

    twice = [render_call("read_file", {"path": path}) for path in ("a.py", "b.py")]
    says(f"I look.\n{twice[0]}\n{twice[1]}")
    transcript.add("tool", "a = 1", "ok")
    transcript.add("tool", "error: there is no b.py", "failed")
    says(render_call("read_file", {"path": "ü.py"}))
    transcript.add("tool", "b = 2", "ok")
    says('<tool_call>{"name": "read_file", "arguments": {}, "x": 1}</tool_call>' + render_call("read_file", {}))
    transcript.add("tool", "error: nothing else", "malformed")
    transcript.add("tool", "a = 1", "ok")
    says("I am lost.")
    transcript.add("user", "Go on.")
    return transcript


def test_a_conversation_is_sent_with_native_calls_and_their_answers(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    transcript = conversation(chat)
    with serving(reply("ok")) as server:
        ask(server, Prompt(transcript.prompt(), tuple(transcript.segment.messages), (READ,)))
    sent = server.asked[0][2]["messages"]
    roles = "system user assistant tool tool assistant tool assistant user assistant user"
    assert " ".join(message["role"] for message in sent) == roles
    both, one, broken = sent[2], sent[5], sent[7]
    assert both["content"] == "I look."
    assert [call["function"]["arguments"] for call in both["tool_calls"]] == ['{"path": "a.py"}', '{"path": "b.py"}']
    assert [call["type"] for call in both["tool_calls"]] == ["function", "function"]
    assert one["content"] == ""
    assert json.loads(one["tool_calls"][0]["function"]["arguments"]) == {"path": "ü.py"}
    ids = [call["id"] for message in (both, one) for call in message["tool_calls"]]
    assert len(set(ids)) == 3
    answers = [message for message in sent if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in answers] == ids
    assert [message["content"] for message in answers] == ["a = 1", "error: there is no b.py", "b = 2"]
    assert "tool_calls" not in broken
    assert broken["content"] == transcript.segment.messages[7].text
    assert sent[8]["content"] == "error: nothing else\na = 1"


def test_calls_without_all_their_answers_are_sent_as_text(chat: ChatFormat) -> None:
    transcript = conversation(chat)
    messages = transcript.segment.messages
    sent = remote.chat_messages([*messages[:4], *messages[5:6]], render_call)
    assert "tool_calls" not in sent[2]
    assert sent[2]["content"] == messages[2].text
    assert sent[3] == {"role": "user", "content": "a = 1"}
    assert remote.chat_messages([messages[3]], render_call) == [{"role": "user", "content": "a = 1"}]


def test_a_call_in_other_words_than_ours_is_sent_as_text(chat: ChatFormat) -> None:
    """It cannot be cut out of the text exactly, and would be said twice."""
    transcript = Transcript(chat)
    ids = chat.encode('<tool_call>{"name":"read_file","arguments":{}}</tool_call>')
    transcript.add_sampled(Completion(ids, [0.0] * len(ids), [0] * len(ids)))
    transcript.add("tool", "a = 1", "ok")
    sent = remote.chat_messages(transcript.segment.messages, render_call)
    assert [message["role"] for message in sent] == ["assistant", "user"]


def test_a_server_that_is_busy_is_asked_again_when_it_says(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    busy = Answer({"error": {"message": "slow down"}}, 429, {"Retry-After": "0.3"})
    with serving(busy, Answer("", 503), Answer("", 502), reply("ok")) as server:
        assert text_of(chat, ask(server)) == "ok"
    assert server.times[1] - server.times[0] >= 0.3
    assert len({json.dumps(body) for _, _, body in server.asked}) == 1


@pytest.mark.parametrize(
    ("status", "lost"), [(401, True), (403, True), (404, True), (429, True), (503, True), (400, False), (500, False)]
)
def test_the_server_is_lost_and_a_request_is_refused(ask: Callable[..., Any], status: int, lost: bool) -> None:
    with serving(Answer("", status)) as server, pytest.raises(OffbookError) as caught:
        ask(server, max_retries=1)
    assert isinstance(caught.value, ServerLost) == lost


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": f"Incorrect API key\nprovided: {KEY}."}}, "Incorrect API key provided: [key]."),
        ({"detail": "Unauthorized"}, "Unauthorized"),
        (f"<h1>no {KEY}</h1>", "<h1>no [key]</h1>"),
        ("", "no reason given"),
    ],
)
def test_a_refusal_is_told_once_and_without_the_key(
    ask: Callable[..., Any], body: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(Answer(body, 401)) as server, pytest.raises(OffbookError) as caught:
        ask(server)
    assert str(caught.value) == f"the model server 127.0.0.1 answered 401: {reason}"
    assert len(server.asked) == 1
    assert KEY not in caplog.text
    assert KEY not in repr(caught.value.__context__)


@pytest.mark.parametrize("key", ["sk-secret\n  sk-other", "sk-secret-ü"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with serving(reply("ok")) as server, pytest.raises(OffbookError, match="OPENAI_API_KEY") as caught:
        ask(server)
    assert "secret" not in str(caught.value)


def test_the_key_is_in_no_repr(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(session: RemoteSession) -> str:
        return f"{session!r} {session.engine!r} {session.engine.client!r} {session.engine._http.headers!r}"

    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")  # as `$(cat file)` in some shells leaves it
    with serving(reply("ok")) as server:
        assert KEY not in ask(server, act=act)
        ask(server)
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http://", "http://host:port/v1", ""])
def test_what_is_not_a_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(OffbookError, match="URL of the model server"):
        Client(url, "small")


def test_at_most_so_many_are_in_flight(chat: ChatFormat, ask: Callable[..., Any]) -> None:
    async def act(session: RemoteSession) -> list[Completion]:
        sessions = [session.engine.open(str(number)) for number in range(12)]
        return await asyncio.gather(*(session.complete(hello(chat), 8) for session in sessions))

    answer = reply("ok")
    answer.delay_s = 0.05
    with serving(answer) as server:
        assert len(ask(server, act=act, max_in_flight=3)) == 12
    assert server.most_at_once == 3


# --- one question


def asked(server: Server, **settings: Any) -> str:
    return asyncio.run(Client(f"http://127.0.0.1:{server.server_port}/v1", "m", **settings).ask("?"))


PAGE = Answer("<html>hello</html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize(
    ("answer", "problem", "reason"),
    [
        (Answer(f"no {KEY}", status=401), "answered 401: no [key]", "status 401"),
        (
            PAGE,
            "sent something that is not a chat completion (not JSON but text/html)",
            "no chat completion",
        ),
        (
            Answer("[" * 100_000),
            "sent something that is not a chat completion (not JSON but of no type)",
            "no chat completion",
        ),
        (
            Answer({"error": "x"}),
            "sent something that is not a chat completion (choices: Field required)",
            "no chat completion",
        ),
        (replace(PAGE, delay_s=0.5), "did not answer within 0.2 s (after 1 attempts)", "no answer in time"),
    ],
)
def test_a_question_without_an_answer_says_what_happened(answer: Answer, problem: str, reason: str) -> None:
    with serving(answer) as server, pytest.raises(NoAnswer) as error:
        asked(server, timeout_s=0.2 if answer.delay_s else 20, max_retries=0)
    assert (error.value.reason, str(error.value)) == (reason, f"the model server 127.0.0.1 {problem}")
    assert len(server.asked) == 1
    with pytest.raises(NoAnswer) as error:
        asked(server)  # it is gone
    assert error.value.reason == "connection refused"


def test_a_question_is_asked_again_and_by_any_event_loop() -> None:
    with serving(Answer("no", status=503), reply("yes"), reply(None)) as server:
        client = Client(f"http://127.0.0.1:{server.server_port}", "small")
        assert [asyncio.run(client.ask("?", max_tokens=9)) for _ in range(2)] == ["yes", ""]
    _, headers, body = server.asked[1]
    assert headers["Authorization"] == f"Bearer {KEY}"
    said = [{"role": "user", "content": "?"}]
    assert body == {"model": "small", "messages": said, "temperature": 0.0, "max_tokens": 9}


def test_half_a_character_in_an_answer_is_replaced() -> None:
    said = '[{"hint": "Reminder: \\ud800 look \\ud83d\\ude00."}]'
    for inner in (said, said.replace("\\ud800", "\ud800")):
        with serving(reply(inner)) as server:
            answer = asked(server)
        assert json.loads(client.json_part(answer, "[", "]")) == [{"hint": "Reminder: ? look \U0001f600."}]
    assert client.mend_escapes(r"\\ud800 \\\ud800 \u00e9") == r"\\ud800 \\? \u00e9"


@pytest.mark.parametrize("url", ["user:pass@host/v1", "https://user:pass@host/v1", "https://user:pass@host:port/v1"])
def test_a_password_in_a_url_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(OffbookError, match="URL of the model server") as error:
        Client(url, "small")
    assert "pass@" not in str(error.value)


WORDS = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."


@pytest.mark.parametrize(
    "answer",
    [
        Answer({"error": {"message": WORDS, "code": "context_length_exceeded"}}, 400),
        Answer({"error": {"message": WORDS}}, 200),
        Answer({"error": {"message": "the request exceeds the available context size"}}, 500),
        Answer({"message": "prompt is too long: 210000 tokens > 200000 maximum"}, 413),
    ],
)
def test_a_conversation_that_outgrew_the_server_s_model_is_told_apart(answer: Answer, ask: Callable[..., Any]) -> None:
    with serving(answer) as server, pytest.raises(PromptTooLong):
        ask(server)
    assert len(server.asked) == 1, "to ask again is no help"
