"""Hint branches against the naive reference: re-encode prefix + hint + message from scratch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import TEACHERS, distilled, in_bfloat16, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from offbook.core.config import TrainConfig
from offbook.train import attention, forward
from offbook.train.attention import BranchRow, LayerKV, branch_blocks
from offbook.train.batches import Batch, BranchBatch
from offbook.train.forward import reencoded as naive
from offbook.train.head import Counts, Ledger, divergence
from offbook.train.host import BLOCK
from offbook.train.trainer import Trainer
from offbook.types import Branch, Distill, OffbookError, Sample

WIDE = Qwen3Config(
    vocab_size=300,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def sample_with_branches(rng: random.Random, length: int = 60) -> Sample:
    """Targets in the first message, in the middle and in the last; sampled tokens elsewhere too."""
    branches = [
        Branch(0, random_ids(rng, 5), ((3, 10),), 1.0, key="first"),
        Branch(24, random_ids(rng, 9), ((26, 33),), 0.5, key="middle"),
        Branch(45, random_ids(rng, 2), ((48, length),), 2.0, key="last"),
    ]
    return Sample(
        ids=random_ids(rng, length),
        logprobs=[-rng.random() * 3 for _ in range(length)],
        advantage=[0.7] * length,
        rl_weight=[float(position % 3 == 1) for position in range(length)],
        ce_weight=[0.0] * length,
        branches=branches,
    )


def plain_sample(rng: random.Random, length: int) -> Sample:
    return replace(sample_with_branches(rng, length), branches=[])


def reencoded(model: PreTrainedModel, sample: Sample, branch: Branch) -> Tensor:
    """The reference: log-probabilities over the vocabulary at each target token, hint in place, from scratch."""
    ids = [*sample.ids[: branch.insert], *branch.inserted, *sample.ids[branch.insert : branch.end]]
    inputs = torch.tensor([ids], device=model.device)
    predicts = [place + len(branch.inserted) - 1 for place in places_of(branch)]
    return model(input_ids=inputs, use_cache=False).logits[0, predicts].log_softmax(-1)


def places_of(branch: Branch) -> list[int]:
    return [place for span in branch.spans for place in range(*span)]


def trainer_for(model: PreTrainedModel, teacher: str) -> Trainer:
    precision = str(model.dtype).removeprefix("torch.")
    return Trainer(model, TrainConfig(micro_tokens=128, precision=precision), TEACHERS[teacher])


def teacher_model(trainer: Trainer) -> PreTrainedModel:
    (teacher,) = trainer.teachers.values()
    return teacher.decoder.model if teacher else trainer.model


def hinted_logp(trainer: Trainer, batch: Batch) -> Tensor:
    """What the trainer takes for the teacher, at every target token."""
    _, (reading,) = trainer.forward(batch)
    head, hidden = reading[0]
    return head(hidden).log_softmax(-1)


def reference_logp(trainer: Trainer, samples: list[Sample]) -> Tensor:
    def from_scratch(model: PreTrainedModel) -> Tensor:
        return torch.cat([reencoded(model, s, b) for s in samples for b in s.branches])

    return from_scratch(teacher_model(trainer))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
@pytest.mark.parametrize("device", DEVICES)
def test_hinted_logits_equal_reencoding(kind: str, teacher: str, device: str) -> None:
    """Rollouts of several lengths in one batch; student and teacher apart, so that one is not taken for the other."""
    rng = random.Random(1)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52), plain_sample(rng, 57)]
    trainer = trainer_for(tiny_model(kind).to(device), teacher=teacher)
    for parameter in trainer.model.parameters():
        parameter.mul_(1.3)
    assert trainer.student.plain, "or re-encoding would be compared with itself"
    batch = Batch.collate(samples, torch.device(device))
    hinted, reference = hinted_logp(trainer, batch), reference_logp(trainer, samples)
    assert hinted.shape == reference.shape
    assert (hinted - reference).abs().max() < 1e-4
    student = trainer.model(input_ids=batch.row.ids_1F[:, :60], use_cache=False).logits[0, 25:32].log_softmax(-1)
    assert (hinted[7:14] - student).abs().max() > 0.1, "the hint must matter, or the test shows nothing"


@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_rounded_lengths_change_nothing(monkeypatch: pytest.MonkeyPatch, teacher: str) -> None:
    """Rows and branches are filled up to round lengths on a GPU; here they are made to be, too."""
    rng = random.Random(12)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52), plain_sample(rng, 57)]
    found = []
    for step in (1, 64):
        for module in ("attention", "batches"):
            monkeypatch.setattr(
                f"offbook.train.{module}.round_length", lambda length, _, step=step: -(-length // step) * step
            )
        trainer = trainer_for(tiny_model(), teacher=teacher)
        with torch.no_grad():
            hinted = hinted_logp(trainer, batch := Batch.collate(samples, torch.device("cpu")))
            assert (hinted - reference_logp(trainer, samples)).abs().max() < 1e-4
        assert (batch.row.ids_1F.shape[1], BranchBatch.collate(batch, batch.branches).ids_1L.shape[1]) == (
            (169, 92) if step == 1 else (192, 128)
        )
        found.append(trainer.step(samples).metrics["gradient_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused kernel needs a GPU")
@torch.no_grad()
def test_on_a_gpu_the_fused_branches_equal_reencoding() -> None:
    """Several rows, targets early and late, one of them longer than a block, in the kernels that training runs."""
    rng = random.Random(13)
    model = Qwen3ForCausalLM(WIDE).to("cuda", torch.bfloat16)
    places = (3, 700, 1500)
    samples = []
    for row in range(3):
        ids = random_ids(rng, 1900)
        branches = [Branch(at, random_ids(rng, 40), ((at + 3, at + 90 * (row + 1)),)) for at in places]
        samples.append(Sample(ids, branches=branches))
    trainer = Trainer(model, TrainConfig(compile=True), TEACHERS["live"])
    batch = Batch.collate(samples, torch.device("cuda"))
    branches = BranchBatch.collate(batch, batch.branches)
    hidden, found = trainer.student.hidden(batch.row, branches)
    reference = naive(model, batch.row, branches)
    assert (found - reference).float().norm() < 0.03 * reference.float().norm()
    without = hidden[0, batch.tokens(10_000).predictor_N]
    assert (found - without).float().norm() > 0.3 * reference.float().norm()


@torch.no_grad()
@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
def test_in_bfloat16_hidden_states_equal_reencoding_to_its_rounding(teacher: str) -> None:
    """The same products in another order: 3% of the norm over three layers, where the hint itself moves them by 30%."""
    rng = random.Random(6)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52)]
    trainer = trainer_for(tiny_model().bfloat16(), teacher=teacher)
    assert trainer.student.plain
    batch = Batch.collate(samples, torch.device("cpu"))
    branches = BranchBatch.collate(batch, batch.branches)
    hidden, _ = trainer.student.hidden(batch.row, branches)
    _, (reading,) = trainer.forward(batch)
    found = reading[0][1]
    reference = naive(teacher_model(trainer), batch.row, branches)
    assert (found - reference).float().norm() < 0.03 * reference.float().norm()
    without = hidden[0, batch.tokens(10_000).predictor_N[: len(found)]]
    assert (found - without).float().norm() > 0.3 * reference.float().norm()


def gradients(trainer: Trainer, samples: list[Sample]) -> list[Tensor]:
    trainer.loss(Batch.collate(samples, torch.device("cpu")), Ledger(Counts.of(samples))).backward()
    return [parameter.grad for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
@pytest.mark.parametrize("recompute", ["layers", "all"])
def test_recomputation_changes_no_bit(teacher: str, recompute: str) -> None:
    samples = [sample_with_branches(random.Random(7), 60), sample_with_branches(random.Random(8), 52)]
    found = []
    for mode in ("none", recompute):
        settings = TrainConfig(recompute=mode)
        found.append(gradients(Trainer(tiny_model(), settings, TEACHERS[teacher]), samples))
    for reference, ours in zip(*found, strict=True):
        assert torch.equal(reference, ours)
        assert reference.abs().max() > 0


class Sizes(TorchDispatchMode):
    """Watches how many values there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


@pytest.mark.parametrize("teacher", ["live", "frozen"])
@pytest.mark.parametrize("rows", [1, 8, 25])
def test_chunks_change_nothing_and_no_logits_are_ever_whole(
    monkeypatch: pytest.MonkeyPatch, teacher: str, rows: int
) -> None:
    samples = [sample_with_branches(random.Random(7), 60), sample_with_branches(random.Random(8), 52)]
    samples[1].branches.reverse()
    samples[0].branches.append(replace(samples[0].branches[1], key="the same message again", inserted=[7, 8]))
    whole = trainer_for(tiny_model(), teacher=teacher)
    reference = gradients(whole, samples)
    monkeypatch.setattr("offbook.train.head.CHUNK_ENTRIES", 300 * rows)
    chunked = trainer_for(tiny_model(), teacher=teacher)
    with Sizes() as sizes:
        ours = gradients(chunked, samples)
    largest_weight = max(parameter.numel() for parameter in chunked.model.parameters())
    assert sizes.largest <= max(largest_weight, 300 * rows), "72 rows of 300 entries would be more"
    for expected, found in zip(reference, ours, strict=True):
        assert (expected - found).abs().max() < 1e-5 * max(1.0, expected.abs().max())
    measured = [trainer.step(samples).measured for trainer in (whole, chunked)]
    for key, values in measured[0].items():
        assert measured[1][key].divergence == pytest.approx(values.divergence, abs=1e-4), key


@given(st.data())
@settings(max_examples=30)
def test_blocks_of_the_fused_kernel_are_those_of_the_mask(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 1200))
    branches, start = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        base = data.draw(st.integers(0, length - 1))
        insert, size = data.draw(st.integers(0, length - base)), data.draw(st.integers(1, 300))
        branches.append(BranchRow(base, insert, start, start + size))
        start += size
    blocks = branch_blocks(branches, length, torch.device("cpu"))
    far, near = torch.zeros(start, length, dtype=torch.bool), torch.zeros(start, start, dtype=torch.bool)
    for b in branches:
        far[b.start : b.end, b.base : b.base + b.insert] = True
        near[b.start : b.end, b.start : b.end] = torch.ones(b.end - b.start, b.end - b.start).tril().bool()
    check_blocks(blocks.far, far)
    check_blocks(blocks.near, near)


def check_blocks(blocks: BlockMask, mask: Tensor) -> None:
    query, key = torch.arange(mask.shape[0])[:, None], torch.arange(mask.shape[1])[None]
    seen = torch.stack([blocks.mask_mod(part, 0, query, key) for part in range(blocks.shape[0])])
    assert torch.equal(seen.sum(0), mask.int()), "each key is in one part"
    pad = (0, -mask.shape[1] % BLOCK, 0, -mask.shape[0] % BLOCK)
    inside = torch.nn.functional.pad(mask, pad).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).any(3).any(1)
    dense = blocks.to_dense()[:, 0]
    assert torch.equal(dense.sum(0), inside.int()), "each block is in one part"
    assert (dense.sum(2).amax(0) - dense.sum(2).amin(0) <= 1).all(), "each part has its share"
    edge = torch.nn.functional.pad(mask, pad, value=True)
    whole = edge.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).all(3).all(1)
    found = torch.zeros_like(whole)
    for counts, orders in zip(blocks.full_kv_num_blocks[:, 0], blocks.full_kv_indices[:, 0], strict=True):
        for block, (count, order) in enumerate(zip(counts, orders, strict=True)):
            found[block, order[:count].long()] = True
    assert torch.equal(found, whole), "a block is taken for whole if it is"


@torch.no_grad()
def test_the_fused_kernel_reads_what_the_plain_one_reads() -> None:
    torch.manual_seed(0)
    rows = [BranchRow(40, 30, 0, 20), BranchRow(0, 7, 33, 50), BranchRow(40, 0, 20, 33)]
    base_key, base_value = torch.randn(2, 1, 2, 70, 12).unbind()
    query, key, value = torch.randn(1, 4, 50, 12), torch.randn(1, 2, 50, 12), torch.randn(1, 2, 50, 12)
    groups = attention.branch_groups(rows, 70, torch.device("cpu"))
    plain = attention._read(query, key, value, None, LayerKV(groups, base=(base_key, base_value)))
    blocks = branch_blocks(rows, 70, torch.device("cpu"))
    fused = attention.in_parts(query, (base_key, base_value), (key, value), blocks, None, {})
    assert (plain - fused).abs().max() < 1e-5


@torch.no_grad()
def test_branches_that_are_read_side_by_side_are_read_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = [BranchRow(40, 30, 0, 20), BranchRow(0, 7, 33, 50), BranchRow(40, 0, 20, 33), BranchRow(0, 29, 50, 51)]
    base_key, base_value = torch.randn(2, 1, 2, 70, 12).unbind()
    query, key, value = torch.randn(1, 4, 51, 12), torch.randn(1, 2, 51, 12), torch.randn(1, 2, 51, 12)

    def read(most: int) -> tuple[int, Tensor]:
        monkeypatch.setattr(attention, "MASK_SIZE", most)
        groups = attention.branch_groups(rows, 70, torch.device("cpu"))
        return len(groups), attention._read(query, key, value, None, LayerKV(groups, base=(base_key, base_value)))

    calls, alone = read(1)
    assert calls == len(rows)
    for most, number in ((1 << 26, 1), (2500, 2)):
        calls, together = read(most)
        assert calls == number
        assert (together - alone).abs().max() < 1e-6


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_equal_reencoding(direction: str, device: str) -> None:
    rng = random.Random(2)
    samples = [sample_with_branches(rng, 60), sample_with_branches(rng, 52), sample_with_branches(rng, 57)]
    samples = distilled(samples, direction=direction)
    ledger = Ledger(Counts.of(samples))
    trainer = trainer_for(tiny_model().to(device), teacher="live")
    for micro in (samples[:2], samples[2:]):
        trainer.loss(Batch.collate(micro, torch.device(device)), ledger).backward()

    model = tiny_model().to(device)
    for sample in samples:
        ids = torch.tensor(sample.ids, device=device)
        behaviour, weight = (torch.tensor(s[1:], device=device) for s in (sample.logprobs, sample.rl_weight))
        logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        own = logp[:-1].gather(1, ids[1:, None])[:, 0]
        ratio = (own.detach() - behaviour).exp().clamp(max=2.0)
        loss = -(weight * ratio * 0.7 * own).sum() / ledger.counts.tokens["rl"]
        for branch in sample.branches:
            student = logp[[place - 1 for place in places_of(branch)]]
            with torch.no_grad():
                teacher = reencoded(model, sample, branch)
            loss = (
                loss + branch.weight * divergence(student, teacher, direction).sum() / ledger.counts.tokens["distill"]
            )
        loss.backward()

    for (name, ours), reference in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        scale = reference.grad.abs().max()
        assert (ours.grad - reference.grad).abs().max() < 1e-4 * max(1.0, scale), name
        assert scale > 1e-5, name


@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_a_branch_may_have_its_targets_in_several_places(teacher: str) -> None:
    """What stands between them, a tool's answer, is read and not scored."""
    rng = random.Random(20)
    branch = Branch(8, random_ids(rng, 6), ((10, 17), (30, 34), (50, 60)))
    sample = replace(sample_with_branches(rng), branches=[branch])
    trainer = trainer_for(tiny_model(), teacher)
    with torch.no_grad():
        hinted = hinted_logp(trainer, Batch.collate([sample], torch.device("cpu")))
        assert (hinted - reencoded(tiny_model(), sample, branch)).abs().max() < 1e-4
    assert len(hinted) == 21
    assert trainer.step([sample]).metrics["distill/kl"] > 0


@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_a_branch_without_anything_inserted_reads_what_the_student_reads(teacher: str) -> None:
    """Also where it begins at its first target, as in distillation from another model: the token before predicts it."""
    rng = random.Random(26)
    branches = [
        Branch(30, [], ((30, 45),), key="late"),
        Branch(10, [], ((10, 25),), key="early"),
        Branch(1, [], ((1, 5),)),
    ]
    sample = replace(sample_with_branches(rng), branches=branches)
    measured = trainer_for(tiny_model(), teacher).step([sample]).measured
    for key in ("late", "early"):
        assert max(measured[key].divergence) < 1e-5
        assert measured[key].teacher == pytest.approx(measured[key].student, abs=1e-4)


@pytest.mark.parametrize(
    ("branch", "problem"),
    [
        (Branch(5, [1], ((6, 9),), distill=Distill("nobody")), "names the teacher nobody; there are live"),
        (Branch(5, [1], ((6, 99),)), "has targets"),
        (Branch(0, [], ((0, 9),)), "has targets"),
        (Branch(8, [1], ((6, 9),)), "has targets"),
    ],
)
def test_what_an_annotator_gets_wrong_is_said(branch: Branch, problem: str) -> None:
    sample = replace(sample_with_branches(random.Random(27)), branches=[branch])
    with pytest.raises(ValueError, match=problem):
        trainer_for(tiny_model(), "live").step([sample])


def test_branches_of_one_batch_may_have_teachers_and_directions_of_their_own() -> None:
    """Each group is scored by its own teacher; the gradients are those of the groups alone, added up."""
    rng = random.Random(21)
    whole = replace(sample_with_branches(rng), rl_weight=[])
    first, second, third = whole.branches
    ways = [Distill("live", "a"), Distill("frozen", "b", "reverse", cap=1.5), Distill("live", "c", "jsd")]
    parts = [[replace(one, distill=way)] for one, way in zip((second, first, third), ways, strict=True)]
    kinds = {"live": TEACHERS["live"]["live"], "frozen": TEACHERS["frozen"]["live"]}

    def grads(branches: list[Branch]) -> list[Tensor]:
        trainer = Trainer(tiny_model(), TrainConfig(), kinds)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1)  # so that live and frozen differ
        return gradients(trainer, [replace(whole, branches=branches)])

    together = grads([branch for part in parts for branch in part])
    alone = [grads(part) for part in parts]
    for found, *each in zip(together, *alone, strict=True):
        assert (found - sum(each)).abs().max() < 1e-5 * max(1.0, float(found.abs().max()))
        assert all(one.abs().max() > 1e-6 for one in each)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ema_arrives_where_the_student_has_gone(dtype: torch.dtype) -> None:
    """In steps of a hundredth of 2%, which bfloat16 cannot hold one by one."""
    model = in_bfloat16(tiny_model()) if dtype == torch.bfloat16 else tiny_model()
    trainer = trainer_for(model, teacher="ema")
    start = torch.cat([parameter.flatten().float() for parameter in trainer.model.parameters()])
    for parameter in trainer.model.parameters():
        parameter.mul_(1.02)
    for _ in range(300):
        trainer.teachers["live"].follow(trainer.model)
    ours = torch.cat([parameter.flatten().float() for parameter in teacher_model(trainer).parameters()])
    theirs = torch.cat([parameter.flatten().float() for parameter in trainer.model.parameters()])
    gone = ((ours - start) * start).sum() / ((theirs - start) * start).sum()
    assert gone == pytest.approx(1 - 0.99**300, abs=0.02)
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


SHAPE = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}


def other_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape, heads = SHAPE, {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "one window":
        return MistralForCausalLM(MistralConfig(**shape, **heads, head_dim=12, sliding_window=16)).eval()
    if kind == "convolutions":
        return Lfm2ForCausalLM(Lfm2Config(**shape, **heads, layer_types=["conv", "full_attention"])).eval()
    if kind == "long positions":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
        return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=32, rope_parameters=rope)).eval()
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, head_dim=12, **window)).eval()


@pytest.mark.parametrize("kind", ["convolutions", "windows", "one window", "long positions"])
@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_other_layers_fall_back_to_a_pass_for_each_target(
    caplog: pytest.LogCaptureFixture, kind: str, teacher: str
) -> None:
    forward._say_fallback.cache_clear()
    trainers = [trainer_for(other_model(kind), teacher=teacher) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records if "re-encoded" in record.getMessage()] == [
        f"{trainers[0].model.config.model_type} has layers other than plain attention, or positions that "
        "depend on the length: targets of branches are re-encoded one by one, each with its prefix"
    ]
    samples = [sample_with_branches(random.Random(11), 60), sample_with_branches(random.Random(12), 52)]
    with torch.no_grad():
        hinted = hinted_logp(trainers[0], Batch.collate(samples, torch.device("cpu")))
        untouched = torch.cat([reencoded(other_model(kind), s, b) for s in samples for b in s.branches])
        assert (hinted - untouched).abs().max() < 1e-4
    assert trainers[0].step(samples).metrics["distill/kl"] > 0


def model_with_logits_of_its_own(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "pad_token_id": 0}
    if family == "granite":
        return GraniteForCausalLM(GraniteConfig(**SHAPE, **heads, logits_scaling=8.0)).eval()
    if family == "cohere":
        return CohereForCausalLM(CohereConfig(**SHAPE, **heads, logit_scale=0.0625)).eval()
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **heads, final_logit_softcapping=0.1)).eval()


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
@pytest.mark.parametrize("teacher", ["live", "frozen"])
def test_logits_are_those_of_the_model_whatever_it_does_to_them(family: str, teacher: str) -> None:
    samples = [sample_with_branches(random.Random(14), 60)]
    trainer = trainer_for(model_with_logits_of_its_own(family), teacher=teacher)
    batch = Batch.collate(samples, torch.device("cpu"))
    with torch.no_grad():
        untouched = model_with_logits_of_its_own(family)
        wanted = untouched(input_ids=batch.row.ids_1F, use_cache=False).logits
        assert (wanted - untouched.get_output_embeddings()(trainer.student.hidden(batch.row)[0])).abs().max() > 0.01
        assert (trainer.student.head(trainer.student.hidden(batch.row)[0]) - wanted).abs().max() < 1e-5
        reference = torch.cat([reencoded(untouched, samples[0], branch) for branch in samples[0].branches])
        assert (hinted_logp(trainer, batch) - reference).abs().max() < 1e-4
    assert trainer.step(samples).metrics["gradient_norm"] > 0


def test_logits_that_cannot_be_had_from_the_head_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    own = model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: replaced_logits(own(**inputs)))
    with pytest.raises(OffbookError, match="qwen3 does more to its logits than scaling them"):
        trainer_for(model, teacher="live")


def replaced_logits(out: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
    out.logits = out.logits.abs()
    return out
