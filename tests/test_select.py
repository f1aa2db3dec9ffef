"""Selection: each task once, then those that are sometimes solved, and the same ones for the same seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from offbook.core.runfolder import RunFolder
from offbook.rl.scheduler import Selected
from offbook.tasks.select import LEAST, History, Record, Sampler
from offbook.types import OffbookError, Reward, Rollout, Task, Usage


def task(name: str, origin: str = "pkg", difficulty: str = "normal") -> Task:
    place = Path(name)
    return Task(name, place, "", place, place, (), (), (), (), origin, difficulty)


def history(**records: tuple[int, int]) -> History:
    """Solved and all rollouts of each task, all of the same effort."""
    return History({name: Record(rollouts, solved, rollouts, 0) for name, (solved, rollouts) in records.items()})


def rollout(name: str, solved: bool, turns: int = 2, thinking: int = 100) -> Rollout:
    usage = Usage(turns=turns, thinking_tokens=thinking)
    return Rollout("id", name, "group", (), usage=usage, reward=Reward({"outcome": float(solved)}))


TASKS = [task(f"task{number:02d}") for number in range(20)]


def test_no_task_comes_twice_before_all_came_once() -> None:
    sampler = Sampler(TASKS, seed=3)
    drawn = [one.id for _ in range(4) for one in sampler.draw(5, History())]
    assert sorted(drawn) == [one.id for one in TASKS]
    used = [one.id for one in TASKS[:15]]
    rest = Sampler(TASKS, seed=3, used=used)
    last = [one.id for one in rest.draw(6, History())]
    assert sorted(last[:5]) == [one.id for one in TASKS[15:]]
    assert last[5] in used
    with pytest.raises(OffbookError, match="a step takes 21 tasks and there are 20"):
        sampler.draw(21, History())


def test_later_those_that_are_sometimes_solved_come_more_often_and_none_is_given_up() -> None:
    known = history(**{one.id: (4, 8) if number < 5 else (0, 8) for number, one in enumerate(TASKS)})
    sampler = Sampler(TASKS, seed=0, used=[one.id for one in TASKS])
    drawn = Counter(one.id for _ in range(60) for one in sampler.draw(2, known))
    often, rarely = [drawn[one.id] for one in TASKS[:5]], [drawn[one.id] for one in TASKS[5:]]
    assert min(often) > max(rarely)
    assert min(rarely) > 0


def test_easy_tasks_come_before_hard_ones_where_nothing_is_known() -> None:
    tasks = [task(f"{kind}{number}", kind, kind) for kind in ("easy", "hard") for number in range(10)]
    first = Counter(one.difficulty for seed in range(50) for one in Sampler(tasks, seed).draw(6, History()))
    assert first["easy"] > 1.4 * first["hard"]


def test_the_same_seed_and_history_draw_the_same_tasks() -> None:
    known = history(task03=(1, 4), task07=(4, 4))

    def drawn(tasks: list[Task], seed: int, used: tuple[str, ...] = ()) -> list[str]:
        return [one.id for one in Sampler(tasks, seed, used).draw(6, known)]

    assert drawn(TASKS, 1) == drawn(list(reversed(TASKS)), 1)
    assert drawn(TASKS, 1) != drawn(TASKS, 2)
    first = Sampler(TASKS, 1)
    before = [one.id for one in first.draw(6, known)]
    assert [one.id for one in first.draw(6, known)] == drawn(TASKS, 1, tuple(before))  # as after a restart


def test_tasks_that_are_sometimes_solved_weigh_most() -> None:
    known = history(task00=(0, 8), task01=(8, 8), task02=(4, 8), task03=(1, 8))
    weights = Sampler(TASKS[:5], seed=0).weights(known)
    assert weights["task02"] > weights["task03"] > weights["task00"]
    assert weights["task02"] > weights["task01"]
    assert weights["task04"] > weights["task00"]  # nothing is known of it, and others like it differ
    never = Sampler(TASKS[:1], seed=0).weights(history(task00=(0, 100_000)))
    assert never["task00"] == pytest.approx(LEAST)
    # By hand: of this kind 13 of 32 are solved and 0.6 of two more are assumed, 0.4; (4 + 2 * 0.4) / 10 = 0.48.
    assert weights["task02"] == pytest.approx(2 * 0.48 * 0.52, abs=1e-4)


def test_tasks_of_one_kind_speak_for_each_other() -> None:
    tasks = [task("a1", "a"), task("a2", "a"), task("b1", "b"), task("b2", "b"), task("hard", "a", "hard")]
    weights = Sampler(tasks, seed=0).weights(history(a1=(0, 50), b1=(25, 50)))
    assert weights["b2"] > weights["a2"]
    assert weights["hard"] == pytest.approx(2 * 0.15 * 0.85)


def test_more_turns_and_thinking_weigh_more() -> None:
    known = History({"task00": Record(4, 2, 8, 0), "task01": Record(4, 2, 32, 0), "task02": Record(4, 2, 8, 2400)})
    weights = Sampler(TASKS[:3], seed=0).weights(known)
    assert weights["task01"] == pytest.approx(2 * weights["task00"])  # the square root of four times the turns
    assert weights["task02"] == pytest.approx(weights["task01"])


def test_history_is_read_from_run_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.config_file.write_text("")
        folder.write_rollouts(1, [rollout("a", True), rollout("a", False), rollout("b", False, 5, 40)])
        folder.write_rollouts(2, [rollout("a", True)])
    known = History.of_runs([tmp_path / "one", tmp_path / "two"])
    assert known.records == {"a": Record(6, 4, 12, 600), "b": Record(2, 0, 10, 80)}
    assert known.records["a"].effort == 3.0
    assert History.of_runs([tmp_path / "one"], before_step=2).records["a"] == Record(2, 1, 4, 200)
    assert History.of_runs([]).records == {}
    with pytest.raises(OffbookError, match="is not a folder"):
        History.of_runs([tmp_path / "three"])


def test_a_run_goes_on_selecting_where_it_stopped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.touch()
    whole = Selected(TASKS, 7, folder, done=0)
    first = whole.tasks_of(1, 4)
    groups = [[rollout(one.id, solved) for solved in (True, False)] for one in first]
    whole.learn(groups)
    folder.write_rollouts(1, [one for group in groups for one in group])
    resumed = Selected(TASKS, 7, folder, done=1)
    second = [one.id for one in resumed.tasks_of(2, 4)]
    assert second == [one.id for one in whole.tasks_of(2, 4)]
    assert not {*second} & {one.id for one in first}
