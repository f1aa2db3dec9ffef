"""Other agents' trajectories are read, judged and linked; what cannot be read is counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder, dump_lines
from offbook.signals.monitors import check
from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.formats import MAX_DEPTH, from_messages, from_value, lost_of, read_trajectories
from offbook.types import Flag, Message, OffbookError, Rollout, Segment, ToolCall

EDIT = {
    "command": "str_replace",
    "path": "/app/tests/test_a.py",
    "old_str": "    assert one() == 1",
    "new_str": "    pass",
}


def atif(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": "Bring back one in a.py."}]
    for number, (name, arguments) in enumerate(calls, 2):
        call = {"tool_call_id": f"c{number}", "function_name": name, "arguments": arguments}
        seen = {"results": [{"source_call_id": f"c{number}", "content": [{"type": "text", "text": "ok"}]}]}
        steps.append({"step_id": number, "source": "agent", "message": "", "tool_calls": [call], "observation": seen})
    agent = {"name": "other", "version": "1"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s1", "agent": agent, "steps": steps}


def openai(*calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Bring back one in a.py."}]
    for name, arguments in calls:
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append({"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": "1", "content": "ok"})
    return messages


CALLS = ("bash", {"command": "git log -p --all"}), ("str_replace_editor", EDIT)


def written(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    lines = "".join(json.dumps(message) + "\n" for message in openai(*CALLS))
    files = [
        written(tmp_path / "a.json", atif(*CALLS)),
        written(tmp_path / "b.jsonl", json.dumps({"messages": openai(*CALLS)}) + "\n"),
        written(tmp_path / "c.json", openai(*CALLS)),
        written(tmp_path / "d.jsonl", lines),
    ]
    for path in files:
        [rollout] = read_trajectories(path).rollouts
        assert [message.role for message in rollout.segments[0].messages] == ["user", *["assistant", "tool"] * 2]
        assert not rollout.segments[0].ids
        assert rollout.usage.calls == 2
        assert [(flag.kind, flag.message) for flag in check(None, rollout)] == [("history", 1), ("tests", 3)], path


def test_honest_trajectories_are_left_alone(tmp_path: Path) -> None:
    create = {"command": "create", "path": "/app/a.py", "file_text": "def one():\n    return 1\n"}
    view = {"command": "view", "path": "/app/a.py"}
    calls = ("str_replace_editor", view), ("str_replace_editor", create), ("bash", {"command": "git status; pytest -q"})
    [rollout] = read_trajectories(written(tmp_path / "a.json", atif(*calls))).rollouts
    assert check(None, rollout) == []
    assert rollout.changed == {"a.py": create["file_text"]}


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    good = json.dumps({"messages": openai(*CALLS)})
    path = written(
        tmp_path / "a.jsonl", f"{good}\nnot json\n" + json.dumps({"messages": [{"role": "alien"}]}) + f"\n{good}\n"
    )
    loaded = read_trajectories(path)
    assert (len(loaded.rollouts), loaded.unreadable) == (2, 2)
    for bad in ("{}", "", "[]", '{"schema_version": "ATIF-v9", "steps": []}', "\x00\xff"):
        with pytest.raises(OffbookError, match="no trajectory"):
            read_trajectories(written(tmp_path / "bad.json", bad))
    human = json.dumps({"messages": [{"role": "human", "content": "?"}]}) + "\n"
    told = "no trajectory in it: line 1: 'human' is none of the roles .*; line 3: .*; and 2 more"
    with pytest.raises(OffbookError, match=told):
        read_trajectories(written(tmp_path / "bad.jsonl", human * 5))
    with pytest.raises(OffbookError, match="cannot read"):
        read_trajectories(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("about", "task"),
    [
        ({}, "s1"),
        ({"session_id": None, "trajectory_id": "t1"}, "t1"),
        ({"session_id": None}, "a"),
        ({"extra": {"task_id": 7}}, "7"),
        ({"metadata": {"instance_id": "django-1"}}, "django-1"),
        ({"agent": {"name": "other", "extra": {"task": "ours"}}}, "ours"),
        ({"extra": {"task": {"no": "name"}}}, "s1"),
    ],
)
def test_the_task_of_an_atif_trajectory_is_no_agent(tmp_path: Path, about: dict[str, Any], task: str) -> None:
    [rollout] = read_trajectories(written(tmp_path / "a.json", {**atif(*CALLS), **about})).rollouts
    assert rollout.task == task


def other(*calls: tuple[str, dict[str, Any], str], last: str = "", id: str = "s") -> dict[str, Any]:
    """A conversation of calls with their answers, and of last words."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Make add in calc.py work."}]
    for name, arguments, answer in calls:
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]})
        messages.append({"role": "tool", "content": answer})
    return {"id": id, "messages": [*messages, {"role": "assistant", "content": last}]}


def parallel(*answers: tuple[str | None, str], format: str = "openai", ids: tuple[Any, ...] = ("1", "2")) -> Any:
    """Two calls in one message, answers to them, and last words."""
    asked, given = {"role": "user", "content": "Look."}, [{"x": 1}, {"x": 2}]
    if format == "openai":
        functions = [{"name": "a", "arguments": json.dumps(one)} for one in given]
        calls = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, functions, strict=True)]
        told = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in answers]
        last = {"role": "assistant", "content": "Done."}
        return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *told, last]}
    if format == "anthropic":
        uses = [{"type": "tool_use", "id": id, "name": "a", "input": one} for id, one in zip(ids, given, strict=True)]
        results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in answers]
        told = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        return {"messages": [asked, *told, {"role": "assistant", "content": "Done."}]}
    made = [{"tool_call_id": id, "function_name": "a", "arguments": one} for id, one in zip(ids, given, strict=True)]
    seen = {"results": [{"source_call_id": id, "content": text} for id, text in answers]}
    steps = [
        {"source": "user", "message": "Look."},
        {"source": "agent", "message": "", "tool_calls": made, "observation": seen},
        {"source": "agent", "message": "Done."},
    ]
    return {"schema_version": "ATIF-v1.6", "steps": steps}


@pytest.mark.parametrize("format", ["openai", "anthropic", "atif"])
@pytest.mark.parametrize(
    ("answers", "ids", "expected"),
    [
        ((("2", "two"), ("1", "one")), ("1", "2"), ["one", "two"]),
        (((None, "one"), (None, "two")), ("1", "2"), ["one", "two"]),
        (((None, "two"), ("1", "one")), ("1", "2"), ["one", "two"]),
        ((("2", "one"), ("1", "two")), (None, None), ["one", "two"]),  # nobody knows what these ids are of
    ],
)
def test_answers_are_those_of_their_calls(format: str, answers: Any, ids: Any, expected: list[str]) -> None:
    rollout, _ = from_value(parallel(*answers, format=format, ids=ids), "a")
    assert [(one.call.arguments["x"], one.output) for one in Trajectory(rollout).uses] == [*enumerate(expected, 1)]
    assert [message.text for message in rollout.segments[0].messages if message.role == "tool"] == expected
    assert not lost_of(rollout)


@pytest.mark.parametrize("format", ["openai", "anthropic", "atif"])
def test_answers_to_no_call_and_calls_without_answers_are_known(format: str) -> None:
    stray, _ = from_value(parallel(("2", "two"), ("3", "three"), format=format), "a")
    assert lost_of(stray) == "an answer to '3', which is no call of the message before"
    assert [message.text for message in stray.segments[0].messages[2:4]] == ["two", "three"], "and stay as they were"
    silent, _ = from_value(parallel(("2", "two"), format=format), "a")
    assert lost_of(silent) == "no answer to the call '1'"
    last = parallel(("2", "two"), format=format)
    (last.get("messages") or last["steps"]).pop()
    assert not lost_of(from_value(last, "a")[0]), "a call may end it all"


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("asked", "said", "lost"),
    [
        ([{"type": "text", "text": "What"}, "is this?"], "A cat.", ""),
        ([{"type": "text", "text": "What?"}, IMAGE], "A cat.", "a part of the type 'image_url'"),
        ([IMAGE], "A cat.", "a part of the type 'image_url'"),
        (None, "A cat.", "a message of the user without text"),
        (" \n", "A cat.", "a message of the user without text"),
        ("?", "", "a message of the assistant without text"),
        ("?", [], "a message of the assistant without text"),
        (
            "?",
            [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A cat."}],
            "a part of the type 'r",
        ),
    ],
)
@pytest.mark.parametrize("format", ["openai", "atif"])
def test_what_is_no_text_is_not_lost_without_a_word(format: str, asked: Any, said: Any, lost: str) -> None:
    steps = [{"source": "user", "message": asked}, {"source": "agent", "message": said}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    value = {"messages": messages} if format == "openai" else {"schema_version": "ATIF-v1.6", "steps": steps}
    rollout, _ = from_value(value, "a")
    assert lost_of(rollout).startswith(lost)
    assert bool(lost_of(rollout)) == bool(lost)
    assert len(rollout.segments[0].messages) == 2, "who judges it reads the rest"


@pytest.mark.parametrize(
    "said",
    [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "because\n"},
        {"role": "assistant", "content": "Yes.", "reasoning": "because", "reasoning_content": None},
        {"role": "assistant", "content": "<think>\nbecause\n</think>\n\nYes.", "reasoning_content": "because"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "because"}, {"type": "text", "text": "Yes."}],
        },
        {"source": "agent", "message": "Yes.", "reasoning_content": "because"},
    ],
)
def test_thoughts_stand_before_the_words(said: dict[str, Any]) -> None:
    value: Any = [{"role": "user", "content": "?"}, said]
    if "source" in said:
        value = {"schema_version": "ATIF-v1.6", "steps": [{"source": "user", "message": "?"}, said]}
    rollout, _ = from_value(value, "a")
    assert rollout.segments[0].messages[1].text == "<think>\nbecause\n</think>\n\nYes."
    assert Trajectory(rollout).final == "Yes."
    assert not lost_of(rollout)


CALC = {"command": "str_replace", "path": "/app/calc.py", "old_str": "x", "new_str": "y"}


@pytest.mark.parametrize(
    "answer",
    [
        "No replacement was performed, old_str `x` did not appear verbatim in /app/calc.py.",
        "ERROR:\nInvalid `path` parameter: /app/calc.py. The path does not exist.",
        "<tool_use_error>String to replace not found in file.</tool_use_error>",
        "File has not been read yet. Read it first before writing to it.",
        "Your proposed edit has introduced new syntax error(s). Your changes have NOT been applied.",
    ],
)
def test_a_refused_edit_changed_nothing(answer: str) -> None:
    rollout = from_messages(other(("editor", CALC, answer), last="I could not."), "a")
    assert (rollout.changed, rollout.segments[0].messages[2].status) == ({}, "failed")
    assert not rollout.events
    mended = other(("editor", CALC, answer), ("editor", CALC, "The file was edited."))
    assert from_messages(mended, "a").changed == {"calc.py": "y"}


def test_an_edit_is_taken_to_be_one_unless_its_answer_says_no() -> None:
    quoting = "The file was edited. Here it is:\n1  raise ValueError('error: no such file')\n"
    rollout = from_messages(other(("editor", CALC, quoting)), "a")
    assert (rollout.changed, rollout.segments[0].messages[2].status) == ({"calc.py": "y"}, "ok")
    shell = from_messages(other(("bash", {"command": "cat log"}, "error: no replacement was performed")), "a")
    assert shell.segments[0].messages[2].status == "ok"
    unanswered = other(("editor", CALC, "ok"))
    del unanswered["messages"][2]
    assert from_messages(unanswered, "a").changed == {"calc.py": "y"}
    two = other(("editor", CALC, "Error: no"))
    two["messages"].insert(2, {"role": "tool", "content": "whose is this?"})
    assert from_messages(two, "a").changed == {"calc.py": "y"}


@pytest.mark.parametrize(
    ("name", "arguments", "changed"),
    [
        ("search", {"path": "src", "text": "foo"}, {}),
        ("write_file", {"path": "a.py", "text": "foo"}, {"a.py": "foo"}),
        ("save", {"file": "a.py", "contents": "foo"}, {"a.py": "foo"}),
        ("search_and_replace", {"path": "a.py", "text": "foo", "replacement": "bar"}, {"a.py": "bar"}),
    ],
)
def test_a_text_to_search_for_is_no_edit(name: str, arguments: dict[str, Any], changed: dict[str, str]) -> None:
    assert from_messages(other((name, arguments, "done")), "a").changed == changed


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 900, 100_000])
def test_a_line_that_is_nested_too_deep_costs_that_line(tmp_path: Path, depth: int) -> None:
    good = json.dumps(other(("bash", {"command": "ls"}, "a.py")))
    deep = good.replace('"ls"', nested(depth))
    loaded = read_trajectories(written(tmp_path / "a.jsonl", f"{good}\n{deep}\n{good}\n"))
    assert (len(loaded.rollouts), loaded.unreadable) == (2, 1)
    escaped = json.dumps(other(("bash", {}, "a.py")) | {"id": "e"}).replace("{}", json.dumps(nested(depth)))
    [call] = read_trajectories(written(tmp_path / "b.json", escaped)).rollouts[0].segments[0].messages[1].calls
    assert (call.arguments, call.error) == ({}, "its arguments are not JSON")
    with pytest.raises(OffbookError, match="no trajectory"):
        read_trajectories(written(tmp_path / "c.json", deep))


def test_a_bad_first_line_does_not_hide_our_own_rollouts(tmp_path: Path) -> None:
    own = dump_lines([Rollout("step1/t/0", "t", "g", (), [Segment()], "finish")]).decode()
    for bad in (nested(100_000), "broken", '{"id": "\\ud800", "segments": []}'):
        loaded = read_trajectories(written(tmp_path / "a.jsonl", f"{bad}\n{own}"))
        assert ([rollout.id for rollout in loaded.rollouts], loaded.unreadable) == (["step1/t/0"], 1)


def test_half_a_character_is_replaced_wherever_it_stands(tmp_path: Path) -> None:
    value = other(("bash\ud800", {"command": "ls \udfff"}, "ok \ud800\ud800"), last="\U0001f600 \\ud800", id="s\ud83d")
    value["messages"][1]["tool_calls"].append({"name": "bash", "arguments": json.dumps({"command": "pwd \udc00"})})
    [rollout] = read_trajectories(written(tmp_path / "a.jsonl", json.dumps(value) + "\n")).rollouts
    _, said, answer, last = rollout.segments[0].messages
    assert (rollout.id, rollout.tools, answer.text, last.text) == (
        "s?",
        ("bash?", "bash"),
        "ok ??",
        "\U0001f600 \\ud800",
    )
    assert [call.arguments["command"] for call in said.calls] == ["ls ?", "pwd ?"]
    assert dump_lines([rollout])


def test_other_ends_of_lines_stay_in_strings(tmp_path: Path) -> None:
    line = json.dumps(other(last="one\u2028two\x85three"), ensure_ascii=False)
    loaded = read_trajectories(written(tmp_path / "a.jsonl", f"{line}\r\n{line}\r\n"))
    assert ([rollout.segments[0].messages[-1].text for rollout in loaded.rollouts], loaded.unreadable) == (
        ["one\u2028two\x85three"] * 2,
        0,
    )


def audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbook", "audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_verb_on_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", atif(*CALLS))
    done = audit(str(path), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["rollouts"], told["flagged"], told["kinds"]) == (1, 1, {"history": 1, "tests": 1})
    shown = audit(str(path)).stdout
    assert "git log -p --all" in shown
    assert "s1, message 1" in shown
    assert audit(str(tmp_path / "nothing")).stderr.startswith("offbook: cannot read")


def test_the_verb_on_a_run(tmp_path: Path) -> None:
    from offbook.view.index import RunIndex
    from offbook.view.server import answer

    folder = RunFolder(tmp_path / "run")
    call = ToolCall("run_command", {"command": "ls"})
    messages = [Message("user", "x", 0, 0, 0, 0), Message("assistant", "y", 0, 0, 0, 0, (call,))]
    rollout = Rollout("step1/t/0", "t", "g", (), [Segment(messages=messages)], "finish")
    rollout.flags = [Flag("exit", 1, "a.py:3: os._exit")]
    folder.write_rollouts(1, [rollout])
    (folder.path / "config.toml").write_text(Config().to_toml())
    (folder.path / "rollouts" / "step_00001.jsonl").write_bytes(dump_lines([rollout]) + b"broken\n")
    told = json.loads(audit(str(folder.path), "--json").stdout)
    assert (told["kinds"], told["unreadable"]) == ({"exit": 1}, 1)
    opened = answer([RunIndex("run", folder.path)], "api/run/0/rollout?source=step_00001&number=0")
    assert (opened["id"], opened["outline"][1]["message"]) == ("step1/t/0", 1)
