"""Behaviours on real rollouts, and how parts are put together, a user's own included."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_remote import reply, serving
from test_rollout import rollout as offbook_rollout
from test_rollout import task as task  # a fixture

from offbook.agent.chat import ChatFormat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.agent.harness.toolsets import make_toolset
from offbook.core.config import HarnessConfig, RewardsConfig
from offbook.core.runfolder import RunFolder
from offbook.rl.train_step import summarize
from offbook.sandbox import ProcessSandbox
from offbook.signals.rewards import Part, Rewards, compose
from offbook.signals.rewards.behaviour import PARTS
from offbook.signals.trajectory import Trajectory
from offbook.signals.trajectory.lint import findings
from offbook.types import Completion, Limits, OffbookError, Prompt, Reward, Rollout, Task

TOOLS = ("read_file", "edit_file", "run_command", "todo", "finish")
CALC = '"""Sums."""\n\n\ndef one():\n    return 0\n'
LIMITS = Limits(turns=12, tokens=60_000, context=60_000, message_tokens=6_000)
Step = tuple[str, dict[str, Any]] | str


class Says:
    """A policy that makes the given calls under whatever names the task shows, or says the given words."""

    def __init__(self, chat: ChatFormat, names: dict[str, tuple[str, dict[str, str]]], steps: tuple[Step, ...]):
        self.chat, self.names, self.steps = chat, names, list(steps)

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        step = self.steps.pop(0)
        text = step if isinstance(step, str) else self._call(*step)
        ids = [*self.chat.encode(text), self.chat.end_id]
        return Completion(ids, [-0.1] * len(ids), [0] * len(ids))

    def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        name, parameters = self.names.get(tool, (tool, {}))
        return render_call(name, {parameters.get(key, key): value for key, value in arguments.items()})


@pytest.fixture
def work(tmp_path: Path, chat: ChatFormat) -> Any:
    """A rollout of the given steps in a real sandbox, and its task."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "calc.py").write_text(CALC)

    def run(*steps: Step, tools: tuple[str, ...] = TOOLS, variation: float = 0.0) -> tuple[Task, Rollout]:
        made = Task("t", tree, "Make one return 1.", tree, tree, (), (), (), tools, "test")
        shown = make_toolset(tools, "standard", variation, seed="t").tools
        names = {
            tool.own_name: (name, {one.own_name: other for other, one in tool.parameters.items()})
            for name, tool in shown.items()
        }

        async def go() -> Rollout:
            async with ProcessSandbox(tree) as sandbox:
                policy = Says(chat, names, steps)
                return await run_agent(made, sandbox, policy, chat, Harness(LIMITS, variation=variation), "r", "g")

        return made, asyncio.run(go())

    return run


def edit(new: str, old: str = "return 0", path: str = "calc.py") -> Step:
    return "edit_file", {"path": path, "old": old, "new": new}


def todos(*states: str) -> Step:
    return "todo", {"items": [{"text": f"step {n}", "status": state} for n, state in enumerate(states)]}


READ: Step = ("read_file", {"path": "calc.py"})
LOOK: Step = ("run_command", {"command": "cat calc.py"})
FINISH: Step = ("finish", {})


def test_a_plain_good_rollout_loses_nothing(work: Any) -> None:
    done = ("finish", {"message": "calc.py: one returns 1 now."})
    task, rollout = work(READ, todos("pending"), edit("return 1"), LOOK, todos("done"), done)
    assert rollout.changed
    assert {name: part(task, rollout) for name, part in PARTS.items()} == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize(("broken", "value"), [(0, 0.0), (2, -0.4), (5, -1.0), (7, -1.0)])
def test_broken_calls(work: Any, broken: int, value: float) -> None:
    steps = [("open_file", {"path": "x"}), ("read_file", {"file": "x"})] * 4
    assert PARTS["broken_calls"](*work(*steps[:broken], FINISH)) == pytest.approx(value)


@pytest.mark.parametrize("variation", [0.0, 1.0])
def test_open_todos_are_those_of_the_last_list(work: Any, variation: float) -> None:
    """Also where the tool has another name."""
    tools = ("read_file", "edit_file", "todo", "finish")
    shown = make_toolset(tools, "standard", variation, seed="t")
    assert "todo" in {tool.own_name for tool in shown.tools.values()}, "this seed keeps it"
    steps = (todos("pending", "pending"), todos("done", "in_progress", "pending", "done"), FINISH)
    assert PARTS["open_todos"](*work(*steps, tools=tools, variation=variation)) == -0.5
    refused = ("todo", {"items": [{"text": "x", "status": "maybe"}]})
    assert PARTS["open_todos"](*work(todos("done"), refused, FINISH, tools=tools, variation=variation)) == 0
    assert PARTS["open_todos"](*work(READ, FINISH, tools=tools, variation=variation)) == 0


def test_lint_counts_what_the_change_added(work: Any) -> None:
    assert PARTS["lint"](*work(edit("import os\n    x = 1\n    return 1"), FINISH)) == pytest.approx(-0.2)
    assert PARTS["lint"](*work(edit("return (1"), FINISH)) == pytest.approx(-0.1)
    assert PARTS["lint"](*work(edit("import os", "", "tests/test_new.py"), FINISH)) == 0


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("syntax", "def f(:\n"),
        ("unused_import", "import os\n"),
        ("unused_variable", "def f():\n    x = 1\n"),
        ("bare_except", "try:\n    pass\nexcept:\n    pass\n"),
        ("mutable_default", "def f(x=[]):\n    return x\n"),
    ],
)
def test_findings(kind: str, source: str) -> None:
    assert findings("a.py", source) == {kind: 1}


@pytest.mark.parametrize(
    "source",
    [
        "import os\n\n__all__ = ['os']\n",
        "from __future__ import annotations\n",
        "from a import b as b\n",
        "def f(x):\n    y = 0\n    y += x\n\n    def g():\n        nonlocal y\n        y = 1\n    return g\n",
        "class A:\n    x = 1\n",
        "def f():\n    class A:\n        x = 1\n    return A\n",
        "import typing\n\nx: 'typing.Any' = 1\n",
    ],
)
def test_no_findings(source: str) -> None:
    assert not findings("a.py", source)


def test_findings_in_the_projects_own_source_are_none() -> None:
    package = Path(__file__).parent.parent / "src" / "offbook" / "trajectory"
    assert {path.name: dict(findings(str(path), path.read_text())) for path in package.glob("*.py")} == {
        path.name: {} for path in package.glob("*.py")
    }


@given(st.text(alphabet="def f(x):\n \t=#'\"\\\0é1", max_size=60))
def test_any_text_has_findings_or_none(source: str) -> None:
    assert all(count > 0 for count in findings("a.py", source).values())


@pytest.mark.parametrize(
    ("new", "value"),
    [
        ("return 1", 0.0),
        ("# why\n    a = 1\n    b = 1\n    return a * b", 0.0),
        ("# so\n    # and so\n    # and so\n    return 1", -(0.75 - 0.25) / 0.75),
        ("# only this\n    # is said", -1.0),
        ("return '# no comment'", 0.0),
    ],
)
def test_comments(work: Any, new: str, value: float) -> None:
    assert PARTS["comments"](*work(edit(new), FINISH)) == pytest.approx(value)


def test_comments_that_were_there_are_not_counted(work: Any, tmp_path: Path) -> None:
    (tmp_path / "tree" / "calc.py").write_text("# a\n# b\n# c\n" + CALC)
    assert PARTS["comments"](*work(edit("return 1"), FINISH)) == 0
    docstring = 'def two():\n    """One.\n\n    Two.\n    """\n    return 2\n'
    assert PARTS["comments"](*work(edit(docstring, "", "new.py"), FINISH)) == 0


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        ((READ, "Should it return 1 or 2?"), -1.0),
        ((READ, ("finish", {"message": "Which one do you mean?"})), -1.0),
        ((edit("return 1"), "Done. Anything else?"), 0.0),
        ((READ, "It returns 0 already."), 0.0),
        ((READ, "I would write `x if y? else z`."), 0.0),
        ((READ, "<think>Is it 1?</think>It is 1."), 0.0),
    ],
)
def test_question_instead_of_action(work: Any, steps: tuple[Step, ...], value: float) -> None:
    assert PARTS["question"](*work(*steps)) == value


@pytest.mark.parametrize(
    ("closing", "missing"),
    [
        (("finish", {"message": "calc.py returns 1 now."}), 0),
        (("finish", {"message": "I mended one()."}), 0),
        ("The function `one` returns 1 now.", 0),
        (("finish", {"message": "All is well, someone said."}), 1),
        (("finish", {"message": "calc.py " + "word " * 150}), 1),
        (FINISH, 3),
    ],
)
def test_final_word(work: Any, closing: Step, missing: int) -> None:
    assert PARTS["final_word"](*work(edit("return 1"), closing)) == pytest.approx(-missing / 3)


@pytest.mark.parametrize("variation", [0.0, 1.0])
def test_the_final_message_is_found_under_any_name(work: Any, variation: float) -> None:
    _, rollout = work(READ, ("finish", {"message": "All done."}), variation=variation, tools=TOOLS[:2] + TOOLS[4:])
    assert rollout.stop == "finish"
    assert Trajectory(rollout).final == "All done."


@pytest.mark.parametrize(
    ("steps", "value"),
    [((LOOK, LOOK), -1.0), ((LOOK, READ), 0.0), ((LOOK, LOOK, LOOK, READ), -0.5), ((READ,), 0.0), ((), 0.0)],
)
def test_terminal_only(work: Any, steps: tuple[Step, ...], value: float) -> None:
    assert PARTS["terminal_only"](*work(*steps, FINISH)) == pytest.approx(value)


@pytest.mark.parametrize(("stop", "value"), [("finish", 0.0), ("answer", 0.0), ("turns", -1.0), ("context", -1.0)])
def test_unfinished(work: Any, stop: Any, value: float) -> None:
    task, rollout = work(FINISH)
    assert PARTS["unfinished"](task, replace(rollout, stop=stop, changed={"a.py": "x = 1\n"})) == value
    assert PARTS["unfinished"](task, replace(rollout, stop=stop, changed={})) == -1, "giving up is no end of the work"


def test_a_rollout_that_crashed_is_scored_too(tmp_path: Path) -> None:
    task = Task("t", tmp_path, "", tmp_path, tmp_path, (), (), (), TOOLS, "test")
    for part in PARTS.values():
        assert -1 <= part(task, Rollout("r", "t", "g", TOOLS)) <= 0


# Composition


def config(*files: Path, **weights: float) -> RewardsConfig:
    return RewardsConfig(files=[str(file) for file in files], weights=weights)


def scored(rewards: Rewards, outcome: float = 1.0) -> Rollout:
    rollout = Rollout("r7", "t", "g", TOOLS, reward=Reward({"outcome": outcome}))
    rewards.score(Task("t", Path(), "", Path("/absent"), Path(), (), (), (), TOOLS, ""), rollout)
    return rollout


def own(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(source)
    return path


def test_parts_stay_apart_and_add_up(tmp_path: Path) -> None:
    file = own(tmp_path, "import math\n\ndef half(task, rollout):\n    return 0.5\n\ndef _helper():\n    return 1\n")
    rollout = scored(compose(config(file, half=2.0, final_word=0.3, question=0.0), HarnessConfig()))
    assert rollout.reward.parts == {"outcome": 1.0, "half": 0.5, "final_word": -2 / 3}
    assert rollout.reward.weights == {"half": 2.0, "final_word": 0.3}
    assert rollout.reward.total == pytest.approx(1 + 1 - 0.2)
    numbers = summarize([[rollout, Rollout("s", "t", "g", TOOLS, reward=Reward({"outcome": 0.0}))]])
    assert (numbers["reward/outcome"], numbers["reward/half"]) == (0.5, 0.25)


def test_a_file_may_hold_a_dataclass(tmp_path: Path) -> None:
    kept = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass K:\n    x: float\n"
    )
    file = own(tmp_path, f"{kept}\ndef half(task, rollout):\n    return K(0.5).x\n")
    assert scored(compose(config(file, half=1.0), HarnessConfig())).reward.total == 1.5


def test_zero_has_no_sign() -> None:
    value = scored(compose(config(broken_calls=0.1), HarnessConfig())).reward.parts["broken_calls"]
    assert math.copysign(1, value) == 1


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"broken_cals": 0.1}, "there is no reward broken_cals; did you mean broken_calls?"),
        ({"outcome": 2.0}, "the outcome has the weight 1"),
        ({"effort": 0.2}, "rewards.effort.bound"),
        ({"lint": -0.1}, "rewards.weights.lint is -0.1; it must not be negative"),
        ({"lint": 0.5, "comments": 0.5}, "add up to 1; they must stay below 1"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: dict[str, float], sentence: str) -> None:
    with pytest.raises(OffbookError, match=".*" + sentence.replace("?", r"\?")):
        compose(config(**weights), HarnessConfig())


@pytest.mark.parametrize(
    ("source", "weights", "sentence"),
    [
        ("def half(task, rollout):\n    return 0.5\n", {}, "has half; give one of them a weight"),
        ("x = 1\n", {"half": 1.0}, "has no functions"),
        ("from textwrap import dedent as half\n", {"half": 1.0}, "has no functions"),
        ("def lint(task, rollout):\n    return 0.5\n", {"lint": 0.1}, "two rewards called lint"),
        ("def f(:\n", {"f": 1.0}, "my_rewards.py cannot be loaded: SyntaxError"),
        ("import absent_module\n", {"f": 1.0}, "cannot be loaded: ModuleNotFoundError"),
        ("def half(task, rollout):\n    return 1\n", {"half": 1.0, "third": 1.0}, "there is no reward third"),
    ],
)
def test_files_that_make_no_sense_are_refused(
    tmp_path: Path, source: str, weights: dict[str, float], sentence: str
) -> None:
    with pytest.raises(OffbookError, match=sentence):
        compose(config(own(tmp_path, source), **weights), HarnessConfig())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match=r"there is no file .*absent\.py with rewards"):
        compose(config(tmp_path / "absent.py", half=1.0), HarnessConfig())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return 1 / 0", "broke on rollout r7: ZeroDivisionError: division by zero"),
        ("raise ValueError('one\\ntwo')", "broke on rollout r7: ValueError: one$"),
        ("raise OSError('disk')", "broke on rollout r7: OSError: disk"),
        ("return float('nan')", "gave nan for rollout r7; a part is a finite number"),
        ("return float('-inf')", "gave -inf"),
        ("return None", "gave None"),
        ("return '1'", "gave '1'"),
        ("return True", "gave True"),
    ],
)
def test_a_reward_that_breaks_names_itself(tmp_path: Path, body: str, sentence: str) -> None:
    rewards = compose(config(own(tmp_path, f"def half(task, rollout):\n    {body}\n"), half=1.0), HarnessConfig())
    with pytest.raises(OffbookError, match=r"the reward half of .*my_rewards\.py " + sentence.split("(")[0]):
        scored(rewards)


def test_a_numpy_number_is_a_number() -> None:
    import numpy

    rewards = Rewards((Part("n", 1.0, lambda task, rollout: numpy.float64(0.5)),))
    assert scored(rewards).reward.total == 1.5


# From the command line


def example() -> str:
    page = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    return page.partition("<!-- example -->\n```python\n")[2].partition("```\n<!-- end -->")[0]


def test_the_documented_example_scores_a_rollout(task: Path, tmp_path: Path) -> None:
    own(tmp_path, example())
    change = {"path": "pkg.py", "old": 'raise NotImplementedError("one")', "new": "return 1"}
    look = reply(None, ("run_command", json.dumps({"command": "cat pkg.py"})))
    answers = [reply(None, ("edit_file", json.dumps(change))), look, reply(None, ("finish", "{}"))]
    weights = {"small_change": "0.1", "looked_at_result": "0.05", "final_word": "0.3"}
    options = [part for name, weight in weights.items() for part in (f"--rewards.weights.{name}", weight)]
    options += ["--rewards.files", '["my_rewards.py"]', "--rewards.effort.bound", "0.2"]
    with serving(*answers) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = offbook_rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run", *options)
    assert done.returncode == 0, done.stderr
    (kept,), _ = RunFolder.open(tmp_path / "run").rollouts(0)
    parts = kept.reward.parts
    assert set(parts) == {"outcome", "effort", "small_change", "looked_at_result", "final_word"}
    assert (parts["outcome"], parts["small_change"], parts["looked_at_result"], parts["final_word"]) == (1, 0, 1, -1)
    assert -1 < parts["effort"] < 0
    assert json.loads(done.stdout)["reward/looked_at_result"] == 1
    assert kept.reward.total == pytest.approx(1 + 0.2 * parts["effort"] + 0.05 - 0.3)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def half(task, rollout):\n    raise OSError('gone')\n", "the reward half of my_rewards.py broke on rollout"),
        ("def halve(task, rollout):\n    return 1\n", "my_rewards.py has halve; give one of them a weight"),
    ],
)
def test_a_broken_reward_ends_the_run_with_one_sentence(task: Path, tmp_path: Path, source: str, sentence: str) -> None:
    own(tmp_path, source)
    options = ["--rewards.files", '["my_rewards.py"]', "--rewards.weights.half", "1"]
    with serving(reply(None, ("finish", "{}"))) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = offbook_rollout(tmp_path, str(task), "--model", url, "--name", "scripted", "--out", "run", *options)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0
