"""Pocket tasks that lack several functions, and the scripted agent that solves them."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.agent.chat import ChatFormat
from offbook.agent.harness import run_agent
from offbook.pocket.demonstrations import LONG_HARNESS, Demonstrator, episodes, report_of, task_of
from offbook.pocket.repos import Split
from offbook.pocket.script import LONG_HABITS, Habits, LongScript
from offbook.pocket.tasks import Draft, Level, draft_tasks, level_named, make_pocket_tasks
from offbook.sandbox import ProcessSandbox, SandboxSpec
from offbook.signals.feedback.rules import read_all
from offbook.signals.monitors import check
from offbook.signals.trajectory import Trajectory
from offbook.tasks import load_tasks
from offbook.tasks.check import gold_changes
from offbook.tasks.factory.delete.delete import delete_functions
from offbook.tasks.folder import write_files
from offbook.tasks.grade import grade
from offbook.types import OffbookError, Rollout, Task

THREE_TO_EIGHT = Level(3, 8)
PERFECT = Habits(0, 0, 0, 0, explore=0.5)


def drafts(split: Split, count: int, level: Level = THREE_TO_EIGHT) -> list[Draft]:
    return list(draft_tasks(7, count, split, level))


def test_levels_by_name() -> None:
    assert level_named("pocket") == Level(1, 1)
    assert level_named("pocket-long") == Level(4, 6)
    assert level_named("pocket-long-5") == Level(5, 5)
    assert level_named("pocket-long-3-8") == Level(3, 8)
    assert level_named("pockets") is None
    for wrong in ("pocket-long-1", "pocket-long-8-3", "pocket-long-40"):
        with pytest.raises(OffbookError, match=r"2 to 10 functions, as in pocket-long-3-8"):
            level_named(wrong)


def test_drafts_are_what_real_deletion_makes() -> None:
    for draft in [*drafts("train", 12), *drafts("heldout", 12)]:
        names = [(spot.path, spot.name) for spot in draft.spots]
        assert 3 <= len(names) <= 8
        assert draft.files == delete_functions(draft.gold.files, names, draft.unseen)
        mended = dict(draft.files)
        for spot in draft.spots:
            assert draft.files[spot.path].count(spot.function.stub) == 1
            assert f"def test_{spot.name}()" in draft.files[f"tests/test_{spot.module.name}.py"]
            assert f"def test_{spot.name}_more()" not in draft.files[f"tests/test_{spot.module.name}.py"]
            mended[spot.path] = spot.with_body(spot.function.body, mended)
        assert {path: mended[path] for path in draft.paths} == {path: draft.gold.files[path] for path in draft.paths}


def test_the_number_of_functions_is_the_levels_and_files_are_several() -> None:
    found = drafts("train", 200)
    assert {len(draft.spots) for draft in found} == set(range(3, 9))
    assert Counter(len(draft.paths) > 1 for draft in found)[True] > 190
    assert all(any(path.startswith("old/") for path in draft.files) for draft in found)


def test_drafts_are_repeatable() -> None:
    texts = [[(draft.id, draft.instruction, draft.tools, draft.files) for draft in drafts("train", 8)] for _ in "ab"]
    assert texts[0] == texts[1]


def test_held_out_pairs_are_nowhere_in_train_repositories() -> None:
    """Not in what is outdated either."""

    def pairs(split: Split, count: int) -> set[tuple[str, str]]:
        modules = (module for draft in drafts(split, count) for module in (*draft.gold.modules, *draft.gold.outdated))
        return {
            (step.op.phrase, word)
            for module in modules
            for function in module.functions
            for step in function.steps
            for word in (function.name, module.name)
        }

    train, heldout = pairs("train", 400), pairs("heldout", 200)
    assert not train & heldout
    assert {phrase for phrase, _ in train} == {phrase for phrase, _ in heldout}


def test_no_instruction_asks_for_tests_to_be_changed() -> None:
    for draft in drafts("train", 40):
        trajectory = Trajectory(Rollout("r", "t", "g", ()), task_of(draft, 0, Path(".")))
        assert draft.instruction in trajectory.instruction
        assert not trajectory.asks_for_tests


# --- verified folders


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    root = tmp_path_factory.mktemp("long") / "tasks"
    assert asyncio.run(make_pocket_tasks(root, 0, 2, 1, lambda share: None, Level(4, 4))) == []
    return [*load_tasks(root / "train"), *load_tasks(root / "heldout")]


def test_deleted_fails_and_gold_passes(tasks: list[Task]) -> None:
    spec = SandboxSpec(backend="process")
    for task in tasks:
        assert task.difficulty == "long"
        assert task.test_command
        changes = gold_changes(task)
        untouched = asyncio.run(grade(task, {}, spec, 60.0))
        assert untouched.missing == frozenset(task.fail_to_pass)
        assert asyncio.run(grade(task, changes, spec, 60.0)).solved
    one_less = dict(list(changes.items())[1:])
    assert not asyncio.run(grade(task, one_less, spec, 60.0)).solved


# --- the scripted agent


def played(draft: Draft, folder: Path, rng: random.Random, habits: Habits, chat: ChatFormat) -> tuple[Task, Rollout]:
    """In the sandbox that rollouts have, tests really run."""
    write_files(folder, draft.files)
    task = replace(task_of(draft, 0, folder), fail_to_pass=draft.fail_to_pass, sources=(draft.gold.package,))
    world = replace(LONG_HARNESS, limits=replace(LONG_HARNESS.limits, tokens=90_000, context=90_000))

    async def run() -> Rollout:
        async with ProcessSandbox(folder) as sandbox:
            policy = Demonstrator(LongScript(draft, rng, habits), chat)
            return await run_agent(task, sandbox, policy, chat, world, "r", "g")

    return task, asyncio.run(run())


def test_a_perfect_script_solves_and_breaks_no_rule(tmp_path: Path, chat: ChatFormat) -> None:
    rng = random.Random(3)
    for number, draft in enumerate(drafts("train", 2, Level(3, 4))):
        task, rollout = played(draft, tmp_path / str(number), rng, PERFECT, chat)
        assert rollout.stop == "finish"
        assert rollout.changed == {path: draft.gold.files[path] for path in draft.paths}
        assert re.search(r"\d passed", rollout.segments[0].messages[-3].text)
        assert "failed" not in rollout.segments[0].messages[-3].text
        assert read_all(rollout, task) == []
        assert check(task, rollout) == []


def test_what_tests_show_to_be_wrong_is_put_right(tmp_path: Path, chat: ChatFormat) -> None:
    (draft,) = drafts("train", 1, Level(3, 3))
    habits = replace(PERFECT, slips=1.0)
    _, rollout = played(draft, tmp_path / "t", random.Random(1), habits, chat)
    assert any("failed" in message.text for message in rollout.segments[0].messages if message.role == "tool")
    assert rollout.changed == {path: draft.gold.files[path] for path in draft.paths}


def test_its_habits_are_the_faults_that_rules_find_and_it_is_done_in_15_to_40_turns(chat: ChatFormat) -> None:
    """Over demonstrations, whose test runs are computed."""

    def played_ids(count: int) -> list[list[int]]:
        async def run() -> list[list[int]]:
            played = episodes(
                chat, drafts("train", 16, Level(6, 6))[:count], random.Random(3), LONG_HABITS, LONG_HARNESS
            )
            return [rollout.segments[0].ids async for rollout in played]

        return asyncio.run(run())

    ids = played_ids(16)
    turns = [chat.decode(one).count("<|im_start|>assistant") for one in ids]
    assert 15 <= sorted(turns)[2] <= sorted(turns)[-3] <= 40
    assert played_ids(3) == ids[:3]
    texts = "".join(map(chat.decode, ids))
    for fault in ("there is no tool", "pytestmark", "the text to replace is not in", " needs path"):
        assert fault in texts, fault


# --- test runs


@settings(max_examples=15)
@given(st.integers(0, 9999))
def test_a_report_counts_every_test(seed: int) -> None:
    (draft,) = draft_tasks(seed, 1, "train", Level(5, 5))
    code, text = report_of(draft.files)
    failed, passed = (int(re.search(rf"(\d+) {word}", text)[1]) for word in ("failed", "passed"))  # type: ignore[index]
    assert code == 1
    assert failed + passed == sum(text.count("\ndef test_") for text in draft.files.values())
    assert report_of(draft.gold.files)[0] == 0


def test_reports_are_pytests(tmp_path: Path) -> None:
    """Stubs, wrong bodies and a file that is turned off; all tests, and those of a file."""
    (draft,) = drafts("train", 1, Level(8, 8))
    script = LongScript(draft, random.Random(0), LONG_HABITS)
    files = dict(draft.files)
    for spot in draft.spots[:4]:
        script.spot = spot
        files[spot.path] = spot.with_body(script._wrong_body() or spot.function.body, files)
    script.spot = draft.spots[-1]
    _, off = script._test_edit()
    turned_off = files | {off["path"]: files[off["path"]].replace(off["old"], off["new"])}
    for tree, selection in ((files, ""), (turned_off, ""), (turned_off, off["path"])):
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        write_files(tmp_path / "tree", tree)
        command = [sys.executable, "-m", "pytest", *([selection] if selection else [])]
        env = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        real = subprocess.run(command, cwd=tmp_path / "tree", env=env, capture_output=True, text=True)
        code, text = report_of(tree, selection)
        assert re.sub(r" in \S+s\n", "", real.stdout) == re.sub(r" in \S+s\n", "", text)
        assert real.returncode == code
