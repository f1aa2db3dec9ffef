"""Deletion: what goes goes with all that names it, the rest keeps its bytes, and the gold patch brings it back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbook.tasks.factory.delete.delete import delete
from offbook.tasks.factory.delete.symbols import read_symbols
from offbook.tasks.factory.delete.visible import without_tests
from offbook.tasks.factory.types import Deletion, Feature, FunctionKey, Level
from offbook.tasks.factory.verification.verify import trivial_bodies
from offbook.tasks.git import gold_patch
from offbook.types import is_test_file

LEVELS: tuple[Level, ...] = ("stub", "hybrid", "gone")


def take(files: Mapping[str, str], level: Level, *names: str) -> Deletion:
    """Delete `names`, each path::name."""
    product = {path: text for path, text in files.items() if path.endswith(".py") and not is_test_file(path)}
    keys = tuple(sorted(FunctionKey(*name.split("::")) for name in names))
    return delete(files, read_symbols(product, (".",)), Feature("f", "single", keys[:1], keys, ()), level)


def after(files: Mapping[str, str], deletion: Deletion) -> dict[str, str]:
    return {path: text for path, text in {**files, **deletion.files}.items() if text is not None}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())
    return root


def names_of(keys: tuple[FunctionKey, ...]) -> list[str]:
    return [key.name for key in keys]


# --- one module of everything

PARTS = {
    "plain": 'def plain(x):  # note\n    """Doc."""\n    y = x\n    # why\n    return y\n    # the end\n',
    "_hidden": "def _hidden(x): return x\n",
    "late": "@decorate\nasync def late():\n\tasync with a:\n\t\tyield 1\n",
    "semicolons": 'def semicolons(): "Doc."; x = 1; return x\n',
    "branch": "if sys:\n    def branch():\n        return 1\nelse:\n    def branch():\n        return 2\n",
    "attempt": "try:\n    import fast\nexcept ImportError:\n    def attempt(): return 1\n",
    "outer": "def outer():\n    def inner():\n        return 1\n    return inner\n",
    "Thing.method": "class Thing:\n    size = 1\n\n    def method(self):\n        return 1\n"
    "    def stays(self): return 2\n",
    "Sandbox.value": "class Sandbox:\n    @property\n    def value(self):\n        return 1\n\n"
    "    @value.setter\n    def value(self, new):\n        self.x = new\n",
    "_Alone.run": "class _Alone:\n    def run(self):\n        return 1\n",
}
BETWEEN = ["", "\n\n", "# a comment\n", "VALUE = {  'odd' :1 }\n", "text = '''\ndef plain():\n    return 1\n'''\n"]
modules = st.lists(
    st.tuples(st.sampled_from(BETWEEN), st.sampled_from(sorted(PARTS))), min_size=1, unique_by=lambda p: p[1]
)


def sources(text: str) -> dict[str, list[str | None]]:
    """Every function's own text, by name."""
    found: dict[str, list[str | None]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, []).append(ast.get_source_segment(text, node))
    return found


@settings(max_examples=60)
@given(parts=modules, data=st.data(), level=st.sampled_from(LEVELS))
def test_whatever_is_not_deleted_keeps_its_bytes(
    parts: list[tuple[str, str]], data: st.DataObject, level: Level
) -> None:
    text = "import sys\n" + "".join(between + PARTS[name] for between, name in parts)
    chosen = data.draw(st.lists(st.sampled_from([name for _, name in parts]), min_size=1, unique=True))
    deletion = take({"m.py": text}, level, *(f"m.py::{name}" for name in chosen))
    shorter = deletion.files.get("m.py") or ""
    simple = {name.rpartition(".")[2] for name in chosen}
    gone = simple | ({"inner"} if "outer" in chosen else set())
    assert {n: s for n, s in sources(text).items() if n not in gone} == {
        n: s for n, s in sources(shorter).items() if n not in gone
    }
    assert set(names_of(deletion.stubbed)) | set(names_of(deletion.deleted)) == set(chosen)
    kept = {name.rpartition(".")[2] for name in names_of(deletion.stubbed)}
    assert kept <= set(sources(shorter))
    assert not {name.rpartition(".")[2] for name in names_of(deletion.deleted)} & set(sources(shorter))
    if level == "stub":
        assert not deletion.deleted
    for name in chosen:
        assert deletion.removed.get(f"m.py::{name}") or deletion.removed[f"m.py::{name.partition('.')[0]}"]


@settings(max_examples=25, deadline=None)
@given(parts=modules, data=st.data(), level=st.sampled_from(LEVELS), ending=st.sampled_from(["", "x = 1", "\n\n"]))
def test_deletion_and_gold_patch_is_the_original(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[tuple[str, str]],
    data: st.DataObject,
    level: Level,
    ending: str,
) -> None:
    files = {"a/m.py": "".join(between + PARTS[name] for between, name in parts) + ending, "b.py": "y = 1"}
    name = data.draw(st.sampled_from([name for _, name in parts]))
    deletion = take(files, level, f"a/m.py::{name}")
    assert patched(tmp_path_factory.mktemp("t"), files, deletion.files, "git", "apply", "-") == files


def patched(root: Path, files: Mapping[str, str], changed: Mapping[str, str | None], *command: str) -> dict[str, str]:
    write(root, {path: text for path, text in {**files, **changed}.items() if text is not None})
    subprocess.run(command, cwd=root, input=gold_patch(files, changed).encode(), check=True, capture_output=True)
    return {str(p.relative_to(root)): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("command", [("git", "apply", "-"), ("patch", "-p1", "--quiet")])
def test_git_and_patch_both_take_the_gold_patch(tmp_path: Path, command: tuple[str, ...]) -> None:
    files = {
        "whole.py": "a = 1\nb = 2\n",
        "deep/er/gone.py": "no newline at the end",
        "two words.py": "x\ny\n",
        "windows.py": "a\r\nb\r\nc\r\n",
        "feed.py": "a\x0cb\u2028c\nd\n",
        "same.py": "s\n",
        "shorter.py": "1\n2\n3",
        "longer.py": "1\n2\n3\n",
    }
    changed: dict[str, str | None] = {
        "whole.py": "a = 1\n", "deep/er/gone.py": None, "two words.py": "x\n", "windows.py": "a\r\nc\r\n",
        "feed.py": "d\n", "shorter.py": "1\n2\n", "longer.py": "1\n2", "new.py": "goes\n",
    }  # fmt: skip
    assert patched(tmp_path, files, changed, *command) == files
    assert gold_patch(files, {}) == ""


# --- a small package at the three levels

PACKAGE = {
    "pkg/__init__.py": 'from .core import join, split\nfrom . import extra\n\n__all__ = ["join", "split"]\n',
    "pkg/core.py": '''"""Text."""
import os
import re

from ._deep import _clean


def join(parts):
    """Join parts.

    >>> join(["a"])
    'a'
    """
    return _glue(re.sub("x", "y", parts))


def _glue(text):
    return _clean(text)


def split(text):
    """Split text.

    >>> join(split("a b"))
    'ab'

    >>> split("a")
    ['a']
    """
    return os.fspath(text).split()
''',
    "pkg/_deep.py": "def _clean(text):\n    return text\n",
    "pkg/extra.py": """from pkg import core
from pkg.core import join as glue, split


def whisper(text):
    return split(text)
""",
    "README.md": "# Text\n\nUse `join` to join.\n",
    "tests/test_core.py": """import pytest
from pkg import join, split
import pkg.core as core


def helper():
    return join([])


def test_join():
    assert helper() == ""


@pytest.mark.parametrize("f", [core.join, core.split])
def test_both(f):
    assert f


def test_split():
    assert split("a") == ["a"]
""",
}
JOIN = ("pkg/core.py::join", "pkg/core.py::_glue", "pkg/_deep.py::_clean")
STUB = 'raise NotImplementedError("join")'


def test_stub_leaves_every_name_and_every_import() -> None:
    deletion = take(PACKAGE, "stub", *JOIN)
    assert set(deletion.files) == {"pkg/core.py", "pkg/_deep.py"}
    assert deletion.files["pkg/_deep.py"] == 'def _clean(text):\n    raise NotImplementedError("_clean")\n'
    core = str(deletion.files["pkg/core.py"])
    assert core == PACKAGE["pkg/core.py"].replace('return _glue(re.sub("x", "y", parts))', STUB).replace(
        "return _clean(text)", 'raise NotImplementedError("_glue")'
    )
    assert deletion.removed == {
        "pkg/core.py::join": 'return _glue(re.sub("x", "y", parts))',
        "pkg/core.py::_glue": "return _clean(text)",
        "pkg/_deep.py::_clean": "return text",
    }


def test_hybrid_stubs_public_names_and_deletes_helpers_their_files_and_imports() -> None:
    deletion = take(PACKAGE, "hybrid", *JOIN)
    assert names_of(deletion.stubbed) == ["join"]
    assert names_of(deletion.deleted) == ["_clean", "_glue"]
    assert deletion.files["pkg/_deep.py"] == "\n"
    before = PACKAGE["pkg/core.py"]
    assert deletion.files["pkg/core.py"] == before.replace("import re\n", "").replace(
        "\nfrom ._deep import _clean\n", ""
    ).replace('return _glue(re.sub("x", "y", parts))', STUB).replace(
        "\n\ndef _glue(text):\n    return _clean(text)\n", ""
    )
    assert set(deletion.files) == {"pkg/core.py", "pkg/_deep.py"}
    assert deletion.removed["pkg/core.py::_glue"] == "def _glue(text):\n    return _clean(text)"


def test_gone_takes_imports_and_exports() -> None:
    deletion = take(PACKAGE, "gone", *JOIN)
    assert not deletion.stubbed
    tree = after(PACKAGE, deletion)
    assert tree["pkg/_deep.py"] == "\n"
    assert tree["pkg/__init__.py"] == 'from .core import split\nfrom . import extra\n\n__all__ = ["split"]\n'
    assert tree["pkg/extra.py"] == (
        "from pkg import core\nfrom pkg.core import split\n\n\ndef whisper(text):\n    return split(text)\n"
    )
    assert tree["README.md"] == PACKAGE["README.md"]
    core = tree["pkg/core.py"]
    assert core.startswith('"""Text."""\nimport os\n\n\ndef split(text):\n')
    assert "def join" not in core


@pytest.mark.parametrize("level", LEVELS)
def test_the_rest_still_imports_and_the_visible_tests_pass(tmp_path: Path, level: Level) -> None:
    files = {**PACKAGE}
    files["pkg/core.py"] = files["pkg/core.py"].replace("_clean(text)\n", "''.join(_clean(text))\n")
    deletion = take(files, level, *JOIN)
    failing = ("tests/test_core.py::test_join", "tests/test_core.py::test_both[join]")
    visible = without_tests(files, failing, deletion)
    tree = {path: text for path, text in {**after(files, deletion), **visible}.items() if text is not None}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=write(tmp_path, tree), capture_output=True, text=True, env={"PYTHONPATH": "."})
    assert done.returncode == 0, done.stdout
    assert ("join" in tree["tests/test_core.py"].replace("return join", "")) == (level != "gone")
    assert "def helper" in tree["tests/test_core.py"]


# --- what is still needed is stubbed instead

HELPER = {"m.py": "def top():\n    return _deep()\n\n\ndef _deep():\n    return 1\n", "n.py": "import m\n\n\n"}


USED = "hybrid", ["_deep", "top"], []
UNUSED = "hybrid", ["top"], ["_deep"]
PUBLIC = "gone", ["top"], ["_deep"]


@pytest.mark.parametrize(
    ("level", "stubbed", "deleted", "more"),
    [
        (*USED, {"n.py": "from m import _deep\n\ndef use():\n    return _deep()\n"}),
        (*USED, {"n.py": "import m\n\ndef use():\n    return m._deep()\n"}),
        (*USED, {"n.py": "def use():\n    from m import _deep\n    return _deep()\n"}),
        (*USED, {"n.py": "from m import _deep\nTABLE = {'a': _deep}\n"}),
        (*USED, {"n.py": "from m import *\nfrom m import _deep as d\nclass A:\n    x = d\n"}),
        (*USED, {"tests/test_m.py": "from m import _deep\n\ndef test_a():\n    assert _deep()\n"}),
        (*USED, {"tests/test_m.py": "def test_a(mocker):\n    mocker.patch('m._deep')\n"}),
        (*UNUSED, {"m.py": HELPER["m.py"] + "def use(_deep):\n    return _deep\n"}),  # a local name
        (*UNUSED, {"m.py": HELPER["m.py"] + "def use():\n    for _deep in []:\n        return _deep\n"}),
        (*UNUSED, {"n.py": "import other\n\ndef use():\n    return other._deep\n"}),
        (*UNUSED, {"n.py": '"""Not like m._deep."""\n'}),
        (*UNUSED, {"n.py": "from m import _deep\n"}),  # an import that is not used
        (*PUBLIC, {"n.py": "import m\n\ndef use():\n    return m.top()\n"}),
        (*PUBLIC, {"n.py": "from m import top as t\n\ndef use(x=t):\n    return x\n"}),
        (*PUBLIC, {"n.py": "import m\nfor f in [1]:\n    m.top\nif m.top: pass\n"}),
        (*PUBLIC, {"tests/conftest.py": "from m import top\n"}),
        (*PUBLIC, {"n.py": "import m\nalias = m.top\n\ndef use():\n    return alias()\n"}),
        (*PUBLIC, {"n.py": "import m\nHANDLERS = {'first': m.top}\n"}),
    ],
)
def test_what_something_left_over_names_is_stubbed(
    level: Level, stubbed: list[str], deleted: list[str], more: dict[str, str]
) -> None:
    deletion = take({**HELPER, **more}, level, "m.py::top", "m.py::_deep")
    assert (names_of(deletion.stubbed), names_of(deletion.deleted)) == (stubbed, deleted)


@pytest.mark.parametrize(
    ("asked", "more", "used"),
    [
        ("gone", "", "gone"),
        ("gone", "import m\n\ndef use():\n    return m.top()\n", "hybrid"),
        ("gone", "import m\n\ndef use():\n    return m.top() + m._deep()\n", "stub"),
        ("hybrid", "", "hybrid"),
        ("hybrid", "from m import _deep\nTABLE = {'a': _deep}\n", "stub"),
        ("stub", "", "stub"),
    ],
)
def test_the_level_is_the_one_that_came_of_it(asked: Level, more: str, used: Level) -> None:
    files, (target, helper) = {**HELPER, "n.py": more}, map(FunctionKey.of, ("m.py::top", "m.py::_deep"))
    feature = Feature("it", "single", (target,), (target, helper), ())
    assert delete(files, read_symbols(files, (".",)), feature, asked).level == used


CLASSES = """class Base:
    def run(self):
        return self.step()

    def step(self):
        return 1


class Child(Base):
    def __init__(self):
        self.x = 1

    def step(self):
        return 2

    def lonely(self):
        return 3

    def used(self):
        return 4

    def use(self):
        return self.used()
"""


def test_methods_go_from_their_class_but_not_overrides_dunders_and_what_self_calls() -> None:
    names = ("step", "lonely", "used")
    deletion = take({"m.py": CLASSES}, "gone", *(f"m.py::Child.{name}" for name in names))
    assert names_of(deletion.deleted) == ["Child.lonely"]
    assert names_of(deletion.stubbed) == ["Child.step", "Child.used"]
    text = str(deletion.files["m.py"])
    assert 'raise NotImplementedError("Child.step")' in text
    dunder = take({"m.py": CLASSES.replace("__init__", "__len__")}, "gone", "m.py::Child.__len__")
    assert names_of(dunder.stubbed) == ["Child.__len__"]


def test_an_attribute_of_something_unknown_counts_unless_its_name_is_common() -> None:
    one = "class A:\n    def spin(self):\n        return 1\n\ndef use(x):\n    return x.spin()\n"
    assert names_of(take({"m.py": one}, "gone", "m.py::A.spin").stubbed) == ["A.spin"]
    other = (
        "class A:\n    def spin(self):\n        return 1\n\nclass B:\n    def spin(self):\n        return self.spin()\n"
    )
    assert names_of(take({"m.py": other}, "gone", "m.py::A.spin").deleted) == ["A.spin"]
    common = one.replace("spin", "append")
    assert names_of(take({"m.py": common}, "gone", "m.py::A.append").deleted) == ["A.append"]


def test_a_property_that_others_read_keeps_the_function_it_is_made_from() -> None:
    text = "class A:\n    def _get(self):\n        return 1\n    value = property(_get)\n"
    text += "    def use(self):\n        self.value = 2\n"
    assert names_of(take({"m.py": text}, "gone", "m.py::A._get").stubbed) == ["A._get"]


def test_a_class_that_nobody_else_can_make_goes_as_a_whole() -> None:
    names = [f"m.py::Child.{name}" for name in ("__init__", "step", "lonely")]
    deletion = take({"m.py": CLASSES, "n.py": "from m import Child\n__all__ = ('Child', 'x')\nx = 1\n"}, "gone", *names)
    assert names_of(deletion.deleted) == ["Child.__init__", "Child.lonely", "Child.step"]
    assert "Child" not in str(deletion.files["m.py"])
    assert deletion.files["n.py"] == "__all__ = ('x',)\nx = 1\n"
    assert "return 4" in deletion.removed["m.py::Child"]
    made_otherwise = CLASSES.replace("    def use(self)", "    @classmethod\n    def use(self)")
    assert names_of(take({"m.py": made_otherwise}, "gone", *names).deleted) == ["Child.lonely"]
    needed = take({"m.py": CLASSES, "n.py": "from m import Child\nclass Grand(Child): pass\n"}, "gone", *names)
    assert names_of(needed.stubbed) == ["Child.__init__", "Child.step"]


def test_a_chain_of_imports_is_cleaned_to_its_end() -> None:
    files = {"a.py": "from b import f\nx = 1\n", "b.py": "from c import f\nx = 1\n", "c.py": "from d import f\nx = 1\n"}
    deletion = take({**files, "d.py": "def f():\n    return 1\n"}, "gone", "d.py::f")
    assert deletion.files == {"a.py": "x = 1\n", "b.py": "x = 1\n", "c.py": "x = 1\n", "d.py": "\n"}


@pytest.mark.parametrize(
    "read", ["import pkg.a\nX = [pkg.a.f]\n", "import pkg.a as q\nX = [q.f]\n", "import pkg\nX = [pkg.a.f]\n"]
)
@pytest.mark.parametrize("where", ["{}", "def use():\n    {}\n"])
def test_a_name_is_found_through_every_way_of_importing_its_module(read: str, where: str) -> None:
    imports, _, used = read.partition("\n")
    text = f"{imports}\n{where.format(used)}"
    files = {"pkg/__init__.py": "", "pkg/a.py": "def f():\n    return 1\nx = 1\n", "n.py": text}
    assert names_of(take(files, "gone", "pkg/a.py::f").stubbed) == ["f"]


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("brackets", ["(\n    {}\n)", "({})"])
def test_brackets_keep_their_look(gone: str, brackets: str) -> None:
    def written(names: str) -> str:
        separator, end = (",\n    ", ",") if "\n" in brackets else (", ", "")
        quoted = brackets.format(separator.join(f"'{name}'" for name in names) + end)
        return f"from m import {brackets.format(separator.join(names) + end)}\n__all__ = {quoted}\n"

    files = {"m.py": "".join(f"def {name}():\n    return 1\n" for name in "abc"), "n.py": written("abc")}
    deletion = take(files, "gone", f"m.py::{gone}")
    assert deletion.files["n.py"] == written("abc".replace(gone, ""))


def test_overloads_and_empty_bodies_stay_as_they_are() -> None:
    text = "@overload\ndef f(x: int): ...\ndef f(x):\n    return x\ndef g(): pass\n"
    deletion = take({"m.py": text}, "stub", "m.py::f", "m.py::g")
    assert deletion.files["m.py"] == text.replace("return x", 'raise NotImplementedError("f")')
    assert names_of(deletion.stubbed) == ["f"]


def test_a_function_inside_of_one_that_stays_is_stubbed_in_place() -> None:
    text = "def outer():\n    def inner():\n        return 1\n    return inner\n"
    deletion = take({"m.py": text}, "gone", "m.py::outer.<locals>.inner")
    assert deletion.files["m.py"] == text.replace("return 1", 'raise NotImplementedError("outer.inner")')


def test_an_import_stays_if_it_was_unused_before_is_used_still_or_is_wanted_by_others() -> None:
    text = "import a, b, c, d, e\nfrom __future__ import f\ndef _x():\n    return a, b, d, e\ndef y():\n    return b\n"
    files = {"m.py": text, "n.py": "from m import d\n", "tests/test_m.py": "P = 'm.e'\n"}
    deletion = take(files, "hybrid", "m.py::_x")
    assert str(deletion.files["m.py"]).startswith("import b, c, d, e\nfrom __future__ import f\n")


# --- visible tests

VISIBLE = """import unittest
from pkg import other


def helper(): return 1


def test_one(): assert helper()
test_made = make()


class TestA:
    def test_x(self): pass


class TestB:
    size = 1

    def test_x(self): pass
    def test_y(self): pass


class Sub(TestB, unittest.TestCase):
    pass
"""


def test_failing_tests_go_whole_and_classes_left_empty_with_them() -> None:
    failing = (
        "t/test_v.py::test_one[a-1]",
        "t/test_v.py::TestA::test_x",
        "t/test_v.py::TestB::test_y",
        "t/test_v.py::test_made",
    )
    text = without_tests({"t/test_v.py": VISIBLE}, failing)["t/test_v.py"]
    assert (
        text
        == VISIBLE.replace("\n\ndef test_one(): assert helper()\n", "")
        .replace("class TestA:\n    def test_x(self): pass\n", "class TestA:\n    pass\n")
        .replace("    def test_y(self): pass\n", "")
        + "test_made = None\n"
    )


def test_what_a_removed_test_stood_in_the_place_of_does_not_come_back() -> None:
    tests = """\
import unittest
from base import Shared

class TestOne(Shared):
    def test_it(self): ...
    def test_other(self): ...

class TestTwo(unittest.TestCase):
    def test_it(self): ...
    def test_other(self): ...
"""
    failing = ("test.py::TestOne::test_it", "test.py::TestTwo::test_it")
    text = without_tests({"test.py": tests}, failing)["test.py"]
    assert text is not None
    assert text.endswith("\nTestOne.test_it = None\n")
    assert "def test_it" not in text


def test_an_inherited_test_is_switched_off_where_it_fails() -> None:
    text = str(without_tests({"test_v.py": VISIBLE}, ("test_v.py::Sub::test_x",))["test_v.py"])
    assert text == VISIBLE + "Sub.test_x = None\n"


def test_a_test_file_without_tests_goes_unless_others_need_it() -> None:
    files = {"tests/test_a.py": "def help(): pass\ndef test_a(): pass\n"}
    assert without_tests(files, ("tests/test_a.py::test_a",)) == {"tests/test_a.py": None}
    files["tests/test_b.py"] = "from .test_a import help\ndef test_b(): pass\n"
    assert without_tests(files, ("tests/test_a.py::test_a",)) == {"tests/test_a.py": "def help(): pass\n"}


def test_doctests_are_not_the_test_files_business() -> None:
    assert without_tests({"pkg/a.py": "x = 1\n"}, ("pkg/a.py::pkg.a.f", "README.md::README.md")) == {}


def test_a_test_file_that_cannot_be_imported_any_more_goes() -> None:
    files = {
        "m.py": "def top(): return 1\ndef low(): return 2\n",
        "test_m.py": "import m\nif m.top(): pass\ndef test_a(): pass\n",
    }
    deletion = take(files, "gone", "m.py::top")
    assert without_tests(files, ("test_m.py::test_other",), deletion) == {"test_m.py": None}
    assert without_tests(files, ()) == {}


def test_what_a_test_file_reads_at_import_has_a_stand_in_where_it_is_only_to_run() -> None:
    tests = "from __future__ import annotations\nfrom m import (\n    top,\n    low,\n)\nCASES = [top, low]\n"
    files = {"m.py": "def top(): return 1\ndef low(): return 2\n", "test_m.py": tests + "def test_a(): pass\n"}
    text = str(without_tests(files, (), take(files, "gone", "m.py::top"))["test_m.py"])
    assert "import (\n    low,\n)" in text
    assert text.splitlines()[1].startswith("top = type('top', (Exception,), ")
    files["test_m.py"] = tests.replace("[top, low]", "[low]") + "def test_a(): assert top()\n"
    text = str(without_tests(files, (), take(files, "gone", "m.py::top"))["test_m.py"])
    assert text == files["test_m.py"].replace("    top,\n", "")


# --- trivial bodies


def test_trivial_bodies_fill_every_stub_and_nothing_else() -> None:
    text = "class A:\n    def __init__(self, x):\n        self.x = x\n    def f(self, *, y):\n        return y\n"
    text += "def g():\n    return 1\n"
    names = ("m.py::A.__init__", "m.py::A.f", "m.py::g")
    deletion = take({"m.py": text}, "stub", *names)
    ways = dict(trivial_bodies({"m.py": text}, deletion))
    assert set(ways) == {"none", "first argument", "true", "false", "text", "list", "dictionary"}
    assert ways["first argument"] == {"m.py": text.replace("self.x = x", "pass").replace("return 1", "return None")}
    for way in ways.values():
        ast.parse(way["m.py"])
        assert "NotImplementedError" not in way["m.py"]
    assert list(trivial_bodies({"m.py": text}, take({"m.py": text}, "gone", "m.py::g"))) == []
