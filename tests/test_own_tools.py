"""A user's own tools: from a file through the configuration into a rollout, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_harness import LIMITS, Says, answers, rollout_of
from test_harness import tree as tree  # a fixture
from test_remote import reply, serving
from test_rollout import rollout as offbook_rollout
from test_rollout import task as task  # a fixture

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import make_toolset
from offbook.agent.harness.own import own_tools
from offbook.core.config import ConfigError, load_config
from offbook.core.runfolder import RunFolder
from offbook.signals.monitors import check
from offbook.types import OffbookError, Rollout

READ_AND_WRITE = ("read_file", "edit_file", "finish")
SEVERAL = '''
import time
from typing import Annotated, Literal

from offbook.agent.harness import ToolFailed

def add(sandbox, one: Annotated[int, "the first"], other: float = 0.5, *, loud: bool = False, note: str | None = None) -> str:
    """Add two numbers
    and say so."""
    return f"{one + other:g}" + "!" * loud

async def write_down(sandbox, text: str) -> str:
    """Write a note."""
    if not text:
        raise ToolFailed("there is nothing to write")
    await sandbox.write("note.txt", text)
    return await sandbox.read("../../etc/passwd") if text == "out" else "written"

def pick(sandbox, words: list[str], which: Literal["first", "last"] = "first") -> str:
    """Pick a word."""
    return words[0 if which == "first" else -1]

def breaks(sandbox) -> str:
    """Breaks."""
    return 1 / 0

def tells_nothing(sandbox) -> str:
    """Tells nothing."""

def _helper(sandbox):
    return "no tool"
'''  # noqa: E501


def documented() -> str:
    page = (Path(__file__).parent.parent / "docs" / "tools.md").read_text()
    return page.partition("<!-- example -->\n```python\n")[2].partition("```\n<!-- end -->")[0]


def written(folder: Path, source: str) -> str:
    (folder / "my_tools.py").write_text(source)
    return str(folder / "my_tools.py")


def work(tree: Path, chat: ChatFormat, file: str, *calls: tuple[str, dict], **world) -> Rollout:
    policy = Says(chat, *(render_call(name, arguments) for name, arguments in calls))
    return rollout_of(tree, policy, chat, tools=READ_AND_WRITE, own_tools=own_tools([file]), **world)


def test_the_documented_example_in_a_run(task: Path, tmp_path: Path) -> None:
    """From the command line, with a model behind a URL that is told of it."""
    written(tmp_path, documented())
    said = [reply(None, ("uses_of", json.dumps({"word": "def"}))), reply(None, ("finish", "{}"))]
    options = ["--tools.files", '["my_tools.py"]', "--tools.add", '["uses_of"]']
    with serving(*said) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = offbook_rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run", *options)
    assert done.returncode == 0, done.stderr
    (kept,), _ = RunFolder.open(tmp_path / "run").rollouts(0)
    assert kept.tools[-1] == "uses_of"
    ((status, text), _) = answers(kept)
    assert status == "ok"
    assert "./pkg.py:1" in text.splitlines()


def test_calls_are_held_to_the_annotations_and_what_breaks_stays_inside(
    tree: Path, chat: ChatFormat, tmp_path: Path
) -> None:
    calls = [
        ("add", {"one": 1}),
        ("add", {"one": 1, "other": 2, "loud": True}),
        ("add", {"one": "1"}),
        ("add", {"one": 1, "other": True}),
        ("add", {"other": 1.5}),
        ("add", {"one": 1, "third": 3}),
        ("pick", {"words": ["a", "b"], "which": "last"}),
        ("pick", {"words": "a"}),
        ("pick", {"words": ["a", 2]}),
        ("pick", {"words": ["a"], "which": "middle"}),
    ]
    more = [
        ("write_down", {"text": "a note"}),
        ("write_down", {"text": ""}),
        ("write_down", {"text": "out"}),
        ("breaks", {}),
        ("tells_nothing", {}),
        ("_helper", {}),
    ]
    added = ("add", "write_down", "pick", "breaks", "tells_nothing")
    (tmp_path / "own").mkdir()
    file = written(tmp_path / "own", SEVERAL)
    limits = replace(LIMITS, turns=20)
    first, second = (work(tree, chat, file, *part, added=added, limits=limits) for part in (calls, more))
    assert answers(first)[:-1] == [
        ("ok", "1.5"),
        ("ok", "3!"),
        ("malformed", "error: one must be an integer"),
        ("malformed", "error: other must be a number"),
        ("malformed", "error: add needs one"),
        ("malformed", "error: add takes no third"),
        ("ok", "b"),
        ("malformed", "error: words must be a list of strings"),
        ("malformed", "error: item 2 of words must be a string"),
        ("malformed", "error: which must be one of first, last"),
    ]
    assert answers(second)[:-1] == [
        ("ok", "written"),
        ("failed", "error: there is nothing to write"),
        ("failed", "error: ../../etc/passwd is outside of the repository"),
        ("failed", "error: the tool broke; try another way"),
        ("failed", "error: the tool broke; try another way"),
        ("unknown_tool", "error: there is no tool _helper"),
    ]
    assert [event.kind for event in second.events] == ["path_refused", "tool_crash", "tool_crash", "unknown_tool"]
    assert "which is no text" in second.events[2].detail
    assert second.stop == "finish"
    assert second.changed["note.txt"] == "out"
    for rollout in (first, second):  # monitors know nothing of such tools
        check(None, rollout)


def test_an_agent_is_told_of_it(tmp_path: Path) -> None:
    own = own_tools([written(tmp_path, SEVERAL)])
    toolset = make_toolset((*READ_AND_WRITE, "add"), own=own)
    spec = toolset.specs()[-1]
    assert (spec.name, spec.description) == ("add", "Add two numbers and say so.")
    kinds = {name: schema["type"] for name, schema in spec.parameters["properties"].items()}
    assert kinds == {"one": "integer", "other": "number", "loud": "boolean", "note": "string"}
    assert spec.parameters["properties"]["one"]["description"] == "the first"
    assert spec.parameters["required"] == ["one"]
    assert make_toolset((*READ_AND_WRITE, "add"), "pocket", own=own).system_prompt().endswith("finish(), add(one)")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def add(sandbox):\n    return ''\n", r"add of .*my_tools\.py needs a docstring"),
        ('def add():\n    """Add."""\n', "needs a first parameter, which is the sandbox"),
        ('def add(sandbox, one):\n    """Add."""\n', "the tool add of .* must annotate one as str, int, float, bool"),
        ('def add(sandbox, one: list[bytes]):\n    """Add."""\n', "must annotate one"),
        ('def add(sandbox, one: int | str):\n    """Add."""\n', "must annotate one"),
        ('def add(sandbox, *one: int):\n    """Add."""\n', "must annotate one"),
        (
            'def add(sandbox, one: "Absent"):\n    """Add."""\n',
            "annotations of the tool add of .* cannot be read: NameError",
        ),
        ('def read_file(sandbox):\n    """Read."""\n', "two tools called read_file; give the one in"),
        ('def grep(sandbox):\n    """Search, as a varied toolset may call it."""\n', "two tools called grep"),
        ("def f(:\n", r"my_tools\.py cannot be loaded: SyntaxError"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(OffbookError, match=sentence):
        own_tools([written(tmp_path, source)])


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match=r"no file absent\.py with tools; tools\.files are paths"):
        own_tools(["absent.py"])
    with pytest.raises(OffbookError, match="there is no tool ad; did you mean add"):
        make_toolset((*READ_AND_WRITE, "ad"), own=own_tools([written(tmp_path, SEVERAL)]))
    with pytest.raises(ConfigError, match=r"bash has one tool; leave tools\.add out"):
        load_config([], {"tools.add": '["add"]', "harness.profile": "bash"})
