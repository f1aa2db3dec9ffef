"""Task folders as a verifiers taskset. Runs where the extra is installed: `pip install offbook[verifiers]`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbook.core.config import load_config
from offbook.rl.checks import refuse_missing_tasks
from offbook.rl.tasks import task_sets
from offbook.signals.rewards import Grader
from offbook.tasks.check import check
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import Message, OffbookError, Rollout, Segment, Task

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")

STUB, GOLD = 'def one():\n    raise NotImplementedError("one")\n', "def one():\n    return 1\n"
TESTS = "from pkg import one\n\n\ndef test_one():\n    assert one() == 1\n\n\ndef test_other():\n    assert True\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    contents = Contents(
        tree={"pkg.py": STUB},
        gold={"pkg.py": GOLD},
        hidden_tests={"test_pkg.py": TESTS},
    )
    new = Task(
        **places(tmp_path / "tasks" / "one"),
        instruction="Bring back one in pkg.py.",
        test_files=("test_pkg.py",),
        id="one",
        origin="test",
        difficulty="normal",
        tools=("read_file", "edit_file", "finish"),
        fail_to_pass=("test_pkg.py::test_one",),
        pass_to_pass=("test_pkg.py::test_other",),
    )
    write_task(new, contents)
    return tmp_path / "tasks"


@pytest.mark.parametrize(("written", "reward"), [(GOLD, 1.0), ("def one():\n    return 2\n", 0.0), (None, 0.0)])
def test_work_in_a_runtime_is_graded_in_a_sandbox(folder: Path, written: str | None, reward: float) -> None:
    from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

    from offbook.tasks.for_verifiers import OffbookConfig, OffbookTaskset

    (task,) = OffbookTaskset(OffbookConfig(folder=str(folder)))
    assert (task.data.id, task.data.prompt) == ("one", "Bring back one in pkg.py.")

    async def score() -> float:
        runtime = SubprocessRuntime(SubprocessConfig())
        await runtime.start()
        try:
            await task.setup(SimpleNamespace(), runtime)
            assert await runtime.read("pkg.py") == STUB.encode()
            if written is not None:
                await runtime.write("pkg.py", written.encode())
            assert await task.validate(runtime)
            return await task.solved(runtime)
        finally:
            await runtime.stop()

    assert asyncio.run(score()) == reward


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    first: int
    second: int


class SumTask(vf.Task[SumData]):
    async def setup(self, trace, runtime):
        await runtime.write("numbers/first.txt", f"{self.data.first}\\n".encode())
        await runtime.write("second.txt", f"{self.data.second}\\n".encode() * 2000)

    @vf.reward
    async def right(self, runtime) -> float:
        result = await runtime.run(["sh", "-c", "cat sum.txt"], {})
        first = int(await runtime.read("numbers/first.txt"))
        return float(result.stdout.strip() == str(first + self.data.second))

    @vf.reward(weight=0.5)
    async def polite(self, trace) -> float:
        return float("please" in trace.last_reply)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(12):
            data = SumData(id=f"sum {number}", prompt=f"Write {number} + 5 to sum.txt.", first=number, second=5)
            yield SumTask(data, self.config.task)
        yield SumTask(SumData(prompt="x", image="some/image", first=1, second=1), self.config.task)
"""


def test_a_taskset_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Its tasks get a tree of their own, a fifth is held out, and its own rewards score what an agent left and said."""
    (tmp_path / "offbook_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path / "cache"))
    config = load_config([], {"model": "pocket", "tasks.source": "verifiers:offbook_sums"})
    refuse_missing_tasks(config, "train")
    sets = task_sets(config)
    assert len(sets.train) + len(sets.heldout) == 12
    assert 0 < len(sets.heldout) < len(sets.train)
    assert "1 tasks of verifiers:offbook_sums are left out: it needs an image" in caplog.text
    task = next(one for one in sets.train if one.id.startswith("sum-3-"))
    assert task.instruction == "Write 3 + 5 to sum.txt."
    assert (task.tree / "numbers/first.txt").read_text() == "3\n"
    assert (task.tree / "second.txt").stat().st_size == 4000

    def rollout(said: str, **changed: str) -> Rollout:
        message = Message("assistant", said, 0, 1, 0, 1)
        return Rollout("r", task.id, "g", (), [Segment([1], messages=[message])], "finish", changed=changed)

    async def outcomes() -> list[float]:
        grader = Grader()
        tried = (rollout("x"), rollout("please"), rollout("x", **{"sum.txt": "8"}), rollout("x", **{"sum.txt": "9"}))
        return [await grader.outcome(task, one) for one in tried]

    assert asyncio.run(outcomes()) == [0.0, 0.5, 1.0, 0.0]
    assert asyncio.run(check(task)) == ""
    with pytest.raises(OffbookError, match="the taskset no_such_thing cannot be loaded"):
        task_sets(load_config([], {"model": "pocket", "tasks.source": "verifiers:no_such_thing"}))
