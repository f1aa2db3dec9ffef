"""One scripted rollout: what is asked, what lies around, and every call that is made."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacks.repository import SLUGIFY, TEXTKIT, Repository, make_tree
from offbook.agent.chat import byte_chat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.types import Completion, Limits, Prompt, Rollout, Task

TOOLS = ("read_file", "edit_file", "run_command", "search_codebase", "list_dir", "finish")
LIMITS = Limits(turns=20, tokens=400_000, context=400_000, message_tokens=20_000, command_s=20)
STUB = "    raise NotImplementedError\n"
Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    steps: tuple[Step, ...]
    instruction: str = SLUGIFY
    leftovers: tuple[str, ...] = ()
    more: dict[str, str] = field(default_factory=dict)  # further files of the repository
    held_out: bool = False  # not looked at while the rules were written
    repository: Repository = TEXTKIT

    @property
    def is_sealed(self) -> bool:
        """In the third of the blind set that nobody looked at while the rules were mended."""
        return zlib.crc32(self.name.encode()) % 3 == 0


def run(command: str) -> Step:
    return "run_command", {"command": command}


def read(path: str) -> Step:
    return "read_file", {"path": path}


def edit(path: str, old: str, new: str) -> Step:
    return "edit_file", {"path": path, "old": old, "new": new}


def write(path: str, text: str) -> Step:
    return edit(path, "", text)


def slugify(body: str) -> Step:
    return edit("textkit/cases.py", STUB, body)


def roman(body: str) -> Step:
    return edit("textkit/numbers.py", STUB, body)


class Script:
    """A policy that makes the given calls, one a message, then finishes."""

    def __init__(self, steps: tuple[Step, ...]):
        self.chat = byte_chat()
        self.lines = [render_call(name, arguments) for name, arguments in (*steps, ("finish", {}))]

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        ids = [*self.chat.encode(self.lines.pop(0)), self.chat.end_id]
        return Completion(ids, [-0.1] * len(ids), [0] * len(ids))


async def play(case: Case, folder: Path, watch: bool = True) -> tuple[Task, Rollout]:
    """The case in a real sandbox. `PACKAGES` in a command is the folder of installed packages."""
    tree, hidden = folder / "tree", folder / "hidden"
    tree.mkdir()
    packages = make_tree(tree, case.repository, case.leftovers, case.more)
    nodes = case.repository.tests
    names = tuple(node.partition("::")[0] for node in nodes.values())
    for name in names:
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text(case.repository.files[name])
    (folder / "solution").mkdir()
    (folder / "solution/removed.json").write_text(json.dumps(case.repository.removed()))
    steps = tuple(
        (name, {key: str(value).replace("PACKAGES", str(packages)) for key, value in arguments.items()})
        for name, arguments in case.steps
    )
    wanted = next((node for module, node in nodes.items() if module in case.instruction), next(iter(nodes.values())))
    task = Task(
        case.name, folder, case.instruction, tree, hidden, names, (wanted,), (), TOOLS, case.repository.package
    )  # fmt: skip
    async with await open_sandbox(tree, SandboxSpec(watch=watch), mounts={str(packages): packages}) as sandbox:
        script = Script(steps)
        rollout = await run_agent(task, sandbox, script, script.chat, Harness(LIMITS), case.name, "hacks")
    assert rollout.stop == "finish", (case.name, rollout.stop, rollout.events)
    return task, rollout
