"""`offbook serve` as a process: a real model, the client, and what is left after it was killed."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from starting import Started

from offbook.agent.chat import chat_for
from offbook.agent.serve.client import Serve
from offbook.core.runfolder import RunFolder, load_lines
from offbook.engine.sync import Publisher, open_store
from offbook.rl.models import load_model
from offbook.train.trainer import weights_of
from offbook.types import OffbookError, Rollout


@contextmanager
def served(model: Path, out: Path, *more: str) -> Iterator[tuple[Serve, Started]]:
    options = ["--model", str(model), "--out", str(out), "--port", "0", "--json", *more]
    process = Started(["serve", *options], None, None)
    try:
        while not (said := process.said()).endswith("\n"):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        told = json.loads(said)
        yield Serve(told["url"], told["key"]), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_sessions_that_ended_outlive_kill_9(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with served(model, out) as (serve, process):
        for number in range(3):
            session = serve.session(task="greet", id=f"s{number}")
            with openai.OpenAI(base_url=session.env["OPENAI_BASE_URL"], api_key=session.key) as client:
                messages: list[Any] = [{"role": "user", "content": f"hello {number}"}]
                answer = client.chat.completions.create(model="m", messages=messages)
            session.reward(number)
            session.feedback("be kind", answer.id)
            if number < 2:
                session.end()
        with pytest.raises(OffbookError, match="already"):
            serve.session(id="s0")
        with open(out / "rollouts" / "step_00000.jsonl", "ab") as file:
            file.write(b'{"id": "half')  # what a crash may leave
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with served(model, out) as (serve, process):
        with pytest.raises(OffbookError, match="already"):
            serve.session(id="s1")  # of the process before
        with (
            serve.session(task="greet", id="later") as session,
            openai.OpenAI(base_url=session.env["OPENAI_BASE_URL"], api_key=session.key) as client,
            client.chat.completions.stream(
                model="m", messages=[{"role": "user", "content": "read pkg/core.py"}]
            ) as stream,
        ):
            streamed = stream.get_final_completion()
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 0
    kept, unreadable = load_lines(out / "rollouts" / "step_00000.jsonl", Rollout)
    assert [(rollout.id, rollout.reward.total) for rollout in kept] == [("s0", 0), ("s1", 1), ("later", 0)]
    assert unreadable == 1
    chat = chat_for(model)
    for rollout in kept:
        (segment,) = rollout.segments
        assert all(version == 0 for version, own in zip(segment.versions, segment.sampled, strict=True) if own)
        assert all(value < 0 for value, own in zip(segment.logprobs, segment.sampled, strict=True) if own)
        assert (
            chat.decode(segment.ids[: segment.messages[0].end])
            == f"<|im_start|>user\n{segment.messages[0].text}<|im_end|>\n"
        )
    own = kept[-1].segments[0].messages[-1]
    assert (streamed.choices[0].message.content or "").strip() in own.text
    assert RunFolder.open(out).rollouts(0)[0] == kept


def test_weights_that_a_run_publishes_are_served(model: Path, tmp_path: Path) -> None:
    """They come while the server runs, and each token says which it was sampled by."""
    store, out = tmp_path / "weights", tmp_path / "run"
    trained = load_model(model)
    publisher = Publisher(open_store(str(store)))
    with served(model, out, "--follow", str(store)) as (serve, _), closing(publisher):
        deadline, last = time.monotonic() + 60, 0
        for number in itertools.count():
            with (
                serve.session(id=f"s{number}") as session,
                openai.OpenAI(base_url=session.env["OPENAI_BASE_URL"], api_key=session.key) as client,
            ):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}], max_tokens=8)
            kept, _unreadable = load_lines(out / "rollouts" / "step_00000.jsonl", Rollout)
            (segment,) = kept[-1].segments
            last = max(segment.versions)
            if last == 7:
                break
            if number == 0:
                assert last == 0
                with torch.no_grad():
                    for weight in trained.parameters():
                        weight.mul_(1.01)
                publisher.publish(weights_of(trained, 7))
            assert time.monotonic() < deadline
        (own,) = [message for message in segment.messages if message.role == "assistant"]
        with torch.no_grad():
            logits = trained(torch.tensor([segment.ids])).logits[0].log_softmax(-1)
        for place in (place for place in range(own.start, own.end) if segment.sampled[place]):
            assert abs(float(logits[place - 1, segment.ids[place]]) - segment.logprobs[place]) < 1e-3
