"""vLLM's server and the way to it: what goes wrong, in one sentence each; and, with vLLM there, the whole of it.

Without vLLM, interpreters that say what vLLM says and a server that plays its answers stand for it. The tests marked
`vllm` run the real one: `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engines_contract import POSITIONS, STOPS, error, model, prompts
from test_held import given as small
from transformers import PreTrainedModel

from offbook.core.config import EngineConfig, MtpConfig, VllmConfig, load_config
from offbook.core.draft import DraftHead, save_head
from offbook.core.weights import Weights
from offbook.engine import VllmEngine
from offbook.engine.vllm import Server, find_vllm
from offbook.engine.vllm.weights import Sender, _buckets, _distinct
from offbook.engine.vllm.wire import Broken, Wire
from offbook.rl.collector import Collector, Job, with_drafts
from offbook.rl.tasks import task_sets
from offbook.rl.train import train
from offbook.train.batches import Batch
from offbook.train.draft import DraftTrainer
from offbook.train.forward import Decoder
from offbook.types import Completion, ModelLost, OffbookError, Prompt, Sample, ServerLost

__all__ = ["small"]  # a fixture


def interpreter(folder: Path, version: str = "0.32.0", said: str = "", seconds: float = 0) -> str:
    """One that has vLLM by its metadata and, asked to serve, says something, waits and ends."""
    about = folder / "site" / f"vllm-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "said").write_text(said)
    python = folder / "python"
    own = shlex.quote(sys.executable)
    child = f"{own} -c 'import time; time.sleep({seconds})' {folder}/child"
    serve = f"cat {folder}/said; {child}; exit 1"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then PYTHONPATH={folder}/site exec {own} "$@"; fi\n'
        + (serve if said or seconds else f'PYTHONPATH="$PYTHONPATH:{folder}/site" exec {own} "$@"')
    )
    python.chmod(0o755)
    return str(python)


def server(folder: Path, context: int = 64, **settings: object) -> Server:
    quiet: Callable[[str, float], None] = lambda what, share: None  # noqa: E731
    return Server(folder / "model", VllmConfig(**settings), context, folder / "logs" / "vllm.log", quiet)


# Finding and starting it


def test_an_interpreter_that_is_not_there_or_has_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffbookError, match=r"there is no interpreter .*nowhere.*pip install vllm=="):
        find_vllm(str(tmp_path / "nowhere"))
    monkeypatch.setenv("OFFBOOK_VLLM", sys.executable)
    if "vllm" not in sys.modules:
        with pytest.raises(OffbookError, match=r"there is no vLLM in .*; make its environment with `python3 -m venv"):
            find_vllm()


def test_a_vllm_that_is_too_old(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match=r"has vLLM 0\.11\.0, and offbook needs 0\.24 or newer"):
        find_vllm(interpreter(tmp_path, "0.11.0"))
    assert find_vllm(interpreter(tmp_path / "new", "0.24.0")).version == "0.24.0"


SAID = {
    "ValueError: Free memory on device cuda:0 (10.2/139.8 GiB) on startup is less than desired GPU memory utilization "
    "(0.4, 55.9 GiB). Decrease GPU memory utilization": "lower engine.vllm.gpu_share",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`": "raise "
    "engine.vllm.gpu_share",
    "ValueError: To serve at least one request with the model's max seq len (32768), 9 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2 GiB).": "lower harness.context",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "lower engine.vllm.gpu_share",
    "ValueError: --enable-return-routed-experts is incompatible with pipeline parallelism (PP > 1).": (
        "add --no-enable-return-routed-experts to engine.vllm.options"
    ),
    "(EngineCore pid=7) KeyError: 'qwen9'\nRuntimeError: Engine core initialization failed. See root cause above.": (
        "KeyError: 'qwen9'"
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_why_it_did_not_start(said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLost, match=r"^vLLM did not start: .*logs/vllm.log$") as lost:
        server(tmp_path, python=interpreter(tmp_path, said=said)).start()
    assert SAID[said] in str(lost.value)


def test_a_server_that_was_disturbed_while_it_measured_memory_is_started_again(tmp_path: Path) -> None:
    said = "AssertionError: Error in memory profiling. Initial free memory 60 GiB, current free memory 63 GiB.\n"
    disturbed = server(tmp_path, python=interpreter(tmp_path, said=said, seconds=0.2), start_s=3)
    with pytest.raises(ServerLost, match=r"does not answer after 3 s"):
        disturbed.start()
    assert disturbed.log.read_text().count(said) > 1


def test_an_environment_that_lost_its_vllm(tmp_path: Path) -> None:
    with pytest.raises(ModelLost, match="the interpreter has no vLLM in it"):
        server(tmp_path, python=interpreter(tmp_path)).start()


def test_a_server_that_does_not_come_up_in_time_is_ended(tmp_path: Path) -> None:
    late = server(tmp_path, python=interpreter(tmp_path, seconds=60), start_s=0.5)
    with pytest.raises(ServerLost, match=r"does not answer after 0\.5 s \(engine\.vllm\.start_s\)"):
        late.start()
    assert _is_gone(str(tmp_path))  # and what it has started


def _running(words: str = "") -> list[int]:
    """Processes that have these words on their command line; of one that is dead it is empty."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone
            line = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [int(place.parent.name)] if line and words in line else []
    return found


def _group(leader: int) -> list[int]:
    found = []
    for process in _running():
        with contextlib.suppress(ProcessLookupError):
            found += [process] if os.getpgid(process) == leader else []
    return found


def _is_gone(words: str, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while _running(words) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _running(words)


STARTER = """
import sys
from pathlib import Path
from offbook.core.config import VllmConfig
from offbook.engine.vllm import Server
folder, python, *options = sys.argv[1:]
settings = VllmConfig(python=python, start_s=100, options=options)
Server(Path(folder, "model"), settings, 64, Path(folder, "vllm.log"), lambda what, share: None).start()
print("up", flush=True)
sys.stdin.read()
"""


def start_and_kill(folder: Path, python: str, stop: Callable[[], None], *options: str) -> None:
    """A process that has a server is killed, after something was done to the server."""
    command = [sys.executable, "-c", STARTER, str(folder), python, *options]
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        stop()
    finally:
        starter.kill()
        starter.communicate()


@pytest.mark.parametrize("state", ["runs", "is stopped"])
def test_a_server_goes_down_with_whoever_started_it(state: str, tmp_path: Path) -> None:
    """A plain process stands for it here, with a worker that it has started."""
    python, module = interpreter(tmp_path), tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    worker = f"[sys.executable, '-c', 'import time; time.sleep(100)', {str(tmp_path / 'worker')!r}]"
    module.write_text(f"import subprocess, sys, time\nsubprocess.Popen({worker})\ntime.sleep(100)\n")

    def stop() -> None:
        deadline = time.monotonic() + 20
        while not (workers := _running(str(tmp_path / "worker"))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _running(f"--model {tmp_path}")
        if state == "is stopped":
            os.killpg(os.getpgid(workers[0]), signal.SIGSTOP)

    start_and_kill(tmp_path, python, stop)
    assert _is_gone(str(tmp_path))


TRAINER = """
import json, sys
from offbook.core.config import load_config
from offbook.rl.train import train
train(load_config(["standard"], json.loads(sys.argv[1])))
"""


def test_ctrl_c_while_it_comes_up_is_answered_at_once(small: dict[str, str], tmp_path: Path) -> None:
    python = interpreter(tmp_path / "vllm", "0.32.0+cpu", seconds=100)
    settings = {**small, "engine.kind": "vllm", "engine.vllm.python": python, "out": str(tmp_path / "run")}
    run = subprocess.Popen(
        [sys.executable, "-c", TRAINER, json.dumps(settings)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    child, deadline = f"{tmp_path}/vllm/child", time.monotonic() + 60
    while not _running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    try:
        _, said = run.communicate(timeout=15)
    finally:
        run.kill()
    assert said.strip().endswith("KeyboardInterrupt"), said
    assert _is_gone(child)


# A server that plays answers


class Played:
    """`answer` gets the path and the body, and gives a status and a body, or None to keep silent."""

    def __init__(self, answer: Callable[[str, bytes], tuple[int, bytes] | None]):
        self.answer, self.asked, self.ended = answer, list[tuple[str, bytes]](), 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        listening = asyncio.run_coroutine_threadsafe(starting, self.loop).result()
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length:")[2].split()[0]) if "content-length:" in head else 0
                path, body = head.split()[1], await reader.readexactly(size)
                self.asked.append((path, body))
                given = (200, b"") if path == "/health" else self.answer(path, body)
                if given is None:
                    await reader.read()
                    raise EOFError
                writer.write(f"HTTP/1.1 {given[0]} x\r\nContent-Length: {len(given[1])}\r\n\r\n".encode() + given[1])
        except EOFError:
            self.ended += 1
            writer.close()

    def of(self, path: str) -> list[bytes]:
        return [body for place, body in self.asked if place == path]


def tokens(ids: list[int], finish: str = "stop", logprob: float = -1.0) -> tuple[int, bytes]:
    about = json.dumps({"finish": finish, "tokens": len(ids)}).encode()
    return 200, about + b"\n" + array("i", ids).tobytes() + array("f", [logprob] * len(ids)).tobytes()


def engine_of(played: Played, folder: Path, timeout_s: float = 5.0) -> VllmEngine:
    return VllmEngine(server(folder, url=played.url, start_s=2), frozenset({7}), timeout_s=timeout_s)


async def complete(engine: VllmEngine, max_tokens: int = 8) -> Completion:
    try:
        return await engine.open("a").complete(Prompt([1, 2, 3]), max_tokens)
    finally:
        await engine.aclose()


def test_what_is_asked_for_and_what_comes_back(tmp_path: Path) -> None:
    played = Played(lambda path, body: tokens([5, 6, 7]))
    assert asyncio.run(complete(engine_of(played, tmp_path))) == Completion([5, 6, 7], [-1.0] * 3, [0] * 3)
    line, _, ids = played.of("/offbook/tokens")[0].partition(b"\n")
    told = json.loads(line)
    assert told.pop("salt").startswith("weights ")
    assert told == {"max_tokens": 8, "temperature": 1.0, "stop_ids": [7], "adapter": ""}
    assert array("i", ids).tolist() == [1, 2, 3]


def test_a_first_request_waits_for_weights_that_are_on_their_way(tmp_path: Path) -> None:
    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if path == "/v1/load_lora_adapter":
            time.sleep(0.5)
        return tokens([7]) if path == "/offbook/tokens" else (200, b"{}")

    engine = engine_of(Played(answer), tmp_path)
    engine.apply(Weights(0, {"a": torch.zeros(4)}, {"r": 4}))

    async def both() -> Completion:
        new = asyncio.create_task(asyncio.to_thread(engine.apply, Weights(1, {"a": torch.ones(4)}, {"r": 4})))
        await asyncio.sleep(0.2)
        found = await complete(engine)
        await new
        return found

    assert asyncio.run(both()).versions == [1]


def test_all_that_a_lost_server_had_hear_the_same_and_the_next_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbook.engine.vllm.engine.PAUSE_S", 0.05)
    is_well = False
    played = Played(lambda path, body: tokens([7]) if is_well else (500, b"engine died"))
    engine = engine_of(played, tmp_path)

    async def asked() -> list[BaseException | Completion]:
        nonlocal is_well
        sessions = [engine.open(str(number)) for number in range(3)]
        found = await asyncio.gather(*(one.complete(Prompt([1]), 8) for one in sessions), return_exceptions=True)
        is_well = True
        return [*found, await engine.open("later").complete(Prompt([1]), 8)]

    *lost, later = asyncio.run(asked())
    assert isinstance(lost[0], ServerLost)
    assert lost[0] is lost[1] is lost[2]
    assert isinstance(later, Completion)
    assert len(engine.losses) == 2


def test_runs_on_one_server_share_neither_prefixes_nor_names_of_adapters(tmp_path: Path) -> None:
    played = Played(lambda path, body: tokens([7]) if path == "/offbook/tokens" else (200, b"{}"))
    for _ in range(2):
        engine = engine_of(played, tmp_path)
        engine.apply(Weights(0, {"a": torch.zeros(4)}, {"r": 4}))
        asyncio.run(complete(engine))
    asked = [json.loads(body.partition(b"\n")[0]) for body in played.of("/offbook/tokens")]
    loaded = [json.loads(body)["lora_name"] for body in played.of("/v1/load_lora_adapter")]
    unloaded = [json.loads(body)["lora_name"] for body in played.of("/v1/unload_lora_adapter")]
    assert len({told["salt"] for told in asked}) == 2
    assert [told["adapter"] for told in asked] == loaded == unloaded
    assert len(set(loaded)) == 2


def test_a_message_that_was_ended_for_new_weights_goes_on_behind_what_it_has(tmp_path: Path) -> None:
    answers = iter([tokens([5, 6], "abort"), tokens([], "abort"), tokens([8, 7])])
    played = Played(lambda path, body: next(answers))
    assert asyncio.run(complete(engine_of(played, tmp_path))).ids == [5, 6, 8, 7]
    sent = [body.partition(b"\n") for body in played.of("/offbook/tokens")]
    assert [array("i", ids).tolist() for _, _, ids in sent] == [[1, 2, 3], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6]]
    assert [json.loads(line)["max_tokens"] for line, _, _ in sent] == [8, 6, 6]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((404, b"Not Found"), r"404: Not Found \(it has to run with the options of docs/engines.md\)"),
        ((400, b"the prompt is odd"), "refused a request with 400: the prompt is odd"),
        ((200, b"<html>"), "something else than tokens"),
        (tokens([5] * 9), "9 tokens with 9 log-probabilities for 8"),
        (tokens([5], logprob=float("nan")), "1 tokens with 1 log-probabilities for 8"),
    ],
)
def test_an_answer_that_is_none(answer: tuple[int, bytes], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLost, match=sentence):
        asyncio.run(complete(engine_of(Played(lambda path, body: answer), tmp_path)))


@pytest.mark.parametrize("answer", [None, (500, b"EngineDeadError: gone")])
def test_a_server_that_hangs_or_fails_is_asked_again_and_then_given_up(
    answer: tuple[int, bytes] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(lambda path, body: answer)
    with pytest.raises(ServerLost, match=r"^vLLM (answered 500|has not answered).*after it was waited for 2 times"):
        asyncio.run(complete(engine_of(played, tmp_path, timeout_s=0.2)))
    assert len(played.of("/offbook/tokens")) == 3
    assert len([line for line in caplog.messages if "is waited for" in line]) == 2  # people are told


def test_a_rollout_whose_time_a_hung_server_took_is_none(small: dict[str, str], tmp_path: Path) -> None:
    """However short a rollout's time is; and one whose server answers has simply run out of it."""
    hangs = [True]

    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        is_probe = json.loads(body.partition(b"\n")[0])["max_tokens"] == 1
        return tokens([7]) if is_probe and not hangs[0] else None

    played = Played(answer)
    more = {"engine.kind": "vllm", "engine.vllm.url": played.url, "engine.timeout_s": "1", "harness.wall_s": "0.3"}
    config = load_config(["standard"], {**small, **more, "out": str(tmp_path / "run")})
    collector, sets = Collector(config, Path(config.model)), task_sets(config)
    engine, jobs = collector.engine, [Job(sets.train[0], f"r{number}", "g") for number in range(2)]
    assert isinstance(engine, VllmEngine)
    real = engine.server.start

    def start() -> None:
        real()
        hangs[0] = engine._starts == 0

    engine.server.start = start  # type: ignore[method-assign]

    async def main() -> None:
        async with aclosing(collector):
            with pytest.raises(ServerLost, match=r"vLLM has not answered anything for \d s \(engine.timeout_s\)"):
                await collector.rollouts(jobs)
            assert {one.stop for one in await collector.rollouts(jobs)} == {"wall"}

    asyncio.run(main())


def test_slow_is_not_hung_while_messages_come(tmp_path: Path) -> None:
    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        is_slow = json.loads(body.partition(b"\n")[0])["max_tokens"] == 9
        return None if is_slow else tokens([7])

    async def main(engine: VllmEngine) -> None:
        session = engine.open("a")
        slow = asyncio.create_task(session.complete(Prompt([1]), 9))
        for _ in range(12):
            await session.complete(Prompt([1]), 8)
            await asyncio.sleep(0.05)
        assert not slow.done()
        slow.cancel()
        await asyncio.sleep(0.1)
        assert played.ended == 1  # the server is told that nobody waits
        await engine.aclose()

    played = Played(answer)
    asyncio.run(main(engine_of(played, tmp_path, timeout_s=0.25)))
    assert len(played.of("/offbook/tokens")) == 13


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    async def main() -> None:
        async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            writer.close()

        listening = await asyncio.start_server(once, "127.0.0.1", 0)
        wire = Wire(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {})
        assert [await wire.post("/a", b"") for _ in range(3)] == [(200, b"ok")] * 3
        listening.close()
        with pytest.raises(Broken):
            await wire.post("/a", b"")

    asyncio.run(main())


# Weights


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 2])), min_size=1), st.integers(256, 4096))
def test_buckets_hold_every_tensor_once_and_none_over_another(shapes: list[tuple[int, int]], limit: int) -> None:
    tensors = {str(n): torch.zeros([size] * ndim) for n, (size, ndim) in enumerate(shapes)}
    names = []
    for bucket, end in _buckets(_distinct(Weights(0, tensors), torch.bfloat16), limit):
        at = 0
        for name, tensor, start in bucket:
            assert start >= at
            assert start % 256 == 0
            at = start + tensor.numel() * (2 if tensor.ndim == 2 else 4)
            names.append(name)
        assert at <= end
        assert end <= limit + 255 or len(bucket) == 1
    assert names == list(tensors)


def test_a_tied_output_layer_is_sent_once() -> None:
    tied = model(0).state_dict()
    assert "lm_head.weight" in tied
    assert "lm_head.weight" not in {name for name, _, _ in _distinct(Weights(0, tied), torch.float32)}


def test_weights_that_do_not_arrive_are_an_error(tmp_path: Path) -> None:
    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        told = json.loads(body)
        if path != "/collective_rpc":
            return 404, b"no such thing"
        if told["method"] == "offbook_open":
            return 200, b'{"results": [{}]}'
        return 200, json.dumps({"results": [{"sum": total, "missing": missing}]}).encode()

    played = Played(answer)
    sender = Sender(server(tmp_path, url=played.url), torch.float32)
    total, missing = "0", list[str]()
    sender.send(Weights(0, {"a": torch.zeros(4)}))
    with pytest.raises(ModelLost, match="not those that were sent"):
        sender.send(Weights(0, {"a": torch.ones(4)}))
    missing = ["model.norm.weight"]
    with pytest.raises(ModelLost, match=r"vLLM has 1 parameters .*: model\.norm\.weight"):
        sender.send(Weights(0, {"a": torch.zeros(4)}))
    sender.close()
    with pytest.raises(ModelLost, match=r"has no /sleep: it has to run with VLLM_SERVER_DEV_MODE=1"):
        server(tmp_path, url=played.url).call("/sleep?level=1")


def test_a_server_that_hangs_while_it_gets_weights_gets_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(path: str, body: bytes) -> tuple[int, bytes] | None:
        if path == "/offbook/tokens":
            return tokens([5, 7])
        if json.loads(body)["method"] == "offbook_open":
            return 200, b'{"results": [{}]}'
        return (200, b'{"results": [{"sum": "0"}]}') if len(played.of("/collective_rpc")) > 2 else None

    played = Played(answer)
    engine, began = engine_of(played, tmp_path, timeout_s=0.5), time.monotonic()
    engine.apply(Weights(4, {"a": torch.zeros(4)}))
    assert 0.5 < time.monotonic() - began < 2
    told = "vLLM hangs: no answer to /collective_rpc for 0.5 s; it is waited for, and gets version 4 of the weights"
    assert caplog.messages == [told]
    assert [json.loads(body)["method"] for body in played.of("/collective_rpc")] == ["offbook_open", "offbook_load"] * 2
    assert asyncio.run(complete(engine)).versions == [4, 4]


# The real one

COUNTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, Server]]:
    """With room for adapters."""
    folder = tmp_path_factory.mktemp("real")
    try:
        found = find_vllm()
    except OffbookError as reason:
        pytest.skip(str(reason))
    model(0).save_pretrained(folder / "model")
    options = ["--enforce-eager"] if found.on_cpu else []
    running = server(folder, POSITIONS, python=found.python, start_s=240, options=options)
    engine = VllmEngine(running, STOPS, temperature=0.8)
    yield engine, running
    asyncio.run(engine.aclose())
    assert _is_gone(str(folder / "model"))


async def all_of(engine: VllmEngine, asked: list[list[int]], max_tokens: int = 24) -> list[Completion]:
    return await asyncio.gather(*(engine.open("").complete(Prompt(prompt), max_tokens) for prompt in asked))


RANK = 4


def adapter(seed: int, version: int) -> tuple[Weights, torch.nn.Module]:
    """Random, on all queries; and the model that it comes to."""
    torch.manual_seed(seed)
    merged, tensors = model(0), {}
    for number, layer in enumerate(merged.model.layers):
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj"
        weight = layer.self_attn.q_proj.weight
        down, up = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        weight.data += up @ down * (8 / RANK)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": {"q_proj"}, "bias": "none"}
    return Weights(version, tensors, about | {"task_type": "CAUSAL_LM"}), merged


@pytest.mark.vllm
def test_adapters_go_by_path_and_each_version_reaches_the_engine(real: tuple[VllmEngine, Server]) -> None:
    """Also one that another had before: runs that share an engine count from 0 each."""
    engine, _ = real
    asked = prompts(4)
    for seed, version in ((1, 1), (2, 2), (4, 2), (5, 1)):
        given, merged = adapter(seed, version)
        engine.apply(given)
        for prompt, completion in zip(asked, asyncio.run(all_of(engine, asked)), strict=True):
            assert set(completion.versions) == {version}
            assert error(merged, prompt, completion) < 1e-3
            assert error(model(0), prompt, completion) > 0.05


@torch.no_grad()
def likeliest(network: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(network(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


def head_for(network: PreTrainedModel, asked: list[list[int]], depth: int) -> DraftHead:
    """Trained on what the model itself writes, where it is nearly certain."""
    told = [[*ids, *likeliest(network, ids, 40)] for ids in asked]
    head = DraftHead(network)
    trainer = DraftTrainer(network, head, MtpConfig(depth=depth, learning_rate=3e-3))
    batch = Batch.collate([Sample(ids, ce_weight=[1.0] * len(ids)) for ids in told], network.device)
    with torch.no_grad():
        hidden, _ = Decoder(network).hidden(batch.row)
    for _ in range(150):
        trainer.learn(batch, hidden)
        trainer.step()
    return head


@pytest.mark.vllm
def test_a_draft_head_is_what_vllm_loads_as_eagle(tmp_path: Path) -> None:
    """Nothing is drawn at temperature 0, so with drafts it is what the model alone would write. (Where drafts are
    drawn, vLLM's CPU build gives log-probabilities that are no numbers.)"""
    try:
        found = find_vllm()
    except OffbookError as reason:
        pytest.skip(str(reason))
    network, asked = model(0), [prompt[:8] for prompt in prompts(24)]
    network.save_pretrained(tmp_path / "model")
    save_head(head_for(network, asked, 2), network, tmp_path / "draft")
    options = ["--enforce-eager"] if found.on_cpu else []
    how = EngineConfig(draft=str(tmp_path / "draft"), vllm=VllmConfig(options=options))
    given = [word.replace("probabilistic", "greedy") for word in with_drafts(how).options]
    running = server(tmp_path, POSITIONS, python=found.python, start_s=240, options=given)
    engine = VllmEngine(running, frozenset(), temperature=0.0)
    try:
        for ids, completion in zip(asked, asyncio.run(all_of(engine, asked)), strict=True):
            assert completion.ids == likeliest(network, ids, 24)
        lines = httpx2.get(f"{running.url}/metrics").text.splitlines()
    finally:
        asyncio.run(engine.aclose())
    drafted, kept = (float(line.rsplit(" ", 1)[1]) for name in COUNTED for line in lines if line.startswith(name))
    assert drafted > 100
    assert kept / drafted > 0.8


@pytest.mark.vllm
def test_a_server_that_died_comes_back_with_the_current_weights(
    real: tuple[VllmEngine, Server], caplog: pytest.LogCaptureFixture
) -> None:
    engine, running = real
    asked, (given, merged) = prompts(4), adapter(3, 3)

    async def main() -> list[Completion]:
        writing = asyncio.create_task(all_of(engine, asked, 200))
        await asyncio.sleep(0.2)
        assert running._process is not None
        os.killpg(running._process.pid, signal.SIGKILL)
        return await writing

    engine.apply(given)
    for prompt, completion in zip(asked, asyncio.run(main()), strict=True):
        assert set(completion.versions) == {3}
        assert error(merged, prompt, completion) < 1e-3
    assert len([line for line in caplog.messages if "is started again, and gets version 3" in line]) == 1


@pytest.mark.vllm
def test_two_steps_of_training(tmp_path: Path) -> None:
    from offbook.pocket.model import Recipe, make_pocket

    try:
        found = find_vllm()
    except OffbookError as reason:
        pytest.skip(str(reason))
    folder = make_pocket(tmp_path, 0, lambda what, share: None, Recipe(episodes=200, heads=4))
    options = '["--enforce-eager"]' if found.on_cpu else "[]"
    given = {"model": folder, "out": tmp_path / "run", "engine.kind": "vllm", "engine.vllm.options": options}
    sizes = {"train.steps": 2, "train.groups": 2, "train.group_size": 3, "harness.turns": 3, "tasks.num_train": 6}
    config = load_config(["pocket"], {key: str(value) for key, value in (given | sizes).items()})
    rows, _ = train(config).metrics()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rl/mismatch"] < (1e-4 if found.on_cpu else 0.1) for row in rows)
    assert (tmp_path / "run" / "logs" / "vllm.log").is_file()
    assert _is_gone(str(folder))
