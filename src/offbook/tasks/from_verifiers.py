"""Tasksets of `verifiers` as tasks to train on (extra `verifiers`): `--tasks.source verifiers:ID`.

What a task's `setup` puts into an empty sandbox is the tree that the agent gets, and its prompt is the instruction.
What the agent leaves is scored by the task's own rewards: their Python runs here, with your rights, as the taskset's
author wrote it; the commands that they run, run in a fresh sandbox with the agent's changes. They see the agent's
messages.

Left out: tasks that need an image, tool servers of their own, or a user that speaks first; judges that ask models.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

from offbook.core.runfolder import whole_folder
from offbook.sandbox import Sandbox, SandboxSpec, open_sandbox
from offbook.tasks.grade import put
from offbook.tasks.script import RECORD
from offbook.tasks.shared import write_files
from offbook.types import OffbookError, Rollout, Task

COMMAND_S = 300.0
MOST_TASKS = 10_000
ENCODED = ".offbook-write"


class SandboxRuntime(Runtime):
    """One of ours, as verifiers runs commands."""

    def __init__(self, sandbox: Sandbox):
        super().__init__("offbook")
        self.sandbox, self.info = sandbox, BaseRuntimeInfo(borrowed=True)

    async def start(self) -> None:
        """It is running."""

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        given = [f"{name}={value}" for name, value in self.process_env(env).items()]
        done = await self.sandbox.exec(shlex.join(["env", *given, *argv]), COMMAND_S)
        return ProgramResult(done.exit_code, done.output, "")

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        done = await self.sandbox.exec(f"base64 -w0 < {shlex.quote(path)} >&3", COMMAND_S, report=True)
        if done.exit_code:
            raise FileNotFoundError(path)
        return base64.b64decode(done.report)[:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        where = shlex.quote(path)
        await self.sandbox.write(ENCODED, base64.b64encode(data).decode())
        done = await self.sandbox.exec(
            f'mkdir -p "$(dirname {where})" && base64 -d {ENCODED} > {where}; status=$?; rm {ENCODED}; exit $status',
            COMMAND_S,
        )
        if done.exit_code:
            raise OSError(f"{path} cannot be written: {done.output.strip()}")


@cache
def _taskset(id: str) -> dict[str, Any]:
    """Its tasks by their keys."""
    try:
        found = load_taskset(taskset_config_type(id)(id=id))
    except Exception as error:  # the taskset author's code may raise anything
        raise OffbookError(f"the taskset {id} cannot be loaded: {str(error).splitlines()[0]}") from None
    if not found.bounded:
        found = found.take(MOST_TASKS)
    return {task.key: task for task in found}


def unfit(task: Any) -> str:
    """Why it cannot be done here; empty: it can."""
    if task.NEEDS_CONTAINER or task.data.image:
        return "it needs an image"
    if type(task).toolsets(task.config):
        return "it has tool servers of its own"
    if not task.data.prompt_text:
        return "it has no prompt"
    return ""


async def write_taskset(id: str, root: Path, spec: SandboxSpec) -> tuple[list[Path], dict[str, str]]:
    """A task folder for each under `root`, made once; and why the others are left out."""
    folders = []
    left_out = {}
    for key, task in _taskset(id).items():
        if why := unfit(task):
            left_out[key] = why
            continue
        name = str(task.data.id or task.data.name or key)
        name = "".join(one if one.isalnum() or one in "-_." else "-" for one in name)[:60]
        folder = root / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        if not folder.is_dir():
            with whole_folder(folder) as part:
                await _write(id, key, task, part, spec)
        folders.append(folder)
    if not folders:
        why = next(iter(left_out.values()), "it has no tasks")
        raise OffbookError(f"nothing of the taskset {id} can be trained on here: {why}")
    return folders, left_out


async def _write(id: str, key: str, task: Any, folder: Path, spec: SandboxSpec) -> None:
    tree = folder / "environment"
    tree.mkdir(parents=True)
    async with await open_sandbox(tree, spec) as sandbox:
        await task.setup(_trace(task), SandboxRuntime(sandbox))
        made = await sandbox.changes()
    write_files(tree, {path: content for path, content in made.items() if content is not None})
    (folder / "task.toml").write_text('schema_version = "1.4"\n')
    (folder / "instruction.md").write_text(task.data.prompt_text)
    (folder / RECORD).write_text(json.dumps({"taskset": id, "key": key}) + "\n")


async def reward_by_taskset(
    task: Task, changes: Mapping[str, str | None], rollout: Rollout | None, spec: SandboxSpec
) -> float:
    """What the task's own rewards come to, of a clean tree with these changes and what was said."""
    record = json.loads((task.folder / RECORD).read_text())
    judged = _taskset(record["taskset"]).get(record["key"])
    if judged is None:
        raise OffbookError(f"the taskset {record['taskset']} has no task {record['key']} any more")
    trace = _trace(judged, rollout)
    async with await open_sandbox(task.tree, spec) as sandbox:
        await put(sandbox, changes)
        runtime = SandboxRuntime(sandbox)
        await judged.finalize(trace, runtime)
        await judged.stage_verifier(trace, runtime)
        await judged.score(trace, runtime)
    return float(trace.reward)


def _trace(task: Any, rollout: Rollout | None = None) -> Any:
    said: Sequence[Any] = [UserMessage(content=task.data.prompt_text)]
    if rollout is not None:
        kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage, "tool": UserMessage}
        said = [kinds[one.role](content=one.text) for part in rollout.segments for one in part.messages] or said
    nodes = [
        MessageNode(parent=number - 1 if number else None, message=one, sampled=one.role == "assistant")
        for number, one in enumerate(said)
    ]
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return vf.Trace(task=about, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes)
