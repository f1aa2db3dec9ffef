"""Search by meaning against words: how often the function that a sentence describes is among the first five.

    pip install --no-deps --target PACKAGES boltons toolz more-itertools inflection humanize tabulate sqlparse parse \
      python-slugify semver voluptuous natsort
    python bench/cpu/search.py PACKAGES --json docs/results/search.json

A question is the first sentence of a docstring, of five words or more, that does not hold the function's name. All
docstrings are removed from the text that is searched. 60 questions, drawn with seed 0, at most eight of a package; an
answer is right if it is that function. `grep` ranks functions by how many words of the question they contain, as an
agent could that searched for every word; BM25 and embeddings are the two halves of `find_code`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from offbook.agent.harness.index import CodeIndex, Embedder, bm25, chunks_of, embedder_of, words_of

FIRST = 5
WAYS = ("grep", "bm25", "embeddings", "find_code")


def without_docstrings(text: str) -> tuple[str, dict[str, str]]:
    """The source, and the first sentences that were removed, by the name of the function."""
    lines = text.splitlines()
    said = {}

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                doc = ast.get_docstring(child)
                if doc:
                    string = child.body[0]
                    for number in range(string.lineno - 1, string.end_lineno):
                        lines[number] = ""
                    said[inside + child.name] = re.split(r"(?<=[.!?])\s|\n\n", doc.strip())[0].replace("\n", " ")
                if isinstance(child, ast.ClassDef):
                    said.pop(inside + child.name, None)
                    walk(child, f"{inside}{child.name}.")

    walk(ast.parse(text), "")
    return "\n".join(lines) + "\n", said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--embeddings", default="")
    options = parser.parse_args()
    rng = random.Random(0)
    trees: dict[str, dict[str, str]] = {}
    questions = []
    for folder in sorted(options.packages.iterdir()):
        if folder.suffix in (".dist-info", ".data") or folder.name in ("bin", "__pycache__"):
            continue
        files = (
            [folder]
            if folder.suffix == ".py"
            else [path for path in sorted(folder.rglob("*.py")) if "test" not in str(path.relative_to(folder))]
        )
        tree, own = {}, []
        for file in files:
            tree[str(file.relative_to(options.packages))], said = without_docstrings(file.read_text())
            for name, sentence in said.items():
                last = name.rpartition(".")[2]
                if not last.startswith("_") and len(sentence.split()) >= 5 and last.lower() not in sentence.lower():
                    own.append((folder.stem, str(file.relative_to(options.packages)), name, sentence))
        trees[folder.stem] = tree
        questions += rng.sample(own, min(8, len(own)))
    questions = rng.sample(questions, min(60, len(questions)))
    embedder = embedder_of(options.embeddings)()
    rows, times = [], {}
    with tempfile.TemporaryDirectory() as cache:
        index = CodeIndex(lambda: embedder, Path(cache) / "vectors.sqlite")
        for name, tree in trees.items():
            began = time.monotonic()
            index.find(tree, "warm up", 1)
            first = time.monotonic() - began
            began = time.monotonic()
            index.find(tree, "again", 1)
            again = time.monotonic() - began
            chunks = sum(len(chunks_of(path, text)) for path, text in tree.items())
            times[name] = {"chunks": chunks, "index_s": round(first, 2), "search_s": round(again, 3)}
        for package, path, name, sentence in questions:
            row = {"package": package, "function": f"{path}:{name}", "question": sentence}
            for way, found in ways(index, embedder, trees[package]).items():
                row[way] = (path, name) in [(chunk.path, chunk.name) for chunk in found(sentence)]
            rows.append(row)
        size = (Path(cache) / "vectors.sqlite").stat().st_size
    told = {
        way: round(float(np.mean([row[way] for row in rows])), 3) for way in ("grep", "bm25", "embeddings", "find_code")
    }
    chunks = sum(each["chunks"] for each in times.values())
    print(f"{len(rows)} questions, {len(trees)} packages, {chunks} chunks, {size / chunks:.0f} bytes a chunk on disk")
    print("| recall@5 | |\n|---|---:|")
    for way, share in told.items():
        print(f"| {way} | {share:.0%} |")
    for name, each in times.items():
        print(name, each)
    if options.json:
        result = {"recall@5": told, "bytes_per_chunk": round(size / chunks), "packages": times, "questions": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def ways(index: CodeIndex, embedder: Embedder, tree: dict[str, str]) -> dict[str, Callable]:
    both = [each for path, text in sorted(tree.items()) for each in chunks_of(path, text)]
    chunks = [chunk for chunk, _ in both]

    def best(scores: np.ndarray) -> list:
        return [chunks[number] for number in np.argsort(-scores, kind="stable")[:FIRST]]

    return {
        "grep": lambda q: best(np.array([sum(w in c.text.lower() for w in set(words_of(q))) for c in chunks])),
        "bm25": lambda q: best(bm25(q, [words for _, words in both])),
        "embeddings": lambda q: best(index.embedded([chunk.embedded for chunk in chunks]) @ embedder.embed([q])[0]),
        "find_code": lambda q: index.find(tree, q, FIRST),
    }


if __name__ == "__main__":
    main()
