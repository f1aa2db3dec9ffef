"""Runs several rounds, each in a process of its own that leaves nothing behind for the next."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from offbook.tasks.inside.apart import run_apart, run_calls
from offbook.tasks.inside.blank import Blanks
from offbook.tasks.inside.report import Pipe, Recorder
from offbook.tasks.inside.watch import Tracer, Watcher

DUMPABLE, SUBREAPER = 4, 36  # of prctl
# git writes it if it is only asked for the status. It is restored after each round, and not reported.
GIT_INDEX = ".git/index"

Found = dict[str, tuple[int, int, int]]
OFF = (
    *("cacheprovider", "xdist", "xdist.looponfail", "pytest_cov", "randomly", "random_order", "rerunfailures", "sugar"),
    *("stepwise", "pastebin", "pytest-reverse", "repeat", "html", "metadata", "instafail", "testmon", "profiling"),
)


def unsealed(descriptor: int) -> dict[str, Any]:
    with open(descriptor) as file:
        return json.load(file)


class Rounds:
    """The queue of rounds, each run in a fork that has imported pytest and nothing of the tree."""

    def __init__(self, descriptor: int, sealed: list[int], places: Sequence[str], prctl: Any):
        self.descriptor, self.sealed, self.places, self.prctl = descriptor, sealed, places, prctl
        self.found = there(places)  # before all rounds
        self.index = read(GIT_INDEX)

    def next(self) -> dict[str, Any] | None:
        """Fork the next round. Returns its order in the child, and None in the parent, when the round is over.

        Only the child reads the order, the first of the sealed files. It names the paths that it changes, which the
        parent restores. New files of a round are removed, so that no other one learns from them; writes to existing
        files are reported."""
        self.prctl(DUMPABLE, 0)  # our files are not to be had through /proc by the child
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for other in (reading, *self.sealed[1:]):
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
        with open(reading) as pipe:
            timeout_s, before = json.load(pipe)
        deadline = time.monotonic() + timeout_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        end_children()
        restored = {path: None if text is None else text.encode("latin-1") for path, text in before.items()}
        for path, state in there(self.places).items():
            if path in before or state == self.found.get(path):
                continue
            if path not in self.found:
                remove(path)
            elif path == GIT_INDEX:
                restored[path] = self.index
            else:
                os.write(self.descriptor, json.dumps(["saw", "written", path]).encode() + b"\n")
        for path, data in restored.items():
            write(path, data)
            if path in self.found and os.path.lexists(path):
                self.found[path] = state_of(path)
        os.close(self.sealed.pop(0))
        return None


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


def run_round(pipe: Pipe, order: dict[str, Any], this: dict[str, Any], is_narrow: bool = False) -> int:
    """`is_narrow`: what is not selected is not even collected."""
    roots = [os.path.abspath(root) for root in order["import_roots"]]
    first_of_site = next((i for i, path in enumerate(sys.path) if path.endswith("site-packages")), len(sys.path))
    sys.path[first_of_site:first_of_site] = roots
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)  # for the processes that tests start
    for path, text in this["changes"].items():
        write(path, None if text is None else text.encode())
    if this["apart"]:
        return run_apart(pipe, this)
    if this["calls"]:
        run_calls(pipe, this["calls"], this["per_test_s"], is_apart=False)
        return 0
    import pytest

    recorder = Recorder(pipe, order["max_tests"], this["tests"], is_narrow)
    recorder.blanks = Blanks() if this["blank"] else None
    plugins: list[object] = [recorder]
    if order["sources"]:
        tracer = Tracer(recorder, {os.path.realpath(path): path for path in order["sources"]})
        for hook in (Tracer.pytest_fixture_setup, Tracer.pytest_runtest_protocol):
            pytest.hookimpl(wrapper=True)(hook)
        plugins.append(tracer)
        tracer.start()
    if limit_s := order.get("collect_s"):
        recorder.collecting = threading.Timer(limit_s, os._exit, [1])
        recorder.collecting.daemon = True
        recorder.collecting.start()
    if order["product"]:
        sys.addaudithook(Watcher(pipe, order["product"], this["files"]).hook)
    off = [argument for name in OFF for argument in ("-p", f"no:{name}")]
    pytest.hookimpl(tryfirst=True)(Recorder.pytest_pycollect_makeitem)
    exit_code = int(pytest.main([*off, *this["options"], "--", *this["files"]], plugins=plugins))
    pipe.tell("end", exit_code)
    return exit_code


def end(status: int) -> NoReturn:
    """Threads and exit handlers of the code under test have no say any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def read(path: str) -> bytes | None:
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def write(path: str, content: bytes | None) -> None:
    if content is None:
        if os.path.exists(path):
            os.unlink(path)
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
