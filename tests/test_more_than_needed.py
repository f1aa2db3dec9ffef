"""The rule that looks at the group: a rollout that spent far more than its siblings, at the call where that begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from annotating import annotate
from conftest import tiny_model
from test_look import ByHint
from test_rules import Turn, edit, played, sh
from test_rules import tree as tree  # a fixture

from offbook.agent.chat import ChatFormat, render_call
from offbook.core.config import Config, FeedbackConfig
from offbook.rl.collector import Collector
from offbook.rl.hint_probe import HintProbe
from offbook.signals.feedback import RULES, more_than_needed, read_all, unneeded
from offbook.signals.feedback.coach import Found, Stored, by_rules
from offbook.signals.feedback.rules.calls import spent
from offbook.signals.trajectory import Trajectory, with_siblings
from offbook.stages.reminders import read
from offbook.train.forward import Decoder
from offbook.types import Event, Feedback, Rollout

READ = ("read_file", {"path": "calc.py"})
FIX = edit("calc.py", "return 0", "return 1")
WRONG = edit("calc.py", "return 0", "return 99")
MEND = edit("calc.py", "return 99", "return 1")
RUN = ("run_tests", {})
FINISH = ("finish", {"message": "one in calc.py"})
LONG = ("read_file", {"path": "long.py"})
RULE = ["more_than_needed"]


def rolled(tree: Path, chat: ChatFormat, *turns: Turn, name: str = "r", solved: bool = True) -> Rollout:
    rollout = played(tree, chat, *turns)[1]
    rollout.id, rollout.reward.parts["outcome"] = name, float(solved)
    return rollout


@pytest.fixture
def lean(tree: Path, chat: ChatFormat) -> list[Rollout]:
    return [rolled(tree, chat, READ, FIX, FINISH, name=f"lean{number}") for number in range(2)]


def places(rollout: Rollout, siblings: list[Rollout]) -> list[int]:
    return [target.message for target in read_all(rollout, None, RULE, siblings=siblings)]


@pytest.mark.parametrize(
    ("turns", "message", "why"),
    [
        ((LONG, READ, FIX, FINISH), 2, "no lean sibling looked at that"),
        ((READ, sh("ls"), LONG, FIX, FINISH), 4, "run_command: no lean sibling"),  # before most of it comes
        ((READ, FIX, READ, RUN, LONG, FINISH), 8, "run_tests: no lean sibling"),  # an edit may be looked at
        ((READ, FIX, READ, READ, LONG, FINISH), 8, "the same call as before"),
        ((READ, sh("grep -n one calc.py"), READ, LONG, FIX), 4, "no lean sibling"),
    ],
)
def test_the_excess_begins_at_the_first_call_that_is_not_needed(
    tree: Path, chat: ChatFormat, lean: list[Rollout], turns: tuple[Turn, ...], message: int, why: str
) -> None:
    rollout = rolled(tree, chat, *turns)
    (target,) = read_all(rollout, None, RULE, siblings=lean)
    assert target.message == message
    assert why in target.evidence
    assert places(rollout, []) == [], "without a group nobody knows what is needed"


def test_it_is_silent_where_nobody_knows_what_is_needed(tree: Path, chat: ChatFormat, lean: list[Rollout]) -> None:
    much = rolled(tree, chat, LONG, READ, FIX, FINISH, name="much")
    assert places(much, lean) == [2]
    failed = [rolled(tree, chat, READ, FINISH, name=f"f{number}", solved=False) for number in range(4)]
    assert places(much, [lean[0], *failed]) == [], "one that solved it may have been lucky"
    assert places(much, [*lean, *failed]) == [2], "those that failed show nothing"
    same = [rolled(tree, chat, LONG, READ, FIX, FINISH, name=f"s{number}") for number in range(3)]
    assert places(much, [*lean, *same]) == [], "the leaner half has one of these"
    little = rolled(tree, chat, READ, sh("ls"), READ, FIX, FINISH)
    assert spent(little) < 3 * spent(lean[0])
    assert places(little, lean) == [], "not over three times as much"
    assert [at for at, _ in more_than_needed(Trajectory(little, None, lean), times=1.5)] == [(0, 4)]
    lost = rolled(tree, chat, READ, FIX, FINISH)
    lost.events.append(Event(0, "machine_fault", "no space"))
    assert {one.id: len(others) for one, others in with_siblings([much, *lean, lost])} == {
        "much": 2, "lean0": 2, "lean1": 2, "r": 3
    }  # fmt: skip


def test_what_a_failure_made_it_look_at_has_a_reason(tree: Path, chat: ChatFormat) -> None:
    lean = [rolled(tree, chat, READ, FIX, RUN, FINISH, name=f"lean{number}") for number in range(2)]
    debugging = rolled(tree, chat, READ, WRONG, RUN, LONG, sh("ls"), MEND, RUN, FINISH)
    assert places(debugging, lean) == []
    after = rolled(tree, chat, READ, WRONG, RUN, LONG, MEND, RUN, sh("ls"), FINISH)
    assert places(after, lean) == [14], "the tests pass again"
    missed = rolled(tree, chat, ("read_file", {"path": "no.py"}), sh("ls"), LONG, READ, FIX, RUN, FINISH)
    assert [one.message for one, _ in unneeded(Trajectory(missed, None, lean))] == [2, 6]


def test_all_that_reads_groups_finds_it(tree: Path, chat: ChatFormat, lean: list[Rollout]) -> None:
    much = rolled(tree, chat, READ, LONG, FIX, FINISH, name="much")
    stored = Stored("run", None, [*lean, much])
    (found,) = [one for one in by_rules(stored, {}) if one.feedback.target.rule in RULE]
    assert (found.rollout.id, found.feedback.target.message) == ("much", 4)
    _, feedback = annotate([[*lean, much]], FeedbackConfig(weight=1.0, rules=RULE), chat)
    assert [(one.target.rollout, one.target.message) for one in feedback] == [("much", 4)]
    kept = read(much, (), {name: RULES[name] for name in RULE}, lean)
    assert kept.broken == {(0, 4): "more_than_needed"}
    assert set(kept.kept) == {(0, 2), (0, 6), (0, 8)}
    assert set(read(much, (), RULES).kept[(0, 6)]) >= set(RULE), "of an edit it is known without a group"
    assert "more_than_needed" not in read(much, (), RULES).kept[(0, 2)]


def test_a_look_judges_another_call_in_its_place(tree: Path, chat: ChatFormat, lean: list[Rollout]) -> None:
    task, much = played(tree, chat, READ, LONG, FIX, FINISH)
    collector = Collector(Config(model="http://127.0.0.1:9/v1"), None, "m")
    faulty, right = (render_call(name, arguments) for name, arguments, *_ in (LONG, FIX))
    collector.chat = chat
    collector.engine = ByHint(chat, [faulty, faulty, faulty, right], [right])  # type: ignore[assignment]
    (target,) = read_all(much, task, RULE, siblings=lean)
    found = [Found(much, Feedback(target, RULES[target.rule].hint(much.tools)), "", lean)]
    look = HintProbe(collector, {"t": task}, RULES, 4)
    (looked,) = look.measured(asyncio.run(look.sampled(found, "x")), found, Decoder(tiny_model(vocabulary=320)))
    assert (looked.samples, looked.faults, looked.hinted_faults) == (4, 3, 0)
