"""What an agent did, read from its rollout: whose answer is whose, what a command runs, what is new in a file."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.signals.trajectory import Command, Trajectory, relative
from offbook.signals.trajectory.diff import read_diff
from offbook.types import Message, Rollout, Segment, ToolCall


def say(role: str, text: str = "", *calls: ToolCall) -> Message:
    return Message(role, text, 0, 0, 0, 0, calls)  # type: ignore[arg-type]


def rollout(*messages: Message, **more: Any) -> Rollout:
    return Rollout("r", "t", "g", (), [Segment(messages=list(messages))], "answer", **more)


def sh(line: str) -> ToolCall:
    return ToolCall("bash", {"command": line})


def test_every_call_has_its_answer_or_none() -> None:
    two = say("assistant", "", sh("ls"), sh("pwd"))
    one, other = Trajectory(rollout(two, say("tool", "a"), say("tool", "b"))).uses
    assert (one.output, other.output, other.order, other.at) == ("a", "b", 1, (0, 0))
    for answers in ([say("tool", "a")], [say("tool", str(number)) for number in range(3)]):
        assert [one.answer for one in Trajectory(rollout(two, *answers)).uses] == [None, None], "nobody knows which"


def test_a_worked_example_is_not_the_agents() -> None:
    example, own = say("assistant", "", sh("ls")), say("assistant", "", sh("pwd"))
    example.end, own.body, own.end = 1, 1, 2
    work = Rollout("r", "t", "g", (), [Segment([1, 2], [False, True], messages=[example, own])])
    assert [one.text for one in Trajectory(work).uses] == ["pwd"]


def test_a_script_written_earlier_counts_where_it_is_run() -> None:
    written = ToolCall("write_file", {"path": "/app/x.py", "content": "import os\nos.system('git log -p')\n"})
    here = "cat > y.sh <<'EOF'\ncurl example.net\nEOF\nsh ./y.sh"
    work = rollout(say("assistant", "", written, sh("python ./x.py"), sh(here)))
    script, python, shell = Trajectory(work).uses
    assert script.written == {"x.py": written.arguments["content"]}
    assert python.python == [written.arguments["content"]]
    assert ["git", "log", "-p"] in python.simple
    assert ["curl", "example.net"] in shell.simple
    assert shell.command
    assert shell.command.files_inside == {"y.sh": "curl example.net\n"}
    assert shell.command.written == {"y.sh": False}, "nothing is kept of it"
    assert ["curl", "example.net"] not in shell.command.own, "by its own words it only runs y.sh"


@pytest.mark.parametrize(
    ("given_path", "inside"),
    [("/app/a.py", "a.py"), ("./a.py", "a.py"), ("/testbed/a/b.py", "a/b.py"), ("/tmp/a.py", "/tmp/a.py"), ("a", "a")],
)
def test_paths_are_told_from_the_root_of_the_repository(given_path: str, inside: str) -> None:
    assert relative(given_path) == inside


def test_a_question_is_the_end_of_the_closing_words() -> None:
    asks = {"I looked. Shall I **go on?**": "Shall I **go on?", "Is it `a?`": "", "Why? It was red.": "", "": ""}
    for words, question in asks.items():
        assert Trajectory(rollout(say("assistant", words))).question == question


LINES = st.lists(st.sampled_from(["x", "++ y", "-- z", "", "# why", "@@ -1 +1 @@"]), max_size=12)


@given(old=LINES, new=LINES)
def test_a_diff_is_read_as_it_was_made(old: list[str], new: list[str]) -> None:
    made = "".join(f"{line}\n" for line in difflib.unified_diff(old, new, "a/p.py", "b/p.py", lineterm=""))
    files = list(read_diff(made * 2))
    assert len(files) == 2 * (old != new)
    for file in files:
        assert file.path == "p.py"
        assert all(new[number - 1] == line for number, line in file.added.items())
        assert len(new) - len(file.added) == len(old) - len(file.removed)


def test_what_a_command_does_by_its_words() -> None:
    assert Command("cd /app && cat ./a.py").shown == ["a.py"]
    assert Command("sed -i -e s/1/2/ tests/a.py; git mv b.py c.py").touched == ["tests/a.py", "b.py"]
    assert not Command("grep -r x . 2>/dev/null | head").may_write
    assert Command("pytest -q > log.txt").only_redirects
    assert Command("pytest -q tests -k one").tests == "-k one"
    assert Command("cp a /tmp/b; echo x >> 'c'").targets == ["c", "/tmp/b"]
