"""Draft heads: what they learn, where they are kept, and whose they are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import random_ids, tiny_model
from safetensors.torch import load_file

from offbook.core.config import MtpConfig, load_config
from offbook.core.draft import DraftHead, save_head
from offbook.rl.models import load_model
from offbook.stages.mtp import measure, mtp, read_samples, split
from offbook.train import draft as train_draft
from offbook.train.batches import Batch
from offbook.train.draft import Depths, DraftTrainer
from offbook.train.forward import Decoder
from offbook.types import OffbookError, Sample

CPU = torch.device("cpu")


def samples(count: int = 6, length: int = 40) -> list[Sample]:
    rng = random.Random(0)
    lengths = [length - number for number in range(count)]
    return [Sample(random_ids(rng, size), ce_weight=[1.0] * size) for size in lengths]


def moved(head: DraftHead, seed: int = 0) -> DraftHead:
    """Away from where it begins, so that mistakes show."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return head


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("window", [8, 512])
def test_it_learns_on_what_it_sees_when_it_drafts(kind: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every depth the states are those of drafting token by token, all before it read again."""
    monkeypatch.setattr(train_draft, "WINDOW", window)
    model = tiny_model(kind).double()
    trainer = DraftTrainer(model, moved(DraftHead(model)), MtpConfig(depth=4))
    for length in (24, 17, 4, 3):
        ids = torch.tensor([random_ids(random.Random(length), length)])
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
            embedded = model.get_input_embeddings()(ids)[:, 1:]
            found = trainer.states(ids, hidden)
            assert len(found) == min(4, length - 1)
            for depth, (first, states) in enumerate(found):
                usable = length - 1
                start = first - depth if depth else 0
                assert states.shape[1] == (min(usable - start, window) - depth if depth else usable)
                for number in range(states.shape[1]):
                    begin = first + number - depth  # the last position whose state is the model's
                    read = hidden[:, : begin + 1]
                    for _ in range(depth + 1):
                        position = torch.arange(read.shape[1])[None]
                        state = trainer.head(embedded[:, : read.shape[1]], read, position, depths=Depths())
                        read = torch.cat([read, state[:, -1:]], dim=1)
                    assert torch.allclose(states[0, number], read[0, -1], atol=1e-8)


def test_the_loss_is_the_divergence_from_the_model() -> None:
    model, one = tiny_model(), samples(1, 12)[0]
    one.ce_weight = [0.0] * 6 + [1.0] * 4
    one.temperature = 0.7
    trainer = DraftTrainer(model, moved(DraftHead(model)), MtpConfig(depth=1))
    batch = Batch.collate([one], CPU)
    with torch.no_grad():
        hidden, _ = Decoder(model).hidden(batch.row)
    ((_, states),) = trainer.states(batch.row.ids_1F, hidden)
    q, p = ((model.lm_head(x)[0] / 0.7).log_softmax(-1) for x in (states[:, 4:8], hidden[:, 5:9]))
    apart = (p.exp() - q.exp()).abs().sum(-1) / 2
    wanted = (p.exp() * (p - q)).sum(-1)
    gradients = torch.autograd.grad(wanted.sum(), [*trainer.head.parameters()])
    trainer.learn(batch, hidden)
    for master, gradient in zip(trainer.masters.named.values(), gradients, strict=True):
        assert torch.allclose(master.grad, gradient, rtol=1e-4, atol=1e-5)
    found = trainer.step()
    assert found["mtp/loss_1"] == pytest.approx(float(wanted.detach().mean()), rel=1e-4)
    assert found["mtp/kept_1"] == pytest.approx(float(1 - apart.detach().mean()), rel=1e-4)


def test_a_row_of_samples_teaches_what_each_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them too short to draft anything in."""
    monkeypatch.setattr(train_draft, "WINDOW", 8)
    model, learned = tiny_model(), [*samples(3, 24), *samples(2, 2)]
    for number, one in enumerate(learned):
        one.temperature = 1.0 - 0.2 * number
    found = []
    for rows in ([learned], [[one] for one in learned]):
        torch.manual_seed(0)
        trainer = DraftTrainer(model, moved(DraftHead(model)), MtpConfig(depth=3))
        for row in rows:
            batch = Batch.collate(row, CPU)
            with torch.no_grad():
                hidden, _ = Decoder(model).hidden(batch.row)
            trainer.learn(batch, hidden)
        found.append(torch.cat([parameter.grad.flatten() for parameter in trainer.head.parameters()]))
        assert trainer._tokens[0] == 22 + 21 + 20
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def test_it_lies_in_the_layout_that_vllm_loads(tmp_path: Path) -> None:
    """vLLM puts `model.` before each name, `Eagle` before the architecture, and takes embedding and head from the
    model: llama_eagle.py and configs/eagle.py of 0.24."""
    model = tiny_model()
    save_head(DraftHead(model), model, tmp_path)
    layer = "layers.0."
    projections = [f"{layer}self_attn.{one}_proj.weight" for one in "qkvo"]
    projections += [f"{layer}mlp.{one}_proj.weight" for one in ("gate", "up", "down")]
    names = {"fc.weight", f"{layer}post_attention_layernorm.weight", *projections}
    assert load_file(tmp_path / "model.safetensors").keys() == names
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["architectures"], told["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (told["num_hidden_layers"], told["hidden_size"], told["head_dim"], told["vocab_size"]) == (1, 48, 12, 300)
    assert told["rope_parameters"]["rope_theta"] == model.config.rope_parameters["rope_theta"]


def test_the_verb_trains_a_head_that_drafts(model: Path, tmp_path: Path) -> None:
    given = {"model": str(model), "out": str(tmp_path / "mtp"), "sft.data": '["pocket:60"]', "mtp.steps": "12"}
    own = {"harness.profile": "pocket", "mtp.batch_tokens": "1024", "mtp.depth": "2", "mtp.learning_rate": "3e-3"}
    config = load_config([], {**given, **own})
    rows: list[dict] = []
    result = mtp(config, rows.append)
    assert len(rows) == 12
    said = json.loads((tmp_path / "mtp" / "data.json").read_text())
    assert said == {"verb": "mtp", "sources": ["pocket:60"]}, "for the viewer"
    network = load_model(model)
    head = DraftHead(network)
    head.load_state_dict(load_file(next((tmp_path / "mtp").rglob("model.safetensors"))))
    apart, _ = split(read_samples(config, tell=lambda line: None), 0)
    decoder = Decoder(network)
    fresh = measure(DraftTrainer(network, DraftHead(network), config.mtp), decoder, apart, 8192)
    ours = measure(DraftTrainer(network, head, config.mtp), decoder, apart, 8192)
    assert ours["kept_1"] == pytest.approx(result["validation/kept_1"], abs=1e-3)
    assert ours["kept_1"] > 0.4 > fresh["kept_1"]
    assert ours["kept_2"] > 0.3
    with pytest.raises(OffbookError, match="is there already; give another --out"):
        mtp(config)
