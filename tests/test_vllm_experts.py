"""Experts that vLLM sent tokens to, from its own objects to a rollout's routes.

offbook's part of the server runs as it does in vLLM, behind HTTP. What it imports of vLLM is written here, with names
and shapes as in vLLM 0.24 to 0.33: the request's `routed_experts_prompt_start`, and an answer's `routed_experts`, a row
for each token that was read from there on, in all layers. A tiny mixture, whose first layer is dense, samples.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_ids, tiny_model
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from test_moe import TOP, as_tensor, chosen_by, make
from transformers import PreTrainedModel

from offbook.agent.serve.app import Serving, listen
from offbook.core.config import VllmConfig
from offbook.core.routers import Mixture, mixture_of, routers_of
from offbook.engine import VllmEngine
from offbook.engine.vllm import Server
from offbook.engine.vllm.find import Found
from offbook.engine.vllm.server import INSIDE
from offbook.types import Completion, Prompt


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    flat_logprobs: bool
    detokenize: bool
    output_kind: str
    routed_experts_prompt_start: int = 0


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that runs in vLLM's environment."""
    vllm, inputs, params = ModuleType("vllm"), ModuleType("vllm.inputs"), ModuleType("vllm.sampling_params")
    vllm.SamplingParams = SamplingParams
    inputs.tokens_input = lambda ids, cache_salt: {"prompt_token_ids": ids, "cache_salt": cache_salt}
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    for module in (vllm, inputs, params):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(INSIDE))
    import offbook_tokens

    yield offbook_tokens
    del sys.modules["offbook_tokens"]


Change = Callable[[np.ndarray], np.ndarray | None]


@dataclass
class Client:
    """vLLM's engine: the first of some models answers, until it has been ended early as often as it is to be."""

    models: list[PreTrainedModel]
    ended_after: list[int] = field(default_factory=list)  # tokens, for each model but the last
    change: Change = lambda experts: experts
    asked: list[tuple[int, int]] = field(default_factory=list)  # the prompt's tokens, and the first one asked for

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, name: str, lora_request: object
    ) -> AsyncIterator[Any]:
        prompt_ids, model = prompt["prompt_token_ids"], self.models[0]
        start = params.routed_experts_prompt_start
        self.asked.append((len(prompt_ids), start))
        most = min([params.max_tokens, *self.ended_after[:1]])
        ids, logprobs = list(prompt_ids), []
        while len(ids) < len(prompt_ids) + most:
            with torch.no_grad():
                logp = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            ids.append(int(logp.argmax()))
            logprobs.append(float(logp.max()))
        if is_ended := bool(self.ended_after):
            del self.ended_after[0], self.models[0]
        sampled, all_layers = ids[len(prompt_ids) :], model.config.num_hidden_layers
        experts = None
        if sampled:
            chosen = chosen_by(model, ids)[start:-1].numpy()
            experts = np.zeros((len(chosen), all_layers, TOP), np.uint8)
            experts[:, all_layers - chosen.shape[1] :] = chosen
            experts = self.change(experts)
        flat = SimpleNamespace(start_indices=range(most), token_ids=sampled, logprobs=logprobs)
        output = SimpleNamespace(
            token_ids=sampled, logprobs=flat, finish_reason="abort" if is_ended else "length", routed_experts=experts
        )
        yield SimpleNamespace(prompt_token_ids=prompt_ids, outputs=[output])


Turns = list[tuple[list[int], Completion]]


def written(client: Client, tokens: Any, folder: Path, forgets: int = 0, is_known: bool = True) -> Turns:
    """All tokens at the end of each of two turns of a rollout, and what was returned for it. The second turn's prompt
    lacks the first tokens that it `forgets`; `is_known`: that the model is a mixture."""

    async def main() -> Turns:
        listener = listen()
        app = Starlette(routes=[Route("/health", lambda request: PlainTextResponse(""))])
        app.add_middleware(tokens.Tokens)
        app.state.engine_client = client
        serving, found = Serving(app, listener), []
        settings = VllmConfig(url=f"http://127.0.0.1:{listener.getsockname()[1]}", start_s=20)
        mixture = mixture_of(client.models[0].config) if is_known else None
        server = Server(folder, settings, 200, folder / "log", lambda what, share: None, mixture)
        engine = VllmEngine(server, frozenset({299}))
        session, ids = engine.open("a"), random_ids(random.Random(0), 20)
        for _ in range(2):
            completion = await session.complete(Prompt(list(ids)), 8)
            ids += completion.ids
            found.append((list(ids), completion))
            ids = [*ids[forgets:], 7, 8, 9]
        await engine.aclose()
        await serving.aclose()
        return found

    return asyncio.run(main())


def test_experts_come_back_as_the_local_engine_records_them(tokens: Any, tmp_path: Path) -> None:
    """The second turn asks for what is new alone."""
    client = Client([make()])
    for ids, completion in written(client, tokens, tmp_path):
        assert completion.routes is not None
        assert torch.equal(as_tensor(completion.routes), chosen_by(make(), ids)[:-1])
    assert client.asked == [(20, 0), (31, 27)]


def test_tokens_keep_the_experts_of_the_weights_that_sampled_behind_them(tokens: Any, tmp_path: Path) -> None:
    """Three versions in one message, of which the second samples nothing, and a fourth of the next message."""
    client = Client([make(seed=0), make(seed=1), make(seed=2), make(seed=3)], [3, 0, 5])
    (_, first), (ids, second) = written(client, tokens, tmp_path)
    assert client.asked == [(20, 0), (23, 22), (23, 22), (31, 27)]
    assert len(first.ids) == 8
    assert second.routes is not None
    found = as_tensor(second.routes)
    of = {seed: chosen_by(make(seed=seed), ids)[:-1] for seed in (0, 2, 3)}
    assert torch.equal(found[:22], of[0][:22])
    assert torch.equal(found[22:27], of[2][22:27])
    assert torch.equal(found[27:], of[3][27:])
    assert not torch.equal(found, of[3])


def test_a_context_that_does_not_go_on_is_followed_from_its_first_token(tokens: Any, tmp_path: Path) -> None:
    client = Client([make()])
    _, (ids, completion) = written(client, tokens, tmp_path, forgets=5)
    assert client.asked == [(20, 0), (26, 0)]
    assert completion.routes is not None
    assert torch.equal(as_tensor(completion.routes), chosen_by(make(), ids)[:-1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda experts: None, "none came; it gives them on a GPU, with --enable-return-routed-experts"),
        (lambda experts: experts[1:], r"uint8 (26, 3, 2) came and not whole numbers (27, 3, 2)"),
        (lambda experts: experts[:, 1:], r"uint8 (27, 2, 2) came and not whole numbers (27, 3, 2)"),
        (lambda experts: experts.astype(float), r"float64 (27, 3, 2) came and not whole numbers (27, 3, 2)"),
    ],
)
def test_experts_that_do_not_come_or_cannot_be_right_are_left_out_and_told_of_once(
    change: Change, sentence: str, tokens: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client([make()], change=change)
    turns = written(client, tokens, tmp_path)
    assert [completion.routes for _, completion in turns] == [None, None]
    assert [len(completion.ids) for _, completion in turns] == [8, 8]
    assert caplog.messages == [f"tokens are trained without the experts that vLLM sent them to: {sentence}"]


def test_nobody_asks_for_the_experts_of_a_dense_model(
    tokens: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert mixture_of(tiny_model().config) is None
    turns = written(Client([make()]), tokens, tmp_path, is_known=False)
    assert [completion.routes for _, completion in turns] == [None, None]
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "olmoe", "deepseek"])
def test_layers_with_experts_are_known_from_the_configuration(kind: str) -> None:
    model = make(kind)
    mixture = mixture_of(model.config)
    assert mixture is not None
    assert (len(mixture.layers), mixture.num_layers, mixture.top) == (len(routers_of(model)), 3, TOP)
    assert mixture.layers == ((1, 2) if len(mixture.layers) == 2 else (0, 1, 2))


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_server_is_told_to_return_experts_where_there_are_any(on_cpu: bool, tmp_path: Path) -> None:
    found, option = Found("python", "0.32.0", on_cpu), "--enable-return-routed-experts"
    for mixture in (None, Mixture((1, 2), 3, 2)):
        server = Server(tmp_path, VllmConfig(), 64, tmp_path / "log", lambda what, share: None, mixture)
        assert (option in server.command(found, 8000)) == (mixture is not None and not on_cpu)
