"""What a run takes of memory: estimates against what autograd and the allocator say, and what follows from them."""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TEACHERS, in_bfloat16, random_ids, tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

from offbook.cli import app
from offbook.core.config import Config, LoraConfig, RanksConfig, TrainConfig, load_config, recipes
from offbook.core.config.files import RECIPES
from offbook.core.runfolder import RunFolder
from offbook.engine.vllm import Server
from offbook.engine.vllm.find import Found
from offbook.rl.plan import (
    MODES,
    Device,
    Mode,
    Way,
    as_planned,
    make_plan,
    meta_shapes,
    refuse_too_large,
    saved_storages,
    static_parts,
    step_parts,
)
from offbook.rl.resume import resumed
from offbook.train import head
from offbook.train.batches import Batch, Packed
from offbook.train.forward import Decoder
from offbook.train.head import Counts, Ledger
from offbook.train.lora import make_trainable
from offbook.train.parallel.spmd import share_of
from offbook.train.trainer import Trainer
from offbook.types import Branch, Distill, OffbookError, Sample

QWEN3_8B = {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
GPU = Device("a GPU of 150 GB", 150e9, is_gpu=True)


def middle_model(precision: str, vocabulary: int = 1000) -> PreTrainedModel:
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = Qwen3Config(vocab_size=vocabulary, num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, **shape)
    torch.manual_seed(0)
    return type(tiny_model())(config).to(getattr(torch, precision)).eval()


def sample_of(length: int) -> Sample:
    ids = [random.Random(length).randrange(1000) for _ in range(length)]
    return Sample(ids, logprobs=[-7.0] * length, advantage=[0.5] * length, rl_weight=[1.0] * length)


def held(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that are allocated at most while it runs, and afterwards, over those before."""
    gc.collect()  # what is freed meanwhile would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        kept = run()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most, now


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("lengths", [[200], [50, 50, 50, 50], [90, 70, 40]])
def test_what_a_layer_saves_is_what_autograd_counts(kind: str, precision: str, lengths: list[int]) -> None:
    model = tiny_model(kind)
    model = model if precision == "float32" else in_bfloat16(model)
    shapes = meta_shapes(model.config, TrainConfig(precision=precision))
    row = Packed.of([random_ids(random.Random(0), length) for length in lengths], torch.device("cpu"))
    decoder = Decoder(model, plain=True)
    with saved_storages(model.parameters()) as found:
        decoder.hidden(row)
    behind = (4 + 2 * (precision == "bfloat16")) * 48 + 4
    assert sum(found.values()) == pytest.approx(200 * (3 * shapes.saved + behind), rel=0.1)
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_activations_are_what_is_held_after_a_forward(mode: Mode, precision: str) -> None:
    """And the gradient of the head, which is taken there."""
    model = middle_model(precision)
    settings = TrainConfig(precision=precision, recompute=mode)
    trainer, sample = Trainer(model, settings), sample_of(512)
    batch, ledger = Batch.collate([sample], model.device), Ledger(Counts.of([sample]))
    _, found = held(lambda: trainer.loss(batch, ledger))
    shapes = meta_shapes(model.config, settings)
    parts = step_parts(shapes, Way(mode, False, 512), 512)
    assert parts["activations"] + shapes.width_bytes * shapes.head_entries == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("precision", "mode", "vocabulary"),
    [
        ("float32", "none", 1000),
        ("bfloat16", "layers", 1000),
        *(pytest.param("float32", mode, 1000, marks=pytest.mark.slow) for mode in ("layers", "all")),
        *(pytest.param("bfloat16", mode, 1000, marks=pytest.mark.slow) for mode in ("none", "all")),
        pytest.param("float32", "all", 40_000, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_the_peak_of_a_second_micro_batch(
    precision: str, mode: Mode, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When gradients are there already. With a large vocabulary that is in the head."""
    monkeypatch.setattr(head, "CHUNK_ENTRIES", 2**17)
    model = middle_model(precision, vocabulary)
    settings = TrainConfig(precision=precision, recompute=mode)
    trainer, length, sample = Trainer(model, settings), 512, sample_of(512)
    batch, ledger = Batch.collate([sample], model.device), Ledger(Counts.of([sample]))
    trainer.loss(batch, ledger).backward()
    most, _ = held(lambda: trainer.loss(batch, ledger).backward())
    found = sum(step_parts(meta_shapes(model.config, settings), Way(mode, False, length), length).values())
    assert found == pytest.approx(most, rel=0.15)


@pytest.mark.parametrize(("precision", "mode"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "layers")])
def test_the_estimate_is_near_the_peak_of_a_bounded_step(precision: str, mode: Mode) -> None:
    """Two micro-batches, each with hints, from before there are any gradients."""
    model, length = middle_model(precision), 64
    settings = TrainConfig(precision=precision, recompute=mode, micro_tokens=length)
    trainer = Trainer(model, settings, TEACHERS["frozen"])
    hint = Branch(40, [1, 2, 3], ((44, 60),), 1.0, Distill(by_policy=True, bound=0.3))
    samples = [replace(sample_of(length), branches=[hint]) for _ in range(2)]
    trainer.gradients(samples)
    trainer.optimizer.zero_grad()
    most, _ = held(lambda: trainer.gradients(samples))
    shapes = meta_shapes(model.config, settings)
    step = sum(step_parts(shapes, Way(mode, False, length), length, parts=2).values())
    assert static_parts(shapes, parts=2, bounded=1)["gradients"] + step == pytest.approx(most, rel=0.07)


def test_static_parts_are_what_a_trainer_holds() -> None:
    for precision, rank in (("float32", 0), ("bfloat16", 0), ("bfloat16", 4)):
        settings = TrainConfig(precision=precision, lora=LoraConfig(rank=rank))
        model = tiny_model() if precision == "float32" else in_bfloat16(tiny_model())
        shapes = meta_shapes(model.config, settings)
        make_trainable(model, settings.lora, "", 0)
        trainer = Trainer(model, settings)
        trainer.step([Sample([1, 2, 3], logprobs=[-1.0] * 3, advantage=[1.0] * 3, rl_weight=[1.0] * 3)])
        parts = static_parts(shapes)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        state = [value for one in trainer.optimizer.state.values() for value in one.values() if value.ndim]
        masters = [master for name, master in trainer.masters.named.items() if name in trainer.masters.copies]
        assert parts["weights"] == weights
        assert parts["optimizer state"] == sum(value.nbytes for value in state)
        assert parts["master weights"] == sum(master.nbytes for master in masters)
        assert bool(rank) == (shapes.trained < shapes.parameters)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    Qwen3Config(**QWEN3_8B, tie_word_embeddings=False).save_pretrained(tmp_path / "Qwen3-8B")
    return tmp_path / "Qwen3-8B"


HALF = {"train.precision": "bfloat16", "engine.precision": "bfloat16", "harness.context": "16384"}


def test_a_model_that_does_not_fit_is_refused_with_what_does(large: Path) -> None:
    config = load_config(["standard"], {"model": str(large), **HALF})
    plan = make_plan(config, GPU)
    assert not plan.fits
    with pytest.raises(OffbookError) as caught:
        refuse_too_large(config, plan)
    assert str(caught.value).startswith(f"{large} needs ")
    assert "a GPU of 150 GB has 150 GB; each of these takes less: --train.lora.rank 16, " in str(caught.value)
    adapted = load_config(["standard"], {"model": str(large), **HALF, "train.lora.rank": "16"})
    refuse_too_large(adapted, make_plan(adapted, GPU))
    whole, host = load_config(["standard"], {"model": str(large)}), Device("a machine", 30e9, is_gpu=False)
    with pytest.raises(OffbookError, match="a machine has 30 GB"):
        refuse_too_large(whole, make_plan(whole, host))
    short = load_config([], {"model": "smollm2-135m"})
    refuse_too_large(short, make_plan(short, Device("a small machine", 5e9, is_gpu=False)))  # its rollouts may be short
    tiny = Device("a GPU of 4 GB", 4e9, is_gpu=True)
    with pytest.raises(OffbookError, match="or a smaller model"):
        refuse_too_large(adapted, make_plan(adapted, tiny))


@pytest.mark.parametrize(
    ("options", "device", "said"),
    [
        ({"engine.kv_tokens": "8191"}, GPU, "holds 8191; raise engine.kv_tokens"),
        ({"engine.kv_tokens": "8191"}, Device("a machine", 150e9, is_gpu=False), "holds 8191; raise engine.kv_tokens"),
        (
            {"engine.kind": "vllm", "engine.vllm.gpu_share": "0.1"},
            GPU,
            "holds 0; raise engine.kv_tokens or engine.vllm.gpu_share, or lower harness.context",
        ),
    ],
)
def test_an_engine_that_cannot_hold_one_rollout_is_refused(
    large: Path, options: dict[str, str], device: Device, said: str
) -> None:
    told = {"model": str(large), **HALF, "harness.context": "8192", "train.lora.rank": "16", **options}
    config = load_config(["standard"], told)
    plan = make_plan(config, device)
    assert not plan.fits
    with pytest.raises(
        OffbookError, match=rf"^a rollout may have {plan.context} tokens \(harness.context\) and the engine {said}"
    ):
        refuse_too_large(config, plan)
    enough = (
        {"engine.kv_tokens": str(plan.context)} if "engine.kind" not in options else {"engine.vllm.gpu_share": "0.2"}
    )
    config = load_config(["standard"], {**told, **enough})
    refuse_too_large(config, make_plan(config, device))
    assert 0 <= plan.largest_context < plan.context


REAL_MODELS = (Path(__file__).parent.parent / "docs" / "real-models.md").read_text()


# A row of the table: recipe, GPU, and with vLLM, which may need to sleep.
ROWS = re.findall(r"^\| `@ (\S+)` \|[^|]*\| (?:from )?(\d+) GB \| (.*) \|$", REAL_MODELS, re.MULTILINE)


@pytest.mark.parametrize("recipe", [name for name in recipes() if "qwen" in name])
def test_every_recipe_fits_the_gpu_that_it_is_documented_for(recipe: str, tmp_path: Path) -> None:
    ((_, local, served),) = (row for row in ROWS if row[0] == recipe)
    described_in_recipe = (RECIPES / f"{recipe}.toml").read_text().splitlines()[0]
    assert f"GPU of {local} GB" in described_in_recipe
    awake, _, asleep = served.partition(";")
    sizes = [(local, {}), (*re.findall(r"\d+(?= GB)", awake), {"engine.kind": "vllm"})]
    if asleep:
        sizes.append((*re.findall(r"\d+(?= GB)", asleep), {"engine.kind": "vllm", "engine.vllm.sleep": "true"}))
    for gb, options in sizes:
        config, device = load_config([recipe], options), Device("the GPU", float(gb) * 1e9, is_gpu=True)
        plan = make_plan(config, device)
        refuse_too_large(config, plan)
        assert plan.need <= (1.0 if options else 0.99) * device.room, "some room is left; vLLM takes all of it"
        chosen = as_planned(config, plan)
        assert make_plan(chosen, device).parts == plan.parts, "what is given is kept"
        if not options:
            assert chosen.engine.kv_tokens == plan.kv_tokens > plan.context
            continue
        assert chosen.engine.vllm.gpu_share == plan.gpu_share
        assert f"engine.vllm.gpu_share {plan.gpu_share:g}" in str(plan)
        share = (plan.gpu_share or 0.0) * device.memory
        if "engine.vllm.sleep" in options:
            assert plan.parts["engine (vLLM's share)"] < share, "its part in a step"
        else:
            assert plan.parts["engine (vLLM's share)"] == pytest.approx(share)
        server = Server(tmp_path, chosen.engine.vllm, plan.context, tmp_path / "log", lambda what, share: None)
        command = server.command(Found("python", "0.32.0", on_cpu=False), 1)
        assert float(command[command.index("--gpu-memory-utilization") + 1]) == plan.gpu_share


def test_teachers_cost_what_they_copy(large: Path) -> None:
    def copy(teacher: str, rank: int) -> float:
        options = {"feedback.teacher": teacher, "train.lora.rank": str(rank)}
        return make_plan(load_config(["standard"], {"model": str(large), **HALF, **options}), GPU).parts["teacher copy"]

    assert copy("live", 0) == 0
    assert copy("frozen", 0) == copy("ema", 0) == 2 * 8_190_735_360
    assert 0 < copy("frozen", 16) < 0.2e9


def test_a_run_that_goes_on_is_computed_as_before(tmp_path: Path) -> None:
    then = Config(out=str(tmp_path), train=TrainConfig(recompute="layers", compile=True, micro_tokens=4096))
    now = Config(out=str(tmp_path), train=TrainConfig(micro_tokens=512))
    assert resumed(RunFolder(tmp_path), now) == now
    RunFolder(tmp_path).config_file.write_text(then.to_toml())
    (tmp_path / "ckpt" / "step_00001").mkdir(parents=True)
    (tmp_path / "ckpt" / "step_00001" / "DONE").touch()
    found = resumed(RunFolder(tmp_path), now).train
    assert (found.recompute, found.compile, found.micro_tokens) == ("layers", True, 512)


def test_a_rank_is_planned_by_its_share(large: Path) -> None:
    """A model that one GPU has no room for fits on 8."""
    config = load_config(
        ["standard"], {"model": str(large), **HALF, "engine.kind": "vllm", "engine.vllm.url": "http://x"}
    )
    with pytest.raises(OffbookError, match=r"needs \d+ GB here and a GPU of 150 GB has 150 GB"):
        refuse_too_large(config, make_plan(config, GPU))
    ranks = make_plan(config, GPU, share=share_of(config.train.mesh, 8))
    refuse_too_large(config, ranks)
    assert make_plan(config, GPU).way.micro_tokens < ranks.way.micro_tokens
    small = Device("a GPU of 50 GB", 50e9, is_gpu=True)
    with pytest.raises(OffbookError, match=r"^a rank of .* needs \d+ GB here and a GPU of 50 GB has 50 GB; "):
        refuse_too_large(config, make_plan(config, small, share=share_of(RanksConfig(replicate=4), 8)))


def test_the_verb(large: Path) -> None:
    options = [f"--{key}={value}" for key, value in HALF.items()]
    start = ["plan", "@", "standard", "--model"]
    shown = CliRunner().invoke(app, [*start, str(large), "--gpu-memory", "150", *options])
    assert shown.exit_code == 1
    for line in ("optimizer state", "engine KV cache", "room in a GPU of 150 GB", "does not fit; none fits"):
        assert line in shown.stdout
    given = [*start, str(large / "config.json"), "--gpu-memory", "150", *options, "--train.lora.rank", "16", "--json"]
    found = json.loads(CliRunner().invoke(app, given).stdout)
    assert found["fits"]
    assert found["need_bytes"] == pytest.approx(sum(found["parts"].values()))
    assert json.loads(CliRunner().invoke(app, ["plan", "smollm2-135m", "--json"]).stdout)["parameters"] == 134_515_008
    named = ["plan", "@", "qwen3-8b-lora", "--model", str(large), "--gpu-memory", "80", "--json"]
    assert json.loads(CliRunner().invoke(app, named).stdout)["fits"]
    here = CliRunner().invoke(app, ["plan", "pocket"])
    assert (here.exit_code, "it has no GPU" in here.stdout) == (0, True)
    assert "there is no model folder nowhere" in str(CliRunner().invoke(app, ["plan", "nowhere"]).exception)


def test_a_stage_needs_no_engine_and_may_read_more_than_the_model(tmp_path: Path) -> None:
    Qwen3Config(**QWEN3_8B).save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--gpu-memory", "141", "--json", "--train.precision", "bfloat16"]
    command += ["--train.lora.rank", "16", "--engine.kv_tokens", "9000"]
    planned = {}
    for context in (65_536, 262_144):
        done = CliRunner().invoke(app, [*command, "--stage", "pretrain", "--pretrain.context", str(context)])
        planned[context] = json.loads(done.output)
        assert planned[context]["context"] == context
        assert done.exit_code == (0 if planned[context]["fits"] else 1)
        assert not any("engine" in part for part in planned[context]["parts"]), planned[context]["parts"]
        assert planned[context]["kv_tokens"] is None
    assert planned[65_536]["fits"]
    assert planned[262_144]["need_bytes"] > 1.5 * planned[65_536]["need_bytes"]
    assert planned[262_144]["largest_context"] >= 65_536
    assert CliRunner().invoke(app, command).exit_code == 1, "rollouts of 32768 tokens do not fit into 9000"
