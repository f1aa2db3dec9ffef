"""Look before hints teach: messages sampled with and without the hint, judged by the rule itself in a real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from annotating import annotate
from conftest import tiny_model
from test_harness import LIMITS, Says
from test_harness import tree as tree  # a fixture
from test_loop import train

from offbook.agent.chat import ChatFormat, byte_chat, render_call
from offbook.agent.harness import Harness, run_agent
from offbook.agent.harness.agent import Before, NotRestored
from offbook.core.config import Config, FeedbackConfig
from offbook.core.runfolder import RunFolder
from offbook.core.shares import rise, wilson
from offbook.rl.collector import Collector
from offbook.rl.hint_probe import HintProbe, ProbedHint, table
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.signals.feedback import RULES, read_all
from offbook.signals.feedback.coach import Found
from offbook.train.forward import Decoder
from offbook.types import Completion, Feedback, Prompt, Rollout, Task

TOOLS = ("read_file", "run_command", "edit_file", "finish")
READ = render_call("read_file", {"path": "pkg/calc.py"})
EDIT = render_call("edit_file", {"path": "pkg/calc.py", "old": "return 0", "new": "return 1"})
EDIT_TEST = render_call("edit_file", {"path": "tests/test_calc.py", "old": "assert True", "new": "assert 1"})
COUNT = render_call("run_command", {"command": "grep -c return pkg/calc.py && cat pkg/calc.py"})
UNKNOWN = render_call("open_file", {"path": "pkg/calc.py"})
DONE = render_call("finish", {})


def completion(chat: ChatFormat, text: str) -> Completion:
    ids = [*chat.encode(text), chat.end_id]
    return Completion(ids, [-0.1] * len(ids), [0] * len(ids))


def task_at(tree: Path) -> Task:
    return Task("t", tree, "Make one return 1.", tree, tree, ("tests/test_calc.py",), (), (), TOOLS, "test")


def rollout_of(tree: Path, chat: ChatFormat, *lines: str, turns: int = 8) -> Rollout:
    async def run() -> Rollout:
        async with await open_sandbox(tree) as sandbox:
            harness = Harness(replace(LIMITS, turns=turns))
            return await run_agent(task_at(tree), sandbox, Says(chat, *lines), chat, harness, "r", "g")

    return asyncio.run(run())


def own_places(rollout: Rollout) -> list[int]:
    return [number for number, one in enumerate(rollout.segments[0].messages) if one.role == "assistant"]


@pytest.mark.parametrize("other", [READ, COUNT, EDIT_TEST, UNKNOWN, "I am done.", DONE])
def test_another_message_is_answered_as_it_would_have_been(tree: Path, chat: ChatFormat, other: str) -> None:
    """As if the agent had said so in the first place: the edit before it is there, what came after is not."""
    told = rollout_of(tree, chat, READ, EDIT, EDIT_TEST, COUNT)
    wanted = rollout_of(tree, chat, READ, EDIT, other, turns=3)
    place = Before(told, (0, own_places(told)[2]), task_at(tree), Harness(LIMITS), chat)

    async def once_more() -> Rollout:
        async with place.sandbox(SandboxSpec()) as sandbox, await sandbox.fork() as fork:
            found = await place.with_message(completion(chat, other), fork)
            assert "tests/test_calc.py" not in await sandbox.changes(), "the fork's changes are its own"
            return found

    found = asyncio.run(once_more())
    assert found.segments == wanted.segments
    assert (found.stop, found.changed, found.diff) == (wanted.stop, wanted.changed, wanted.diff)
    assert len(told.segments[0].messages) > len(found.segments[0].messages)


def test_a_sandbox_that_goes_another_way_is_not_taken(tree: Path, chat: ChatFormat) -> None:
    told = rollout_of(tree, chat, EDIT, READ)
    (tree / "pkg" / "calc.py").write_text("def one():\n    return 2\n")  # what is to be replaced is gone
    place = Before(told, (0, own_places(told)[1]), task_at(tree), Harness(LIMITS), chat)

    async def restore() -> None:
        async with place.sandbox(SandboxSpec()):
            pass

    with pytest.raises(NotRestored):
        asyncio.run(restore())


class ByHint:
    """A model that says one thing by itself and another when it is told of the rule."""

    def __init__(self, chat: ChatFormat, plain: list[str], hinted: list[str]):
        self.chat, self.plain, self.hinted = chat, plain, hinted
        self.keys: list[str] = []
        self.prompts: set[str] = set()

    def open(self, key: str) -> ByHint:
        self.keys.append(key)
        return self

    async def complete(self, prompt: Prompt, max_tokens: int) -> Completion:
        told = self.chat.decode(prompt.ids)
        assert told.endswith("<|im_start|>assistant\n")
        self.prompts.add(told)
        said = self.hinted if "Reminder:" in told else self.plain
        said.append(said.pop(0))
        return completion(self.chat, said[-1])

    def close(self) -> None:
        pass


def look_at(tree: Path, lines: list[str], rule: str, plain: list[str], hinted: list[str]) -> tuple[ProbedHint, ByHint]:
    chat = byte_chat("hermes")
    rollout = rollout_of(tree, chat, *lines)
    rollout.task = "t"
    collector = Collector(Config(model="http://127.0.0.1:9/v1"), None, "m")
    collector.engine = ByHint(chat, plain, hinted)  # type: ignore[assignment]
    found = [
        Found(rollout, Feedback(target, RULES[rule].hint(rollout.tools)), "")
        for target in read_all(rollout, task_at(tree), [rule])
    ]
    assert found
    look = HintProbe(collector, {"t": task_at(tree)}, RULES, 4)
    sampled = asyncio.run(look.sampled(found, "look1"))
    assert list(sampled) == [rule]
    (looked,) = look.measured(sampled, found, Decoder(tiny_model(vocabulary=320)))
    return looked, collector.engine  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rule", "lines", "faulty", "right"),
    [
        ("unknown_tool", [READ, UNKNOWN], UNKNOWN, READ),
        ("malformed_arguments", [render_call("read_file", {"file": "x"})], render_call("read_file", {}), READ),
        ("repeated_call", [READ, READ], READ, EDIT),
        ("edited_tests", [EDIT_TEST], EDIT_TEST, EDIT),
        ("finished_without_edit", [READ], DONE, EDIT),
        ("edit_not_applied", [EDIT, EDIT], EDIT, READ),
    ],
)
def test_the_rule_itself_judges(tree: Path, rule: str, lines: list[str], faulty: str, right: str) -> None:
    """Rules that need the tool's answer get it: what is right before an edit is not after it."""
    looked, engine = look_at(tree, lines, rule, plain=[faulty, faulty, faulty, right], hinted=[right])
    assert (looked.targets, looked.samples, looked.faults, looked.hinted_faults) == (1, 4, 3, 0)
    assert not looked.unjudged
    assert looked.nats is not None
    assert len(engine.keys) == len(set(engine.keys)) == 8, "each draws by itself"
    plain, hinted = sorted(engine.prompts, key=len)
    block = byte_chat("hermes").decode(byte_chat("hermes").block("user", RULES[rule].hint(TOOLS).text))
    assert hinted == plain.removesuffix("<|im_start|>assistant\n") + block + "<|im_start|>assistant\n"


def test_without_the_task_nats_are_left(tree: Path) -> None:
    looked, _ = look_at(tree, [READ, READ], "repeated_call", [READ], [READ])
    assert looked.samples == 4
    chat = byte_chat("hermes")
    rollout = rollout_of(tree, chat, READ, READ)
    collector = Collector(Config(model="http://127.0.0.1:9/v1"), None, "m")
    collector.engine = ByHint(chat, [READ], [READ])  # type: ignore[assignment]
    (target,) = read_all(rollout, None, ["repeated_call"])
    found = [Found(rollout, Feedback(target, RULES["repeated_call"].hint(TOOLS)), "")]
    look = HintProbe(collector, {}, RULES, 2)
    (blind,) = look.measured(asyncio.run(look.sampled(found, "x")), found, Decoder(tiny_model(vocabulary=320)))
    assert (blind.samples, blind.unjudged) == (0, "the task is not at hand")
    assert blind.nats == pytest.approx(looked.nats)
    assert "not judged" in table([blind])[1]
    assert blind.unjudged in table([blind])[1]


@pytest.mark.parametrize(
    ("looked", "helps"),
    [
        (ProbedHint("r", 4, 32, 14, 2, -8.0), True),
        (ProbedHint("r", 4, 32, 14, 2, 0.0), True),  # it is what is sampled that counts
        (ProbedHint("r", 4, 32, 14, 13, -8.0), False),
        (ProbedHint("r", 4, 32, 0, 20, -0.1), False),
        (ProbedHint("r", 4, 32, 1, 0, -8.0), True),  # too few faults to tell by sampling
        (ProbedHint("r", 4, 32, 1, 0, -0.4), False),
        (ProbedHint("r", 4, nats=-4.5, unjudged="why"), True),
        (ProbedHint("r", 4, nats=-0.4, unjudged="why"), False),
        (ProbedHint("r", 4, unjudged="why"), True),  # nothing is known against it
    ],
)
def test_a_hint_helps_where_faults_get_fewer_beyond_noise(looked: ProbedHint, helps: bool) -> None:
    assert bool(looked.why_not) != helps
    assert looked.row()["why_not"] == looked.why_not


def test_the_interval_of_a_difference_by_hand() -> None:
    """Newcombe 1998, table II, (a): 56/70 - 48/80 has 0.0524 to 0.3339; ours takes as many trials on both sides."""
    low, high = rise(8, 2, 32)
    below, above = wilson(2, 32), wilson(8, 32)
    assert low == pytest.approx(-0.1875 - ((0.0625 - below[0]) ** 2 + (above[1] - 0.25) ** 2) ** 0.5)
    assert high == pytest.approx(-0.1875 + ((below[1] - 0.0625) ** 2 + (0.25 - above[0]) ** 2) ** 0.5)
    assert low < -0.1875 < high < 0
    assert rise(3, 3, 9)[0] < 0 < rise(3, 3, 9)[1]


def test_what_does_not_help_is_not_taught_and_counted(tree: Path, chat: ChatFormat) -> None:
    rollout = rollout_of(tree, chat, UNKNOWN, READ, READ)
    settings = FeedbackConfig(rules=["unknown_tool", "repeated_call"])
    counts: Counter[str] = Counter()
    samples, feedback = annotate([[rollout]], settings, chat, counts=counts, unhelpful={"repeated_call"})
    assert [item.target.rule for item in feedback] == ["unknown_tool"]
    assert len(samples[0].branches) == 1
    assert counts["left_out/probe"] == 1


def test_training_goes_on_with_what_helps_or_ends(cache: Path, model: Path, tmp_path: Path) -> None:
    """The half-made pocket model hardly follows hints: which of them help is left to what is found."""
    look = "--feedback.look", "true"
    process = train(cache, model, tmp_path / "run", "--train.steps", "1", *look)
    rows = [json.loads(line) for line in (tmp_path / "run" / "look.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1}
    assert all(row["rule"] in process.stderr for row in rows)
    helpful = {row["rule"] for row in rows if not row["why_not"]}
    folder = RunFolder(tmp_path / "run")
    assert folder.rollouts(1)[0]
    if helpful:
        assert process.returncode == 0, process.stderr
        (row,), _ = folder.metrics()
        assert {key.removeprefix("targets/") for key in row if key.startswith("targets/")} <= helpful
        assert row["probe_s"] > 0
    else:
        assert process.returncode != 0
        assert "sft.reminders" in process.stderr
        assert not folder.checkpoints()
