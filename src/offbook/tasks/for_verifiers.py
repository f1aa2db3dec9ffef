"""Task folders as a `verifiers` taskset (extra `verifiers`): its harnesses solve them, offbook's grader scores them.

    taskset = OffbookTaskset(OffbookConfig(folder="tasks/train"))

The agent works in a verifiers runtime, in `/app` where that is a container and else in the runtime's own folder. What
it leaves there is copied back and graded in a sandbox of offbook's, which the agent never saw.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

from offbook.sandbox import SandboxSpec
from offbook.tasks.check import check
from offbook.tasks.folder import load_task, load_tasks
from offbook.tasks.grade import counted, grade
from offbook.tasks.unpack import SourceLimits, unpack
from offbook.types import OffbookError, Task

ARCHIVE = ".offbook.tar"
TIMEOUT_S = 600.0


class OffbookData(vf.TaskData):
    folder: str


class OffbookConfig(vf.TasksetConfig):
    folder: str = "tasks/train"
    wording: str = ""


class OffbookTask(vf.Task[OffbookData]):
    @property
    def key(self) -> str:
        return str(self.data.id)

    def loaded(self) -> Task:
        return load_task(Path(self.data.folder))

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(self.loaded().tree, ".")
        await runtime.write(ARCHIVE, packed.getvalue())
        result = await runtime.run(["sh", "-c", f"tar xf {ARCHIVE} && rm {ARCHIVE}"], {})
        if result.exit_code:
            raise OffbookError(f"the repository of {self.data.id} cannot be unpacked: {result.stderr.strip()}")

    @vf.reward
    async def solved(self, runtime: vf.Runtime) -> float:
        task = self.loaded()
        result = await grade(task, await self._changes(task, runtime), SandboxSpec(), TIMEOUT_S)
        return float(result.solved)

    async def _changes(self, task: Task, runtime: vf.Runtime) -> dict[str, str | None]:
        """The Python files that the runtime has differently from the task's tree."""
        command = f"find . -name '*.py' -type f -not -path './.git/*' -print0 | tar cf {ARCHIVE} --null -T -"
        result = await runtime.run(["sh", "-c", command], {})
        if result.exit_code:
            raise OffbookError(f"the work on {self.data.id} cannot be read: {result.stderr.strip()}")
        with tempfile.TemporaryDirectory(prefix="offbook-work-") as place:
            archive = Path(place) / "work.tar"
            folder = Path(place) / "work"
            archive.write_bytes(await runtime.read(ARCHIVE))
            folder.mkdir()
            unpack(archive, folder, f"the work on {self.data.id}", SourceLimits())
            found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
        original = {path.relative_to(task.tree).as_posix(): path.read_bytes() for path in task.tree.rglob("*.py")}
        changed = {path: data.decode(errors="replace") for path, data in found.items() if original.get(path) != data}
        changes: dict[str, str | None] = {**dict.fromkeys(original.keys() - found.keys()), **changed}
        return {path: text for path, text in changes.items() if counted(task, path)}

    async def validate(self, runtime: vf.Runtime) -> bool:
        return await check(self.loaded()) == ""


class OffbookTaskset(vf.Taskset[OffbookTask, OffbookConfig]):
    def load(self) -> Iterator[OffbookTask]:
        for task in load_tasks(Path(self.config.folder), self.config.wording):
            data = OffbookData(id=task.id, name=task.id, prompt=task.instruction, folder=str(task.folder.resolve()))
            yield OffbookTask(data, self.config.task)
