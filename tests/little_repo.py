"""A small repository with tests, and how it is made ready without installing anything again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_prepare import installed, lay_out, write

from offbook.sandbox import SandboxSpec
from offbook.tasks.factory.pipeline import folder_name
from offbook.tasks.factory.prepare.prepare import prepare
from offbook.tasks.factory.prepare.tests import map_tests
from offbook.tasks.factory.types import Feature, FunctionKey
from offbook.tasks.factory.workshop import Workshop, open_workshop

LEXERS = ("__init__", "_mapping", "python", "diff", "special", "default")
FILES = {
    "pyproject.toml": '[project]\nname = "little"\nversion = "2.1"\n',
    "README.md": "# little\n\nWords and figures.\n",
    "little/__init__.py": "from little.figures import spread\nfrom little.words import initials\n",
    "little/words.py": '''
        """Words."""

        import re


        def initials(name, limit=4):
            """The first letters of a name, in capitals, with a point after each."""
            letters = []
            for part in _parts(name):
                if part not in ("von", "van", "de"):
                    letters.append(part[0].upper())
            return "".join(f"{letter}." for letter in letters[:limit])


        def _parts(name):
            return [part for part in re.split(r"[ _-]+", name.strip()) if part]


        def plural(word, count=2):
            """The word for so many things."""
            if count == 1:
                return word
            if word.endswith("y") and word[-2:-1] not in "aeiou":
                return word[:-1] + "ies"
            return word + ("es" if word.endswith(("s", "x")) else "s")


        def squeeze(text):
            """Every run of spaces becomes one space."""
            words = []
            for word in text.split(" "):
                if word:
                    words.append(word)
            return " ".join(words)
    ''',
    "little/figures.py": '''
        """Figures."""


        def spread(values):
            """How far the largest value is from the smallest."""
            ordered = sorted(values)
            if not ordered:
                raise ValueError("no values")
            lowest, highest = ordered[0], ordered[-1]
            return highest - lowest


        def runs(values):
            """Stretches of equal neighbours, as pairs of value and length."""
            found = []
            for value in values:
                if found and found[-1][0] == value:
                    found[-1] = (value, found[-1][1] + 1)
                else:
                    found.append((value, 1))
            return found


        def described(values):
            """A sentence about the values: how many times each of them comes, with commas between."""
            from little.words import plural

            parts = []
            for value, length in runs(values):
                parts.append(f"{length} {plural('time', length)} {value}")
            return ", ".join(parts)


        def labelled(word, count):
            """How many of a thing there are, in words."""
            from little.words import plural

            if count == 0:
                return f"no {word}"
            return f"{count} {plural(word, count)}"


        def nothing(value):
            """Takes a value and gives None."""
            steps = []
            for _ in range(value):
                steps.append(value)
                value -= 1
            return None
    ''',
    "tests/test_words.py": """
        import pytest
        from little.words import initials, plural, squeeze

        def test_initials(): assert initials("ada lovelace") == "A.L."
        def test_initials_of_nobility(): assert initials("John von Neumann") == "J.N."
        def test_initials_have_a_limit(): assert initials("a b c d e", 2) == "A.B."
        @pytest.mark.parametrize("word, many", [("cat", "cats"), ("box", "boxes"), ("city", "cities"), ("key", "keys")])
        def test_plural(word, many): assert plural(word) == many
        def test_one(): assert plural("cat", 1) == "cat"
        def test_squeeze(): assert squeeze(" a   b ") == "a b"
        def test_squeeze_nothing(): assert squeeze("   ") == ""
    """,
    "tests/test_figures.py": """
        import unittest
        import pytest
        from little.figures import described, labelled, nothing, runs, spread

        def test_spread(): assert spread([3, 9, 4]) == 6
        def test_spread_of_nothing():
            with pytest.raises(ValueError): spread([])
        class RunsTest(unittest.TestCase):
            def test_runs(self): self.assertEqual(runs("aab"), [("a", 2), ("b", 1)])
            def test_no_runs(self): self.assertEqual(runs(""), [])
        def test_described(): assert described([7, 7, 5]) == "2 times 7, 1 time 5"
        def test_labelled(): assert labelled("box", 2) == "2 boxes"
        def test_labelled_nothing(): assert labelled("box", 0) == "no box"
        def test_nothing(): assert nothing(3) is None
        @pytest.mark.parametrize("n", range(14))
        def test_figures(n): assert n + n == 2 * n
    """,
}

ODD = {
    "little/odd.py": '''
        """What makes no good task."""


        def reached(total):
            """Whether a total is large enough."""
            limit = 3
            limit += len(str(limit))
            return total > limit


        def climb():
            """The first total that is large enough."""
            total = 0
            while not reached(total):
                total += 1
            return total


        def flicker(value):
            """The same value."""
            result = [value]
            result.append(value)
            return result[0]
    ''',
    "tests/test_odd.py": """
        import os
        from little.odd import climb, flicker, reached

        def test_climb(): assert climb() == 5
        def test_reached(): assert reached(9) is True and reached(1) is False
        def test_flicker():
            try: assert flicker(1) == 1
            except NotImplementedError: assert os.environ["PYTHONHASHSEED"] != "0"
        def test_flicker_twice(): assert flicker(2) == 2
        def test_indifferent():
            try: flicker(3)
            except NotImplementedError: pass
    """,
}


def little(place: Path, more: dict[str, str] | None = None) -> Path:
    return write(place, {**FILES, **(more or {})})


def with_deps(out: Path, source: Path, deps: Path) -> Path:
    """So that making tasks from `source` in `out` finds its dependencies installed."""
    return installed(deps, out / ".factory" / folder_name(str(source)))


def _is_wanted(path: str) -> bool:
    return not path.startswith(("pygments/lexers/", "pygments/styles/")) or Path(path).stem in LEXERS


@pytest.fixture(scope="session")
def deps(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runner, and no more of it than it takes: all of it is read in every search for leaks."""
    names = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-timeout")
    return lay_out(shared, tmp_path_factory.mktemp("deps") / "lean", names, _is_wanted)


@pytest.fixture(scope="session")
def workshop(deps: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    place = tmp_path_factory.mktemp("workshop")
    source = little(place / "little", ODD)
    repository = asyncio.run(prepare(str(source), installed(deps, place / "made" / "little"), SandboxSpec()))
    asyncio.run(map_tests(repository, SandboxSpec()))
    return open_workshop(repository.folder)


def feature(workshop: Workshop, *names: str, without: tuple[str, ...] = ()) -> Feature:
    """Of these functions, "module.name", with the tests that enter them."""
    keys = tuple(FunctionKey(f"little/{module}.py", name) for module, _, name in (one.partition(".") for one in names))
    tests = {test for key in keys for test in workshop.map.tests_of[key]}
    return Feature("little-it", "single", keys, keys, tuple(sorted(tests - {*without})))
