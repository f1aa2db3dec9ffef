"""Muon: what its units are, the orthogonalisation, and steps against references, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offbook.train.optim import muon
from offbook.train.optim.muon import Muon
from offbook.train.optim.newton_schulz import CLASSIC, JORDAN, OURS, YOU, by_gram, classic, orthogonalize
from offbook.train.optim.units import units_of


def tiny_moe(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=24,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
        )
    )


def test_units_are_heads_experts_and_whole_matrices() -> None:
    model = tiny_moe()
    units = units_of(model.named_parameters(), model.config)
    dense, sparse = "model.layers.0", "model.layers.1"
    assert units[f"{dense}.self_attn.q_proj.weight"] == (8, 24)
    assert units[f"{dense}.self_attn.k_proj.weight"] == (8, 24)
    assert units[f"{dense}.self_attn.o_proj.weight"] == (24, 8)
    assert units[f"{dense}.mlp.down_proj.weight"] == (24, 32)
    assert units[f"{sparse}.mlp.experts.gate_up_proj"] == (16, 24)
    assert units[f"{sparse}.mlp.experts.down_proj"] == (24, 16)
    left = {name for name, _ in model.named_parameters()} - set(units)
    assert all("norm" in name or "embed" in name or "lm_head" in name for name in left)
    assert left >= {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    assert not units_of([("model.layers.0.mlp.experts.gate_up_proj_bias", torch.zeros(8, 32))]), "a bias each"


def test_units_of_latent_attention_are_heads() -> None:
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    model = DeepseekV3ForCausalLM(config)
    units = units_of(model.named_parameters(), config)
    layer = "model.layers.0.self_attn"
    found = {name.removeprefix(f"{layer}."): block for name, block in units.items() if layer in name}
    assert found == {
        "q_a_proj.weight": (24, 32),
        "q_b_proj.weight": (12, 24),
        "kv_a_proj_with_mqa.weight": (20, 32),
        "kv_b_proj.weight": (14, 16),
        "o_proj.weight": (32, 6),
    }


def decaying(rows: int, columns: int, power: float, count: int = 2) -> Tensor:
    """Matrices whose singular values fall as 1, 2 ** -power, 3 ** -power."""
    left, right = (torch.linalg.qr(torch.randn(count, size, rows)).Q for size in (rows, columns))
    return (left * torch.arange(1.0, rows + 1) ** -power) @ right.mT


@pytest.mark.parametrize("shape", [(3, 16, 40), (3, 40, 16), (2, 24, 24)])
def test_the_gram_way_is_the_classic_way(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(*shape) * 1e-6  # as small as gradients are
    wide = matrices if shape[1] <= shape[2] else matrices.mT
    wanted = classic(wide, OURS)
    found = by_gram(wide, OURS, torch.float32)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert torch.allclose(orthogonalize(matrices), wanted if wide is matrices else wanted.mT, atol=1e-5)
    u, _, vh = torch.linalg.svd(wide, full_matrices=False)
    inside = u.mT @ wanted @ vh.mT
    assert (inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4
    assert torch.linalg.svdvals(wanted).max() < 1.16
    if shape[1] != shape[2]:  # a square matrix has singular values near 0
        assert torch.linalg.svdvals(wanted).min() > 0.9


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_half_precision_holds_on_spectra_that_fall(power: float) -> None:
    torch.manual_seed(0)
    matrices = decaying(96, 256, power) * 1e-7
    found = orthogonalize(matrices, precision=torch.float16)
    wanted = classic(matrices, OURS)
    assert torch.linalg.svdvals(found.float()).max() < 1.3
    assert (found - wanted).norm() < (0.005 if power < 1 else 0.03) * wanted.norm()


def reference_step(
    model: PreTrainedModel, momenta: dict[str, Tensor], lr: float, decay: float, seen: set[str] | None = None
) -> None:
    """Muon on the units of a Qwen3-MoE, cut out by hand, one at a time."""

    def pieces(name: str, tensor: Tensor) -> list[Tensor]:
        if "gate_up_proj" in name and tensor.ndim == 3:
            return [half for expert in tensor for half in expert.chunk(2)]
        if tensor.ndim == 3:
            return list(tensor)
        if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
            return list(tensor.split(8))
        return list(tensor.split(8, dim=1)) if "o_proj" in name else [tensor]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "embed" in name or "lm_head" in name:
                continue
            average = momenta.setdefault(name, torch.zeros_like(parameter))
            average.mul_(0.95).add_(parameter.grad, alpha=0.05)
            nesterov = 0.05 * parameter.grad + 0.95 * average
            for weight, unit in zip(pieces(name, parameter), pieces(name, nesterov), strict=True):
                is_wide = unit.shape[0] <= unit.shape[1]
                direction = classic((unit if is_wide else unit.T)[None], OURS)[0]
                direction = direction if is_wide else direction.T
                weight.mul_(1 - lr * decay).sub_(lr * 0.2 * math.sqrt(max(unit.shape)) * direction)


def random_gradients(model: PreTrainedModel, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng) * 1e-3


@pytest.mark.parametrize("workspace", [2**27, 2**13])
def test_five_steps_equal_units_cut_by_hand(workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch a shape, and in several that hold parts of parameters."""
    monkeypatch.setitem(muon.WORKSPACE, "cpu", workspace)
    ours, theirs = tiny_moe(), tiny_moe()
    units = units_of(ours.named_parameters(), ours.config)
    optimizer = Muon(ours.named_parameters(), units, lr=0.01, weight_decay=0.1)
    momenta: dict[str, Tensor] = {}
    for step in range(5):
        random_gradients(ours, step)
        random_gradients(theirs, step)
        optimizer.step()
        reference_step(theirs, momenta, 0.01, 0.1)
    for name, parameter in theirs.named_parameters():
        if name in units:
            apart = (ours.get_parameter(name) - parameter).norm() / parameter.norm()
            assert apart < 1e-5, name


def test_it_agrees_with_torch_where_torch_can() -> None:
    """torch.optim.Muon orthogonalises in bfloat16, so agreement is to its rounding."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(24, 24)) for _ in range(2))
    optimizer = Muon([("w", ours)], {"w": (24, 24)}, lr=0.01, method=CLASSIC)
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="original")
    for _ in range(3):
        ours.grad = torch.randn(24, 24)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert (ours - theirs).abs().max() < 2e-3
    assert (ours - 1).abs().max() > 1e-3
    assert len(JORDAN) == len(YOU) == 5


def test_the_rest_is_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    optimizer = Muon([("norm", ours)], {}, lr=0.01, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(5):
        ours.grad = torch.randn(7)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert (ours - theirs).abs().max() < 1e-6
