"""The factory: from a repository to verified task folders, as often as it takes, and harder ones from those."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from little_repo import deps, feature, little, with_deps
from test_held import given as small
from test_remote import reply, serving

from offbook.core.config import Config
from offbook.core.runfolder import RunFolder
from offbook.rl.harder import Harder
from offbook.rl.scheduler import RolloutBuffer, Selected, read_journal
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.tasks import load_task, load_tasks
from offbook.tasks.check import check_all
from offbook.tasks.factory.audit.corpus import Corpus, Leak, audit_all, given_away
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.features import Finder
from offbook.tasks.factory.harden import NO_WAY, THERE, feature_of, harden, workshop_of
from offbook.tasks.factory.instruction.instruct import rewriter, usable
from offbook.tasks.factory.make import MakeSettings, Outcome, make_task
from offbook.tasks.factory.pipeline import (
    Made,
    folder_name,
    make_tasks,
)
from offbook.tasks.factory.records import funnel, split_of
from offbook.tasks.factory.types import Feature
from offbook.tasks.factory.workshop import Workshop
from offbook.tasks.folder import instructions_of, write_files
from offbook.types import OffbookError, Reward, Rollout, Task

__all__ = ["deps", "small"]

BOX = SandboxSpec()
Factory = tuple[Path, Path, list[Made]]
SETTINGS = MakeSettings(jobs=2, heldout=0.0)


def run_make(out: Path, *sources: Path, settings: MakeSettings = SETTINGS) -> list[Made]:
    return asyncio.run(make_tasks([str(source) for source in sources], out, BOX, settings))


def recorded(out: Path, source: Path) -> list[str]:
    path = out / ".factory" / folder_name(str(source)) / "outcomes.jsonl"
    return [json.loads(line)["id"] for line in path.read_text().splitlines()] if path.is_file() else []


def leftovers(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "train").glob(".*"))


@pytest.fixture(scope="module")
def made(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """All tasks of the little repository, made in two goes: the first is stopped when two candidates are done."""
    place = tmp_path_factory.mktemp("factory")
    source, out = little(place / "little"), place / "out"
    with_deps(out, source, deps)

    async def stopped() -> None:
        work: asyncio.Task[list[Made]] = asyncio.create_task(
            make_tasks(
                [str(source)], out, BOX, SETTINGS, on_outcome=lambda made: len(made.outcomes) < 2 or work.cancel()
            )
        )
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(stopped())
    assert len(recorded(out, source)) == 2
    assert leftovers(out) == []
    return source, out, run_make(out, source)


@pytest.fixture(scope="module")
def workshop(made: Factory) -> Workshop:
    return workshop_of(load_tasks(made[1] / "train")[0])


def prepared(made: Factory, out: Path) -> tuple[Path, Path]:
    """The repository, and another place for tasks where it is prepared already."""
    source, before, _ = made
    shutil.copytree(before / ".factory", out / ".factory", symlinks=True, copy_function=os.link)
    (out / ".factory" / folder_name(str(source)) / "outcomes.jsonl").unlink()
    return source, out


def test_a_stopped_call_is_gone_on_with_and_nothing_is_done_twice(made: Factory) -> None:
    source, out, (result,) = made
    names = recorded(out, source)
    assert len(names) == len(set(names)) == result.candidates == len(result.outcomes)
    assert result.num_tests == 32
    tasks = load_tasks(out / "train")
    assert {task.id for task in tasks} == {outcome.id for outcome in result.verified}
    assert {"squeeze", "initials", "runs"} <= {outcome.id.split("-")[2] for outcome in result.verified}
    assert not (out / "heldout").exists()
    assert leftovers(out) == []
    (again,) = run_make(out, source)
    assert recorded(out, source) == names
    assert sorted(again.outcomes, key=lambda outcome: outcome.id) == sorted(
        result.outcomes, key=lambda outcome: outcome.id
    )


def test_the_funnel_says_what_became_of_every_candidate(made: Factory) -> None:
    _, _, (result,) = made
    reasons = funnel(result.outcomes)
    assert reasons["a trivial body solves it"] >= 1
    assert sum(reasons.values()) + len(result.verified) == result.candidates
    assert all(outcome.evidence for outcome in result.outcomes if outcome.refused)
    rows = [Outcome(str(n), "r", "single", "stub", reason) for n, reason in enumerate(["a", "b", "b", ""])]
    assert list(funnel(rows).items()) == [("b", 2), ("a", 1)]


def test_every_task_holds_and_leaks_nothing(made: Factory) -> None:
    tasks = load_tasks(made[1] / "train")
    shares: list[float] = []
    assert asyncio.run(check_all(tasks, shares.append)) == [""] * len(tasks)
    assert shares[-1] == 1.0
    bad: dict[str, str] = {}
    nowhere = replace(tasks[0], id="nowhere", folder=tasks[0].folder / "nowhere")
    assert audit_all([nowhere, *tasks[:2]], bad) == {task.id: [] for task in tasks[:2]}
    assert "does not say what was deleted" in bad["nowhere"]
    copy = tasks[0].tree / "docs.txt"
    copy.write_text("\n".join(json.loads((tasks[0].folder / "solution/removed.json").read_text()).values()))
    try:
        assert [leak.path for leak in audit_all(tasks[:1], {})[tasks[0].id]] == ["tree/docs.txt"]
    finally:
        copy.unlink()


def named(out: Path, name: str) -> Task:
    return next(task for task in load_tasks(out / "train") if f"-{name}-" in task.id)


def test_a_tree_has_one_commit_and_not_the_deleted_code(made: Factory) -> None:
    task = named(made[1], "squeeze")

    def git(*arguments: str) -> str:
        command = ["git", "-c", "safe.directory=*", *arguments]
        return subprocess.run(command, cwd=task.tree, capture_output=True, text=True, check=True).stdout

    assert git("rev-list", "--all", "--count") == "1\n"
    assert git("status", "--porcelain") == ""
    everything = git("log", "-p", "--all", "--root")
    assert "def squeeze" in everything
    assert "words.append(word)" not in everything
    assert "def test_squeeze" not in everything
    assert (task.hidden_tests / "tests/test_words.py").read_text().count("def test_squeeze") == 2
    assert task.deleted is not None
    assert (task.deleted.targets, task.deleted.files) == (("little/words.py::squeeze",), 1)
    assert (task.origin, task.sources, task.difficulty) == ("little==2.1", ("little",), "easy")
    assert instructions_of(task.folder).keys() == {"terse", "normal", "detailed"}
    assert load_task(task.folder, "terse").instruction != task.instruction


def test_the_agents_sandbox_has_the_tasks_python_and_nothing_of_offbooks(made: Factory) -> None:
    task = named(made[1], "squeeze")
    look = (
        "import os, sys, sysconfig; lib = f'{sys.base_prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}'; "
        "packages = f'{lib}/site-packages'; "  # Debian's Python has none
        "print(os.listdir(packages) if os.path.isdir(packages) else [], os.path.exists(f'{lib}/test/support'))"
    )

    async def inside() -> list[tuple[int | None, str]]:
        async with await open_sandbox(task.tree, BOX, python=task.suite.environment) as sandbox:
            commands = (f'python -c "{look}"', 'python -c "import offbook"', 'python -c "import pytest, little"')
            results = [await sandbox.exec(command, 30.0) for command in (*commands, task.test_command)]
            return [(result.exit_code, result.output) for result in results]

    seen, ours, theirs, tests = asyncio.run(inside())
    assert seen == (0, "[] False\n")
    assert (ours[0], "No module named 'offbook'" in ours[1]) == (1, True)
    assert theirs == (0, "")
    assert (tests[0], "passed" in tests[1]) == (0, True)


# --- limits, splits, repositories that are no good


def test_no_more_tasks_than_asked_for_and_a_bad_repository_does_not_stop_the_others(
    made: Factory, tmp_path: Path
) -> None:
    source, out = prepared(made, tmp_path / "out")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "mod.py").write_text("x = 1\n")
    limited = replace(SETTINGS, max_tasks=1, level="stub", jobs=3)
    first, second = run_make(out, bad, source, settings=limited)
    assert first.unprepared == "bad has no test files"
    assert (first.outcomes, first.candidates) == ([], 0)
    assert (second.unprepared, len(second.verified), len(load_tasks(out / "train"))) == ("", 1, 1)
    assert leftovers(out) == []
    folder = out / ".factory" / folder_name(str(source))
    (folder / "map.json").unlink()
    (folder / "map.json").write_text("{")
    (damaged,) = run_make(out, source, settings=limited)
    assert "it cannot be prepared" in damaged.unprepared
    assert asyncio.run(check_all(load_tasks(out / "train"))) == [""]  # what the task stands on is still there


def test_an_error_of_the_factory_in_one_repository_leaves_the_others(
    made: Factory, deps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = prepared(made, tmp_path / "out")
    other = little(tmp_path / "other", {"pyproject.toml": '[project]\nname = "other"\nversion = "1"\n'})
    with_deps(out, other, deps)
    found = Finder.features

    def fails_for_other(self: Finder) -> list[Feature]:
        if self.settings.repo == "other":
            raise KeyError("nobody thought of this")
        return found(self)

    monkeypatch.setattr(Finder, "features", fails_for_other)
    limited = replace(SETTINGS, max_tasks=1, level="stub", heldout=0.0)
    first, second = run_make(out, other, source, settings=limited)
    assert "KeyError" in first.unprepared
    assert len(second.verified) == 1


def test_whole_repositories_are_held_out() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    splits = split_of(names, 0.3)
    assert sorted(splits.values()).count("heldout") == 2
    assert split_of(reversed(names), 0.3) == splits
    assert set(split_of(names[:1], 0.9).values()) == {"train"}
    assert sorted(split_of(names[:2], 0.01).values()) == ["heldout", "train"]
    assert set(split_of(names, 0.0).values()) == {"train"}
    assert sorted(split_of(names[:2], 1.0).values()) == ["heldout", "train"]
    sources = [*(f"pypi:{name}" for name in names), "/x/a", "/y/a", "/x-a"]
    assert len({folder_name(source) for source in sources}) == 9


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["train", "heldout"])),
    st.sets(st.sampled_from("abcdefgh")),
    st.floats(0.01, 1.0),
)
def test_a_repository_stays_where_it_is_and_a_second_one_is_held_out(
    settled: dict[str, str], names: set[str], heldout: float
) -> None:
    splits = split_of(names, heldout, settled)
    assert splits.keys() == settled.keys() | names
    assert settled.items() <= splits.items()
    if names - settled.keys() and len(splits) > 1 and {*settled.values()} <= {"train"}:
        assert "heldout" in splits.values()
    if names - settled.keys() and {*settled.values()} == {"heldout"}:
        assert round(heldout * len(splits)) > len(settled) or "train" in splits.values()


def test_a_repository_that_is_added_later_leaves_the_first_where_it_is(
    made: Factory, deps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fork, which has the same name and the same code, nothing is held out either."""
    source, out = prepared(made, tmp_path / "out")
    settings = replace(SETTINGS, max_tasks=1, level="stub", heldout=0.5)
    (alone,) = run_make(out, source, settings=settings)
    (task,) = load_tasks(out / "train")
    other = little(tmp_path / "other", {"pyproject.toml": '[project]\nname = "other"\nversion = "1"\n'})
    fork = little(tmp_path / "fork")
    for added in (other, fork):
        with_deps(out, added, deps)
    monkeypatch.chdir(source.parent)
    typed = [f"./{source.name}", str(source), str(other), str(fork)]
    first, second, third = asyncio.run(make_tasks(typed, out, BOX, settings))
    assert (first.source, first.split, first.verified) == (str(source), "train", alone.verified)
    assert (second.split, third.split) == ("heldout", "train")
    assert [held.id.split("-")[0] for held in load_tasks(out / "heldout")] == ["other"]
    assert task.id in {kept.id for kept in load_tasks(out / "train")}
    reasons = {outcome.id: (outcome.refused, outcome.evidence) for outcome in third.outcomes}
    assert reasons[task.id] == ("a task of that name is there", str(task.folder))


def test_unknown_levels_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    with pytest.raises(OffbookError, match="there is no level all; it is one of stub, hybrid, gone and mix"):
        run_make(tmp_path / "out", tmp_path, settings=MakeSettings(level="all"))
    assert not (tmp_path / "out").exists()


def test_code_that_is_in_another_place_too_makes_no_task(workshop: Workshop, tmp_path: Path) -> None:
    """A page that the repository has got since with the very code on it."""
    it = feature(workshop, "words.squeeze")
    page = f"# How\n\n```python\n{workshop.files['little/words.py']}```\n"
    tree = shutil.copytree(workshop.repository.tree, tmp_path / "tree")
    write_files(tree, {"docs/how.md": page})
    leaky = replace(workshop, corpus=Corpus({"tree": tree}))
    outcome = asyncio.run(make_task(leaky, it, "stub", tmp_path / "it", BOX, SETTINGS))
    assert outcome.refused == "its code is in another place too"
    assert outcome.evidence.startswith("little/words.py::squeeze in tree/docs/how.md (")
    assert {path.name for path in tmp_path.iterdir()} == {"tree"}


def test_small_parts_that_the_product_says_twice_are_no_leak() -> None:
    removed = {"a.py::target": "x\n" * 30, "a.py::helper": "y\n" * 5}
    twice = Leak("tree/pkg/b.py", "a.py::helper", "structure", "def other")
    for leak, product, leaks in (
        (twice, ["pkg"], []),
        (twice, ["other"], [twice]),
        (replace(twice, what="a.py::target"), ["pkg"], [replace(twice, what="a.py::target")]),
        (replace(twice, path="deps/pkg/b.py"), ["pkg"], [replace(twice, path="deps/pkg/b.py")]),
    ):
        assert given_away([leak], removed, ["a.py::target"], product) == leaks
    assert given_away([twice], {**removed, "a.py::helper": "y\n" * 20}, ["a.py::target"], ["pkg"]) == [twice]


def test_an_interrupted_task_leaves_nothing(workshop: Workshop, tmp_path: Path) -> None:
    async def interrupted() -> None:
        work = asyncio.create_task(
            make_task(workshop, feature(workshop, "words.squeeze"), "stub", tmp_path / "it", BOX, SETTINGS)
        )
        while not (tmp_path / ".it").exists():
            await asyncio.sleep(0.01)
            assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(interrupted())
    assert list(tmp_path.iterdir()) == []


# --- a model's words

SQUEEZE = """\
    words = []
    for word in text.split(" "):
        if word:
            words.append(word)
    return " ".join(words)
"""


def test_a_models_words_are_kept_where_they_can_be_used(workshop: Workshop) -> None:
    deletion = delete(workshop.files, workshop.symbols, feature(workshop, "words.squeeze"), "stub")
    good = "Could you write `squeeze` again? It makes every run of spaces one space."
    versions = {"terse": good, "normal": "Please write it again.", "detailed": f"`squeeze` is\n{SQUEEZE}", "odd": good}
    with serving(reply(f"Here:\n```json\n{json.dumps(versions)}\n```")) as server:
        rewrite = rewriter(f"http://127.0.0.1:{server.server_address[1]}/v1", "small")
        words = {"terse": "one", "normal": "two {with braces}", "detailed": "three"}
        assert asyncio.run(rewrite(words, deletion)) == {"terse": good}
        (_, _, body) = server.asked[0]
    assert body["model"] == "small"
    assert "two {with braces}" in body["messages"][0]["content"]
    assert not usable("terse", good + " " * 400 + "x", deletion)
    assert not usable("normal", "", deletion)
    for nonsense in ("no JSON", "{broken", "[1]", '{"terse": 5}'):
        with serving(reply(nonsense)) as server:
            rewrite = rewriter(f"http://127.0.0.1:{server.server_address[1]}/v1", "small")
            assert asyncio.run(rewrite(words, deletion)) == {}


# --- harder


def test_each_way_of_making_a_task_harder(made: Factory, workshop: Workshop, tmp_path: Path) -> None:
    task = named(made[1], "plural")
    outcomes = asyncio.run(harden(task, tmp_path / "harder", BOX, workshop=workshop))
    by_way = dict(zip(("terser", "gone", "widen", "merge"), outcomes, strict=True))
    needed = by_way.pop("gone")
    assert (needed.refused, needed.evidence) == (NO_WAY, "gone")
    assert [outcome.refused for outcome in by_way.values()] == [""] * 3, outcomes
    tasks = {way: load_task(tmp_path / "harder" / outcome.id) for way, outcome in by_way.items()}
    assert tasks["terser"].instruction == load_task(tasks["terser"].folder, "terse").instruction
    assert len(tasks["terser"].instruction) < len(task.instruction)
    assert tasks["terser"].fail_to_pass == task.fail_to_pass
    assert all(tasks[way].deleted is not None for way in tasks)
    wide, merged = tasks["widen"].deleted, tasks["merge"].deleted
    assert wide is not None
    assert merged is not None
    assert {name.rpartition("::")[2] for name in wide.targets} >= {"plural", "labelled"}
    assert len(merged.targets) == 2
    assert {*merged.functions} > {"little/words.py::plural"}
    assert all(why == "" for why in asyncio.run(check_all(list(tasks.values()))))
    (there,) = asyncio.run(harden(task, tmp_path / "harder", BOX, ["terser"], workshop))
    assert (there.refused, there.evidence) == (THERE, str(tasks["terser"].folder))
    (nowhere,) = asyncio.run(harden(named(made[1], "squeeze"), tmp_path / "harder", BOX, ["widen"], workshop))
    assert (nowhere.refused, nowhere.evidence) == (NO_WAY, "widen")


def test_easy_tasks_are_made_harder_during_a_run(made: Factory, tmp_path: Path) -> None:
    """One that is always solved, where others are often enough. Killed in the middle, the run takes it up again; none
    comes twice."""
    config = Config.model_validate({"tasks": {"harden": 0.8, "order": "select"}})
    tasks, run = {task.id: task for task in load_tasks(made[1] / "train")}, RunFolder(tmp_path / "run")
    task = named(made[1], "plural")
    added: list[Task] = []

    def group(name: str, solved: int) -> list[Rollout]:
        id = named(made[1], name).id
        return [Rollout(f"{id}/{at}", id, id, (), reward=Reward({"outcome": float(at < solved)})) for at in range(4)]

    solved = group("plural", 4)

    def begun(done: int = 0) -> Harder:
        order: Any = SimpleNamespace(add=added.append)
        return Harder(config, RolloutBuffer(run, 4), dict(tasks), order, done)

    first = begun()
    first.observe([solved])
    assert first._easy.empty(), "one group says little"
    run.write_rollouts(1, [*solved, *group("runs", 1)])
    second = begun(done=1)
    second.observe([group("squeeze", 3)])
    assert second._easy.empty(), "lately two of three are solved"
    second.observe([solved] * 4)  # and is killed before it comes to it
    (easy,) = (line for line in read_journal(run.path) if line["state"] == "easy")
    assert (easy["task"], easy["recent"]) == (task.id, pytest.approx(6 / 7))

    async def until_made(harder: Harder, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                work = asyncio.create_task(harder.run())
                while not any(line["state"] == "harder" for line in read_journal(run.path)) and not work.done():
                    await asyncio.sleep(0.05)
        work.cancel()

    asyncio.run(until_made(begun(), 120))
    assert {one.id.rpartition("-")[2] for one in added} == {"terser", "widen", "merge"}
    assert not {one.id for one in added} & {*tasks}
    assert {*RolloutBuffer(run, 4).made} == {one.id for one in added}
    again = begun()
    again.observe([solved] * 3)
    assert again._easy.empty(), "it was made harder before"
    run.config_file.write_text(config.to_toml())
    order = Selected(list(tasks.values()), 0, run, 0, tasks)
    for one in added:
        order.add(one)
    drawn = order.tasks_of(1, len(added))
    assert {one.id for one in drawn} == {one.id for one in added}


def test_names_that_were_stubs_go(made: Factory, workshop: Workshop, tmp_path: Path) -> None:
    task = named(made[1], "squeeze")
    assert "def squeeze" in (task.tree / "little/words.py").read_text()
    (gone,) = asyncio.run(harden(task, tmp_path, BOX, ["gone"], workshop))
    harder = load_task(tmp_path / gone.id)
    assert "def squeeze" not in (harder.tree / "little/words.py").read_text()
    (again,) = asyncio.run(harden(harder, tmp_path, BOX, ["gone"], workshop))
    assert (again.refused, again.evidence) == (NO_WAY, "gone")


def test_a_foreign_task_cannot_be_made_harder(made: Factory, tmp_path: Path) -> None:
    task = named(made[1], "runs")
    for foreign in (replace(task, deleted=None), replace(task, suite=replace(task.suite, environment=None))):
        with pytest.raises(OffbookError, match="was not made from a repository that is still here"):
            asyncio.run(harden(foreign, tmp_path, BOX))


def test_the_feature_of_a_task_is_found_again(made: Factory, workshop: Workshop) -> None:
    task = named(made[1], "initials")
    found = feature_of(task, workshop)
    assert [key.name for key in found.functions] == ["_parts", "initials"]
    assert set(found.tests) == set(task.fail_to_pass)
