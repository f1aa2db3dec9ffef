"""What of a suite stands in training tasks: copies are found, also under other names; what is new is not."""

from __future__ import annotations

from pathlib import Path

from offbook.core.copies import function_bodies
from offbook.tasks import load_task
from offbook.tasks.contamination import contamination
from offbook.tasks.folder import Contents, places, write_task
from offbook.types import Task

BODY = """\
    totals = {}
    for row in rows:
        key = row.name.lower().strip()
        totals[key] = totals.get(key, 0) + row.amount * row.rate
    return sorted(totals.items(), key=lambda pair: -pair[1])[:limit]
"""
RENAMED = """\
    found = {}
    for each in lines:
        label = each.name.lower().strip()
        found[label] = found.get(label, 0) + each.amount * each.rate
    return sorted(found.items(), key=lambda pair: -pair[1])[:most]
"""
OTHER = """\
    if not rows:
        raise ValueError("nothing to plan")
    with open(limit) as file:
        return [line.split(",")[0] for line in file if line and not line.startswith("#")]
"""
ASK = "Bring back the report that adds up what every customer has paid so far and sorts it by the sum"


def task(root: Path, id: str, head: str, body: str, instruction: str, origin: str) -> Task:
    stub = f'{head}\n    raise NotImplementedError("it")\n'
    contents = Contents(
        tree={"pkg.py": stub},
        gold={"pkg.py": f"{head}\n{body}"},
        hidden_tests={"test_pkg.py": "def test_it():\n    assert True\n"},
    )
    new = Task(
        **places(root / id),
        instruction=instruction,
        test_files=("test_pkg.py",),
        id=id,
        origin=origin,
        difficulty="normal",
        tools=("finish",),
        fail_to_pass=("test_pkg.py::test_it",),
        pass_to_pass=(),
    )
    write_task(new, contents)
    return load_task(root / id)


def test_each_sign_is_found_by_itself(tmp_path: Path) -> None:
    suite = task(tmp_path, "report", "def report(rows, limit):", BODY, ASK, "shop")
    unlike = task(tmp_path, "plan", "def plan(rows, limit):", OTHER, "Write a plan.", "garden")
    nothing = contamination([suite], [unlike])
    assert (nothing["contained"], nothing["worst"], nothing["same_repository"]) == (0, [], 0)
    assert nothing["code_8"] < 0.2

    copied = contamination([suite], [task(tmp_path, "copy", "def other(rows, limit):", BODY, "Do it.", "shop")])
    assert (copied["tasks_code_8"], copied["tasks_equal_body"], copied["same_repository"]) == (1, 1, 1)
    assert copied["words_13"] == 0.0

    renamed = contamination([suite], [task(tmp_path, "names", "def names(lines, most):", RENAMED, "Do it.", "x")])
    assert (renamed["tasks_code_8"], renamed["tasks_equal_body"], renamed["contained"]) == (0, 1, 1)
    assert renamed["worst"][0]["bodies"] == ("report",)

    asked = contamination([suite], [task(tmp_path, "ask", "def ask(rows, limit):", OTHER, f"Hello. {ASK}!", "x")])
    assert (asked["tasks_words_13"], asked["tasks_code_8"], asked["tasks_equal_body"]) == (1, 0, 0)

    same = contamination([suite], [suite])
    assert (same["same_task"], same["words_13"], same["code_8"]) == (1, 1.0, 1.0)


def test_what_the_tree_of_a_training_task_shows_counts(tmp_path: Path) -> None:
    suite = task(tmp_path, "report", "def report(rows, limit):", BODY, ASK, "shop")
    beside = task(tmp_path, "beside", "def beside(rows, limit):", OTHER, "Do it.", "x")
    (beside.tree / "old.py").write_text(f"def old(rows, limit):\n{BODY}")
    assert contamination([suite], [beside])["tasks_equal_body"] == 1


def test_what_is_too_short_to_tell_is_said(tmp_path: Path) -> None:
    short = task(tmp_path, "short", "def short(x):", "    return x + 1\n", "Do it.", "x")
    other = task(tmp_path, "other", "def other(x):", "    return x + 1\n", "Do it.", "x")
    found = contamination([short], [other])
    assert (found["contained"], found["too_short"]) == (0, 1)


def test_bodies_are_equal_but_for_names_and_not_for_what_they_do() -> None:
    code = [f"def f(rows, limit):\n{BODY}", f"def f(lines, most):\n{RENAMED}", f"def f(rows, limit):\n{BODY}"]
    code[2] = code[2].replace("-pair", "pair")
    one, renamed, other = (dict(function_bodies(source)) for source in code)
    assert one == renamed
    assert one.keys() != other.keys()


def test_a_repository_is_the_same_in_another_version(tmp_path: Path) -> None:
    suite = task(tmp_path, "report", "def report(rows, limit):", BODY, ASK, "shop==1.0")
    other = task(tmp_path, "plan", "def plan(rows, limit):", OTHER, "Write a plan.", "Shop==2.0")
    assert contamination([suite], [other])["same_repository"] == 1
