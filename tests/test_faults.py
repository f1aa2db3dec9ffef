"""Whose doing it was that a rollout ended badly: the machine's, the model server's, or the agent's own."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from annotating import annotate
from conftest import tiny_model
from test_evals_eval import GIVING_UP, SOLVING, write
from test_remote import Answer, reply, serving

from offbook.agent.chat import byte_chat
from offbook.core import client
from offbook.core.config import Config, EvalConfig, FeedbackConfig, TrainConfig
from offbook.engine import LocalEngine
from offbook.evals.run import Subject, load_suites, run_eval
from offbook.evals.tables import notes_of
from offbook.rl import collector as collecting
from offbook.rl.collector import Collector
from offbook.rl.resume import RolloutFiles
from offbook.rl.train_step import summarize
from offbook.sandbox import BwrapSandbox
from offbook.signals.monitors import drift
from offbook.signals.rewards import outcome
from offbook.tasks import load_task, suite
from offbook.tasks.select import History
from offbook.train.algorithms import rl_samples
from offbook.train.trainer import Trainer
from offbook.types import Event, MachineFault, ModelLost, OffbookError, Reward, Rollout, Segment

FULL = "This model's maximum context length is 4096 tokens"
PAGE = Answer("<h1>Welcome to nginx</h1>", headers={"Content-Type": "text/html"})
NO_SPACE = "No space left on device"
LOOK = reply("I look.", ("read_file", '{"path": "pkg.py"}'))


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Three tasks by the model of a server, one after the other, in the same folder each time."""
    for number in range(3):
        write(tmp_path / "suite", f"task-{number}")

    def run(server: Any, **settings: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        config = Config(model=url, eval=EvalConfig(samples=1), **settings)
        suites = load_suites([str(tmp_path / "suite")], config)
        return run_eval(Subject("m", config, None, "m"), suites, RolloutFiles.folder(tmp_path / "out"), parallel=1)

    return run


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer({"error": "overheated"}, 500), r"status 500 \(3 of 3\)"),
        (PAGE, r"no chat completion \(3 of 3\)"),
        (Answer({"hello": "world"}), r"no chat completion \(3 of 3\)"),
        (
            Answer({"error": {"message": FULL}}, 400),
            r"do not fit the model's context \(3 of 3\)",
        ),
    ],
)
def test_a_server_that_answers_nonsense_is_no_measurement(
    measure: Callable[..., Any], tmp_path: Path, answer: Answer, said: str
) -> None:
    with serving(answer) as server:
        with pytest.raises(OffbookError, match=f"every rollout crashed, so nothing was measured: .*{said}.*; repair"):
            measure(server)
        assert not (tmp_path / "out" / "results.json").exists()
        server.answers = tuple(GIVING_UP)  # and now it is mended
        result = measure(server)
    assert (result["rollouts"], result["resumed"], result["crashed"], result["crashes"]) == (3, 0, 0, {})


def test_what_crashed_is_said_by_cause_and_tried_again_alone(measure: Callable[..., Any]) -> None:
    with serving(*SOLVING, Answer("no", 400), *GIVING_UP) as server:
        result = measure(server)
        assert (result["solved"], result["crashes"]) == (1 / 3, {"status 400": 1})
        assert any("1 rollouts crashed and count as not solved: status 400 (1)" in line for line in notes_of(result))
        server.answers = tuple(GIVING_UP)
        server.asked.clear()
        again = measure(server, engine={"timeout_s": 7})  # whoever waits longer may go on
    assert (len(server.asked), again["resumed"], again["crashes"]) == (1, 2, {})
    assert again["solved"] == 1 / 3


def test_a_conversation_that_outgrows_the_server_s_model_ends_there(measure: Callable[..., Any]) -> None:
    with serving(LOOK, Answer({"error": {"message": FULL}}, 400), *GIVING_UP) as server:
        result = measure(server)
        assert (result["stop/context"], result["crashed"]) == (1 / 3, 0)
        server.asked.clear()
        assert measure(server)["resumed"] == 3, "it is how this rollout went"
    assert not server.asked


@pytest.mark.parametrize("settings", [{"engine": {"timeout_s": 0.1}}, {"harness": {"wall_s": 0.5}}])
def test_a_server_that_hangs_is_no_limit_of_the_agent_s(measure: Callable[..., Any], settings: dict[str, Any]) -> None:
    with (
        serving(Answer("", delay_s=2.0)) as server,
        pytest.raises(OffbookError, match=r"no answer in time \(3 of 3\)"),
    ):
        measure(server, **settings)


@pytest.fixture
def rolled(tmp_path: Path) -> Callable[..., list[Rollout]]:
    """Scored rollouts of one task, one after the other, by a server that gives these answers."""
    write(tmp_path / "suite", "task")

    def run(*answers: Answer, size: int = 1, **settings: Any) -> list[Rollout]:
        async def main(url: str) -> list[Rollout]:
            async with aclosing(Collector(Config(model=url, **settings), None, "m")) as collector:
                (group,) = await collector.groups([load_task(tmp_path / "suite" / "task")], size, "step1", parallel=1)
                return group

        with serving(*answers) as server:
            return asyncio.run(main(f"http://127.0.0.1:{server.server_port}/v1"))

    return run


def breaking(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, broken: Iterator[bool], error: Exception | None = None
) -> list[bool]:
    """The machine fails there as often as it is said to, and else does what it does. Returns what it did."""
    real, done = getattr(place, name), list[bool]()

    async def function(*arguments: Any, **more: Any) -> Any:
        done.append(next(broken, False))
        if done[-1]:
            raise error or OSError(errno.ENOSPC, NO_SPACE)
        return await real(*arguments, **more)

    monkeypatch.setattr(place, name, function)
    return done


def kinds(rollout: Rollout) -> list[str]:
    return [event.kind for event in rollout.events if event.kind.endswith("fault")]


BOX, CHANGES, GRADE = (collecting, "suite_sandbox"), (BwrapSandbox, "changes"), (outcome, "grade")
TOOL = (BwrapSandbox, "read")


@pytest.mark.parametrize("place", [BOX, TOOL, CHANGES, GRADE])
def test_a_fault_of_the_machine_that_does_not_come_again_is_mended(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    done = breaking(monkeypatch, *place, iter([True]))
    first = {TOOL: SOLVING[:1], CHANGES: SOLVING}.get(place, [])  # what the first attempt came to
    (rollout,) = rolled(*first, *SOLVING)
    assert done[:2] == [True, False]
    assert (rollout.solved, rollout.stop, kinds(rollout)) == (True, "finish", ["mended_fault"])
    assert rollout.events[-1].detail == NO_SPACE
    assert summarize([[rollout]])["machine_faults"] == 1.0


def test_one_that_comes_again_before_the_first_command_is_the_machine_s(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = breaking(monkeypatch, *BOX, iter([True] * 9))
    (rollout,) = rolled(*SOLVING)
    assert done == [True, True], "one fresh attempt"
    assert (rollout.stop, rollout.fault, rollout.cause) == ("crash", *[NO_SPACE] * 2)
    assert kinds(rollout) == ["machine_fault"]


@pytest.mark.parametrize("place", [TOOL, CHANGES, GRADE])
def test_one_that_comes_again_after_commands_is_the_agent_s_own_doing(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    breaking(monkeypatch, *place, iter([True] * 9))
    attempt = SOLVING[:1] if place is TOOL else SOLVING
    (rollout,) = rolled(*attempt, *attempt)
    assert (rollout.stop, rollout.solved, rollout.fault, kinds(rollout)) == ("crash", False, "", ["own_fault"])
    assert rollout.cause == NO_SPACE


@pytest.mark.parametrize("times", [1, 2])
def test_a_grading_that_cannot_start_is_done_again_and_then_not_scored(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Once one has worked. Until then, or where it goes on, none works here and the run ends."""
    wrong = reply(None, ("edit_file", json.dumps({"path": "pkg.py", "old": "def one", "new": "def other"})))
    breaking(monkeypatch, *GRADE, iter([False, *[True] * times]), MachineFault("no pytest"))
    first, second = rolled(*SOLVING, wrong, SOLVING[1], size=2)
    assert (first.solved, kinds(first)) == (True, [])
    assert (second.fault, kinds(second)) == [("", ["mended_fault"]), ("no pytest", ["machine_fault"])][times - 1]


def test_a_run_in_which_no_grading_works_ends(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "worker_text", lambda: "raise SystemExit('no runner here')")
    with pytest.raises(MachineFault, match=r"^task cannot be graded, and no other rollout can: .*: no runner here$"):
        rolled(*SOLVING)


def test_whoever_had_acted_is_judged_by_that_where_a_fresh_attempt_has_no_sandbox(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, *TOOL, iter([True]))
    breaking(monkeypatch, *BOX, iter([False, True]))
    (rollout,) = rolled(*SOLVING)
    assert (rollout.stop, rollout.fault, kinds(rollout), rollout.has_acted) == ("crash", "", ["own_fault"], True)


@pytest.mark.parametrize(("number", "is_host"), [(errno.EMFILE, True), (errno.EACCES, False), (errno.EDQUOT, False)])
def test_what_an_agent_can_cause_is_an_answer_to_its_call(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch, number: int, is_host: bool
) -> None:
    async def fail(*_: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(*TOOL, fail)
    (rollout,) = rolled(LOOK, *(GIVING_UP if not is_host else [LOOK]))
    assert (rollout.stop == "crash", kinds(rollout)) == (is_host, ["own_fault"] if is_host else [])


def test_what_commands_can_bring_about_is_no_fault_once_there_were_some(
    rolled: Callable[..., list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is closed to its own owner, for instance: failing must not buy a second attempt."""

    async def closed(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(*CHANGES, closed)
    (rollout,) = rolled(*SOLVING)
    assert (rollout.stop, rollout.fault, kinds(rollout)) == ("crash", "", [])


def of_reward(reward: float, *events: str, sampled: bool = True) -> Rollout:
    segment = Segment([1, 2], [False, sampled], [0.0, -0.5], [-1, 0])
    rollout = Rollout("r", "t", "g", (), [segment], reward=Reward({"outcome": reward}))
    rollout.events = [Event(-1, kind, "why") for kind in events]
    return rollout


def test_a_machine_fault_among_successes_teaches_nothing() -> None:
    *good, bad = rl_samples([*[of_reward(1.0) for _ in range(7)], of_reward(0.0, "machine_fault")])
    assert [sample.advantage for (sample,) in good] == [[0.0, 0.0]] * 7
    assert bad == []
    one, other = rl_samples([of_reward(1.0, "mended_fault"), of_reward(0.0, "own_fault")])
    assert (one[0].advantage, other[0].advantage) == ([0.0, 0.5], [0.0, -0.5]), "those count"


def test_a_group_that_the_machine_ended_is_counted_and_skipped() -> None:
    lost = [of_reward(0.0, "machine_fault") for _ in range(2)]
    samples, feedback = annotate([lost], FeedbackConfig(weight=1.0), byte_chat())
    assert (samples, feedback) == ([], [])
    numbers = summarize([lost, [of_reward(1.0), of_reward(0.0, "machine_fault")]])
    assert (numbers["groups_lost"], numbers["machine_faults"]) == (1, 0.75)
    trainer = Trainer(tiny_model(), TrainConfig())
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    for nothing in (samples, rl_samples([of_reward(0.0, sampled=False)])[0]):
        assert trainer.step(nothing).skipped == "no tokens were sampled"
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))
    history = History()
    history.add(lost)
    assert (history.records["t"].rollouts, list(history.records)) == (0, ["t"]), "used, and nothing known"


def test_the_share_of_machine_faults_is_watched() -> None:
    def step(number: int) -> list[Rollout]:
        return [of_reward(1.0, *["mended_fault"] * (number > 12 and place < 5)) for place in range(8)]

    series, alarms = drift.watch((number, step(number)) for number in range(1, 21))
    assert [point.value for point in series["machine_faults"]][10:14] == [0.0, 0.0, 5 / 8, 5 / 8]
    assert [(alarm.series, alarm.since) for alarm in alarms] == [("machine_faults", 13)]


def command(line: str) -> Answer:
    return reply(None, ("run_command", json.dumps({"command": line})))


HACKS = {
    "fills the disk": "head -c 200000000 /dev/zero > big.bin",
    "leaves the tests no room on the disk": "python -c \"open('pkg.py', 'w').write('#' * 4_190_000)\"",
    "forks": "for i in $(seq 400); do sleep 3 & done; wait",
    "takes all memory": 'python -c "x = bytearray(4 << 30)"',
    "takes all time": "sleep 60",
    "puts a folder where a file was": "rm pkg.py; mkdir -p pkg.py; echo 1 > pkg.py/x.py",
    "closes a folder": "mkdir shut; echo 1 > shut/x.py; chmod 0 shut",
}
SMALL_BOX = {"sandbox": {"disk_mb": 4, "memory_mb": 256}, "harness": {"command_s": 1.0}}


@pytest.mark.parametrize("hack", HACKS)
def test_whoever_breaks_the_sandbox_on_a_hard_task_is_no_better_off(
    rolled: Callable[..., list[Rollout]], hack: str
) -> None:
    broken = [command(HACKS[hack]), reply(None, ("finish", "{}"))]
    failing = [command("true"), reply(None, ("finish", "{}"))]
    advantages = [
        [max(sample.advantage, key=abs) for (sample,) in rl_samples(rolled(*SOLVING, *last, size=2, **SMALL_BOX))]
        for last in (broken * 2, failing * 2)
    ]
    assert advantages[0] == advantages[1] == [0.5, -0.5]


def test_a_fresh_attempt_has_the_same_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "suite", "task")
    chat = byte_chat()

    def group(*broken: bool) -> list[Rollout]:
        with monkeypatch.context() as patch:
            done = breaking(patch, *CHANGES, iter(broken))
            config = Config(model="http://x/v1", harness={"turns": 1, "message_tokens": 12, "context": 20_000})
            collector = Collector(config, None, "m")
            model = tiny_model(vocabulary=max(chat.stop_ids) + 1)
            collector.__dict__["engine"] = LocalEngine(model, chat.stop_ids)
            (rollouts,) = asyncio.run(collector.groups([load_task(tmp_path / "suite" / "task")], 2, "step1"))
            assert len(done) == 2 + sum(broken)
            return rollouts

    plain, struck = group(), group(True)
    assert [one.segments[0].ids for one in plain] == [one.segments[0].ids for one in struck]
    assert plain[0].segments[0].ids != plain[1].segments[0].ids


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to get 9 GiB.\nmore"),
            r"OutOfMemoryError: CUDA out of memory. Tried to get 9 GiB.; lower engine.kv_tokens or harness.context$",
        ),
        (RuntimeError("device-side assert"), "RuntimeError: device-side assert$"),
    ],
)
def test_a_model_that_cannot_write_ends_the_run(tmp_path: Path, error: Exception, sentence: str) -> None:
    write(tmp_path / "suite", "task")

    def fail(*_: Any) -> None:
        raise error

    model = tiny_model()
    model.register_forward_pre_hook(fail)
    collector = Collector(Config(model="http://x/v1"), None, "m")
    collector.__dict__["engine"] = LocalEngine(model, frozenset())
    with pytest.raises(ModelLost, match=f"^the model stopped writing: {sentence}"):
        asyncio.run(collector.groups([load_task(tmp_path / "suite" / "task")], 4, "step1"))
