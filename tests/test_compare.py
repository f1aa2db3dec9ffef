"""offbook compare: evaluations task by task, and what could not be read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from offbook.core.config import Config
from offbook.core.runfolder import write_atomic
from offbook.evals.compare import compare, find_evaluation, load_evaluation, notes_of
from offbook.evals.figure import Panel, drawn, effort_figure, solved_within
from offbook.evals.metrics import Row, measure, row_of
from offbook.evals.tables import markdown
from offbook.types import OffbookError, Reward, Rollout, Usage


def rollout(task: str, number: int, solved: bool, tokens: int = 20, invalid: int = 0) -> Rollout:
    usage = Usage(turns=3, calls=4, invalid_calls=invalid, sampled_tokens=tokens)
    return Rollout(
        f"eval/{task}/{number}", task, "g", (), stop="finish", usage=usage, reward=Reward({"outcome": float(solved)})
    )


def rows_of(solved: dict[str, int], samples: int = 2, tokens: int = 20, difficulty: str = "normal") -> list[Row]:
    made = []
    for task, count in solved.items():
        for number in range(samples):
            row = row_of(rollout(task, number, number < count, tokens), None, "suite")
            made.append(Row(row.id, task, "suite", difficulty, row.stop, row.numbers))
    return made


def write_evaluation(folder: Path, rows: list[Row]) -> Path:
    result = {"model": folder.name, "suites": ["suite"], **measure(rows), "rows": [asdict(row) for row in rows]}
    write_atomic(folder / "results.json", json.dumps(result))
    write_atomic(folder / "fingerprint.json", "{}")
    write_atomic(folder / "config.toml", Config().to_toml())
    return folder


def offbook(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbook", "compare", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    worse = dict.fromkeys([f"t{number}" for number in range(6)], 0)
    write_evaluation(tmp_path / "before", rows_of(worse, tokens=40) + rows_of({"only-here": 2}))
    write_evaluation(tmp_path / "after", rows_of({**worse, **dict.fromkeys(["t0", "t1", "t2", "t3", "t4"], 2)}))
    return tmp_path


def test_evaluations_are_paired_by_task(two: Path) -> None:
    done = offbook(two, "before", "after", "--json", "--markdown", "c.md", "--figure", "c.svg")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["paired_tasks"] == {"after": 6}
    solved = figures["metrics"]["solved"]
    assert solved["values"]["after"] == pytest.approx(5 / 6)
    difference = solved["differences"]["after"]
    assert difference["value"] == pytest.approx(5 / 6), "on the tasks that both have: the seventh does not count"
    assert (difference["p"], difference["exact"], difference["num_tasks"]) == (2 / 32, True, 6)
    assert difference["interval"][0] >= 0.3
    assert figures["metrics"]["tokens"]["differences"]["after"]["value"] == -20
    page = (two / "c.md").read_text()
    assert "| solved ↑ | 14.3%" in page
    assert "n = 6 tasks, paired" in page
    assert "1 and 0" in page
    table = offbook(two, "before", "after").stdout
    assert "0.062" in table
    widest = max(table.splitlines(), key=len)
    assert len(widest) > 80, "a pipe has no width that lines would have to be folded at"
    assert done.stderr == ""
    svg = ElementTree.fromstring((two / "c.svg").read_text())
    assert svg.tag.endswith("svg")


def test_metrics_of_evaluations_can_be_chosen(two: Path) -> None:
    done = offbook(two, "before", "after", "--metric", "crashed", "--metric", "tokens", "--json")
    assert list(json.loads(done.stdout)["metrics"]) == ["crashed", "tokens"]


def test_without_a_common_task_nothing_is_paired(tmp_path: Path) -> None:
    one, other = (
        load_evaluation(name, find_evaluation(write_evaluation(tmp_path / name, rows_of({name: 1, f"{name}2": 0}))))  # type: ignore[arg-type]
        for name in ("a", "b")
    )
    found = compare([one, other])
    assert found.differences["solved"][0].p is None
    assert "no task in common" in notes_of(found)[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["before"], "at least two"),
        (["before", "gone"], "gone is not there"),
        (["before", "."], ". has no evaluation to compare; `offbook eval .` makes one of a run"),
        (["before", "after", "--metric", "nope"], "there is no metric nope in these evaluations; there are solved"),
        (["before", "after", "--figure", "after"], "cannot write after: after: is a directory"),
        (["before", "after", "--markdown", "after/fingerprint.json/x"], "cannot write after/fingerprint.json/x: "),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(two: Path, arguments: list[str], sentence: str) -> None:
    done = offbook(two, *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_file_that_is_no_result_is_said_so(two: Path) -> None:
    (two / "after" / "results.json").write_text("[1, 2")
    with pytest.raises(OffbookError, match="is no result"):
        load_evaluation("after", find_evaluation(two / "after"))  # type: ignore[arg-type]


def test_the_effort_curve_is_solved_within_so_many_tokens() -> None:
    rows = [*rows_of({"a": 2}, tokens=10), *rows_of({"b": 1}, tokens=30, difficulty="hard")]
    points = solved_within(rows, 50.0)
    at = {tokens: max(share for where, share in points if where <= tokens) for tokens in (5, 10, 29, 30, 50)}
    assert at == {5: 0.0, 10: 0.5, 29: 0.5, 30: 0.75, 50: 0.75}
    tree = ElementTree.fromstring(svg := effort_figure({"<one>": rows, "other": rows_of({"a": 0})}))
    assert len(tree.findall("{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}path")) == 2
    assert "&lt;one&gt;" in svg


def test_names_stay_text_in_a_figure() -> None:
    for name in ("<b>", "a & b", "]]>", '"quoted"'):
        texts = [one.text for one in ElementTree.fromstring(drawn([Panel(name, {name: [(1.0, 2.0)]})])).iter()]
        assert texts.count(name) == 2


def test_a_pipe_in_a_name_does_not_break_the_page() -> None:
    assert markdown([["", "a|b"], ["x", "1"]]) == "|  | a\\|b |\n| --- | ---: |\n| x | 1 |\n"
