"""A file of trajectories, whatever its format: our own rollouts, ATIF v1 (JSON), or messages as OpenAI's API has them.

What cannot be read is counted. Files are told apart by what is in them and not by their names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbook.runfolder import load_lines
from offbook.trajectories.atif import from_atif
from offbook.trajectories.build import parsed
from offbook.trajectories.messages import from_messages
from offbook.types import OffbookError, Rollout

MAX_BYTES = 512 << 20


@dataclass(slots=True)
class Loaded:
    rollouts: list[Rollout] = field(default_factory=list)
    unreadable: int = 0  # lines or files that are no trajectory
    format: str = ""


def read_trajectories(path: Path) -> Loaded:
    """One sentence if nothing in the file is a trajectory."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OffbookError(f"{path} has more than {MAX_BYTES >> 20} MB; split it")
        text = path.read_text(errors="replace")
    except OSError as error:
        raise OffbookError(f"cannot read {path}: {error.strerror}") from None
    loaded = _whole(text, path) or _lines(text, path)
    if not loaded.rollouts:
        raise OffbookError(f"{path} has no trajectory in it: neither ATIF, nor messages, nor rollouts of offbook")
    return loaded


def _whole(text: str, path: Path) -> Loaded | None:
    """The file as one JSON value: one trajectory, or a list of them; None if it is not JSON."""
    try:
        value = parsed(text)
    except ValueError:
        return None
    many = isinstance(value, list) and not (value and isinstance(value[0], dict) and "role" in value[0])
    return _collect(value if many else [value], path)


def _lines(text: str, path: Path) -> Loaded:
    values: list[Any] = []
    for line in text.split("\n"):  # JSON may have other ends of lines in its strings
        if line.strip():
            try:
                values.append(parsed(line))
            except ValueError:
                values.append(None)
    if values and all(isinstance(value, dict) and "role" in value for value in values):
        return _collect([values], path)  # one conversation, a message a line
    return _collect(values, path)


def _collect(values: list[Any], path: Path) -> Loaded:
    if any(isinstance(value, dict) and "segments" in value for value in values):
        rollouts, unreadable = load_lines(path, Rollout)
        return Loaded(rollouts, unreadable, "offbook")
    loaded = Loaded()
    for number, value in enumerate(values):
        name = path.stem if len(values) == 1 else f"{path.stem}/{number}"
        try:
            if isinstance(value, dict) and "steps" in value:
                rollout, loaded.format = from_atif(value, name), "atif"
            else:
                rollout, loaded.format = from_messages(value, name), "messages"
        except (KeyError, TypeError, ValueError, AttributeError):
            loaded.unreadable += 1
            continue
        loaded.rollouts.append(rollout)
    return loaded
