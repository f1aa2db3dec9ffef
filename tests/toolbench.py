"""What the tests of the tools share: a small repository and calls made in a real sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from offbook.agent.harness.tool import ToolFailed, Workbench
from offbook.agent.harness.tools import TOOLS
from offbook.agent.harness.toolsets import Toolset, make_toolset
from offbook.sandbox import PathRefused, ProcessSandbox
from offbook.types import Limits, ToolCall

LIMITS = Limits(command_s=5)
ALL = make_toolset(tuple(TOOLS))
BASH_SET = make_toolset(("finish",), "bash")
CALC = "def one():\n    return 0\n\n\ndef two():\n    if one():\n        return 0\n    return 2\n"
Step = tuple[str, dict[str, Any]]


def small_tree(folder: Path) -> Path:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "calc.py").write_text(CALC)
    (folder / "README.md").write_text("Counts to two.\n")
    return folder


def session(
    tree: Path, *steps: Step, toolset: Toolset = ALL, limits: Limits = LIMITS, tests: str = ""
) -> tuple[list[str], dict[str, str | None]]:
    """The answers to calls made one after the other, failures marked, and what they changed."""

    async def work() -> tuple[list[str], dict[str, str | None]]:
        async with ProcessSandbox(tree) as sandbox:
            bench = Workbench(sandbox, limits, test_command=tests)
            answers = [await answer(toolset, bench, ToolCall(name, arguments)) for name, arguments in steps]
            return answers, await sandbox.changes()

    return asyncio.run(work())


async def answer(toolset: Toolset, bench: Workbench, call: ToolCall) -> str:
    problem = toolset.check(call)
    if problem:
        return f"malformed: {problem}"
    try:
        return await toolset.run(call, bench)
    except (ToolFailed, PathRefused) as error:
        return f"failed: {error}"
    except OSError as error:
        return f"failed: {error.strerror}"


def one(tree: Path, name: str, arguments: dict[str, Any], **settings: Any) -> str:
    return session(tree, (name, arguments), **settings)[0][0]


def edit(path: str, old: str, new: str, *further: tuple[str, str]) -> Step:
    arguments: dict[str, Any] = {"path": path, "old": old, "new": new}
    if further:
        arguments["edits"] = [{"old": before, "new": after} for before, after in further]
    return "edit_file", arguments
