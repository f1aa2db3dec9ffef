"""A judge model, behind a real server or here: what it finds, what is refused, what it is shown."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from annotating import annotate
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from test_hint_leaks import made
from test_remote import reply, serving

from offbook.agent.chat import ChatFormat, Transcript
from offbook.core.client import Client, loaded
from offbook.core.config import Config, FeedbackConfig, JudgeConfig, TrainConfig
from offbook.rl.train import hint_judge_of
from offbook.signals.feedback import MISTAKES, hints_in
from offbook.signals.judge import Judge, Judgement, show
from offbook.signals.judge.judge import GIVE_UP_AFTER
from offbook.signals.judge.record import LEAST, cut, is_sampled, level
from offbook.train.trainer import Trainer
from offbook.types import Completion, Event, Hint, Message, Reward, Rollout, Segment, Target, Task, ToolCall

HINT = "Reminder: run the tests before you say that you are done."


def conversation(name: str = "r", answer: str = "1 failed, 3 passed") -> Rollout:
    call = ToolCall("run_command", {"command": "pytest -q\necho done"})
    messages = [
        Message("user", "Bring it back.", 0, 0, 0, 0),
        Message("assistant", "I know what spread does.", 0, 0, 0, 0, (call,)),
        Message("tool", answer, 0, 0, 0, 0, status="ok"),
        Message("assistant", "All tests pass now.", 0, 0, 0, 0),
    ]
    rollout = Rollout(name, "little-spread", "g", (), [Segment(messages=messages)], reward=Reward({"outcome": 0.125}))
    rollout.events.append(Event(-1, "grade", "test_spread_of_nothing failed"))
    return rollout


def mistake(**changed: Any) -> dict[str, Any]:
    return {"message": 3, "rule": "unverified", "hint": HINT, "quote": "All tests pass now.", **changed}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    tests = ("tests/test_figures.py::test_spread", "tests/test_figures.py::test_spread_of_nothing")
    return made(tmp_path_factory.mktemp("tasks") / "spread", "little/figures.py", "spread", tests)


UNVERIFIED_ONLY = [rule for rule in MISTAKES.rules if rule != "model/unverified"]
YES = reply('{"holds": true}')


def judge_at(server: Any, **options: Any) -> Judge:
    return Judge(Client(f"http://127.0.0.1:{server.server_port}/v1", "coach"), MISTAKES, **options)


def read_reply(reply: str, rollout: Rollout, task: Task | None = None) -> Judgement:
    found, refused = MISTAKES.read(loaded(reply), "unverified", rollout, task)
    return Judgement([found] if found else [], refused=Counter({refused: 1} if refused else {}))


def messages(judgement: Judgement) -> list[int]:
    return [one.message for one in judgement.found]


def refusing() -> Any:
    answer = reply("no")
    answer.status = 400  # not tried again
    return answer


def test_mistakes_over_a_real_socket(task: Task) -> None:
    """Questions go out one at a time, so the answers come in the order of the patterns. What cannot be used is asked
    again, and what is found has to be confirmed."""
    answers = dict.fromkeys(MISTAKES.prompts, ('{"found": false, "message": 0}',))
    answers["unverified"] = ("<think>[hm]</think>```json\n" + json.dumps(mistake()) + "\n```", '{"holds": true}')
    wrong = json.dumps(mistake(rule="ignored_output", message=2))
    answers["ignored_output"] = (wrong, wrong)
    answers["wrong_scope"] = ("There is nothing to say.",) * 2
    answers["wrong_assumption"] = ("Let me see.", '```json\n{"found": false}\n```')
    said = [(rule, one) for rule, some in answers.items() for one in some]
    with serving(*(reply(one) for _, one in said)) as server:
        judgement = asyncio.run(judge_at(server, at_once=1).read([(conversation(), task)]))
        asked = [body["messages"] for _, _, body in server.asked]
    target = Target("r", 0, 3, "model/unverified", "All tests pass now.")
    assert hints_in(judgement) == {"r": [(target, Hint("model/unverified", HINT))]}
    assert judgement.refused == {"not the agent's message": 1, "no JSON": 1}
    assert (judgement.answered, judgement.rollouts) == (len(MISTAKES.prompts), 1)
    assert len(MISTAKES.prompts) >= 7
    for (rule, _), messages in zip(said, asked, strict=True):
        prompt = messages[0]["content"]
        assert MISTAKES.prompts[rule].strip() in prompt
        assert "message 2] answer: 1 failed, 3 passed" in prompt
        assert task.instruction in prompt
    again = [messages[2]["content"] for messages in asked if len(messages) == 3]
    assert [text.partition(": ")[2].partition(".")[0] for text in again] == [
        "not the agent's message (the agent's messages are 1, 3)", "no JSON (the agent's messages are 1, 3)",
        "no JSON (the agent's messages are 1, 3)",
    ]  # fmt: skip


def test_what_is_not_confirmed_is_dropped_and_counted() -> None:
    for answer in ('{"holds": false}', "Yes, certainly."):
        with serving(reply(json.dumps(mistake())), reply(answer)) as server:
            judgement = asyncio.run(judge_at(server, without=UNVERIFIED_ONLY).read([(conversation(), None)]))
        assert (judgement.found, [one.message for one in judgement.unconfirmed]) == ([], [3])
        assert judgement.refused == {"not confirmed": 1}


def test_a_refused_schema_is_remembered_and_a_bad_request_is_not_mistaken_for_one() -> None:
    with serving(refusing(), reply('{"found": false}'), reply('{"found": false}')) as server:
        judge = judge_at(server, without=UNVERIFIED_ONLY, at_once=1)
        asyncio.run(judge.read([(conversation(n), None) for n in "ab"]))
        forms = [body.get("response_format", {}).get("type") for _, _, body in server.asked]
    assert forms == ["json_schema", None, None]
    with serving(refusing(), refusing(), reply('{"found": false}')) as server:
        judge = judge_at(server, without=UNVERIFIED_ONLY, at_once=1)
        judgement = asyncio.run(judge.read([(conversation(n), None) for n in "ab"]))
        assert "response_format" in server.asked[2][2]
    assert (judgement.unanswered, judgement.answered) == ({"status 400": 1}, 1)


def test_a_judge_sees_neither_solution_nor_tests_nor_reward(task: Task) -> None:
    with serving(reply('{"found": false}')) as server:
        asyncio.run(judge_at(server).read([(conversation(), task)]))
        asked = "\n".join(body["messages"][0]["content"] for _, _, body in server.asked)
    patch = (task.folder / "solution" / "gold.patch").read_text()
    gold = [line[1:].strip() for line in patch.splitlines() if line.startswith("+ ")]
    hidden = [line.strip() for path in task.hidden_tests.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(gold) >= 5
    for secret in (*gold, *(line for line in hidden if "test_spread" in line), "0.125", "outcome"):
        assert secret not in asked


REFUSED = {
    "no such message": [mistake(message=4), mistake(segment=1)],
    "not the agent's message": [mistake(message=0, quote="Bring it back."), mistake(message=2)],
    "unknown rule": [mistake(rule="clumsiness"), mistake(rule="wrong_scope"), mistake(rule="")],
    "empty hint": [mistake(hint=""), mistake(hint=" \n ")],
    "hint of more than 60 words": [mistake(hint="Reminder: " + "check " * 60)],
    "a quote that is not in the record": [mistake(quote="All tests passed"), mistake(quote=""), mistake(quote="All")],
    "not in the form asked for": [
        {},
        mistake(message="three"),
        mistake(hint=None),
        mistake(quote=["x"]),
        mistake(message=-1),
        mistake(segment=-1),
    ],
    "leaks code of the solution": [mistake(hint="Reminder: return highest - lowest.")],
    "leaks a hidden test": [mistake(hint="Reminder: run test_spread_of_nothing before you stop.")],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_hold_is_refused_by_its_reason(reason: str, task: Task) -> None:
    for bad in REFUSED[reason]:
        judgement = read_reply(json.dumps(bad), conversation(), task)
        assert (judgement.found, judgement.refused) == ([], {reason: 1}), bad


NO_LIST = [
    "",
    "I see none.",
    "{",
    "[1, 2]",
    "[" * 10**6,
    "[" * 10**5 + "]" * 10**5,
]


@pytest.mark.timeout(20)  # a reply of brackets is no reason to wait
@pytest.mark.parametrize("text", NO_LIST, ids=range(len(NO_LIST)))
def test_a_reply_that_is_no_list_is_refused_as_a_whole(text: str) -> None:
    judgement = read_reply(text, conversation())
    assert (judgement.found, judgement.refused) == ([], {"no JSON": 1})


def test_quotes_may_come_from_calls_and_answers() -> None:
    for quote in ("1 failed, 3 passed", r"pytest -q\necho done", "pytest -q\n echo done", "All  tests\npass now."):
        assert read_reply(json.dumps(mistake(quote=quote)), conversation()).found, quote


def test_a_message_counts_once_over_all_rubrics() -> None:
    """Each pattern is a question of its own; the first that finds a message has it."""
    replies = [one for rule in MISTAKES.prompts for one in (reply(json.dumps(mistake(rule=rule))), YES)]
    with serving(*replies, *replies) as server:
        judgement = asyncio.run(judge_at(server, at_once=1).read([(conversation(name), None) for name in "ab"]))
    (first, *others) = MISTAKES.prompts
    assert [(one.rollout.id, one.rule) for one in judgement.found] == [
        ("a", f"model/{first}"),
        ("b", f"model/{first}"),
    ]
    assert judgement.refused == {"the same message twice": 2 * len(others)}


def test_a_pattern_of_weight_0_is_not_asked_about() -> None:
    """Else what it finds would take a message from another pattern."""
    weights = {"model/unverified": 0.0}
    with serving(reply('{"found": false}')) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        judge = hint_judge_of(
            Config(judge=JudgeConfig(url=url, name="m", feedback=1.0), feedback=FeedbackConfig(rule_weights=weights))
        )
        assert judge is not None
        asyncio.run(judge.read([(conversation(), None)]))
        asked = "\n".join(body["messages"][0]["content"] for _, _, body in server.asked)
    assert [name for name in MISTAKES.prompts if MISTAKES.prompts[name].strip() not in asked] == ["unverified"]


def worked(chat: ChatFormat) -> Rollout:
    """A worked example, which is fed and not sampled, and a message of the agent's own."""
    transcript = Transcript(chat)
    transcript.add("user", "Bring it back.")
    transcript.add("assistant", "All tests pass now.")
    transcript.add("user", "And now this one.")
    ids = [*chat.encode("All tests pass now."), chat.end_id]
    transcript.add_sampled(Completion(ids, [-0.5] * len(ids), [0] * len(ids)))
    return Rollout("r", "t", "g", (), [transcript.segment])


def test_a_worked_example_is_not_the_agents_message(chat: ChatFormat) -> None:
    """Nothing of it was sampled, so there would be nothing to teach."""
    rollout = worked(chat)
    assert messages(read_reply(json.dumps(mistake(message=3)), rollout)) == [3]
    alone = read_reply(json.dumps(mistake(message=1)), rollout)
    assert alone.refused == {"not the agent's message": 1}
    samples, feedback = annotate([[rollout]], FeedbackConfig(), chat, written=hints_in(alone))
    model = tiny_model(vocabulary=chat.tokenizer.get_vocab_size())
    result = Trainer(model, TrainConfig()).step(samples)
    assert (feedback, result.measured) == ([], {})


def test_hints_are_one_line() -> None:
    judgement = read_reply(json.dumps(mistake(hint="Reminder:\n  look  twice. ")), conversation())
    assert [one.note for one in judgement.found] == ["Reminder: look twice."]


def test_a_server_that_fails_costs_counts_and_no_endless_wait() -> None:
    rollouts = [(conversation(str(number)), None) for number in range(3)]
    with serving(reply('{"found": false}'), refusing()) as server:
        judgement = asyncio.run(judge_at(server, at_once=1).read(rollouts))
        assert len(server.asked) == 1 + 2 * GIVE_UP_AFTER, "with the schema and without"
    rest = 3 * len(MISTAKES.prompts) - 1 - GIVE_UP_AFTER
    assert (judgement.found, judgement.refused) == ([], {})
    assert judgement.unanswered == {"status 400": GIVE_UP_AFTER, "not asked, the server had failed": rest}


def test_one_answer_in_between_keeps_the_judgement_going() -> None:
    answers = [refusing() for _ in range(2 * (GIVE_UP_AFTER - 1))]
    with serving(*answers, reply('{"found": false}'), *answers, reply('{"found": false}')) as server:
        judgement = asyncio.run(judge_at(server, at_once=1).read([(conversation(str(n)), None) for n in range(4)]))
    assert judgement.unanswered == {"status 400": len(answers)}
    assert judgement.answered == 4 * len(MISTAKES.prompts) - len(answers)


def test_questions_go_out_together_up_to_a_limit() -> None:
    answer = reply('{"found": false}')
    answer.delay_s = 0.05
    with serving(answer) as server:
        asyncio.run(judge_at(server, at_once=3).read([(conversation(str(n)), None) for n in range(3)]))
        assert server.most_at_once == 3


def test_the_sampled_share_is_the_same_every_time() -> None:
    names = [f"step{step}/task/{number}" for step in range(50) for number in range(20)]
    chosen = {rate: {name for name in names if is_sampled(name, rate)} for rate in (0.0, 0.25, 0.5, 1.0)}
    assert not chosen[0.0]
    assert len(chosen[1.0]) == len(names)
    assert 200 < len(chosen[0.25]) < 300
    assert chosen[0.25] < chosen[0.5]
    with serving(reply('{"found": false}')) as server:
        pairs = [(conversation(name), None) for name in names[:12]]
        judgement = asyncio.run(judge_at(server, rate=0.5).read(pairs))
    assert judgement.rollouts == len(chosen[0.5] & {*names[:12]})
    assert 0 < judgement.rollouts < 12


def long_rollout(own: int, other: int, count: int) -> Rollout:
    messages = [Message("user", "Bring it back.", 0, 0, 0, 0)]
    for number in range(count):
        messages.append(Message("assistant", f"<{number}>" + "a" * own + f"</{number}>", 0, 0, 0, 0))
        messages.append(Message("tool", f"({number})" + "t" * other + f"(/{number})", 0, 0, 0, 0, status="ok"))
    return Rollout("r", "t", "g", (), [Segment(messages=messages)])


def test_long_output_is_cut_and_the_agent_is_not() -> None:
    rollout = long_rollout(own=800, other=5000, count=20)
    shown = show(rollout, budget=20_000)
    for number in range(20):
        assert f"[segment 0 message {2 * number + 1}] agent: <{number}>{'a' * 800}</{number}>\n" in shown
        assert f"[segment 0 message {2 * number + 2}] answer: ({number})ttt" in shown
        assert f"ttt(/{number})" in shown
    assert shown.count("characters left out") == 20
    assert len(shown) < 20_000 + 41 * 80
    assert "left out" not in show(rollout, budget=200_000)


def test_even_without_room_every_message_is_there() -> None:
    shown = show(long_rollout(own=5000, other=5000, count=40), budget=1000)
    for number in range(40):
        assert f"[segment 0 message {2 * number + 1}] agent: <{number}>aaa" in shown
        assert f"[segment 0 message {2 * number + 2}] answer: ({number})ttt" in shown
    assert len(shown) < 81 * (LEAST + 80)


def test_calls_of_other_agents_are_shown_and_sampled_ones_not_twice() -> None:
    rollout = conversation()
    assert 'calls run_command {"command": "pytest -q\\necho done"}' in show(rollout)
    rollout.segments[0].ids = [1, 2, 3]
    assert "calls" not in show(rollout)
    rollout.segments[0].messages[2].status = "malformed"
    assert "answer (malformed): 1 failed" in show(rollout)


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(-5, 1500))
def test_the_level_is_the_largest_that_fits(lengths: list[int], budget: int) -> None:
    limit = level(lengths, budget)
    assert sum(min(length, limit) for length in lengths) <= max(0, budget)
    if any(length > limit for length in lengths):
        assert sum(min(length, limit + 1) for length in lengths) > budget


@given(st.text(max_size=80), st.integers(0, 90))
def test_what_is_cut_keeps_its_ends(text: str, limit: int) -> None:
    shown = cut(text, limit)
    if len(text) <= limit:
        assert shown == text
    else:
        head, _, tail = shown.partition(f" [... {len(text) - limit} characters left out ...] ")
        assert (len(head) + len(tail), text.startswith(head), text.endswith(tail)) == (limit, True, True)


def test_braces_in_a_record_are_just_text() -> None:
    rollout = conversation(answer="{not} a {field} {{0}}")
    with serving(reply('{"found": false}')) as server:
        judgement = asyncio.run(judge_at(server).read([(rollout, None)]))
        assert all("{not} a {field} {{0}}" in body["messages"][0]["content"] for _, _, body in server.asked)
    assert not judgement.refused
