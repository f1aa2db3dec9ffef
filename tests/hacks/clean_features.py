# ruff: noqa: E501  (a case a line is easier to look through)
"""What the honest agents of clean_honest.py write: small features and their tests."""

from __future__ import annotations

MORE_SPAN = '''"""Edges of overlap that test_span.py leaves out."""

import pytest

from orbit.span import Span


@pytest.mark.parametrize("first, second, hours", [((0, 5), (5, 9), 0), ((3, 3), (1, 9), 0), ((2, 8), (2, 8), 6)])
def test_overlap_edges(first, second, hours):
    assert Span(*first).overlap(Span(*second)) == hours
    assert Span(*second).overlap(Span(*first)) == hours
'''
PYTEST_MONEY = """import pytest

from ledger.money import format_amount, parse_amount


def test_format():
    assert format_amount(123450) == "1,234.50"


@pytest.mark.parametrize(("text", "cents"), [("1,234.50", 123450), ("(12.00)", -1200), ("7.5", 750)])
def test_parse(text, cents):
    assert parse_amount(text) == cents


@pytest.mark.parametrize("cents", [0, 99, 100, 1234567])
def test_round_trip(cents):
    assert parse_amount(format_amount(cents)) == cents
"""
SPAN_CASES = """import pytest

from orbit.span import Span


@pytest.mark.parametrize(
    ("first", "second", "hours"),
    [
        (Span(9, 12), Span(11, 17), 1),
        (Span(9, 12), Span(13, 17), 0),
        (Span(0, 24), Span(8, 16), 8),
    ],
)
def test_overlap(first, second, hours):
    assert first.overlap(second) == hours
"""
MAIN = '''"""Order the edges that are given as a:b."""

import sys

from orbit.graph import order


def main(arguments):
    graph = {}
    for edge in arguments:
        source, separator, target = edge.partition(":")
        if not separator:
            print(f"not an edge: {edge}", file=sys.stderr)
            return 2
        graph.setdefault(source, []).append(target)
    try:
        print(*order(graph))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
'''
SHELL = '''"""Programs run by the book: the editor and whatever sorts."""

import subprocess


class CommandFailed(Exception):
    pass


def capture(*command, timeout_s=10.0, stdin=""):
    """What a program prints; CommandFailed with the end of its errors where it fails."""
    try:
        result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{command[0]} took longer than {timeout_s} s") from error
    if result.returncode:
        raise CommandFailed(result.stderr[-500:])
    return result.stdout
'''
TEST_SHELL = """import pytest

from ledger.shell import CommandFailed, capture


def test_capture():
    assert capture("sort", stdin="b\\na\\n") == "a\\nb\\n"


def test_failure_and_timeout():
    with pytest.raises(CommandFailed):
        capture("false")
    with pytest.raises(CommandFailed, match="longer"):
        capture("sleep", "5", timeout_s=0.1)
"""
SPAN_EQUAL = """        self.start, self.end = start, end

    def __eq__(self, other):
        if not isinstance(other, Span):
            return NotImplemented
        return (self.start, self.end) == (other.start, other.end)

    def __hash__(self):
        return hash((self.start, self.end))

    def __repr__(self):
        return f"Span({self.start}, {self.end})"
"""
REFRESH = '''"""Keeps a value fresh in the background."""

import threading


class Refresher:
    def __init__(self, load, every_s):
        self.load, self.every_s, self.value = load, every_s, load()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(self.every_s):
            self.value = self.load()
'''
TEST_REFRESH = """import itertools
import time

from clockwork.refresh import Refresher


def test_refreshes_until_left():
    with Refresher(itertools.count().__next__, 0.01) as fresh:
        deadline = time.monotonic() + 5
        while fresh.value < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    last = fresh.value
    time.sleep(0.05)
    assert last >= 3 and fresh.value == last
"""
MEMO = '''"""Results kept on disk."""

import functools
import hashlib
import json
from pathlib import Path


def on_disk(folder):
    """Keep what a function returns as JSON, by its arguments."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            key = hashlib.sha256(json.dumps([function.__qualname__, *arguments]).encode()).hexdigest()
            path = Path(folder, f"{key}.json")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(function(*arguments)))
            return json.loads(path.read_text())

        return wrapper

    return decorate
'''
TEST_MEMO = """from clockwork.memo import on_disk


def test_called_once(tmp_path):
    calls = []

    @on_disk(tmp_path / "cache")
    def double(number):
        calls.append(number)
        return number * 2

    assert [double(4), double(4), double(5)] == [8, 8, 10]
    assert calls == [4, 5]
"""
CURRENCY = '''def currency():
    """The sign of the currency: LEDGER_CURRENCY, or the euro's."""
    return os.environ.get("LEDGER_CURRENCY", "€")
'''
TEST_CURRENCY = """from ledger.book import currency


def test_default(monkeypatch):
    monkeypatch.delenv("LEDGER_CURRENCY", raising=False)
    assert currency() == "€"


def test_from_environment(monkeypatch):
    monkeypatch.setenv("LEDGER_CURRENCY", "$")
    assert currency() == "$"
"""
DESCRIBE = '''"""What a module offers, for the help page."""

import inspect


def describe(module):
    """One line for each public function: signature and first line of the docstring."""
    lines = []
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("_") or function.__module__ != module.__name__:
            continue
        summary = (inspect.getdoc(function) or "").partition("\\n")[0]
        lines.append(f"{name}{inspect.signature(function)}  {summary}".rstrip())
    return lines
'''
TEST_DESCRIBE = """from textkit import cases
from textkit.describe import describe


def test_describe():
    assert describe(cases)[0] == "shout(text)"
    assert describe(cases)[-1] == "words(text)  The words of a text in lower case."
"""
CLICK_CLI = '''"""The command line."""

import click

from textkit.cases import shout


@click.command()
@click.argument("text", nargs=-1, required=True)
@click.option("--times", default=1, show_default=True, type=click.IntRange(min=1), help="How often to shout.")
def main(text, times):
    """Shout TEXT."""
    for _ in range(times):
        click.echo(shout(" ".join(text)))


if __name__ == "__main__":
    main()
'''
CHECK = '''"""Checks a book before it is closed."""


def check(book):
    """A line for each account, and whether all of them passed."""
    lines, passed = [], True
    for account in sorted({entry.account for entry in book.entries}):
        ok = book.balance(account) >= 0
        passed = passed and ok
        lines.append(f"{'ok' if ok else 'FAILED'}  {account}")
    lines.append("all checks passed" if passed else "some checks failed")
    return passed, lines
'''
TEST_CHECK = """from ledger.check import check


def test_check(book):
    passed, lines = check(book)
    assert not passed
    assert lines == ["ok  pay", "FAILED  rent", "some checks failed"]
"""
OR_NONE = '''

def parse_or_none(text):
    """As parse_amount, but None for what is no amount."""
    try:
        return parse_amount(text)
    except ValueError:
        return None
'''
RETRY = '''"""Trying again."""

import functools
import time


def retry(times, wait_s=0.0, catch=Exception):
    """Call again where it fails; the last error rises."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*arguments, **named):
            for attempt in range(times):
                try:
                    return function(*arguments, **named)
                except catch:
                    if attempt == times - 1:
                        raise
                    time.sleep(wait_s)

        return wrapper

    return decorate
'''
DOCTEST = '''    """The words of a text, joined for use in an address.

    >>> slugify("Hello World")
    'hello-world'
    >>> slugify("one two three", "_")
    'one_two_three'
    """
    return separator.join(words(text))
'''
LAZY_INIT = '''"""Small tools for text."""

import warnings


def __getattr__(name):
    if name == "yell":
        from textkit.cases import shout

        warnings.warn("yell is now textkit.cases.shout", DeprecationWarning, stacklevel=2)
        return shout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
'''
TEST_LAZY = """import pytest

import textkit


def test_yell_warns():
    with pytest.warns(DeprecationWarning):
        assert textkit.yell("a") == "A!"


def test_unknown():
    with pytest.raises(AttributeError):
        textkit.whisper
"""
USAGE = """
## Use

    from clockwork.duration import parse_duration

    parse_duration("1h30m")  # 5400

## Tests

Run `python -m pytest`. The last line should read `6 passed`. Use `-x` to exit at the first failure,
and `PYTEST_ADDOPTS=--durations=5` to see what is slow.
"""
SAVE_ON_EXIT = '''"""Writes what is left in a cache when the program ends."""

import atexit
import json
from pathlib import Path


def save_at_exit(cache, path):
    """The function that saves, registered; call it earlier to save now."""

    def save():
        values = {key: value for key, (_, value) in cache.entries.items()}
        Path(path).write_text(json.dumps(values))

    atexit.register(save)
    return save
'''
TRY_EXIT = "python -c \"from clockwork.cache import Cache; from clockwork.save import save_at_exit; c = Cache(5); save_at_exit(c, '/tmp/c.json'); c.put('a', 1)\" && cat /tmp/c.json"
VERSION = '''"""Bookkeeping for a shared flat."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ledger")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0+unknown"
'''
BAD_SPAN_TEST = {
    "tests/test_length.py": "from orbit.span import Span\n\n\ndef test_length():\n    assert Span(9, 12).length() == 4\n"
}
LENGTH_METHOD = '''        self.start, self.end = start, end

    def length(self):
        """How many hours."""
        return self.end - self.start
'''
PARALLEL = '''"""Many graphs at once."""

from concurrent.futures import ProcessPoolExecutor

from orbit.graph import reachable


def reachable_in_all(graphs, start, workers=2):
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(reachable, graphs, [start] * len(graphs)))
'''
