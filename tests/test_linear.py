"""Low precision: what formats make of numbers, what of a batch a row's result depends on, and training in each kind."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import TEACHERS, in_bfloat16, interpreted, random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_branches import sample_with_branches
from test_moe import make as make_moe
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import Llama4ForCausalLM, Llama4TextConfig

from offbook.core.config import ConfigError, LinearConfig, LoraConfig, TrainConfig, load_config
from offbook.core.routers import routers_of
from offbook.engine import LocalEngine
from offbook.engine.subprocess_engine import ApartEngine
from offbook.rl.plan import Device, make_plan
from offbook.train.attention import Packed
from offbook.train.lora import make_trainable
from offbook.train.memory import Way, shapes_of, step_parts
from offbook.train.precision import compute_linears, experts_of, plainly, refuse_lacking
from offbook.train.precision.experts import LowExperts, fp8_grouped, low_class
from offbook.train.precision.formats import E2M1, E4M3, Grid, approximate_division, e8m0, ieee_division, mxfp8, nvfp4
from offbook.train.precision.fp8 import fp8_linear, quantize
from offbook.train.precision.layers import LowLinear, mxfp8_product
from offbook.train.teachers import sharing_copy
from offbook.train.trainer import Trainer, _asks, weights_of
from offbook.types import Distill, OffbookError, Prompt, Sample

FP8, TOKEN, TENSOR, APPROXIMATE = (
    LinearConfig(kind="fp8"),
    LinearConfig(kind="nvfp4"),
    LinearConfig(kind="nvfp4", scale="tensor"),
    LinearConfig(kind="nvfp4", division="approximate"),
)
LOW = {"fp8": FP8, "token": TOKEN, "tensor": TENSOR, "approximate": APPROXIMATE}
SUBNORMAL = 1e-38  # scales of such numbers lose bits, or are zero
NUMBERS = st.floats(-1e6, 1e6, width=32)
ROWS = st.integers(1, 70).flatmap(lambda size: st.lists(NUMBERS, min_size=size, max_size=size))


def fp8_product(a_NK: Tensor, b_MK: Tensor) -> Tensor:
    return fp8_linear(a_NK, b_MK, *quantize(a_NK))


def reference(x: float, grid: Grid) -> float:
    """The nearest of all numbers that the grid has; of two the one with an even mantissa."""
    per_power = 2**grid.mantissa
    numbers, power = [grid.least * step / per_power for step in range(per_power)], grid.least
    while power <= grid.largest:
        numbers += [power * (1 + step / per_power) for step in range(per_power)]
        power *= 2
    numbers = [number for number in numbers if number <= grid.largest]
    nearest = min(range(len(numbers)), key=lambda place: (abs(Fraction(abs(x)) - Fraction(numbers[place])), place % 2))
    return math.copysign(numbers[nearest], x)


@given(NUMBERS)
def test_grids_round_to_the_nearest_and_ties_to_even(x: float) -> None:
    for grid in (E2M1, E4M3):
        for number in (x, x / 1e4, x / 1e8):
            tensor = torch.tensor([number])
            found = grid.rounded(tensor)
            assert float(found) == reference(float(tensor), grid)
            assert torch.equal(grid.rounded(found), found)
    torchs = torch.tensor([x]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(E4M3.rounded(torch.tensor([x])), torchs)


def test_grids_by_hand() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 100.0])
    assert E2M1.rounded(halves).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0]
    assert E4M3.rounded(torch.tensor([17.0, 19.0, 2.0**-10, 1.5 * 2**-9, 460.0])).tolist() == [16, 20, 0, 2**-8, 448]
    assert e8m0(torch.tensor([1.0, 1.1, 2.0, 0.3, 0.0])).tolist() == [1.0, 2.0, 2.0, 0.5, 2.0**-126]


def test_nvfp4_by_hand() -> None:
    """The largest is 2688 = 6 * 448, so that the scale above is 1. In the second block, of largest 10, the scale is
    E4M3(10 / 6) = 1.625; 10 is clipped to 6 of it, 4 becomes 2 of it, and 0.3 nothing."""
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 16], row[0, 17], row[0, 18] = 2688.0, 10.0, 4.0, 0.3
    found = nvfp4(row, "token")
    assert found[0, [0, 16, 17, 18]].tolist() == [2688.0, 9.75, 3.25, 0.0]


def test_mxfp8_by_hand() -> None:
    """Of largest 500 the scale is 2, so that nothing is clipped: 250 lies between 240 and 256, and 8.5 in the middle of
    8 and 9."""
    assert mxfp8(torch.tensor([[500.0, 17.0, 1.0]])).tolist() == [[512.0, 16.0, 1.0]]


@given(ROWS)
def test_blocks_keep_sizes_signs_and_bounds(row: list[float]) -> None:
    x = torch.tensor([row])
    largest = float(x.abs().max())
    for found, step in ((nvfp4(x, "token"), 1 / 4), (mxfp8(x), 1 / 16)):
        assert found.shape == x.shape
        assert bool(((found == 0) | (found.sign() == x.sign())).all())
        assert bool(found.isfinite().all())
        assert float((found - x).abs().max()) <= step * largest + SUBNORMAL
    assert torch.equal(mxfp8(mxfp8(x)), mxfp8(x))
    once = nvfp4(x, "token")
    of_blocks = nn.functional.pad(x, (0, -len(row) % 16)).view(-1, 16).abs().amax(1).tolist()
    if all(block == 0 or block > max(of_blocks) / 2**14 for block in of_blocks):  # their scales have all their bits
        assert torch.allclose(nvfp4(once, "token"), once, rtol=1e-5, atol=SUBNORMAL)


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    assert not nvfp4(torch.zeros(2, 40), "tensor").any()
    assert not mxfp8(torch.zeros(2, 40)).any()
    assert not fp8_product(torch.zeros(2, 40), torch.ones(3, 40)).any()
    for broken in (math.nan, math.inf):
        x = torch.ones(2, 20)
        x[0, 3] = broken
        assert nvfp4(x, "token").isfinite().all(1).tolist() == [False, True]
        assert not nvfp4(x, "tensor").isfinite().any()
        assert mxfp8(x)[0, :3].isnan().all()
        assert fp8_product(x, torch.ones(3, 20)).isfinite().all(1).tolist() == [False, True]


def test_approximate_division_may_end_on_the_other_side() -> None:
    """Quotients of 2.5, in the middle of 2 and 3: rounded once they go to the even one, 2. Some become 3."""
    by = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 0.5
    by = by.bfloat16().float()  # so that 2.5 times as much is exact
    middle = 2.5 * by
    exact, moved = (E2M1.rounded(divide(middle, by)) for divide in (ieee_division, approximate_division))
    assert bool((exact == 2).all())
    assert 0.01 < float((moved == 3).float().mean()) < 0.5


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70))
def test_products_are_near_the_plain_one_in_all_sizes(rows: int, columns: int, inner: int) -> None:
    rng = torch.Generator().manual_seed(rows * columns * inner)
    a, b = torch.randn(rows, inner, generator=rng), torch.randn(columns, inner, generator=rng)
    most = a.norm(dim=1)[:, None] * b.norm(dim=1)
    for product in (fp8_product, mxfp8_product):
        assert bool(((product(a, b) - a @ b.t()).abs() <= 0.13 * most + 1e-6).all())


def linear(settings: LinearConfig, inner: int = 40, outer: int = 24) -> LowLinear:
    torch.manual_seed(0)
    layer = nn.Linear(inner, outer)
    layer.__class__, layer.settings = LowLinear, settings
    return layer


@pytest.mark.parametrize("kind", LOW)
def test_a_row_depends_on_the_other_rows_by_a_scale_of_the_tensor_alone(kind: str) -> None:
    """Sampling and training see a token in different batches: this is the whole difference between the two scales."""
    layer = linear(LOW[kind])
    row, others = torch.randn(1, 40), 50 * torch.randn(7, 40)
    alone, among = layer(row)[0], layer(torch.cat([row, others]))[0]
    if kind == "tensor":
        assert float((alone - among).detach().norm() / alone.detach().norm()) > 0.05
    else:
        assert torch.allclose(alone, among, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", LOW)
def test_gradients_are_near_those_of_the_plain_layer(kind: str) -> None:
    low, plain = linear(LOW[kind]), linear(LOW[kind])
    plain.__class__ = nn.Linear
    wanted, found = [], []
    for layer, into in ((plain, wanted), (low, found)):
        torch.manual_seed(1)
        x = torch.randn(2, 9, 40, requires_grad=True)
        layer(x).mul(torch.randn(2, 9, 24)).sum().backward()
        into += [x.grad, layer.weight.grad, layer.bias.grad]
    for one, other in zip(wanted, found, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.06
    assert torch.equal(wanted[2], found[2])


@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-13, 1e-30])
def test_no_gradient_is_too_small(size: float) -> None:
    """Gradients are divided by the tokens of a whole step, and most tokens were not sampled and have none."""
    low, plain = linear(FP8), linear(FP8)
    plain.__class__ = nn.Linear
    found = []
    for layer in (plain, low):
        torch.manual_seed(1)
        x = torch.randn(8, 40, requires_grad=True)
        to = size * torch.randn(8, 24)
        to[:5] = 0
        layer(x).backward(to)
        found.append([x.grad[5:] / size, layer.weight.grad / size])
        assert not x.grad[:5].any()
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / one.norm()) < 0.06


@pytest.mark.parametrize("kind", LOW)
def test_a_weight_that_does_not_learn_lets_gradients_through(kind: str) -> None:
    """As under an adapter; what its gradient would need is not kept."""
    layer = linear(LOW[kind])
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 40, requires_grad=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(tuple(one.shape)), one)[1], lambda one: one):
        out = layer(x)
    out.sum().backward()
    assert x.grad.any()
    assert layer.weight.grad is None
    assert (3, 40) not in kept


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("recompute", ["none", "layers", "all"])
def test_an_rl_step_with_hints(kind: str, rank: int, recompute: str) -> None:
    model = tiny_model()
    make_trainable(model, LoraConfig(rank=rank), "", seed=0)
    settings = TrainConfig(linear=LOW[kind], recompute=recompute, lora=LoraConfig(rank=rank), learning_rate=1e-3)
    trainer = Trainer(model, settings, TEACHERS["frozen"])
    assert trainer.student.plain
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    metrics = trainer.step(samples()).metrics
    assert metrics[f"{Distill().part}/kl"] > 0
    assert math.isfinite(metrics["gradient_norm"])
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved
    assert all(("lora_" in name) == bool(rank) for name in moved)


def test_recomputing_gives_the_same_gradients() -> None:
    found = []
    for recompute in ("none", "layers", "all"):
        trainer = Trainer(tiny_model(), TrainConfig(linear=TENSOR, recompute=recompute), TEACHERS["live"])
        trainer.gradients(samples())
        found.append([master.grad for master in trainer.masters.named.values()])
    for others in found[1:]:
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("kind", LOW)
def test_a_model_in_bfloat16_has_masters(kind: str) -> None:
    settings = TrainConfig(precision="bfloat16", linear=LOW[kind])
    trainer = Trainer(in_bfloat16(tiny_model()), settings, TEACHERS["frozen"])
    assert math.isfinite(trainer.step(samples()).metrics["gradient_norm"])
    assert all(master.dtype == torch.float32 for master in trainer.masters.named.values())


def test_what_is_not_a_plain_linear_layer_stays_as_it_is() -> None:
    model = make_moe("qwen3")
    make_trainable(model, LoraConfig(rank=2, targets=["q_proj"]), "", seed=0)
    names = set(model.state_dict())
    compute_linears(model, TOKEN)
    low = {name for name, layer in model.named_modules() if isinstance(layer, LowLinear)}
    assert low
    assert not any("lora_" in name or "lm_head" in name or "embed" in name for name in low)
    assert any(name.endswith("q_proj.base_layer") for name in low)
    assert not any(isinstance(part, LowLinear) for router in routers_of(model) for part in router.modules())
    assert set(model.state_dict()) == names
    assert {name for name, layer in sharing_copy(model).named_modules() if isinstance(layer, LowLinear)} == low
    with plainly(model):
        assert not any(isinstance(layer, LowLinear) for layer in model.modules())
    compute_linears(model, LinearConfig())
    assert not any(isinstance(layer, LowLinear) for layer in model.modules())


def test_experts_in_fp8_are_those_of_single_products() -> None:
    """Forward and the gradient of the input as a linear layer of each expert by itself, which also has one without
    tokens; the gradient of the weights as a plain layer's."""
    rng = torch.Generator().manual_seed(0)
    x, weight, to = (torch.randn(*shape, generator=rng) for shape in ((20, 32), (4, 48, 32), (20, 48)))
    both, ends = [x.clone().requires_grad_(), weight.clone().requires_grad_()], [7, 7, 16, 20]
    out = fp8_grouped(*both, torch.tensor(ends, dtype=torch.int32), True)
    out.backward(to)
    for expert, rows in enumerate(map(slice, [0, *ends], ends)):
        own = x[rows].clone().requires_grad_()
        alone = fp8_linear(own, weight[expert], *quantize(own.detach())) if len(own) else own.new_zeros(0, 48)
        assert torch.allclose(out[rows], alone, atol=1e-5)
        if len(own):
            alone.backward(to[rows])
            assert torch.allclose(both[0].grad[rows], own.grad, atol=1e-5)
        assert torch.allclose(both[1].grad[expert], to[rows].t() @ x[rows], atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "olmoe", "deepseek"])
def test_a_layer_of_experts_in_fp8_gives_what_a_plain_one_does(family: str) -> None:
    experts = next(module for name, module in make_moe(family).named_modules() if name.endswith(".experts"))
    count, width = experts.gate_up_proj.shape[0], experts.down_proj.shape[1]
    hidden, gates = torch.randn(30, width), torch.rand(30, 2, requires_grad=True)
    chosen = torch.stack([torch.randperm(count - 1)[:2] for _ in range(30)])  # the last one gets no token
    wanted = experts(hidden, chosen, gates)
    (of_gates,) = torch.autograd.grad(wanted.pow(2).sum(), gates)
    experts.__class__ = low_class(type(experts))
    low = experts(hidden, chosen, gates)
    assert (low - wanted).norm() < 0.08 * wanted.norm()
    assert (torch.autograd.grad(low.pow(2).sum(), gates)[0] - of_gates).norm() < 0.16 * of_gates.norm()
    with torch.no_grad():  # so few that only the experts they ask are read
        assert torch.allclose(experts(hidden[:3], chosen[:3], gates[:3]), low[:3], atol=1e-5)


def test_experts_are_in_fp8_where_they_can_be() -> None:
    model, odd = make_moe("qwen3"), make_moe("qwen3")
    experts = odd.model.layers[1].mlp.experts
    experts.gate_up_proj, experts.down_proj = nn.Parameter(torch.ones(8, 56, 48)), nn.Parameter(torch.ones(8, 48, 28))
    turned = make_moe("qwen3")
    turned.model.layers[1].mlp.experts.is_transposed = True
    assert len([*experts_of(turned)]) == 1
    for settings, one, count in ((FP8, model, 2), (FP8, odd, 1), (TOKEN, model, 0), (LinearConfig(), model, 0)):
        compute_linears(one, settings)
        assert sum(isinstance(part, LowExperts) for part in one.modules()) == count
    compute_linears(model, FP8)
    copy = sharing_copy(model)
    assert sum(isinstance(part, LowExperts) for part in copy.modules()) == 2
    ids = torch.tensor([random_ids(random.Random(0), 30)])
    low = model(input_ids=ids).logits
    with plainly(model):
        assert torch.equal(model(input_ids=ids).logits, make_moe("qwen3")(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids).logits, low)
    assert torch.equal(copy(input_ids=ids).logits, low)


@pytest.mark.parametrize(
    "lora", [LoraConfig(), LoraConfig(rank=2, targets=["q_proj"], parameters=["mlp.experts.down_proj"])]
)
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_experts_learn_in_fp8(lora: LoraConfig, recompute: str) -> None:
    gradients = {}
    for kind in ("plain", "fp8"):
        model = make_moe("qwen3")
        make_trainable(model, lora, "", seed=0)
        settings = TrainConfig(linear=LinearConfig(kind=kind), recompute=recompute)
        trainer = Trainer(model, settings, TEACHERS["live"])
        trainer.gradients(samples())
        assert sum(isinstance(part, LowExperts) for part in model.modules()) == 2 * (kind == "fp8")
        named = {name: one.grad for name, one in trainer.masters.named.items() if "experts" in name}
        gradients[kind] = torch.cat([one.flatten() for one in named.values() if one is not None])
    assert gradients["plain"].norm() > 0
    assert torch.cosine_similarity(*gradients.values(), dim=0) > 0.8


@pytest.mark.parametrize(("trained", "sampled", "most"), [(TOKEN, TOKEN, 1e-3), (TENSOR, TENSOR, 9), (TOKEN, None, 9)])
def test_the_engine_agrees_with_the_trainer_by_a_scale_a_token(
    trained: LinearConfig, sampled: LinearConfig | None, most: float
) -> None:
    """A prompt is read and its answer written in another batch than that of the training forward."""
    network = tiny_model()
    compute_linears(network, sampled or LinearConfig())
    engine = LocalEngine(network, frozenset(), mode="continuous")
    rng, trainer = random.Random(0), Trainer(tiny_model(), TrainConfig(linear=trained))

    async def answer(key: str) -> tuple[list[int], list[float]]:
        ids, session = random_ids(rng, 20), engine.open(key)
        completion = await session.complete(Prompt(ids), 12)
        session.close()
        return [*ids, *completion.ids], completion.logprobs

    async def answers() -> list[tuple[list[int], list[float]]]:
        return await asyncio.gather(*(answer(str(number)) for number in range(4)))

    found = asyncio.run(answers())
    ids_BT = torch.tensor([ids for ids, _ in found])
    apart = logprobs(trainer, ids_BT)[:, -12:] - torch.tensor([told for _, told in found])
    typical = float(apart.abs().median())
    assert typical < most
    assert trained == sampled == TOKEN or typical > 1e-3


@torch.no_grad()
def logprobs(trainer: Trainer, ids_BT: Tensor) -> Tensor:
    hidden, _ = trainer.student.hidden(Packed.of(ids_BT.tolist(), ids_BT.device))
    logits = trainer.student.head(hidden[0].unflatten(0, ids_BT.shape)[:, :-1])
    return logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]


def test_weights_travel_between_an_engine_and_a_trainer_of_different_kinds() -> None:
    network = tiny_model(seed=1)
    compute_linears(network, TOKEN)
    engine, trainer = LocalEngine(network, frozenset()), Trainer(tiny_model(), TrainConfig(linear=FP8))
    engine.apply(weights_of(trainer.model, 3))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), trainer.model.parameters(), strict=True))


def test_a_chip_that_lacks_fp8_is_refused_and_told_what_to_do() -> None:
    refuse_lacking(FP8, "NVIDIA H200", (9, 0))
    refuse_lacking(TOKEN, "NVIDIA A100", (8, 0))
    refuse_lacking(FP8, "a CPU", None)
    config = load_config(["pocket"], {"train.linear.kind": "fp8"})
    with pytest.raises(OffbookError, match=r"NVIDIA A100 has no FP8 .* leave train.linear.kind plain"):
        make_plan(config, Device("NVIDIA A100", 80e9, is_gpu=True, capability=(8, 0)))


def test_layers_that_get_no_gradient_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FP8 once was on a GPU: finite losses, a gradient of the head alone, and nobody was told."""
    trainer, other = (Trainer(tiny_model(), TrainConfig(linear=FP8), TEACHERS["live"]) for _ in range(2))
    monkeypatch.setattr(
        "offbook.train.precision.fp8.scaled_product", lambda a, _, b, *__, fast: torch.zeros(len(a), len(b))
    )
    with pytest.raises(OffbookError, match="layers in fp8 get no gradient on this machine"):
        trainer.step(samples())
    alike = [replace(one, advantage=[0.0] * len(one.ids), ce_weight=[], branches=[]) for one in samples()]
    assert other.step(alike).metrics["gradient_norm"] == 0  # asks for none, and the next one does
    with pytest.raises(OffbookError, match="layers in fp8 get no gradient on this machine"):
        other.step(samples())


def test_what_asks_for_a_gradient() -> None:
    ids = [5, 6, 7]
    assert _asks(Sample(ids, advantage=[0.0, 1.0], rl_weight=[0.0, 1.0]))
    assert _asks(Sample(ids, ce_weight=[0.0, 0.0, 1.0]))
    assert _asks(replace(samples()[0], advantage=[], rl_weight=[], ce_weight=[]))
    first = Sample(ids, advantage=[1.0, 1.0], rl_weight=[1.0, 0.0], ce_weight=[1.0])  # which nothing predicts
    assert not _asks(first)


def test_plan_counts_copies_and_says_the_kind() -> None:
    device, plans = Device("", 80e9, is_gpu=True, capability=(9, 0)), {}
    for kind in ("plain", "fp8", "nvfp4"):
        options = {"train.linear.kind": kind, "train.compile": "true", "train.recompute": "all"}
        plans[kind] = make_plan(load_config(["pocket"], options), device)
    part = "head, or a layer's backward"
    assert plans["plain"].parts[part] <= plans["fp8"].parts[part] <= plans["nvfp4"].parts[part]
    assert plans["fp8"].to_dict()["linear"] == "fp8"
    assert "linear layers in nvfp4" in str(plans["nvfp4"])
    assert "linear" not in str(plans["plain"])
    shapes = shapes_of(make_moe("qwen3").to("meta"))
    assert shapes.expert_product == 8 * 64 * 48
    large = replace(shapes, expert_product=10**9)
    copied = {kind: step_parts(large, Way("all", True, 64), 64, linear=kind)[part] for kind in plans}
    assert copied["fp8"] - copied["plain"] > 2.9e9
    assert copied["nvfp4"] < 1e9


def test_options_that_are_never_used_are_refused() -> None:
    divided = {"train.linear.kind": "fp8", "train.linear.division": "approximate"}
    for option in ({"train.linear.scale": "tensor"}, divided):
        with pytest.raises(ConfigError, match=r"never used; leave them out"):
            load_config(["pocket"], option)


def samples() -> list[Sample]:
    rng = random.Random(0)
    return [sample_with_branches(rng) for _ in range(2)]


def test_an_engine_in_a_process_of_its_own_multiplies_so_too(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    given = {"out": str(tmp_path / "run"), "train.linear.kind": "nvfp4"}
    here = tiny_model()
    compute_linears(here, TOKEN)
    said = [written_by(LocalEngine(here, frozenset()))]
    for more in ({}, {"engine.linear": "plain"}):
        engine = ApartEngine(load_config(["standard"], given | more), tmp_path / "model", frozenset())
        engine.apply(weights_of(tiny_model(), 0))
        said.append(written_by(engine))
    assert said[0] == said[1] != said[2]


def written_by(engine: LocalEngine | ApartEngine) -> list[float]:
    async def write() -> list[float]:
        session = engine.open("a")
        completion = await session.complete(Prompt([1, 5, 2, 7]), 8)
        session.close()
        if isinstance(engine, ApartEngine):
            await engine.aclose()
        return completion.logprobs

    return asyncio.run(write())


@pytest.mark.parametrize("kind", LOW)
def test_layers_can_be_compiled_in_one_piece(kind: str) -> None:
    """Without making kernels of it, which takes minutes on a CPU."""
    layer, x = linear(LOW[kind]), torch.randn(3, 5, 40, requires_grad=True)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        run(x).square().sum().backward()
        found.append([x.grad, layer.weight.grad])
        x.grad = layer.weight.grad = None
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(*found, strict=True))


KERNELS = """
import numpy as np
import torch
from triton.runtime import interpreter

def to_codes(data, given, wanted, rounding, inner=interpreter._convert_float):  # whose own rounds wrongly
    if wanted.name != "fp8e4nv":
        return inner(data, given, wanted, rounding)
    return torch.from_numpy(np.array(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

def fma(self, *handles):  # rounded once, as on a GPU; Triton 3.6 interprets it as two operations
    x, y, z = (handle.data.astype(np.float64) for handle in handles)
    return interpreter.TensorHandle((x * y + z).astype(np.float32), handles[0].dtype.scalar)

interpreter._convert_float, interpreter.InterpreterBuilder.create_fma = to_codes, fma
from offbook.train.precision import triton_fp8
from offbook.train.precision.fp8 import torch_rows

torch.manual_seed(0)
for rows, columns in ((128, 256), (150, 333), (1, 7), (16, 16), (257, 1030)):  # whole tiles and cut ones
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(rows, columns) * torch.randn(rows, 1).mul(4).exp() * torch.randn(columns).mul(4).exp()
        x[rows // 2], x[:, 3], x[rows // 3] = 0, 0, 1e-29 * x[rows // 3]
        x = x.to(dtype)
        wanted = *torch_rows(x), *torch_rows(x.t())
        found = *triton_fp8.both_ways(x), *triton_fp8.by_rows(x), *triton_fp8.by_columns(x)
        for place, (one, other) in enumerate(zip(found, wanted * 2, strict=True)):
            assert torch.equal(one.float(), other.float()), (rows, columns, dtype, place)
for broken in (float("nan"), float("inf"), float("-inf")):
    x = torch.randn(20, 40).bfloat16()
    x[3, 5] = broken
    by_rows, _, by_columns, _ = (one.float().isnan() for one in triton_fp8.both_ways(x))
    assert by_rows[3].all() and by_rows.sum() == by_rows.shape[1]
    assert by_columns[5].all() and by_columns.sum() == by_columns.shape[1]
    assert torch.equal(triton_fp8.by_rows(x)[0].float().isnan(), by_rows)
"""


def test_kernels_give_the_codes_and_scales_of_torch() -> None:
    interpreted(KERNELS)


def test_compiled_layers_that_share_an_input_quantize_it_once_and_keep_codes() -> None:
    first, second, x = linear(FP8), linear(FP8), torch.randn(32, 40, requires_grad=True)
    graphs: list[dict[str, int]] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        called = [str(node.target) for node in graph.graph.nodes if "offbook" in str(node.target)]
        graphs.append({name: called.count(name) for name in called})
        return make_boxed_func(graph.forward)

    kept: list[Tensor] = []
    as_on_a_gpu = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(lambda x: first(x) * second(x), backend=as_on_a_gpu, fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        out = run(x)
    out.sum().backward()
    assert graphs[0] == {"offbook.fp8_quantize_both.default": 1, "offbook.fp8_linear.default": 2}
    assert graphs[1]["offbook.fp8_quantize_both.default"] == 2
    assert [tuple(one.shape) for one in kept if one.dtype == torch.float8_e4m3fn] == [(48, 32)]
    assert not any(one.shape == x.shape for one in kept)


def test_families_that_gate_in_a_way_of_their_own_stay_plain() -> None:
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=4, moe_layers=[1],
    )  # fmt: skip
    assert not [*experts_of(Llama4ForCausalLM(config))]
