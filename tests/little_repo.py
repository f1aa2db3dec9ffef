"""A small repository with tests, and how it is made ready without installing anything again."""

from __future__ import annotations

from pathlib import Path

from test_prepare import installed, write

from offbook.factory.pipeline import folder_name

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
            """A sentence about the values."""
            from little.words import plural

            parts = []
            for value, length in runs(values):
                parts.append(f"{length} {plural('time', length)} {value}")
            return ", ".join(parts)
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
        from little.figures import described, runs, spread

        def test_spread(): assert spread([3, 9, 4]) == 6
        def test_spread_of_nothing():
            with pytest.raises(ValueError): spread([])
        class RunsTest(unittest.TestCase):
            def test_runs(self): self.assertEqual(runs("aab"), [("a", 2), ("b", 1)])
            def test_no_runs(self): self.assertEqual(runs(""), [])
        def test_described(): assert described([7, 7, 5]) == "2 times 7, 1 time 5"
        @pytest.mark.parametrize("n", range(8))
        def test_figures(n): assert n + n == 2 * n
    """,
}


def little(place: Path, more: dict[str, str] | None = None) -> Path:
    return write(place, {**FILES, **(more or {})})


def with_deps(out: Path, source: Path, deps: Path) -> Path:
    """So that making tasks from `source` in `out` finds its dependencies installed."""
    return installed(deps, out / ".factory" / folder_name(str(source)))
