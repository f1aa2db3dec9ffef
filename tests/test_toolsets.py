"""Toolsets: other names, words and rules for every task, and always enough to solve it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toolbench import ALL, BASH_SET, one, session, small_tree

from offbook.agent.chat import SUBMIT, byte_chat
from offbook.agent.chat.dialects import parse_hermes as parse_calls
from offbook.agent.harness.tools import TOOLS
from offbook.agent.harness.toolsets import FINDING, NEEDED, WORDINGS, Toolset, make_toolset
from offbook.types import Limits, OffbookError, ToolCall


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return small_tree(tmp_path)


@pytest.mark.parametrize(
    ("command", "text", "over"),
    [
        ("[[ a == a ]] && echo hi", "<returncode>0</returncode>\n<output>\nhi\n</output>", False),
        ("echo it\\'s; false", "<returncode>1</returncode>\n<output>\nit's\n</output>", False),
        (
            "sleep 9",
            "<exception>stopped after 1 s</exception>\n<returncode>-1</returncode>\n<output>\n</output>",
            False,
        ),
        (f"echo {SUBMIT}; echo done", f"<returncode>0</returncode>\n<output>\n{SUBMIT}\ndone\n</output>", True),
        (f"echo {SUBMIT}; false", f"<returncode>1</returncode>\n<output>\n{SUBMIT}\n</output>", False),
        (f"echo no; echo {SUBMIT}", f"<returncode>0</returncode>\n<output>\nno\n{SUBMIT}\n</output>", False),
    ],
)
def test_bash_answers_like_mini_swe_agent(tree: Path, command: str, text: str, over: bool) -> None:
    call = ToolCall("bash", {"command": command})
    given_answer = one(tree, "bash", call.arguments, toolset=BASH_SET, limits=Limits(command_s=1))
    assert given_answer == text
    assert BASH_SET.finishes(call, given_answer) is over


solvable = (
    st.permutations(tuple(TOOLS))
    .flatmap(lambda names: st.integers(1, len(names)).map(lambda count: tuple(names[:count])))
    .filter(lambda names: not any(set(tools).isdisjoint(names) for tools in NEEDED.values()))
)
varied = st.builds(
    make_toolset, solvable, st.sampled_from(("pocket", "standard")), st.floats(0, 1), st.text(max_size=8)
)


@given(solvable, st.floats(0, 1), st.text(max_size=8))
def test_every_toolset_can_solve_its_task(names: tuple[str, ...], variation: float, seed: str) -> None:
    toolset = make_toolset(names, "standard", variation, seed)
    own = [shown.own_name for shown in toolset.tools.values()]
    assert set(own) <= set(names)
    assert len(set(own)) == len(own)
    assert not any(set(tools).isdisjoint(own) for tools in NEEDED.values())
    assert FINDING.isdisjoint(names) or not FINDING.isdisjoint(own)
    assert "finish" in own
    assert toolset == make_toolset(names, "standard", variation, seed)


@given(varied)
def test_names_shown_lead_back_to_the_tools_own(toolset: Toolset) -> None:
    for name, shown in toolset.tools.items():
        assert shown.name == name
        tool = TOOLS[shown.own_name]
        assert list(shown.parameters.values()) == list(tool.parameters.values())
        assert shown.function is tool.function
        assert name == tool.name or name not in TOOLS
    specs = toolset.specs()
    assert tuple(spec.name for spec in specs) == tuple(toolset.tools)
    for spec, shown in zip(specs, toolset.tools.values(), strict=True):
        needed = [name for name, parameter in shown.parameters.items() if parameter.required]
        assert spec.parameters["required"] == needed
        assert list(spec.parameters["properties"]) == list(shown.parameters)


def test_no_name_stands_for_two_things() -> None:
    assert set(WORDINGS) == set(TOOLS)
    names = [*TOOLS, *(name for wording in WORDINGS.values() for name in wording["names"])]
    assert len(set(names)) == len(names)
    for name, wording in WORDINGS.items():
        assert set(wording["parameters"]) == set(TOOLS[name].parameters)
        parameters = [*wording["parameters"], *(other for others in wording["parameters"].values() for other in others)]
        assert len(set(parameters)) == len(parameters), name
    for tool in TOOLS.values():
        words = " ".join(
            (
                tool.description,
                *WORDINGS[tool.name]["descriptions"],
                *(p.schema["description"] for p in tool.parameters.values()),
            )
        )
        assert not any(name in words for name in names if "_" in name), "a description names no tool"


def test_work_goes_on_under_other_names(tree: Path) -> None:
    names = ("read_file", "edit_file", "run_command", "finish")
    seen = set()
    for seed in range(6):
        toolset = make_toolset(names, "standard", 1.0, str(seed))
        called = {
            shown.own_name: (shown, {one.own_name: seen for seen, one in shown.parameters.items()})
            for shown in toolset.tools.values()
        }
        steps = []
        for name, arguments in (
            ("read_file", {"path": "README.md"}),
            ("run_command", {"command": "cat README.md"}),
            ("edit_file", {"path": "README.md", "old": "two", "new": "three"}),
            ("run_command", {"command": "sed -i s/two/three/ README.md && cat README.md"}),
            ("finish", {"message": "so"}),
        ):
            if name in called:
                shown, back = called[name]
                steps.append((shown.name, {back[own]: value for own, value in arguments.items()}))
                seen.add(shown.name)
        answers, changed = session(tree, *steps, toolset=toolset)
        assert changed == {"README.md": "Counts to three.\n"}
        assert answers[-1] == "done"
        assert toolset.finishes(ToolCall(*steps[-1]), "done")
        assert not toolset.finishes(ToolCall(*steps[0]), "done")
        assert toolset.check(ToolCall("read_file", {"path": "README.md"})) == "there is no tool read_file"
    assert len(seen) > 6


def test_a_lenient_toolset_says_what_it_ignores(tree: Path) -> None:
    lenient = Toolset(ALL.tools, strict=False, prompt="standard")
    extra = {"limit": 3, "why": "x"}
    note = "\n[ignored: {} takes no limit, why]"
    answers, _ = session(
        tree,
        ("read_file", {"path": "README.md", **extra}),
        ("read_file", {"path": "absent", **extra}),
        ("read_file", {"path": "../x", **extra}),
        ("run_tests", extra),
        ("read_file", {"path": "README.md", "start": "1"}),
        toolset=lenient,
    )
    assert answers[0] == "Counts to two.\n" + note.format("read_file")
    assert answers[1] == "failed: No such file or directory" + note.format("read_file")
    assert answers[2].startswith("failed: ")
    assert answers[2].endswith(note.format("read_file"))
    assert answers[3] == "failed: this task offers no tests to run" + note.format("run_tests")
    assert answers[4] == "malformed: start must be an integer"
    assert one(tree, "read_file", {"path": "README.md", **extra}) == "malformed: read_file takes no limit"


@pytest.mark.parametrize(
    ("names", "profile", "variation", "problem"),
    [
        (("read_files", "finish"), "standard", 0, "there is no tool read_files; did you mean read_file?"),
        (("read_file", "finish"), "pocket", 0, "the tools read_file, finish give no way to edit; add edit_file"),
        (("edit_file", "finish"), "pocket", 0, "the tools edit_file, finish give no way to read; add read_file"),
        (("run_command",), "pocket", 1, "the tools run_command give no way to finish; add finish"),
        (("finish", "finish"), "pocket", 0, "a tool is named twice in finish, finish"),
    ],
)
def test_toolsets_that_cannot_be(names: tuple[str, ...], profile: str, variation: float, problem: str) -> None:
    with pytest.raises(OffbookError) as error:
        make_toolset(names, profile, variation)
    assert str(error.value) == problem


def test_the_pocket_prompt_is_one_line() -> None:
    toolset = make_toolset(("run_command", "edit_file", "finish"), "pocket")
    assert toolset.system_prompt() == (
        "You are a coding agent. Call one tool at a time: run_command(command), edit_file(path, old, new), finish()"
    )


@given(varied)
def test_the_standard_prompt_holds_every_tool_as_json(toolset: Toolset) -> None:
    plain = Toolset(toolset.tools, toolset.strict, "standard")
    text = plain.system_prompt(byte_chat().telling(plain.specs()))
    block = text.split("<tools>\n")[1].split("\n</tools>")[0]
    functions = [json.loads(line)["function"] for line in block.split("\n")]
    assert [(tool["name"], tool["description"], tool["parameters"]) for tool in functions] == [
        (spec.name, spec.description, spec.parameters) for spec in toolset.specs()
    ]
    (call,) = parse_calls(text.split("two tags:\n\n")[1])
    assert (call.name, call.error) == ("the tool's name", None)
    assert ("anything else is an error" in text) is toolset.strict
    told = plain.system_prompt()
    assert text.startswith(told)
    assert "<tool" not in told
