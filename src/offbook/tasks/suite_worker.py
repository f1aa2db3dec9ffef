"""Runs a repository's own pytest suite inside a box and tells, over a pipe, how each test went. Started by suite.py as

    python -P -s -B -c SOURCE ORDER_FILE 3>REPORT

in the repository's interpreter, which sees the standard library, deps/ and the tree, and no file of offbook's. Standard
library and pytest only. ORDER_FILE is JSON (see suite.py), it lies in the tree and is gone before pytest starts.
REPORT gets a JSON list a line, written at once: a test which ends the process takes only itself along. The code under
test runs in this process and could write there whatever it likes, so all of it is a claim that grade.py judges.

    ["round"]                          a round begins
    ["collected", [node id, ...]]      what is going to run, unless there are more than max_tests: then nothing is
    ["broken", node id, reason]        a file that cannot be collected
    ["start", number]                  numbers count the collected tests from 0
    ["done", number, outcome, seconds, reason, error]    error: "assertion", or the type of another exception
    ["saw", what, path]                something that code of a watched file did
    ["returned", number, text]         of a call; none where it raises, takes long or returns no plain data
    ["function", key, path, qualified name]
    ["enters", number, [key, ...]]     number -1: while the package was imported and the tests collected
    ["end", exit code]

There may be several rounds, each with changes of its own to the tree: all but the last run in a process of their own.
No round can read what another one is told to do: each has a file of its own, which its process alone ever reads.
Where pytest would start in the same way for some of them it starts once, before anything of the tree is imported, and
every round goes on from there.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import itertools
import json
import linecache
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from types import CodeType, FrameType

    import pytest
    from _pytest.fixtures import FixtureDef, SubRequest

REPORT = 3
PRIVATE = 200  # file descriptors from here on are ours
DUMPABLE, SUBREAPER = 4, 36  # of prctl
PIPE_BYTES = 65536
REASON, RESULT = 300, 4000  # characters
CALL_S = 1.0
HITS = "__offbook_hits__"
OFF = (
    *("cacheprovider", "xdist", "xdist.looponfail", "pytest_cov", "randomly", "random_order", "rerunfailures", "sugar"),
    *("stepwise", "pastebin", "pytest-reverse", "repeat", "html", "metadata", "instafail", "testmon", "profiling"),
)


class Pipe:
    """Rows for the report."""

    __slots__ = ("descriptor", "process")

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.process = os.getpid()
        self.tell("round")

    def tell(self, *row: Any) -> None:
        if os.getpid() != self.process:  # a test forked and its child came back here
            os._exit(1)
        data = memoryview(json.dumps(row).encode() + b"\n")
        while data:  # a signal of pytest-timeout can cut a write short
            data = data[os.write(self.descriptor, data) :]


class Recorder:
    """Which tests run and how they end: one outcome a test, from the reports of its phases."""

    pipe: Pipe

    def __init__(self, max_tests: int):
        self.max_tests = max_tests
        self.selected: set[str] | None = None
        self.within: set[str] | None = None  # files, classes and functions that the selected tests are, or are in
        self.numbers: dict[str, int] = {}
        self.phases: list[pytest.TestReport] = []
        self.error = ""

    def select(self, tests: Sequence[str] | None, is_narrow: bool) -> None:
        """`is_narrow`: what is not selected is not even collected, which is most of the work in a large file."""
        self.selected = None if tests is None else set(tests)
        if tests is not None and is_narrow:
            self.within = set()
            for path, _, name in (test.partition("::") for test in tests):
                self.within.update(itertools.accumulate([path, *name.partition("[")[0].split("::")], "{}::{}".format))

    def pytest_pycollect_makeitem(self, collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
        return None if self.within is None or f"{collector.nodeid}::{name}" in self.within else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.pipe.tell("broken", report.nodeid, why_failed(report))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.selected is not None:
            chosen = [{item.nodeid, item.nodeid.partition("[")[0]} & self.selected for item in items]
            dropped = [item for item, wanted in zip(items, chosen) if not wanted]  # noqa: B905
            items[:] = [item for item, wanted in zip(items, chosen) if wanted]  # noqa: B905
            config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.numbers = {node: number for number, node in enumerate(item.nodeid for item in session.items)}
        self.pipe.tell("collected", list(self.numbers))
        if len(self.numbers) > self.max_tests:
            session.items.clear()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.phases, self.error = [], ""
        self.pipe.tell("start", self.numbers[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases.append(report)

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None and not self.error:
            bases = {base.__name__ for base in call.excinfo.type.__mro__}
            self.error = "assertion" if bases & {"AssertionError", "Failed"} else call.excinfo.type.__name__

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = next((phase for phase in self.phases if phase.failed), None)
        skipped = next((phase for phase in self.phases if phase.skipped), None)
        unexpected = any(hasattr(phase, "wasxfail") for phase in self.phases)
        ended = {phase.when for phase in self.phases}
        outcome, reason = "passed", ""
        if failed:
            outcome, reason = "failed", f"{failed.when}: {why_failed(failed)}"
        elif skipped or unexpected:
            outcome, reason = "skipped", why_skipped(skipped) if skipped else "passes against expectation"
        elif not {"call", "teardown"} <= ended:
            outcome, reason = "failed", "it did not run to its end"
        seconds = round(sum(phase.duration for phase in self.phases), 4)
        self.pipe.tell("done", self.numbers[nodeid], outcome, seconds, reason, self.error)


def last_line(text: str) -> str:
    """Of a traceback the line that names the error; of an assertion that says nothing, the line of code."""
    lines = [line for line in text.splitlines() if line.strip()]
    place = next((number for number, line in enumerate(lines) if line.startswith("E ")), len(lines) - 1)
    error = lines[place].removeprefix("E").strip() if lines else ""
    if error == "AssertionError":  # Python 3.11 and later mark the place under the line of code
        code = [line.strip() for line in lines[:place] if line.strip(" ^~")]
        error = code[-1] if code else error
    return error[:REASON]


def why_failed(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The same, where pytest does not show source lines."""
    from _pytest._code.code import ExceptionChainRepr

    error = last_line(report.longreprtext)
    if error == "AssertionError" and isinstance(report.longrepr, ExceptionChainRepr):
        place = report.longrepr.chain[0][1]
        error = linecache.getline(place.path, place.lineno).strip()[:REASON] if place else error
    return error


def why_skipped(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:REASON]
    return why_failed(report)


class Tracer:
    """Which functions of the source files are entered, test by test.

    It puts a statement at the start of every function as its file is imported. That costs a dictionary entry a call,
    and threads, generators, coroutines and tests that trace on their own do not disturb it. What a fixture of a wider
    scope enters belongs to every test that uses the fixture, not only to the first one.
    """

    def __init__(self, recorder: Recorder, sources: dict[str, str]):
        self.recorder, self.sources = recorder, sources  # absolute path -> path in the tree
        self.entered: dict[int, bool] = {}
        self.num_functions = 0
        self.of_fixture: dict[int, set[int]] = {}  # by id of the FixtureDef

    def start(self) -> None:
        setattr(builtins, HITS, self.entered)
        compile_source = importlib.machinery.SourceFileLoader.source_to_code

        def source_to_code(loader: Any, data: Any, path: Any, **options: Any) -> Any:
            relative = self.sources.get(os.path.realpath(path)) if isinstance(data, bytes) else None
            if relative is not None:
                data = ast.parse(data, path)
                self._insert(data, relative, "")
            return compile_source(loader, data, path, **options)

        setattr(importlib.machinery.SourceFileLoader, "source_to_code", source_to_code)  # noqa: B010

    def _insert(self, node: ast.AST, path: str, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._insert(child, path, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                self._insert(child, path, f"{name}.<locals>.")
                at = 1 if ast.get_docstring(child, clean=False) is not None else 0
                mark = ast.parse(f"{HITS}[{self.num_functions}] = True").body[0]
                self.recorder.pipe.tell("function", self.num_functions, path, name)
                self.num_functions += 1
                place = child.body[min(at, len(child.body) - 1)]
                for inserted in ast.walk(mark):
                    if isinstance(inserted, ast.expr | ast.stmt):
                        ast.copy_location(inserted, place)
                child.body.insert(at, mark)
            elif not isinstance(child, ast.expr):
                self._insert(child, path, prefix)

    def finish(self, number: int, more: set[int]) -> None:
        self.recorder.pipe.tell("enters", number, sorted(more.union(self.entered)))
        self.entered.clear()

    def pytest_collection_finish(self) -> None:
        self.finish(-1, set())

    def pytest_fixture_setup(self, fixturedef: FixtureDef[Any], request: SubRequest) -> Generator[None, Any, Any]:
        if request.scope == "function":
            return (yield)
        before = dict(self.entered)
        self.entered.clear()
        try:
            return (yield)
        finally:
            self.of_fixture[id(fixturedef)] = set(self.entered)
            self.entered.update(before)

    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.entered.clear()
        result = yield
        shared: set[int] = set()
        for definitions in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009  # private to pytest
            for definition in definitions:
                shared |= self.of_fixture.get(id(definition), set())
        self.finish(self.recorder.numbers[item.nodeid], shared)
        return result


class Watcher:
    """Tells what the product does that only somebody does who looks at the tests or at the runner. From an audit hook,
    which cannot be taken away again; once for each file and kind."""

    KINDS: ClassVar = {
        "sys._getframe": "frames",
        "sys._current_frames": "frames",
        "sys.settrace": "tracing",
        "sys.setprofile": "tracing",
        "gc.get_objects": "gc",
        "gc.get_referrers": "gc",
        "gc.get_referents": "gc",
        "ctypes.dlopen": "ctypes",
        "ctypes.dlsym": "ctypes",
    }
    LOOKERS = ("inspect.py", "traceback.py", "linecache.py", "pathlib.py", "tokenize.py", "codecs.py", "mock.py")

    def __init__(self, pipe: Pipe, product: Sequence[str], tests: Collection[str]):
        self.pipe, self.product = pipe, tuple(map(os.path.realpath, product))
        self.tests = {os.path.realpath(path) for path in tests}
        self.seen: set[tuple[str, str]] = set()
        self.busy = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        kind = self.KINDS.get(event)
        if kind is None:
            if event == "open":
                if not isinstance(arguments[0], str) or os.path.abspath(arguments[0]) not in self.tests:
                    return
                kind = "tests read"
            elif event == "object.__setattr__" and arguments[1] == "__code__":
                kind = "code replaced"
            elif event == "object.__getattr__" and arguments[1] == "tb_frame":
                kind = "frames"
            else:
                return
        if self.busy or os.getpid() != self.pipe.process:
            return
        self.busy = True
        try:
            path = self.caller()
            if path and (kind, path) not in self.seen:
                self.seen.add((kind, path))
                self.pipe.tell("saw", kind, os.path.relpath(path))
        finally:
            self.busy = False

    def caller(self) -> str:
        """The product's file that does it, by itself or through what is there to look at code."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(self.LOOKERS):
            frame = frame.f_back
        name = os.path.abspath(frame.f_code.co_filename) if frame else ""
        return name if any(name == root or name.startswith(root + os.sep) for root in self.product) else ""


class Compiled:
    """Code of files that no round changed, so that not every round compiles them. Nothing of it has been run.

    A round names what it compiles itself, and the process that it comes from does that for those after it."""

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
        """What would warn is left to the rounds, where a test may want to see it."""
        for path in os.read(names, PIPE_BYTES).decode().splitlines():
            if path not in self.known and os.path.relpath(path) in unchanged and (data := read(path)) is not None:
                with warnings.catch_warnings(), contextlib.suppress(Exception):
                    warnings.simplefilter("error")
                    self.known[path] = data, self.compile(None, data, path)


def main(order_file: str) -> NoReturn:
    # Neither the code under test nor its children shall write to the pipe by accident, by number or by inheritance.
    # Nor to any other pipe that came with the box.
    descriptor = fcntl.fcntl(REPORT, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    os.closerange(REPORT, PRIVATE)
    with open(order_file) as file:
        order = json.load(file)
    os.unlink(order_file)
    sealed = [taken(path) for path in order.pop("rounds")]
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1)  # what a round leaves running becomes a child of this process, which then ends it
    if not order["plugins"]:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    # One of the names by which hypothesis knows that it runs unattended, and then keeps no examples and has no
    # deadlines. Of those names this is the one that no test suite looks at.
    os.environ["__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI"] = "1"
    gc.disable()  # the imports leave no garbage, and starting is most of what a small suite costs
    if order.get("pytest", True):  # calls alone do without
        import _pytest.runner  # before the tree is on the path: a json.py there must not be what pytest imports
        import pytest  # noqa: F401
        from _pytest.config import default_plugins

        for name in default_plugins:  # or every round would
            importlib.import_module(f"_pytest.{name}")
        setattr(_pytest.runner, "_update_current_test_var", lambda item, when: None)  # noqa: B010  # who runs is not told
        for name in order["preload"]:  # once for all rounds
            importlib.import_module(name)
    gc.enable()
    gc.freeze()
    found = there(order["places"]) if len(sealed) > 1 else {}
    rounds = Rounds(descriptor, order, sealed, prctl, found) if len(sealed) > 1 else None
    alike = num_alike(order, found) if rounds else []
    while rounds and len(sealed) > 1:
        done = rounds.together(alike[-len(sealed)]) if alike[-len(sealed)] > 1 else 0
        if not done and (this := rounds.next()):
            end(run_round(Pipe(descriptor), order, this, is_narrow=True))
    prctl(DUMPABLE, 1)
    end(run_round(Pipe(descriptor), order, unsealed(sealed[0])))


def taken(path: str) -> int:
    """A file that only this descriptor leads to."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    os.close(opened)
    os.unlink(path)
    return descriptor


def unsealed(descriptor: int) -> dict[str, Any]:
    with open(descriptor) as file:
        return json.load(file)


Found = dict[str, tuple[int, int, int]]


class Rounds:
    """Those that are still to be run, each in a process of its own, which has pytest already and nothing yet of what is
    tested. `found` is what was there before all rounds, and `put_back` what of it the last one changed by order."""

    def __init__(self, descriptor: int, order: dict[str, Any], sealed: list[int], prctl: Any, found: Found):
        self.descriptor, self.order, self.sealed, self.prctl, self.found = descriptor, order, sealed, prctl, found
        self.compiled = Compiled()
        self.put_back: Found = {}

    def next(self) -> dict[str, Any] | None:
        """The first of the sealed files is the next round's own: what it is told to do, in its process. The paths that
        it changes are told to this process, which then makes them what they were. What a round leaves goes, so that no
        other one can learn from it; files of others that it wrote to are told."""
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
        """The next so many, for which pytest starts once, in a process of its own. How many of them were run: none
        where it does not come to the point at which it would collect tests."""
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
    """pytest, up to where it would collect tests. It has seen the options and the folders that the rounds have in
    common, the settings there, and plugins; nothing of the tree can be imported yet."""

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
        """Comes to an end in the processes of the rounds only."""
        capture = session.config.pluginmanager.getplugin("capturemanager")
        for _ in range(self.count):
            sys.stdout.flush()
            if this := self.rounds.next():
                os.close(self.done)
                self.in_round = True
                begin(self.recorder, Pipe(self.rounds.descriptor), self.rounds.order, this, is_narrow=True)
                session.config.args = session.config.option.file_or_dir = this["files"]
                return
            capture.read_global_capture()  # what a round printed and nobody took is not for the next one
            os.write(self.done, json.dumps(self.rounds.put_back).encode() + b"\n")
        end(0)


def num_alike(order: dict[str, Any], found: Found) -> list[int]:
    """For each round how many pytest starts the same for, from there on and without the last. A conftest file would
    bring code of the tree along."""
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


def there(places: Sequence[str]) -> Found:
    """What is in the tree and in these places: when it was last changed, how long it is, which file it is."""
    found: Found = {}
    for place in (".", *places):
        for folder, names, files in os.walk(place):
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
    """Of a round that is over, also those that it hid from its own process."""
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


def run_round(pipe: Pipe, order: dict[str, Any], this: dict[str, Any], is_narrow: bool = False) -> int:
    recorder = Recorder(order["max_tests"])
    begin(recorder, pipe, order, this, is_narrow)
    if this["calls"]:
        return run_calls(pipe, this["calls"])
    import pytest

    plugins: list[object] = [recorder]
    if order["sources"]:
        tracer = Tracer(recorder, {os.path.realpath(path): path for path in order["sources"]})
        for hook in (Tracer.pytest_fixture_setup, Tracer.pytest_runtest_protocol):
            pytest.hookimpl(wrapper=True)(hook)
        plugins.append(tracer)
        tracer.start()
    exit_code = run_pytest(this["options"], this["files"], plugins)
    pipe.tell("end", exit_code)
    return exit_code


def begin(recorder: Recorder, pipe: Pipe, order: dict[str, Any], this: dict[str, Any], is_narrow: bool) -> None:
    """From here on the tree is as the round has it, and can be imported."""
    roots = [os.path.abspath(root) for root in order["import_roots"]]
    first_of_site = next((i for i, path in enumerate(sys.path) if path.endswith("site-packages")), len(sys.path))
    sys.path[first_of_site:first_of_site] = roots
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)  # for the processes that tests start
    for path, text in this["changes"].items():
        write(path, None if text is None else text.encode())
    recorder.pipe = pipe
    recorder.select(this["tests"], is_narrow)
    if order["product"] and not this["calls"]:
        sys.addaudithook(Watcher(pipe, order["product"], this["files"]).hook)


def run_pytest(options: list[str], files: list[str], plugins: list[object]) -> int:
    import pytest

    off = [argument for name in OFF for argument in ("-p", f"no:{name}")]
    pytest.hookimpl(tryfirst=True)(Recorder.pytest_pycollect_makeitem)
    return int(pytest.main([*off, *options, "--", *files], plugins=plugins))


def run_calls(pipe: Pipe, calls: list[list[str]]) -> int:
    """Module, function, and the text of its positional and named arguments."""
    signal.signal(signal.SIGALRM, late)
    for number, (module, name, text) in enumerate(calls):
        try:
            function = getattr(importlib.import_module(module), name)  # which takes long on a busy machine
            signal.setitimer(signal.ITIMER_REAL, CALL_S)
            arguments, named = ast.literal_eval(text)
            value = function(*arguments, **named)
            result = repr(list(itertools.islice(value, 200)) if isinstance(value, Iterator) else value)
            ast.literal_eval(result)
        except Exception:
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if len(result) <= RESULT:
            pipe.tell("returned", number, result)
    return 0


def late(*_: object) -> NoReturn:
    raise TimeoutError


def end(status: int) -> NoReturn:
    """Threads and exit handlers of the code under test have no say any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
