"""Rollouts by vLLM: token ids in; ids, their processed log-probabilities and policy versions out.

The server reports no versions, so a request is sampled by one version only: new weights end running requests early, and
each continues with the new version behind what it has, its prefix computed anew. Prefix caches are salted by version.

A server that died or hangs is restarted with the current weights, and its requests are sent again. Left out: a seed per
rollout. vLLM would launch a kernel per row and step for it, and still sample other tokens in another batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import secrets
import threading
import time
from array import array
from collections.abc import Callable
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


@dataclass
class Shared:
    """What engines of different temperatures on the same server have in common."""

    server: Server
    run: str = field(default_factory=lambda: secrets.token_hex(4))  # several runs may use one server
    version: int = 0
    weights: Weights | None = None  # the last applied ones, for restarts
    applied: int = 0  # number of updates: part of the salt, because runs on one server have the same versions
    adapter: str = ""  # its name in the server
    sender: Sender | None = None
    line: Line | None = None
    starts: int = 0
    restarts: int = 0  # in a row
    answered: float = 0.0  # time of the last message
    ended: ServerLost | None = None  # why it was given up last
    ended_at: float = 0.0
    losses: list[ServerLost] = field(default_factory=list)
    warned: bool = False  # that routed experts are missing
    asleep: int = 0  # level: 1 keeps the weights in the host's memory, 2 drops them
    changing: threading.RLock = field(default_factory=threading.RLock)  # held to start or update the server

    @property
    def lost(self) -> ServerLost | None:
        return self.losses[-1] if self.losses else None


@dataclass(slots=True, eq=False)
class VllmSession(Session):
    engine: VllmEngine
    trail: Trail
    lost: ServerLost | None  # the last loss before this session
    leave: Callable[[], None] | None = None  # called when it is closed

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        return await self.engine.complete(prompt.ids, max_tokens, self.trail)

    async def alive(self) -> None:
        """Ask for a token; raise if the server was lost since this session began."""
        await self.engine.complete([0], 1, Trail(None))
        lost = self.engine._shared.lost
        if lost is not None and lost is not self.lost:
            raise lost

    def close(self) -> None:
        leave, self.leave = self.leave, None
        if leave is not None:
            leave()


class VllmEngine(Engine):
    """The server is started by the first request or weights: then a trainer on the same GPU has its memory already.

    While requests run, call `apply` from another thread than theirs (asyncio.to_thread).
    """

    keeps_weights = True

    def __init__(self, server: Server, stop_ids: frozenset[int], temperature: float = 1.0, timeout_s: float = 300.0):
        """A server without any message for `timeout_s` hangs."""
        self.temperature = temperature
        self.timeout_s = timeout_s
        self._stop_ids = sorted(stop_ids)
        self._shared = Shared(server)

    def at(self, temperature: float) -> VllmEngine:
        """The same model on the same server."""
        other = copy.copy(self)
        other.temperature = temperature
        return other

    @property
    def version(self) -> int:
        return self._shared.version

    @property
    def positions(self) -> int:
        return self._shared.server.context

    @property
    def losses(self) -> list[ServerLost]:
        return self._shared.losses

    def open(self, key: str) -> VllmSession:
        return VllmSession(self, Trail(self._shared.server.mixture), self._shared.lost)

    # Weights

    def apply(self, weights: Weights, caller: asyncio.AbstractEventLoop | None = None) -> None:
        """`caller` is the event loop that waits for this meanwhile, if another thread does it for that loop. The
        tensors are kept by reference."""
        shared = self._shared
        with shared.changing:
            if weights.adapter is not None and not shared.starts:
                shared.server.lora_rank = room_for(weights.adapter["r"])
            line = shared.line
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
        shared = self._shared
        if shared.server.settings.sleep and shared.starts and not shared.asleep:
            shared.asleep = 1 if shared.weights is None or shared.weights.adapter is not None else 2
            with contextlib.suppress(ServerLost):  # the next call will notice
                self._call(f"/sleep?level={shared.asleep}")

    def _call(self, path: str, body: dict[str, str] | None = None) -> None:
        self._shared.server.call(path, body, min(CALL_S, self.timeout_s))

    def _replace(self, weights: Weights, found: ServerLost | None = None, is_paused: bool = False) -> None:
        """Update the server. A dead or hanging one (`found`, or noticed here) is restarted with the weights."""
        shared = self._shared
        try:
            if found is not None:
                raise found
            self._start(for_weights=True)
            self._update(weights)
            if is_paused:
                self._call("/resume")
        except ServerLost as problem:
            if not shared.starts:
                raise
            log.warning(f"{problem}; it is {self._comes_back}, and gets version {weights.version} of the weights")
            shared.weights = weights
            self._restart(shared.starts, problem)
            if is_paused and not shared.server.is_ours:  # it may be the same process
                self._call("/resume")

    @property
    def _comes_back(self) -> str:
        return "started again" if self._shared.server.is_ours else "waited for"

    def _start(self, for_weights: bool = False) -> None:
        """Start or wake up the server. Dropped weights are sent again, unless new weights follow."""
        shared = self._shared
        with shared.changing:
            if not shared.starts:
                shared.server.start()
                dtype = torch.float32 if shared.server.on_cpu else torch.bfloat16
                shared.sender = Sender(shared.server, dtype, self.timeout_s)
                shared.starts = 1
            if not shared.asleep:
                return
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the trainer's memory is the server's now
            try:
                self._call("/wake_up")
                if shared.asleep == 2 and not for_weights:
                    assert shared.weights is not None
                    self._update(shared.weights)
            except ServerLost as problem:
                if for_weights:
                    raise
                log.warning(f"{problem}; it is {self._comes_back}")
                self._restart(shared.starts, problem)
            shared.asleep = 0

    def _restart(self, starts: int, problem: ServerLost) -> None:
        """Once, however many requests found the server lost."""
        shared = self._shared
        with shared.changing:
            if shared.starts != starts:
                return
            assert shared.sender is not None
            problem.server = shared.server.name
            shared.losses.append(problem)
            shared.server.start()
            shared.sender.forget()
            shared.asleep = 0
            shared.adapter = ""
            if shared.weights is not None:
                self._update(shared.weights)
            shared.answered = time.monotonic()
            shared.starts += 1

    def _update(self, weights: Weights) -> None:
        shared = self._shared
        assert shared.sender is not None
        shared.applied += 1
        if weights.adapter is None:
            shared.sender.send(weights)
        else:
            # A new name and path each time: vLLM's prefix cache goes by these.
            folder = shared.sender.adapter(weights, f"adapter-{shared.run}-{shared.applied}")
            about = {"lora_name": folder.name, "lora_path": str(folder)}
            shared.server.call("/v1/load_lora_adapter", about, self.timeout_s)
            if shared.adapter:
                self._call("/v1/unload_lora_adapter", {"lora_name": shared.adapter})
                shared.sender.drop_adapter(shared.adapter)
            shared.adapter = folder.name
        shared.weights = weights
        shared.version = weights.version

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
                if not self._shared.warned:
                    log.warning(f"tokens are trained without the experts that vLLM sent them to: {problem}")
                self._shared.warned = True
            whole.ids.extend(ids)
            whole.logprobs.extend(logprobs)
            whole.versions.extend([version] * len(ids))
            if is_over or len(whole.ids) == wanted:
                return replace(whole, routes=trail.routes)

    async def _answer(self, ids: list[int], max_tokens: int, experts_from: int | None) -> tuple[int, bytes]:
        """The version and answer of one request, sent again for as long as the server can be restarted."""
        shared = self._shared
        line = await self._line()
        while True:
            await line.may_send.wait()
            version = shared.version
            starts = shared.starts
            asked = time.monotonic()
            post = line.loop.create_task(self._post(line, ids, max_tokens, experts_from))
            line.posts.add(post)
            try:
                problem = await self._wait(post, asked)
            finally:
                post.cancel()
                line.posts.discard(post)
            if post.cancelled():  # for new weights
                continue
            if not problem:
                shared.answered = time.monotonic()
                shared.restarts = 0
                return version, post.result()[1]
            await self._mend(line, starts, asked, problem)

    async def _post(self, line: Line, ids: list[int], max_tokens: int, experts_from: int | None) -> Answer:
        shared = self._shared
        about: dict[str, object] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stop_ids": self._stop_ids,
            "salt": f"weights {shared.run} {shared.applied}",
            "adapter": shared.adapter if shared.weights is not None and shared.weights.adapter is not None else "",
        }
        if experts_from is not None:
            about["experts_from"] = experts_from
        body = json.dumps(about).encode() + b"\n" + array("i", ids).tobytes()
        url = shared.server.url
        wire = line.wires.setdefault(url, Wire(url, shared.server.headers))
        return await wire.post(TOKENS, body)

    async def _wait(self, post: asyncio.Task[Answer], asked: float) -> str:
        """Wait for an answer. Returns why the server seems lost, if it does. Slow is not lost while messages come."""
        while not post.done():
            await asyncio.wait({post}, timeout=self.timeout_s)
            silent_s = time.monotonic() - max(asked, self._shared.answered)
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
        raise ModelLost(f"{self._shared.server.name} refused a request with {status}: {said}")

    async def _mend(self, line: Line, starts: int, asked: float, problem: str) -> None:
        """The first request that finds the server lost restarts it; the others wait and are sent again. After too many
        restarts all running requests raise the same error; a later request restarts the server once more."""
        shared = self._shared
        async with line.mending:
            if shared.starts != starts:
                return
            if shared.ended is not None and asked < shared.ended_at:
                raise shared.ended
            how = self._comes_back
            problem = f"{shared.server.name} {problem}"
            if shared.restarts == RESTARTS:
                raise self._give_up(f"{problem}, after it was {how} {RESTARTS} times{shared.server.where_it_talks}")
            await asyncio.sleep(PAUSE_S * shared.restarts)
            shared.restarts += 1
            log.warning(f"{problem}; it is {how}, and gets version {shared.version} of the weights")
            try:
                await asyncio.to_thread(self._restart, starts, ServerLost(problem))
            except OffbookError as error:
                raise self._give_up(f"{problem}, and could not be brought back: {error}") from None

    def _give_up(self, why: str) -> ServerLost:
        shared = self._shared
        shared.restarts = 0
        shared.ended = ServerLost(why)
        shared.ended.server = shared.server.name
        shared.ended_at = time.monotonic()
        return shared.ended

    async def _line(self) -> Line:
        """This event loop's line, once the server is up with the weights that are being applied."""
        shared = self._shared
        loop = asyncio.get_running_loop()
        line = shared.line
        if line is None or line.loop is not loop:
            line = shared.line = Line(loop)
        async with line.mending:
            if not line.is_open or not shared.starts or shared.asleep:
                await asyncio.to_thread(self._open, line)
        return line

    def _open(self, line: Line) -> None:
        with self._shared.changing:
            self._start()
            line.is_open = True
            line.loop.call_soon_threadsafe(line.may_send.set)

    async def aclose(self) -> None:
        shared = self._shared
        if shared.line is not None and shared.line.loop is asyncio.get_running_loop():
            for wire in shared.line.wires.values():
                wire.close()
        shared.line = None
        if shared.adapter and not shared.server.is_ours:  # the next run has one of its own, and this one's files go
            with contextlib.suppress(OffbookError):
                await asyncio.to_thread(self._call, "/v1/unload_lora_adapter", {"lora_name": shared.adapter})
        if shared.sender is not None:
            shared.sender.close()
        await asyncio.to_thread(self._stop)
        shared.starts = 0
        shared.adapter = ""

    def _stop(self) -> None:
        """Also a server that is starting: callers that wait for it get an error."""
        shared = self._shared
        shared.server.is_unwanted = True
        shared.server.stop()
        with shared.changing:
            shared.server.is_unwanted = False


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
