"""What the recorder keeps of conversations, to the token: by an engine whose own log says what was fed and sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import Scripted, merging_chat, sampled_runs, spelled

from offbook.agent.chat import render_call
from offbook.agent.recorder import Answer, Asked, Over, Recorder, Refused, Said, Shown
from offbook.types import Limits, PromptTooLong, Rollout, ToolCall, ToolSpec

LS = render_call("shell", {"command": "ls"})
TOOLS = (ToolSpec("shell", "runs", {"type": "object", "properties": {"command": {}}, "required": ["command"]}),)
USER, SYSTEM = Said("user", "hello there"), Said("system", "be terse")


def own(answer: Answer) -> Said:
    """The message as an API's client sends it back: without thinking, its text stripped."""
    return Said("assistant", answer.shown.text, answer.shown.calls, answer.call_ids)


def recorded(
    work: Callable[[Recorder, Scripted], Awaitable[None]], *answers: str | float | None, chat: Any = None, **limits: int
) -> tuple[Rollout, Scripted]:
    """The rollout of a session; all that it has of the engine's tokens is checked against the engine's log."""

    async def main() -> tuple[Rollout, Scripted]:
        engine = Scripted(chat or merging_chat(), list(answers))
        session = Recorder(Rollout("r", "t", "g", ()), engine.chat, engine.open, Limits(**limits))  # type: ignore[arg-type]
        await asyncio.wait_for(work(session, engine), 10)
        return session.end(), engine

    rollout, engine = asyncio.run(main())
    assert engine.opened[0] == "r"
    assert sorted(engine.opened) == sorted(engine.closed)
    runs = sampled_runs(rollout.segments)
    assert all(run in engine.log for run in runs)
    assert len(runs) == len({str(run) for run in runs}) == rollout.usage.turns
    for segment in rollout.segments:
        assert all(version == -1 for version, own in zip(segment.versions, segment.sampled, strict=True) if not own)
        assert all(value == 0 for value, own in zip(segment.logprobs, segment.sampled, strict=True) if not own)
    assert rollout.usage.drift == 0
    return rollout, engine


def test_a_conversation_that_goes_on_is_one_segment() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((SYSTEM, USER), TOOLS))
        assert first.shown == Shown("", "I look here.", (ToolCall("shell", {"command": "ls"}, start=13),))
        engine.version = 3
        history = (SYSTEM, USER, own(first), Said("tool", "a.py\n", ids=first.call_ids))
        second = await session.answer(Asked(history, TOOLS))
        await session.answer(Asked((*history, own(second), Said("user", "why?")), TOOLS))

    rollout, engine = recorded(work, f"I look here.\n{LS}", "one", "because")
    (segment,) = rollout.segments
    assert [message.role for message in segment.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    first, second, third = engine.log
    assert second[0][: len(first[0]) + len(first[1])] == first[0] + first[1], "as it was sampled, not as it is encoded"
    assert first[1] == [*spelled(engine.chat, f"I look here.\n{LS}"), engine.chat.end_id]
    assert first[1] != [*engine.chat.encode(f"I look here.\n{LS}"), engine.chat.end_id]
    assert third[0][: len(second[0]) + len(second[1])] == second[0] + second[1]
    assert [version for version in segment.versions if version >= 0] == [
        *[0] * len(first[1]), *[3] * (len(second[1]) + len(third[1]))
    ]  # fmt: skip
    assert segment.messages[3].status == "ok"
    assert (rollout.usage.turns, rollout.usage.calls, rollout.usage.invalid_calls) == (3, 1, 0)
    assert (rollout.stop, rollout.tools) == ("answer", ("shell",))


def test_the_client_may_write_arguments_anew_and_drop_the_thinking() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,), TOOLS))
        assert first.shown.thinking == "hmm, here"
        assert first.shown.text == "so:"
        again = Said("assistant", "so:\n ", (ToolCall("shell", {"command": "ls"}),))
        await session.answer(Asked((USER, again, Said("tool", "x")), TOOLS))

    rollout, engine = recorded(work, f"<think>\nhmm, here\n</think>\n\nso:\n{LS}", "done")
    assert len(rollout.segments) == 1
    assert "hmm, here" in engine.chat.decode(engine.log[1][0])


@pytest.mark.parametrize("what", ["edited", "compacted", "branched", "other tools", "sub-agent"])
def test_another_history_is_another_segment_of_the_same_rollout(what: str) -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((SYSTEM, USER), TOOLS))
        history = (SYSTEM, USER, own(first), Said("user", "go on"))
        second = await session.answer(Asked(history, TOOLS))
        other = {
            "edited": (SYSTEM, USER, Said("assistant", "something else"), Said("user", "go on")),
            "compacted": (SYSTEM, Said("user", "in short: hello"), own(second), Said("user", "next")),
            "branched": (SYSTEM, USER, own(first), Said("user", "no, this way")),
            "other tools": (*history, own(second), Said("user", "next")),
            "sub-agent": (Said("system", "you search"), Said("user", "find it")),
        }
        await session.answer(Asked(other[what], TOOLS if what != "other tools" else ()))
        if what == "sub-agent":  # and its parent goes on where it was
            await session.answer(Asked((*history, own(second), Said("user", "next")), TOOLS))

    rollout, engine = recorded(work, "here is one", "here is two", "here is three", "and on")
    assert len(rollout.segments) == 2
    second = rollout.segments[1]
    repeated = [message for message in second.messages[:-1] if message.role == "assistant"]
    assert not any(second.is_own(message) for message in repeated), "learned from where it was sampled, and only there"
    said = engine.chat.decode(engine.log[2][0])
    if what == "edited":
        assert "something else" in said
        assert "here is one" not in said
    assert sum(map(sum, (segment.sampled for segment in rollout.segments))) == sum(len(ids) for _, ids in engine.log)


def test_requests_at_once_are_told_apart() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,)))
        history = (USER, own(first))
        asked = [Asked((*history, Said("user", f"side {number}"))) for number in range(3)]
        answers = await asyncio.gather(*(session.answer(one) for one in asked))
        assert [answer.shown.text for answer in answers] == ["to 0", "to 1", "to 2"]
        more = [(*one.messages, own(answer), Said("user", "more")) for one, answer in zip(asked, answers, strict=True)]
        await asyncio.gather(*(session.answer(Asked(messages)) for messages in more))

    rollout, engine = recorded(work, "first", "to 0", "to 1", "to 2", "a", "b", "c")
    assert len(rollout.segments) == 3
    assert rollout.usage.turns == 7
    texts = [[message.text for message in segment.messages] for segment in rollout.segments]
    assert sorted(said[2] for said in texts) == ["side 0", "side 1", "side 2"]
    for said in texts:
        assert said[3] == f"to {said[2][-1]}"
    assert len(engine.opened) > 1, "each has a line of its own to the engine"


def test_a_request_that_is_given_up_leaves_nothing() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,)))
        history = (USER, own(first), Said("user", "next"))
        given_up = asyncio.create_task(session.answer(Asked(history)))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.wait({given_up})
        await session.answer(Asked(history))

    rollout, engine = recorded(work, "one", None, "two")
    assert engine.dropped == 1
    assert [len(segment.messages) for segment in rollout.segments] == [4]


def test_calls_that_cannot_be_run_are_counted_and_stay_text() -> None:
    broken = "<tool_call>{oops</tool_call>"

    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,), TOOLS))
        assert first.shown == Shown("", f"look:\n{broken}", ())
        history = (USER, own(first), Said("user", "that was no call"))
        second = await session.answer(Asked(history, TOOLS))
        assert [call.name for call in second.shown.calls] == ["shel", "shell", "shell"]
        ids = second.call_ids
        mixed = [Said("tool", "third", ids=ids[2:], failed=True), Said("tool", "first", ids=ids[:1])]
        tools = (*mixed, Said("tool", "second", ids=ids[1:2]))
        await session.answer(Asked((*history, own(second), *tools), TOOLS))

    calls = render_call("shel", {"command": "ls"}) + render_call("shell", {"cmd": "ls"}) + LS
    rollout, _ = recorded(work, f"look:\n{broken}", calls, "done")
    (segment,) = rollout.segments
    statuses = [(message.text, message.status) for message in segment.messages if message.role == "tool"]
    assert statuses == [("first", "unknown_tool"), ("second", "malformed"), ("third", "failed")]
    assert (rollout.usage.calls, rollout.usage.invalid_calls) == (4, 3)
    assert [(event.kind, event.message) for event in rollout.events] == [
        ("malformed", 2), ("unknown_tool", 4), ("malformed", 4)
    ]  # fmt: skip


def test_conversations_that_have_no_form_are_refused() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        for messages in ((), (USER, Said("assistant", "I be")), (Said("tool", "x"), USER)):
            with pytest.raises(Refused):
                await session.answer(Asked(messages))

    rollout, _ = recorded(work)
    assert rollout.segments == []


def test_limits() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,), max_tokens=4))
        assert first.is_cut
        assert first.shown.text == "long"
        with pytest.raises(PromptTooLong, match="maximum context length is 100"):
            await session.answer(Asked((Said("user", "x" * 100),)))
        await session.answer(Asked((Said("user", "short"),)))
        assert not session.is_over.is_set()
        with pytest.raises(Over, match="2 messages"):
            await session.answer(Asked((USER,)))
        assert session.is_over.is_set()

    rollout, _ = recorded(work, "longer than that", "ok", context=100, turns=2)
    assert rollout.stop == "turns"


def test_notes_are_events_at_their_answers() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,)))
        await session.answer(Asked((USER, own(first), Said("user", "more"))))
        session.note("feedback", "too long", first.id)
        session.note("feedback", "good")
        with pytest.raises(Refused):
            session.note("feedback", "what?", "unknown")

    rollout, _ = recorded(work, "one", "two")
    found = [(event.kind, event.detail, event.message) for event in rollout.events]
    assert found == [("feedback", "too long", 1), ("feedback", "good", 3)]


def test_what_is_dropped_is_said_and_an_end_is_an_end() -> None:
    async def work(session: Recorder, engine: Scripted) -> None:
        first = await session.answer(Asked((USER,)))
        waiting = asyncio.create_task(session.answer(Asked((USER, own(first), Said("user", "more")))))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        late = asyncio.create_task(session.answer(Asked((USER, own(first), Said("user", "late")))))
        await asyncio.sleep(0.01)
        rollout = session.end()
        assert session.end() is rollout
        with pytest.raises(Over, match="before the answer"):
            await late
        with pytest.raises(Over, match="has ended"):
            await session.answer(Asked((USER,)))

    rollout, _ = recorded(work, "one", None, 0.05, "late")
    assert rollout.events == []
    assert [message.text for message in rollout.segments[0].messages] == ["hello there", "one"]
