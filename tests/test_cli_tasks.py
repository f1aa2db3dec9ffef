"""offbook tasks, as somebody types it: one sentence for everything that cannot be done, and nothing left behind."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from little_repo import deps, little, with_deps
from test_prepare import write
from typer.testing import CliRunner

from offbook.cli import app
from offbook.cli.train import what_next
from offbook.core.config import Config, load_config
from offbook.evals.run import tasks_of, train_tasks
from offbook.evals.tables import contamination_sentence
from offbook.rl.tasks import task_sets
from offbook.tasks import load_task, load_tasks
from offbook.tasks.contamination import contamination
from offbook.tasks.git import gold_patch, touched_by
from offbook.types import OffbookError

__all__ = ["deps"]


def offbook(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbook", "tasks", *map(str, arguments)]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


def here(*arguments: str | Path) -> str:
    """The same in this process, which has read the standard library already."""
    result = CliRunner().invoke(app, ["tasks", *map(str, arguments)], standalone_mode=False)
    if isinstance(result.exception, OffbookError):
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def made(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("verbs")
    source, out = little(place / "little"), place / "out"
    with_deps(out, source, deps)
    # Both of these are data for the repository's own tools; neither may be run outside a sandbox.
    write(source, {"setup.py": f"open({str(place / 'ran')!r}, 'w')\n", "noxfile.py": f"open({str(place / 'ran')!r})\n"})
    bad = write(place / "bad", {"mod.py": "x = 1\n"})
    result = offbook("make", bad, source, "--out", out, "--limit", "2", "--heldout", "0", "--level", "stub")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{out}: 2 tasks from 1 of 2 repositories\n"
    assert f"{bad}: bad has no test files" in result.stderr
    assert "became tasks" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (place / "ran").exists()
    return out


def test_tasks_that_were_made_hold(made: Path) -> None:
    assert len(load_tasks(made / "train")) == 2
    result = offbook("check", made, "--json")
    assert (result.returncode, json.loads(result.stdout)) == (0, {"checked": 2, "bad": {}})


def test_a_task_that_does_not_hold_is_named(made: Path, tmp_path: Path) -> None:
    task = load_tasks(made / "train")[0]
    folder = made / "train" / "spoiled"
    subprocess.run(["cp", "-a", task.folder, folder], check=True)
    try:
        gold = folder / "solution/gold.patch"
        gold.write_text("".join(line for line in gold.read_text().splitlines(True) if "return" not in line))
        result = offbook("check", folder)
        assert (result.returncode, result.stdout) == (1, "0 of 1 task folders hold\n")
        assert result.stderr.splitlines()[-1].startswith(f"{task.id}: the gold patch of {folder} cannot be used:")
    finally:
        subprocess.run(["rm", "-r", folder], check=True)


def test_a_broken_folder_does_not_keep_the_others_from_being_checked(made: Path, tmp_path: Path) -> None:
    task, out = load_tasks(made / "train")[0], tmp_path / "out"
    (out / "heldout").mkdir(parents=True)  # whose repositories gave none
    (out / "train").mkdir()
    (out / ".factory").symlink_to(made / ".factory")
    for name in ("dumb", "garbled", "torn"):
        subprocess.run(["cp", "-a", task.folder, out / "train" / name], check=True)
    (out / "train" / "dumb" / "instruction.md").unlink()
    (out / "train" / "garbled" / "instruction.md").write_bytes(b"\xff\xfe\x00")
    (out / "train" / "torn" / "tests" / "mutants.json").write_text("{")
    result = offbook("check", out)
    assert (result.returncode, result.stdout) == (1, "0 of 3 task folders hold\n")
    assert "Traceback" not in result.stderr
    said = " ".join(result.stderr.split())
    assert f"{out / 'train' / 'dumb'} is not a task folder: it has no instruction.md" in said
    assert "what should be text in it is none" in said
    assert "mutants.json does not fit this version" in said
    (out / "train" / "dumb" / "instruction.md").write_text(task.instruction)
    result = offbook("show", out)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert task.id in result.stdout


def test_leaks_are_looked_for_in_a_set(made: Path) -> None:
    assert here("leaks", made) == "2 of 2 tasks have no leak\n"
    task = load_tasks(made / "train")[0]
    notes = task.tree / "notes.txt"
    notes.write_text("\n".join(json.loads((task.folder / "solution/removed.json").read_text()).values()))
    try:
        leaks = json.loads(here("leaks", task.folder, "--json"))["leaks"]
        assert [leak["path"] for leak in leaks[task.id]] == ["tree/notes.txt"]
    finally:
        notes.unlink()


def test_tasks_are_shown(made: Path) -> None:
    task = load_tasks(made / "train")[0]
    one = offbook("show", task.folder).stdout
    assert one.startswith(task.instruction)
    assert f"needs it ({len(task.fail_to_pass)}):\n  {task.fail_to_pass[0]}" in one
    assert (task.folder / "solution/gold.patch").read_text() in one
    rows = json.loads(here("show", made, "--json"))
    assert [row["id"] for row in rows] == [task.id for task in load_tasks(made / "train")]
    assert {row["level"] for row in rows} == {"stub"}


# --- is it right?


def graded(task: Path, solution: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tasks", "grade", str(task), str(solution), *options], standalone_mode=False)
    assert result.exception is None
    return result.return_value or 0, result.stdout


def test_a_solution_is_graded_as_in_training(made: Path, tmp_path: Path) -> None:
    task, solved = load_tasks(made / "train")[0], tmp_path / "solved"
    gold = task.folder / "solution/gold.patch"
    assert graded(task.folder, gold) == (0, f"{task.id}: solved\nreward 1: outcome 1\n")
    shutil.copytree(task.tree, solved)
    code, said = graded(task.folder, solved, "--json")
    unsolved = {"id": task.id, "solved": False, "reward": 0.0, "parts": {"outcome": 0.0}, "weights": {}, "flags": []}
    assert (code, json.loads(said)) == (1, {**unsolved, "why": "it changes no file that is graded", "failing": []})
    subprocess.run(["patch", "-p1", "-s", "-i", gold], cwd=solved, check=True)
    (solved / "__pycache__").mkdir()
    (solved / "__pycache__" / "x.pyc").write_bytes(b"\xff")
    assert graded(task.folder, solved)[0] == 0
    (path,) = touched_by(gold.read_text())
    (solved / path).write_text((solved / path).read_text().replace("return", "return None and"))
    code, said = graded(task.folder, solved)
    first, reward, failing, *tests = said.splitlines()
    assert (code, reward, failing) == (1, "reward 0: outcome 0", f"failing ({len(tests)}):")
    assert first.startswith(f"{task.id}: not solved ({tests[0].strip()} does not pass (")
    assert {test.strip() for test in tests} >= {*task.fail_to_pass}


def test_what_monitors_find_in_a_solution_takes_the_reward(made: Path, tmp_path: Path) -> None:
    task = load_tasks(made / "train")[0]
    same = {"little/same.py": "class Same(str):\n    def __eq__(self, other):\n        return True\n"}
    patch = tmp_path / "mine.diff"
    gold = (task.folder / "solution/gold.patch").read_text()
    patch.write_text(gold + gold_patch(same, {"little/same.py": None}))
    code, said = graded(task.folder, patch)
    first, reward, *findings = said.splitlines()
    assert (code, first) == (1, f"{task.id}: not solved (a finding takes the reward)")
    assert reward.startswith("reward 0: outcome 0, outcome_withheld 1 x 0")
    assert findings
    assert all(line.startswith("finding ") and "same.py" in line for line in findings)


def test_what_cannot_be_graded_is_said_in_a_sentence(made: Path, tmp_path: Path) -> None:
    task, other = load_tasks(made / "train")[0].folder, tmp_path / "other"
    write(
        other, {"x.py": "1\n", "text.diff": "no diff\n", "far.diff": "--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-a\n+b\n"}
    )
    (other / "bytes.diff").write_bytes(b"\xff\xfe")
    for folder, solution, sentence in (
        (other, task, f"{other} is not a task folder: it has no task.toml"),
        (task, other / "nowhere", f"there is no folder or patch {other / 'nowhere'}"),
        (task, other, f"{other} has no file of the tree of {task}; give the whole tree, or a patch"),
        (task, other / "text.diff", f"{other / 'text.diff'} is no patch for the tree of {task}: it does not apply: "),
        (task, other / "far.diff", f"{other / 'far.diff'} is no patch for the tree of {task}: it does not apply: "),
        (task, other / "bytes.diff", f"{other / 'bytes.diff'} is no patch: it is no text"),
    ):
        with pytest.raises(OffbookError) as error:
            here("grade", folder, solution)
        assert (error.value.exit_code, str(error.value)[: len(sentence)]) == (2, sentence)
        assert "\n" not in str(error.value)
    result = offbook("grade", task, other / "nowhere")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"offbook: there is no folder or patch {other / 'nowhere'}"


# --- one repository, from which nothing is held out


def config_of(source: Path) -> Config:
    return load_config([], {"tasks.source": str(source)})


def test_one_repository_is_enough_to_train_and_it_is_said_that_nothing_is_held_out(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sets = task_sets(config_of(made))
    assert (len(sets.train), sets.heldout) == (2, [])
    assert [record.getMessage() for record in caplog.records] == [
        f"{made} has no held-out tasks: all of them are trained on, and there are none to measure with"
    ]
    with pytest.raises(OffbookError, match=f"{made} has no held-out tasks to measure on; add another repository "):
        tasks_of(str(made), config_of(made))
    assert len(tasks_of(str(made / "train"), config_of(made))) == 2
    options = ("--limit", "2", "--level", "stub")
    last = here("make", made.parent / "little", "--out", made, *options).splitlines()[-1]
    assert last.startswith("no task is held out: repositories are held out as a whole. To measure on unseen code, add ")
    assert f"offbook tasks make ANOTHER --out {made}. Or train with --tasks.heldout_share 0.2, which" in last


def test_some_tasks_of_one_repository_can_be_held_out(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config([], {"model": "pocket", "tasks.source": str(made), "tasks.heldout_share": "0.2"})
    sets = task_sets(config)
    assert (len(sets.train), len(sets.heldout)) == (1, 1)
    assert "1 tasks are held out of repositories to train on, where agents could read the code" in caplog.text
    assert tasks_of(str(made), config) == sets.heldout
    assert train_tasks(str(made), config) == sets.train
    found = contamination(sets.heldout, sets.train)
    assert found["same_repository"] == 1
    assert "tasks of the same repository were trained on, where agents could" in contamination_sentence(found)
    with pytest.raises(OffbookError, match="no task left to train on; give a smaller "):
        task_sets(load_config([], {"tasks.source": str(made), "tasks.heldout_share": "0.999"}))
    assert what_next(config) == "offbook eval runs/train, or offbook view runs/train"
    assert "offbook eval" not in what_next(config_of(made))
    assert f"offbook tasks make ANOTHER --out {made})" in what_next(config_of(made))


def test_a_run_is_not_measured_on_other_tasks_than_it_held_out(tmp_path: Path) -> None:
    """Those that it was trained on would be among them."""
    (tmp_path / "config.toml").write_text(load_config(["pocket"], {"tasks.source": "tasks"}).to_toml())
    line = ["eval", str(tmp_path), "--tasks.heldout_share", "0.2"]
    result = CliRunner().invoke(app, line)
    assert "held out a share of 0 of its tasks; leave tasks.heldout_share out" in str(result.exception)


def test_a_task_to_train_on_that_is_held_out_too_is_refused(made: Path) -> None:
    held, task = made / "heldout", load_tasks(made / "train")[0]
    held.mkdir()
    subprocess.run(["cp", "-a", task.folder, held / "another-name"], check=True)
    try:
        with pytest.raises(OffbookError, match=f"{task.id} is in train/ and in heldout/"):
            task_sets(config_of(made))
        assert [one.id for one in tasks_of(str(made), config_of(made))] == [task.id]
        options = ("--limit", "2", "--level", "stub")
        assert "no task is held out" not in here("make", made.parent / "little", "--out", made, *options)
    finally:
        subprocess.run(["rm", "-r", held], check=True)


def test_a_task_is_made_harder(made: Path, tmp_path: Path) -> None:
    task = load_tasks(made / "train")[0]
    (said,) = here("harden", task.folder, "--way", "terser", "--out", tmp_path).splitlines()
    assert said.startswith(f"terser  {tmp_path / task.id}-terser: ")
    assert len(load_tasks(tmp_path)) == 1
    (again,) = here("harden", task.folder, "--way", "terser", "--out", tmp_path).splitlines()
    assert again == f"terser  none: it is there already ({tmp_path / task.id}-terser)"


def test_every_gold_patch_has_been_seen_by_the_monitors(made: Path) -> None:
    assert [task.allows for task in load_tasks(made / "train")] == [(), ()]


def test_folders_for_harbor_are_whole(made: Path, tmp_path: Path) -> None:
    assert here("export", made, "--out", tmp_path / "new") == f"{tmp_path / 'new'}: 2 task folders\n"
    for task in load_tasks(tmp_path / "new"):
        assert (task.folder / "tests/judge/tree.tar.gz").is_file()
        assert (task.folder / "environment/repo/little/words.py").is_file()
    with pytest.raises(OffbookError, match="is there already; give another --out"):
        here("export", made, "--out", tmp_path / "new")


def test_the_same_command_goes_on(made: Path) -> None:
    source = made.parent / "little"
    before = (made / "train").stat().st_mtime_ns
    options = ("--limit", "2", "--heldout", "0", "--level", "stub")
    (row,) = json.loads(here("make", source, "--out", made, *options, "--json"))
    assert (row["name"], len([one for one in row["outcomes"] if not one["refused"]])) == ("little", 2)
    assert (made / "train").stat().st_mtime_ns == before


# --- what cannot be done


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("make",), "give at least one repository: a folder, a git URL, an archive, or pypi:NAME"),
        (("make", "x", "--level", "all"), "there is no level all; it is one of stub, hybrid, gone and mix"),
        (("make", "x", "--rewrite"), "--rewrite and --set-up need a model: say where it is"),
        (
            ("make", "x", "--set-up", "--url", "http://x", "--name", ""),
            "--rewrite and --set-up need a model",
        ),
        (
            ("make", "x", "--rewrite", "--url", "host", "--name", "m"),
            "the URL of the model server must look like https://host/v1, not host",
        ),
        (("check", "nowhere"), "nowhere holds no task folders"),
        (("show", "nowhere"), "nowhere holds no task folders"),
        (("harden", "nowhere"), "nowhere is not a task folder: it has no task.toml"),
        (("harden", "nowhere", "--way", "up"), "there is no way up; it is one of terser, gone, widen, merge"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OffbookError) as error:
        here(*arguments)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


GOOD = {"pkg/__init__.py": "def double(n): return 2 * n\n", "tests/test_pkg.py": "import pkg\n"}
NEWER = '[project]\nname = "newer"\nversion = "1"\nrequires-python = ">=3.99"\n'
BAD = {
    "no-tests": ({"pkg.py": "x = 1\n"}, "no-tests has no test files"),
    "huge": (GOOD, "is larger than 256 MB"),
    "no-package": ({"notes.txt": "x\n", "tests/test_x.py": "\n"}, "no-package has no Python package or module"),
    "newer": (GOOD | {"pyproject.toml": NEWER}, "newer needs Python >=3.99 and this is "),
}


def test_bad_repositories_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    """A set-up script that does harm is in all of them, and never runs outside a sandbox."""
    out = tmp_path / "out"
    sources = []
    for name, (files, _) in BAD.items():
        harm = {"setup.py": f"import os\nopen({str(tmp_path / 'harm')!r}, 'w')\nos.system('touch {tmp_path}/harm')\n"}
        source = write(tmp_path / name, files | harm)
        if name == "huge":
            with open(source / "data.bin", "wb") as file:
                file.truncate(257 << 20)
        sources.append(source)
    half, nowhere = tmp_path / "half-1.0.tar.gz", tmp_path / "nowhere"
    half.write_bytes(gzip.compress(os.urandom(5000))[:3000])
    result = offbook("make", *sources, half, nowhere, "--out", out)
    assert (result.returncode, result.stdout) == (1, f"{out}: 0 tasks from 0 of {len(BAD) + 2} repositories\n")
    assert "Traceback" not in result.stderr
    assert "became tasks" not in result.stderr  # no empty tables
    assert "\u2502" not in result.stderr
    assert f"{half}: {half} is no archive that can be unpacked" in result.stderr
    assert f"{nowhere}: {nowhere} is neither a folder, nor" in result.stderr
    for source, (_, sentence) in zip(sources, BAD.values(), strict=True):
        said = [line for line in result.stderr.splitlines() if line.startswith(f"{source}: ")]
        assert [sentence in line for line in said] == [True], said
    assert not (tmp_path / "harm").exists()
    left = {path.name for folder in (out / ".factory").iterdir() for path in folder.iterdir()}
    assert left <= {"prepare.log"}


def two_repositories(place: Path, deps: Path) -> list[Path]:
    found = []
    for name in ("little", "other"):
        more = {"pyproject.toml": f'[project]\nname = "{name}"\nversion = "1"\n'}
        found.append(little(place / name, more))
        with_deps(place / "out", found[-1], deps)
    return found


@pytest.mark.slow
def test_two_processes_share_a_folder_and_one_that_dies_is_replaced(deps: Path, tmp_path: Path) -> None:
    """The second repository is a copy of the first: what is nearly the same becomes a task once."""
    sources, out = two_repositories(tmp_path, deps), tmp_path / "out"
    options = ("--out", out, "--level", "stub")
    result = offbook("make", *sources, *options, "--workers", "2")
    assert result.returncode == 0, result.stderr
    assert (out / ".factory/worker-1.log").read_text()
    tasks = [load_task(path.parent) for path in out.glob("*/[!.]*/task.toml")]  # whoever is first has most of them
    functions = [task.deleted.functions for task in tasks if task.deleted]
    assert len({*functions}) == len(functions) >= 5
    assert "nearly the same as a task of another repository" in result.stderr
    assert json.loads((out / ".factory/splits.json").read_text()).keys() == {"little", "other"}
    assert list(out.rglob(".lock")) == []
    again = offbook("make", *sources, *options)
    assert again.stdout == result.stdout
