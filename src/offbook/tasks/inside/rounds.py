"""Runs several rounds, each in a process of its own that leaves nothing behind for the next."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import json
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from offbook.tasks.inside.report import Pipe, Recorder
from offbook.tasks.inside.running import begin, end, read, run_pytest, write

if TYPE_CHECKING:
    from types import CodeType

    import pytest

DUMPABLE, SUBREAPER = 4, 36  # of prctl
PIPE_BYTES = 65536
KEPT = (
    ".git/index",
)  # git writes it when it is only asked for the status; restored after each round, and not reported

Found = dict[str, tuple[int, int, int]]


class Compiled:
    """Cache of compiled files that no round changed. Compiling them runs nothing.

    A round names the files it had to compile, and its parent process compiles them for the rounds after it."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[bytes, CodeType]] = {}
        self.names = -1  # in a round: where to
        self.compile: Any = importlib.machinery.SourceFileLoader.source_to_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            known = self.known.get(path)
            if known and known[0] == data:
                return known[1]
            if self.names >= 0:
                with contextlib.suppress(OSError):  # full: then the others compile it too
                    os.write(self.names, f"{path}\n".encode())
            return self.compile(loader, data, path, **options)

        setattr(importlib.machinery.SourceFileLoader, "source_to_code", source_to_code)  # noqa: B010

    def learn(self, names: int, unchanged: Collection[str]) -> None:
        """Files that warn are left to the rounds, where a test may expect the warning."""
        for path in os.read(names, PIPE_BYTES).decode().splitlines():
            if path not in self.known and os.path.relpath(path) in unchanged and (data := read(path)) is not None:
                with warnings.catch_warnings(), contextlib.suppress(Exception):
                    warnings.simplefilter("error")
                    self.known[path] = data, self.compile(None, data, path)


def unsealed(descriptor: int) -> dict[str, Any]:
    with open(descriptor) as file:
        return json.load(file)


class Rounds:
    """The queue of rounds, each run in a fork that has imported pytest and nothing of the tree. `found` is what was
    there before all rounds, and `put_back` what of it the last one changed by order."""

    def __init__(self, descriptor: int, order: dict[str, Any], sealed: list[int], prctl: Any, found: Found):
        self.descriptor, self.order, self.sealed, self.prctl, self.found = descriptor, order, sealed, prctl, found
        self.compiled = Compiled()
        self.put_back: Found = {}
        self.kept = {path: read(path) for path in KEPT if path in found}

    def next(self) -> dict[str, Any] | None:
        """Fork the next round. Returns its order in the child, and None in the parent, when the round is over.

        Only the child reads the order, the first of the sealed files. It names the paths that it changes, which the
        parent restores. New files of a round are removed, so that no other one learns from them; writes to existing
        files are reported."""
        self.prctl(DUMPABLE, 0)  # our files are not to be had through /proc by the child
        reading, writing = os.pipe()
        names, self.compiled.names = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            os.close(reading)
            for other in (names, *self.sealed[1:]):
                os.close(other)
            this = unsealed(self.sealed[0])
            before = {path: read(path) for path in this["changes"]}
            as_text = {path: None if data is None else data.decode("latin-1") for path, data in before.items()}
            with open(writing, "w") as pipe:
                json.dump([this["timeout_s"], as_text], pipe)
            del before, as_text
            self.prctl(DUMPABLE, 1)
            return this
        os.close(writing)
        os.close(self.compiled.names)
        with open(reading) as pipe:
            timeout_s, before = json.load(pipe)
        deadline = time.monotonic() + timeout_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        end_children()
        for path, state in there(self.order["places"]).items():
            if path not in self.found and path not in before:
                remove(path)
            elif path in self.kept and state != self.found[path]:
                write(path, self.kept[path])
                self.found[path] = state_of(path)
            elif path not in before and state != self.found[path]:
                os.write(self.descriptor, json.dumps(["saw", "written", path]).encode() + b"\n")
        for path, text in before.items():
            write(path, None if text is None else text.encode("latin-1"))
        self.put_back = {path: state_of(path) for path in before if path in self.found and os.path.lexists(path)}
        self.found.update(self.put_back)
        self.compiled.learn(names, self.found.keys() - before.keys())
        os.close(names)
        os.close(self.sealed.pop(0))
        return None

    def together(self, count: int) -> int:
        """Run the next `count` rounds as forks of one started pytest. Returns how many were run: none if pytest does
        not get as far as collection."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self.prctl(SUBREAPER, 1)
            end(Started(self, count, writing).run())
        os.close(writing)
        with open(reading) as pipe:  # no round has it
            done = pipe.read().split("\n")[:-1]
        os.waitpid(child, 0)
        end_children()
        for line in done:
            self.found.update((path, tuple(state)) for path, state in json.loads(line).items())
            os.close(self.sealed.pop(0))
        return len(done)


class Started:
    """pytest, started up to collection with the options and folders that the rounds share. Nothing of the tree can be
    imported yet."""

    def __init__(self, rounds: Rounds, count: int, done: int):
        self.rounds, self.count, self.done = rounds, count, done
        self.recorder = Recorder(rounds.order["max_tests"])
        self.in_round = False

    def run(self) -> int:
        import pytest

        pytest.hookimpl(tryfirst=True)(Started.pytest_collection)
        start = self.rounds.order["starts"][-len(self.rounds.sealed)]
        exit_code = run_pytest(start["options"], start["folders"], [self.recorder, self])
        if self.in_round:
            self.recorder.pipe.tell("end", exit_code)
        return exit_code

    def pytest_collection(self, session: pytest.Session) -> None:
        """Returns only in the processes of the rounds."""
        capture = session.config.pluginmanager.getplugin("capturemanager")
        for _ in range(self.count):
            sys.stdout.flush()
            if this := self.rounds.next():
                os.close(self.done)
                self.in_round = True
                begin(self.recorder, Pipe(self.rounds.descriptor), self.rounds.order, this, is_narrow=True)
                session.config.args = session.config.option.file_or_dir = this["files"]
                return
            capture.read_global_capture()  # what a round printed must not reach the next one
            os.write(self.done, json.dumps(self.rounds.put_back).encode() + b"\n")
        end(0)


def num_alike(order: dict[str, Any], found: Found) -> list[int]:
    """For each round the length of the run of rounds, without the last, that can fork from one started pytest. With a
    conftest file 0, because that imports code of the tree."""
    starts = order["starts"]
    if order["sources"] or any(os.path.basename(path) == "conftest.py" for path in found):
        return [0] * len(starts)
    alike = [0]
    for start, following in zip(starts[-2::-1], [None, *starts[-2:0:-1]]):  # noqa: B905
        alike.insert(0, 0 if start is None else alike[0] + 1 if start == following else 1)
    return alike


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


@functools.cache
def read_only() -> frozenset[str]:
    """Read-only mount points, which need no scan: an interpreter in /tmp has tens of thousands of files."""
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return frozenset()
    points = [mount[4] for mount in mounts if "ro" in mount[5].split(",")]
    return frozenset(re.sub(r"\\(\d{3})", lambda escaped: chr(int(escaped[1], 8)), point) for point in points)


def there(places: Sequence[str]) -> Found:
    """The state of every writable file in the tree and in these places."""
    found: Found = {}
    for place in (".", *places):
        for folder, names, files in os.walk(place):
            names[:] = [name for name in names if os.path.abspath(os.path.join(folder, name)) not in read_only()]
            found.update((os.path.normpath(os.path.join(folder, name)), (0, 0, 0)) for name in names)
            for name in files:
                path = os.path.normpath(os.path.join(folder, name))
                with contextlib.suppress(OSError):  # gone by now
                    found[path] = state_of(path)
    return found


def state_of(path: str) -> tuple[int, int, int]:
    state = os.lstat(path)
    return state.st_ctime_ns, state.st_size, state.st_ino


def end_children() -> None:
    """Kill all children, including those that a finished round detached from its own process."""
    own = str(os.getpid())
    for _ in range(50):  # one that ends leaves its own children to us
        children = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == own:
                children.append(int(name))
        if not children:
            return
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except OSError:
                continue
