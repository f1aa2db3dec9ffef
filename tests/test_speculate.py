"""Drafts change how fast a message is written, and nothing else about it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from conftest import random_ids, tiny_model
from test_engine_kv import MODES, STOPS, conversations, errors, moe_model, run
from torch import Tensor
from transformers import PreTrainedModel

from offbook.core.draft import DraftHead
from offbook.core.weights import Weights
from offbook.engine import LocalEngine
from offbook.engine.attention import NextTokens
from offbook.engine.local import LocalSession
from offbook.engine.sampling import draw, verify
from offbook.engine.speculate import Drafted
from offbook.types import OffbookError, Prompt


def head_of(model: PreTrainedModel, seed: int = 0) -> DraftHead:
    """One that guesses badly, but not always."""
    torch.manual_seed(seed)
    head = DraftHead(model)
    with torch.no_grad():
        for parameter in head.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
    return head.eval()


def drafting(make: Callable[[], PreTrainedModel] = tiny_model, count: int = 3, **how) -> LocalEngine:
    model = make()
    return LocalEngine(model, STOPS, draft=head_of(model), draft_tokens=count, **how)


def written(engine: LocalEngine) -> list[list[list[int]]]:
    return [[done.ids for _, done in turns] for turns in run(engine, *conversations())]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """In standard deviations of its distribution, of the cells that are expected at all."""
    there = expected > 0
    assert not counts[~there].any()
    freedom = int(there.sum()) - 1
    return float(((counts - expected)[there] ** 2 / expected[there]).sum() - freedom) / (2 * freedom) ** 0.5


def test_kept_and_redrawn_tokens_follow_the_model() -> None:
    rows, depth, size = 400_000, 3, 6
    torch.manual_seed(0)
    logits_WV, q_KV = torch.randn(depth + 1, size) * 2, (torch.randn(depth, size) * 2).softmax(-1)
    q_KV[1, 2], q_KV[1] = 0.0, q_KV[1] / q_KV[1].sum()  # a token that is never drafted
    draft_RK = torch.stack([draw(q_V.expand(rows, -1), torch.rand(rows))[0] for q_V in q_KV], 1)
    random_RW = torch.rand(2, rows, depth + 1)
    found = verify(
        logits_WV.expand(rows, -1, -1), q_KV.expand(rows, -1, -1), draft_RK, random_RW[0, :, :depth], random_RW[1], 0.7
    )
    p_WV = (logits_WV / 0.7).softmax(-1)
    for place in range(depth + 1):
        there_R = found.kept_R >= place
        counts = found.token_RW[there_R, place].bincount(minlength=size)
        assert abs(chi_square(counts, p_WV[place] * there_R.sum())) < 4
        logprob_R = p_WV[place].log()[found.token_RW[there_R, place]]
        assert torch.allclose(found.logprob_RW[there_R, place], logprob_R, atol=1e-5)
    kept = [float((found.kept_R > place).sum() / (found.kept_R >= place).sum()) for place in range(depth)]
    best = torch.minimum(p_WV[:depth], q_KV).sum(-1).tolist()  # no way of drawing both keeps more
    assert kept == pytest.approx(best, abs=0.005)


def test_where_the_draft_is_right_or_broken_nothing_is_lost() -> None:
    logits_RWV = torch.randn(64, 3, 9)
    same = torch.randint(9, (64, 2))
    exact = logits_RWV[:, :2].softmax(-1)
    uniform = torch.rand(64, 3)
    assert verify(logits_RWV, exact, same, uniform[:, :2], uniform, 1.0).kept_R.min() == 2
    broken = verify(logits_RWV, exact * torch.nan, same, uniform[:, :2], uniform, 1.0)
    assert broken.kept_R.max() == 0
    assert broken.token_RW[:, 0].equal(draw(exact[:, 0], uniform[:, 0])[0])


@pytest.mark.parametrize("how", [{}, {"mode": "continuous", "static": True}], ids=str)
def test_messages_have_the_probabilities_that_the_model_gives_them(how: dict) -> None:
    model, size, prompt = tiny_model(vocabulary=10), 10, [1, 3, 0, 4]
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)  # not so sure of itself that few messages are left
    engine = LocalEngine(model, frozenset(), draft=head_of(model), draft_tokens=2, **how)

    async def message(session: LocalSession) -> tuple[int, ...]:
        return tuple((await session.complete(Prompt(prompt), 3)).ids)

    found = Counter(run(engine, *[message] * 4000))
    messages = list(product(range(size), repeat=3))
    with torch.no_grad():
        logp = model(torch.tensor([[*prompt, *one] for one in messages])).logits.log_softmax(-1)
    chances = [logp[:, 3 + place].gather(1, torch.tensor(messages)[:, place, None]) for place in range(3)]
    expected = 4000 * torch.stack(chances).sum(0).exp().view(size, -1).sum(0)  # of those two that are drafted
    counts = torch.tensor([found[one] for one in messages]).view(size, -1).sum(0)
    assert abs(chi_square(counts, expected)) < 4
    looked_at, kept = engine.drafts
    assert 0.1 < kept[0] / looked_at[0] < 0.95


@pytest.mark.parametrize("how", MODES, ids=str)
@pytest.mark.parametrize("make", [tiny_model, lambda: tiny_model("llama"), moe_model], ids=["qwen3", "llama", "moe"])
def test_logprobs_equal_a_full_forward(make: Callable[[], PreTrainedModel], how: dict) -> None:
    engine = drafting(make, temperature=0.8, **how)
    for turns in run(engine, *conversations()):
        assert max(errors(make(), turns, 0.8)) < 1e-5
    assert 0 < engine.drafts[1][0] < engine.drafts[0][0]


@pytest.mark.parametrize("how", MODES, ids=str)
def test_without_chance_the_tokens_are_those_of_plain_decoding(how: dict) -> None:
    plain = run(LocalEngine(tiny_model(), STOPS, temperature=1e-6, **how), *conversations())
    engine = drafting(temperature=1e-6, **how)
    drafted = run(engine, *conversations())
    assert [[done.ids for _, done in turns] for turns in drafted] == [
        [done.ids for _, done in turns] for turns in plain
    ]
    assert engine.drafts[1][0] > 0


def test_little_is_written_behind_the_end_of_a_message() -> None:
    """Between two looks as many tokens as without drafts are written, and not as many steps."""
    model = tiny_model()
    engine = LocalEngine(model, STOPS, draft=head_of(model), draft_tokens=3, mode="continuous", static=True)
    forwards: list[int] = []
    model.base_model.register_forward_hook(lambda *_: forwards.append(1))

    async def message(number: int) -> int:
        session = engine.open(f"alone/{number}")
        return len((await session.complete(Prompt([1, 3, 5, number]), 60)).ids)

    for number in range(20):
        forwards.clear()
        looked_at = engine.drafts[0][0]
        assert asyncio.run(message(number)) > 0
        needed = engine.drafts[0][0] - looked_at  # steps that gave a token to somebody
        assert len(forwards) <= 1 + needed + 1  # the prompt, and at most one step for nobody


def test_the_same_seed_gives_the_same_tokens_in_every_memory() -> None:
    """What the head keeps does not depend on who was read again."""
    roomy, narrow = drafting(), drafting(kv_tokens=3 * 256)
    assert written(roomy) == written(narrow)
    assert narrow.tokens_prefilled > roomy.tokens_prefilled


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_drafts_are_those_of_a_head_that_reads_everything_anew(kind: str, static: bool) -> None:
    """In the first turn and in one that goes on from what was kept, at every depth; what a turn adds is a short reading
    where graphs could be."""
    engine = drafting(lambda: tiny_model(kind).double(), mode="continuous", static=static)
    read = engine.decoder._ends
    short: list[bool] = []
    engine.decoder._ends = lambda *given: (short.append(isinstance(given[2], NextTokens)), read(*given))[1]
    at_work, rng, seen = engine.decoder.drafting, random.Random(0), list[tuple[int, Drafted]]()
    draft = at_work.draft

    def noted(*given) -> Drafted:
        seen.append((int(given[3][0]), draft(*given)))
        return seen[-1][1]

    at_work.draft = noted

    async def turns(session: LocalSession) -> list[tuple[list[int], list[tuple[int, Drafted]]]]:
        ids, done = random_ids(rng, 30), []
        for kept in (None, 25, None):  # the second turn has other tokens from there on
            completion = await session.complete(Prompt(ids), 15)
            ids = [*ids, *completion.ids]
            done.append((ids, [*seen]))
            seen.clear()
            ids = [*ids[:kept], *random_ids(rng, 4)]
        return done

    (done,) = run(engine, turns)
    assert short == [static] * 3
    plain = tiny_model(kind).double()
    head = head_of(plain)
    for ids, drafts in done:
        assert len(drafts) >= 2
        for place, drafted in drafts:  # of the token that is to be read next
            if place >= len(ids):  # written behind the message's end, for nobody
                continue
            with torch.no_grad():
                read = plain.model(torch.tensor([ids[:place]])).last_hidden_state
                following = [*ids[1 : place + 1], *drafted.token_RK[0].tolist()]
                for depth in range(3):
                    embedded = plain.model.embed_tokens(torch.tensor([following[: read.shape[1]]]))
                    state = head(embedded, read, torch.arange(read.shape[1])[None])
                    read = torch.cat([read, state[:, -1:]], dim=1)
                    q_V = plain.lm_head(state[0, -1]).softmax(-1)
                    assert torch.allclose(drafted.q_RKV[0, depth].double(), q_V, atol=1e-5)


def test_a_turn_reads_what_is_new() -> None:
    rng = random.Random(0)
    engine, prompt, more = drafting(count=2), random_ids(rng, 120), random_ids(rng, 10)

    async def turns(session: LocalSession) -> list:
        first = await session.complete(Prompt(prompt), 20)
        before = engine.tokens_prefilled
        await session.complete(Prompt([*prompt, *first.ids, *more]), 5)
        return [before, engine.tokens_prefilled - before]

    ((before, then),) = run(engine, turns)
    assert before == 120
    assert then <= len(more) + 2 + 2  # the last token, which nobody read, what was drafted last, and one once more


def test_new_weights_in_the_middle_of_a_message() -> None:
    engine, old, new = drafting(mode="continuous"), tiny_model(), tiny_model(seed=1)

    async def message(session: LocalSession) -> list:
        loop, prompt = asyncio.get_running_loop(), [3, 1, 4, 1, 5]
        asked = asyncio.ensure_future(session.complete(Prompt(prompt), 200))
        while not session.engine.tokens_sampled:
            await asyncio.sleep(0)
        await loop.run_in_executor(None, engine.apply, Weights(1, new.state_dict()))
        return [(prompt, await asked)]

    engine.stop_ids = engine.decoder.stop_ids = frozenset()
    (((prompt, done),),) = run(engine, message)
    cut = done.versions.index(1)
    assert done.versions == [0] * cut + [1] * (200 - cut)
    for model, part in ((old, slice(cut)), (new, slice(cut, None))):
        ids = torch.tensor([[*prompt, *done.ids]])
        with torch.no_grad():
            logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        assert torch.allclose(torch.tensor(done.logprobs)[part], logp[part, 0], atol=1e-4)


def test_a_head_takes_the_weights_that_come_with_the_models() -> None:
    engine, other = drafting(), head_of(tiny_model(), seed=1)
    own = {f"draft.{name}": tensor for name, tensor in other.state_dict().items()}
    engine.apply(Weights(1, {**tiny_model().state_dict(), **own}, draft={}))
    assert engine.draft is not None
    assert engine.draft.fc.weight.equal(other.fc.weight)
    engine.apply(Weights(2, tiny_model().state_dict()))
    assert engine.draft.fc.weight.equal(other.fc.weight)
    with pytest.raises(OffbookError, match=r"has no draft\.fc\.weight"):
        engine.apply(Weights(3, tiny_model().state_dict(), draft={}))
