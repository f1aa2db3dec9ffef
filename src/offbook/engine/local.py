"""The local engine: many rollouts in flight on one transformers model.

In lockstep a batch is decoded when every open session waits for one. Which rollouts share a batch then depends on
nothing but the rollouts themselves, and each draws from random numbers of its own: the same seed gives the same tokens
however long the sandboxes took. The price is that all wait for the slowest tool call of a turn. New weights go in
between two batches, so that a message is of one version, and a rollout of as many as came while it was open.

In the continuous mode rollouts do not wait for each other: a request joins the batch between two steps and leaves when
its message ends. New weights go in between two steps as well. Rows that are being written then read all of
their tokens again with the new weights: each token has the version of the weights that drew it, and the probability
that a forward of those weights gives it after all tokens before it, whichever version drew those.

Either way keys and values are kept for a session from turn to turn until it is closed, new weights come, or others need
the room: a turn reads only what is new, and what rollouts begin with in common is read once. In lockstep who loses what
depends on the rollouts alone, too.

Whatever touches the weights runs in one thread of the engine's own, one thing after another, so the event loop goes on
while the model writes: sandboxes are read, deadlines fire, displays move.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbook.core.adapters import adapter_tensors
from offbook.core.weights import Weights
from offbook.engine.base import Engine, Session
from offbook.engine.decode import STEPS, Decoder, Row
from offbook.types import Completion, ModelHung, ModelLost, OffbookError, Prompt, PromptTooLong, Routes

T = TypeVar("T")
Mode = Literal["lockstep", "continuous"]
CPU_TOKENS = 131_072  # a fixed number: batches are the same on every machine
FREE_SHARE = 0.25  # of a GPU's memory; the trainer's states and activations are still to come
LOOK_S = 0.2
ROPE_BY_LENGTH = ("dynamic", "longrope")  # a position's encoding depends on the longest row of the forward
BELOW_ONE = 1 - 2**-24  # the largest float32 under 1: a double may round up to it


@dataclass(slots=True, eq=False)
class _Request:
    key: str
    row: Row
    done: asyncio.Future[Completion]
    heard: Callable[[list[int]], None] | None = None


@dataclass(slots=True, eq=False)
class LocalSession(Session):
    """One rollout's way to the engine. `key` orders it in a batch and seeds its random numbers."""

    engine: LocalEngine
    key: str
    turn: int = 0
    fed: list[int] = field(default_factory=list)  # by its messages so far
    routes: Routes | None = None  # of what was fed

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        """A message of at most `max_tokens`, fewer where the model's positions end before."""
        engine = self.engine
        length = len(prompt.ids)
        room = engine.positions - length
        if room <= 0:
            held = f"the model has {engine.positions} positions"
            if engine.positions == engine.budget:
                held = f"the engine's memory holds {engine.budget}; raise engine.kv_tokens"
            raise PromptTooLong(f"the prompt has {length} tokens and {held}")
        count = min(max_tokens, room)
        row = Row(self, prompt.ids, count, uniforms(engine.seed, self.key, self.turn, count))
        if prompt.ids[: len(self.fed)] == self.fed:
            row.routes = self.routes
        request = _Request(self.key, row, asyncio.get_running_loop().create_future(), prompt.heard)
        self.turn += 1
        engine.waiting.append(request)
        engine.decode_if_due()
        try:
            completion = await request.done
            self.fed = row.fed
            self.routes = row.routes
            return completion
        finally:
            row.abandoned = True
            if request in engine.waiting:  # the rollout ran out of time while it waited
                engine.waiting.remove(request)

    async def alive(self) -> None:
        await self.engine.alive()

    def close(self) -> None:
        self.engine.closed.append(self)
        self.engine.open_sessions -= 1
        self.engine.decode_if_due()


@dataclass
class LocalEngine(Engine):
    """`version` is the policy version of the weights now in `model`. A message ends with any of `stop_ids`.

    `kv_tokens` is how many tokens' keys and values are held at most; rows that do not fit wait. `static` is how a GPU
    decodes (offbook.engine.decode), and can be asked for elsewhere. `context` is what a rollout may grow to, for the
    advice where `kv_tokens` are too few; 0 is not known.
    A model that reads and writes nothing for `deadline_s` while it is asked is lost.
    """

    model: PreTrainedModel
    stop_ids: frozenset[int]
    temperature: float = 1.0
    kv_tokens: int = 0
    seed: int = 0
    mode: Mode = "lockstep"
    version: int = 0
    static: bool | None = None
    context: int = 0
    deadline_s: float = 7200.0
    hung: ModelHung | None = None  # raised by every request until the model answers again
    waiting: list[_Request] = field(default_factory=list)
    closed: list[LocalSession] = field(default_factory=list)
    open_sessions: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "decode"), repr=False)
    _decoding: asyncio.Task[None] | None = field(default=None, repr=False)
    _torn: bool = False  # some of the weights are new and some are old
    _read_s: float = 0.0
    _write_s: float = 0.0

    def __post_init__(self) -> None:
        self.budget = self.kv_tokens or _free_tokens(self.model)
        static = self.model.device.type == "cuda" if self.static is None else self.static
        if not has_plain_attention(self.model):
            raise OffbookError(
                f"{self.model.config.model_type} has layers that are not plain attention, which the local engine cannot"
                " decode; set engine.kind to vllm"
            )
        self.decoder = Decoder(self.model, self.stop_ids, self.temperature, self.budget, static)
        self.decoder.longest = min(self.context, self.model.config.get_text_config().max_position_embeddings)
        self.decoder.version = self.version

    @property
    def positions(self) -> int:
        positions: int = self.model.config.get_text_config().max_position_embeddings
        return min(positions, self.budget)

    @property
    def counters(self) -> dict[str, float]:
        """Prompt tokens that were computed, seconds spent on prompts and on decoding."""
        return {
            "prefill_tokens": self.decoder.tokens_prefilled,
            "engine/read_s": self._read_s,
            "engine/write_s": self._write_s,
        }

    @property
    def kv_load(self) -> float:
        return sum(map(len, self.decoder.slots.ids)) / self.budget

    def open(self, key: str) -> LocalSession:
        """In lockstep, open all sessions of a batch before the first one asks, or the first is decoded alone."""
        self.open_sessions += 1
        return LocalSession(self, key)

    def apply(self, weights: Weights) -> None:
        """Swap them in place; tokens sampled from now on carry their version. Waits for a batch in the making, or in
        the continuous mode for the steps that are.

        What can be wrong with them is found before anything is written, while the old ones go on. Should the writing
        itself fail, nothing is sampled from the half of it: applied again, they are written from the start.
        """
        own = self.model.state_dict() if weights.adapter is None else adapter_tensors(self.model)
        for name, tensor in own.items():
            found = weights.like.get(name)
            if found is None or found.shape != tensor.shape:
                theirs = "no" if found is None else f"the shape {list(found.shape)} of"
                ours = f"which is {list(tensor.shape)} here; publish the weights of this model"
                raise OffbookError(f"version {weights.version} of the weights has {theirs} {name}, {ours}")
        work = self._submit(partial(self._swap, own, weights))
        try:
            work.result(self.deadline_s)
        except TimeoutError:
            work.cancel()
            raise ModelHung(f"the model hangs: it has not taken version {weights.version} of the weights") from None

    @torch.no_grad()
    def _swap(self, own: dict[str, Tensor], weights: Weights) -> None:
        self._torn = True
        for name, tensor in own.items():
            tensor.copy_(weights.tensors[name])
        self._torn = False
        self.version = weights.version
        self.decoder.renew(weights.version)

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """To the engine's thread. torch counts OpenMP threads per thread: the caller's number is taken along."""
        num_threads = torch.get_num_threads()

        def run() -> T:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            try:
                return job()
            except Exception:
                self.decoder.reset()  # the next request finds no half-written slots
                raise

        return self._thread.submit(run)

    async def _done(self, job: Callable[[], T]) -> T:
        """In the engine's thread. If that hangs, later jobs time out in the same way."""
        work = asyncio.wrap_future(self._submit(job))
        try:
            while not work.done():
                signs = self._signs
                await asyncio.wait({work}, timeout=self.deadline_s)
                if not work.done() and self._signs == signs:
                    self.hung = ModelHung(f"the model has not written for {self.deadline_s:.0f} s (loop.deadline_s)")
                    raise self.hung
        finally:
            work.cancel()
        self.hung = None
        return work.result()

    @property
    def _signs(self) -> tuple[int, int]:
        """Of life."""
        return self.decoder.tokens_sampled, self.decoder.tokens_prefilled

    async def alive(self) -> None:
        """Returns at the next sign of life, or at once where the model is not asked; raises where there is none."""
        decoding = self._decoding
        signs = self._signs
        while decoding is not None and self._decoding is decoding and self._signs == signs:
            await asyncio.sleep(LOOK_S)
        if self.hung:
            raise self.hung

    def decode_if_due(self) -> None:
        if self._decoding or not self._asking():
            return
        if self.mode == "lockstep" and len(self._asking()) < self.open_sessions:
            return
        self._decoding = asyncio.get_running_loop().create_task(self._serve())

    def _asking(self) -> list[_Request]:
        return [request for request in self.waiting if not request.done.done()]

    async def _serve(self) -> None:
        """Write messages until no request is left. In the continuous mode new requests join.

        Every request gets its completion, the error that stopped the decoding, or a cancellation.
        """
        asked: list[_Request] = []
        is_first = True
        try:
            while True:
                closed: list[LocalSession] = []
                if is_first or self.mode == "continuous":
                    asked += sorted(self._asking(), key=lambda request: (len(request.row.prompt_ids), request.key))
                    closed = self.closed
                    self.waiting = []
                    self.closed = []
                    is_first = False
                if not asked:
                    return
                rows = [request.row for request in asked]
                await self._done(partial(self._go_on, rows, closed, self.open_sessions))
                for request in asked:
                    row = request.row
                    if row.over and not request.done.done():
                        request.done.set_result(Completion(row.ids, row.logprobs, row.versions, routes=row.routes))
                    elif request.heard and row.ids and not row.abandoned and not row.over:
                        request.heard([*row.ids])
                asked[:] = [request for request in asked if not request.row.over]
        except Exception as error:  # every rollout that waits for the batch gets it
            lost = _lost(error)
            for request in asked:
                if not request.done.done():
                    request.done.set_exception(lost)
                    request.done.exception()  # the first rollout that gets it ends the others: theirs is not unread
        finally:
            for request in asked:
                request.done.cancel()
                request.row.abandoned = True
            self._decoding = None
            self.decode_if_due()

    def _go_on(self, rows: list[Row], closed: list[LocalSession], wished: int) -> None:
        """Admit the rows that fit and write: a few steps in the continuous mode, in lockstep to the end of all."""
        decoder = self.decoder
        if self._torn:
            raise RuntimeError("new weights were put in halfway; apply them again")
        if not {row for row in rows if row.ids} <= {*decoder.running}:
            raise RuntimeError("what was being written is lost with the weights that could not be put in")
        new = [row for row in rows if not row.ids]
        for row in new:
            row.over = row.abandoned
        new = [row for row in new if not row.over]
        began = time.monotonic()
        decoder.admit(new, wished, closed)
        read = time.monotonic()
        self._read_s += read - began
        steps = 0
        while decoder.running:
            if self.mode == "continuous" and (
                steps == (1 if decoder.static else STEPS) or any(row.over for row in rows)
            ):
                break
            decoder.step()
            steps += 1
        self._write_s += time.monotonic() - read


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Whether every layer is full causal attention (no windows, recurrent states, soft caps, sinks), and the encoding
    of a position does not depend on other tokens."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    is_plain = set(kinds) == {"full_attention"} if kinds else not getattr(config, "sliding_window", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    is_capped = getattr(config, "attn_logit_softcapping", None)
    is_other = (
        is_capped or rope in ROPE_BY_LENGTH or any(name.endswith("sinks") for name, _ in model.named_parameters())
    )
    return bool(is_plain and model._supports_attention_backend and not is_other)


def uniforms(seed: int, key: str, turn: int, count: int) -> Tensor:
    """The random numbers of a message, one per token: they do not depend on the other rows of a batch."""
    digest = hashlib.blake2b(f"{seed}/{key}/{turn}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.rand(count, generator=generator, dtype=torch.float64).float().clamp_(max=BELOW_ONE)


def _free_tokens(model: PreTrainedModel) -> int:
    """The default of `engine.kv_tokens`."""
    if model.device.type != "cuda":
        return CPU_TOKENS
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return max(1, int(torch.cuda.mem_get_info(model.device)[0] * FREE_SHARE) // token_bytes)


def _lost(error: Exception) -> ModelLost:
    """No rollout's fault: a model that cannot write now will not write for the next one."""
    if isinstance(error, ModelLost):
        return error
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    advice = ""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in said:
        advice = "; lower engine.kv_tokens or harness.context"
    lost = ModelLost(f"the model stopped writing: {type(error).__name__}: {said}{advice}")
    lost.__cause__ = error
    return lost
