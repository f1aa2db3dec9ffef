"""Demonstrations on factory tasks: what the scripted expert does through the real tools, and what of it is learned."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from pathlib import Path

import pytest
from conftest import tiny_model
from little_repo import deps, little, with_deps
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from offbook.agent.chat import ChatFormat
from offbook.api import configure
from offbook.cli import app
from offbook.core.config import Config, ConfigError, load_config
from offbook.core.runfolder import RunFolder, dump_lines, latest_checkpoint
from offbook.pocket.model import CHAT_TEMPLATE
from offbook.rl.models import quiet
from offbook.sandbox import SandboxSpec
from offbook.signals.trajectory.formats import UNLEARNED
from offbook.stages import demos as demos_of
from offbook.stages.demos import Demos, chosen
from offbook.stages.pipeline import of_stage
from offbook.stages.reminders import Conversation
from offbook.stages.sft import make_lessons
from offbook.stages.sources import read_sources, refuse_missing_data
from offbook.tasks import load_tasks
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import make_tasks
from offbook.types import Flag, OffbookError, Rollout

__all__ = ["deps"]


@pytest.fixture(scope="module")
def made(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("demos")
    source, out = little(place / "little"), place / "out"
    with_deps(out, source, deps)
    settings = MakeSettings(level="stub", wording="detailed", max_tasks=2, heldout=0.0)
    asyncio.run(make_tasks([str(source)], out, SandboxSpec(), settings))
    assert len(load_tasks(out / "train")) == 2
    return out


@pytest.fixture(scope="module")
def model(chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It reads and writes bytes, and many of them."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    network = tiny_model("llama")
    network.config.max_position_embeddings = 100_000
    network.save_pretrained(folder)
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer, **marks).save_pretrained(folder)
    return folder


def settings(model: Path, data: str, seed: int = 0, **harness: object) -> Config:
    limits = {"context": 60_000, "summarize_at": 0, "message_tokens": 6000, **harness}
    return configure(model=str(model), out="runs/none", seed=seed, sft={"data": [data]}, harness=limits)


def rollouts_of(config: Config) -> list[Rollout]:
    (source,) = read_sources(config, Path(config.model), quiet)
    return source.rollouts


def conversations_of(config: Config) -> list[Conversation]:
    lessons = make_lessons(config, Path(config.model), quiet, lambda line: None)
    return [*lessons.learned, *lessons.held_out]


def learned_text(conversation: Conversation, chat: ChatFormat) -> str:
    segment = conversation.segment
    return chat.decode([one for one, sampled in zip(segment.ids, segment.sampled, strict=True) if sampled])


def code_lines(made: Path) -> set[str]:
    """Lines that the gold patches add and that are not in the trees already."""
    found = set[str]()
    for task in load_tasks(made / "train"):
        for path, text in gold_changes(task).items():
            there = (task.tree / path).read_text()
            found |= {line.strip() for line in (text or "").splitlines() if len(line.strip()) > 20} - {
                line.strip() for line in there.splitlines()
            }
    return found


@pytest.mark.parametrize("profile", ["standard", "worked", "bash"])
def test_every_task_is_shown_and_its_code_is_learned(
    profile: str, made: Path, model: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, f"demos:{made}:3", profile=profile)
    rollouts = rollouts_of(config)
    assert {rollout.task for rollout in rollouts} == {task.id for task in load_tasks(made / "train")}
    assert all(rollout.solved and rollout.stop == "finish" and not rollout.flags for rollout in rollouts)
    spoken = {tuple(m.text for m in one.segments[0].messages if m.role == "assistant") for one in rollouts}
    assert len(spoken) == len(rollouts), "no two are the same"
    lines = code_lines(made)
    assert len(lines) > 3
    conversations, with_code = conversations_of(config), 0
    for conversation in conversations:
        whole, learned = chat.decode(conversation.segment.ids), learned_text(conversation, chat)
        written = {line for line in lines if line in whole or json.dumps(line)[1:-1] in whole}
        assert written, "the edits are there to be read"
        with_code += any(line in learned or json.dumps(line)[1:-1] in learned for line in written)
        edits = (
            r"sed -i|new = r'''"
            if profile == "bash"
            else r'"edit_file", "arguments": \{"path": "little/\w+.py", "old": "'
        )
        assert re.search(edits, learned), "how an edit is called is learned"
    assert with_code > len(conversations) / 2, "of some the only edit with code is a mistake made on purpose"
    sampled = [list(conversation.segment.sampled) for conversation in conversations]
    assert [conversation.segment.sampled for conversation in conversations_of(config)] == sampled
    monkeypatch.setattr(demos_of.asyncio, "run", None)  # what is cached is not made again
    assert [rollout.id for rollout in rollouts_of(config)] == [rollout.id for rollout in rollouts]


@pytest.mark.parametrize("profile", ["standard", "bash"])
def test_what_goes_wrong_on_purpose_is_mended_and_not_learned(profile: str, made: Path, model: Path) -> None:
    config = settings(model, f"demos:{made}:6", seed=3, profile=profile)
    slips = [
        (rollout, rollout.segments[0].messages, event.message)
        for rollout in rollouts_of(config)
        for event in rollout.events
        if event.kind == UNLEARNED
    ]
    assert len(slips) >= 2
    for rollout, messages, number in slips:
        assert messages[number].calls
        assert rollout.solved
        rest = messages[number + 1 :]
        shown = [message for message in rest if message.role == "tool" and (
            message.status != "ok" or re.search(r"Error|failed|exit |returncode>1", message.text))]  # fmt: skip
        assert shown, "a tool says so"
    not_learned = {messages[number].text for _, messages, number in slips}
    for conversation in conversations_of(config):
        own = [one.text for one in conversation.segment.messages if conversation.segment.is_own(one)]
        assert not_learned.isdisjoint(own)


def test_small_messages_make_small_edits(made: Path, model: Path) -> None:
    """And what does not fit at all is left out, with the reason."""
    (whole, *_), limit = rollouts_of(settings(model, f"demos:{made}:1")), 250
    assert max(m.body_end - m.body for m in whole.segments[0].messages if m.role == "assistant") > limit
    for rollout in rollouts_of(settings(model, f"demos:{made}:1", message_tokens=limit)):
        own = [message for message in rollout.segments[0].messages if message.role == "assistant"]
        assert max(message.end - message.body for message in own) <= limit + 2
        assert rollout.solved
    with pytest.raises(OffbookError, match=r"nothing to learn from: ended by harness.turns; tasks without"):
        rollouts_of(settings(model, f"demos:{made}:1", turns=3))
    with pytest.raises(OffbookError, match="an edit of the gold patch does not fit"):
        rollouts_of(settings(model, f"demos:{made}:1", message_tokens=120))


def test_held_out_tasks_are_not_shown(made: Path, model: Path) -> None:
    config = settings(model, "demos")
    config = config.model_copy(update={"tasks": replace_tasks(config, str(made), 0.4)})
    (source,) = read_sources(config, model, quiet)
    assert source.left_out["held-out tasks"] == 1
    assert len({rollout.task for rollout in source.rollouts}) == 1
    assert len(source.rollouts) == demos_of.PER_TASK


def replace_tasks(config: Config, source: str, share: float) -> object:
    return config.tasks.model_copy(update={"source": source, "heldout_share": share})


def test_the_source_is_read_from_its_name(made: Path, model: Path, tmp_path: Path) -> None:
    config = settings(model, "demos")
    assert Demos.named("demos:a/b:7", config) == Demos("a/b", 7)
    assert Demos.named("demos:7", config) == Demos(config.tasks.source, 7)
    assert Demos.named("demonstrations", config) is None
    for name, why in {
        "demos": "demos are of a folder of tasks and not of pocket",
        "demos:none": "there is no task folder none",
        f"demos:{made}:0": "demonstrates nothing",
    }.items():
        with pytest.raises((ConfigError, OffbookError), match=why):
            refuse_missing_data(settings(model, name))


def test_a_round_of_rejection_sampling_keeps_the_best_of_each_task(made: Path, model: Path) -> None:
    rollouts = rollouts_of(settings(model, f"demos:{made}:6"))
    failed, flagged = copy.deepcopy(rollouts[:2])
    failed.reward.parts["outcome"] = 0.0
    flagged.flags.append(Flag("restored", 0, "from the history"))
    kept = chosen([*rollouts, failed, flagged])
    by_task = {task: [one for one in rollouts if one.task == task] for task in {one.task for one in rollouts}}
    assert len(kept) == 2 * len(by_task)
    for task, of_task in by_task.items():
        best = sorted((one.usage.invalid_calls, one.usage.sampled_tokens) for one in of_task)[:2]
        assert [(one.usage.invalid_calls, one.usage.sampled_tokens) for one in kept if one.task == task] == best


def test_stages_measure_imitate_and_sample_in_rounds(made: Path, model: Path, tmp_path: Path) -> None:
    """What was kept of one round joins the data of the next, and the same command finds all of them done."""
    order = ["eval", "sft", "sample", "sft", "eval"]
    options = {
        "stages.order": json.dumps(order),
        "tasks.source": str(made),
        "tasks.heldout_share": "0.4",
        "sft.data": '["demos:1"]',
        "sft.learning_rate": "1e-6",
        "harness.turns": "20",
        "harness.context": "30000",
        "harness.summarize_at": "0",
        "harness.message_tokens": "3000",
        "harness.wall_s": "6",
        "train.group_size": "2",
        "eval.samples": "1",
    }
    command = ["stages", "--model", str(model), "--out", str(tmp_path / "run")]
    command += [word for key, value in options.items() for word in (f"--{key}", value)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert [row["stage"] for row in rows] == order
    assert len({row["run"] for row in rows}) == len(order)
    assert "1-eval" in done.stdout.splitlines()[-8:][0] or "5-eval" in done.stdout
    kept = tmp_path / "run" / "3-sample" / "kept.jsonl"
    assert kept.read_bytes() == b"", "a random model solves nothing"
    first, second = (load_config([tmp_path / "run" / name / "config.toml"], {}) for name in ("2-sft", "4-sft"))
    assert first.sft.data == second.sft.data == ["demos:1"]
    assert second.model == str(latest_checkpoint(RunFolder(tmp_path / "run" / "2-sft")))
    kept.write_bytes(dump_lines(rollouts_of(settings(model, f"demos:{made}:1"))))
    assert of_stage(second, "sft", tmp_path, "m", [str(kept)]).sft.data == ["demos:1", str(kept)]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "run" / "stages.json").read_text())[1] == rows[1]


def test_what_fits_the_model_holds_for_later_stages(made: Path, model: Path, tmp_path: Path) -> None:
    """It was found before, by the same command."""
    found = tmp_path / "run" / "1-fit" / "fit.json"
    found.parent.mkdir(parents=True)
    found.write_text(json.dumps({"profile": "worked", "dialect": "json"}))
    command = ["stages", "--model", str(model), "--out", str(tmp_path / "run"), "--json"]
    command += ["--stages.order", '["fit", "eval"]', "--tasks.source", str(made), "--tasks.heldout_share", "0.4"]
    command += ["--eval.samples", "1", "--harness.turns", "1", "--harness.message_tokens", "8"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    harness = load_config([tmp_path / "run" / "2-eval" / "config.toml"], {}).harness
    assert (harness.profile, harness.dialect) == ("worked", "json")
    rows = json.loads((tmp_path / "run" / "stages.json").read_text())
    assert (rows[0]["profile"], rows[0]["dialect"], rows[1]["solved"]) == ("worked", "json", [0.0, 0.0])
