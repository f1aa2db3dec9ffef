"""The endpoint under load, and whether it kept every token:
`python bench/gpu/serve.py --model smollm2-135m --engine local vllm --sessions 16 64 --json serve.json`.

Each session is an agent that asks for some messages, each behind all those before it, and streams them. `first` is the
time until the first words, `exact` whether every sampled token of every rollout is in the engine's own log behind the
same prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from offbook.agent.recorder import Recorder
from offbook.agent.serve.app import Serving, Sessions, listen, make_app
from offbook.core.config import load_config
from offbook.rl.collector import Collector
from offbook.rl.models import model_folder
from offbook.types import Completion, Prompt, Rollout

LONGEST_S = 500.0


@dataclass
class Logged:
    line: Any
    log: set[tuple[tuple[int, ...], tuple[int, ...]]]

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        completion: Completion = await self.line.complete(prompt, max_tokens)
        self.log.add((tuple(prompt.ids), tuple(completion.ids)))
        return completion

    def close(self) -> None:
        self.line.close()


async def agent(http: httpx2.AsyncClient, key: str, number: int, turns: int, tokens: int) -> list[float]:
    """How long it waited for the first words of each message."""
    messages, waited = list[dict[str, str]](), list[float]()
    for turn in range(turns):
        messages.append(
            {"role": "user", "content": f"Agent {number}, question {turn}: how do I sort a list in Python?"}
        )
        body = {"messages": messages, "max_tokens": tokens, "stream": True}
        asked, text = time.monotonic(), ""
        headers = {"Authorization": f"Bearer {key}"}
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                new = choices[0]["delta"].get("content") if choices else None
                if new and not text:
                    waited.append(time.monotonic() - asked)
                text += new or ""
        messages.append({"role": "assistant", "content": text})
    return waited


def is_exact(rollouts: list[Rollout], log: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    for segment in (segment for rollout in rollouts for segment in rollout.segments):
        for message in segment.messages:
            count = sum(segment.sampled[message.body : message.end])
            if (
                count
                and (
                    tuple(segment.ids[: message.body]),
                    tuple(segment.ids[message.body : message.body + count]),
                )
                not in log
            ):
                return False
    return True


async def measure(collector: Collector, count: int, turns: int, tokens: int) -> dict[str, Any]:
    log: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    kept: list[Rollout] = []

    def make(rollout: Rollout) -> Recorder:
        return Recorder(rollout, collector.chat, lambda key: Logged(collector.engine.open(key), log), collector.limits)

    sessions, listener = Sessions(make, kept.append), listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx2.Limits(max_connections=count)
    async with (
        aclosing(Serving(make_app(sessions), listener)),
        httpx2.AsyncClient(base_url=url, timeout=LONGEST_S, limits=limits) as http,
    ):
        opened = [sessions.open(f"s{number}") for number in range(count)]
        began = time.monotonic()
        jobs = (agent(http, key, number, turns, tokens) for number, (_, key) in enumerate(opened))
        waited = [seconds for one in await asyncio.gather(*jobs) for seconds in one]
        took = time.monotonic() - began
        for session, _ in opened:
            sessions.end(session.rollout.id)
    sampled = sum(rollout.usage.sampled_tokens for rollout in kept)
    return {
        "sessions": count,
        "messages": sum(rollout.usage.turns for rollout in kept),
        "tokens": sampled,
        "tokens_per_s": sampled / took,
        "first_ms": 1000 * statistics.median(waited) if waited else None,
        "exact": is_exact(kept, log),
        "drift": sum(rollout.usage.drift for rollout in kept),
    }


async def rows_of(engine: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = {"engine.kind": engine, "model": given.model, "threads": "1"}
    more = {"harness.turns": "1000", "harness.tokens": "1000000", "harness.message_tokens": str(given.message_tokens)}
    config = load_config([], {**chosen, **more})
    rows = []
    async with aclosing(Collector(config, model_folder(given.model, 0))) as collector:
        for count in given.sessions:
            try:
                row = await measure(collector, count, given.turns, given.message_tokens)
            except Exception as error:  # one row is one row
                row = {"sessions": count, "error": f"{type(error).__name__}: {error}"}
            rows.append({"engine": engine, **row})
            print(" | ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in rows[-1].items()), flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine", nargs="+", default=["continuous"], choices=["continuous", "vllm"])
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--message-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for engine in given.engine:
        try:
            rows += asyncio.run(rows_of(engine, given))
        except Exception as error:
            rows.append({"engine": engine, "error": f"{type(error).__name__}: {error}"})
            print(rows[-1], flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
