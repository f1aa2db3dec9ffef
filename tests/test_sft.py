"""Imitation: what is read, what is learned of it, what reminders are put in, and a run that survives kill -9."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file
from test_trajectories import CALLS, atif, openai, parallel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from offbook.agent.chat import ChatFormat
from offbook.api import configure, sft
from offbook.cli import app
from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, dump_lines, latest_checkpoint, load_lines
from offbook.pocket.demonstrations import HARNESS, _rollouts
from offbook.pocket.model import CHAT_TEMPLATE
from offbook.rl.models import quiet
from offbook.rl.train import train
from offbook.signals.feedback import RULES
from offbook.stages.conversations import Renderer, batches_of, split
from offbook.stages.reminders import WORDINGS, Conversation, Reminders, read
from offbook.stages.run import Lessons
from offbook.stages.sft import make_lessons
from offbook.stages.sources import Source, read_sources
from offbook.train.algorithms import hint_branch, sft_sample
from offbook.types import Hint, OffbookError, Rollout, Target
from offbook.view.answers import curves
from offbook.view.index import RunIndex

TOOL = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}  # fmt: skip


def chat_line(number: int, turns: int = 1) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {number} + {turn}?" * (1 + number % 3)})
        messages.append({"role": "assistant", "content": f"It is {number + turn}."})
    return {"messages": messages}


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, chat: ChatFormat) -> Path:
    """A random model that reads and writes bytes."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model = tiny_model("llama")
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=chat.tokenizer, **marks).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def demonstrated(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with scripted rollouts, mistakes included, in the tiny model's ids; every fourth is worth 1."""
    harness = replace(HARNESS, limits=replace(HARNESS.limits, tokens=8192, context=8192))
    folder = tmp_path_factory.mktemp("runs") / "demonstrated"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text('model = "tiny"\n')
    (folder / "rollouts" / "step_00001.jsonl").write_bytes(_rollouts(tiny, harness, 1, 0, 40))
    rollouts, _ = RunFolder(folder).rollouts(1)
    for rollout in rollouts[::4]:
        rollout.reward.parts["outcome"] = 1.0
    RunFolder(folder).write_rollouts(1, rollouts)
    return folder


def settings(model: Path, data: Path | list[Path], out: Path | str = "runs/none", **more: Any) -> Config:
    names = [str(one) for one in (data if isinstance(data, list) else [data])]
    sections: dict[str, Any] = {"train": {}, "checkpoint": {"every": 1, "keep": 9}, "harness": {"context": 8192}}
    for key in ("train", "checkpoint", "harness", "feedback"):
        sections[key] = {**sections.get(key, {}), **more.pop(key, {})}
    return configure(model=str(model), out=str(out), sft={"data": names, **more}, **sections)


def lessons_of(config: Config) -> Lessons:
    return make_lessons(config, Path(config.model), quiet, lambda line: None)


def reminders_of(config: Config) -> Reminders:
    renderer = Renderer.of(Path(config.model), config)
    return Reminders(renderer.chat, config.sft, config.seed, renderer.context)


def naive_loss(model: Path, conversations: list[dict[str, Any]]) -> float:
    """transformers alone: its tokenizer's template, its model, its cross-entropy, each conversation by itself."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for messages in (conversation["messages"] for conversation in conversations):
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        labels = [-100] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
                whole = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
                labels[len(prompt) : len(whole) - 1] = ids[len(prompt) : len(whole) - 1]  # the newline is not its own
        learned = sum(label != -100 for label in labels)
        with torch.no_grad():
            total += learned * float(network(torch.tensor([ids]), labels=torch.tensor([labels])).loss)
        count += learned
    return total / count


def test_the_loss_is_that_of_each_conversation_alone(tiny: Path, tmp_path: Path) -> None:
    lines = [chat_line(number, turns=1 + number % 4) for number in range(7)]
    config = settings(tiny, written(tmp_path / "a.jsonl", lines), tmp_path / "run", validation_share=0.0)
    rows: list[dict[str, Any]] = []
    sft(config, rows.append)
    assert len(rows) == 1
    assert rows[0]["conversations"] == 7
    assert rows[0]["ce/loss"] == pytest.approx(naive_loss(tiny, lines), abs=1e-6)


def test_the_validation_loss_is_exact(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tokens of what was kept apart, with the weights that the run ends with; seen every so many steps."""
    lines = [chat_line(number, turns=1 + number % 4) for number in range(12)]
    data = written(tmp_path / "a.jsonl", lines)
    monkeypatch.setattr("offbook.stages.run.VALIDATION_EVERY", 2)
    more = {"validation_share": 0.3, "batch_tokens": 500, "learning_rate": 1e-3}
    config = settings(tiny, data, tmp_path / "run", **more)
    rows: list[dict[str, Any]] = []
    folder = sft(config, rows.append)
    apart = [int(one.key.split("/")[1]) for one in lessons_of(config).held_out]
    assert len(apart) == 4
    assert [row["step"] for row in rows if "validation/loss" in row] == [2, 3]
    expected = naive_loss(latest_checkpoint(folder), [lines[number] for number in apart])
    assert rows[-1]["validation/loss"] == pytest.approx(expected, abs=1e-6)
    assert rows[-1]["validation/loss"] < rows[-2]["validation/loss"]
    run = RunIndex("run", folder.path)
    run.refresh()
    assert "validation/loss" in curves(run)["series"]
    assert {row["steps"] for row in rows} == {3}
    assert "steps" not in folder.metrics()[0][0]


def test_a_message_of_weight_0_is_read_and_not_learned(tiny: Path, tmp_path: Path, chat: ChatFormat) -> None:
    call = {"name": "bash", "arguments": '{"command": "ls"}'}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": call}], "weight": 0},
        {"role": "tool", "tool_call_id": "1", "content": "a.py"},
        {"role": "assistant", "content": "GOOD", "weight": 1},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "BAD", "weight": 0},
    ]
    half = {"messages": [*messages[:-1], {**messages[-1], "weight": 0.5}]}
    data = written(tmp_path / "a.jsonl", [{"messages": messages, "tools": [TOOL]}, half])
    found = lessons_of(settings(tiny, data, validation_share=0.0, reminders=1.0))
    (conversation,) = found.learned
    assert (found.read["left_out"], conversation.kept) == ({"could not be read": 1}, {})
    (sample,) = found.samples(1, found.learned, Counter())
    learned = [id for id, weight in zip(sample.ids, sample.ce_weight, strict=True) if weight]
    assert chat.decode(learned) == "GOOD<|im_end|>"
    assert '"command": "ls"' in chat.decode(sample.ids)
    unweighed = [{**message, "weight": 1} for message in messages]
    written(data, [{"messages": unweighed, "tools": [TOOL]}])
    (other,) = lessons_of(settings(tiny, data, validation_share=0.0)).learned
    assert 2 in other.kept, "which reminders would stand before"
    for message in messages:
        message["weight"] = 0
    written(data, [{"messages": messages}])
    with pytest.raises(OffbookError, match=r"no conversation is left to learn from \(1 dropped: nothing to learn"):
        lessons_of(settings(tiny, data))


def sources(config: Config) -> list[Source]:
    return list(read_sources(config, Path(config.model), quiet))


def test_sources_are_told_by_their_content(tiny: Path, tmp_path: Path, demonstrated: Path) -> None:
    rollouts = RunFolder(demonstrated).rollouts(1)[0]
    (tmp_path / "many").mkdir()
    files = [
        demonstrated,
        written(tmp_path / "rollouts.txt", []),
        written(tmp_path / "an.atif", [atif(*CALLS)]),
        written(tmp_path / "openai.json", [openai(*CALLS)]),
        written(tmp_path / "chat", [{**chat_line(1), "tools": [TOOL]}, chat_line(2)]),
        tmp_path / "many",
    ]
    files[1].write_bytes(dump_lines(rollouts[:3]))
    for name in ("a.json", "b.jsonl"):
        written(tmp_path / "many" / name, [chat_line(3)])
    config = settings(tiny, files)
    assert [len(source.rollouts) for source in sources(config)] == [40, 3, 1, 1, 2, 2]
    found = make_lessons(config, tiny, quiet, lambda line: None)
    texts = [reminders_of(config).chat.decode(one.segment.ids) for one in [*found.learned, *found.held_out]]
    assert sum('<tool_call>{"name": "str_replace_editor"' in text for text in texts) == 2
    assert sum('"name": "bash", "description": "Run."' in text for text in texts) == 1, "the tools are told of"
    (one,) = sources(settings(tiny, demonstrated, min_reward=1.0))
    assert (len(one.rollouts), one.left_out) == (10, Counter({"earned less than 1": 30}))


def test_bad_lines_are_counted_said_and_left_out(tiny: Path, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "?"}]}
    data = written(tmp_path / "a.jsonl", [chat_line(1), "{\n", {"text": "no"}, chat_line(2), silent, {"messages": 3}])
    (source,) = sources(settings(tiny, data))
    told = f"{data}: 2 conversations; 1 left out (no message of an assistant); 3 could not be read ({data}:2 (not JSON)"
    assert str(source).startswith(told + f", {data}:3 (no messages), {data}:6 (")
    human = {"messages": [{"role": "human", "content": "?"}, {"role": "gpt", "content": "!"}]}
    for lines, reason in (
        ([silent], "no message of an assistant"),
        (["x\n", "{}\n"], r"b.jsonl:1 \(not JSON\); .*b.jsonl:2 \(no messages\)"),
        ([human] * 5, r"b.jsonl:1 \('human' is none of the roles .*b.jsonl:3 \("),
        (["\n"], "b.jsonl has no trajectory in it"),
    ):
        with pytest.raises(OffbookError, match=f"has nothing to learn from: .*{reason}"):
            sources(settings(tiny, written(tmp_path / "b.jsonl", lines)))


def test_what_would_be_learned_in_part_is_not_learned(tiny: Path, tmp_path: Path) -> None:
    whole, stray = parallel(("2", "two"), ("1", "one")), parallel(("2", "two"), ("3", "three"))
    empty = {"messages": [*chat_line(1)["messages"], {"role": "user", "content": None}]}
    data = written(tmp_path / "a.jsonl", [whole, stray, empty])
    (source,) = sources(settings(tiny, data))
    assert [one.text for one in source.rollouts[0].segments[0].messages[2:4]] == ["one", "two"]
    told = f"{data}: 1 conversations; 2 could not be read ({data}:2 (an answer to '3', which is no call"
    assert str(source).startswith(told)
    assert str(source).endswith(f"{data}:3 (a message of the user without text))")


def test_thoughts_are_learned_as_the_chat_has_them(tiny: Path, tmp_path: Path, chat: ChatFormat) -> None:
    call = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "a.py"},
        {"role": "assistant", "content": "It is there."},
    ]
    (source,) = sources(settings(tiny, written(tmp_path / "a.jsonl", [{"messages": messages}])))
    made = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|im_end|>'
    for opening, learned in (
        ("", f"<think>\nhm\n</think>\n\n{made}It is there."),
        ("<think>\n", f"hm\n</think>\n\n{made}\n</think>\n\nIt is there."),
        ("<think>\n\n</think>\n\n", f"{made}It is there."),
    ):
        thinker = ChatFormat(chat.tokenizer, opening=opening)
        (segment,) = Renderer(thinker, 300, 8192, {}).segments(source.rollouts[0], (), Counter())
        sample = sft_sample(segment)
        ids = [id for id, weight in zip(sample.ids, sample.ce_weight, strict=True) if weight]
        assert chat.decode(ids) == f"{learned}<|im_end|>"
        assert [len(message.calls) for message in segment.messages] == [0, 1, 0, 0], "a thought hides no call"


def test_ids_of_our_own_are_taken_as_they_are(tiny: Path, tmp_path: Path, demonstrated: Path) -> None:
    """Those of another tokenizer are written again, and come to the same where the chat is the same."""
    rollouts, _ = RunFolder(demonstrated).rollouts(1)
    config = settings(tiny, demonstrated, validation_share=0.0)
    assert [one.segment.ids for one in lessons_of(config).learned] == [one.segments[0].ids for one in rollouts]
    for rollout in rollouts:
        rollout.segments[0].ids = [(id * 7 + 5) % 260 for id in rollout.segments[0].ids]
    (tmp_path / "other.jsonl").write_bytes(dump_lines(rollouts))
    lines: list[str] = []
    found = make_lessons(settings(tiny, tmp_path / "other.jsonl", validation_share=0.0), tiny, quiet, lines.append)
    assert any("40 written again" in line for line in lines)
    assert [one.segment.ids for one in found.learned] == [
        one.segments[0].ids for one in RunFolder(demonstrated).rollouts(1)[0]
    ]


def test_what_is_longer_than_the_context_is_cut_after_a_message(tiny: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", [chat_line(0, turns=20), chat_line(1)])
    lines: list[str] = []
    config = settings(tiny, data, harness={"context": 300}, validation_share=0.0)
    found = make_lessons(config, tiny, quiet, lines.append).learned
    assert [len(one.segment.ids) <= 300 for one in found] == [True, True]
    assert all(one.segment.messages[-1].role == "assistant" for one in found)
    assert any("1 cut" in line for line in lines)
    with pytest.raises(OffbookError, match="no conversation is left to learn from"):
        lessons_of(settings(tiny, data, harness={"context": 20}))


def test_batches_hold_every_conversation_once_and_all_lengths() -> None:
    lengths = [random.Random(n).randrange(10, 400) for n in range(900)]
    batches = batches_of(lengths, 1000, random.Random(0))
    assert sorted(number for batch in batches for number in batch) == list(range(900))
    assert all(sum(lengths[number] for number in batch) <= 1000 for batch in batches)
    assert sum(lengths) > 750 * (len(batches) - 1), "a batch is about full"
    spread = [max(lengths[number] for number in batch) - min(lengths[number] for number in batch) for batch in batches]
    assert sorted(spread)[len(spread) // 2] > 100, "short and long ones are learned from together"
    assert batches != batches_of(lengths, 1000, random.Random(1))


def test_conversations_of_one_task_stay_together(demonstrated: Path) -> None:
    rollouts, _ = RunFolder(demonstrated).rollouts(1)
    many = [Conversation(str(n), f"task{n // 4}", rollouts[0].segments[0], ()) for n in range(40)]
    learned, apart = split(many, lambda one: one.task, 0.2, 0)
    assert len(apart) == 8
    assert {one.task for one in learned}.isdisjoint({one.task for one in apart})
    assert split(many[:4], lambda one: one.task, 0.2, 0)[1] == []


def texts_of(rule: str) -> tuple[str, ...]:
    """What tells a reminder of a rule from all others."""
    return tuple(text.partition("{tools}")[0] for text in (RULES[rule].text, *WORDINGS[rule]))


def test_reminders_stand_before_right_messages_where_hints_teach(tiny: Path, demonstrated: Path) -> None:
    config = settings(tiny, demonstrated, validation_share=0.0)
    lessons, reminders = lessons_of(config), reminders_of(config)
    chat, seen, texts = reminders.chat, Counter[str](), ""
    for epoch in range(1, 17):
        for one in lessons.learned:
            sample = reminders.sample(one, epoch, seen)
            seen["kept"] += len(one.kept) + len(one.spared)
            texts += chat.decode(sample.ids)
            bare = sft_sample(one.segment)
            assert sum(sample.ce_weight) == sum(bare.ce_weight), "a reminder is not learned itself"
    assert 0.37 <= seen["reminded"] / seen["kept"] <= 0.43
    for rule in ("unknown_tool", "edited_tests"):
        stated = sum(texts.count(text) for text in texts_of(rule))
        assert 0 < sum(texts.count(text) for text in texts_of(rule)[:1]) < stated, rule


def test_a_reminder_is_spliced_in_as_a_hint_is(tiny: Path, demonstrated: Path) -> None:
    config = settings(tiny, demonstrated, validation_share=0.0, reminders=1.0)
    lessons, reminders = lessons_of(config), reminders_of(config)
    one = next(one for one in lessons.learned if one.kept)
    index = min(one.kept)
    one.kept, one.spared = {index: ("malformed_arguments",)}, {}
    sample = reminders.sample(one, 1, Counter())
    branches = [
        hint_branch(one.segment, Target("", 0, index, "", ""), Hint("", text), reminders.chat)
        for text in (RULES["malformed_arguments"].text, *WORDINGS["malformed_arguments"])
    ]
    ids = one.segment.ids
    assert sample.ids in [[*ids[: b.insert], *b.inserted, *ids[b.insert :]] for b in branches]


def test_rules_that_a_message_keeps_could_have_been_broken_by_it(demonstrated: Path) -> None:
    for rollout in RunFolder(demonstrated).rollouts(1)[0]:
        reading = read(rollout, (), RULES)
        assert reading.kept.keys().isdisjoint(reading.broken)
        for (_, message), rules in reading.kept.items():
            (call,) = rollout.segments[0].messages[message].calls
            assert call.name in rollout.tools
            assert ("edit_not_applied" in rules) == (call.name == "edit_file")
            assert ("asked_instead" in rules) == (call.name == "finish")
            assert "final_names_nothing" not in rules, "it ends without a word"


def test_a_reminder_before_a_faulty_message_states_a_rule_that_it_keeps(tiny: Path, demonstrated: Path) -> None:
    config = settings(tiny, demonstrated, validation_share=0.0, reminders=1.0)
    lessons, reminders = lessons_of(config), reminders_of(config)
    one = next(one for one in lessons.learned if one.spared)
    index, rules = min(one.spared.items())
    one.kept, one.spared = {}, {index: rules}
    sample = reminders.sample(one, 1, Counter())
    ids, chat = one.segment.ids, reminders.chat
    hints = [Hint("", text) for rule in rules for text in texts_of(rule)]
    branches = [hint_branch(one.segment, Target("", 0, index, "", ""), hint, chat) for hint in hints]
    stated = [len(b.inserted) for b in branches if sample.ids == [*ids[: b.insert], *b.inserted, *ids[b.insert :]]]
    assert stated, "a reminder of a rule that the message does not break, where a hint of it would stand"


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(latest_checkpoint(folder) / "model.safetensors")


def test_a_killed_run_ends_at_the_same_bits(tiny: Path, tmp_path: Path, demonstrated: Path) -> None:
    (tmp_path / "few.jsonl").write_bytes(dump_lines(RunFolder(demonstrated).rollouts(1)[0][:4]))
    more = {"epochs": 2, "batch_tokens": 1500, "learning_rate": 1e-3}
    checkpoint = {"checkpoint": {"every": 2}}
    straight = sft(settings(tiny, tmp_path / "few.jsonl", tmp_path / "straight", **more, **checkpoint))
    killed = settings(tiny, tmp_path / "few.jsonl", tmp_path / "killed", **more, **checkpoint)
    pid = os.fork()
    if pid == 0:  # dies in the middle of its fourth step, after the checkpoint of the second
        sft(killed, lambda row: os.kill(os.getpid(), signal.SIGKILL) if row["step"] == 3 else None)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert max(RunFolder(tmp_path / "killed").checkpoints()) == 2
    again = sft(killed)
    ours, theirs = weights(again), weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows, expected = (
        [{key: value for key, value in row.items() if not key.endswith("_s")} for row in run.metrics()[0]]
        for run in (again, straight)
    )
    assert rows == expected
    assert len(rows) >= 4
    assert any(row["reminded"] for row in rows)
    assert {row["epoch"] for row in rows} == {1, 2}


def test_a_run_goes_on_with_its_own_data_alone(tiny: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl", [chat_line(n) for n in range(4)])
    folder = sft(settings(tiny, data, tmp_path / "run"))
    data.rename(tmp_path / "moved.jsonl")
    sft(settings(tiny, tmp_path / "moved.jsonl", tmp_path / "run"))  # where it lies is no part of what it is
    written(tmp_path / "moved.jsonl", [chat_line(n) for n in range(5)])
    with pytest.raises(OffbookError, match="holds a run on other data"):
        sft(settings(tiny, tmp_path / "moved.jsonl", tmp_path / "run"))
    with pytest.raises(OffbookError, match="holds a run of `offbook sft`; give another --out"):
        train(configure(model=str(tiny), out=str(folder.path)))


def test_demonstrations_are_made_once_in_the_chat_of_the_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path))
    config = settings(tiny, Path("pocket:3"), harness={"profile": "pocket"}, validation_share=0.0)
    first = lessons_of(config)
    (made,) = tmp_path.rglob("pocket-demonstrations-*.jsonl")
    stamp = made.stat().st_mtime_ns
    assert [one.segment.ids for one in lessons_of(config).learned] == [one.segment.ids for one in first.learned]
    assert (made.stat().st_mtime_ns, len(load_lines(made, Rollout)[0])) == (stamp, 3)
    assert all(
        reminders_of(config).chat.decode(one.segment.ids).startswith("<|im_start|>system") for one in first.learned
    )


def test_what_is_wrong_is_said_in_a_sentence(tiny: Path, tmp_path: Path) -> None:
    def says(*arguments: str) -> str:
        return str(CliRunner().invoke(app, ["sft", *arguments]).exception)

    data = written(tmp_path / "a.jsonl", [chat_line(1)])
    assert "there is no model to train" in says("--data", str(data))
    assert "there is no data to imitate; give --data" in says("--model", str(tiny))
    assert f"there is no {tmp_path}/none; --data is a run folder" in says(
        "--model", str(tiny), "--data", f"{tmp_path}/none"
    )
    shown = CliRunner().invoke(
        app, ["sft", "--model", str(tiny), "--data", str(data), "--sft.epochs", "3", "--dry-run"]
    )
    assert 'out = "runs/sft"' in shown.output
    assert "epochs = 3" in shown.output
    with pytest.raises(OffbookError, match=r"step 1: .*; try a lower sft\.learning_rate"):
        sft(settings(tiny, data, tmp_path / "run", learning_rate=1e38))
    assert not RunFolder(tmp_path / "run").checkpoints()
