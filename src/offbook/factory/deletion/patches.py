"""Patches: the gold patch from the deleted tree back to the original, and deletions that come as a patch."""

from __future__ import annotations

import difflib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from offbook.factory.deletion.visible import is_test_code
from offbook.types import OffbookError


class Refused(OffbookError):
    """A proposed deletion that cannot be used, and why, in one sentence."""


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


def apply_proposal(files: Mapping[str, str], patch_text: str) -> dict[str, str | None]:
    """The files that a proposed deletion changes, None where one goes. Applied by git, without fuzz."""
    if not patch_text.strip():
        raise Refused("the proposed deletion is empty")
    patch = patch_text if patch_text.endswith("\n") else patch_text + "\n"
    with tempfile.TemporaryDirectory(prefix="offbook-proposal-") as folder:
        root = Path(folder)
        touched = _touched(root, patch)
        for path in touched:
            _check(path, files)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(files[path].encode())
        _git(root, patch, "--whitespace=nowarn")
        after = {path: _read(root / path) for path in touched}
        stray = [
            path for path in sorted(root.rglob("*")) if path.is_file() and str(path.relative_to(root)) not in after
        ]
        if stray:
            raise Refused(f"the proposed deletion adds {stray[0].relative_to(root)}")
    changed = {path: text for path, text in after.items() if text != files[path]}
    _check_size(files, changed, touched)
    return changed


def _check(path: str, files: Mapping[str, str]) -> None:
    if path not in files:
        raise Refused(f"the proposed deletion touches {path}, which is not in the tree")
    if is_test_code(path):
        raise Refused(f"the proposed deletion touches the test file {path}")


def _check_size(
    files: Mapping[str, str], changed: Mapping[str, str | None], touched: Mapping[str, tuple[int, int]]
) -> None:
    added = sum(plus for plus, _ in touched.values())
    removed = sum(minus for _, minus in touched.values())
    if not changed or removed == 0:
        raise Refused("the proposed deletion removes nothing")
    if added >= removed:
        raise Refused(f"the proposed deletion adds {added} lines and removes {removed}: it is to remove code")
    for path, text in changed.items():
        if path.endswith(".py") and text is not None:
            try:
                compile(text, path, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise Refused(f"after the proposed deletion {path} is no Python: {error}") from error


def _touched(root: Path, patch: str) -> dict[str, tuple[int, int]]:
    """Path -> lines added and removed."""
    found = {}
    for record in filter(None, _git(root, patch, "--numstat", "-z").split("\0")):
        added, removed, path = record.split("\t", 2)
        if added == "-":
            raise Refused(f"the proposed deletion changes the binary file {path}")
        found[path] = int(added), int(removed)
    return found


def _read(path: Path) -> str | None:
    return path.read_bytes().decode() if path.exists() else None


def _git(root: Path, patch: str, *options: str) -> str:
    """GIT_CEILING_DIRECTORIES keeps git from taking a repository above for its own."""
    result = subprocess.run(
        ["git", "apply", *options, "-"],
        cwd=root,
        input=patch.encode(),
        capture_output=True,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"},
        timeout=60,
    )
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip().partition("\n")[0].removeprefix("error: ")
        raise Refused(f"the proposed deletion does not apply: {reason}")
    return result.stdout.decode()
