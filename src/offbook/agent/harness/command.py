"""Somebody else's agent at work: a command that runs in the sandbox, and reaches the model there and nothing else.

The sandbox keeps its own empty network. A forwarder inside it offers the endpoint on the sandbox's loopback and carries
connections through a socket, behind which this process records what is asked and answered. What the agent leaves in
the tree is graded as always. Left out: a task's interruption by the user; nobody knows when such an agent listens.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from offbook.agent.harness.agent import first_message, record_at_end, record_opened, take_changes
from offbook.agent.recorder import Session
from offbook.agent.serve.app import Search, Sessions, make_app
from offbook.agent.serve.client import agent_environment
from offbook.agent.serve.dialect import MODEL
from offbook.agent.serve.server import Serving, listen_at
from offbook.sandbox import BwrapSandbox, ExecResult, Sandbox
from offbook.sandbox.access import own_packages
from offbook.sandbox.egress import DOOR, forwarded
from offbook.types import OffbookError, Rollout, StopReason, Task

SOCKET, PORT = "model", 8630  # in the door, and on the sandbox's loopback
GRACE_S = 2.0  # that an agent has to end by itself after it was told that it may ask no more
LAST_WORDS = 2000  # characters of its output that a crash is told with


class Door:
    """What sandboxes are shown: the socket, which is one for all of them, and the user's own folders.

    It is opened by the first that needs it, and belongs to the event loop of that one until it is closed.
    """

    def __init__(self, folders: Mapping[str, Path], search: Search | None = None):
        for where, folder in folders.items():
            if not where.startswith("/") or not folder.is_dir():
                raise OffbookError(f"harness.mounts: {folder} is to be seen as {where}: give a folder, and a full path")
        self._folders, self._sessions, self._search = folders, Sessions(), search
        self._place: Path | None = None
        self._serving: Serving | None = None

    def mounts(self) -> dict[str, Path]:
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="offbook-door-"))
            self._serving = Serving(make_app(self._sessions, self._search), listen_at(self._place / SOCKET))
        return {DOOR: self._place, **self._folders}

    def socket(self, sandbox: Sandbox) -> str:
        """Its path there."""
        assert self._place is not None
        return f"{DOOR}/{SOCKET}" if isinstance(sandbox, BwrapSandbox) else str(self._place / SOCKET)

    def admit(self, session: Session) -> str:
        """The key by which its agent is known."""
        return self._sessions.add(session)

    def dismiss(self, session: Session) -> None:
        self._sessions.remove(session.rollout.id)

    def is_shown(self, path: str) -> bool:
        return path.startswith(tuple(f"{where}/" for where in (DOOR, *self._folders)))

    async def aclose(self) -> None:
        if self._serving is not None and self._place is not None:
            await self._serving.aclose()
            shutil.rmtree(self._place, ignore_errors=True)
        self._serving = self._place = None


async def run_command(task: Task, sandbox: Sandbox, session: Session, command: str, door: Door) -> Rollout:
    """One rollout, unscored, as `run_agent` gives it."""
    variables = {
        **agent_environment(f"http://127.0.0.1:{PORT}", door.admit(session)),
        "OFFBOOK_MODEL": MODEL,
        "OFFBOOK_INSTRUCTION": first_message(task),
    }
    through = forwarded(command, door.socket(sandbox), PORT, variables)
    try:
        result = await _until_over(sandbox, through, session)
    finally:
        door.dismiss(session)
        rollout = session.end(None)
    if session.lost is not None:
        raise session.lost
    rollout.stop = _stop(rollout, result)
    if result is not None and result.opened is not None:
        paths = tuple(path for path in result.opened.paths if not door.is_shown(path))
        record_opened(rollout, [replace(result.opened, paths=paths)], own_packages(task.tree))
    if task.interrupt is not None:
        record_at_end(rollout, "not_interrupted", task.interrupt.text)
    await take_changes(rollout, task, sandbox)
    return rollout


async def _until_over(sandbox: Sandbox, command: str, session: Session) -> ExecResult | None:
    """How the command ended; None where it was ended because it may ask no more."""
    running = asyncio.create_task(sandbox.exec(command, session.limits.wall_s))
    over = asyncio.create_task(session.is_over.wait())
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
