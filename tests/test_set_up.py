"""Set-up by agents: scripted ones behind a real server, in real sandboxes, on packages that do not get ready alone."""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from little_repo import deps
from test_prepare import BOX, LIMITS, installed, make_wheel, write
from test_remote import Answer, reply, serving

from offbook.tasks import load_tasks
from offbook.tasks.check import check_gold
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import folder_name, make_tasks
from offbook.tasks.factory.prepare.agents import SetUpAgent
from offbook.tasks.factory.prepare.prepare import PrepareSettings, load_repository, prepare
from offbook.tasks.factory.types import Unprepared
from offbook.tasks.folder import write_whole
from offbook.tasks.harbor import dockerfile
from offbook.types import OffbookError

__all__ = ["deps"]
DOUBLE = "def double(n):\n    total = n\n    if n:\n        total = total + n\n    return total\n"
HALF = """
def half(n, places=1):
    \"\"\"Half of a number, rounded to so many places.\"\"\"
    if n < 0:
        return -half(-n, places)
    value = n / 2
    factor = 10 ** places
    return int(value * factor + 0.5) / factor
"""
MANY = "@pytest.mark.parametrize('n', range(12))\ndef test_it(n): assert pkg.double(n) == 2 * n\n"
# Its tests import what it does not say that they need.
UNDECLARED = {"pkg/__init__.py": DOUBLE, "tests/test_pkg.py": f"import pytest, pkg, helper\n{MANY}"}
# A module of it is made by a command.
GENERATED = {
    "pkg/__init__.py": f"from pkg import _table\n{DOUBLE}{HALF}",
    "tools/make_table.py": "open('pkg/_table.py', 'w').write('ROWS = [1, 2]\\n')\n",
    "tests/test_pkg.py": f"import pytest, pkg\n{MANY}{MANY.replace('test_it', 'test_other').replace('2 * n', 'n + n')}"
    "def test_half(): assert (pkg.half(5), pkg.half(-3), pkg.half(1, 0)) == (2.5, -1.5, 1.0)\n",
}
# It asks for a variable and for the client of a service that nobody has.
SERVED = {
    "pkg/__init__.py": f"import os, payments\nBANK = payments.connect(os.environ['BANK_URL'])\n{DOUBLE}",
    "tests/test_pkg.py": f"import pytest, pkg\n{MANY}def test_bank(): assert pkg.BANK.balance() == 7\n",
}


def call(tool: str, **arguments: Any) -> Answer:
    return reply(None, (tool, json.dumps(arguments)))


def new_file(path: str, text: str) -> Answer:
    return call("edit_file", path=path, old="", new=text)


FINISH = call("finish")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A package index of our own, which is the one that pip is set up with."""
    root = tmp_path / "index" / "simple" / "helper"
    root.mkdir(parents=True)
    make_wheel(root, "helper", "3.1", {"helper/__init__.py": b"VALUE = 5\n"})
    (root / "index.html").write_text('<a href="helper-3.1-py3-none-any.whl">helper-3.1-py3-none-any.whl</a>')
    handler = functools.partial(_Quiet, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield server.server_port
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Nothing."""


def attempt(
    files: dict[str, str], packages: Path, tmp_path: Path, script: tuple[Answer, ...]
) -> tuple[Any, str, list[Any]]:
    """What became of it, why it did not get ready alone, and what the agents were sent."""
    repo, alone, folder = write(tmp_path / "repo", files), tmp_path / "alone", tmp_path / "prepared"
    with pytest.raises(Unprepared) as without:
        asyncio.run(prepare(str(repo), installed(packages, alone), BOX, settings=LIMITS))
    with serving(*script) as server:
        agents = SetUpAgent(f"http://127.0.0.1:{server.server_port}/v1", "some-model")
        settings = PrepareSettings(LIMITS.source, LIMITS.baseline, set_up=agents)
        try:
            made: Any = asyncio.run(prepare(str(repo), installed(packages, folder), BOX, settings=settings))
        except Unprepared as error:
            made = str(error)
    return made, str(without.value), [body["messages"] for _, _, body in server.asked]


def answers(messages: list[Any]) -> list[str]:
    return [said["content"] for said in messages if said["role"] == "tool"]


def test_what_is_not_declared_is_added_and_other_hosts_are_refused(tmp_path: Path, deps: Path, index: int) -> None:
    elsewhere = "import urllib.request as u; u.urlopen('https://192.0.2.1/')"
    script = (
        new_file(".setup/packages/helper/__init__.py", "VALUE = 5\n"),
        call("run_command", command=f'python -c "{elsewhere}"'),
        call("run_command", command="python -c 'import helper; print(helper.__file__)'"),
        FINISH,
    )
    made, without, asked = attempt(UNDECLARED, deps, tmp_path, script)
    assert without == "the tests of repo cannot be imported (ModuleNotFoundError: No module named 'helper')"
    assert len(made.tests) == 12
    assert made.start == ""
    _, refused, place = answers(asked[-1])
    assert "403 192.0.2.1:443 is not on the allow-list" in refused
    assert place == "/app/.setup/packages/helper/__init__.py\n"
    assert (made.deps / "helper" / "__init__.py").is_file()
    assert without in asked[0][1]["content"]
    assert not (made.folder / "deps.before").exists()
    assert load_repository(made.folder) == made


def test_what_building_makes_is_made_in_every_sandbox_and_tasks_come_of_it(
    tmp_path: Path, deps: Path, index: int
) -> None:
    script = (
        call("run_command", command="python tools/make_table.py"),
        FINISH,  # only in its own sandbox, which is not kept
        new_file(".setup/start.sh", "python tools/make_table.py\n"),
        FINISH,
    )
    made, without, asked = attempt(GENERATED, deps, tmp_path, script)
    assert without.startswith("the tests of repo cannot be imported (ImportError: cannot import name '_table' from ")
    assert made.start == "python tools/make_table.py"
    assert len(made.tests) == 25
    assert not (made.tree / "pkg" / "_table.py").exists()
    assert not (made.tree / ".setup").exists()
    again = asked[-2][1]["content"]
    assert "What was wrong after your last try" in again
    assert "cannot import name '_table'" in again
    out = tmp_path / "out"
    source = str(tmp_path / "repo")
    (out / ".factory").mkdir(parents=True)
    shutil.move(made.folder, out / ".factory" / folder_name(source))
    (result,) = asyncio.run(make_tasks([source], out, BOX, MakeSettings(heldout=0.0)))
    assert [outcome.refused for outcome in result.outcomes] == [""], result
    (task,) = load_tasks(out / "train")
    assert task.suite.start == made.start
    write_whole(task, tmp_path / "whole")
    assert (tmp_path / "whole" / "environment" / "start.sh").read_text() == f"{made.start}\n"
    assert asyncio.run(check_gold(task, BOX)) == ""


def test_a_variable_and_a_service_get_stand_ins(tmp_path: Path, deps: Path, index: int) -> None:
    bank = "class _Bank:\n    def balance(self): return 7\n\ndef connect(url): return _Bank()\n"
    script = (
        new_file(".setup/packages/payments.py", bank),
        new_file(".setup/packages/sitecustomize.py", "import os\nos.environ.setdefault('BANK_URL', 'mock://')\n"),
        FINISH,
    )
    made, without, _ = attempt(SERVED, deps, tmp_path, script)
    assert without.startswith("the tests of repo cannot be imported (ModuleNotFoundError: No module named 'payments'")
    assert len(made.tests) == 13
    assert (made.deps / "payments.py").read_text() == bank
    assert sorted(path.name for path in (made.folder / "modules").iterdir()) == ["payments.py", "sitecustomize.py"]
    assert "COPY modules /modules\n" in dockerfile(made.suite)


def test_after_five_tries_nothing_is_left(tmp_path: Path, deps: Path, index: int) -> None:
    script = (new_file(".setup/packages/other.py", ""), FINISH)
    made, without, asked = attempt(UNDECLARED, deps, tmp_path, script)
    assert made == f"{without}; an agent could not set it up in 5 tries ({without})"
    assert len(asked) == 1 + 5
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["prepare.log"]


@pytest.mark.parametrize(
    ("url", "allow", "sentence"),
    [
        ("http://127.0.0.1:1/v1", "no host", "'no host' in the allow-list is not a host"),
        ("somewhere", "a.example.org", "the URL of the model server must look like https://host/v1, not somewhere"),
    ],
)
def test_what_is_no_host_or_url_is_said_at_once(url: str, allow: str, sentence: str) -> None:
    with pytest.raises(OffbookError, match=sentence):
        SetUpAgent(url, "some-model", (allow,))
