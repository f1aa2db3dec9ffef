"""Keys and values that are kept: nothing is read twice, and nothing comes out differently for it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable

import pytest
import torch
from conftest import random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbook.engine import LocalEngine, attention, decode
from offbook.engine.attention import NewTokens, Part, grouped
from offbook.engine.decode import Decoder, KvSlots, Row, plan_fills, sample
from offbook.engine.local import LocalSession, uniforms
from offbook.types import Completion, ModelLost, OffbookError, Prompt, PromptTooLong

STOPS = frozenset({7})
Turn = tuple[list[int], Completion]  # a prompt and what was written to it
MODES = [{}, {"static": True}, {"mode": "continuous"}, {"mode": "continuous", "static": True}]


def moe_model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(vocab_size=300, num_key_value_heads=2, head_dim=12, **shape, **experts)
    return Qwen3MoeForCausalLM(config).eval()


def windowed_model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=300, num_key_value_heads=2, head_dim=12, sliding_window=8, **shape)
    return MistralForCausalLM(config).eval()


def run(engine: LocalEngine, *rollouts: Callable[[LocalSession], Awaitable[list[Turn]]]) -> list[list[Turn]]:
    """Rollouts at once, each with a session of its own."""

    async def one(rollout: Callable[[LocalSession], Awaitable[list[Turn]]], session: LocalSession) -> list[Turn]:
        try:
            return await rollout(session)
        finally:
            session.close()

    async def main() -> list[list[Turn]]:
        sessions = [engine.open(f"rollout {number}") for number in range(len(rollouts))]
        return await asyncio.gather(*map(one, rollouts, sessions))

    return asyncio.run(main())


def conversation(prompt: list[int], turns: int = 4, max_tokens: int = 12, seed: int = 0) -> Callable:
    """A rollout whose tools answer with a few tokens. Its third turn starts a new segment, as a self-summary does."""

    async def rollout(session: LocalSession) -> list[Turn]:
        rng, ids, done = random.Random(f"{prompt} {seed}"), prompt, []
        for turn in range(turns):
            await asyncio.sleep(rng.random() * 0.005)
            completion = await session.complete(Prompt(ids), max_tokens)
            done.append((ids, completion))
            ids = [*ids, *completion.ids, *random_ids(rng, rng.randrange(1, 9))]
            if turn == 1:
                ids = [*prompt[:20], *random_ids(rng, 10)]
        return done

    return rollout


def conversations(count: int = 9) -> list[Callable]:
    """Three groups, all with the same system message."""
    rng = random.Random(0)
    system = random_ids(rng, 24)
    firsts = [[*system, *random_ids(rng, rng.randrange(5, 30))] for _ in range(3)]
    return [conversation(firsts[number % 3], seed=number) for number in range(count)]


def errors(model: PreTrainedModel, turns: list[Turn], temperature: float = 1.0) -> list[float]:
    """Of the engine's log-probabilities against a plain forward."""
    found = []
    for prompt, completion in turns:
        ids = torch.tensor([[*prompt, *completion.ids]])
        with torch.no_grad():
            logp = (model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
        reference = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        found += [abs(a - b) for a, b in zip(completion.logprobs, reference, strict=True)]
    return found


@pytest.mark.parametrize("how", MODES, ids=str)
@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model("llama"), moe_model], ids=["qwen3", "llama", "moe"])
def test_logprobs_equal_a_full_forward(make: Callable[[], PreTrainedModel], how: dict) -> None:
    model = make()
    engine = LocalEngine(make(), STOPS, 0.8, **how)
    for turns in run(engine, *conversations()):
        assert max(errors(model, turns, 0.8)) < 1e-5


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 150)), min_size=1, max_size=7),
    st.sampled_from([(1, 1), (2, 3)]),
    st.sampled_from([0, 2**13, 2**20]),
    st.sampled_from([2**10, 2**26]),
    st.randoms(use_true_random=False),
)
def test_what_rows_add_is_attended_to_grouped(
    sizes: list[tuple[int, int]], heads: tuple[int, int], call: int, mask: int, rng: random.Random
) -> None:
    """As if each row were alone, wherever its place is and however large masks may be."""
    kv_heads, shared = heads
    torch.manual_seed(0)
    held = KvSlots(budget=10_000)
    held.resize(len(sizes) + 2, 0, 256)
    numbers, parts, end = rng.sample(range(len(sizes) + 2), len(sizes)), list[Part](), 0
    for place, (start, count) in zip(numbers, sizes, strict=True):
        parts.append(Part(place, start, end, end := end + count))
    query, key, value = (torch.randn(1, kv_heads * times, end, 8) for times in (shared, 1, 1))
    kept = held.layer(0, key, value)
    for tensor in kept:
        tensor.normal_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CPU_CALL", call)
        patch.setattr(attention, "MASK_ENTRIES", mask)
        found = NewTokens(held, parts, torch.device("cpu")).attend(0, query, key, value, None)[0]
    for part in parts:
        keys, values = (tensor[part.slot, :, : part.upto].repeat_interleave(shared, 0) for tensor in kept)
        seen = torch.ones(part.size, part.upto, dtype=torch.bool).tril(part.start)
        alone = scaled_dot_product_attention(query[0, :, part.begin : part.end], keys, values, attn_mask=seen)
        assert (found[part.begin : part.end].transpose(0, 1) - alone).abs().max() < 1e-5


def test_rows_of_like_size_are_one_call_of_attention() -> None:
    like = [Part(place, 900 + place, 100 * place, 100 * place + 90) for place in range(64)]
    assert len(grouped(like, 3, 192, on_gpu=True)) == 1
    far = [*like, Part(64, 30_000, 6400, 6401)]
    assert len(grouped(far, 3, 192, on_gpu=True)) == 2
    (long,) = grouped([Part(0, 16_384, 0, 4096)], 8, 1024, on_gpu=True)[:1]
    assert len(long) * 8 * long[0].size * long[0].upto <= attention.MASK_ENTRIES


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 16)
    for turns in run(LocalEngine(tiny_model(), STOPS), *conversations()):
        assert max(errors(tiny_model(), turns)) < 1e-5


@pytest.mark.parametrize("how", [*MODES, {"kv_tokens": 600}, {"kv_tokens": 256}], ids=str)
def test_tokens_are_the_same_in_every_mode_and_memory(how: dict) -> None:
    """Where places are short, sessions lose what was kept and read it again."""
    usual = run(LocalEngine(tiny_model(), STOPS), *conversations())
    engine = LocalEngine(tiny_model(), STOPS, **how)
    other = run(engine, *conversations())
    assert [[(ids, it.ids) for ids, it in turns] for turns in usual] == [
        [(ids, it.ids) for ids, it in turns] for turns in other
    ]
    held = engine.decoder.slots
    assert held.count * held.length <= engine.budget
    again = run(LocalEngine(tiny_model(), STOPS, **how), *conversations())
    assert again == other or "mode" in how  # to the last bit


def test_nothing_is_read_twice() -> None:
    """Of the prompts only what is new since a session's last turn, and what a group begins with once."""
    engine = LocalEngine(tiny_model(), frozenset())
    first = random_ids(random.Random(1), 50)

    async def rollout(session: LocalSession) -> list[Turn]:
        ids, done = first, []
        for _ in range(3):
            done.append((ids, await session.complete(Prompt(ids), 5)))
            ids = [*ids, *done[-1][1].ids, 1, 2, 3]
        return done

    run(engine, *[rollout] * 8)
    assert engine.decoder.tokens_prefilled == 50 + 2 * 8 * (1 + 3)  # a last token is not read yet


def test_a_beginning_that_is_being_written_behind_is_shared_too() -> None:
    engine = LocalEngine(tiny_model(), frozenset(), mode="continuous")
    first = random_ids(random.Random(1), 50)

    def after(seconds: float, prompt: list[int]) -> Callable:
        async def rollout(session: LocalSession) -> list[Turn]:
            await asyncio.sleep(seconds)
            return [(prompt, await session.complete(Prompt(prompt), 200))]

        return rollout

    done = run(engine, after(0, first), after(0.05, [*first, 5, 6]))
    assert engine.decoder.tokens_prefilled == 50 + 2
    assert max(errors(tiny_model(), done[1])) < 1e-5


def test_a_closed_session_gives_its_place_back() -> None:
    engine = LocalEngine(tiny_model(), STOPS, kv_tokens=2048)
    for _ in range(3):
        run(engine, *conversations(4))
    assert engine.decoder.slots.count == 4
    engine.decoder.slots.free(engine.closed)
    assert engine.decoder.slots.owners == [None] * 4


def slowed(seconds: float, **how) -> LocalEngine:
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return LocalEngine(model, frozenset(), **how)


@pytest.mark.parametrize("static", [False, True])
def test_whoever_comes_back_writes_where_it_did(static: bool) -> None:
    """While others write on, and with a new one beside it: nothing that is kept moves."""
    decoder = Decoder(tiny_model(), frozenset(), 1.0, 4096, static)

    def row(owner: str, length: int, count: int) -> Row:
        return Row(owner, [(ord(owner) + k) % 61 for k in range(length)], count, uniforms(0, owner, length, count))

    decoder.admit([row(owner, 20, 4 if owner == "c" else 40) for owner in "abcdefghij"], 12)
    while len(decoder.running) == 10:
        decoder.step()
    before = {owner: place for place, owner in enumerate(decoder.slots.owners) if owner}
    decoder.admit([row("k", 20, 40), row("c", 30, 40)], 12)
    now = {owner: place for place, owner in enumerate(decoder.slots.owners) if owner}
    assert now == {**before, "k": now["k"]}
    assert [decoder.rows[now[owner]].owner for owner in "ck"] == ["c", "k"]


@pytest.mark.parametrize("static", [False, True])
def test_a_row_that_moves_for_new_weights_is_read_again(static: bool) -> None:
    """Those that ended leave gaps, which others are moved into."""
    decoder = Decoder(tiny_model(), frozenset(), 1.0, 100_000, static)
    rows = [Row(n, [(7 * n + k) % 61 for k in range(15)], 30 if n else 3, uniforms(0, "", n, 30)) for n in range(4)]
    decoder.admit(rows, 4)
    while not rows[0].over:
        decoder.step()
    new = tiny_model(seed=1)
    decoder.model.load_state_dict(new.state_dict())
    decoder.renew(1)
    while decoder.running:
        decoder.step()
    for row in rows[1:]:
        first = row.versions.index(1)
        with torch.no_grad():
            logp = new(torch.tensor([[*row.prompt_ids, *row.ids]])).logits[0].log_softmax(-1)
        for place in range(first, len(row.ids)):
            expected = logp[len(row.prompt_ids) + place - 1, row.ids[place]].item()
            assert row.logprobs[place] == pytest.approx(expected, abs=1e-4)


def test_in_the_continuous_mode_nobody_waits_for_another() -> None:
    engine = slowed(0.005, mode="continuous", kv_tokens=512)  # two places
    order: list[str] = []

    def rollout(name: str, max_tokens: int, before: float = 0) -> Callable:
        async def one(session: LocalSession) -> list[Turn]:
            await asyncio.sleep(before)
            await session.complete(Prompt([1, 2, 3]), max_tokens)
            order.append(name)
            return []

        return one

    run(engine, rollout("long", 150), rollout("short", 5), rollout("next", 5), rollout("tool", 1, 0.6))
    assert order == ["short", "next", "tool", "long"]


def test_a_session_that_goes_away_and_asks_again_at_once_gets_a_slot_of_its_own() -> None:
    engine = slowed(0.005, mode="continuous")
    prompt = Prompt([*range(20, 40)])

    async def main() -> list[Completion]:
        session, other = engine.open("one"), engine.open("other")
        behind = asyncio.create_task(other.complete(prompt, 30))
        first = asyncio.create_task(session.complete(prompt, 200))
        while engine.decoder.tokens_sampled < 4:
            await asyncio.sleep(0.001)
        first.cancel()
        return await asyncio.gather(session.complete(prompt, 10), session.complete(prompt, 10), behind)

    again, twice, behind = asyncio.run(main())
    assert [len(each.ids) for each in (again, twice, behind)] == [10, 10, 30]


def test_a_prompt_that_outgrows_the_memory_is_told_so() -> None:
    engine = LocalEngine(tiny_model(), STOPS, kv_tokens=64)

    async def rollout(session: LocalSession) -> list[Turn]:
        with pytest.raises(PromptTooLong, match=r"has 64 tokens and the engine's memory holds 64; raise engine.kv_tok"):
            await session.complete(Prompt([1] * 64), 4)
        return [([1] * 60, await session.complete(Prompt([1] * 60), 10))]

    assert len(run(engine, rollout)[0][0][1].ids) <= 4


def model_without_numbers_for(*tokens: int) -> PreTrainedModel:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[list(tokens)] = math.nan
    model.lm_head.weight = torch.nn.Parameter(tiny_model().lm_head.weight.clone())
    return model


@pytest.mark.parametrize("how", MODES, ids=str)
def test_a_token_without_a_finite_probability_ends_the_run(how: dict) -> None:
    """What it left in the KV cache is gone."""
    engine = LocalEngine(model_without_numbers_for(0), frozenset(), **how)

    async def ask(session: LocalSession) -> list[Turn]:
        with pytest.raises(ModelLost, match="log-probability is not finite"):
            await session.complete(Prompt([0] * 40), 20)
        return [([1, 2, 3], await session.complete(Prompt([1, 2, 3]), 1))]

    assert math.isfinite(run(engine, ask)[0][0][1].logprobs[0])


def with_sinks() -> PreTrainedModel:
    shape = {"hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = GptOssConfig(vocab_size=300, num_key_value_heads=2, head_dim=12, **shape, **experts, **rope)
    return GptOssForCausalLM(config).eval()


def stretched() -> PreTrainedModel:
    """Positions that depend on the context's length: rows of other lengths would change how every token is encoded."""
    model = tiny_model("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    return model


@pytest.mark.parametrize("make", [windowed_model, with_sinks, stretched])
def test_models_without_plain_attention_are_refused(make: Callable[[], PreTrainedModel]) -> None:
    with pytest.raises(OffbookError, match=r"layers that are not plain attention.*set engine\.kind to vllm"):
        LocalEngine(make(), STOPS)


def test_the_last_position_of_a_place_is_nobodys_though_nothing_is_asked_for() -> None:
    """A token is drawn in any case, so a prompt alone may not fill its place."""
    engine = LocalEngine(tiny_model(), STOPS)

    async def rollout(session: LocalSession) -> list[Turn]:
        await session.complete(Prompt(random_ids(random.Random(0), 256)), 0)
        return []

    run(engine, rollout)
    assert engine.decoder.slots.length > 256


def test_without_places_the_model_does_what_it_did() -> None:
    ids = torch.tensor([random_ids(random.Random(0), 20)])
    engine = LocalEngine(tiny_model(), STOPS)
    assert torch.equal(engine.model(ids).logits, tiny_model()(ids).logits)


tokens = st.lists(st.integers(0, 1), max_size=40)


@given(st.lists(tokens.map(lambda ids: [*([1] * 20), *ids]), min_size=1, max_size=6), st.lists(tokens, max_size=4))
def test_what_is_planned_fills_every_place(wanted: list[list[int]], before: list[list[int]]) -> None:
    """Played through on lists: what is copied is there by then, and at least one token of each is computed."""
    kept = {place: list(ids) for place, ids in enumerate(before)}
    places = {place * 2: ids for place, ids in enumerate(wanted)}
    now, last_wave = {place: list(ids) for place, ids in kept.items()}, 0
    computed: set[int] = set()
    for fill in plan_fills(places, kept):
        assert fill.wave >= last_wave
        last_wave = fill.wave
        if fill.source is not None:
            assert now[fill.source][: fill.shared] == fill.ids[: fill.shared]
            assert fill.source not in places or fill.source in computed
        else:
            assert kept.get(fill.slot, [])[: fill.shared] == fill.ids[: fill.shared]
            assert fill.shared < len(fill.ids)
        if fill.shared == len(fill.ids):
            assert places[fill.source] == fill.ids
        now[fill.slot] = fill.ids
        computed.add(fill.slot)
    assert {place: now[place] for place in places} == places


def test_a_group_is_copied_from_one() -> None:
    fills = plan_fills({place: [1] * 30 for place in range(8)} | {8: [1] * 20 + [2] * 9}, {})
    assert [(fill.source, fill.shared, fill.wave) for fill in fills] == [(None, 0, 0), *[(0, 30, 1)] * 7, (0, 20, 1)]


def test_sampling_in_float32_is_that_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 5000, generator=generator) * 4
    uniform = torch.rand(500, generator=generator)
    for temperature in (1.0, 0.6):
        token, logprob = sample(logits, uniform, temperature)
        logp = (logits.double() / temperature).log_softmax(-1)
        sums = logp.exp().cumsum(-1)
        reference = torch.searchsorted(sums, uniform.double()[:, None] * sums[:, -1:], right=True)[:, 0]
        assert (token == reference).float().mean() > 0.99  # the others lie on a border
        assert (logprob - logp.gather(1, token[:, None])[:, 0]).abs().max() < 1e-5


def test_no_token_without_probability_is_drawn() -> None:
    logits = torch.full((3, 6), -math.inf)
    logits[:, 2], logits[:, 4] = 1.0, 2.0
    token, logprob = sample(logits, torch.tensor([0.0, 0.5, 1.0]), 1.0)  # as if it had been rounded up
    assert token.tolist() == [2, 4, 4]
    assert logprob.isfinite().all()
    near = torch.tensor([[20.0, 20.001, 3.0]])
    assert sample(near, torch.tensor([0.0001]), 1e-6)[0].tolist() == [1]


def test_which_layers_read_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU layers are compiled, which pays for long prompts, and for short ones, which run from graphs."""
    model, calls = tiny_model(), []
    decoder = Decoder(model, frozenset(), 1.0, 4096, static=True)
    plain = model.base_model.layers[0]._call_impl
    model.base_model.layers[0]._compiled_call_impl = lambda *given, **named: calls.append(1) or plain(*given, **named)

    def compiled_calls(ids: list[int]) -> int:
        before = len(calls)
        decoder.admit([Row(len(ids), ids, 3, uniforms(0, "", 0, 3))], 1)
        return len(calls) - before

    assert compiled_calls([1, 2, 3]) == 1
    assert compiled_calls([2] * 300) == 0
    monkeypatch.setattr("offbook.engine.decode.FUSED_TOKENS", 256)
    assert compiled_calls([3] * 301) == 1


def test_short_prefills_come_in_few_sizes_and_their_padding_is_never_read() -> None:
    model = tiny_model()
    decoder = Decoder(model, frozenset(), 1.0, 8192, static=True)
    sizes, run = [], decoder._run
    decoder._run = lambda work, *size: (sizes.append(size), run(work, *size))[1]  # type: ignore[method-assign]
    rng = random.Random(0)
    begun = [random_ids(rng, count) for count in (90, 200, 31, 150, 4)]
    decoder.admit([Row(number, ids, 1, uniforms(0, "", number, 1)) for number, ids in enumerate(begun)], 8)
    grown = {number: [*begun[number], *random_ids(rng, count)] for number, count in ((1, 3), (3, 60), (4, 64))}
    rows = [Row(number, ids, 1, uniforms(0, "", number, 1)) for number, ids in grown.items()]
    decoder.admit(rows[:2], 8)
    decoder.admit(rows[2:], 8)
    assert sizes == [(8, 256), (2, 64), (2, 64)]
    for row in rows:
        logp_V = model(torch.tensor([row.prompt_ids])).logits[0, -1].log_softmax(-1)
        assert row.logprobs[0] == pytest.approx(logp_V[row.ids[0]].item(), abs=1e-5)
    for slot, ids in enumerate(decoder.slots.ids):  # what is kept is what a prefill of all of it keeps
        if ids:
            other = Decoder(tiny_model(), frozenset(), 1.0, 8192, static=False)
            other.admit([Row(0, [*ids, 1], 1, uniforms(0, "", 0, 1))], 1)
            for layer, pair in decoder.slots.layers.items():
                for mine, theirs in zip(pair, other.slots.layers[layer], strict=True):
                    assert (mine[slot, :, : len(ids)] - theirs[0, :, : len(ids)]).abs().max() < 1e-5
