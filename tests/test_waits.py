"""What a step says of the time that its rollouts took."""

from __future__ import annotations

from offbook.rl.report import waits
from offbook.types import Rollout, Usage


def test_a_long_step_says_which_rollout_was_last_and_what_it_spent_its_time_on() -> None:
    quick = Usage(seconds=50.0, model_seconds=2.0, longest_call="bash cat", longest_call_seconds=48.4, timeouts=1)
    slow = Usage(seconds=70.0, model_seconds=60.0, summary_seconds=20.0, scoring_seconds=8.0, slot_seconds=0.4)
    slow.longest_call, slow.longest_call_seconds = "read_file a.py", 4.0
    groups = [[Rollout("step1/a/0", "a", "a", (), usage=quick), Rollout("step1/a/1", "a", "a", (), usage=slow)]]
    found = waits(groups, 81.0, in_lockstep=False)
    assert found.pop("waited_for") == (
        "waited 81 s for rollouts; last was step1/a/1: model 40 s, summary 20 s, tools 10 s, scoring 8 s; "
        "longest call: `bash cat` of step1/a/0, 48 s"
    )
    assert found == {
        "slowest/slot_s": 0.4,
        "slowest/model_s": 40.0,
        "slowest/summary_s": 20.0,
        "slowest/tools_s": 10.0,
        "slowest/scoring_s": 8.0,
        "longest_call_s": 48.4,
        "timeouts": 1,
    }
    assert "waited_for" not in waits(groups, 59.0, in_lockstep=False)
    assert "(in lockstep with others' tools)" in waits(groups, 81.0, in_lockstep=True)["waited_for"]
