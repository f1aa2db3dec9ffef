"""Runs a user's own agent: a command in the sandbox that can reach the model and nothing else.

The sandbox keeps its own empty network. A forwarder inside it listens on the sandbox's loopback and forwards
connections through a socket to this process, which records requests and answers. The agent's changes are graded as
always. Left out: a task's interruption by the user; it is unknown when such an agent reads messages.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offbook.agent.harness.agent import first_message, record_at_end, record_opened, take_changes
from offbook.agent.recorder import Recorder
from offbook.agent.serve.app import MODEL, Serving, Sessions, listen_at, make_app
from offbook.agent.serve.client import agent_environment
from offbook.sandbox import BwrapSandbox, ExecResult, Sandbox
from offbook.sandbox.access import own_packages
from offbook.sandbox.egress import DOOR, forwarded
from offbook.types import OffbookError, Rollout, StopReason, Task

SOCKET, PORT = "model", 8630  # in the door, and on the sandbox's loopback
GRACE_S = 2.0  # for an agent to exit by itself after its session is over
LAST_WORDS = 2000  # characters of output recorded with a crash


class Door:
    """Mounts for sandboxes: the one socket that all of them share, and the user's own folders.

    The first sandbox opens it, in its event loop.
    """

    def __init__(self, folders: Mapping[str, Path]):
        for where, folder in folders.items():
            if not where.startswith("/") or not folder.is_dir():
                raise OffbookError(f"harness.mounts: {folder} is to be seen as {where}: give a folder, and a full path")
        self._folders, self._sessions = folders, Sessions()
        self._place: Path | None = None
        self._serving: Serving | None = None

    def mounts(self) -> dict[str, Path]:
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="offbook-door-"))
            self._serving = Serving(make_app(self._sessions), listen_at(self._place / SOCKET))
        return {DOOR: self._place, **self._folders}

    def socket(self, sandbox: Sandbox) -> str:
        """The socket's path in the sandbox."""
        assert self._place is not None
        return f"{DOOR}/{SOCKET}" if isinstance(sandbox, BwrapSandbox) else str(self._place / SOCKET)

    def admit(self, recorder: Recorder) -> str:
        """Register a session and return the key for its agent."""
        return self._sessions.add(recorder)

    def dismiss(self, recorder: Recorder) -> None:
        self._sessions.remove(recorder.rollout.id)

    def is_shown(self, path: str) -> bool:
        return path.startswith(tuple(f"{where}/" for where in (DOOR, *self._folders)))

    async def aclose(self) -> None:
        if self._serving is not None and self._place is not None:
            await self._serving.aclose()
            shutil.rmtree(self._place, ignore_errors=True)
        self._serving = self._place = None


async def run_command(task: Task, sandbox: Sandbox, recorder: Recorder, command: str, door: Door) -> Rollout:
    """One rollout, unscored, as `run_agent` gives it."""
    variables = {
        **agent_environment(f"http://127.0.0.1:{PORT}", door.admit(recorder)),
        "OFFBOOK_MODEL": MODEL,
        "OFFBOOK_INSTRUCTION": first_message(task),
    }
    through = forwarded(command, door.socket(sandbox), PORT, variables)
    try:
        result = await _until_over(sandbox, through, recorder)
    finally:
        door.dismiss(recorder)
        rollout = recorder.end(None)
    if recorder.lost is not None:
        raise recorder.lost
    rollout.stop = _stop(rollout, result)
    if result is not None and result.opened is not None:
        paths = tuple(path for path in result.opened.paths if not door.is_shown(path))
        record_opened(rollout, [replace(result.opened, paths=paths)], own_packages(task.tree))
    if task.interrupt is not None:
        record_at_end(rollout, "not_interrupted", task.interrupt.text)
    await take_changes(rollout, task, sandbox)
    return rollout


async def _until_over(sandbox: Sandbox, command: str, recorder: Recorder) -> ExecResult | None:
    """The command's result; None if it was stopped because its session is over."""
    running = asyncio.create_task(sandbox.exec(command, recorder.limits.wall_s))
    over = asyncio.create_task(recorder.is_over.wait())
    try:
        await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({running}, timeout=GRACE_S)
        return running.result() if running.done() else None
    finally:
        over.cancel()
        running.cancel()
        await asyncio.wait({running})


def _stop(rollout: Rollout, result: ExecResult | None) -> StopReason:
    if rollout.stop not in ("finish", "answer") or result is None:  # a limit
        return rollout.stop
    said = result.output.strip()[-LAST_WORDS:]
    if result.timed_out:
        record_at_end(rollout, "last_words", said)
        return "wall"
    if result.exit_code == 0 and rollout.segments:
        return "finish"
    why = f"the agent's command ended with {result.exit_code}"
    why += f", it used up its {result.exhausted}" if result.exhausted else ""
    why += "" if rollout.segments else " and has asked nothing of the model"
    record_at_end(rollout, "crash", f"{said}\n{why}")
    return "crash"
