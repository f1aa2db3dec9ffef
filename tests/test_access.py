"""What commands really opened: seen by the kernel in a real sandbox, whatever the command's words say."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from offbook.agent.harness import Harness, run_agent
from offbook.sandbox import ExecResult, SandboxSpec, open_sandbox
from offbook.sandbox.access import describe, notable, own_packages, place_of
from offbook.sandbox.bwrap.watch import can_watch
from offbook.types import Event, Task

needs_watch = pytest.mark.skipif(not can_watch(), reason="only root is told which files are opened")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pkg/__init__.py", "pkg/a.py", ".git/objects/ab/cdef", ".mypy_cache/x.json", "tests/test_a.py"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    return tmp_path / "tree"


def results(tree: Path, *commands: str, watch: bool = True) -> list[ExecResult]:
    async def work() -> list[ExecResult]:
        async with await open_sandbox(tree, SandboxSpec(watch=watch)) as sandbox:
            return [await sandbox.exec(command, 20) for command in commands]

    return asyncio.run(work())


@needs_watch
def test_opens_are_seen_however_they_are_written(tree: Path) -> None:
    hidden = 'import os; p = "/app/.my" + "py_cache/x.json"; os.read(os.open(p, 0), 9)'
    one, two, three = results(
        tree, "cat pkg/a.py", f"cd /tmp && python -c '{hidden}'", "ls -la .git/objects/ab; rm -f pkg/a.py"
    )
    assert one.opened is not None
    assert two.opened is not None
    assert three.opened is not None
    assert "/app/pkg/a.py" in one.opened.paths
    assert "/app/.mypy_cache/x.json" not in one.opened.paths
    assert "/app/.mypy_cache/x.json" in two.opened.paths
    assert "/app/pkg/a.py" not in two.opened.paths
    assert not [path for path in three.opened.paths if path.startswith("/app/")], "listing and removing open no file"
    assert one.opened.num_cut == two.opened.num_cut == 0


@needs_watch
def test_nothing_outside_the_sandbox_is_seen(tree: Path) -> None:
    async def work() -> ExecResult:
        async with await open_sandbox(tree, SandboxSpec(watch=True)) as sandbox:
            running = asyncio.create_task(sandbox.exec("sleep 0.5; cat pkg/a.py", 20))
            await asyncio.sleep(0.2)
            (tree / "tests/test_a.py").read_text()
            return await running

    opened = asyncio.run(work()).opened
    assert opened is not None
    assert not [path for path in opened.paths if path.endswith("test_a.py")]


def test_a_sandbox_that_does_not_watch_says_so(tree: Path) -> None:
    assert results(tree, "cat pkg/a.py", watch=False)[0].opened is None


@needs_watch
def test_a_flood_is_counted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook.sandbox.bwrap.watch.MAX_PATHS", 3)
    opened = results(tree, "cat pkg/*.py tests/*.py")[0].opened
    assert opened is not None
    assert len(opened.paths) == 3
    assert opened.num_cut > 0


@needs_watch
def test_no_descriptor_stays_open(tree: Path) -> None:
    results(tree, "true")
    before = len(os.listdir("/proc/self/fd"))
    results(tree, *["cat pkg/a.py"] * 5, "sleep 9 & exec cat pkg/a.py")
    assert len(os.listdir("/proc/self/fd")) == before


@needs_watch
def test_the_rollout_tells_only_what_is_worth_a_look(tree: Path) -> None:
    from hacks.case import Script, run

    steps = run("python -c 'import json, pkg.a'; head -1 .git/objects/ab/cdef"), run("cat pkg/a.py")
    task = Task("t", tree, "x", tree, tree, (), (), (), ("run_command", "finish"), "test")
    script = Script(steps)

    async def work():
        async with await open_sandbox(tree, SandboxSpec(watch=True)) as sandbox:
            from hacks.case import LIMITS

            return await run_agent(task, sandbox, script, script.chat, Harness(LIMITS), "r", "g")

    rollout = asyncio.run(work())
    assert rollout.events == [
        Event(2, "opened", "vcs: .git/objects/ab/cdef", place="vcs", paths=(".git/objects/ab/cdef",))
    ]


def test_places() -> None:
    own = {"pkg"}
    assert place_of("/app/pkg/a.py", own) is None
    assert place_of("/app/pkg/__pycache__/a.cpython-311.pyc", own) == "bytecode"
    assert place_of("/app/.git/index", own) == "vcs"
    assert place_of("/app/.mypy_cache/3.11/pkg.json", own) == "cache"
    assert place_of("/x/lib/python3.11/site-packages/pkg/a.py", own) == "package_copy"
    assert place_of("/x/lib/python3.11/site-packages/pkg-1.0.dist-info/RECORD", own) == "package_copy"
    assert place_of("/x/lib/python3.11/site-packages/pkgutil_more/a.py", own) is None
    assert place_of("/usr/lib/python3.11/json/__init__.py", own) is None
    assert place_of("/srv/tasks/other/solution/gold.patch", own) == "outside"
    assert place_of("/app/tests/test_a.py", own) == "tests"


def test_notable_paths_are_listed(tree: Path) -> None:
    assert own_packages(tree) == {"pkg"}
    paths = notable([f"/app/.git/x{number}" for number in range(40)], ())["vcs"]
    assert paths[0] == ".git/x0"
    assert describe("vcs", paths).startswith("vcs: .git/x0 | ")
