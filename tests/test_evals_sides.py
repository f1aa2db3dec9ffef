"""The side suites are real task folders, and the two things that they need of harness and grader."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from test_harness import LIMITS, Says

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.core.config import Config
from offbook.evals.run import load_suites
from offbook.evals.sides import SIDES, TEMPLATES, make_side, write_verified
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.signals.rewards import Grader
from offbook.tasks import load_task, load_tasks
from offbook.tasks.check import check
from offbook.types import Interrupt, Limits, OffbookError, Rollout, StopReason, Task

PLAIN = SandboxSpec(backend="process")
TOOLS = ("read_file", "edit_file", "list_dir", "finish")


@pytest.mark.parametrize("name", SIDES)
def test_a_suite_is_made_and_its_folders_are_tasks(name: str, tmp_path: Path) -> None:
    asyncio.run(make_side(name, tmp_path / name, 1, num_tasks=2))
    tasks = load_tasks(tmp_path / name)
    assert len(tasks) == 2
    assert [asyncio.run(check(task, PLAIN)) for task in tasks[:1]] == [""]
    assert all(task.leave == (name == "eager") for task in tasks)
    assert all((task.interrupt is not None) == (name == "interruption") for task in tasks)


def test_a_limit_makes_only_what_it_needs_and_the_same_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path))
    two = load_suites(["eager"], Config(), limit=2)
    made = [path.parent.name for path in tmp_path.rglob("task.toml")]
    assert sorted(made) == [task.id for task in two.tasks]
    assert len(made) == 2
    assert [task.id for task in load_suites(["eager"], Config()).tasks[:2]] == sorted(made)
    again = load_suites(["eager"], Config(), limit=2).tasks
    assert [task.instruction for task in again] == [task.instruction for task in two.tasks]


def test_the_same_seed_drafts_the_same_and_another_does_not() -> None:
    def drafted(seed: int) -> list[str]:
        return [draft.instruction for name in SIDES for draft in islice(TEMPLATES[name](random.Random(seed)), 8)]

    assert drafted(0) == drafted(0)
    assert drafted(0) != drafted(1)


def test_every_template_says_how_it_can_be_missed() -> None:
    for name in SIDES:
        drafts = list(islice(TEMPLATES[name](random.Random(0)), 14))
        assert all(draft.wrong for draft in drafts)
        assert len({draft.id for draft in drafts}) == 14


def test_a_template_whose_wrong_submission_is_accepted_is_refused(tmp_path: Path) -> None:
    (draft,) = islice(TEMPLATES["instructions"](random.Random(0)), 1)
    broken = replace(draft, wrong={"does as it is told": draft.gold})
    with pytest.raises(OffbookError, match="a submission that does as it is told is accepted"):
        asyncio.run(write_verified(tmp_path / "task", broken))


@pytest.fixture(scope="module")
def eager_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("eager") / "task"
    (draft,) = islice(TEMPLATES["eager"](random.Random(0)), 1)
    return asyncio.run(write_verified(folder, draft))


def outcome(task: Task, changed: dict[str, str | None], stop: StopReason = "answer") -> float:
    rollout = Rollout("r", task.id, "g", (), stop=stop, changed=changed)

    async def graded() -> float:
        return await Grader(PLAIN).outcome(task, rollout)

    return asyncio.run(graded())


def test_where_nothing_is_to_be_done_doing_nothing_is_right(eager_task: Task) -> None:
    source = next(path for path in eager_task.tree.rglob("*.py") if "test" not in path.as_posix().split("repo/")[1])
    path = source.relative_to(eager_task.tree).as_posix()
    assert outcome(eager_task, {}) == 1.0
    assert outcome(eager_task, {"scratch.txt": "my notes"}) == 1.0
    assert outcome(eager_task, {path: source.read_text() + "# seen\n"}) == 0.0
    assert outcome(eager_task, {"README.md": "other\n"}) == 0.0
    assert outcome(eager_task, {"extra.py": "x = 1\n"}) == 0.0
    assert outcome(eager_task, {}, "crash") == 0.0, "who breaks off has not answered"
    assert outcome(eager_task, {}, "turns") == 0.0


def test_a_folder_keeps_its_interruption(tmp_path: Path) -> None:
    (draft,) = islice(TEMPLATES["interruption"](random.Random(0)), 1)
    asyncio.run(write_verified(tmp_path / "task", draft))
    assert load_task(tmp_path / "task").interrupt == draft.interrupt


def interrupted(tree: Path, policy: Says, chat: ChatFormat, after_turns: int, limits: Limits = LIMITS) -> Rollout:
    interrupt = Interrupt(after_turns, "Wait: make it 2.")
    task = Task("t", tree, "Make it 1.", tree, tree, (), (), (), TOOLS, "test", interrupt=interrupt)

    async def run() -> Rollout:
        async with await open_sandbox(tree, PLAIN) as sandbox:
            return await run_agent(task, sandbox, policy, chat, Harness(limits), "r", "g")

    return asyncio.run(run())


def roles(rollout: Rollout) -> list[str]:
    return [message.role for message in rollout.segments[0].messages]


def test_the_user_speaks_in_the_middle_and_the_ids_only_grow(tmp_path: Path, chat: ChatFormat) -> None:
    look = render_call("list_dir", {"path": "."})
    rollout = interrupted(tmp_path, Says(chat, look, look, look), chat, after_turns=2)
    assert roles(rollout)[:7] == ["system", "user", "assistant", "tool", "assistant", "tool", "user"]
    assert roles(rollout).count("user") == 2, "once"
    assert rollout.segments[0].messages[6].text == "Wait: make it 2."
    assert (rollout.usage.drift, rollout.stop) == (0, "finish")
    messages = rollout.segments[0].messages
    assert [m.start for m in messages[1:]] == [m.end for m in messages[:-1]], "without a gap"
    assert not any(rollout.segments[0].sampled[messages[6].start : messages[6].end])
    assert [event.kind for event in rollout.events] == ["interrupted"]


@pytest.mark.parametrize("last", ["finish", "answer"])
def test_an_agent_that_would_end_before_hears_it_too(tmp_path: Path, chat: ChatFormat, last: str) -> None:
    lines = [render_call("finish", {})] if last == "finish" else ["I am done."]
    rollout = interrupted(tmp_path, Says(chat, *lines), chat, after_turns=5)
    assert roles(rollout).count("user") == 2
    assert (rollout.usage.turns, rollout.usage.drift, rollout.stop) == (2, 0, "finish")


def test_a_summary_starts_from_all_that_was_said(tmp_path: Path, chat: ChatFormat) -> None:
    look = render_call("list_dir", {"path": "."})
    limits = replace(LIMITS, summarize_at=10, summary_tokens=200)
    rollout = interrupted(tmp_path, Says(chat, look, "I looked.", look, "Again."), chat, 1, limits)
    assert len(rollout.segments) >= 2
    assert "Wait: make it 2." in rollout.segments[1].messages[1].text
