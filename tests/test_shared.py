"""Folders that hold how a task differs from its repository, code that two repositories share, parts of a long list."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from offbook.core.copies import SAME, SKETCH_SIZE, shared, sketch_of
from offbook.tasks import load_task
from offbook.tasks.factory.records import Taken
from offbook.tasks.factory.workers import workers
from offbook.tasks.folder import Contents, places, write_task, write_whole
from offbook.tasks.shared import CHANGES, SharedTask, checksum, share
from offbook.types import OffbookError, Suite, Task

BASE = {
    "pkg/core.py": "import os\n\n\ndef one():\n    return 1\n\n\ndef two():\n    return 2\n",
    "pkg/extra/gone.py": "x = 1\n",
    "tests/test_core.py": "def test_one(): pass\ndef test_two(): pass\n",
    "data/\u00fc.bin": "\udc80\udcff\r\nx",
    "run.sh": "#!/bin/sh\n",
}


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository as the factory has it, and a whole task beside it."""
    monkeypatch.setenv("OFFBOOK_CACHE", str(tmp_path / "cache"))
    environment = tmp_path / "out/.factory/pkg"
    for path, text in BASE.items():
        (environment / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (environment / "tree" / path).write_bytes(text.encode("utf-8", "surrogateescape"))
    (environment / "tree/run.sh").chmod(0o755)
    (environment / "tree/link").symlink_to("run.sh")
    (environment / "python").mkdir()
    folder = tmp_path / "out/train/it"
    task = Task(
        **places(folder),
        id="it",
        instruction="Bring two back.",
        test_files=("tests/test_core.py",),
        fail_to_pass=("tests/test_core.py::test_two",),
        pass_to_pass=("tests/test_core.py::test_one",),
        tools=("finish",),
        origin="pkg==1",
        suite=Suite(environment),
        sources=("pkg",),
    )
    contents = Contents(
        tree={
            "pkg/core.py": BASE["pkg/core.py"].replace("return 2", "raise NotImplementedError"),
            "pkg/extra/gone.py": None,
            "pkg/new.py": "",
            "tests/test_core.py": "def test_one(): pass\n",
        },
        gold={"pkg/core.py": BASE["pkg/core.py"], "pkg/extra/gone.py": "x = 1\n"},
        hidden_tests={"tests/test_core.py": BASE["tests/test_core.py"], "tests/more.bin": b"\x80\xff\n"},
        base=environment / "tree",
        instructions={"terse": "Two!"},
    )
    write_task(task, contents, harbor=False)
    return folder


def everything(folder: Path) -> dict[str, tuple[bytes, bool]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def test_a_shared_folder_gives_the_tree_it_was_made_from(suite: Path) -> None:
    whole = load_task(suite)
    tree, hidden = everything(whole.tree), everything(whole.hidden_tests)
    share(suite, whole.suite.environment / "tree" if whole.suite.environment else Path())
    files = {path.relative_to(suite).as_posix() for path in suite.rglob("*") if path.is_file()}
    assert files == {
        *("task.toml", "instruction.md", "instructions/terse.md", "environment/requirements.txt", CHANGES),
        *("solution/gold.patch", "solution/removed.json"),
    }
    assert load_task(suite, "terse").instruction == "Two!"
    with pytest.raises(OffbookError, match="has no instruction called long"):
        load_task(suite, "long")
    task = load_task(suite)
    cache = Path(os.environ["OFFBOOK_CACHE"])
    assert not cache.exists()  # nothing is made until somebody asks
    assert everything(task.tree) == tree
    assert everything(task.hidden_tests) == hidden
    assert (task.tree / "link").readlink() == Path("run.sh")
    assert not (task.tree / "pkg/extra").exists()
    assert (task.tree / ".git/refs/heads/main").is_file() or (task.tree / ".git/packed-refs").is_file()
    assert load_task(suite).tree == task.tree
    assert replace(task, instruction="x").tree == task.tree


def test_a_shared_task_goes_to_another_process_with_its_tree(suite: Path) -> None:
    """As monitors get it."""
    share(suite, load_task(suite).suite.environment / "tree")  # type: ignore[operator]
    again = TypeAdapter(Task).validate_json(TypeAdapter(Task).dump_json(load_task(suite)))
    assert (again.tree / "pkg/core.py").is_file()
    assert (again.hidden_tests / "tests/test_core.py").is_file()


def test_several_ask_for_one_tree_at_once(suite: Path) -> None:
    share(suite, load_task(suite).suite.environment / "tree")  # type: ignore[operator]
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(load_task(suite).tree)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1
    assert len(found) == 4
    assert [path.name for path in found[0].parent.iterdir()] == [found[0].name]


def test_a_whole_folder_can_be_had_from_a_shared_one(suite: Path, tmp_path: Path) -> None:
    before = load_task(suite)
    tree = checksum(before.tree)
    share(suite, before.suite.environment / "tree")  # type: ignore[operator]
    write_whole(load_task(suite), tmp_path / "whole")
    again = load_task(tmp_path / "whole")
    assert not isinstance(again, SharedTask)
    assert (checksum(again.tree), again.suite.environment) == (tree, before.suite.environment)
    for path in ("environment/Dockerfile", "tests/test.sh", "tests/judge/tree.tar.gz", "solution/solve.sh"):
        assert (again.folder / path).is_file()
    assert (again.folder / "environment/requirements.txt").read_text() == "pytest\n"
    assert not (again.folder / CHANGES).exists()
    assert load_task(again.folder, "terse").instruction == "Two!"
    write_whole(again, tmp_path / "copy")  # a whole one is copied
    assert checksum(load_task(tmp_path / "copy").tree) == tree


def test_another_repository_than_it_was_made_from_is_refused(suite: Path) -> None:
    environment = load_task(suite).suite.environment
    assert environment is not None
    share(suite, environment / "tree")
    (environment / "tree/run.sh").write_text("other\n")
    with pytest.raises(OffbookError, match="was made from another tree than"):
        _ = load_task(suite).tree
    (environment / "tree/pkg/extra/gone.py").unlink()
    with pytest.raises(OffbookError, match="cannot be made from"):
        _ = load_task(suite).tree
    (suite / CHANGES).write_text("{")
    with pytest.raises(OffbookError, match=r"changes\.json is not whole"):
        _ = load_task(suite).tree
    assert list(Path(os.environ["OFFBOOK_CACHE"]).rglob(".draft-*")) == []


@pytest.mark.parametrize("part", ["changed", "tests"])
@pytest.mark.parametrize("name", ["{outside}", "../../victim", "pkg/../../victim", "away/victim", "link", "a\0b", ""])
@pytest.mark.parametrize("text", ["broken", None], ids=["write", "delete"])
def test_a_task_names_no_file_outside_of_itself(
    suite: Path, tmp_path: Path, part: str, name: str, text: str | None
) -> None:
    environment = load_task(suite).suite.environment
    assert environment is not None
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (environment / "tree/away").symlink_to(tmp_path)  # as nothing that is unpacked could be
    share(suite, environment / "tree")
    changes = json.loads((suite / CHANGES).read_text())
    changes[part][name.format(outside=victim)] = text
    (suite / CHANGES).write_text(json.dumps(changes))
    with pytest.raises(OffbookError, match=r"is no path inside|leads through a link|cannot be made from"):
        _ = (load_task(suite).tree, load_task(suite).hidden_tests)
    assert victim.read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out", "victim"]


@pytest.mark.parametrize("key", ["tree", "hidden"])
def test_a_tree_is_named_by_its_checksum_alone(suite: Path, key: str) -> None:
    share(suite, load_task(suite).suite.environment / "tree")  # type: ignore[operator]
    changes = json.loads((suite / CHANGES).read_text())
    (suite / CHANGES).write_text(json.dumps({**changes, key: "../../../out"}))
    with pytest.raises(OffbookError, match="which is no checksum"):
        _ = (load_task(suite).tree, load_task(suite).hidden_tests)


# --- the same code in two repositories

CODE = """def parts(text, most=3):
    \"\"\"Words.\"\"\"
    found = []
    for word in text.split():  # each
        if word and len(found) < most:
            found.append(word.strip().lower())
    return found
"""


def test_what_is_written_otherwise_is_the_same_and_what_does_another_thing_is_not() -> None:
    one = sketch_of([CODE])
    same = CODE.replace('    """Words."""\n', "").replace("  # each", "").replace("    ", "        ")
    assert shared(one, sketch_of([same])) == 1.0
    assert shared(one, sketch_of(["    " + CODE.replace("\n", "\n    ")])) == 1.0  # a method
    assert shared(one, sketch_of([CODE.replace("lower", "upper")])) > SAME - 0.1
    other = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
    assert shared(one, sketch_of([other])) < 0.3
    assert shared((), ()) == 0.0
    long = [f"def f{n}(a):\n    return a + {n} * a - {n}\n" for n in range(80)]
    assert len(sketch_of(long)) == SKETCH_SIZE
    assert shared(sketch_of(long), sketch_of(reversed(long))) == 1.0
    assert shared(sketch_of(["no ( python"]), sketch_of(["no ( python"])) == 1.0


def test_only_tasks_of_other_repositories_count_also_those_of_other_processes(tmp_path: Path) -> None:
    sketch = sketch_of([CODE])
    taken = Taken(tmp_path)
    assert taken.repeats("a", sketch) == ""
    rows = [
        {"id": "a-parts", "repository": "a", "kind": "single", "level": "stub", "sketch": sketch},
        {"id": "b-no", "repository": "b", "kind": "single", "level": "stub", "refused": "flaky", "sketch": sketch},
        {"id": "c-old", "repository": "c", "kind": "single", "level": "stub"},
    ]
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "outcomes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": "half')
    assert (taken.repeats("a", sketch), taken.repeats("b", sketch)) == ("", "a-parts")
    with open(file, "a") as more:
        more.write('"}\n' + json.dumps({**rows[0], "id": "d-parts", "repository": "d"}) + "\n")
    assert taken.repeats("a", sketch) == "d-parts"


# --- lists, processes


def test_workers_write_a_log_and_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    def work() -> None:
        print("begun", flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("put away", flush=True)
            raise

    log = tmp_path / "worker-1.log"
    began = time.monotonic()

    def interrupted() -> None:
        with workers(1, work, tmp_path):
            while not (log.is_file() and "begun" in log.read_text()):
                assert time.monotonic() - began < 30
                time.sleep(0.02)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 50
    assert log.read_text() == "begun\nput away\n"


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.is_file() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_however_that_ends(tmp_path: Path, number: int) -> None:
    """Also where interrupts are ignored, as in the background of a shell."""
    told = tmp_path / "pid"
    code = (
        "import os, pathlib, signal, sys, time\n"
        "from offbook.tasks.factory.workers import workers\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "told = pathlib.Path(sys.argv[1])\n"
        "def work():\n    told.with_suffix('.part').write_text(str(os.getpid()))\n"
        "    told.with_suffix('.part').rename(told)\n    time.sleep(60)\n"
        "with workers(1, work, told.parent):\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(told)], stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while not told.is_file():
        assert time.monotonic() - began < 30
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(timeout=40)
    while alive(int(told.read_text())):
        assert time.monotonic() - began < 50, "the worker goes on alone"
        time.sleep(0.02)


def test_an_interrupt_is_one_sentence(tmp_path: Path) -> None:
    """In the middle of a download that never comes to an end."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(60)
        url = f"https://127.0.0.1:{server.getsockname()[1]}/never.git"
        command = [sys.executable, "-m", "offbook", "tasks", "make", url, "--out", str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.accept()
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("offbook: stopped; everything so far is kept")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
