"""Adapters: what they train, what their teachers take, their folders, and models made of them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TEACHERS, saved, tiny_model
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_branches import hinted_logp, reference_logp, sample_with_branches, teacher_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from offbook.cli import app
from offbook.core.adapters import adapter_tensors
from offbook.core.config import Config, EngineConfig, LoraConfig, Precision, TrainConfig, load_config, recipe_for
from offbook.core.runfolder import RunFolder, base_named, latest_checkpoint
from offbook.engine import LocalEngine
from offbook.rl.models import load_model, load_weights, model_to_sample, model_to_train, trained_dialect, write_merged
from offbook.rl.train import train
from offbook.train.batches import Batch
from offbook.train.checkpoint import load_training_state
from offbook.train.forward import Ema, Frozen, Kind
from offbook.train.lora import WEIGHTS, adapter_of, load_adapter, make_trainable, save_adapter, stored_adapter
from offbook.train.trainer import Trainer
from offbook.types import OffbookError, Sample

RANK = LoraConfig(rank=4, alpha=8)
FAST = TrainConfig(learning_rate=1e-2, micro_tokens=128, lora=RANK)
IDS = torch.tensor([[1, 5, 2, 7, 3, 6, 4, 9]])


def adapted(model: PreTrainedModel, settings: LoraConfig = RANK) -> PreTrainedModel:
    make_trainable(model, settings, "", seed=0)
    return model


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """With an adapter that does something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def moe_model() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads)).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


def batch(seed: int = 0) -> list[Sample]:
    return [sample_with_branches(random.Random(seed))]


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("teacher", ["live", "frozen", "ema"])
@pytest.mark.parametrize("fresh", [True, False])
def test_branches_read_what_re_encoding_with_the_adapter_reads(teacher: str, fresh: bool) -> None:
    model = adapted(tiny_model()) if fresh else stirred(adapted(tiny_model()))
    trainer = Trainer(model, FAST, TEACHERS[teacher])
    own = {id(parameter) for parameter in teacher_model(trainer).parameters()}
    theirs = [p.numel() for p in trainer.model.parameters() if id(p) not in own]
    assert sum(theirs) == (0 if teacher == "live" else sum(map(torch.Tensor.numel, trainer.masters.named.values())))
    trainer.step(batch())
    with torch.no_grad():
        hinted = hinted_logp(trainer, Batch.collate(batch(), torch.device("cpu")))
        assert (hinted - reference_logp(trainer, batch())).abs().max() < 1e-4
    assert trainer.student.plain


def test_the_adapter_alone_is_trained_and_a_frozen_teacher_is_the_start() -> None:
    trainer = Trainer(adapted(tiny_model()), FAST, TEACHERS["frozen"])
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.step(batch())
    trainer.step(batch(1))
    for name, value in trainer.model.named_parameters():
        assert ("lora_" in name) == bool((value != before[name]).any()), name
    assert torch.equal(logits(teacher_model(trainer)), logits(tiny_model()))
    assert not torch.allclose(logits(trainer.model), logits(tiny_model()), atol=1e-2)


@pytest.mark.parametrize(
    ("precision", "teacher"),
    [("float32", Frozen()), ("bfloat16", Ema()), pytest.param("float32", Ema(), marks=pytest.mark.slow)],
)
def test_a_checkpoint_is_the_adapter_alone_and_goes_on_bit_for_bit(
    tmp_path: Path, base: Path, precision: Precision, teacher: Kind
) -> None:
    config = Config(model=str(base), train=FAST.model_copy(update={"precision": precision}))
    straight = Trainer(model_to_train(config, base), config.train, {"live": teacher, "start": Frozen()})
    for number in range(2):
        straight.step(batch(number))
    path = saved(straight, tmp_path, 2, base)
    stored = logits(straight.model)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < 600_000, "no base in it"
    for number in (2, 3):
        straight.step(batch(number))

    resumed = Trainer(model_to_train(config, base), config.train, {"live": teacher, "start": Frozen()})
    load_weights(resumed.model, path)
    load_training_state(resumed, path)
    assert torch.equal(logits(resumed.model), stored)
    assert torch.equal(logits(resumed.teachers["start"].decoder.model), logits(load_model(base, precision)))
    for number in (2, 3):
        resumed.step(batch(number))
    for name, master in straight.masters.named.items():
        assert torch.equal(master, resumed.masters.named[name]), name

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=precision), path)
    assert torch.allclose(logits(theirs.eval()), stored, atol=1e-5 if precision == "float32" else 0.1)
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert torch.equal(logits(load_model(path, precision)), stored), "an adapter's folder is a model"
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(path, dtype=precision)), stored, atol=0.1)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = load_model(base)
    make_trainable(model, RANK, str(base), seed=0)
    save_adapter(stirred(model), adapter_tensors(model), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_brings_its_own_settings(adapter: Path, base: Path, tmp_path: Path) -> None:
    """Over a recipe's and those of a run's file in which all weights were trained."""
    targets = sorted({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
    own = LoraConfig(rank=4, alpha=8, targets=targets)
    (tmp_path / "full.toml").write_text(Config(model=str(base)).to_toml())
    given = {"model": str(adapter)}
    for files in ([], ["qwen3-8b-lora"], [tmp_path / "full.toml"]):
        assert load_config(files, given).train.lora == own
    same = {"train.lora.rank": "4", "train.lora.targets": "[]"}
    assert load_config([], given | same).train.lora == own
    run = tmp_path / "run" / "ckpt" / "step_00003"
    run.parent.mkdir(parents=True)
    run.symlink_to(adapter)
    assert load_config([], {"model": str(tmp_path / "run")}).train.lora == own
    assert model_to_train(load_config([], given), adapter).peft_config["default"].r == 4
    planned = CliRunner().invoke(app, ["plan", str(adapter), "--json"])
    assert json.loads(planned.stdout)["trained"] == sum(
        tensor.numel() for tensor in stored_adapter(adapter).tensors.values()
    )


def wider_model() -> PreTrainedModel:
    config = tiny_model().config
    config.hidden_size = 96
    return type(tiny_model())(config)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: tiny_model(seed=1), "their weights differ"),
        (lambda: tiny_model("llama"), "their weights differ"),
        (wider_model, "their weights differ"),
    ],
)
def test_an_adapter_of_another_base_is_refused(adapter: Path, other: Callable[[], PreTrainedModel], said: str) -> None:
    with pytest.raises(OffbookError, match=f"{adapter} is an adapter of another model than .*: {said}"):
        load_adapter(other(), adapter)


def test_an_adapter_from_elsewhere_is_held_to_its_shapes(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    save_file(load_file(weights), weights)  # without what was said of its base
    load_adapter(tiny_model(seed=1), adapter)
    with pytest.raises(OffbookError, match="their shapes differ"):
        load_adapter(wider_model(), adapter)


def from_elsewhere(base: Path, folder: Path, **settings: object) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), PeftLoraConfig(r=4, **settings))
    stirred(model).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # it warns of what is refused here
def test_adapters_on_embeddings_are_refused_everywhere(base: Path, tmp_path: Path) -> None:
    folder = from_elsewhere(base, tmp_path / "theirs", target_modules=["embed_tokens", "q_proj"])
    said = f"^{folder} cannot be used, since it is on .*: only adapters on linear layers are supported"
    with pytest.raises(OffbookError, match=said):
        load_model(folder)
    with pytest.raises(OffbookError, match=said):
        write_merged(folder, tmp_path / "merged")
    with pytest.raises(OffbookError, match=said):
        stored_adapter(folder)
    assert not (tmp_path / "merged").exists()
    with pytest.raises(OffbookError, match=r"^train\.lora cannot be put on embed_tokens: only adapters on linear"):
        adapted(tiny_model(), LoraConfig(rank=4, targets=["model.embed_tokens", "q_proj"]))


def test_an_adapter_without_usable_weights_is_refused(adapter: Path, tmp_path: Path) -> None:
    cut = (adapter / WEIGHTS).read_bytes()[:-10]
    for kept, said in ((cut, "cannot be read"), (b"", "cannot be read"), (None, f"has no {WEIGHTS}")):
        (adapter / WEIGHTS).unlink()
        if kept is not None:
            (adapter / WEIGHTS).write_bytes(kept)
        for refused in (
            lambda: load_model(adapter),
            lambda: stored_adapter(adapter),
            lambda: write_merged(adapter, tmp_path / "merged"),
        ):
            with pytest.raises(OffbookError, match=said):
                refused()
        assert re.search(said, str(CliRunner().invoke(app, ["plan", str(adapter)]).exception))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_engine_gets_the_adapter_alone_and_shares_the_base(base: Path, precision: Precision) -> None:
    config = Config(model=str(base), train=FAST, engine=EngineConfig(precision=precision))
    trained = model_to_train(config, base)
    engine = LocalEngine(model_to_sample(config, base, trained), frozenset())
    trainer = Trainer(trained, FAST)
    trainer.step([plain(0)])
    weights = trainer.publish(version=1)
    assert len(weights.tensors) == len(trainer.masters.named)
    assert json.loads(json.dumps(weights.adapter))["r"] == FAST.lora.rank
    engine.apply(weights)
    assert torch.allclose(logits(engine.model), logits(trainer.model), atol=1e-4 if precision == "float32" else 0.5)
    shared = {id(p) for p in trainer.model.parameters()} & {id(p) for p in engine.model.parameters()}
    assert bool(shared) == (precision == "float32")
    trainer.step([plain(1)])
    assert not torch.equal(logits(engine.model), logits(trainer.model)), "until the next weights are applied"


def plain(seed: int) -> Sample:
    sample = sample_with_branches(random.Random(seed))
    sample.branches = []
    return sample


def test_a_merged_model_knows_nothing_of_adapters(adapter: Path, base: Path, tmp_path: Path) -> None:
    write_merged(adapter, tmp_path / "merged")
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert adapter_of(one) is None
    assert torch.allclose(logits(one), logits(load_model(adapter)), atol=1e-3)
    assert one.config.tie_word_embeddings
    assert one.lm_head.weight is one.model.embed_tokens.weight
    with pytest.raises(OffbookError, match="is there already"):
        write_merged(adapter, tmp_path / "merged")
    with pytest.raises(OffbookError, match="nothing to merge"):
        write_merged(base, tmp_path / "again")


@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_says_which_dialect_it_was_trained_with(base: Path, tmp_path: Path, rank: int) -> None:
    lora = {"lora": {"rank": rank}}
    config = Config(model=str(base), train=lora, harness={"dialect": "json"})
    first = saved(Trainer(model_to_train(config, base), config.train, TEACHERS["live"]), tmp_path / "first")
    assert (trained_dialect(base), trained_dialect(first)) == ("auto", "json")
    silent = Config(model=str(first), train=lora)
    second = saved(Trainer(model_to_train(silent, first), silent.train, TEACHERS["live"]), tmp_path / "second")
    assert trained_dialect(second) == "json", "the next run goes on with it"
    changed = Config(model=str(first), train=lora, harness={"dialect": "hermes"})
    third = saved(Trainer(model_to_train(changed, first), changed.train, TEACHERS["live"]), tmp_path / "third")
    assert trained_dialect(third) == "hermes"
    if rank:
        write_merged(second, tmp_path / "merged")
        assert trained_dialect(tmp_path / "merged") == "json"


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(adapted(tiny_model()), FAST, TEACHERS["live"])
    trainer.step(batch())
    path = saved(trainer, tmp_path)
    file = path / "training" / "optimizer.safetensors"
    save_file({name: one.flatten() for name, one in load_file(file).items()}, file)
    with pytest.raises(OffbookError, match=r"lora_.*/exp_avg.* in another shape; start a new run"):
        load_training_state(trainer, path)


def test_adapters_on_fused_experts_are_refused(tmp_path: Path) -> None:
    trainer = Trainer(adapted(tiny_model()), FAST)
    path = saved(trainer, tmp_path)
    tensors = load_file(path / WEIGHTS)
    tensors["base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"] = torch.zeros(2, 4)
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(OffbookError, match=r"it is on .*experts.*: only adapters on linear layers"):
        stored_adapter(path)


def test_a_run_with_adapters_stops_and_goes_on_and_another_starts_from_it(
    cache: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other with an engine that holds two rollouts of six."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(cache))
    told = {"tasks.num_train": "4", "tasks.num_heldout": "2", "train.groups": "2", "train.group_size": "3"}
    told |= {"train.learning_rate": "1e-3", "feedback.look": "false"}  # a model that is half made follows no hints

    def run(name: str, start: Path, steps: int) -> Path:
        own = {"train.lora.rank": "8"} if start == model else {"engine.kv_tokens": "1024"}  # an adapter has its rank
        more = {"model": str(start), "out": str(tmp_path / name), "train.steps": str(steps)}
        return train(load_config([], {**told, **own, **more})).path

    straight, halved = run("straight", model, 2), run("halved", model, 1)
    run("halved", model, 2)
    stored = [folder / "ckpt" / "step_00002" for folder in (straight, halved)]
    assert stored[0].joinpath(WEIGHTS).read_bytes() == stored[1].joinpath(WEIGHTS).read_bytes()
    assert not list(straight.glob("ckpt/*/model.safetensors"))
    (row, last), _ = RunFolder(straight).metrics()
    assert max(row["rl/mismatch"], last["rl/mismatch"]) < 1e-4, "the engine has the adapter too"
    assert recipe_for(str(straight)) == "pocket"
    onward = run("onward", latest_checkpoint(RunFolder(straight)), 1)
    assert base_named(latest_checkpoint(RunFolder(onward))) == str(model)
