"""Coaching stored work: what hints do, against a reading from scratch, and the verb as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from test_trajectories import atif, openai, other, written
from transformers import PreTrainedModel

from offbook.agent.chat import ChatFormat, Transcript, render_call, written_again
from offbook.cli import main
from offbook.cli.options import tasks_in
from offbook.core.config import Config, load_config
from offbook.core.runfolder import RunFolder, load_lines
from offbook.rl.hint_probe import effects_of, measure
from offbook.signals.feedback import RULES
from offbook.signals.feedback.coach import (
    Found,
    by_rules,
    grouped,
    num_rollouts,
    spread_out,
    stored_at,
    stored_in,
)
from offbook.signals.judge import show
from offbook.train.algorithms import hint_block
from offbook.train.forward import Decoder
from offbook.types import Completion, Feedback, Hint, OffbookError, Rollout, Target

HINT = Hint("unknown_tool", "Reminder: available tools are read_file, finish.")
READ = render_call("read_file", {"path": "a.py"})
GUESS = render_call("open_file", {"path": "a.py"})


def rollout_of(chat: ChatFormat, name: str = "step1/t/0", *said: str) -> Rollout:
    """A conversation as the harness records it: a call that is answered, one to a tool that is not there, a word."""
    transcript = Transcript(chat)
    transcript.add("system", "You have tools.")
    transcript.add("user", "Bring back one in a.py.")
    for text in said or (READ, GUESS, "It is done."):
        ids = [*chat.encode(text), chat.end_id]
        transcript.add_sampled(Completion(ids, [-1.0] * len(ids), [0] * len(ids)))
        if text.startswith("<tool_call>"):
            known = "open_file" not in text
            answer = "def one(): ..." if known else "there is no tool open_file"
            transcript.add("tool", answer, "ok" if known else "unknown_tool")
    return Rollout(name, "t", "g", ("read_file", "finish"), [transcript.segment], "answer")


def feedback_on(rollout: Rollout, message: int, hint: Hint = HINT) -> Feedback:
    return Feedback(Target(rollout.id, 0, message, hint.rule, "open_file"), hint)


def from_scratch(model: PreTrainedModel, rollout: Rollout, item: Feedback, chat: ChatFormat, temperature: float) -> Any:
    """Log-probabilities at the message's tokens without and with the hint, each by one plain forward."""
    segment = rollout.segments[0]
    message = segment.messages[item.target.message]
    end = message.body + sum(segment.sampled[message.body : message.end])
    found = []
    for hint in ([], hint_block(chat, item.hint)):
        ids = [*segment.ids[: message.start], *hint, *segment.ids[message.start : end]]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float() / temperature
        found.append(torch.log_softmax(logits, -1)[message.body + len(hint) - 1 : end + len(hint) - 1])
    return *found, segment.ids[message.body : end]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_effects_equal_a_reading_from_scratch(chat: ChatFormat, temperature: float) -> None:
    model = tiny_model(vocabulary=320)
    long, short = rollout_of(chat), rollout_of(chat, "step1/t/1", GUESS)
    again = Hint("repeated_call", "Reminder: do not repeat a call, its answer is above.")
    pairs = [
        (long, feedback_on(long, 4)),
        (long, feedback_on(long, 2, again)),
        (long, feedback_on(long, 4, again)),  # two rules on one message
        (short, feedback_on(short, 2)),
    ]
    shares: list[float] = []
    assert not measure(pairs, Decoder(model), chat, temperature, shares.append)
    assert shares[-1] == 1.0
    reference = tiny_model(vocabulary=320)
    for rollout, item in pairs:
        student, teacher, ids = from_scratch(reference, rollout, item, chat, temperature)
        rows = range(len(ids))
        assert item.student == pytest.approx(student[rows, ids].tolist(), abs=1e-4)
        assert item.teacher == pytest.approx(teacher[rows, ids].tolist(), abs=1e-4)
        kl = (teacher.exp() * (teacher - student)).sum(-1)
        assert item.divergence == pytest.approx(kl.tolist(), abs=1e-4)
        assert max(item.divergence) > 0.03
        message = rollout.segments[0].messages[item.target.message]
        assert "".join(item.pieces) == message.text + "<|im_end|>"


def test_an_effect_by_hand() -> None:
    def measured(rule: str, student: list[float], teacher: list[float], divergence: list[float]) -> Feedback:
        return Feedback(Target("r", 0, 1, rule, ""), Hint(rule, ""), [], student, teacher, divergence)

    strong = measured("a", [-1.0, -2.0], [-3.0, -2.5], [0.5, 1.5])
    weak = measured("a", [-1.0], [-0.5], [0.1])
    other = measured("b", [-1.0], [-1.0], [0.0])
    unmeasured = measured("c", [], [], [])
    first, second = effects_of([other, strong, weak, unmeasured])
    assert (first.rule, first.targets, first.tokens, first.largest) == ("a", 2, 3, 1.5)
    assert (first.kl, first.log_odds) == (pytest.approx(0.7), pytest.approx((-2.5 + 0.5) / 2))
    assert (second.rule, second.kl) == ("b", 0.0)


def test_other_agents_words_are_written_again(chat: ChatFormat) -> None:
    """Without ids, and with another tokenizer's, the figures are those of the same words in this chat."""
    own = rollout_of(chat)
    bare = rollout_of(chat, "bare")
    for message in bare.segments[0].messages:
        message.text = "" if message.calls else message.text  # as ATIF has it: calls stand beside the text
        message.start = message.body = message.body_end = message.end = 0
    bare.segments[0] = replace(bare.segments[0], ids=[], sampled=[], logprobs=[], versions=[])
    foreign = rollout_of(chat, "foreign")
    foreign.segments[0].ids = [(id + 7) % 250 for id in foreign.segments[0].ids]
    beyond = rollout_of(chat, "beyond")
    beyond.segments[0].ids[5] = 100_000
    pairs = [(rollout, feedback_on(rollout, 4)) for rollout in (own, bare, foreign, beyond)]
    counts = measure(pairs, Decoder(tiny_model(vocabulary=320)), chat)
    assert counts == {"written again": 3}
    for _, item in pairs[1:]:
        assert item.divergence == pytest.approx(pairs[0][1].divergence, abs=1e-4)
        assert item.pieces == pairs[0][1].pieces
    assert written_again(bare.segments[0], chat).ids == own.segments[0].ids


def test_what_cannot_be_measured_is_counted(chat: ChatFormat) -> None:
    model = tiny_model(vocabulary=320)
    rollout, silent = rollout_of(chat), rollout_of(chat, "silent")
    silent.segments[0].sampled = [False] * len(silent.segments[0].ids)
    message = rollout.segments[0].messages[2]
    model.config.max_position_embeddings = message.end + 80  # room for the first call with its hint
    pairs = [(rollout, feedback_on(rollout, 2)), (rollout, feedback_on(rollout, 6)), (silent, feedback_on(silent, 2))]
    counts = measure(pairs, Decoder(model), chat)
    assert counts == {"beyond the model's context": 1, "nothing in the message was sampled": 1}
    assert [bool(item.divergence) for _, item in pairs] == [True, False, False]
    assert not measure([], Decoder(model), chat)


CALLS = [("bash", {"command": "ls"}), ("bash", {"command": "ls"}), ("bash", {"command": "pytest -q"})]


def test_files_of_other_agents_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"id": "same", "messages": openai(*CALLS)})] * 2 + ["not json"]
    stored = stored_at(written(tmp_path / "a.jsonl", "\n".join(lines)))
    assert ([rollout.id for rollout in stored.rollouts], stored.unreadable) == (["same", "same#2"], 1)
    shares: list[float] = []
    found = grouped(by_rules(stored, {}, shares.append))["repeated_call"]
    assert [one.feedback.target.rollout for one in found] == ["same", "same#2"]
    assert (num_rollouts(found), shares) == (2, [0.5, 1.0])
    assert found[0].feedback.hint.text.startswith("Reminder:")


def test_rollouts_of_files_have_names_of_their_own(tmp_path: Path) -> None:
    lines = [json.dumps({"id": id, "messages": openai(*CALLS)}) for id in ("s", "s", "s#2", "t")]
    paths = [written(tmp_path / name, "\n".join(lines)) for name in ("a.jsonl", "b.jsonl")]
    first, second = stored_in(paths)
    assert [rollout.id for rollout in first.rollouts] == ["s", "s#3", "s#2", "t"]
    ids = [rollout.id for stored in (first, second) for rollout in stored.rollouts]
    assert len(set(ids)) == 8
    found = [one for stored in (first, second) for one in by_rules(stored, {})]
    assert {one.feedback.target.rollout for one in found} == set(ids)
    assert num_rollouts(found) == 8
    with pytest.raises(OffbookError, match=r"a\.jsonl is given twice"):
        stored_in([paths[0], paths[1], tmp_path / "." / ".." / tmp_path.name / "a.jsonl"])


def test_a_log_that_lists_its_tools_shows_calls_of_others(tmp_path: Path) -> None:
    read = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}
    messages = openai(("read_file", {"path": "a.py"}), ("open_file", {"path": "a.py"}))
    told = stored_at(written(tmp_path / "a.jsonl", json.dumps({"messages": messages, "tools": [read]}) + "\n"))
    (found,) = by_rules(told, {}, rules={"unknown_tool": RULES["unknown_tool"]})
    assert (found.feedback.target.message, found.feedback.hint.text) == (3, "Reminder: available tools are read_file.")
    assert told.rollouts[0].usage.invalid_calls == 1
    untold = stored_at(written(tmp_path / "b.jsonl", json.dumps({"messages": messages}) + "\n"))
    assert not by_rules(untold, {}, rules={"unknown_tool": RULES["unknown_tool"]})


def test_refused_edits_of_other_agents_are_no_changes(tmp_path: Path) -> None:
    """They were taken for changes that the last words do not name, and hid that nothing was changed."""
    edit = {"path": "calc.py", "old_str": "x", "new_str": "y"}
    refused = ("editor", edit, "No replacement was performed.")
    lines = [
        other(refused, last="I could not."),
        other(refused, last="Done."),
        other(("search", {"path": "src", "text": "add"}, "src/calc.py:1"), last="It is in the first line."),
        other(("editor", edit, "edited"), last="All good."),
    ]
    stored = stored_at(written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    found = {(one.rollout.id, one.feedback.target.rule) for one in by_rules(stored, {})}
    assert found == {
        ("s", "edit_not_applied"),
        ("s#2", "edit_not_applied"),
        ("s#2", "finished_without_edit"),
        ("s#3", "finished_without_edit"),
        ("s#4", "final_names_nothing"),
    }


def test_a_worked_example_is_not_shown_as_the_agents(chat: ChatFormat) -> None:
    rollout = rollout_of(chat)
    assert show(rollout).count("] agent: ") == 3
    message = rollout.segments[0].messages[2]
    rollout.segments[0].sampled[message.body : message.end] = [False] * (message.end - message.body)
    shown = show(rollout)
    assert shown.count("] agent: ") == 2
    assert "[segment 0 message 2] worked example, not the agent's: " in shown


def test_measured_targets_are_spread_over_the_whole(chat: ChatFormat) -> None:
    rollout = rollout_of(chat)
    found = [Found(rollout, feedback_on(rollout, number), "s") for number in range(10)]
    found.append(Found(rollout, feedback_on(rollout, 99, Hint("other", "x")), "s"))
    messages = [one.feedback.target.message for one in spread_out(found, 3)]
    assert messages == [0, 3, 6, 99]
    assert len(list(spread_out(found, 50))) == 11


def test_nothing_to_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(OffbookError, match="not a run folder"):
        stored_at(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("")
    with pytest.raises(OffbookError, match="no rollouts"):
        stored_at(tmp_path / "run")
    with pytest.raises(OffbookError, match="there is no"):
        stored_at(tmp_path / "nothing")


def run_with_checkpoint(folder: Path, chat: ChatFormat) -> RunFolder:
    run = RunFolder(folder)
    run.path.mkdir()
    run.config_file.write_text(Config(out=str(folder)).to_toml())
    rollouts = [rollout_of(chat, f"step1/t/{number}") for number in range(4)]
    rollouts.append(rollout_of(chat, "step1/t/4", READ, "Nothing."))
    run.write_rollouts(1, rollouts)
    run.write_feedback(1, [feedback_on(rollouts[0], 4)])
    checkpoint = folder / "ckpt" / "step_00001"
    tiny_model(vocabulary=320).save_pretrained(checkpoint)
    chat.tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "DONE").touch()
    return run


def coach(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbook", "coach", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_verb_on_a_run(tmp_path: Path, chat: ChatFormat) -> None:
    run = run_with_checkpoint(tmp_path / "run", chat)
    before = (run.path / "feedback" / "step_00001.jsonl").read_bytes()
    done = coach(run.path, "--limit", "2", "--json", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["rules"]["unknown_tool"] == {"targets": 4, "rollouts": 4, "share": 0.8}
    effect = next(effect for effect in told["effects"] if effect["rule"] == "unknown_tool")
    assert (effect["targets"], told["models"]) == (2, [str(run.path / "ckpt" / "step_00001")])
    assert effect["kl"] > 0.001
    assert "unknown_tool: 4 in 4 rollouts (80%)" in done.stdout
    assert "step1/t/0, message 4: open_file" in done.stdout
    assert "hint: Reminder: available tools are read_file, finish." in done.stdout
    assert "and 1 more" in done.stdout
    assert "nats per token" in done.stdout
    assert "reading" in done.stderr
    assert (run.path / "feedback" / "step_00001.jsonl").read_bytes() == before
    kept, unreadable = load_lines(run.path / "feedback" / "coach.jsonl", Feedback)
    of_rule = [item for item in kept if item.target.rule == "unknown_tool"]
    assert unreadable == 0
    assert [bool(item.divergence) for item in of_rule] == [True, False, True, False]
    assert run.steps() == [1]

    (note,) = told["notes"]
    assert "not looked at in 5 rollouts (the tree of the task is not at hand; --tasks gives it)" in note
    assert done.stdout.index("nats per token") < done.stdout.index(note)

    quick = coach(run.path, "--no-effect", "--out", tmp_path / "out.jsonl")
    assert "nats per token" not in quick.stdout
    assert len(load_lines(tmp_path / "out.jsonl", Feedback)[0]) == len(kept)


def test_the_verbs_that_ask_for_the_tasks_of_pocket_take_them(
    tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the run's own seed and numbers; and a rule that finds nothing is named."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path / "cache"))
    run = run_with_checkpoint(tmp_path / "run", chat)
    few = {"tasks.source": "pocket-long-2", "tasks.num_train": "1", "tasks.num_heldout": "1"}
    run.config_file.write_text(load_config(["pocket"], few).to_toml())
    known = tasks_in("pocket-long-2", run)
    assert len(known) == 2
    (tmp_path / "rules.py").write_text("def no_prints(trajectory):\n    'Reminder: print nothing.'\n    return []\n")
    told = run.rollouts(1)[0]
    run.write_rollouts(1, [replace(rollout, task=min(known)) for rollout in told])
    for verb, more in (("audit", []), ("coach", ["--no-effect", "--rules", str(tmp_path / "rules.py")])):
        monkeypatch.setattr(sys, "argv", ["offbook", verb, str(run.path), "--tasks", "pocket-long-2", *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "--tasks gives it" not in said
    assert "no_prints: 0 in 5 rollouts\n" in said


def test_the_verb_measures_files_on_a_model(tmp_path: Path, chat: ChatFormat) -> None:
    model = run_with_checkpoint(tmp_path / "run", chat).path / "ckpt" / "step_00001"
    path = written(tmp_path / "a.json", atif(*CALLS))
    done = coach(path, "--model", model, "--json", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    effects = json.loads((tmp_path / "result.json").read_text())["effects"]
    assert "repeated_call" in {effect["rule"] for effect in effects}
    assert "measured on ids of step_00001, not their own" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no nowhere; give a run folder, or a file of trajectories"),
        (["FILE", "--tasks", "FOLDER"], "has no task in it"),
        (["FILE", "--model", "./no-model"], "there is no model folder ./no-model"),
        (["BAD"], "has no trajectory in it"),
        (["FILE", "FILE"], "is given twice"),
        (["FILE", "--json", "LINK"], "it is what is to be read"),
        (["FILE", "--json", "FILE"], "it is what is to be read"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    places = {
        "FILE": written(tmp_path / "a.json", atif(*CALLS)),
        "BAD": written(tmp_path / "b.json", "{}"),
        "FOLDER": tmp_path / "folder",
        "LINK": tmp_path / "link",
    }
    places["LINK"].symlink_to(places["FILE"])
    before = sorted(tmp_path.iterdir())
    done = coach(*(places.get(argument, argument) for argument in arguments))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("offbook: ")
    assert sentence in last
    assert "Traceback" not in done.stderr
    assert (sorted(tmp_path.iterdir()), done.stdout) == (before, "")


def test_the_report_comes_before_what_cannot_be_written(tmp_path: Path, chat: ChatFormat) -> None:
    run = run_with_checkpoint(tmp_path / "run", chat)
    (run.path / "feedback" / "coach.jsonl").mkdir()
    done = coach(run.path, "--no-effect")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "unknown_tool: 4 in 4 rollouts (80%)" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("offbook: cannot write ")


def test_what_nobody_can_write_is_replaced(tmp_path: Path) -> None:
    line = json.dumps(other(*[("bash", {"command": "ls"}, "half \ud800")] * 2, id="s\ud800", last="\ud800"))
    path = written(tmp_path / "a.jsonl", f"{line}\n{'[' * 100_000}\n")
    done = coach(path, "--out", tmp_path / "o.jsonl", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "s?, message 3: bash: the same call" in done.stdout
    assert "1 record could not be read" in done.stdout
    kept, unreadable = load_lines(tmp_path / "o.jsonl", Feedback)
    assert (len(kept), unreadable) == (len(json.loads((tmp_path / "r.json").read_text())["targets"]), 0)


def test_nothing_measured_needs_no_torch(tmp_path: Path, chat: ChatFormat) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config_file.write_text(Config(out=str(run.path)).to_toml())
    run.write_rollouts(1, [rollout_of(chat)])
    path = written(tmp_path / "a.json", atif(*CALLS))
    code = (
        "import sys; from pathlib import Path; from offbook.cli.coach import coach; "
        f"coach([Path({str(path)!r}), Path({str(run.path)!r})]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no model to measure the hints") == 2
