"""Which two releases: `release:NAME==OLD..NEW`, `release:OLD..NEW` of two archives or folders, or `release:NAME`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from packaging.utils import canonicalize_name
from packaging.version import Version

from offbook.tasks.factory.prepare.interpreter import find_interpreter
from offbook.tasks.factory.prepare.prepare import PrepareSettings
from offbook.tasks.factory.prepare.source import final_versions
from offbook.tasks.factory.types import Unprepared
from offbook.types import OffbookError

PREFIX = "release:"
# Patch releases seldom have tests that fail without them, so a jump goes over some series (1.4, 1.5, 2.0).
SERIES, JUMPS = 3, 3


@dataclass(frozen=True, slots=True)
class Jump:
    """Two sources, as `prepare.source.fetch` takes them."""

    old: str
    new: str


def is_release(source: str) -> bool:
    return source.startswith(PREFIX)


def jump_of(source: str) -> Jump:
    rest = source.removeprefix(PREFIX)
    if match := re.fullmatch(r"([A-Za-z0-9][\w.-]*)==(\d[\w.!+]*?)\.\.(\d[\w.!+]*)", rest):
        name = canonicalize_name(match[1])
        return Jump(f"pypi:{name}=={match[2]}", f"pypi:{name}=={match[3]}")
    for place in (one.start() for one in re.finditer(r"(?=\.\.)", rest)):  # paths may have dots of their own
        old, new = rest[:place], rest[place + 2 :]
        if os.path.exists(old) and os.path.exists(new):
            return Jump(os.path.realpath(old), os.path.realpath(new))
    raise Unprepared(f"{source} is neither release:NAME, nor release:NAME==OLD..NEW, nor two files as release:OLD..NEW")


async def jumps(sources: Iterable[str], settings: PrepareSettings) -> dict[str, str]:
    """The sources, each `release:NAME` as the jumps that are chosen for it, and why there are none of it."""
    found: dict[str, str] = {}
    for source in sources:
        name = source.removeprefix(PREFIX)
        if not is_release(source) or not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", name):
            found[source] = ""
            continue
        name = canonicalize_name(name)
        try:
            python = await find_interpreter(settings.python)
            chosen = chosen_jumps(await final_versions(name, settings.source, python.version))
        except OffbookError as error:
            found[source] = str(error)
            continue
        if not chosen:
            found[source] = (
                f"the package index has no two series of releases of {name} that run on Python {python.version}"
            )
        found |= {f"{PREFIX}{name}=={old}..{new}": "" for old, new in chosen}
    return found


def chosen_jumps(versions: Sequence[Version]) -> list[tuple[Version, Version]]:
    """From the newest release back, each jump over some series, from the last release of one to the last of another."""
    series: dict[tuple[int, ...], Version] = {}
    for version in sorted(versions, reverse=True):
        series.setdefault(version.release[:2], version)
    last = [*series.values()]
    ends = [*range(0, len(last), SERIES)]
    if len(last) > 1 and ends[-1] != len(last) - 1 and len(ends) == 1:
        ends.append(len(last) - 1)
    return [(last[older], last[newer]) for newer, older in pairwise(ends)][:JUMPS]
