"""Task folders as a verifiers taskset. Runs where the extra is installed: `pip install offbook[verifiers]`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbook.tasks.folder import Contents, places, write_task
from offbook.types import Task

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
def test_work_in_a_runtime_is_graded_in_a_box(folder: Path, written: str | None, reward: float) -> None:
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
