"""The local engine in a process of its own, on a CPU, so that sampling and training need not share one interpreter.

Messages are lengths and JSON over pipes; weights go through a file in the run folder. When the process dies, whoever
waits for it is told that the model is lost, and the next that needs it starts it again with the weights it had. It says
something every second, also where nobody asked: one that is silent for too long is ended, and so is dead.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import offbook
from offbook.core.config import Config
from offbook.core.draft import load_head
from offbook.core.weights import Weights
from offbook.engine.base import Engine, Session
from offbook.engine.local import LocalEngine, LocalSession
from offbook.train.precision import compute_linears
from offbook.types import Completion, ModelLost, OffbookError, Prompt, PromptTooLong, Routes

START_S = 300.0  # to import, load and take its first weights
BEAT_S, LOOK_S = 1.0, 0.05
NOBODY = -1  # who is answered by a sign of life
LENGTH = struct.Struct("<I")
MAIN = "from offbook.engine.subprocess_engine import main; main()"
Said = dict[str, Any]


@dataclass(slots=True, eq=False)
class ApartSession(Session):
    engine: ApartEngine
    number: int
    start: int  # of the process that knows it
    turn: int = 0

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        if self.start != self.engine.starts:
            raise self.engine.lost
        asked = {"do": "write", "session": self.number, "turn": self.turn, "ids": prompt.ids, "most": max_tokens}
        self.turn += 1
        number, answer = self.engine.ask(asked)
        try:
            said = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:  # the rollout ran out of time
            self.engine.drop(number)
            raise
        routes = Routes(**said["routes"]) if said["routes"] else None
        return Completion(said["ids"], said["logprobs"], said["versions"], routes=routes)

    def skip_turns(self, turns: int) -> None:
        self.turn += turns

    async def alive(self) -> None:
        await self.engine.alive()

    def close(self) -> None:
        self.engine.close(self.number)


class ApartEngine(Engine):
    """As LocalEngine is, of all weights and no adapter. It starts with the first weights."""

    version = 0
    kv_load = 0.0
    counters: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, config: Config, model: Path, stop_ids: frozenset[int]):
        self.starts = 0
        self.counters = {}
        self.drafts: tuple[list[int], list[int]] = [], []
        self._order = {"config": config.model_dump(mode="json"), "model": str(model), "stop_ids": sorted(stop_ids)}
        self._file = Path(config.out) / "slots" / "weights.safetensors"
        self._log = Path(config.out) / "logs" / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers, self._open = itertools.count(), set[int]()
        self._asked: dict[int, Future[Said]] = {}
        self._applied: Said | None = None
        self.lost = ModelLost("the engine's process has not been started")  # how it last ended, the same for all
        self._lock = threading.RLock()
        self.silence_s = min(config.engine.timeout_s, config.loop.deadline_s)
        self._heard, self._due, self._ended = 0, 0.0, ""  # words so far; when the next is late; why we ended it

    def open(self, key: str) -> ApartSession:
        number = next(self._numbers)
        self._started()
        with self._lock:
            if self._process is None:
                raise self.lost
            self._open.add(number)
            self._send({"do": "open", "session": number, "key": key})
            return ApartSession(self, number, self.starts)

    def close(self, number: int) -> None:
        with self._lock:
            if number in self._open:  # of a process that has died there is nothing to close
                self._open.discard(number)
                self._send({"do": "close", "session": number})

    def apply(self, weights: Weights) -> None:
        """Between two steps of decoding; returns when they are in, if need be in a process that is started for them."""
        names = weights.firsts()
        part = self._file.with_suffix(".part")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: weights.tensors[name].detach().contiguous() for name in set(names.values())}, part)
        os.replace(part, self._file)
        self._applied = {"do": "apply", "file": str(self._file), "names": names, "version": weights.version}
        self._applied["draft"] = weights.draft and dict(weights.draft)
        try:
            if not self._started():  # else it came with them
                self._wait(self.ask(self._applied)[1])
        except ModelLost:
            if not self._started():  # it lives, and has not taken them
                raise
        self.version = weights.version

    async def alive(self) -> None:
        """Returns at the next sign of life; raises where the process is ended for want of one."""
        start, heard = self.starts, self._heard
        while self._heard == heard:
            if self._process is None or self.starts != start:
                raise self.lost
            await asyncio.sleep(LOOK_S)

    def ask(self, asked: Said) -> tuple[int, Future[Said]]:
        number, answer = next(self._numbers), Future[Said]()
        with self._lock:
            if self._process is None:
                answer.set_exception(self.lost)
            else:
                self._asked[number] = answer
                self._send({**asked, "number": number})
        return number, answer

    def drop(self, number: int) -> None:
        """Nobody waits for that any more."""
        with self._lock:
            if self._asked.pop(number, None) is not None:
                self._send({"do": "drop", "number": number})

    def _started(self) -> bool:
        """Whether it had to be: then it has the last weights that were applied."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return False
            self._start()
            if self._applied is None:
                return True
            _, answer = self.ask(self._applied)  # before anybody else can ask
        self._wait(answer)
        return True

    def _wait(self, answer: Future[Said]) -> None:
        """Until the weights are in. A process that has not taken them is ended: what it has then nobody knows."""
        process = self._process
        try:
            answer.result(START_S)
        except TimeoutError:
            self._ended = f"the engine's process had not taken its weights within {START_S:g} s and was ended"
            if process is not None:
                process.kill()
                process.wait()
            raise ModelLost(self._ended) from None

    def _start(self) -> None:
        if self._process is not None:  # it has died, and the one who listens to it has not said so yet
            self._end(self._ended or f"the engine's process ended with code {self._process.returncode}")
        roots = [str(Path(offbook.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(roots)},
            )
        self.starts += 1
        self._due, self._ended = time.monotonic() + max(START_S, self.silence_s), ""
        for work in (self._listen, self._watch):
            threading.Thread(target=work, args=(self._process,), name="engine", daemon=True).start()
        self._send(self._order)

    def _send(self, said: Said) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = json.dumps(said).encode()
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
        except OSError:  # it is ending; the one who listens tells
            pass

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while (said := _read(process.stdout)) is not None:
            self._heard, self._due = self._heard + 1, time.monotonic() + self.silence_s
            answer = self._asked.pop(said["number"], None)
            self.kv_load, self.counters, self.drafts = said["held"], said["work"], said["drafts"]
            if answer is None or answer.cancelled():
                continue
            if "lost" in said:
                answer.set_exception(ModelLost(said["lost"]))
            elif "too_long" in said:
                answer.set_exception(PromptTooLong(said["too_long"]))
            else:
                answer.set_result(said)
        code = process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        problem = f"the engine's process ended with code {code}: {' | '.join(lines[-3:]) or 'it said nothing'}"
        with self._lock:
            if self._process is process:
                self._process = None
                self._end(self._ended or problem)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: where the process hangs, so may whoever sends it something."""
        while process.poll() is None:
            if time.monotonic() > self._due:
                settings = "engine.timeout_s, loop.deadline_s"
                self._ended = f"the engine's process said nothing for {self.silence_s:g} s ({settings}) and was ended"
                process.kill()
                break
            time.sleep(LOOK_S)

    def _end(self, problem: str) -> None:
        """Of all that was asked of a process that is no more."""
        asked, self._asked, self.lost = self._asked, {}, ModelLost(problem)
        self._open.clear()
        for answer in asked.values():
            if not answer.cancelled():
                answer.set_exception(self.lost)

    async def aclose(self) -> None:
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)


def _read(pipe: IO[bytes]) -> Said | None:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = pipe.read(length)
    return json.loads(data) if len(data) == length else None


class _Served:
    """In the process: sessions of a LocalEngine by their numbers."""

    def __init__(self, order: Said, output: IO[bytes]):
        config = Config.model_validate(order["config"])
        settings = config.engine
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            order["model"], dtype=settings.precision, trust_remote_code=False
        ).eval()
        compute_linears(model, config.engine_linear)
        stops, context = frozenset(order["stop_ids"]), config.harness.context
        draft = load_head(Path(settings.draft or order["model"]), model) if settings.draft_tokens else None
        self.engine = LocalEngine(
            model,
            stops,
            settings.temperature,
            settings.kv_tokens,
            config.seed,
            settings.mode,
            context=context,
            draft=draft,
            draft_tokens=settings.draft_tokens,
            deadline_s=config.loop.deadline_s,
        )
        self.beat_s = min(BEAT_S, settings.timeout_s / 4, config.loop.deadline_s / 4)
        self.sessions: dict[int, LocalSession] = {}
        self.jobs: dict[int, asyncio.Task[None]] = {}
        self.output = output

    def take(self, said: Said) -> None:
        if said["do"] == "open":
            self.sessions[said["session"]] = self.engine.open(said["key"])
        elif said["do"] == "close":
            self.sessions.pop(said["session"]).close()
        elif said["do"] == "drop":
            if job := self.jobs.get(said["number"]):
                job.cancel()
        else:
            job = self.jobs[said["number"]] = asyncio.get_running_loop().create_task(self._answer(said))
            job.add_done_callback(lambda _: self.jobs.pop(said["number"]))

    async def _answer(self, said: Said) -> None:
        try:
            answer = await (self._apply(said) if said["do"] == "apply" else self._write(said))
        except PromptTooLong as error:
            answer = {"too_long": str(error)}
        except OffbookError as error:
            answer = {"lost": str(error)}
        if self.engine.hung:  # a thread cannot be ended, a process can
            print(self.engine.hung, file=sys.stderr, flush=True)
            os._exit(1)
        self._say(said["number"], answer)

    async def beat(self) -> None:
        while True:
            self._say(NOBODY, {})
            await asyncio.sleep(self.beat_s)

    def _say(self, number: int, answer: Said) -> None:
        answer |= {"number": number, "held": self.engine.kv_load, "work": self.engine.counters}
        answer["drafts"] = self.engine.drafts
        data = json.dumps(answer).encode()
        self.output.write(LENGTH.pack(len(data)) + data)
        self.output.flush()

    async def _write(self, said: Said) -> Said:
        session = self.sessions[said["session"]]
        session.turn = said["turn"]
        completion = await session.complete(Prompt(said["ids"]), said["most"])
        routes = asdict(completion.routes) if completion.routes else None
        told = {"ids": completion.ids, "logprobs": completion.logprobs, "versions": completion.versions}
        return {**told, "routes": routes}

    async def _apply(self, said: Said) -> Said:
        stored = load_file(said["file"])
        tensors = {name: stored[own] for name, own in said["names"].items()}
        weights = Weights(said["version"], tensors, draft=said["draft"])
        await asyncio.to_thread(self.engine.apply, weights)
        return {}


def main() -> None:
    """The process: it ends with the one that started it, whose end of the pipe closes then."""
    orders, answers = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "rb"), (1, "wb")))
    os.dup2(2, 1)  # whatever prints is not an answer

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        order = _read(orders)
        if order is None:
            return
        served = _Served(order, answers)
        beats = loop.create_task(served.beat())
        while (said := await loop.run_in_executor(None, _read, orders)) is not None:
            served.take(said)
        beats.cancel()
        os._exit(0)  # what is being written is for nobody

    asyncio.run(serve())
