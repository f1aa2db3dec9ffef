"""Rollouts by vLLM: token ids go in; ids, their processed log-probabilities and versions come out; text never.

Every request is sampled by one policy version from its first token to its last, which is how tokens get their versions
from a server that reports none. New weights while requests run end these early: each returns what it has, of the old
version, and goes on behind that with the new one, its prefix computed anew. Prefixes are salted by the weights, so none
outlives those it was computed with.

A server that died or hangs is started again, is given the current weights and is asked again. Left out: a seed for
each rollout. vLLM would launch a kernel a row and step for it, and still sample other tokens in another batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import time
from array import array
from dataclasses import dataclass, replace

import torch

from offbook.core.weights import Weights
from offbook.engine.base import Engine, Session
from offbook.engine.vllm.experts import Trail
from offbook.engine.vllm.server import CALL_S, Server
from offbook.engine.vllm.state import Answer, Line, Shared
from offbook.engine.vllm.weights import Sender, room_for
from offbook.engine.vllm.wire import Broken, Wire, read_tokens
from offbook.types import Completion, ModelLost, OffbookError, Prompt, PromptTooLong, ServerLost

log = logging.getLogger(__name__)
TOKENS = "/offbook/tokens"  # of inside/offbook_tokens.py
RESTARTS = 2  # in a row, without a message in between
PAUSE_S = 2.0  # before the second: what is lost for a moment may be back by then
LOOK_S = 0.2
LATE_S = 2.0  # for answers to arrive that were ended for new weights


@dataclass(slots=True)
class VllmSession(Session):
    """One rollout's way to the engine."""

    engine: VllmEngine
    trail: Trail
    lost: ServerLost | None  # how the server was last lost when this began

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        """A message of at most `max_tokens`, fewer where the model's positions end before."""
        return await self.engine.complete(prompt.ids, max_tokens, self.trail)

    async def alive(self) -> None:
        """Returns at the next answer, to whomever; raises where the server was lost since this began."""
        await self.engine.answers()
        if (lost := self.engine._shared.lost) is not None and lost is not self.lost:
            raise lost


class VllmEngine(Engine):
    """The server is started by the first that needs it: then a trainer on the same GPU has its memory already.

    `apply` may be called while requests run, but then from another thread than theirs (asyncio.to_thread).
    """

    keeps_weights = True

    def __init__(self, server: Server, stop_ids: frozenset[int], temperature: float = 1.0, timeout_s: float = 300.0):
        """Within `timeout_s` some message has to come, or the server hangs."""
        self.temperature, self.timeout_s = temperature, timeout_s
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
        """Of the server, which came back each time."""
        return self._shared.losses

    def open(self, key: str) -> VllmSession:
        return VllmSession(self, Trail(self._shared.server.mixture), self._shared.lost)

    # Weights

    def apply(self, weights: Weights, caller: asyncio.AbstractEventLoop | None = None) -> None:
        """Tokens sampled from now on are of these weights and carry their version. They are kept by reference.
        `caller` is the event loop that waits for this meanwhile, if another thread does it for that."""
        shared = self._shared
        if weights.adapter is not None and not shared.starts:
            shared.server.lora_rank = room_for(weights.adapter["r"])
        with shared.gate:
            line, is_held = shared.line, shared.line is not None and shared.line.loop is (caller or running_loop())
            if line is not None and is_held and line.posts:
                raise RuntimeError("requests run in this event loop: apply new weights with asyncio.to_thread")
            shared.replacing += 1
        try:
            if line is None or is_held or not line.loop.is_running():
                self._replace(weights)
            else:
                problem = asyncio.run_coroutine_threadsafe(self._halt(line), line.loop).result()
                self._replace(weights, problem, is_paused=True)
        finally:
            self._reopen()

    def _reopen(self) -> None:
        """The line that there is by now: one that was made meanwhile has waited."""
        shared = self._shared
        with shared.gate:
            shared.replacing -= 1
            if shared.line is not None and not shared.replacing and not shared.line.loop.is_closed():
                shared.line.loop.call_soon_threadsafe(shared.line.may_send.set)

    def pause(self) -> None:
        """Gives the GPU's memory back until the next `apply` or message. Nothing must be on its way."""
        shared = self._shared
        if shared.server.settings.sleep and shared.starts and not shared.asleep:
            shared.asleep = 1 if shared.weights is None or shared.weights.adapter is not None else 2
            with contextlib.suppress(ServerLost):  # whoever wakes it up will see
                self._call(f"/sleep?level={shared.asleep}")

    def _call(self, path: str, body: dict[str, str] | None = None) -> None:
        self._shared.server.call(path, body, min(CALL_S, self.timeout_s))

    def _replace(self, weights: Weights, found: ServerLost | None = None, is_paused: bool = False) -> None:
        """In a server that runs, or that is started for it: one that died or hangs, as was `found` or is now, comes
        back with them."""
        shared = self._shared
        with shared.changing:
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
                if is_paused and not shared.server.is_ours:  # it may be the same one
                    self._call("/resume")

    @property
    def _comes_back(self) -> str:
        return "started again" if self._shared.server.is_ours else "waited for"

    def _start(self, for_weights: bool = False) -> None:
        """Up and awake. What a sleeping server has forgotten is sent again, unless other weights follow."""
        shared = self._shared
        with shared.changing:
            if not shared.starts:
                shared.server.start()
                dtype = torch.float32 if shared.server.on_cpu else torch.bfloat16
                shared.sender = Sender(shared.server, dtype, self.timeout_s)
                shared.starts = 1
            if shared.asleep:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # what the trainer's steps needed is the server's now
                try:
                    self._call("/wake_up")
                    if shared.asleep == 2 and not for_weights:
                        assert shared.weights is not None
                        self._update(shared.weights)
                except ServerLost as problem:
                    if for_weights:  # it is started again for these
                        raise
                    log.warning(f"{problem}; it is {self._comes_back}")
                    self._restart(shared.starts, problem)
                shared.asleep = 0

    def _restart(self, starts: int, problem: ServerLost) -> None:
        """Once, however many found it lost."""
        shared = self._shared
        with shared.changing:
            if shared.starts != starts:
                return
            assert shared.sender is not None
            shared.lost, problem.server = problem, shared.server.name
            shared.losses.append(problem)
            shared.server.start()
            shared.sender.forget()
            shared.asleep, shared.adapter = 0, ""
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
            self._load_adapter(shared.sender, weights)
        shared.weights, shared.version = weights, weights.version

    def _load_adapter(self, sender: Sender, weights: Weights) -> None:
        """A new name and path each time, loaded before the old one goes: vLLM answers 200 when it is in."""
        shared = self._shared
        folder = sender.adapter(weights, f"adapter-{shared.named}-{shared.applied}")
        shared.server.call(
            "/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)}, self.timeout_s
        )
        if shared.adapter:
            self._call("/v1/unload_lora_adapter", {"lora_name": shared.adapter})
            sender.drop_adapter(shared.adapter)
        shared.adapter = folder.name

    async def _halt(self, line: Line) -> ServerLost | None:
        """No request is on its way when this returns, so none is sampled by two versions.

        The server ends those it works on and returns what they have. One that has not come back then had not begun,
        or its answer is lost: it is given up and sent again. A server that does not even do that has to be started
        again.
        """
        line.may_send.clear()
        if not line.posts:
            return None
        problem = None
        try:
            await asyncio.to_thread(self._call, "/pause?mode=abort&clear_cache=false")
        except ServerLost as lost:
            problem = lost
        _, late = await asyncio.wait(line.posts, timeout=LATE_S) if line.posts else ((), ())
        for post in late:
            post.cancel()
        if late:
            await asyncio.wait(late)
        return problem

    # Messages

    async def complete(self, prompt_ids: list[int], max_tokens: int, trail: Trail) -> Completion:
        room = self.positions - len(prompt_ids)
        if room <= 0:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens and vLLM was started for {self.positions} (harness.context)"
            )
        wanted = min(max_tokens, room)
        whole = Completion([], [], [])
        while True:
            so_far = [*prompt_ids, *whole.ids]
            version, answer = await self._answer(so_far, wanted - len(whole.ids), trail.first_unknown(so_far))
            ids, logprobs, experts, is_over = read_tokens(answer, wanted - len(whole.ids))
            self._follow(trail, so_far, ids, experts)
            whole.ids.extend(ids)
            whole.logprobs.extend(logprobs)
            whole.versions.extend([version] * len(ids))
            if is_over or len(whole.ids) == wanted:
                return replace(whole, routes=trail.routes)

    def _follow(self, trail: Trail, prompt_ids: list[int], sampled: list[int], experts: bytes) -> None:
        try:
            trail.add(prompt_ids, sampled, experts)
        except ValueError as problem:
            if not self._shared.told:
                log.warning(f"tokens are trained without the experts that vLLM sent them to: {problem}")
            self._shared.told = True

    async def _answer(self, ids: list[int], max_tokens: int, experts_from: int | None) -> tuple[int, bytes]:
        """Of one request, by one version. Asked again for as long as the server can be brought back."""
        shared = self._shared
        line = await self._line()
        while True:
            await line.may_send.wait()
            version, starts, given_up = shared.version, shared.starts, shared.given_up
            post = line.loop.create_task(self._post(line, ids, max_tokens, experts_from))
            line.posts.add(post)
            try:
                problem = await self._wait(post)
            finally:
                post.cancel()
                line.posts.discard(post)
            if post.cancelled():  # for new weights
                continue
            if not problem:
                shared.answered, shared.restarts = time.monotonic(), 0
                return version, post.result()[1]
            await self._mend(line, starts, given_up, problem)

    async def answers(self) -> None:
        """Anybody. Where nobody else waits, this asks for a token; where the server hangs, it is brought back."""
        before, asked = self._shared.answered, asyncio.ensure_future(self._answer([0], 1, None))
        try:
            while not asked.done() and self._shared.answered == before:
                await asyncio.wait({asked}, timeout=LOOK_S)
            if asked.done():
                asked.result()
        finally:
            asked.cancel()

    async def _post(self, line: Line, ids: list[int], max_tokens: int, experts_from: int | None) -> Answer:
        shared = self._shared
        has_adapter = shared.weights is not None and shared.weights.adapter is not None
        about: dict[str, object] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stop_ids": self._stop_ids,
            "salt": f"weights {shared.named} {shared.applied}",
            "adapter": shared.adapter if has_adapter else "",
        }
        about |= {} if experts_from is None else {"experts_from": experts_from}
        body = json.dumps(about).encode() + b"\n" + array("i", ids).tobytes()
        url = shared.server.url
        wire = line.wires.get(url) or line.wires.setdefault(url, Wire(url, shared.server.headers))
        return await wire.post(TOKENS, body)

    async def _wait(self, post: asyncio.Task[Answer]) -> str:
        """For an answer that can be read; or what is wrong with the server. Slow is not wrong while messages come."""
        asked = time.monotonic()
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

    async def _mend(self, line: Line, starts: int, given_up: int, problem: str) -> None:
        """The first that finds the server lost brings it back; the others wait for it and are sent again."""
        shared = self._shared
        async with line.mending:
            if shared.starts != starts:
                return
            if shared.given_up != given_up and shared.ended is not None:
                raise shared.ended
            how, problem = self._comes_back, f"{shared.server.name} {problem}"
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
        """Whoever asks after this has it brought back once more."""
        shared = self._shared
        shared.restarts, shared.given_up, shared.ended = 0, shared.given_up + 1, ServerLost(why)
        shared.ended.server = shared.server.name
        return shared.ended

    async def _line(self) -> Line:
        shared, loop = self._shared, asyncio.get_running_loop()
        with shared.gate:
            if shared.line is None or shared.line.loop is not loop:
                shared.line = Line(loop)
                if not shared.replacing:
                    shared.line.may_send.set()
        if not shared.starts or shared.asleep:
            async with shared.line.mending:
                await asyncio.to_thread(self._start)
        return shared.line

    async def aclose(self) -> None:
        shared = self._shared
        if shared.line is not None and shared.line.loop is asyncio.get_running_loop():
            shared.line.close()
        shared.line = None
        if shared.adapter and not shared.server.is_ours:  # the next run's come beside it, and its files go
            with contextlib.suppress(OffbookError):
                await asyncio.to_thread(self._call, "/v1/unload_lora_adapter", {"lora_name": shared.adapter})
        if shared.sender is not None:
            shared.sender.close()
        await asyncio.to_thread(self._stop)
        shared.starts, shared.adapter = 0, ""

    def _stop(self) -> None:
        """Also one that is coming up: whoever waits for that is told, and nothing starts it meanwhile."""
        shared = self._shared
        shared.server.is_unwanted = True
        shared.server.stop()
        with shared.changing:
            shared.server.is_unwanted = False


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
