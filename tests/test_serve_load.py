"""Two hundred agents at once on a real model: no token is lost, and none is another session's."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from scripted import sampled_runs

from offbook.agent.chat import chat_for
from offbook.agent.recorder import Recorder
from offbook.agent.serve.app import Serving, Sessions, listen, make_app
from offbook.engine import LocalEngine
from offbook.engine.local import LocalSession
from offbook.rl.models import load_model
from offbook.types import Completion, Limits, Prompt, Rollout

AGENTS, TURNS = 200, 3
LONGEST_S = 200.0


@dataclass
class Logged:
    """What the engine was given and gave, by itself."""

    line: LocalSession
    log: list[tuple[str, list[int], Completion]]

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        completion = await self.line.complete(prompt, max_tokens)
        self.log.append((self.line.key, prompt.ids, completion))
        return completion

    def close(self) -> None:
        self.line.close()


async def work(http: httpx2.AsyncClient, key: str, number: int) -> list[str]:
    """An agent that says who it is in every message, streams half of its answers, and goes away now and then."""
    rng, messages, said = random.Random(number), list[dict[str, Any]](), list[str]()
    headers = {"Authorization": f"Bearer {key}"}
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"agent {number} turn {turn}: read pkg/core.py"})
        body = {"messages": messages, "max_tokens": 24}
        if rng.random() < 0.1:
            brief = httpx2.Timeout(None, read=0.02)
            with pytest.raises(httpx2.ReadTimeout):
                await http.post("/v1/chat/completions", json=body, headers=headers, timeout=brief)
        if rng.random() < 0.5:
            text = ""
            async with http.stream("POST", "/v1/messages", json={**body, "stream": True}, headers=headers) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and '"text_delta"' in line:
                        text += json.loads(line[6:])["delta"]["text"]
        else:
            answer = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    return said


@pytest.mark.slow
def test_two_hundred_sessions(model: Path) -> None:
    torch.set_num_threads(1)
    chat, log, kept = chat_for(model), list[tuple[str, list[int], Completion]](), dict[str, Rollout]()

    async def main() -> list[list[str]]:
        engine = LocalEngine(load_model(model), chat.stop_ids, mode="continuous")

        def make(rollout: Rollout) -> Recorder:
            return Recorder(rollout, chat, lambda key: Logged(engine.open(key), log), Limits(message_tokens=24))

        sessions = Sessions(make, lambda rollout: kept.update({rollout.id: rollout}))
        listener = listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        limits = httpx2.Limits(max_connections=AGENTS)
        async with (
            aclosing(Serving(make_app(sessions), listener)),
            httpx2.AsyncClient(base_url=url, timeout=LONGEST_S, limits=limits) as http,
        ):
            keys = [sessions.open(f"s{number}")[1] for number in range(AGENTS)]
            said = await asyncio.gather(*(work(http, key, number) for number, key in enumerate(keys)))
            for number in range(AGENTS):
                sessions.end(f"s{number}")
        assert engine.open_sessions == 0
        return said

    said = asyncio.run(main())
    by_key: dict[str, list[tuple[list[int], list[int]]]] = {}
    for key, ids, completion in log:
        by_key.setdefault(key.partition("/")[0], []).append((ids, completion.ids))
    logprobs = {(key.partition("/")[0], str(ids)): completion for key, ids, completion in log}
    for number in range(AGENTS):
        rollout = kept[f"s{number}"]
        runs = sampled_runs(rollout.segments)
        assert len(runs) == TURNS
        assert all(run in by_key[rollout.id] for run in runs), "every token is this session's, as the engine gave it"
        assert rollout.usage.drift == 0
        for segment in rollout.segments:
            for message in segment.messages:
                assert message.role != "user" or message.text.startswith(f"agent {number} turn")
                if segment.is_own(message):
                    completion = logprobs[rollout.id, str(segment.ids[: message.body])]
                    span = slice(message.body, message.body + len(completion.ids))
                    assert segment.logprobs[span] == completion.logprobs
                    assert segment.versions[span] == completion.versions
        # One that went away and came back before the server had seen it go is in a second segment, with all of it.
        whole = max(rollout.segments, key=lambda segment: len(segment.messages))
        assert [message.text.strip() for message in whole.messages if message.role == "assistant"] == said[number]
    assert sum(len(rollout.segments) == 1 for rollout in kept.values()) > AGENTS / 2
