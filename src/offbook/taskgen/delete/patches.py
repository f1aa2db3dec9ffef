"""Deletions that come as a patch, from a person or a model."""

from __future__ import annotations

from collections.abc import Mapping

from offbook.taskgen.delete.visible import is_test_code
from offbook.tasks.patch import BadPatch, applied, touched_by
from offbook.types import OffbookError


class Refused(OffbookError):
    """A proposed deletion that cannot be used, and why, in one sentence."""


def apply_proposal(files: Mapping[str, str], patch: str) -> dict[str, str | None]:
    """The files that a proposed deletion changes, None where one goes."""
    if not patch.strip():
        raise Refused("the proposed deletion is empty")
    try:
        touched = touched_by(patch)
        for path in touched:
            _check(path, files)
        after = applied(files, patch)
    except BadPatch as error:
        raise Refused(f"the proposed deletion cannot be used: {error}") from error
    stray = sorted(after.keys() - touched.keys())
    if stray:
        raise Refused(f"the proposed deletion adds {stray[0]}")
    changed = {path: text for path, text in after.items() if text != files[path]}
    _check_size(changed, touched)
    return changed


def _check(path: str, files: Mapping[str, str]) -> None:
    if path not in files:
        raise Refused(f"the proposed deletion touches {path}, which is not in the tree")
    if is_test_code(path):
        raise Refused(f"the proposed deletion touches the test file {path}")


def _check_size(changed: Mapping[str, str | None], touched: Mapping[str, tuple[int, int]]) -> None:
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
