"""Hints that give the answer away are refused however they are dressed; general rules pass."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from little_repo import FILES

from offbook.signals.feedback.leaks import CODE, NAME, NUMBER, TEST, WORDS, Said, given_away, leak, secrets_of
from offbook.tasks import load_task
from offbook.tasks.factory.delete.delete import delete_functions
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import Task

PRICE = '''
    def postage(grams, abroad=False):
        """What it costs to send a parcel of so many grams, in cents."""
        stamp_price = 1385 if abroad else 417
        pieces = -(-grams // 250)  # the carrier rounds upwards
        return pieces * stamp_price
'''
PRICE_TESTS = """
    from little.post import postage

    def test_postage(): assert postage(251) == 834
    def test_postage_abroad(): assert postage(10, abroad=True) == 1385
"""


def made(folder: Path, path: str, name: str, tests: tuple[str, ...]) -> Task:
    """A task folder of the little repository, deleted and written as all task folders are."""
    more = {"little/post.py": PRICE, "tests/test_post.py": PRICE_TESTS}
    files = {file: dedent(text).lstrip("\n") for file, text in {**FILES, **more}.items()}
    tree = delete_functions(files, [(path, name)], tests)
    whole = re.search(rf"^def {name}\(.*?(?=^def |\Z)", files[path], re.M | re.S)
    hidden = {file: text for file, text in files.items() if file.startswith("tests/")}
    contents = Contents(
        tree={file: tree.get(file) for file in files if file in tree},
        gold={path: files[path]},
        hidden_tests=hidden,
        removed={f"{path}::{name}": whole[0] if whole else ""},
    )
    new = Task(
        **places(folder),
        instruction=f"Bring back `{name}` in {path}.",
        test_files=tuple(hidden),
        id=f"little-{name}",
        origin="little",
        difficulty="normal",
        tools=("read_file", "edit_file", "run_command"),
        fail_to_pass=tests,
        pass_to_pass=("tests/test_figures.py::test_figures[3]",),
    )
    write_task(new, contents)
    return load_task(folder)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    root = tmp_path_factory.mktemp("tasks")
    post = ("tests/test_post.py::test_postage", "tests/test_post.py::test_postage_abroad")
    plural = ("tests/test_words.py::test_plural[cat-cats]", "tests/test_words.py::test_one")
    spread = ("tests/test_figures.py::test_spread", "tests/test_figures.py::test_spread_of_nothing")
    runs = ("tests/test_figures.py::RunsTest::test_runs",)
    initials = ("tests/test_words.py::test_initials", "tests/test_words.py::test_initials_of_nobility")
    return {
        "postage": made(root / "postage", "little/post.py", "postage", post),
        "plural": made(root / "plural", "little/words.py", "plural", plural),
        "spread": made(root / "spread", "little/figures.py", "spread", spread),
        "runs": made(root / "runs", "little/figures.py", "runs", runs),
        "initials": made(root / "initials", "little/words.py", "initials", initials),
    }


LEAKING = [
    ("postage", "Reminder: return pieces * stamp_price.", CODE),
    ("postage", "Reminder: the function ends with `return  pieces*stamp_price`.", CODE),
    ("postage", "Reminder: pieces is\n  -(-grams\n  // 250)", CODE),
    ("postage", "Reminder: divide `grams // 250` and round up.", CODE),
    ("postage", r"Reminder: write \"pieces = -(-grams // 250)\nreturn pieces\"", CODE),
    ("postage", "Reminder: &lt;b&gt;pieces * stamp_price&lt;/b&gt; is the cost.", CODE),
    ("postage", "Reminder: keep the stamp_price in a variable.", NAME),
    ("postage", "Reminder: keep the *stamp* _price in a variable.", NAME),
    ("postage", "Reminder: keep the STAMP_PRICE apart.", NAME),
    ("postage", "Reminder: keep the stamp\u200b_price apart.", NAME),
    ("postage", "Reminder: compute `pieces` first.", NAME),
    ("postage", "Reminder: compute pieces = something first.", NAME),
    ("postage", "Reminder: the price abroad is 1385 cents.", NUMBER),
    ("postage", "Reminder: the price abroad is 1,385 cents.", NUMBER),
    ("postage", "Reminder: the price is 0x1a1 cents.", NUMBER),
    ("postage", "Reminder: a stamp costs 4.17e2 cents.", NUMBER),
    ("postage", "Reminder: test_postage_abroad must pass.", TEST),
    ("postage", "Reminder: look at tests/test_post.py::test_postage before you write.", TEST),
    ("postage", "Reminder: the file test_post.py has your answer.", TEST),
    ("postage", "Reminder: assert postage(251) == 834 must hold.", TEST),
    ("spread", "Reminder: the result is highest \u2212 lowest.", CODE),
    ("spread", "Reminder: use (highest) - (lowest).", CODE),
    ("spread", "Reminder: lowest, highest = ordered[ 0 ], ordered[ -1 ]", CODE),
    ("spread", "Reminder: raise ValueError('no values') if not ordered", CODE),
    ("spread", "Reminder: call `sorted( values )` at the start.", CODE),
    ("spread", "Reminder: take the lowest and the highest of the ordered values.", WORDS),
    ("plural", "Reminder: a word that ends in y gets \u2018ies\u2019.", NAME),
    ("plural", 'Reminder: letters like "aeiou" matter.', NAME),
    ("plural", "Reminder: check word.endswith((`s`, `x`)).", CODE),
    ("plural", "Reminder: if word . endswith ( 'y' ) and word [ -2 : -1 ] not in 'aeiou'", CODE),
    ("initials", "Reminder: skip parts in ('von', 'van', 'de').", CODE),
    ("initials", "Reminder: letters.append(part[0].upper()) for every part.", CODE),
    ("initials", "Reminder: John von Neumann becomes J.N. in test_initials_of_nobility.", TEST),
]

CLEAN = [
    "Reminder: available tools are read_file, edit_file.",
    "Reminder: available tools are read_file, edit_file, run_command.",
    "Reminder: give a tool one JSON object with exactly its parameters.",
    "Reminder: do not repeat a call, its answer is above.",
    "Reminder: never edit tests, change the source.",
    "Reminder: run the tests before you say that you are done.",
    "Reminder: read a file before you edit it; do not guess what it says.",
    "Reminder: when a command fails, read its output and find the cause before you try again.",
    "Reminder: change only what the task asks for.",
    "Reminder: search for a name instead of opening every file.",
    "Reminder: look at how `squeeze` and its neighbours are written and follow their style.",
    "Reminder: the docstring says what the function has to do; read it first.",
    "Reminder: say plainly what you did not check.",
    "Reminder: prefer the smallest change that works; add no options that nobody asked for.",
    "Reminder: an error message names the file and the line; go there.",
    "Reminder: tests/test_figures.py shows how this package tests its functions.",
    "Reminder: `run_command` takes one argument called `command`.",
    "Reminder: edge cases such as an empty input belong to the behaviour that was asked for.",
    "Reminder: after two failed attempts, step back and read the error again.",
    "Reminder: a path is relative to the root of the repository (no leading slash).",
    "Reminder: report the result of the last run, not the one you expect.",
    "Reminder: imports go at the top of the file, as in `import re`.",
]


@pytest.mark.parametrize(("name", "hint", "reason"), LEAKING)
def test_leaks_are_refused(tasks: dict[str, Task], name: str, hint: str, reason: str) -> None:
    assert leak(hint, tasks[name]) == reason


@pytest.mark.parametrize("hint", CLEAN)
def test_general_rules_pass(tasks: dict[str, Task], hint: str) -> None:
    assert {name: leak(hint, task) for name, task in tasks.items()} == dict.fromkeys(tasks)


def test_what_the_agent_can_read_is_no_secret(tasks: dict[str, Task]) -> None:
    """The same words are a leak for the task that lost them and none for one whose tree still has them."""
    for hint in ("Reminder: return pieces * stamp_price.", "Reminder: the price abroad is 1385 cents."):
        assert leak(hint, tasks["postage"])
        assert leak(hint, tasks["spread"]) is None
    assert leak("Reminder: `postage` in little/post.py is what you were asked for.", tasks["postage"]) is None


def test_every_line_of_every_body_is_refused(tasks: dict[str, Task]) -> None:
    """Whatever the spacing and the quotes; a line that says as little as `return word` may pass."""
    rng, num_lines = random.Random(0), 0
    for task in tasks.values():
        patch = (task.folder / "solution" / "gold.patch").read_text()
        for line in re.findall(r"^\+ +(.*)", patch, re.M):
            if len(re.findall(r"\w+|[^\w\s]", line)) < 6:
                continue
            num_lines += 1
            spaced = "".join(
                rng.choice(["", " ", "\n"]) + token + rng.choice(["", " "]) if not token[:1].isalnum() else token
                for token in re.findall(r"\w+|\s+|[^\w\s]", line)
            )
            for dressed in (line, spaced, line.replace('"', "'"), f"`{line}`", line.replace(" ", "\n")):
                assert leak(f"Reminder: write {dressed} there.", task), dressed
    assert num_lines >= 12


def test_a_folder_without_a_solution_has_no_secrets(tasks: dict[str, Task], tmp_path: Path) -> None:
    bare = replace(tasks["spread"], folder=tmp_path, hidden_tests=tmp_path / "none", fail_to_pass=())
    assert leak("Reminder: the result is highest - lowest.", bare) is None
    assert secrets_of(bare).wanted == ()


def test_comments_are_no_code(tasks: dict[str, Task]) -> None:
    secrets = secrets_of(tasks["postage"])
    assert "pieces" in secrets.solution.words
    assert not {"carrier", "rounds", "upwards"} & (secrets.solution.words | secrets.names)


def test_a_body_is_known_when_everything_in_it_is_renamed(tasks: dict[str, Task]) -> None:
    body = """acc = []
        for it in things:
            if acc and acc[-1][0] == it: acc[-1] = (it, acc[-1][1] + 1)
            else: acc.append((it, 1))
        return acc"""
    secrets = secrets_of(tasks["runs"])
    nothing = Said(set(), set(), set())
    only_bodies = replace(secrets, solution=nothing, tests=nothing)
    assert given_away(body, only_bodies) == CODE
    assert given_away(body.replace("acc and", "acc or not").replace("else:", "elif it:"), only_bodies) is None


def test_tools_and_the_language_are_no_secrets(tasks: dict[str, Task]) -> None:
    hint = "Reminder: available tools are read_file, stamp_price."
    assert leak(hint, tasks["postage"]) == NAME
    assert leak(hint, replace(tasks["postage"], tools=("read_file", "stamp_price"))) is None
    assert leak("Reminder: prefer `sorted` to loops of your own.", tasks["spread"]) is None


def test_names_of_files_and_the_smallest_numbers_are_no_secrets(tasks: dict[str, Task], tmp_path: Path) -> None:
    (tmp_path / "stamp_price.py").touch()
    bare = replace(tasks["postage"], tree=tmp_path)
    assert leak("Reminder: keep the stamp_price in a variable.", bare) is None
    bare = replace(tasks["plural"], tree=tmp_path)
    assert leak("Reminder: do 1 thing at a time, 2 at most.", bare) is None
