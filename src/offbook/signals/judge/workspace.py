"""What a judge may look into: the record of a rollout and the tree as the agent left it. Nothing can be changed, and
neither the reward, nor the flags, nor the solution, nor the hidden tests, nor what the agent thought is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from offbook.signals.judge.shown import cut, show, text_of
from offbook.types import Rollout, Task

INDEX_CHARS = 12_000
ANSWER_CHARS, MAX_LINES, MAX_HITS, MAX_ENTRIES = 8000, 200, 50, 200
MAX_FILES, FILE_BYTES = 5000, 1 << 20  # of the tree
TREE = "tree/"
Place = str | Path  # a text, or the file that has it


class Shelf:
    """Files by name; `list`, `read` and `grep` answer in text, whatever they are asked."""

    def __init__(self, rollout: Rollout, task: Task | None):
        self.files: dict[str, Place] = {
            "task.md": task.instruction if task is not None else "It is not at hand.",
            "record/index.txt": show(rollout, thoughts=False, budget=INDEX_CHARS, diff=False),
            "changes.diff": rollout.diff,
        }
        for number, segment in enumerate(rollout.segments):
            for index, message in enumerate(segment.messages):
                if text := text_of(segment, message, thoughts=False):
                    self.files[f"record/segment{number}_message{index}.txt"] = text
        if task is not None:
            self.files |= {TREE + name: path for name, path in _files_below(task.tree)}
        for path, new in rollout.changed.items():
            self.files.pop(TREE + path, None)
            self.files |= {} if new is None else {TREE + path: new}

    def list(self, path: str = "") -> str:
        folder = _clean(path)
        below = [name.removeprefix(folder) for name in self.files if name.startswith(folder)]
        entries = sorted({name.partition("/")[0] + "/" * ("/" in name) for name in below})
        more = [f"[{len(entries) - MAX_ENTRIES} more]"] if len(entries) > MAX_ENTRIES else []
        return "\n".join([*entries[:MAX_ENTRIES], *more]) or f"error: there is no folder {path}"

    def read(self, path: str, start: int = 1, end: int | None = None) -> str:
        name = _clean(path).rstrip("/")
        if name not in self.files:
            return f"error: there is no file {path}"
        lines = self._text(name).splitlines()
        first = max(1, start)
        last = min(len(lines), end or len(lines), first + MAX_LINES - 1)
        more = f"\n[{len(lines)} lines in all]" if last < len(lines) else ""
        return cut("\n".join(f"{n}: {lines[n - 1]}" for n in range(first, last + 1)), ANSWER_CHARS) + more

    def grep(self, text: str, path: str = "") -> str:
        """Lines that have a text, upper and lower case alike. No pattern: one could take forever."""
        hits, folder, wanted = list[str](), _clean(path), text.lower()
        for name in sorted(self.files):
            if not (name + "/").startswith(folder):
                continue
            for number, line in enumerate(self._text(name).splitlines(), 1):
                if wanted in line.lower():
                    hits.append(f"{name}:{number}: {line[:200]}")
                if len(hits) > MAX_HITS:
                    return "\n".join([*hits[:MAX_HITS], "[there are more]"])
        return "\n".join(hits) or "nothing"

    def _text(self, name: str) -> str:
        place = self.files[name]
        if isinstance(place, str):
            return place
        with place.open("rb") as file:
            return file.read(FILE_BYTES).decode(errors="replace")


def _clean(path: str) -> str:
    """A folder's name with its slash; empty for the whole."""
    name = path.strip().removeprefix("./").strip("/")
    return f"{name}/" if name not in ("", ".") else ""


def _files_below(root: Path) -> Iterator[tuple[str, Path]]:
    """Regular files: a link may lead anywhere. Version control and bytecode are no text."""
    count = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__"))
        for path in (Path(folder, name) for name in sorted(names)):
            if path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > MAX_FILES:
                return
            yield path.relative_to(root).as_posix(), path
