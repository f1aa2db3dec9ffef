"""Patches between a tree with a feature deleted and the tree as it was, made here and applied by git."""

from __future__ import annotations

import difflib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from offbook.tasks.git import plain_environment
from offbook.types import OffbookError


class BadPatch(OffbookError):
    """A patch that cannot be applied, and why."""


def gold_patch(before_deletion: Mapping[str, str], after_deletion: Mapping[str, str | None]) -> str:
    """A unified diff that `patch -p1` and `git apply` take from the deleted tree back to the original.

    Both are trees; of the second it is enough to give what changed, None where a file went.
    """
    parts = []
    for path in sorted({*before_deletion} | {*after_deletion}):
        original = before_deletion.get(path)
        deleted = after_deletion.get(path, original)
        if original != deleted:
            parts.append("".join(_file_patch(path, deleted, original)))
    return "".join(parts)


def _file_patch(path: str, old: str | None, new: str | None) -> Iterator[str]:
    tab = "\t" if " " in path else ""
    yield f"diff --git a/{path} b/{path}\n"
    if old is None:
        yield "new file mode 100644\n"
    if new is None:
        yield "deleted file mode 100644\n"
    source = f"a/{path}{tab}" if old is not None else "/dev/null"
    target = f"b/{path}{tab}" if new is not None else "/dev/null"
    lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), source, target)
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    """By line feeds only: other line breaks are part of a line for git."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def touched_by(patch: str) -> dict[str, tuple[int, int]]:
    """Path -> lines added and removed."""
    with tempfile.TemporaryDirectory(prefix="offbook-patch-") as folder:
        records = _git(Path(folder), patch, "--numstat", "-z").split("\0")
    found = {}
    for record in filter(None, records):
        added, removed, path = record.split("\t", 2)
        if added == "-":
            raise BadPatch(f"it changes the binary file {path}")
        found[path] = int(added), int(removed)
    return found


def applied(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """What the patch makes of the files that it touches, None where one goes. Without fuzz.

    `files` has at least those of them that exist.
    """
    with tempfile.TemporaryDirectory(prefix="offbook-patch-") as folder:
        root = Path(folder)
        for path in touched_by(patch):
            if path in files:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(files[path].encode())
        before = {path for path in touched_by(patch) if path in files}
        _git(root, patch, "--whitespace=nowarn")
        after = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        changed: dict[str, str | None] = {path: file.read_bytes().decode() for path, file in after.items()}
    return {**dict.fromkeys(before - changed.keys()), **changed}


def _git(root: Path, patch: str, *options: str) -> str:
    result = subprocess.run(
        ["git", "apply", *options, "-"],
        cwd=root,
        input=(patch if patch.endswith("\n") else patch + "\n").encode(),
        capture_output=True,
        env=plain_environment(root),
        timeout=60,
    )
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("error: ")
        raise BadPatch(f"it does not apply: {reason}")
    return result.stdout.decode()
