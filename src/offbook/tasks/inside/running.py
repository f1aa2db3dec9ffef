"""One round: the tree as it has it, then pytest, or calls."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NoReturn

from offbook.tasks.inside.apart import run_apart, run_calls
from offbook.tasks.inside.blank import Blanks
from offbook.tasks.inside.report import Pipe, Recorder
from offbook.tasks.inside.watch import Tracer, Watcher

OFF = (
    *("cacheprovider", "xdist", "xdist.looponfail", "pytest_cov", "randomly", "random_order", "rerunfailures", "sugar"),
    *("stepwise", "pastebin", "pytest-reverse", "repeat", "html", "metadata", "instafail", "testmon", "profiling"),
)


def run_round(pipe: Pipe, order: dict[str, Any], this: dict[str, Any], is_narrow: bool = False) -> int:
    recorder = Recorder(order["max_tests"])
    begin(recorder, pipe, order, this, is_narrow)
    if this["apart"]:
        return run_apart(pipe, this)
    if this["calls"]:
        run_calls(pipe, this["calls"], this["per_test_s"], is_apart=False)
        return 0
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
    recorder.blanks = Blanks() if this["blank"] else None
    recorder.select(this["tests"], is_narrow)
    if limit_s := order.get("collect_s"):
        recorder.collecting = threading.Timer(limit_s, os._exit, [1])
        recorder.collecting.daemon = True
        recorder.collecting.start()
    if order["product"] and not this["calls"] and not this["apart"]:
        sys.addaudithook(Watcher(pipe, order["product"], this["files"]).hook)


def run_pytest(options: list[str], files: list[str], plugins: list[object]) -> int:
    import pytest

    off = [argument for name in OFF for argument in ("-p", f"no:{name}")]
    pytest.hookimpl(tryfirst=True)(Recorder.pytest_pycollect_makeitem)
    return int(pytest.main([*off, *options, "--", *files], plugins=plugins))


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
