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


# --- installed copies


@plant
def wheel_in_cache(folder: Path) -> str:
    name = ".cache/pip/wheels/ab/shop-1.0-py3-none-any.whl"
    return write(folder, name, zipped({MODULE: ORIGINAL, "shop-1.0.dist-info/METADATA": "Name: shop\n"})) + f"!{MODULE}"


@plant
def pip_http_cache(folder: Path) -> str:
    """Of older versions of pip: the wheel lies within a message."""
    body = b"cc=4,\x82\xa8response\x86\xa4body\xc6" + zipped({MODULE: ORIGINAL}) + b"\xa7headers\x80"
    return write(folder, ".cache/pip/http/0/1/0123", body) + f"!{MODULE}"


@plant
def source_distribution(folder: Path) -> str:
    content = tarred({f"shop-1.0/{MODULE}": ORIGINAL.encode()}, "w:gz")
    return write(folder, "dist/shop-1.0.tar.gz", content) + f"!content!shop-1.0/{MODULE}"


@plant
def egg_info_with_copy(folder: Path) -> str:
    write(folder, "shop.egg-info/SOURCES.txt", f"{MODULE}\n")
    return write(folder, "build/lib/shop/prices.py", ORIGINAL)


# --- documents


@plant
def markdown_page(folder: Path) -> str:
    return write(
        folder, "docs/prices.md", f"# Prices\n\nThis is how it works:\n\n```python\n{DELETED}```\n\nThat is all.\n"
    )


@plant
def restructured_page(folder: Path) -> str:
    lines = "".join(f"    {line}" for line in DELETED.splitlines(keepends=True))
    return write(folder, "docs/prices.rst", f"Prices\n======\n\n.. code-block:: python\n\n{lines}\nThat is all.\n")


@plant
def doctest_page(folder: Path) -> str:
    lines = [(">>> " if number == 0 else "... ") + line for number, line in enumerate(DELETED.splitlines())]
    return write(folder, "docs/example.txt", "An example:\n\n" + "\n".join(lines) + "\n")


@plant
def html_page(folder: Path) -> str:
    """As Sphinx's viewcode writes it: highlighted by pygments, with entities."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return write(folder, "docs/_modules/prices.html", highlight(ORIGINAL, PythonLexer(), HtmlFormatter(full=True)))


@plant
def coverage_report(folder: Path) -> str:
    """A line as coverage's html report has it: a number, a link, the code in spans."""
    rows = []
    for number, line in enumerate(ORIGINAL.splitlines(), 1):
        words = re.sub(r"\w+|\W+", lambda word: f'<span class="nam">{html.escape(word[0])}</span>', line)
        number_link = f'<span class="n"><a id="t{number}" href="#t{number}">{number}</a></span>'
        rows.append(f'<p class="run">{number_link}<span class="t">{words}&nbsp;</span><span class="r"></span></p>')
    return write(folder, "htmlcov/z_1_prices_py.html", "<html><body>" + "\n".join(rows) + "</body></html>")


@plant
def notebook_cell(folder: Path) -> str:
    cell = {"cell_type": "code", "source": DELETED.splitlines(keepends=True), "outputs": []}
    return write(folder, "notes.ipynb", json.dumps({"cells": [cell], "nbformat": 4}, indent=1))


@plant
def notebook_output(folder: Path) -> str:
    output = {"output_type": "stream", "name": "stdout", "text": DELETED.splitlines(keepends=True)}
    cell = {"cell_type": "code", "source": ["inspect.getsource(f)"], "outputs": [output]}
    return write(folder, "notes.ipynb", json.dumps({"cells": [cell], "nbformat": 4}, indent=1))


# --- logs, patches and backups


@plant
def patch(folder: Path) -> str:
    write(folder.parent, "a.py", OTHERS)
    write(folder.parent, "b.py", ORIGINAL)
    text = run("git", "diff", "--no-index", "b.py", "a.py", cwd=folder.parent)
    assert "\n-    total = 0.0" in text
    return write(folder, "0001-remove.patch", text)


@plant
def backup_of_merge(folder: Path) -> str:
    return write(folder, "shop/prices.py.orig", ORIGINAL)


@plant
def backup_of_editor(folder: Path) -> str:
    return write(folder, "shop/prices.py~", ORIGINAL)


@plant
def coloured_log(folder: Path) -> str:
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer

    return write(folder, "session.log", highlight(ORIGINAL, PythonLexer(), TerminalFormatter()))


@plant
def compressed_log(folder: Path) -> str:
    return write(folder, "logs/run.log.gz", gzip.compress(("starting\n" + ORIGINAL + "done\n").encode())) + "!content"


@plant
def traceback_of_test(folder: Path) -> str:
    """pytest prints a failing function from its first line down to the one that failed."""
    original = elsewhere(folder)
    write(original, "test_it.py", "def test_it():\n" + "".join(f"    {line}\n" for line in TEST_CALL.splitlines()))
    said = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", cwd=original)
    assert ">   " in said
    return write(folder, ".pytest_cache/last_failure.txt", said)


@plant
def zipped_backup(folder: Path) -> str:
    return write(folder, "old.zip", zipped({MODULE: ORIGINAL})) + f"!{MODULE}"


@plant
def zip_in_tar(folder: Path) -> str:
    inner = zipped({MODULE: ORIGINAL})
    return write(folder, "old.tar.bz2", tarred({"a/old.zip": inner}, "w:bz2")) + f"!content!a/old.zip!{MODULE}"


@plant
def xz_and_bz2(folder: Path) -> str:
    return write(folder, "blob.bin", lzma.compress(bz2.compress(ORIGINAL.encode()))) + "!content!content"


# --- code in data


@plant
def escaped_in_json(folder: Path) -> str:
    return write(folder, "data.json", json.dumps({"path": MODULE, "content": ORIGINAL}))


@plant
def escaped_twice_in_json(folder: Path) -> str:
    return write(folder, "data.jsonl", json.dumps({"line": json.dumps({"content": ORIGINAL})}))


@plant
def junit_report(folder: Path) -> str:
    text = html.escape(DELETED).replace("\n", "&#10;")
    return write(folder, "junit.xml", f'<testsuite><failure message="{text}"/></testsuite>')


@plant
def base64_text(folder: Path) -> str:
    return write(folder, "fixture.txt", b"payload:\n" + base64.encodebytes(ORIGINAL.encode())) + "!base64@"


@plant
def base64_of_zip(folder: Path) -> str:
    packed = base64.b64encode(zipped({MODULE: ORIGINAL})).decode()
    return write(folder, "bundle.py", f'DATA = "{packed}"\n') + "!base64@"


@plant
def pickled_source(folder: Path) -> str:
    return write(folder, "cache.pkl", pickle.dumps({"source": ORIGINAL}))


@plant
def pickled_source_as_text(folder: Path) -> str:
    return write(folder, "cache.pkl", pickle.dumps({"source": ORIGINAL}, protocol=0))


@plant
def shelf(folder: Path) -> str:
    with shelve.open(str(folder / "shelf")) as database:
        database["prices"] = ORIGINAL
    return "shelf"


@plant
def utf16_text(folder: Path) -> str:
    return write(folder, "notes.txt", ORIGINAL.encode("utf-16"))


@plant
def shell_heredoc(folder: Path) -> str:
    return write(folder, "setup.sh", f"#!/bin/sh\ncat > shop/prices.py <<'EOF'\n{ORIGINAL}EOF\n")


# --- code in code


@plant
def copy_under_another_name(folder: Path) -> str:
    return write(folder, "shop/compat.py", DELETED.replace(NAME, "cheaper"))


@plant
def copy_with_other_locals(folder: Path) -> str:
    changed = DELETED.replace(NAME, "f")
    for old, new in {"basket": "b", "percent": "p", "total": "t", "floor": "least", "place": "i", "price": "v"}.items():
        changed = re.sub(rf"\b{old}\b", new, changed)
    return write(folder, "shop/compat.py", OTHERS.replace("tax", "levy") + "\n\n" + changed)


@plant
def reformatted_copy_with_other_locals(folder: Path) -> str:
    """Other names, other quotes, other line breaks, no annotations."""
    copy = """def cheaper(items, rate, least=0.0):
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
    return write(folder, "shop/compat.py", copy)


@plant
def commented_out(folder: Path) -> str:
    lines = "".join(f"# {line}\n" for line in DELETED.splitlines())
    return write(folder, "shop/old.py", f"import math\n\n{lines}\nX = math.pi\n")


@plant
def quoted_in_docstring(folder: Path) -> str:
    inner = DELETED.replace('"""', "'''")
    return write(folder, "shop/help.py", f'def explain():\n    """It does this:\n\n{inner}\n    """\n')


@plant
def cython_listing(folder: Path) -> str:
    """Cython copies the source into the C that it writes."""
    lines = DELETED.splitlines()
    whole = "".join(f" * {line}\n" for line in lines)
    rows = "".join(
        f'/* "shop/prices.pyx":{30 + number}\n * {line}  # <<<<<<\n */\n' for number, line in enumerate(lines)
    )
    return write(folder, "shop/prices.c", f"/*\n{whole} */\n{rows}")
