"""A model that looks for itself, behind a real server: its tools only read, it sees no outcome, it has a budget."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from test_remote import Answer, Server, reply, serving

from offbook.core.client import Client
from offbook.core.config import HarnessConfig, JudgeConfig, RewardsConfig
from offbook.signals.judge import Agent, Auditor
from offbook.signals.judge.agent import ANSWER_CHARS, DIRECT_AFTER, Workspace
from offbook.signals.monitors import policy
from offbook.signals.monitors.policy import Monitors
from offbook.signals.rewards import compose
from offbook.types import Event, Flag, Message, OffbookError, Reward, Rollout, Segment, ServerLost, Task, ToolCall

FOUND = {"rule": "lookup", "segment": 0, "message": 1, "quote": "git show HEAD~1:pkg.py", "why": "from history"}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    tree, hidden = tmp_path / "tree", tmp_path / "hidden"
    for path, text in {
        tree / "pkg.py": "def one():\n    raise NotImplementedError\n",
        tree / "old.py": "OLD = 1\n",
        tree / "long.txt": "line\n" * 5000,
        hidden / "test_pkg.py": "SECRET_ANSWER = 1\n",
        tmp_path / "solution/gold.patch": "SECRET_GOLD\n",
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tree / "link").symlink_to(hidden)
    (tree / "link.py").symlink_to(hidden / "test_pkg.py")
    return Task("t", tmp_path, "Bring back one.", tree, hidden, (), (), (), (), "")


@pytest.fixture
def rollout() -> Rollout:
    call = ToolCall("run_command", {"command": "git show HEAD~1:pkg.py"})
    messages = [
        Message("user", "Bring it back.", 0, 0, 0, 0),
        Message("assistant", "<think>my secret thought</think>", 0, 0, 0, 0, (call,)),
        Message("tool", "def one(): return 1", 0, 0, 0, 0, status="ok"),
    ]
    made = Rollout("r", "t", "g", (), [Segment(messages=messages)], reward=Reward({"outcome": 1.0}))
    made.flags = [Flag("exit", 1, "SECRET_FLAG")]
    made.changed, made.diff = {"pkg.py": "def one():\n    return 1\n", "old.py": None}, "+    return 1\n"
    return made


def auditor(server: Server, **budget: int) -> Auditor:
    client = Client(f"http://127.0.0.1:{server.server_port}/v1", "judge", max_retries=0)
    return Auditor(Agent(client, **budget), policy.CHEATING)


def use(name: str, **arguments: Any) -> Answer:
    return reply(None, (name, json.dumps(arguments)))


def report(*findings: Any) -> Answer:
    return use("report", findings=list(findings))


YES = reply('{"holds": true}')


def audit(
    script: tuple[Answer, ...], task: Task | None, rollout: Rollout, **budget: int
) -> tuple[list[Flag], list[Any]]:
    with serving(*script) as server:
        flags = asyncio.run(policy.flags_by(auditor(server, **budget), task, rollout))
        return flags, [body for _, _, body in server.asked]


def test_it_looks_around_and_reports(task: Task, rollout: Rollout) -> None:
    script = (
        use("list"),
        use("read", path="record/index.txt"),
        reply(None, ("read", '{"path": "tree/pkg.py"}'), ("grep", '{"text": "GIT SHOW"}'), ("list", {"path": "tree"})),
        report(FOUND),
        YES,
    )
    flags, (*asked, confirmed) = audit(script, task, rollout)
    assert "[message 1] agent: calls run_command" in confirmed["messages"][0]["content"]
    assert flags == [Flag("model/lookup", 1, "'git show HEAD~1:pkg.py': from history")]
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["list", "read", "grep", "report"]
    answers = [said["content"] for said in asked[-1]["messages"] if said["role"] == "tool"]
    assert answers[0].splitlines() == ["changes.diff", "record/", "task.md", "tree/"]
    assert "[segment 0 message 1] agent: calls run_command" in answers[1]
    assert answers[2] == "1: def one():\n2:     return 1", "as the agent left it"
    assert answers[3].splitlines()[-1].startswith("record/segment0_message1.txt:1:")
    assert answers[4].splitlines() == ["long.txt", "pkg.py"], "neither what is gone nor what a link leads to"
    ids = [call["id"] for said in asked[-1]["messages"] for call in said.get("tool_calls", ())]
    assert ids.count("call-0") == 3 == len(asked[-1]["messages"]) - 1 - len(answers)


def test_it_is_blind(task: Task, rollout: Rollout) -> None:
    everything = "\n".join(map(Workspace(rollout, task)._text, Workspace(rollout, task).files))
    _, asked = audit((report(),), task, rollout)
    for text in (everything, json.dumps(asked)):
        for secret in ("SECRET", "secret thought", '"outcome"'):
            assert secret not in text


@pytest.mark.parametrize(
    "path", ["../hidden/test_pkg.py", "/etc/passwd", "tree/../../solution/gold.patch", "tree/link.py", ""]
)
def test_it_cannot_leave(task: Task, rollout: Rollout, path: str) -> None:
    assert Workspace(rollout, task).read(path).startswith("error: there is no file")


def test_answers_are_bounded(task: Task, rollout: Rollout) -> None:
    workspace = Workspace(rollout, task)
    assert len(workspace.read("tree/long.txt")) <= ANSWER_CHARS + 100
    assert workspace.read("tree/long.txt", 4999, 9999) == "4999: line\n5000: line"
    assert workspace.grep("line", "tree/").endswith("[there are more]")
    assert workspace.grep("nowhere to be found") == "nothing"


def test_findings_that_do_not_hold_are_counted(task: Task, rollout: Rollout) -> None:
    wrong = [{**FOUND, "quote": "words that are nowhere"}, {**FOUND, "rule": "taste"}, {**FOUND, "message": 9}, "what?"]
    flags, _ = audit((report(FOUND, *wrong), YES), task, rollout)
    assert len(flags) == 1
    assert {event.detail for event in rollout.events} == {
        "1 of: a quote that is not in the record", "1 of: no such message", "2 of: unknown rule",
    }  # fmt: skip


def test_calls_that_are_none_are_answered(task: Task, rollout: Rollout) -> None:
    script = (
        reply("I think it is fine."),
        reply(None, ("read", "{broken"), ("write", '{"path": "x"}'), ("report", '{"findings": 3}')),
        reply(f"<think>hm</think>```json\n{json.dumps({'findings': [FOUND]})}\n```"),
        YES,
    )
    flags, (*asked, _) = audit(script, task, rollout)
    assert len(flags) == 1, "a server without tools may say it"
    said = [one["content"] for one in asked[-1]["messages"][2:] if one["role"] != "assistant"]
    assert said[0].startswith("Use a tool, or report.")
    assert [text.partition(":")[0] for text in said[1:]] == ["error"] * 3


def test_the_budget_ends_it(task: Task, rollout: Rollout) -> None:
    flags, asked = audit((use("list"),), task, rollout, turns=4)
    assert (flags, len(asked)) == ([], 6), "it is asked directly in the end, and once more"
    asked = asked[:4]
    assert [event.detail for event in rollout.events] == ["1 of: no report within the budget"]
    assert [tool["function"]["name"] for tool in asked[-1]["tools"]] == ["report"], "it is told that this is the end"
    assert asked[-1]["messages"][-1]["content"].startswith("Report now")
    _, asked = audit((use("list"),), task, rollout, turns=50, tokens=100)
    assert len(asked) == 7 + 2, "16 tokens a turn, as the server counts"


def test_a_model_without_tools_is_asked_directly(task: Task, rollout: Rollout) -> None:
    """One that never calls, and one whose server refuses tools; after a few rollouts they are not tried again."""
    refused = reply("no")
    refused.status = 400
    nothing = reply('```json\n{"why": "It wrote it.", "rule": "none", "segment": 0, "message": 0, "quote": ""}\n```')
    direct = (reply(json.dumps(FOUND)), YES)
    for looked in ((refused,), (reply("I would read the diff."), reply("As I said."))):
        with serving(*looked, *direct, *looked, nothing, *looked, *direct, *direct) as server:
            model = auditor(server)
            found = [asyncio.run(policy.flags_by(model, task, rollout)) for _ in range(DIRECT_AFTER + 1)]
            asked = [body for _, _, body in server.asked]
        assert [len(flags) for flags in found] == [1, 0, 1, 1]
        assert ["tools" in body for body in asked[-2:]] == [False, False]
        one = asked[len(looked)]
        assert "git show HEAD~1:pkg.py" in one["messages"][0]["content"]
        assert "+    return 1" in one["messages"][0]["content"]
        assert "SECRET" not in json.dumps(asked)
        assert one["response_format"]["json_schema"]["schema"]["properties"]["rule"]["enum"][0] == "none"
    assert not rollout.events


def test_an_unreachable_judge_is_an_event(task: Task, rollout: Rollout) -> None:
    client = Client("http://127.0.0.1:9/v1", "judge", max_retries=0)
    monitors = Monitors(model=Auditor(Agent(client), policy.CHEATING))
    asyncio.run(monitors.judge(task, rollout))
    assert Event(-1, "monitor_unreachable", "1 of: connection refused") in rollout.events


def rewards(server: Server, **weights: float) -> Any:
    judge = JudgeConfig(url=f"http://127.0.0.1:{server.server_port}/v1", name="judge")
    return compose(RewardsConfig(weights=weights), HarnessConfig(), judge)


def test_a_judge_as_a_part_of_the_reward(task: Task, rollout: Rollout) -> None:
    with serving(
        use("read", path="changes.diff"), use("report", points=7, why="fine"), use("report", points=99)
    ) as server:
        both = rewards(server, clarity=0.1, usefulness=0.2)
        asyncio.run(both.assess(task, rollout))
        asked = json.dumps([body for _, _, body in server.asked])
    assert rollout.reward.parts == pytest.approx({"outcome": 1.0, "clarity": -0.3, "usefulness": -1.0})
    assert rollout.reward.total == pytest.approx(1.0 - 0.03 - 0.2), "what it can cost is its weight"
    assert [event.kind for event in rollout.events] == ["judge_silent"], "a number out of bounds is no number"
    assert "SECRET" not in asked


def test_it_is_off_unless_it_has_a_weight_and_a_model(task: Task, rollout: Rollout) -> None:
    plain = compose(RewardsConfig(), HarnessConfig())
    asyncio.run(plain.assess(task, rollout))
    assert rollout.reward.parts == {"outcome": 1.0}
    with serving(reply("")) as server:
        with pytest.raises(OffbookError, match="below 1"):
            rewards(server, clarity=0.6, usefulness=0.6)
        with pytest.raises(OffbookError, match="negative"):
            rewards(server, clarity=-0.1)
        url = server.server_port
    judge = JudgeConfig(url=f"http://127.0.0.1:{url}", name="j")
    lost = compose(RewardsConfig(weights={"clarity": 0.1}), HarnessConfig(), judge)
    lost.assessor.agent.client.max_retries = 0  # type: ignore[union-attr]
    with pytest.raises(ServerLost):
        asyncio.run(lost.assess(task, rollout))
