"""The agent loop with real sandboxes: calls run, mistakes are answered and counted, limits end it, crashes stay
inside."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.chat.dialects import JSON
from offbook.agent.harness import Harness, run_agent
from offbook.sandbox import Sandbox, open_sandbox
from offbook.signals.feedback import read_rollout
from offbook.types import Completion, Context, Limits, Prices, Prompt, Rollout, Task

ALL_TOOLS = ("read_file", "edit_file", "run_command", "search_codebase", "list_dir", "todo", "finish")
LIMITS = Limits(turns=8, tokens=40_000, context=40_000, message_tokens=4_000, command_s=4)


class Says:
    """A policy that says given lines, then finishes."""

    def __init__(self, chat: ChatFormat, *lines: str):
        self.chat = chat
        self.lines = [*lines, render_call("finish", {})]

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        ids = [*self.chat.encode(self.lines.pop(0)), self.chat.end_id][:max_tokens]
        return Completion(ids, [-0.1] * len(ids), [0] * len(ids))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pkg" / "calc.py").write_text("def one():\n    return 0\n")
    (tmp_path / "tests" / "test_calc.py").write_text("def test_one():\n    assert True\n")
    return tmp_path


def rollout_of(
    tree: Path,
    policy: object,
    chat: ChatFormat,
    tools=ALL_TOOLS,
    limits: Limits = LIMITS,
    wrap=lambda sandbox: sandbox,
    context: Context | None = None,
    **world,
) -> Rollout:
    task = Task("t", tree, "Make one return 1.", tree, tree, (), (), (), tools, "test", context=context)

    async def run() -> Rollout:
        async with await open_sandbox(tree) as sandbox:
            return await run_agent(task, wrap(sandbox), policy, chat, Harness(limits, **world), "r", "g")

    return asyncio.run(run())


def answers(rollout: Rollout) -> list[tuple[str | None, str]]:
    return [(m.status, m.text) for m in rollout.segments[0].messages if m.role == "tool"]


def edit(path: str, old: str, new: str) -> str:
    return render_call("edit_file", {"path": path, "old": old, "new": new})


def test_a_working_session(tree: Path, chat: ChatFormat) -> None:
    policy = Says(
        chat,
        render_call("list_dir", {"path": "."}),
        render_call("search_codebase", {"pattern": r"return \d"}),
        render_call("read_file", {"path": "pkg/calc.py"}),
        edit("pkg/calc.py", "return 0", "return 1"),
        render_call("run_command", {"command": "python -c 'from pkg.calc import one; print(one())'"}),
    )
    rollout = rollout_of(tree, policy, chat)
    assert answers(rollout) == [
        ("ok", "pkg/\ntests/"),
        ("ok", "pkg/calc.py:2:     return 0"),
        ("ok", "def one():\n    return 0\n"),
        ("ok", "edited pkg/calc.py"),
        ("ok", "1\n"),
        ("ok", "done"),
    ]
    assert rollout.stop == "finish"
    assert rollout.changed == {"pkg/calc.py": "def one():\n    return 1\n"}
    assert "-    return 0\n+    return 1\n" in rollout.diff
    assert (rollout.usage.turns, rollout.usage.calls, rollout.usage.invalid_calls) == (6, 6, 0)
    assert (tree / "pkg" / "calc.py").read_text() == "def one():\n    return 0\n", "the task itself is untouched"


def test_mistakes_are_answered_counted_and_the_rollout_goes_on(tree: Path, chat: ChatFormat) -> None:
    policy = Says(
        chat,
        render_call("open_file", {"path": "pkg/calc.py"}),
        render_call("search_codebase", {"pattern": "one"}),  # a real tool that this task does not have
        render_call("read_file", {"file": "pkg/calc.py"}),
        render_call("read_file", {"path": 3}),
        "<tool_call>{broken</tool_call>",
        edit("pkg/calc.py", "absent", "x"),
        render_call("read_file", {"path": "../../etc/passwd"}),
    )
    rollout = rollout_of(tree, policy, chat, tools=("read_file", "edit_file", "finish"))
    statuses = [status for status, _ in answers(rollout)]
    assert statuses == ["unknown_tool", "unknown_tool", "malformed", "malformed", "malformed", "failed", "failed", "ok"]
    assert rollout.usage.invalid_calls == 5
    assert rollout.stop == "finish"


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (replace(LIMITS, turns=2), "turns"),
        (replace(LIMITS, tokens=600), "tokens"),
        (replace(LIMITS, context=600), "context"),
    ],
)
def test_limits_end_the_rollout_with_their_name(tree: Path, chat: ChatFormat, limits: Limits, stop: str) -> None:
    policy = Says(chat, *[render_call("read_file", {"path": "pkg/calc.py"})] * 12)
    world = {"profile": "pocket", "prices": Prices(input=1.0, output=2.0)}
    rollout = rollout_of(tree, policy, chat, tools=("read_file", "edit_file", "finish"), limits=limits, **world)
    assert rollout.stop == stop
    assert sum(len(segment.ids) for segment in rollout.segments) <= min(limits.tokens, limits.context) + 100


def test_wall_time_ends_a_rollout(tree: Path, chat: ChatFormat) -> None:
    policy = Says(chat, *[render_call("run_command", {"command": "sleep 5"})] * 3)
    limits = replace(LIMITS, wall_s=0.4)
    rollout = rollout_of(tree, policy, chat, limits=limits)
    assert rollout.stop == "wall"
    assert rollout.usage.model_seconds < 0.2 < rollout.usage.seconds
    assert rollout.usage.longest_call == "run_command sleep 5", "also a call that did not end"
    assert 0.2 < rollout.usage.longest_call_seconds < rollout.usage.seconds


def test_a_slow_command_is_stopped_and_said_so(tree: Path, chat: ChatFormat) -> None:
    limits = replace(LIMITS, command_s=0.2)
    rollout = rollout_of(tree, Says(chat, render_call("run_command", {"command": "sleep 9"})), chat, limits=limits)
    assert answers(rollout)[0][0] == "failed"
    assert "stopped after 0.2 s" in answers(rollout)[0][1]
    assert rollout.usage.timeouts == 1


def test_text_without_a_call_is_the_answer(tree: Path, chat: ChatFormat) -> None:
    assert rollout_of(tree, Says(chat, "I would rather not."), chat).stop == "answer"


def test_what_the_editor_shows_stands_under_the_request(tree: Path, chat: ChatFormat) -> None:
    def first(context: Context | None) -> str:
        rollout = rollout_of(tree, Says(chat), chat, context=context)
        return next(message.text for message in rollout.segments[0].messages if message.role == "user")

    assert first(None) == first(Context()) == "Make one return 1."
    shown = first(Context(open=("pkg/calc.py:2", "setup.py:1"), edits=("pkg/calc.py:2-8",)))
    assert shown.startswith("Make one return 1.\n\n")
    assert "Open files:\n- pkg/calc.py:2\n- setup.py:1\n\nRecent edits:\n- pkg/calc.py:2-8" in shown


def test_a_crash_of_the_policy_is_on_the_rollout(tree: Path, chat: ChatFormat) -> None:
    class Broken:
        async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
            raise ConnectionError("engine gone")

    rollout = rollout_of(tree, Broken(), chat)
    assert rollout.stop == "crash"
    assert "engine gone" in rollout.events[0].detail


def test_calls_of_one_message_are_answered_in_order(tree: Path, chat: ChatFormat) -> None:
    calls = [render_call("run_command", {"command": f"echo {number}"}) for number in range(3)]
    rollout = rollout_of(tree, Says(chat, "".join(calls)), chat)
    assert answers(rollout)[:3] == [("ok", "0\n"), ("ok", "1\n"), ("ok", "2\n")]
    assert rollout.usage.calls == 4


def test_a_tool_that_breaks_is_an_answer_and_an_event(tree: Path, chat: ChatFormat) -> None:
    class Unreadable:
        def __init__(self, sandbox: Sandbox):
            self._sandbox = sandbox

        def __getattr__(self, name: str) -> object:
            return getattr(self._sandbox, name)

        async def read(self, path: str) -> str:
            raise RuntimeError("a bug in the sandbox")

    policy = Says(chat, render_call("read_file", {"path": "pkg/calc.py"}), render_call("list_dir", {"path": "pkg"}))
    rollout = rollout_of(tree, policy, chat, wrap=Unreadable)
    assert [status for status, _ in answers(rollout)] == ["failed", "ok", "ok"]
    assert rollout.stop == "finish"
    assert [(event.kind, "a bug in the sandbox" in event.detail) for event in rollout.events] == [("tool_crash", True)]


def test_output_that_would_outgrow_the_window_is_cut_and_recorded(tree: Path, chat: ChatFormat) -> None:
    (tree / "long.txt").write_text("word " * 2000)
    limits = replace(LIMITS, context=4_000, message_tokens=400)
    policy = Says(chat, render_call("read_file", {"path": "long.txt"}))
    rollout = rollout_of(
        tree, policy, chat, tools=("read_file", "edit_file", "finish"), limits=limits, profile="pocket"
    )
    assert "context is nearly full" in answers(rollout)[0][1]
    assert [event.kind for event in rollout.events] == ["output_cut"]
    assert len(rollout.segments[0].ids) <= limits.context


def test_a_prompt_that_does_not_extend_the_one_before_is_counted(tree: Path, chat: ChatFormat) -> None:
    class Meddling(Says):
        async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
            prompt.ids.append(0)  # now the record is not what the policy continued
            return await super().complete(prompt, max_tokens)

    assert rollout_of(tree, Meddling(chat, render_call("list_dir", {"path": "."})), chat).usage.drift == 1


def test_usage_says_what_the_tokens_were_for(tree: Path, chat: ChatFormat) -> None:
    call = render_call("list_dir", {"path": "."})
    rollout = rollout_of(tree, Says(chat, "Let me look." + call, "All done."), chat)
    usage = rollout.usage
    assert usage.thinking_tokens == len("Let me look.")
    assert usage.call_tokens == len(chat.encode(call)) + 1, "the end of the message counts to the call"
    assert usage.final_tokens == len("All done.") + 1
    assert usage.output_tokens == len("pkg/\ntests/")
    assert usage.thinking_tokens + usage.call_tokens + usage.final_tokens == usage.sampled_tokens
    assert usage.drift == 0


def test_a_session_in_the_dialect_json_and_what_is_not_in_it(tree: Path, chat: ChatFormat) -> None:
    chat = ChatFormat(chat.tokenizer, "json")
    arguments = {"path": "pkg/calc.py"}
    policy = Says(chat, render_call("read_file", arguments), "I read.\n" + JSON.render("read_file", arguments))
    policy.lines[-1] = JSON.render("finish", {}).removeprefix("```json").removesuffix("```")
    rollout = rollout_of(tree, policy, chat, profile="worked", tools=("read_file", "edit_file", "finish"))
    (other, said), read, done = answers(rollout)[-3:]
    assert (other, said.partition(". ")[2]) == ("malformed", JSON.how)
    assert (read, done[0]) == (("ok", "def one():\n    return 0\n"), "ok")
    assert (rollout.stop, rollout.usage.invalid_calls) == ("finish", 1)
    assert read_rollout(rollout, max_targets=1)[0].rule == "call_not_readable"
    texts = [message.text for message in rollout.segments[0].messages]
    examples = [text for text in texts[: texts.index("Make one return 1.")] if "```json" in text]
    assert len(examples) >= 2, "worked turns are in the run's dialect"
    assert not any("<tool_call>" in text for text in texts if text != render_call("read_file", arguments))
    told = rollout_of(tree, Says(chat, JSON.render("finish", {})), chat).segments[0].messages[0].text
    assert told.endswith(JSON.how)
    assert "<tool_call>" not in told
