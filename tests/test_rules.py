"""Rules: each finds its mistake at its message, passes by what only looks like it, and survives anything."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.agent.harness.tools import TOOLS
from offbook.agent.harness.toolsets import make_toolset
from offbook.pocket.demonstrations import HARNESS, LEARNED, Demonstrator
from offbook.pocket.script import Habits, Script
from offbook.pocket.tasks import draft_tasks
from offbook.sandbox import ProcessSandbox
from offbook.signals.feedback import RULES, read_rollout, write_hint
from offbook.signals.feedback.rules import read_all
from offbook.signals.trajectory import Command
from offbook.signals.trajectory.formats import from_messages
from offbook.types import Completion, Limits, Message, Prompt, Rollout, Segment, Task, ToolCall

OWN = {name: name for name in TOOLS}
INSTRUCTION = "Make one return 1."
Turn = str | tuple[Any, ...]


def talk(
    *turns: Turn,
    instruction: str = INSTRUCTION,
    changed: dict[str, str | None] | None = None,
    own: bool = True,
    diff: str = "",
) -> Rollout:
    """A rollout of calls with answers (name, arguments, answer, status) and of words; the first turn is message 2."""
    messages = [say("system", "Use the tools."), say("user", instruction)]
    for turn in turns:
        if isinstance(turn, str):
            messages.append(say("assistant", turn))
            continue
        name, arguments, answer, status = (*turn, "ok")[:4]
        error, is_other = ("broken", status == "other") if status in ("unreadable", "other") else (None, False)
        messages.append(say("assistant", "", ToolCall(name, arguments, error, other_dialect=is_other)))
        messages.append(say("tool", answer))
        messages[-1].status = "malformed" if error else status
    last = turns[-1] if turns else ""
    stop = "finish" if last[0] == "finish" else "answer"
    rollout = Rollout("r", "t", "g", tuple(OWN), [Segment(messages=messages)], stop)  # type: ignore[arg-type]
    rollout.own_names, rollout.foreign = (OWN, False) if own else ({}, True)
    rollout.changed, rollout.diff = changed or {}, diff
    return rollout


def say(role: str, text: str, *calls: ToolCall) -> Message:
    return Message(role, text, 0, 0, 0, 0, calls)  # type: ignore[arg-type]


def edit(path: str = "a.py", old: str = "x", new: str = "y", answer: str = "", status: str = "ok") -> Turn:
    return "edit_file", {"path": path, "old": old, "new": new}, answer or f"edited {path}", status


def sh(command: str, answer: str = "no output", status: str = "ok") -> Turn:
    return "run_command", {"command": command}, answer, status


def foreign(*pairs: tuple[str, dict[str, Any], str], last: str = "", instruction: str = INSTRUCTION) -> Rollout:
    """A conversation of another agent, as trajectory/formats.py reads it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    for name, arguments, answer in pairs:
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]})
        messages.append({"role": "tool", "content": answer})
    return from_messages([*messages, {"role": "assistant", "content": last}] if last else messages, "other")


READ = ("read_file", {"path": "a.py"}, "x = 1\n")
FINISH = ("finish", {}, "done")
CHANGED: dict[str, str | None] = {"a.py": "y"}
PASSED, FAILED = "5 passed in 1.20s", "exit 1\nFAILED tests/test_a.py\n2 failed, 3 passed in 1.20s"
SLOW = "exit 1\n=== 2 failed, 3 passed in 75.20s (0:01:15) ==="
HUGE = "".join(f"value_{number} = {number}\n" for number in range(900))
WENT = edit(), sh("pytest -q", PASSED)
ONE = "--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1,2 +1,2 @@\n def one():\n-    x\n+    y\n"
THOUGHTS = "# Let me think about this one.\n# Wait, maybe the other way.\n# Actually I need the sum.\nreturn 1\n"
ASKED_TESTS = "Add tests for one in tests/test_a.py."
LONG_WORDS = "I changed a.py. " + "It is better in every way now. " * 40
MISSING = "error: the text to replace is not in a.py; the nearest is:\n1: x"

FIRES: dict[str, list[tuple[Rollout, int]]] = {
    "unknown_tool": [
        (talk(("open_file", {}, "error: there is no tool open_file", "unknown_tool"), *WENT), 2),
        (talk(READ, ("grep", {"pattern": "x"}, "error: there is no tool grep", "unknown_tool"), *WENT), 4),
    ],
    "call_not_readable": [
        (talk(("read_file", {}, "error: another format", "other"), *WENT), 2),
        (talk(READ, ("", {}, "error: another format", "other"), *WENT), 4),
    ],
    "malformed_arguments": [
        (talk(READ, ("read_file", {"file": "a.py"}, "error: read_file needs path", "malformed"), *WENT), 4),
        (talk(("read_file", {}, "error: not JSON", "unreadable"), *WENT), 2),
    ],
    "repeated_call": [
        (talk(READ, READ, *WENT), 4),
        (talk(READ, edit("b.py"), READ), 6),
        (talk(sh("grep -rn one ."), READ, sh("grep -rn one .")), 6),
        (foreign(("view", {"path": "a.py"}, "x"), ("view", {"path": "a.py"}, "x")), 3),
    ],
    "edited_tests": [
        (talk(edit("tests/test_a.py")), 2),
        (talk(edit("tests/test_a.py", "def test_a():", "@skip\ndef test_a():\n    assert True")), 2),
        (talk(READ, sh("rm -rf tests")), 4),
        (talk(sh("cd /app && sed -i 's/1/2/' tests/test_a.py")), 2),
        (talk(sh("cat tests/test_a.py", "x"), sh("cat > tests/test_a.py <<'EOF'\npass\nEOF")), 4),
        (talk(sh("git mv tests/test_a.py tests/old.py")), 2),
        (talk(sh("perl -i -pe 's/1/2/' tests/*.py")), 2),
        (foreign(("edit", {"file_path": "/testbed/tests/test_a.py", "old_string": "1", "new_string": "2"}, "ok")), 1),
    ],
    "edit_not_applied": [
        (talk(READ, edit(answer=MISSING, status="failed")), 4),
        (talk(edit(answer="error: the text to replace occurs 2 times in a.py, at lines 1, 4", status="failed")), 2),
        (
            foreign(
                (
                    "str_replace_editor",
                    {"command": "str_replace", "path": "a.py", "old_str": "x", "new_str": "y"},
                    "No replacement was performed, old_str `x` did not appear verbatim in a.py.",
                )
            ),
            1,
        ),
    ],
    "whole_file_read": [
        (talk(("read_file", {"path": "a.py"}, HUGE), edit()), 2),
        (talk(READ, sh("cat b.py", "x" * 8000 + "\n[70000 characters left out]\n"), edit("b.py")), 4),
        (foreign(("open", {"path": "a.py"}, HUGE)), 1),
        (talk(("read_file", {"path": "a.py"}, "x\n" * 200 + "[cut: 450 lines are left, read on from line 201]")), 2),
    ],
    "whole_suite_again": [
        (talk(edit(), sh("pytest -q", FAILED), READ, sh("pytest -q", FAILED.replace("1.20", "1.31"))), 8),
        (talk(sh("pytest", SLOW), sh("python -m pytest -v tests/", SLOW)), 4),
        (talk(("run_tests", {}, PASSED), ("list_dir", {"path": "."}, "a.py"), ("run_tests", {}, PASSED)), 6),
    ],
    "claimed_success": [
        (talk(edit(), sh("pytest -q", FAILED), "I changed one in a.py. All tests pass.", changed=CHANGED), 6),
        (talk(edit(), ("run_tests", {}, FAILED), ("finish", {"message": "Fixed a.py."}, "done"), changed=CHANGED), 6),
    ],
    "asked_instead": [
        (talk(READ, "I see a.py. Should I change it to return 1?"), 4),
        (foreign(("view", {"path": "a.py"}, "x"), last="There are two ways.\n\nWhich one do you prefer?"), 3),
    ],
    "finished_without_edit": [
        (talk(READ, FINISH), 4),
        (talk(READ, "The function returns 0 and is called one."), 4),
        (foreign(("bash", {"command": "cat a.py"}, "x"), last="Done: one returns 1."), 3),
    ],
    "thinking_in_comments": [
        (talk(READ, edit(new=THOUGHTS)), 4),
        (talk(sh(f"cat > b.py <<'EOF'\n{THOUGHTS}EOF")), 2),
    ],
    "final_too_long": [
        (talk(edit(), LONG_WORDS, changed=CHANGED), 4),
        (talk(edit(), ("finish", {"message": LONG_WORDS}, "done"), changed=CHANGED), 4),
    ],
    "final_names_nothing": [
        (
            talk(
                edit(),
                "I made the change as asked.",
                changed=CHANGED,
                diff=ONE.replace("one", "f"),
            ),
            4,
        ),
        (talk(edit(), ("finish", {"message": "All is well."}, "done"), changed={"pkg/calc.py": "def one(): ..."}), 4),
    ],
}

QUIET: dict[str, list[Rollout]] = {
    "unknown_tool": [
        talk(READ, *WENT),
        talk(("read_file", {"path": "b.py"}, "error: No such file or directory", "failed"), *WENT),
        talk(("read_file", {}, "error: read_file needs path", "malformed"), *WENT),
        foreign(("view", {"path": "a.py"}, "error: there is no tool view")),
    ],
    "call_not_readable": [
        talk(READ, *WENT),
        talk(("read_file", {}, "error: not JSON", "unreadable"), *WENT),
        talk(("read_file", {}, "error: read_file needs path", "malformed"), *WENT),
    ],
    "malformed_arguments": [
        talk(READ, *WENT),
        talk(("read_file", {}, "error: another format", "other"), *WENT),
        talk(edit(answer=MISSING, status="failed")),
        talk(("grep", {"file": 1}, "error: there is no tool grep", "unknown_tool")),
    ],
    "repeated_call": [
        talk(READ, edit(), READ),
        talk(READ, edit(answer=MISSING, status="failed"), READ),
        talk(READ, sh("sed -i s/x/y/ a.py"), READ),
        talk(sh("grep -rn one ."), edit(), sh("grep -rn one .")),
        talk(READ, ("read_file", {"path": "a.py"}, "x = 2\n")),
        talk(READ, ("read_file", {"path": "a.py", "start": 3}, "x = 1\n")),
        talk(sh("sleep 2; ls", "a.py"), sh("sleep 2; ls", "a.py")),
        foreign(*(("bash", {"command": command}, "a.py") for command in ("ls", "cd b", "ls"))),
    ],
    "edited_tests": [
        talk(*WENT),
        talk(edit("tests/test_a.py", "def test_a():", "def test_b():\n    assert b()\n\n\ndef test_a():")),
        talk(sh("cat tests/test_a.py", "x"), sh("cat >> tests/test_a.py <<'EOF'\ndef test_b(): ...\nEOF")),
        talk(edit("tests/test_a.py"), instruction=ASKED_TESTS),
        talk(sh("sed -i s/one/two/ a.py tests/test_a.py"), instruction="Rename one to two everywhere."),
        talk(edit("tests/test_new.py", old="", answer="created tests/test_new.py")),
        talk(sh("cat > test_try.py <<'EOF'\npass\nEOF"), sh("python test_try.py"), sh("rm test_try.py")),
        talk(sh("rm -rf tests/__pycache__ /tmp/test_x.py")),
        talk(sh("cp tests/test_a.py /tmp/; pytest tests/test_a.py 2>&1 | tail > /tmp/out.txt", PASSED)),
        talk(sh("cat tests/test_a.py", "x"), sh("grep -n 'rm tests/test_a.py' a; echo '> tests/test_a.py'")),
        talk(sh("git checkout tests/test_a.py")),
        talk(sh("sed -i -e s/x/y/ -e s/x/tests/b.py a.cfg"), sh("rm -rf $T/tests")),
        talk(sh("perl -pi -e 's/tests/x/' a.cfg")),
        talk(sh("rm tests/out.log build/lib/tests")),
    ],
    "edit_not_applied": [
        talk(edit()),
        talk(edit(status="failed", answer="error: No such file or directory")),
        talk(edit("the text to replace is not in.py")),
        talk(("read_file", {"path": "a.py"}, "the text to replace is not in b.py")),
        talk(edit(answer="edited a.py", new="raise ToolFailed('the text to replace is not in a.py')")),
    ],
    "whole_file_read": [
        talk(READ),
        talk(("read_file", {"path": "a.py", "start": 1, "end": 900}, HUGE)),
        talk(("read_file", {"path": "a.py"}, HUGE), edit(), edit(new="z"), edit(new="w")),
        talk(("read_file", {"path": "README.md"}, HUGE)),
        talk(("search_codebase", {"pattern": "x", "path": "a.py"}, HUGE)),
        talk(sh("cat a.py | grep x", HUGE)),
    ],
    "whole_suite_again": [
        talk(edit(), sh("pytest -q", FAILED), edit(), sh("pytest -q", PASSED)),
        talk(sh("pytest -q", FAILED), sh("pytest -q tests/test_a.py", FAILED), sh("pytest -q -k one", FAILED)),
        talk(sh("pytest -q | tail -1", FAILED), sh("pytest --tb=long", FAILED)),
        talk(sh("pytest -k one", FAILED), READ, sh("pytest -k one", FAILED)),
        talk(sh("pytest -q", "error: stopped after 20 s", "failed"), sh("pytest -q", PASSED)),
    ],
    "claimed_success": [
        talk(*WENT, "I changed one in a.py. All tests pass.", changed=CHANGED),
        talk(edit(), sh("pytest -q", FAILED), edit(), "Fixed a.py.", changed=CHANGED),
        talk(edit(), sh("pytest -q", FAILED), "I changed a.py; two tests still fail.", changed=CHANGED),
        talk(edit(), sh("pytest -q", FAILED), "I changed a.py. Not all tests pass.", changed=CHANGED),
        talk(*WENT, sh("pytest", FAILED), "Done: the tests of a.py pass.", changed=CHANGED),
        talk(edit(), sh("pytest -q", FAILED), "I changed one in a.py.", changed=CHANGED),
        talk(edit(), sh("pytest -q", FAILED), "The tests should pass once the server is there.", changed=CHANGED),
    ],
    "asked_instead": [
        talk(edit(), "I changed a.py. Is that what you meant?", changed=CHANGED),
        talk(READ, "Why does it return 0? Because nobody wrote it. one in a.py returns 0."),
        talk(READ, "It already returns 1. Anything else?"),
        talk(READ, "Which one?", instruction="Make one return 1; ask if anything is unclear."),
        talk(READ, "Is that clear?", instruction="Explain what one does."),
    ],
    "finished_without_edit": [
        talk(edit(), FINISH, changed=CHANGED),
        talk(READ, "one already returns 1, so nothing was changed."),
        talk(READ, "Which of the two do you mean?"),
        talk(READ, FINISH, instruction="Read it all."),
        talk(READ, "It returns 0.", instruction="Explain what to change to make one return 1."),
        foreign(("bash", {"command": "python patch.py"}, ""), last="Done."),
        foreign(("apply_diff", {"diff": "..."}, "ok"), last="Done."),
    ],
    "thinking_in_comments": [
        talk(edit(new="# Sums are kept in cents.\n# Wait for the lock first.\n# Rounded at the end.\nreturn 1\n")),
        talk(edit(new=THOUGHTS + "a = 1\nb = 2\nc = 3\nd = 4\n")),
        talk(edit("notes.md", new=THOUGHTS)),
        talk(edit(old=THOUGHTS, new=THOUGHTS + "done = 1\n")),
    ],
    "final_too_long": [
        talk(edit(), "I changed one in a.py.", changed=CHANGED),
        talk(edit(), LONG_WORDS, changed=CHANGED, instruction="Make one return 1 and explain in detail."),
        talk(edit(), LONG_WORDS, changed={f"file_{number}.py": "" for number in range(12)}),
        talk(READ, LONG_WORDS),
    ],
    "final_names_nothing": [
        talk(edit(), "I changed a.py.", changed={"pkg/a.py": "y"}),
        talk(edit(), "`one` returns 1 now.", changed={"pkg/a.py": "y"}, diff=ONE),
        talk(edit(), "The calc module is right now.", changed={"pkg/calc.py": "y"}),
        talk(edit(), FINISH, changed=CHANGED),
        talk(READ, "I made no change."),
    ],
}  # fmt: skip
STYLE = {"lint_introduced", "missing_docstring"}  # they need a tree, see below
GROUP = {"more_than_needed"}  # needs siblings, see test_more_than_needed.py


@pytest.mark.parametrize(
    ("rule", "rollout", "message"), [(rule, *case) for rule, cases in FIRES.items() for case in cases]
)
def test_a_rule_finds_its_mistake_at_its_message(rule: str, rollout: Rollout, message: int) -> None:
    found = read_all(rollout, rules=(rule,))
    assert [(one.rollout, one.segment, one.message, one.rule) for one in found] == [(rollout.id, 0, message, rule)]
    assert rollout.segments[0].messages[message].role == "assistant"
    assert 0 < len(found[0].evidence) <= 160


@pytest.mark.parametrize(("rule", "rollout"), [(rule, case) for rule, cases in QUIET.items() for case in cases])
def test_a_rule_passes_by_what_only_looks_like_it(rule: str, rollout: Rollout) -> None:
    assert read_all(rollout, rules=(rule,)) == []


def test_every_rule_has_cases_and_a_hint() -> None:
    assert set(FIRES) | STYLE | GROUP == set(QUIET) | STYLE | GROUP == set(RULES)
    assert min(map(len, FIRES.values())) >= 2
    assert min(map(len, QUIET.values())) >= 3


def test_hints_are_sentences_that_give_nothing_away() -> None:
    for rule in RULES:
        text = write_hint(rule, ()).text
        assert re.fullmatch(r"Reminder: [a-z][A-Za-z ,]+\.", text), "no path, no symbol, no number"
        assert write_hint(rule, ("open_file",)).rule == rule
    assert [RULES[rule].text for rule in LEARNED] == [  # the pocket model has learned these, word for word
        "Reminder: available tools are {tools}.",
        "Reminder: give a tool one JSON object with exactly its parameters.",
        "Reminder: do not repeat a call, its answer is above.",
        "Reminder: never edit tests, change the source.",
    ]


def test_thoughts_before_a_command_that_ends_the_task_are_not_a_last_message() -> None:
    rollout = talk(edit(), sh("echo SUBMIT"), changed=CHANGED)
    rollout.stop = "finish"
    last = rollout.segments[0].messages[4]
    last.text, last.calls = "All is well." + " Really." * 200, (replace(last.calls[0], start=1612),)
    assert read_all(rollout) == []
    last.calls = (ToolCall("finish", start=1612),)
    assert [one.rule for one in read_all(rollout)] == ["final_too_long", "final_names_nothing"]


def test_a_task_that_is_to_be_left_alone_may_end_without_an_edit(tree: Path) -> None:
    task = Task("t", tree, INSTRUCTION, tree, tree, (), ("tests/a.py::b",), (), tuple(OWN), "test")
    ended = talk(READ, FINISH)
    assert [one.rule for one in read_all(ended, task)] == ["finished_without_edit"]
    assert read_all(ended, replace(task, leave=True)) == []


def test_a_deleted_file_counts_if_it_was_there(tree: Path) -> None:
    task = Task("t", tree, INSTRUCTION, tree, tree, (), (), (), tuple(OWN), "test")
    rollout = talk(sh("rm -f tests/test_calc.py"), sh("rm -f tests/test_other.py"), sh("rm -r tests"))
    assert [one.message for one in read_all(rollout, task, rules=("edited_tests",))] == [2, 6]


def test_one_target_a_message_the_earliest_are_kept_and_rules_can_be_chosen() -> None:
    rollout = talk(READ, edit("tests/test_a.py", answer=MISSING, status="failed"), READ, FINISH)
    assert [(one.message, one.rule) for one in read_all(rollout)] == [
        (4, "edited_tests"),
        (4, "edit_not_applied"),
        (6, "repeated_call"),
        (8, "finished_without_edit"),
    ]
    assert [(one.message, one.rule) for one in read_rollout(rollout, 2)] == [(4, "edited_tests"), (6, "repeated_call")]
    assert [one.rule for one in read_rollout(rollout, 9, rules=("edit_not_applied",))] == ["edit_not_applied"]


@pytest.mark.parametrize(
    ("command", "may_write", "tests"),
    [
        ("ls -la && cat a.py | head -3", False, None),
        ("cd /app && python -m pytest -q tests 2>&1 | tail -5", False, ""),
        ("pytest --tb short tests/test_a.py::test_one", False, "tests/test_a.py::test_one"),
        ("sed -n 1,9p a.py; git diff", False, None),
        ("python fix.py && pytest -q", True, ""),
        ("pytest -q; sed -i s/x/y/ a.py", True, None),
        ("git stash", True, None),
        ("echo x > a.py", True, None),
        ("find . -name '*.pyc' -delete", True, None),
        ("pytest --collect-only", False, None),
    ],
)
def test_what_a_command_does(command: str, may_write: bool, tests: str | None) -> None:
    found = Command(command)
    assert (found.may_write, found.tests) == (may_write, tests)


class Says:
    """A policy that makes the given calls under whatever names the task shows, or says the given words."""

    def __init__(self, chat: ChatFormat, task: Task, variation: float, turns: tuple[Turn, ...]):
        shown = make_toolset(task.tools, "standard", variation, seed=task.id).tools
        self.chat, self.turns = chat, list(turns)
        self.names = {
            tool.own_name: (name, {one.own_name: other for other, one in tool.parameters.items()})
            for name, tool in shown.items()
        }

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        turn = self.turns.pop(0)
        if not isinstance(turn, str):
            name, parameters = self.names[turn[0]]
            turn = render_call(name, {parameters[key]: value for key, value in turn[1].items()})
        ids = [*self.chat.encode(turn), self.chat.end_id]
        return Completion(ids, [-0.1] * len(ids), [0] * len(ids))


def played(
    tree: Path, chat: ChatFormat, *turns: Turn, variation: float = 0.0, task_id: str = "t"
) -> tuple[Task, Rollout]:
    """What the real harness makes of the turns; their answers are not looked at."""
    tools = ("read_file", "edit_file", "run_command", "run_tests", "finish")
    command = "python -m pytest -q -p no:cacheprovider"
    task = Task(task_id, tree, INSTRUCTION, tree, tree, (), ("x",), (), tools, "test", test_command=command)

    async def run() -> Rollout:
        async with ProcessSandbox(tree) as sandbox:
            limits = Limits(turns=12, tokens=90_000, context=90_000, message_tokens=9_000)
            policy = Says(chat, task, variation, turns)
            return await run_agent(task, sandbox, policy, chat, Harness(limits, variation=variation), "r", "g")

    return task, asyncio.run(run())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    functions = "".join(
        f'def value_{number}():\n    """A number."""\n    return {number}\n\n\n' for number in range(1, 13)
    )
    (tmp_path / "calc.py").write_text(functions + 'def one():\n    """One."""\n    return 0\n')
    (tmp_path / "tests" / "test_calc.py").write_text(
        "from calc import one\n\n\ndef test_one():\n    assert one() == 1\n"
    )
    (tmp_path / "long.py").write_text(HUGE)
    return tmp_path


def rules_at(task: Task | None, rollout: Rollout) -> list[tuple[int, str]]:
    return [(one.message, one.rule) for one in read_all(rollout, task)]


@pytest.mark.parametrize(("variation", "task_id"), [(0.0, "t"), (1.0, "a"), (1.0, "b")])
def test_mistakes_in_the_real_harness_under_any_names(
    tree: Path, chat: ChatFormat, variation: float, task_id: str
) -> None:
    task = played(tree, chat, "Well?", variation=variation, task_id=task_id)[0]
    has = {shown.own_name for shown in make_toolset(task.tools, "standard", variation, seed=task_id).tools.values()}
    read = ("read_file", {"path": "long.py"}) if "read_file" in has else ("run_command", {"command": "cat long.py"})
    turns = (
        read,
        edit("calc.py", "return 99", "return 1") if "edit_file" in has else sh("echo"),
        edit("tests/test_calc.py", "one() == 1", "True") if "edit_file" in has else sh("rm tests/test_calc.py"),
    )
    rollout = played(tree, chat, *turns, "I changed test_calc.", variation=variation, task_id=task_id)[1]
    expected = [(2, "whole_file_read")] * ("read_file" in has) + [(4, "edit_not_applied")] * ("edit_file" in has)
    assert rules_at(task, rollout) == [*expected, (6, "edited_tests")]


def test_test_runs_in_the_real_harness(tree: Path, chat: ChatFormat) -> None:
    run = ("run_tests", {})
    wrong, right = edit("calc.py", "return 0", "return 2"), edit("calc.py", "return 0", "return 1")
    said = "I changed one in calc.py and the tests pass."
    found = rules_at(*played(tree, chat, wrong, run, run, said))
    found = [one for one in found if one != (6, "repeated_call")]  # if both runs say that they took as long
    assert found == [(6, "whole_suite_again"), (8, "claimed_success")]
    assert rules_at(*played(tree, chat, run, right, run, said)) == []


BAD_STYLE = edit(
    "calc.py",
    '"""One."""\n    return 0\n',
    '"""One."""\n    import os\n    return helpOne()\n\n\ndef helpOne():\n    return 1\n',
)
OVERRIDE = edit("calc.py", "return 0\n", "return 1\n\n\nclass Two(Base):\n    def runOne(self):\n        return 1\n")
SAID = "I changed one in calc.py."


def test_style_is_read_from_the_repository_and_blamed_on_the_edit(tree: Path, chat: ChatFormat) -> None:
    look = ("read_file", {"path": "calc.py"})
    task, rollout = played(tree, chat, look, BAD_STYLE, SAID)
    assert rules_at(task, rollout) == [(4, "lint_introduced"), (4, "missing_docstring")]
    assert rules_at(None, rollout) == [], "without the tree nobody knows"
    other = edit("extra.py", "", "import os\n\n\ndef getOne():\n    return 1\n")
    assert rules_at(*played(tree, chat, look, look, other, "I made extra.py."))[1:] == [
        (6, "lint_introduced"), (6, "missing_docstring")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "turns", "quiet"),
    [
        ({"calc.py": 'def one():\n    """One."""\n    return 0\n'}, (BAD_STYLE,), STYLE - {"lint_introduced"}),
        ({"a.py": "def bare(): ...\n", "b.py": "def bare(): ...\n"}, (BAD_STYLE,), {"missing_docstring"}),
        ({}, (BAD_STYLE, edit("calc.py", "    import os\n", "")), {"lint_introduced"}),
        ({}, (BAD_STYLE, sh("sed -i 's/    return 1/    return 3/' calc.py")), STYLE),
        ({}, (edit("calc.py", "return 0", "import os  # noqa: F401\n    return 1"),), STYLE),
        ({}, (edit("calc.py", "return 0", "return 1"),), STYLE),
        ({"calc.py": "import os\n\n\ndef one():\n    return 0\n"}, (edit("calc.py", "return 0", "return 1"),), STYLE),
        (
            {"calc.py": "import os\n\n\ndef one():\n    return 0\n"},
            (edit("calc.py", "import os\n\n\n", ""), edit("calc.py", "def one", "import re\n\n\ndef one")),
            {"lint_introduced"},
        ),
        ({}, (edit("tests/test_more.py", "", "import os\n\n\ndef oneMore(): ...\n"),), STYLE),
        ({}, (OVERRIDE,), STYLE),
    ],
)  # fmt: skip
def test_style_that_is_the_repositorys_own_is_not_a_mistake(
    tree: Path, chat: ChatFormat, files: dict[str, str], turns: tuple[Turn, ...], quiet: set[str]
) -> None:
    for path, text in files.items():
        (tree / path).write_text(text)
    task, rollout = played(tree, chat, *turns, SAID)
    found = {one.rule for one in read_all(rollout, task)}
    assert rollout.changed
    assert not found & quiet


def test_a_perfect_script_breaks_no_rule(tmp_path: Path, chat: ChatFormat) -> None:
    rng, habits = random.Random(3), Habits(0, 0, 0, 0, explore=0.5)
    world = replace(HARNESS, limits=replace(HARNESS.limits, tokens=60_000, context=60_000, message_tokens=4_000))

    async def run() -> list[tuple[Task, Rollout]]:
        done = []
        for draft in draft_tasks(seed=3, count=25, split="train"):
            folder = tmp_path / str(len(done))
            for path, text in draft.files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
            task = Task("t", folder, draft.instruction, folder, folder, (), ("x",), (), draft.tools, draft.gold.name)
            async with ProcessSandbox(folder) as sandbox:
                policy = Demonstrator(Script(draft, rng, habits), chat)
                done.append((task, await run_agent(task, sandbox, policy, chat, world, "r", "g")))
        return done

    rollouts = asyncio.run(run())
    assert all(rollout.stop == "finish" and rollout.changed for _, rollout in rollouts)
    assert [read_all(rollout, task) for task, rollout in rollouts] == [[]] * len(rollouts)


ODD = (
    "", ".", "a.py", "tests/test_a.py", "x" * 300, "a\0b", "pytest -q", "pytest -q > 'x", "cat <<EOF\nx\nEOF",
    "rm tests", "3 failed, 1 passed in 1.5s", "Ran 3 tests in 1.2s\n\nFAILED", "9" * 5000 + " failed in 1.1.1s",
    "All tests pass. Done?", "[cut: 99 lines are left, read on from line 3]", "def f(:\n", HUGE, THOUGHTS,
)  # fmt: skip
WORDS = st.one_of(st.text(max_size=30), st.sampled_from(ODD))
PAIRS = st.fixed_dictionaries({"old": WORDS, "new": WORDS})
VALUES = st.one_of(WORDS, st.none(), st.integers(), st.lists(st.one_of(WORDS, st.integers(), PAIRS), max_size=2))
NAMES = st.sampled_from(
    ["path", "file_path", "old", "new", "command", "cmd", "edits", "pattern", "text", "message", "view_range"]
)
CALLS = st.builds(
    ToolCall,
    st.sampled_from([*OWN, "bash", "str_replace_editor", "", "submit"]),
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.sampled_from([None, None, "not JSON"]),
    st.integers(0, 50),
)
PLACES = st.integers(0, 9)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "assistant", "tool", "tool"]),
    WORDS,
    *[PLACES] * 4,
    st.lists(CALLS, max_size=3).map(tuple),
    st.sampled_from(["ok", "failed", "unknown_tool", "malformed", None]),
)
SEGMENTS = st.builds(
    Segment, st.just([]), st.lists(st.booleans(), max_size=9), st.just([]), st.just([]), st.lists(MESSAGES, max_size=12)
)
ROLLOUTS = st.builds(
    Rollout,
    *[st.just("r")] * 3,
    st.just(()),
    st.lists(SEGMENTS, max_size=3),
    st.sampled_from(["finish", "answer", "turns", "crash"]),
    changed=st.dictionaries(WORDS, st.one_of(WORDS, st.none()), max_size=3),
    diff=WORDS,
    own_names=st.sampled_from([{}, OWN, {"bash": "bash", "ls": "list_dir"}]),
    foreign=st.booleans(),
)


@settings(max_examples=150)
@given(rollout=ROLLOUTS, known=st.booleans())
def test_rules_are_total(tmp_path_factory: pytest.TempPathFactory, rollout: Rollout, known: bool) -> None:
    tree = tmp_path_factory.getbasetemp()
    task = Task("t", tree, INSTRUCTION, tree, tree, (), (), (), tuple(OWN), "test") if known else None
    found = read_all(rollout, task)
    for target in found:
        assert rollout.segments[target.segment].messages[target.message].role == "assistant"
        assert len(target.evidence) <= 160
    kept = read_rollout(rollout, 3, task)
    assert len(kept) == len({(target.segment, target.message) for target in kept}) <= 3
    assert set(kept) <= set(found)
