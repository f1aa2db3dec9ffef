"""A user's own rules: from a file through the configuration to hinted samples and `offbook coach`; what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from annotating import annotate
from test_coach import coach, rollout_of

from offbook.agent.chat import ChatFormat, render_call
from offbook.core.config import Config, FeedbackConfig
from offbook.core.runfolder import dump_lines
from offbook.rl.collector import rewards_and_monitors_of
from offbook.signals.feedback import RULES, read_all, rules_of
from offbook.types import OffbookError

HINT = "Reminder: log with the module's logger, never print."
EDIT = render_call("edit_file", {"path": "a.py", "old": "pass", "new": "print(1)"})
AGAIN = render_call("edit_file", {"path": "a.py", "old": "print(1)", "new": "print(2)"})


def own(folder: Path, source: str) -> str:
    path = folder / "my_rules.py"
    path.write_text(source)
    return str(path)


def example() -> str:
    page = (Path(__file__).parent.parent / "docs" / "feedback.md").read_text()
    return page.partition("<!-- example -->\n```python\n")[2].partition("```\n<!-- end -->")[0]


def test_the_documented_example_hints_its_message(tmp_path: Path, chat: ChatFormat) -> None:
    rules = rules_of([own(tmp_path, example())], ["no_prints"], {"no_prints": 0.5})
    assert list(rules)[:-1] == list(RULES), "after the built-in ones, which are more specific"
    rollout = rollout_of(chat, "r", EDIT, AGAIN, "It is done.")
    settings = FeedbackConfig(rules=["no_prints"], rule_weights={"no_prints": 0.5})
    (sample,), (item,) = annotate([[rollout]], settings, chat, rules=rules)
    assert (item.target.rule, item.target.message, item.target.evidence) == ("no_prints", 2, "print( in a.py")
    (branch,) = sample.branches
    assert HINT in chat.decode(branch.inserted)
    assert "print(1)" in chat.decode(sample.ids[slice(*branch.spans[0])])
    assert branch.weight == 0.5


def test_own_rules_are_counted_and_stand_in_for_others(tmp_path: Path, chat: ChatFormat) -> None:
    rules = rules_of([own(tmp_path, example())])
    rollout = rollout_of(chat, "r", EDIT, "It is done.")
    counts: Counter[str] = Counter()
    settings = FeedbackConfig(rules=["no_prints"], control="donor")
    (sample,), (item,) = annotate([[rollout]], settings, chat, counts=counts, rules=rules)
    assert counts["candidates"] == 1
    assert item.hint.rule in RULES
    assert item.hint.text in chat.decode(sample.branches[0].inserted)


def test_a_hint_can_name_the_tools(tmp_path: Path) -> None:
    path = own(tmp_path, 'def tidy(trajectory):\n    """Use {tools}\n    and no {other}."""\n    return []\n')
    assert rules_of([path])["tidy"].hint(("open", "close")).text == "Use open, close and no {other}."


DOCUMENTED = 'def rule(trajectory):\n    """Reminder: no."""\n    '


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("yield trajectory.uses[7], 'x'", "IndexError"),
        (
            "yield (0, 1), 'what the user said'",
            "TypeError: ((0, 1), 'what the user said') is no message of the agent's",
        ),
        ("yield (0, 2), 5", "TypeError: ((0, 2), 5) is no message"),
        ("return 5", "TypeError: 'int' object is not iterable"),
    ],
)
def test_a_rule_that_breaks_is_named(tmp_path: Path, chat: ChatFormat, body: str, told: str) -> None:
    path = own(tmp_path, DOCUMENTED + body)
    with pytest.raises(OffbookError) as raised:
        read_all(rollout_of(chat, "r/0"), known=rules_of([path]))
    assert str(raised.value).startswith(f"the rule rule of {path} broke on rollout r/0: {told}")


@pytest.mark.parametrize(
    ("source", "chosen", "sentence"),
    [
        ("def rule(trajectory): ...", [], "the rule rule of .*my_rules.py needs a docstring, which is its hint"),
        (DOCUMENTED.replace("rule", "edited_tests") + "return []", [], "there are two rules called edited_tests"),
        (
            DOCUMENTED + "return []",
            ["edited_tests"],
            "my_rules.py has rule; feedback.rules has to .*, as in --feedback.rules edited_tests,rule, or",
        ),
        ("_hidden = 1", [], "my_rules.py has no functions"),
        (DOCUMENTED + "return []", ["rule", "rul"], "there is no rule rul; the rules are unknown_tool.*, rule$"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_at_once(
    tmp_path: Path, source: str, chosen: list[str], sentence: str
) -> None:
    path = own(tmp_path, source)
    with pytest.raises(OffbookError, match=sentence):
        rules_of([path], chosen)


def test_a_run_refuses_them_before_its_first_rollout(tmp_path: Path) -> None:
    path = own(tmp_path, example())
    rewards_and_monitors_of(Config(feedback=FeedbackConfig(files=[path], rule_weights={"no_prints": 2.0, "said": 0.0})))
    with pytest.raises(OffbookError, match="there is no rule no_print; the rules are"):
        rewards_and_monitors_of(Config(feedback=FeedbackConfig(files=[path], rule_weights={"no_print": 2.0})))


def test_coach_takes_rules_of_ones_own(tmp_path: Path, chat: ChatFormat) -> None:
    (tmp_path / "work.jsonl").write_bytes(dump_lines([rollout_of(chat, "r", EDIT, "It is done.")]))
    path = own(tmp_path, example())
    done = coach(tmp_path / "work.jsonl", "--rules", path, "--no-effect", "--json", tmp_path / "told.json")
    assert done.returncode == 0, done.stderr
    assert f"  hint: {HINT}" in done.stdout
    assert json.loads((tmp_path / "told.json").read_text())["rules"]["no_prints"]["targets"] == 1
