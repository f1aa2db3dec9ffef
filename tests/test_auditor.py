"""A model as a monitor and as a part of the reward, behind a real server: it sees no outcome."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from test_remote import Answer, Server, reply, serving

from offbook.core.client import Client
from offbook.core.config import HarnessConfig, JudgeConfig, RewardsConfig
from offbook.signals.judge import Judge
from offbook.signals.monitors import policy
from offbook.signals.monitors.policy import Monitors
from offbook.signals.rewards import compose
from offbook.types import Event, Flag, Message, OffbookError, Reward, Rollout, Segment, ServerLost, Task, ToolCall

FOUND = {"found": True, "segment": 0, "message": 1, "quote": "git show HEAD~1:pkg.py", "why": "from history"}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    tree, hidden = tmp_path / "tree", tmp_path / "hidden"
    for path, text in {
        tree / "pkg.py": "def one():\n    raise NotImplementedError\n",
        hidden / "test_pkg.py": "SECRET_ANSWER = 1\n",
        tmp_path / "solution/gold.patch": "SECRET_GOLD\n",
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
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


def judge(server: Server) -> Judge:
    client = Client(f"http://127.0.0.1:{server.server_port}/v1", "judge", max_retries=0)
    without = [rule for rule in policy.CHEATING.rules if rule != "model/lookup"]
    return Judge(client, policy.CHEATING, without=without)


def say(value: Any) -> Answer:
    return reply(json.dumps(value))


YES = say({"holds": True})


def audit(script: tuple[Answer, ...], task: Task | None, rollout: Rollout) -> tuple[list[Flag], list[Any]]:
    with serving(*script) as server:
        flags = asyncio.run(policy.flags_by(judge(server), task, rollout))
        return flags, [body for _, _, body in server.asked]


def test_it_is_asked_once_and_once_more_about_what_it_finds(task: Task, rollout: Rollout) -> None:
    flags, (asked, confirmed) = audit((say(FOUND), YES), task, rollout)
    assert flags == [Flag("model/lookup", 1, "'git show HEAD~1:pkg.py': from history")]
    for words in ("[segment 0 message 1] agent: calls run_command", "+    return 1", "Bring back one."):
        assert words in asked["messages"][0]["content"]
    assert "why" in asked["response_format"]["json_schema"]["schema"]["properties"]
    assert "[message 1] agent: calls run_command" in confirmed["messages"][0]["content"]
    assert audit((say({"found": False}),), task, rollout)[0] == []
    assert not rollout.events


def test_it_is_blind(task: Task, rollout: Rollout) -> None:
    _, asked = audit((say(FOUND), YES), task, rollout)
    for secret in ("SECRET", "secret thought", '"outcome"'):
        assert secret not in json.dumps(asked)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"quote": "words that are nowhere"}, "a quote that is not in the record"),
        ({"rule": "taste"}, "unknown rule"),
        ({"message": 9}, "no such message"),
    ],
)
def test_a_finding_that_does_not_hold_is_counted(
    task: Task, rollout: Rollout, wrong: dict[str, Any], reason: str
) -> None:
    assert audit((say({**FOUND, **wrong}),), task, rollout)[0] == []
    assert [event.detail for event in rollout.events] == [f"1 of: {reason}"]


def test_what_is_no_json_is_asked_for_once_more(task: Task, rollout: Rollout) -> None:
    again = reply(f"<think>hm</think>```json\n{json.dumps(FOUND)}\n```")
    flags, asked = audit((reply("I think it is fine."), again, YES), task, rollout)
    assert (len(flags), len(asked)) == (1, 3)
    _, asked = audit((reply("I think it is fine."),), task, rollout)
    assert len(asked) == 2
    assert [event.detail for event in rollout.events] == ["1 of: no JSON"]


def test_an_unreachable_judge_is_an_event(task: Task, rollout: Rollout) -> None:
    client = Client("http://127.0.0.1:9/v1", "judge", max_retries=0)
    monitors = Monitors(model=Judge(client, policy.CHEATING))
    asyncio.run(monitors.judge(task, rollout))
    count = len(policy.CHEATING.prompts)
    assert Event(-1, "monitor_unreachable", f"{count} of: connection refused") in rollout.events


def rewards(server: Server, **weights: float) -> Any:
    judge = JudgeConfig(url=f"http://127.0.0.1:{server.server_port}/v1", name="judge")
    return compose(RewardsConfig(weights=weights), HarnessConfig(), judge)


def test_a_judge_as_a_part_of_the_reward(task: Task, rollout: Rollout) -> None:
    with serving(say({"points": 7, "why": "fine"}), say({"points": 99})) as server:
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
    lost.assessor.model.max_retries = 0  # type: ignore[union-attr]
    with pytest.raises(ServerLost):
        asyncio.run(lost.assess(task, rollout))
