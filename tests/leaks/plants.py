"""Ways in which deleted code stays behind, each made by the tool that makes it in life where there is one.

A plant gets the folder that the agent will see, puts the leftover there and returns the path at which it must be found.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import html
import io
import json
import lzma
import os
import pickle
import re
import shelve
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from pygments import highlight
from pygments.formatter import Formatter
from pygments.formatters import HtmlFormatter, TerminalFormatter
from pygments.lexers import PythonLexer

MODULE = "shop/prices.py"
NAME = "discounted_total"
SIGNATURE = "def discounted_total(basket: list[float], percent: float, floor: float = 0.0) -> float:\n"
DOCSTRING = '    """What a basket costs after the discount; never below the floor."""\n'
BODY = """    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is no percentage")
    total = 0.0
    # The dearest item is sold at its full price.
    for place, price in enumerate(sorted(basket, reverse=True)):
        share = 1.0 if place == 0 else 1.0 - percent / 100.0
        total += round(price * share, 2)
    return max(total, floor)
"""
DELETED = SIGNATURE + DOCSTRING + BODY
OTHERS = '''"""Prices of a small shop."""


def tax(price: float, rate: float = 0.19) -> float:
    """What the state gets."""
    return round(price * rate, 2)


class Till:
    """Counts what was paid."""

    def __init__(self, opening: float = 0.0):
        self.paid = [opening]

    def pay(self, amount: float) -> float:
        if amount < 0:
            raise ValueError("nobody pays less than nothing")
        self.paid.append(amount)
        return sum(self.paid)
'''
ORIGINAL = OTHERS + "\n\n" + DELETED
TEST_CALL = "from shop.prices import discounted_total\nassert discounted_total([3.0, 'x'], 10.0) == 5.7\n"

Plant = Callable[[Path], str]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def write_tree(folder: Path, prices: str) -> None:
    write(folder, "shop/__init__.py", "from shop.prices import Till, tax\n")
    write(folder, MODULE, prices)
    write(
        folder, "README.md", "# Shop\n\n`discounted_total(basket, percent)` takes the discount off all but one item.\n"
    )
    write(folder, "tests/test_tax.py", "from shop import tax\n\n\ndef test_tax():\n    assert tax(100.0) == 19.0\n")


def elsewhere(folder: Path) -> Path:
    """The original repository, beside what the agent sees."""
    original = folder.parent / "original"
    write_tree(original, ORIGINAL)
    return original


def run(*command: str, cwd: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "x", f"GIT_{who}_EMAIL": "x@x", f"GIT_{who}_DATE": "2000-01-01T00:00:00Z"}
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True).stdout


def zipped(files: dict[str, bytes | str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def tarred(files: dict[str, bytes], mode: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


# --- git


def _repository(folder: Path) -> None:
    run("git", "init", "-q", cwd=folder)
    (folder / MODULE).write_text(ORIGINAL)
    run("git", "add", "-A", cwd=folder)
    run("git", "commit", "-qm", "all of it", cwd=folder)
    (folder / MODULE).write_text(OTHERS)
    run("git", "commit", "-qam", "less", cwd=folder)


@plant
def git_loose_object(folder: Path) -> str:
    _repository(folder)
    return ".git!blob "


@plant
def git_pack(folder: Path) -> str:
    _repository(folder)
    run("git", "gc", "-q", "--aggressive", cwd=folder)
    assert not list((folder / ".git/objects").glob("??/*"))
    return ".git!blob "


@plant
def git_stash_without_history(folder: Path) -> str:
    run("git", "init", "-q", cwd=folder)
    run("git", "add", "-A", cwd=folder)
    run("git", "commit", "-qm", "all", cwd=folder)
    (folder / MODULE).write_text(ORIGINAL)
    run("git", "stash", "-q", cwd=folder)
    return ".git!blob "


@plant
def git_unreachable_object(folder: Path) -> str:
    _repository(folder)
    run("git", "update-ref", "-d", "HEAD", cwd=folder)
    shutil.rmtree(folder / ".git/logs")
    return ".git!blob "


@plant
def git_object_in_archive(folder: Path) -> str:
    blob = zlib.compress(f"blob {len(ORIGINAL)}\0{ORIGINAL}".encode())
    return write(folder, "backup.tar", tarred({".git/objects/aa/bb": blob}, "w")) + "!.git/objects/aa/bb!content"


# --- what a tool of its own has to write


def highlighted(formatter: Formatter[str], text: str = ORIGINAL) -> str:
    return highlight(text, PythonLexer(), formatter)


def coverage_report() -> str:
    """A line as coverage's html report has it: a number, a link, the code in spans."""
    rows = []
    for number, line in enumerate(ORIGINAL.splitlines(), 1):
        words = re.sub(r"\w+|\W+", lambda word: f'<span class="nam">{html.escape(word[0])}</span>', line)
        link = f'<span class="n"><a id="t{number}" href="#t{number}">{number}</a></span>'
        rows.append(f'<p class="run">{link}<span class="t">{words}&nbsp;</span><span class="r"></span></p>')
    return "<html><body>" + "\n".join(rows) + "</body></html>"


def cython_listing() -> str:
    """Cython copies the source into the C that it writes."""
    lines = DELETED.splitlines()
    whole = "".join(f" * {line}\n" for line in lines)
    rows = [f'/* "shop/prices.pyx":{30 + n}\n * {line}  # <<<<<<\n */\n' for n, line in enumerate(lines)]
    return f"/*\n{whole} */\n{''.join(rows)}"


def notebook(**cell: object) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "outputs": [], **cell}], "nbformat": 4}, indent=1)


def with_other_locals() -> str:
    names = {"basket": "b", "percent": "p", "total": "t", "floor": "least", "place": "i", "price": "v", NAME: "f"}
    return re.sub("|".join(rf"\b{name}\b" for name in names), lambda found: names[found[0]], DELETED)


REFORMATTED = """def cheaper(items, rate, least=0.0):
    if not 0 <= rate <= 100:
        raise ValueError(
            f'{rate} is no percentage'
        )
    result = 0.0
    for number, cost in enumerate(sorted(items, reverse=True,)):
        part = 1.0 if (number == 0) else 1.0 - rate / 100.0
        result += round(cost * part, 2)
    return max(
        result,
        least,
    )
"""


@plant
def patch(folder: Path) -> str:
    write(folder.parent, "a.py", OTHERS)
    write(folder.parent, "b.py", ORIGINAL)
    text = run("git", "diff", "--no-index", "b.py", "a.py", cwd=folder.parent)
    assert "\n-    total = 0.0" in text
    return write(folder, "0001-remove.patch", text)


@plant
def traceback_of_test(folder: Path) -> str:
    """pytest prints a failing function from its first line down to the one that failed."""
    original = elsewhere(folder)
    write(original, "test_it.py", "def test_it():\n" + "".join(f"    {line}\n" for line in TEST_CALL.splitlines()))
    said = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", cwd=original)
    assert ">   " in said
    return write(folder, ".pytest_cache/last_failure.txt", said)


@plant
def shelf(folder: Path) -> str:
    with shelve.open(str(folder / "shelf")) as database:
        database["prices"] = ORIGINAL
    return "shelf"


# --- files that are written as they are: name -> path, content, where inside of the file the leak is

INDENTED = "".join(f"    {line}" for line in DELETED.splitlines(keepends=True))
PROMPTED = "\n".join([f">>> {SIGNATURE.rstrip()}", *(f"... {line}" for line in DELETED.splitlines()[1:])])
COMMENTED = "".join(f"# {line}\n" for line in DELETED.splitlines())
LINES = DELETED.splitlines(keepends=True)
QUOTED = DELETED.replace('"""', "'''")
WHEEL = {MODULE: ORIGINAL, "shop-1.0.dist-info/METADATA": "Name: shop\n"}
RESPONSE = b"cc=4,\x82\xa8response\x86\xa4body\xc6" + zipped({MODULE: ORIGINAL}) + b"\xa7headers\x80"  # of an older pip
FILES: dict[str, tuple[str, str | bytes, str]] = {
    "wheel_in_cache": (".cache/pip/wheels/ab/shop-1.0-py3-none-any.whl", zipped(WHEEL), f"!{MODULE}"),
    "pip_http_cache": (".cache/pip/http/0/1/0123", RESPONSE, f"!{MODULE}"),
    "source_distribution": (
        *("dist/shop-1.0.tar.gz", tarred({f"shop-1.0/{MODULE}": ORIGINAL.encode()}, "w:gz")),
        f"!content!shop-1.0/{MODULE}",
    ),
    "egg_info_with_copy": ("build/lib/shop/prices.py", ORIGINAL, ""),
    "markdown_page": ("docs/prices.md", f"# Prices\n\nIt works so:\n\n```python\n{DELETED}```\n\nThat is all.\n", ""),
    "restructured_page": (
        "docs/prices.rst",
        f"Prices\n======\n\n.. code-block:: python\n\n{INDENTED}\n",
        "",
    ),
    "doctest_page": ("docs/example.txt", f"An example:\n\n{PROMPTED}\n", ""),
    "html_page": ("docs/_modules/prices.html", highlighted(HtmlFormatter(full=True)), ""),  # as Sphinx's viewcode
    "coverage_report": ("htmlcov/z_1_prices_py.html", coverage_report(), ""),
    "notebook_cell": ("notes.ipynb", notebook(source=LINES), ""),
    "notebook_output": ("notes.ipynb", notebook(source=[], outputs=[{"output_type": "stream", "text": LINES}]), ""),
    "backup_of_merge": ("shop/prices.py.orig", ORIGINAL, ""),
    "backup_of_editor": ("shop/prices.py~", ORIGINAL, ""),
    "coloured_log": ("session.log", highlighted(TerminalFormatter()), ""),
    "compressed_log": ("logs/run.log.gz", gzip.compress(f"starting\n{ORIGINAL}done\n".encode()), "!content"),
    "zipped_backup": ("old.zip", zipped({MODULE: ORIGINAL}), f"!{MODULE}"),
    "zip_in_tar": (
        *("old.tar.bz2", tarred({"a/old.zip": zipped({MODULE: ORIGINAL})}, "w:bz2")),
        f"!content!a/old.zip!{MODULE}",
    ),
    "xz_and_bz2": ("blob.bin", lzma.compress(bz2.compress(ORIGINAL.encode())), "!content!content"),
    "escaped_in_json": ("data.json", json.dumps({"path": MODULE, "content": ORIGINAL}), ""),
    "escaped_twice_in_json": ("data.jsonl", json.dumps({"line": json.dumps({"content": ORIGINAL})}), ""),
    "junit_report": ("junit.xml", f'<failure message="{html.escape(DELETED)}"/>'.replace("\n", "&#10;"), ""),
    "base64_text": ("fixture.txt", b"payload:\n" + base64.encodebytes(ORIGINAL.encode()), "!base64@"),
    "base64_of_zip": ("bundle.py", b'DATA = "' + base64.b64encode(zipped({MODULE: ORIGINAL})) + b'"\n', "!base64@"),
    "pickled_source": ("cache.pkl", pickle.dumps({"source": ORIGINAL}), ""),
    "pickled_source_as_text": ("cache.pkl", pickle.dumps({"source": ORIGINAL}, protocol=0), ""),
    "utf16_text": ("notes.txt", ORIGINAL.encode("utf-16"), ""),
    "shell_heredoc": ("setup.sh", f"#!/bin/sh\ncat > shop/prices.py <<'EOF'\n{ORIGINAL}EOF\n", ""),
    "copy_under_another_name": ("shop/compat.py", DELETED.replace(NAME, "cheaper"), ""),
    "copy_with_other_locals": ("shop/compat.py", f"{OTHERS.replace('tax', 'levy')}\n\n{with_other_locals()}", ""),
    "reformatted_copy_with_other_locals": ("shop/compat.py", REFORMATTED, ""),
    "commented_out": ("shop/old.py", f"import math\n\n{COMMENTED}\nX = math.pi\n", ""),
    "quoted_in_docstring": ("shop/help.py", f'def explain():\n    """It does this:\n\n{QUOTED}\n    """\n', ""),
    "cython_listing": ("shop/prices.c", cython_listing(), ""),
}
for _name, (_path, _content, _inside) in FILES.items():
    PLANTS[_name] = lambda folder, path=_path, content=_content, inside=_inside: write(folder, path, content) + inside
