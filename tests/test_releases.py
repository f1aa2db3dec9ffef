"""Tasks from two releases of a package, from two source distributions to folders that hold."""

from __future__ import annotations

import asyncio
import subprocess
import tarfile
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from little_repo import FILES, deps
from test_prepare import installed, write

from offbook.agent.harness.agent import first_message
from offbook.sandbox import SandboxSpec, open_sandbox
from offbook.tasks import load_task, load_tasks
from offbook.tasks.check import check, gold_changes
from offbook.tasks.factory.audit.corpus import audit_all
from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.instruction.context import context_of
from offbook.tasks.factory.make import MakeSettings
from offbook.tasks.factory.pipeline import Made, folder_name, make_tasks
from offbook.tasks.factory.releases.cut import (
    Cutter,
    hunks_between,
    minimal,
)
from offbook.tasks.factory.releases.release import (
    Release,
    entries_for,
    entries_of,
    message_between,
    pair_of,
)
from offbook.tasks.factory.types import Feature, FunctionKey, Unprepared
from offbook.tasks.factory.workshop import open_workshop
from offbook.tasks.folder import instructions_of
from offbook.tasks.git import gold_patch, touched_by
from offbook.tasks.shared import CHANGES
from offbook.tasks.suite import SuiteRun
from offbook.types import Context, Task

__all__ = ["deps"]
BOX = SandboxSpec()
OLD = "test_a.py::test_old"
OLD_LOG = "# Changes\n\n## 2.1\n\n- First release.\n"
NEW_LOG = """\
# Changes

## 3.0

- Added `acronym`, which makes one word of the first letters of several (#12, thanks @somebody).
- `plural` takes `exceptions`, a dictionary of words with a plural of their own
  ([#31](https://example.org/31)).
- Python 2 is no longer supported.

## 2.1

- First release.
"""
WORDS = textwrap.dedent(FILES["little/words.py"]).lstrip()
NEW_WORDS = (
    WORDS.replace(
        '''def plural(word, count=2):
    """The word for so many things."""
''',
        '''def plural(word, count=2, exceptions=None):
    """The word for so many things. Words among the exceptions have a plural of their own."""
    if exceptions and word in exceptions and count != 1:
        return exceptions[word]
''',
    )
    + '''

def acronym(phrase, skip=("of", "the")):
    """One word of the first letters of a phrase."""
    letters = []
    for part in _parts(phrase):
        if part.lower() not in skip:
            letters.append(part[0].upper())
    if not letters:
        raise ValueError("nothing to shorten")
    return "".join(letters)
'''
)
COLOURS = '''\
"""Colours."""


def mixed(first, second):
    """The colour halfway between two, each a triple of numbers."""
    halves = []
    for one, other in zip(first, second):
        halves.append((one + other) // 2)
    return tuple(halves)
'''
NEW = {
    "pyproject.toml": FILES["pyproject.toml"].replace("2.1", "3.0"),
    "CHANGES.md": NEW_LOG,
    "little/__init__.py": "from little.figures import spread\nfrom little.words import acronym, initials\n",
    "little/words.py": NEW_WORDS,
    "little/colours.py": COLOURS,
    "little/data.txt": "seven\n",
    "tests/test_words.py": textwrap.dedent(FILES["tests/test_words.py"])
    .lstrip()
    .replace("import initials", "import acronym, initials")
    + textwrap.dedent("""\
        def test_acronym(): assert acronym("Society of Friends") == "SF"
        def test_acronym_of_one_word(): assert acronym("friends") == "F"
        def test_acronym_skips(): assert acronym("a b c", skip=("b",)) == "AC"
        def test_acronym_of_nothing():
            with pytest.raises(ValueError, match="nothing to shorten"): acronym("")
        def test_exceptions(): assert plural("mouse", exceptions={"mouse": "mice"}) == "mice"
        def test_exceptions_for_one(): assert plural("mouse", 1, {"mouse": "mice"}) == "mouse"
    """),
    "tests/test_colours.py": """
        import pathlib
        from little.colours import mixed

        def test_mixed(): assert mixed((0, 10, 20), (10, 10, 10)) == (5, 10, 15)
        def test_mixed_from_a_file():
            first, second = (pathlib.Path(__file__).parent / "shades.txt").read_text().split()
            assert mixed(map(int, first.split(",")), map(int, second.split(","))) == (2, 3, 4)
        def test_data(): assert (pathlib.Path("little") / "data.txt").read_text() == "seven\\n"
    """,
    "tests/shades.txt": "1,2,3 3,4,5\n",
}


def sdist(place: Path, name: str, files: dict[str, str]) -> Path:
    write(place / name, files)
    with tarfile.open(place / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(place / name, name)
    return place / f"{name}.tar.gz"


@pytest.fixture(scope="module")
def made(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Made]:
    place = tmp_path_factory.mktemp("releases")
    old = sdist(place, "little-2.1", {**FILES, "CHANGES.md": OLD_LOG})
    new = sdist(place, "little-3.0", {**FILES, **NEW})
    source, out = f"release:{old}..{new}", place / "out"
    own = installed(deps, out / ".factory" / folder_name(source) / "new") / "deps" / "little-3.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: little\nVersion: 3.0\n")
    return out, source, run(out, source)


def run(out: Path, source: str) -> Made:
    settings = MakeSettings(jobs=2, heldout=0.0)
    (result,) = asyncio.run(make_tasks([source], out, BOX, settings))
    return result


def tasks_of(made: tuple[Path, str, Made]) -> dict[str, Task]:
    """By the function that each asks for."""
    found = [load_task(path) for path in sorted((made[0] / "train").iterdir())]
    return {task.deleted.targets[0].partition("::")[2]: task for task in found if task.deleted}


def test_a_release_is_cut_into_a_task_for_each_set_of_tests(made: tuple[Path, str, Made]) -> None:
    result, tasks = made[2], tasks_of(made)
    assert not result.unprepared
    assert tasks.keys() == {"acronym", "plural", "mixed"}, result.outcomes
    assert [test.rpartition("::")[2] for test in tasks["plural"].fail_to_pass] == [
        "test_exceptions",
        "test_exceptions_for_one",
    ]
    assert {*tasks["mixed"].fail_to_pass} == {
        "tests/test_colours.py::test_mixed",
        "tests/test_colours.py::test_mixed_from_a_file",
    }
    assert not [outcome for outcome in result.outcomes if outcome.refused]


def test_the_gold_patch_has_only_the_hunks_that_the_tests_need(made: tuple[Path, str, Made]) -> None:
    tasks = tasks_of(made)
    plural = (tasks["plural"].folder / "solution/gold.patch").read_text()
    assert "exceptions" in plural
    assert "acronym" not in plural
    assert gold_changes(tasks["acronym"]).keys() == {"little/words.py"}
    assert gold_changes(tasks["mixed"]) == {"little/colours.py": COLOURS}
    assert not any("3.0" in (task.folder / "solution/gold.patch").read_text() for task in tasks.values())


def test_the_folders_hold_and_leak_nothing(made: tuple[Path, str, Made]) -> None:
    tasks = [*tasks_of(made).values()]

    async def checked() -> list[str]:
        return [await check(task, BOX) for task in tasks]

    assert asyncio.run(checked()) == ["", "", ""]
    assert [*audit_all(tasks, {}).values()] == [[], [], []]
    assert all(task.origin == "little==2.1" for task in tasks)
    for task in tasks:
        assert (task.folder / CHANGES).is_file()  # and nothing but how it differs from the older release
        assert not (task.tree / "tests" / "test_colours.py").exists()
        assert (task.tree / "CHANGES.md").read_text() == OLD_LOG
        assert "acronym" not in (task.tree / "tests" / "test_words.py").read_text()


def test_the_newer_release_is_nowhere_in_the_sandbox(made: tuple[Path, str, Made]) -> None:
    task = tasks_of(made)["acronym"]

    async def found() -> str:
        async with await open_sandbox(task.tree, BOX, python=task.suite.environment) as sandbox:
            environment = task.suite.environment
            version = "python -c 'import importlib.metadata as m; print(m.version(\"little\"))'"
            looked = f"grep -rl --include=*.py 'def acronym' / 2>/dev/null; ls {environment}/new 2>&1; {version}"
            return (await sandbox.exec(looked, 60.0)).output

    output = asyncio.run(found())
    assert "words.py" not in output
    assert "No such file" in output
    assert output.strip().endswith("2.1")


def test_the_request_is_the_changelog_entry(made: tuple[Path, str, Made]) -> None:
    tasks = tasks_of(made)
    terse = {name: instructions_of(task.folder)["terse"].strip() for name, task in tasks.items()}
    added = "Added `acronym`, which makes one word of the first letters of several."
    assert terse["acronym"].startswith(f"{added}\n\nThe tests find these names")
    assert terse["plural"] == "`plural` takes `exceptions`, a dictionary of words with a plural of their own."
    assert "mixed" in terse["mixed"]
    assert "little/colours.py" in terse["mixed"]
    assert "def acronym(phrase, skip=('of', 'the'))" in tasks["acronym"].instruction
    assert "from little.words import acronym" in tasks["acronym"].instruction
    assert "to the letter:\n\n- `nothing to shorten`" in tasks["acronym"].instruction
    assert "shorten" not in tasks["plural"].instruction
    assert "def plural(word, count=2, exceptions=None)" in tasks["plural"].instruction


def test_wrong_code_is_refused_and_tests_are_checked(made: tuple[Path, str, Made]) -> None:
    assert all(task.deleted and 0 <= task.deleted.floor < 1 for task in load_tasks(made[0] / "train"))
    assert {outcome.kind for outcome in made[2].verified} == {"release"}


def test_the_same_command_finds_it_done(made: tuple[Path, str, Made]) -> None:
    out, source, before = made
    written = [*(out / "train").glob("*/task.toml")]
    times = [path.stat().st_mtime_ns for path in written]
    again = run(out, source)
    assert {one.id: one.refused for one in again.outcomes} == {one.id: one.refused for one in before.outcomes}
    assert [path.stat().st_mtime_ns for path in written] == times


def test_the_context_is_of_the_tree_and_in_the_first_message(made: tuple[Path, str, Made]) -> None:
    task = tasks_of(made)["plural"]
    context = task.context
    assert context is not None
    for line in (*context.open, *context.edits):
        path, _, place = line.partition(":")
        lines = (task.tree / path).read_text().split("\n")
        assert 1 <= int(place.partition("-")[0].partition(":")[0]) <= len(lines)
    assert any(line.startswith("little/words.py:") for line in context.open)
    assert any(not line.startswith("little/words.py:") for line in context.open)
    message = first_message(task)
    assert message.startswith(task.instruction)
    assert f"- {context.open[0]}" in message
    assert first_message(replace(task, context=None)) == task.instruction
    assert first_message(replace(task, context=Context())) == task.instruction


def test_a_deletion_gets_a_context_of_its_own_and_always_the_same(made: tuple[Path, str, Made]) -> None:
    workshop = open_workshop(made[0] / ".factory" / folder_name(made[1]))
    key = FunctionKey("little/words.py", "plural")

    def context(name: str) -> Context:
        feature = Feature(name, "single", (key,), (key,), ())
        deletion = delete(workshop.files, workshop.symbols, feature, "stub")
        return context_of(workshop, deletion, deletion.files)

    assert context("a") == context("a")
    assert len({context(name) for name in "abcdef"}) > 1


def test_a_commit_and_its_parent_make_tasks(deps: Path, tmp_path: Path) -> None:
    """The message of the commit is what its tasks ask for."""
    place = tmp_path / "little"

    def git(*arguments: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *own, *arguments], cwd=place, check=True, capture_output=True)

    write(place, FILES)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "First")
    write(place, {**NEW, "CHANGES.md": ""})
    git("add", "-A")
    git("commit", "-q", "-m", "Colours can be mixed (#7)\n\n- `mixed` gives the colour halfway between two\n")
    source, out = f"commit:file://{place}", tmp_path / "out"
    installed(deps, out / ".factory" / folder_name(source) / "new")
    (result,) = asyncio.run(make_tasks([source], out, BOX, MakeSettings(jobs=2, heldout=0.0, max_tasks=9)))
    assert not result.unprepared, result
    [mixed] = [one for one in result.verified if "colours" in one.id]
    terse = instructions_of(out / "train" / mixed.id)["terse"]
    assert terse.startswith("`mixed` gives the colour halfway between two.")


def test_what_is_no_pair_of_releases_is_told(tmp_path: Path) -> None:
    for source in ("release:little==2.1", "release:nothing.tar.gz..here.tar.gz", "release:little", "release:"):
        with pytest.raises(Unprepared, match="is neither release:NAME"):
            pair_of(source)
    assert pair_of("release:More_Itertools==9.1.0..10.7.0")[1] == "pypi:more-itertools==10.7.0"
    (tmp_path / "a").mkdir()
    (result,) = asyncio.run(
        make_tasks([f"release:{tmp_path / 'a'}..{tmp_path}"], tmp_path / "out", BOX, MakeSettings())
    )
    assert result.unprepared
    assert "\n" not in result.unprepared


@given(st.sets(st.integers(0, 9)))
def test_hunks_put_back_together_are_the_newer_file(chosen: set[int]) -> None:
    old, new = {"little/words.py": WORDS}, {"little/words.py": NEW_WORDS, "little/colours.py": COLOURS}
    hunks = hunks_between(old, new)
    numbers = range(len(hunks.hunks))
    assert hunks.applied(numbers) == new
    some = {number for number in numbers if number in chosen}
    for path, text in hunks.applied(some).items():
        compile(text, path, "exec")
        assert ("exceptions" in text) == any(
            "exceptions" in hunks.hunks[number].new for number in some if hunks.hunks[number].path == path
        )


def test_a_list_of_names_is_cut_by_line() -> None:
    old = {"a.py": '__version__ = "1"\n__all__ = [\n "b",\n]\nfrom x import (\n b,\n)\n'}
    new = {"a.py": '__version__ = "2"\n__all__ = [\n "b",\n "c",\n "d",\n]\nfrom x import (\n b,\n c,\n)\n'}
    hunks = hunks_between(old, new)
    assert [hunk.new.strip() for hunk in hunks.hunks] == ['__version__ = "2"', '"c",', '"d",', "c,"]
    assert hunks.applied([2])["a.py"] == old["a.py"].replace('"b",\n', '"b",\n "d",\n')


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(20, 40))
def test_what_is_not_needed_is_left_out(needed: set[int], size: int) -> None:
    rounds = 0

    async def passing(sets: Sequence[frozenset[int]]) -> list[bool]:
        nonlocal rounds
        rounds += len(sets)
        return [needed <= chosen for chosen in sets]

    assert asyncio.run(minimal(frozenset(range(size)), passing)) == needed
    assert rounds <= 4 * size


class Cutting(Cutter):
    """Without sandboxes."""

    passes: dict[str, Callable[[Collection[int]], bool]]

    async def run(self, sets: Sequence[frozenset[int]], tests: Sequence[str]) -> list[SuiteRun]:
        self.rounds += len(sets)
        passed = [{test for test in tests if self.passes[test](hunks)} for hunks in sets]
        return [cast(SuiteRun, SimpleNamespace(passed=one)) for one in passed]


def cutting(count: int) -> Cutting:
    """Functions that came, each with a test that takes it alone and enters all before it."""
    functions = [f"def f{number}():\n    return {number}\n" for number in range(count)]
    hunks = hunks_between({"a.py": "x = 0\n"}, {"a.py": "\n\n".join(["x = 0\n", *functions])})
    assert [hunk.name for hunk in hunks.hunks] == [f"f{number}" for number in range(count)]
    tests = [f"test_a.py::test_{number}" for number in range(count)]
    tests_of = {FunctionKey("a.py", f"f{number}"): [OLD, *tests[number:]] for number in range(count)}
    repository = SimpleNamespace(name="a", tests=[OLD, *tests], seconds=dict.fromkeys([OLD, *tests], 0.0))
    workshop = SimpleNamespace(map=SimpleNamespace(tests_of=tests_of))
    release = SimpleNamespace(repository=repository, workshop=workshop, new_version="2.0")
    found = Cutting(cast(Release, release), hunks, BOX, lambda _: None)
    found.passes = {test: lambda hunks, number=number: number in hunks for number, test in enumerate(tests)}
    found.passes[OLD] = lambda hunks: True
    return found


def test_what_is_begun_is_finished_where_the_rounds_end(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = set()
    for rounds in range(0, 120, 8):
        monkeypatch.setattr("offbook.tasks.factory.releases.cut.MAX_ROUNDS", rounds)
        stable, pieces = asyncio.run(cutting(8).cut())
        assert stable == {OLD}
        assert all(piece.tests == (f"test_a.py::test_{piece.hunks[0]}",) for piece in pieces)
        numbers.add(len(pieces))
    assert {0, 8} <= numbers


def test_entries_of_a_changelog_without_credits_and_links() -> None:
    entries = entries_of(message_between({"CHANGES.md": OLD_LOG}, {"CHANGES.md": NEW_LOG}))
    assert entries == [
        "Added `acronym`, which makes one word of the first letters of several.",
        "`plural` takes `exceptions`, a dictionary of words with a plural of their own.",
        "Python 2 is no longer supported.",
    ]
    assert entries_for(entries, {"exceptions", "plural"}, set()) == [entries[1]]
    assert entries_for(entries, {"squeeze"}, set()) == []
    assert entries_for(entries, {"word"}, {"python", "longer"}) == [entries[2]]  # a plain word is no name


def test_touched_lines_are_counted_by_file() -> None:
    patch = gold_patch(
        {"a.py": "1\n--2\n3\n", "b.md": "x\n", "c.py": "n\n"}, {"a.py": "1\n++2\n3\n", "b.md": "y\n", "c.py": None}
    )
    assert touched_by(patch) == {"a.py": (1, 1), "b.md": (1, 1), "c.py": (1, 0)}
