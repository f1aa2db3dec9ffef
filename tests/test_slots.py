"""The rollout buffer without a model: its journal, which groups a step takes, how many rollouts run at once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.core.runfolder import RunFolder, dump_lines
from offbook.rl.scheduler import Group, RolloutBuffer, choose, read_journal
from offbook.tasks.select import Record
from offbook.types import Rollout, Segment, Task, Usage


def task(id: str) -> Task:
    nowhere = Path("/nowhere")
    return Task(id, nowhere, "x", nowhere, nowhere, (), (), (), (), "origin")


def rollout_of(group: Group, number: int, tokens: int = 100) -> Rollout:
    usage = Usage(turns=2, sampled_tokens=tokens)
    return Rollout(group.jobs[number].id, group.task.id, group.name, (), [Segment([1])], "finish", usage)


def over(slots: RolloutBuffer, group: Group, version: int = 0, tokens: int = 100) -> Group:
    slots.running(group, version)
    for number in range(len(group.jobs)):
        slots.scored(group.jobs[number], rollout_of(group, number, tokens))
    group.is_over = True
    return group


def test_a_group_that_another_took_the_place_of_does_not_come_back(slots: RolloutBuffer) -> None:
    first, second = slots.request(1, [task("a"), task("b")])
    over(slots, first)
    new = slots.refill(first, task("c"))
    slots.running(new, 0)
    slots.scored(new.jobs[0], rollout_of(new, 0))
    assert slots.counts["filtered"] == 2
    later = RolloutBuffer(slots.run, 2, "c")
    later.restore({id: task(id) for id in "abc"})
    assert [(group.name, group.place, len(group.rollouts)) for group in later.waiting] == [
        (second.name, 1, 0),
        ("step1/c", 2, 1),
    ]
    assert (later.refills[1], sorted(later.taken)) == (1, ["a", "b", "c"])
    shown = ("a", Record(rollouts=2, turns=4))
    assert (later.filtered, later.learned) == ([], [shown])
    second, new = later.waiting
    later.scored(new.jobs[1], rollout_of(new, 1))
    later.given(1, [over(later, second), new])
    last = RolloutBuffer(slots.run, 2, "c", 1)
    last.restore({id: task(id) for id in "abc"})
    assert (last.waiting, last.learned) == ([], [shown])


@pytest.fixture
def slots(tmp_path: Path) -> RolloutBuffer:
    return RolloutBuffer(RunFolder(tmp_path), size=2, fingerprint="c")


def again(
    slots: RolloutBuffer, done: int, *tasks: str
) -> tuple[RolloutBuffer, list[Group], dict[int, list[list[Rollout]]]]:
    """As another process finds them."""
    with open(slots.folder / "journal.jsonl", "ab") as journal:
        journal.write(b'{"at": 1, "state": "sco')  # torn
    new = RolloutBuffer(slots.run, 2, "c", done)
    assert [line["state"] for line in read_journal(slots.run.path)][-1] == "started", "not behind half a line"
    new.restore({id: task(id) for id in tasks})
    return new, new.waiting, new.stored


def test_what_was_scored_is_there_after_a_kill_and_what_a_step_was_given_is_given_again(slots: RolloutBuffer) -> None:
    first, second = slots.request(1, [task("a"), task("b")])
    (third, fourth) = slots.request(2, [task("c"), task("d")])
    over(slots, first)
    over(slots, second, tokens=900)
    slots.given(1, [first, second])
    slots.running(third, 0)
    slots.scored(third.jobs[1], rollout_of(third, 1))
    assert slots.counts["trained"] == 4
    new, groups, stored = again(slots, 0, *"abcd")
    assert [[one.id for one in group] for group in stored[1]] == [
        ["step1/a/0", "step1/a/1"],
        ["step1/b/0", "step1/b/1"],
    ]
    assert [(group.name, len(group.rollouts), group.version) for group in groups] == [
        ("step2/c", 1, 0),
        ("step2/d", 0, None),
    ]
    _, groups, stored = again(new, 1, *"abcd")
    assert ([group.name for group in groups], stored) == (["step2/c", "step2/d"], {}), "step 1 is in a checkpoint"
    assert not fourth.rollouts


def test_what_a_kill_kept_out_of_the_journal_is_written_there_when_the_run_goes_on(slots: RolloutBuffer) -> None:
    """Struck between the step's file and the line about it, and between a rollout's file and its line."""
    first, second = slots.request(1, [task("a"), task("b")])
    over(slots, first)
    over(slots, second)
    slots.given(1, [first])
    slots.running(*slots.request(2, [task("c")]), 0)
    journal = slots.folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    lost = [line for line in lines if '"trained"' in line or '"1.1.0"' in line]
    assert len(lost) == 2
    journal.write_text("".join(line for line in lines if line not in lost))
    left = slots.folder / first.jobs[1].folder  # was not cleared
    left.mkdir()
    (left / "rollout.json").write_bytes(dump_lines([rollout_of(first, 1)]))
    new, (ready, _), stored = again(slots, 0, *"abc")
    assert [len(stored[1]), ready.name, len(ready.rollouts)] == [1, "step1/b", 2]
    for _ in range(2):  # once more changes nothing
        new, _, _ = again(new, 0, *"abc")
        states = Counter(line["state"] for line in read_journal(slots.run.path))
        assert states["scored"] == 4
    assert sorted(path.name for path in slots.folder.glob("1.*")) == ["1.1.0", "1.1.1"]


def test_a_task_that_comes_twice_in_a_batch_is_two_groups(slots: RolloutBuffer) -> None:
    one, other = slots.request(1, [task("a"), task("a")])
    over(slots, one)
    slots.given(1, [one])
    _, groups, stored = again(slots, 0, "a")
    assert (len(groups), [len(group) for group in stored[1]]) == (1, [2])
    assert other.name == groups[0].name


def test_work_for_another_configuration_is_forgotten_and_steps_that_are_kept_are_not(slots: RolloutBuffer) -> None:
    one, other = slots.request(1, [task("a"), task("b")])
    for step, group in enumerate((over(slots, one), over(slots, other)), 1):
        slots.given(step, [group])
    slots.request(2, [task("c")])
    RolloutBuffer(slots.run, 2, "c", 1)
    assert slots.run.steps() == [1, 2]
    other = RolloutBuffer(slots.run, 2, "another", 1)
    other.restore({id: task(id) for id in "abc"})
    assert (slots.run.steps(), other.waiting) == ([1], [])


def test_what_a_lost_model_was_writing_is_asked_for_again_and_nothing_else(slots: RolloutBuffer) -> None:
    (group,) = slots.request(1, [task("a")])
    slots.running(group, 3)
    slots.scored(group.jobs[0], rollout_of(group, 0))
    slots.failed(group, "lost", whole=False)
    assert [job.rollout is None for job in group.jobs] == [False, True]
    slots.failed(group, "lost", whole=True)
    assert (group.rollouts, group.version) == ([], None)
    failed = [line["slot"] for line in read_journal(slots.run.path) if line["state"] == "failed"]
    assert failed == ["1.0.1", "1.0.0", "1.0.1"]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 4), staleness=st.integers(0, 4), slow=st.floats(0, 0.9)
)  # fmt: skip
def test_every_group_is_trained_once_and_none_too_old(
    tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, staleness: int, slow: float
) -> None:
    """Whatever takes how long: rollouts end in any order, steps take what they are given."""
    rng, steps = random.Random(seed), 12
    slots = RolloutBuffer(RunFolder(tmp_path_factory.mktemp("run")), size=1)
    window, waiting, trained = int(0.3 * staleness * count), list[Group](), list[Group]()
    version, batch = 0, 1
    while version < steps:
        while batch <= min(steps, version + staleness + 1):
            new = slots.request(batch, [task(f"{batch}-{place}") for place in range(count)])
            for group in new:
                slots.running(group, version)
            waiting += new
            batch += 1
        running = [group for group in waiting if not group.is_over]
        for group in running:
            if rng.random() > slow or group is running[-1]:
                over(slots, group, group.version or 0)
        chosen = choose(waiting, version + 1, count, window, staleness)
        if not chosen:
            continue
        assert len(chosen) == count
        assert all(version - (group.version or 0) <= staleness for group in chosen)
        assert waiting.index(chosen[-1]) < count + window
        waiting = [group for group in waiting if group not in chosen]
        trained += chosen
        version += 1
    assert len({group.name for group in trained}) == len(trained) == steps * count
    if not staleness:
        assert [group.batch for group in trained] == sorted(group.batch for group in trained)


@pytest.mark.parametrize("torn", [b"{", b"\0" * 9000, b'{"state": "trai'])
def test_a_torn_last_line_is_skipped(slots: RolloutBuffer, torn: bytes) -> None:
    journal = slots.folder / "journal.jsonl"
    journal.write_bytes(b'5\n["x"]\n' + journal.read_bytes() + torn)
    RolloutBuffer(slots.run, 2, fingerprint="c")
    assert [line["state"] for line in read_journal(slots.run.path)] == ["started", "started"]
