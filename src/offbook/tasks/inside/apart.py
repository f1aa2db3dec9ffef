"""Calls of the code under test, and a round that does not look like pytest: no module of it, another folder, other
arguments, environment, clock and names on the stack. Code that is right only while it is judged fails there."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import linecache
import os
import signal
import sys
import threading
import time
import types
import unittest
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NoReturn

from offbook.tasks.inside.blank import data_of
from offbook.tasks.inside.report import Pipe

AHEAD = [4e7]  # seconds that the clock is ahead: over a year, and more with every call
STEP_S = 3600.0
WARM_CALLS, WARM_S = 500, 0.1  # of each function, before the others
UNSTEADY = '[["unsteady"], false]'  # of a function that gives several answers to one call
SURROUNDINGS = {"USER": "user", "LOGNAME": "user", "HOME": "/usr"}  # of a person
VARIABLES = ("PYTHON", "PYTEST", "HYPOTHESIS", "__TOX")  # how the names of the worker's own begin
RUNNER_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig")


def run_calls(pipe: Pipe, calls: list[list[str]], limit_s: float, is_apart: bool) -> None:
    """Module, function, and the text of its positional and named arguments."""
    signal.signal(signal.SIGALRM, late)
    warmed = set[tuple[str, str]]()
    for number, call in enumerate(calls):
        AHEAD[0] += STEP_S
        text = answer(call, limit_s)
        if is_apart and (call[0], call[1]) not in warmed:
            warmed.add((call[0], call[1]))
            text = text if is_steady(call, limit_s) else UNSTEADY
        pipe.tell("returned", number, text)


def is_steady(call: list[str], limit_s: float) -> bool:
    """Whether a call that is made many times, each time with new arguments, gives the same answer, also after its last
    result was emptied."""
    until = perf_counter() + WARM_S
    answers = set[str]()
    for _ in range(WARM_CALLS):
        answers.add(answer(call, limit_s, is_emptied=True))
        if perf_counter() > until or len(answers) > 1:
            break
    return len(answers) == 1


def answer(call: list[str], limit_s: float, is_emptied: bool = False) -> str:
    """JSON of what a call returns, and whether it changed its arguments. Of an exception its types, and whether a
    `raise` statement of the function's own module raised it. The longer the arguments, the more of a result."""
    module, name, text = call
    most = max(200, len(text))
    path = ""
    try:
        function = getattr(importlib.import_module(module), name)  # which takes long on a busy machine
        path = sys.modules[module].__file__ or ""
        arguments, named = resolved(ast.literal_eval(text))
        before = repr((arguments, named))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        value = function(*arguments, **named)
        if inspect.isfunction(value):  # a decorator: what it says of a function
            value = {
                name: one for name, one in vars(value(lambda *_: 1)).items() if one is not None and name[:2] != "__"
            }
        value = list(itertools.islice(value, most)) if isinstance(value, Iterator) else value
        data = data_of(value, 20 * most)
        is_changed = repr((arguments, named)) != before
        if is_emptied and type(value) in (list, dict, set):
            value.clear()
        return json.dumps([data, is_changed])
    except Exception as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ""
        is_own = trace is not None and trace.tb_frame.f_code.co_filename == path
        is_meant = is_own and line.lstrip().startswith("raise ")
        return json.dumps([["raises", *(base.__name__ for base in type(error).__mro__)], is_meant])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def resolved(value: Any) -> Any:
    """With functions in the places of their names, "\\0module:name", or of their sources, "\\0(source, names)"."""
    if isinstance(value, str) and value.startswith("\0("):
        source, names = ast.literal_eval(value[1:])
        scope = {name: resolved(one) for name, one in names.items()}
        node = ast.parse(source).body[0]
        if isinstance(node, ast.Expr):
            return eval(source, scope)
        exec(source, scope)
        return scope[node.name]
    if isinstance(value, str) and value.startswith("\0"):
        module, _, name = value[1:].partition(":")
        found: Any = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            found = getattr(found, part)
        return found
    if isinstance(value, list | tuple):
        return type(value)(map(resolved, value))
    return {key: resolved(one) for key, one in value.items()} if isinstance(value, dict) else value


def late(*_: object) -> NoReturn:
    raise TimeoutError


def run_apart(pipe: Pipe, this: dict[str, Any]) -> int:
    root = os.getcwd()
    hidden = hide()
    run_calls(pipe, this["calls"], this["per_test_s"], is_apart=True)
    pipe.tell("collected", this["tests"])
    modules: dict[str, Any] = {}
    for number, test in enumerate(this["tests"]):
        path, *names = test.split("::")
        pipe.tell("start", number)
        began, reason = perf_counter(), ""
        AHEAD[0] += STEP_S
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, this["per_test_s"])
        try:
            if path not in modules:
                modules[path] = loaded(root, path, f"part{number}", hidden)
            run_plain(modules[path], names)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = round(perf_counter() - began, 4)
        pipe.tell("done", number, "failed" if reason else "passed", seconds, reason, "")
    return 0


def hide() -> dict[str, Any]:
    """What says that this is a judge. Returns the modules that are gone, for the test files to import."""
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in RUNNER_MODULES}
    for name in [*os.environ]:
        if name.startswith(VARIABLES):
            del os.environ[name]
    sys.argv[:] = ["-c"]
    sys.orig_argv[:] = ["python", "-c"]
    os.environ.update(SURROUNDINGS)
    os.chdir("/")
    terminal()
    for clock in ("time", "monotonic", "perf_counter"):
        setattr(time, clock, ahead(getattr(time, clock)))
    return hidden


def terminal() -> None:
    """Standard input and output are a terminal, whose output is thrown away."""
    reading, writing = os.openpty()
    for descriptor in range(3):
        os.dup2(writing, descriptor)

    def drain() -> None:
        while os.read(reading, 1 << 16):
            pass

    threading.Thread(target=drain, daemon=True).start()


def ahead(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() + AHEAD[0]


def loaded(root: str, path: str, name: str, hidden: dict[str, Any]) -> types.ModuleType:
    """A test file as a module that is not named like one."""
    file = os.path.join(root, path)
    folder, package = os.path.dirname(file), list[str]()
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        package.insert(0, os.path.basename(folder))
        folder = os.path.dirname(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = types.ModuleType(name)
    module.__file__, module.__package__ = file, ".".join(package)
    with open(file, "rb") as source:
        code = compile(source.read(), name, "exec")
    sys.modules[name] = module
    sys.modules.update(hidden)
    try:
        exec(code, vars(module))
    finally:
        hidden.update((one, sys.modules.pop(one)) for one in [*sys.modules] if one.partition(".")[0] in RUNNER_MODULES)
    return module


def run_plain(module: types.ModuleType, names: list[str]) -> None:
    """A test function with each of its parameters. What needs more of pytest than that fails."""
    *within, name = names
    owners: list[Any] = [module]
    for part in within:
        owners.append(getattr(owners[-1], part))
    owner = owners[-1]
    function = inspect.unwrap(getattr(owner, name))
    function.__code__ = function.__code__.replace(co_name="run")
    if isinstance(owner, type) and issubclass(owner, unittest.TestCase):
        result = unittest.TestResult()
        unittest.TestSuite([owner(name)]).run(result)
        if not result.wasSuccessful() or result.skipped or not result.testsRun:
            raise AssertionError(str(result))
        return
    if function.__code__.co_flags & 0x2A0:  # generators, coroutines
        raise TypeError(name)
    for arguments in cases_of([mark for one in (*owners, function) for mark in getattr(one, "pytestmark", [])]):
        bound: Callable[..., object] = getattr(owner() if within else owner, name)
        bound(**arguments)


def cases_of(marks: list[Any]) -> list[dict[str, Any]]:
    """The arguments of the cases that parametrize marks make."""
    cases: list[dict[str, Any]] = [{}]
    for mark in marks:
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            several = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
            rows = []
            for value in values:
                row = (value,) if len(several) == 1 else value
                row = value.values if type(value).__name__ == "ParameterSet" else row
                rows.append(dict(zip(several, row)))  # noqa: B905
            cases = [{**case, **row} for case in cases for row in rows]
    return cases
