"""Rollouts by vLLM: token ids in; ids, their processed log-probabilities and policy versions out.

The server reports no versions, so a request is sampled by one version only: new weights end running requests early, and
each continues with the new version behind what it has, after its prefix is computed again. Prefix caches are salted by
version.

A server that died or hangs is restarted with the current weights, and its requests are sent again. Left out: a seed per
rollout. vLLM would launch a kernel per row and step for it, and still sample other tokens in another batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from offbook.core.weights import Weights
from offbook.engine.base import Engine, Session
from offbook.engine.vllm.experts import Trail
from offbook.engine.vllm.server import CALL_S, Server
from offbook.engine.vllm.weights import Sender, room_for
from offbook.engine.vllm.wire import Broken, Wire, read_tokens
from offbook.types import Completion, ModelLost, OffbookError, Prompt, PromptTooLong, ServerLost

log = logging.getLogger(__name__)
TOKENS = "/offbook/tokens"  # of inside/offbook_tokens.py
RESTARTS = 2  # in a row, without a message in between
PAUSE_S = 2.0  # before the second restart
LATE_S = 2.0  # timeout of answers that new weights ended early
Answer = tuple[int, bytes]  # status and body


@dataclass(slots=True, eq=False)
class Line:
    """The connections and running requests of one event loop."""

    loop: asyncio.AbstractEventLoop
    wires: dict[str, Wire] = field(default_factory=dict)  # by URL: a restarted server has another
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    posts: set[asyncio.Task[Answer]] = field(default_factory=set)
    is_open: bool = False  # the server was up with its weights


@dataclass(slots=True, eq=False)
class VllmSession(Session):
    engine: VllmEngine
    trail: Trail
    num_losses: int  # of the engine, before this session
    leave: Callable[[], None] | None = None  # called when it is closed

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        return await self.engine.complete(prompt.ids, max_tokens, self.trail)

    async def alive(self) -> None:
        """Ask for a token; raise if the server was lost since this session began."""
        await self.engine.complete([0], 1, Trail(None))
        if len(self.engine.losses) > self.num_losses:
            raise self.engine.losses[-1]

    def close(self) -> None:
        leave = self.leave
        self.leave = None
        if leave is not None:
            leave()


class VllmEngine(Engine):
    """The server is started by the first request or weights: then a trainer on the same GPU has its memory already.

    While requests run, call `apply` from another thread than theirs (asyncio.to_thread).
    """

    keeps_weights = True
    version = 0
    losses: Sequence[ServerLost] = ()

    def __init__(self, server: Server, stop_ids: frozenset[int], temperature: float = 1.0, timeout_s: float = 300.0):
        """A server without any message for `timeout_s` hangs."""
        self.server = server
        self.temperature = temperature
        self.timeout_s = timeout_s
        self.losses = []
        self._stop_ids = sorted(stop_ids)
        self._run = secrets.token_hex(4)  # several runs may use one server
        self._weights: Weights | None = None  # the last applied ones, for restarts
        self._applied = 0  # number of updates: part of the salt, because runs on one server have the same versions
        self._adapter = ""  # its name in the server
        self._sender: Sender | None = None
        self._connected: Line | None = None
        self._starts = 0
        self._restarts = 0  # in a row
        self._answered = 0.0  # time of the last message
        self._ended: ServerLost | None = None  # why it was given up last
        self._ended_at = 0.0
        self._warned = False  # that routed experts are missing
        self._asleep = 0  # level: 1 keeps the weights in the host's memory, 2 drops them
        self._changing = threading.RLock()  # held to start or update the server

    @property
    def positions(self) -> int:
        return self.server.context

    def open(self, key: str) -> VllmSession:
        return VllmSession(self, Trail(self.server.mixture), len(self.losses))

    # Weights

    def apply(self, weights: Weights, caller: asyncio.AbstractEventLoop | None = None) -> None:
        """`caller` is the event loop that waits for this meanwhile, if another thread does it for that loop. The
        tensors are kept by reference."""
        with self._changing:
            if weights.adapter is not None and not self._starts:
                self.server.lora_rank = room_for(weights.adapter["r"])
            line = self._connected
            if line is not None and line.loop is (caller or running_loop()):
                if line.posts:
                    raise RuntimeError("requests run in this event loop: apply new weights with asyncio.to_thread")
                line = None
            if line is None or not line.loop.is_running():
                self._replace(weights)
                return
            problem = None
            try:
                is_paused = asyncio.run_coroutine_threadsafe(_hold(line), line.loop).result()
                if is_paused:
                    try:
                        self._call("/pause?mode=abort&clear_cache=false")
                    except ServerLost as lost:
                        problem = lost
                    asyncio.run_coroutine_threadsafe(_cancel_late(line), line.loop).result()
                self._replace(weights, problem, is_paused)
            finally:
                if not line.loop.is_closed():
                    line.loop.call_soon_threadsafe(line.may_send.set)

    def pause(self) -> None:
        """Free the GPU's memory until the next `apply` or message. No request may be running."""
        if self.server.settings.sleep and self._starts and not self._asleep:
            self._asleep = 1 if self._weights is None or self._weights.adapter is not None else 2
            with contextlib.suppress(ServerLost):  # the next call will notice
                self._call(f"/sleep?level={self._asleep}")

    def _call(self, path: str, body: dict[str, str] | None = None) -> None:
        self.server.call(path, body, min(CALL_S, self.timeout_s))

    def _replace(self, weights: Weights, found: ServerLost | None = None, is_paused: bool = False) -> None:
        """Update the server. A dead or hanging one (`found`, or noticed here) is restarted with the weights."""
        try:
            if found is not None:
                raise found
            self._start(for_weights=True)
            self._update(weights)
            if is_paused:
                self._call("/resume")
        except ServerLost as problem:
            if not self._starts:
                raise
            log.warning(f"{problem}; it is {self._comes_back}, and gets version {weights.version} of the weights")
            self._weights = weights
            self._restart(self._starts, problem)
            if is_paused and not self.server.is_ours:  # it may be the same process
                self._call("/resume")

    @property
    def _comes_back(self) -> str:
        return "started again" if self.server.is_ours else "waited for"

    def _start(self, for_weights: bool = False) -> None:
        """Start or wake up the server. Dropped weights are sent again, unless new weights follow."""
        with self._changing:
            if not self._starts:
                self.server.start()
                dtype = torch.float32 if self.server.on_cpu else torch.bfloat16
                self._sender = Sender(self.server, dtype, self.timeout_s)
                self._starts = 1
            if not self._asleep:
                return
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the trainer's memory is the server's now
            try:
                self._call("/wake_up")
                if self._asleep == 2 and not for_weights:
                    assert self._weights is not None
                    self._update(self._weights)
            except ServerLost as problem:
                if for_weights:
                    raise
                log.warning(f"{problem}; it is {self._comes_back}")
                self._restart(self._starts, problem)
            self._asleep = 0

    def _restart(self, starts: int, problem: ServerLost) -> None:
        """Once, however many requests found the server lost."""
        with self._changing:
            if self._starts != starts:
                return
            assert self._sender is not None
            problem.server = self.server.name
            self.losses = [*self.losses, problem]
            self.server.start()
            self._sender.forget()
            self._asleep = 0
            self._adapter = ""
            if self._weights is not None:
                self._update(self._weights)
            self._answered = time.monotonic()
            self._starts += 1

    def _update(self, weights: Weights) -> None:
        assert self._sender is not None
        self._applied += 1
        if weights.adapter is None:
            self._sender.send(weights)
        else:
            # A new name and path each time: vLLM's prefix cache goes by these.
            folder = self._sender.adapter(weights, f"adapter-{self._run}-{self._applied}")
            about = {"lora_name": folder.name, "lora_path": str(folder)}
            self.server.call("/v1/load_lora_adapter", about, self.timeout_s)
            if self._adapter:
                self._call("/v1/unload_lora_adapter", {"lora_name": self._adapter})
                shutil.rmtree(self._sender.folder / self._adapter, ignore_errors=True)
            self._adapter = folder.name
        self._weights = weights
        self.version = weights.version

    # Messages

    async def complete(self, prompt_ids: list[int], max_tokens: int, trail: Trail) -> Completion:
        """A message of at most `max_tokens`, fewer if the context ends before."""
        room = self.positions - len(prompt_ids)
        if room <= 0:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and vLLM was started for {self.positions} (harness.context)"
            )
        wanted = min(max_tokens, room)
        whole = Completion([], [], [])
        while True:
            so_far = [*prompt_ids, *whole.ids]
            left = wanted - len(whole.ids)
            version, answer = await self._answer(so_far, left, trail.first_unknown(so_far))
            ids, logprobs, experts, is_over = read_tokens(answer, left)
            try:
                trail.add(so_far, ids, experts)
            except ValueError as problem:
                if not self._warned:
                    log.warning(f"tokens are trained without the experts that vLLM sent them to: {problem}")
                self._warned = True
            whole.ids.extend(ids)
            whole.logprobs.extend(logprobs)
            whole.versions.extend([version] * len(ids))
            if is_over or len(whole.ids) == wanted:
                return replace(whole, routes=trail.routes)

    async def _answer(self, ids: list[int], max_tokens: int, experts_from: int | None) -> tuple[int, bytes]:
        """The version and answer of one request, sent again for as long as the server can be restarted."""
        line = await self._line()
        while True:
            await line.may_send.wait()
            version = self.version
            starts = self._starts
            asked = time.monotonic()
            about: dict[str, object] = {
                "max_tokens": max_tokens,
                "temperature": self.temperature,
                "stop_ids": self._stop_ids,
                "salt": f"weights {self._run} {self._applied}",
                "adapter": self._adapter if self._weights is not None and self._weights.adapter is not None else "",
            }
            if experts_from is not None:
                about["experts_from"] = experts_from
            url = self.server.url
            wire = line.wires.setdefault(url, Wire(url, self.server.headers))
            body = json.dumps(about).encode() + b"\n" + array("i", ids).tobytes()
            post = line.loop.create_task(wire.post(TOKENS, body))
            line.posts.add(post)
            try:
                problem = await self._wait(post, asked)
            finally:
                post.cancel()
                line.posts.discard(post)
            if post.cancelled():  # for new weights
                continue
            if not problem:
                self._answered = time.monotonic()
                self._restarts = 0
                return version, post.result()[1]
            await self._mend(line, starts, asked, problem)

    async def _wait(self, post: asyncio.Task[Answer], asked: float) -> str:
        """Wait for an answer. Returns why the server seems lost, if it does. Slow is not lost while messages come."""
        while not post.done():
            await asyncio.wait({post}, timeout=self.timeout_s)
            silent_s = time.monotonic() - max(asked, self._answered)
            if not post.done() and silent_s >= self.timeout_s:
                return f"has not answered anything for {silent_s:.0f} s (engine.timeout_s)"
        if post.cancelled():
            return ""
        if isinstance(error := post.exception(), Broken):
            return f"broke the connection ({error})"
        status, answer = post.result()
        if status == 200:
            return ""
        said = " ".join(answer.decode(errors="replace").split())[:300]
        if status >= 500:
            return f"answered {status}: {said}"
        if status == 404:
            said += " (it has to run with the options of docs/engines.md)"
        raise ModelLost(f"{self.server.name} refused a request with {status}: {said}")

    async def _mend(self, line: Line, starts: int, asked: float, problem: str) -> None:
        """The first request that finds the server lost restarts it; the others wait and are sent again. After too many
        restarts all running requests raise the same error; a later request restarts the server once more."""
        async with line.mending:
            if self._starts != starts:
                return
            if self._ended is not None and asked < self._ended_at:
                raise self._ended
            how = self._comes_back
            problem = f"{self.server.name} {problem}"
            if self._restarts == RESTARTS:
                raise self._give_up(f"{problem}, after it was {how} {RESTARTS} times{self.server.where_it_talks}")
            await asyncio.sleep(PAUSE_S * self._restarts)
            self._restarts += 1
            log.warning(f"{problem}; it is {how}, and gets version {self.version} of the weights")
            try:
                await asyncio.to_thread(self._restart, starts, ServerLost(problem))
            except OffbookError as error:
                raise self._give_up(f"{problem}, and could not be brought back: {error}") from None

    def _give_up(self, why: str) -> ServerLost:
        self._restarts = 0
        self._ended = ServerLost(why)
        self._ended.server = self.server.name
        self._ended_at = time.monotonic()
        return self._ended

    async def _line(self) -> Line:
        """This event loop's line, once the server is up with the weights that are being applied."""
        loop = asyncio.get_running_loop()
        line = self._connected
        if line is None or line.loop is not loop:
            line = self._connected = Line(loop)
        async with line.mending:
            if not line.is_open or not self._starts or self._asleep:
                await asyncio.to_thread(self._open, line)
        return line

    def _open(self, line: Line) -> None:
        with self._changing:
            self._start()
            line.is_open = True
            line.loop.call_soon_threadsafe(line.may_send.set)

    async def aclose(self) -> None:
        if self._connected is not None and self._connected.loop is asyncio.get_running_loop():
            for wire in self._connected.wires.values():
                wire.close()
        self._connected = None
        if self._adapter and not self.server.is_ours:  # the next run has one of its own, and this one's files go
            with contextlib.suppress(OffbookError):
                await asyncio.to_thread(self._call, "/v1/unload_lora_adapter", {"lora_name": self._adapter})
        if self._sender is not None:
            self._sender.close()
        await asyncio.to_thread(self._stop)
        self._starts = 0
        self._adapter = ""

    def _stop(self) -> None:
        """Also a server that is starting: callers that wait for it get an error."""
        self.server.is_unwanted = True
        self.server.stop()
        with self._changing:
            self.server.is_unwanted = False


async def _hold(line: Line) -> bool:
    """Send no more requests. Returns whether some are running."""
    line.may_send.clear()
    return bool(line.posts)


async def _cancel_late(line: Line) -> None:
    """Requests whose early answers do not arrive in time are sent again later."""
    _, late = await asyncio.wait(line.posts, timeout=LATE_S) if line.posts else ((), ())
    for post in late:
        post.cancel()
    if late:
        await asyncio.wait(late)


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
